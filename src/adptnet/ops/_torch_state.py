"""The state of torch that decides whether a kernel may run: compilation, dispatch modes, transforms, autocast."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

__all__ = [
    "can_bypass_dispatcher",
    "constant_when_compiled",
    "has_dispatch_mode",
    "has_values",
    "is_autocast_enabled",
    "is_transformed",
    "separate_views",
    "without_autocast",
]

_TYPES = {Tensor, nn.Parameter}
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_batched = torch._C._functorch.is_legacy_batchedtensor  # batched gradients (is_grads_batched) of torch.autograd
_transforms = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_functions = torch._C._len_torch_function_stack
_tracer = torch._C._get_tracing_state
_included = torch._C._dispatch_tls_is_dispatch_key_included
_BEFORE_DISPATCH = torch._C.DispatchKey.PreDispatch
Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_compiled(function: Function) -> Function:
    """Mark a function whose result `torch.compile` may treat as a constant (decorator).

    `torch.compiler.assume_constant_result` does the same, but imports the compiler first, which takes as long as
    importing torch itself.

    Args:
        function: The function.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_autocast_enabled(device: torch.device) -> bool:
    """Return whether autocast is on for a device; False for devices without autocast, such as meta.

    Args:
        device: The device.
    """
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context with autocast off.

    It is a null context if autocast is off already: `torch.export` would record the other one as a nested program,
    which cannot be saved.

    Args:
        device: The device.
    """
    return torch.autocast(device.type, enabled=False) if is_autocast_enabled(device) else contextlib.nullcontext()


def has_values(tensor: Tensor) -> bool:
    """Return whether Python may read the values of a tensor: not while compiling or exporting, nor on meta.

    Args:
        tensor: The tensor.
    """
    return not (torch.compiler.is_compiling() or tensor.is_meta)


def separate_views(tensors: Iterable[Any]) -> list[Any]:
    """Return a view of each tensor, so that each is a separate node of the autograd graph.

    A gradient with respect to a view then excludes paths through other tensors that were computed from the same one.

    Args:
        tensors: Tensors or None, which stays None.
    """
    return [None if t is None else t.view_as(t) for t in tensors]


def is_transformed(*tensors: Tensor | None) -> bool:
    """Return whether a tensor is inside vmap, jvp or another transform, or carries a forward-mode tangent.

    Args:
        tensors: The tensors; None is ignored.
    """
    return not torch.compiler.is_compiling() and _is_transformed([t for t in tensors if t is not None])


def _is_transformed(tensors: Sequence[Tensor]) -> bool:
    if True in map(_wrapped, tensors) or True in map(_batched, tensors):
        return True
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def has_dispatch_mode() -> bool:
    """Return whether a compiler or a dispatch mode must see every operation, e.g. a FLOP counter or fake tensors."""
    return torch.compiler.is_compiling() or _modes() > 0 or _included(_BEFORE_DISPATCH)


def can_bypass_dispatcher(*tensors: Tensor) -> bool:
    """Return whether only autograd observes operations on these tensors: no compiler, mode, tracer or subclass.

    Args:
        tensors: The tensors.
    """
    if has_dispatch_mode() or _functions() > 0 or _transforms() or _tracer() is not None or _is_transformed(tensors):
        return False
    return _TYPES.issuperset(map(type, tensors))
