"""Modules that stay whole in a graph of `torch.fx`, as those of `torch.nn` do."""

from typing import Any

from torch import nn
from torch.fx import Proxy

from ..errors import IncompatibleError

__all__ = ["Proxy", "record_call"]


def record_call(module: nn.Module, x: Proxy, state: Any, run: dict[str, Any], **options: Any) -> Any:
    """Record the call `module(x, state, **run, **options)` in the graph that `x` belongs to.

    The tracer cannot look into the module: what it does depends on shapes, devices and dtypes.
    """
    tracer: Any = x.tracer
    if tracer.root is module:
        raise IncompatibleError(
            f"torch.fx cannot trace a {type(module).__name__} itself: what it does depends on shapes and dtypes. Trace "
            "the model that holds it, where it stays one node, or use torch.export.export(module, (x,))."
        )
    for name, value in options.items():
        if name in ("solver", "adjoint") and value is not None:
            raise IncompatibleError(
                f"a graph of torch.fx holds tensors and numbers, not {name}={value!r}. Give it to the layer instead: "
                f"ADPTNet(width, {name}=...)."
            )
    given = {name: value for name, value in (run | options).items() if value is not None}
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (x, state), given)
