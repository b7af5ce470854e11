"""Record modules as leaf nodes in graphs of `torch.fx`, like those of `torch.nn`."""

from typing import Any

from torch import nn
from torch.fx import Proxy

from ..errors import IncompatibleError

__all__ = ["Proxy", "record_call"]


def record_call(module: nn.Module, x: Proxy, state: Any, run: dict[str, Any], **options: Any) -> Any:
    """Record the call `module(x, state, **run, **options)` in the graph that `x` belongs to.

    The tracer cannot trace into the module, whose operations depend on shapes, devices and dtypes.

    Args:
        module: A submodule of the traced model.
        x: The proxy of its input.
        state: Its initial state, or None.
        run: Keyword arguments of the call; None is left out.
        options: More keyword arguments of the call.

    Raises:
        IncompatibleError: The module is itself the root of the trace, or a solver or an adjoint is passed.
    """
    tracer: Any = x.tracer
    if tracer.root is module:
        raise IncompatibleError(
            f"torch.fx cannot trace a {type(module).__name__} itself, whose operations depend on shapes and dtypes. "
            "Trace the model that contains it, where it is one node, or use torch.export.export(module, (x,))."
        )
    for name, value in options.items():
        if name in ("solver", "adjoint") and value is not None:
            raise IncompatibleError(
                f"a graph of torch.fx holds tensors and numbers, not {name}={value!r}. Pass it to the layer instead: "
                f"ADPTNet(width, {name}=...)."
            )
    arguments = {name: value for name, value in (run | options).items() if value is not None}
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (x, state), arguments)
