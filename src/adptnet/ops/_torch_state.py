"""What a kernel must know of torch: whether it looks into every operation, and what its compiler may take as given."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

__all__ = [
    "apart",
    "autocast_enabled",
    "constant_when_compiled",
    "has_values",
    "plain",
    "transformed",
    "watched",
    "without_autocast",
]

_TYPES = {Tensor, nn.Parameter}
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_of_batches = torch._C._functorch.is_legacy_batchedtensor  # of gradients, in torch.autograd
_transforms = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_functions = torch._C._len_torch_function_stack
_tracer = torch._C._get_tracing_state
_included = torch._C._dispatch_tls_is_dispatch_key_included
_BEFORE_DISPATCH = torch._C.DispatchKey.PreDispatch
Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_compiled(function: Function) -> Function:
    """What `function` returns is a constant of a compiled program.

    This is all that `torch.compiler.assume_constant_result` does, which would first import the compiler: as long again
    as torch itself.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def autocast_enabled(device: torch.device) -> bool:
    """Return whether autocast is on for a device; False for devices without autocast, such as meta."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context with autocast off.

    It is a null context where autocast is off already: `torch.export` would record the other one as a nested program,
    which cannot be saved.
    """
    return torch.autocast(device.type, enabled=False) if autocast_enabled(device) else contextlib.nullcontext()


def has_values(tensor: Tensor) -> bool:
    """Return whether Python may read the values of a tensor: not while compiling or exporting, nor on meta."""
    return not (torch.compiler.is_compiling() or tensor.is_meta)


def apart(tensors: Iterable[Any]) -> list[Any]:
    """Views, each with a place of its own in the graph.

    A derivative with respect to one of them is along it alone, not along what it was made from, which may be another.
    """
    return [None if t is None else t.view_as(t) for t in tensors]


def transformed(*tensors: Tensor | None) -> bool:
    """Whether a tensor is inside vmap, jvp or another transform, or carries a forward-mode derivative."""
    return not torch.compiler.is_compiling() and _transformed([t for t in tensors if t is not None])


def _transformed(tensors: Sequence[Tensor]) -> bool:
    if True in map(_wrapped, tensors) or True in map(_of_batches, tensors):
        return True
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def watched() -> bool:
    """Whether a dispatch mode is to see every operation: one that counts them, or that has no numbers."""
    return torch.compiler.is_compiling() or _modes() > 0 or _included(_BEFORE_DISPATCH)


def plain(*tensors: Tensor) -> bool:
    """Whether nobody but autograd need know what is done with these tensors: no compiler, mode, tracer or subclass."""
    if watched() or _functions() > 0 or _transforms() or _tracer() is not None or _transformed(tensors):
        return False
    return _TYPES.issuperset(map(type, tensors))
