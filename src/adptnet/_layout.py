"""Names, shapes and dtypes of a module's tensors, without allocating memory for them.

The module is built on the meta device. torch's own meta kernels are Python and import sympy at their first call, which
takes 80 MB and seconds. The few functions that initialize weights are therefore replaced here by their result shapes.
Any other function runs as usual.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["lay_out"]

# fmt: off
_ELEMENTWISE = {
    "abs", "add", "and", "bitwise_and", "clamp", "cos", "cumsum", "div", "eq", "exp", "expm1", "floor", "ge", "gt",
    "invert", "le", "log", "log1p", "logical_not", "logit", "lt", "masked_fill", "mul", "ne", "neg", "pow", "radd",
    "rdiv", "reciprocal", "rmul", "rpow", "rsub", "rtruediv", "sigmoid", "sin", "softplus", "sqrt", "square", "sub",
    "tanh", "truediv", "where",
}
# fmt: on
_RESHAPES = {"resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"}
_PREDICATES = {"eq", "ge", "gt", "le", "logical_not", "lt", "ne"}


def lay_out(build: Callable[[], nn.Module], most_calls: float = math.inf) -> dict[str, Tensor]:
    """Return the state dict, on the meta device, of the module that `build` makes. No random numbers are drawn.

    Args:
        build: Builds the module with `device="meta"`.
        most_calls: Largest allowed number of calls of torch functions.

    Raises:
        RuntimeError: More calls than `most_calls`, or sizes beyond the range of torch.
    """
    with torch.device("meta"), _ByShape(most_calls):
        return build().state_dict()


class _ByShape(TorchFunctionMode):
    """Function mode that replaces calls on the meta device by an empty tensor of the result's shape."""

    def __init__(self, most_calls: float):
        super().__init__()
        self._left = most_calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the module has too many parts")
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = args[0] if args else kwargs.get("tensor")  # as torch.nn.init passes it
        if name.endswith("_") and not name.endswith("__") and isinstance(first, Tensor) and name not in _RESHAPES:
            return first  # an in-place initialization does not change the shape
        name = name.strip("_")
        tensors = [value for value in args if isinstance(value, Tensor)]
        if (name in _ELEMENTWISE or name.endswith("_like")) and tensors and all(tensor.is_meta for tensor in tensors):
            reversed_sizes = itertools.zip_longest(*(tensor.shape[::-1] for tensor in tensors), fillvalue=1)
            shape = [max(sizes) if min(sizes) else 0 for sizes in reversed_sizes][::-1]  # broadcast
            dtype = torch.bool if name in _PREDICATES else tensors[-1].dtype
            return torch.empty(shape, dtype=dtype, device="meta")
        if func is torch.linspace:
            return _vector(kwargs.get("steps", args[2] if len(args) > 2 else 0), kwargs)
        if func in (torch.rand, torch.randn):
            return torch.empty(*args, dtype=kwargs.get("dtype"), device="meta")
        if func is torch.randperm:
            return _vector(first, {"dtype": torch.int64})
        if func is torch.arange and all(isinstance(value, int) for value in args):
            return _vector(len(range(*args)), {"dtype": torch.int64, **kwargs})
        if func is torch.randint:
            return torch.empty(args[-1], dtype=torch.int64, device="meta")
        if func is Tensor.repeat and len(args) > args[0].dim() and all(isinstance(value, int) for value in args[1:]):
            sizes = (1,) * (len(args) - 1 - args[0].dim()) + tuple(args[0].shape)
            return args[0].new_empty([size * times for size, times in zip(sizes, args[1:], strict=True)])
        return func(*args, **kwargs)


def _vector(size: Any, kwargs: dict[str, Any]) -> Tensor:
    return torch.empty(int(size), dtype=kwargs.get("dtype"), device="meta")
