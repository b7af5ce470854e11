"""What a kernel must know of torch: whether it looks into every operation, and what its compiler may take as given."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, _ops, nn
from torch.autograd import forward_ad

__all__ = ["apart", "constant_when_compiled", "plain", "transformed", "watched"]

_TYPES = {Tensor, nn.Parameter, type(None)}
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_of_batches = torch._C._functorch.is_legacy_batchedtensor
Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_compiled(function: Function) -> Function:
    """What `function` returns is a constant of a compiled program.

    This is all that `torch.compiler.assume_constant_result` does, which would first import the compiler: as long again
    as torch itself.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def apart(tensors: Iterable[Any]) -> list[Any]:
    """Views, each with a place of its own in the graph.

    A derivative with respect to one of them is along it alone, not along what it was made from, which may be another.
    """
    return [None if t is None else t.view_as(t) for t in tensors]


def transformed(*tensors: Tensor | None) -> bool:
    """Whether a tensor is inside vmap, jvp or another transform, or carries a forward-mode derivative."""
    return not torch.compiler.is_compiling() and _transformed(tensors)


def _transformed(tensors: Sequence[Tensor | None]) -> bool:
    forward_mode = forward_ad._current_level >= 0
    for t in tensors:
        if t is not None and (
            _wrapped(t)
            or _of_batches(t)  # of gradients, in torch.autograd
            or (forward_mode and forward_ad.unpack_dual(t).tangent is not None)
        ):
            return True
    return False


def watched() -> bool:
    """Whether a dispatch mode is to see every operation: one that counts them, or that has no numbers."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return _ops._len_torch_dispatch_stack_pre_dispatch() > 0  # type: ignore[no-any-return]


def plain(*tensors: Tensor | None) -> bool:
    """Whether nobody but autograd need know what is done with these tensors: no compiler, mode, tracer or subclass."""
    if watched() or torch._C._get_tracing_state() is not None or torch._C._len_torch_function_stack() > 0:
        return False
    if torch._C._are_functorch_transforms_active() or _transformed(tensors):
        return False
    return {*map(type, tensors)} <= _TYPES
