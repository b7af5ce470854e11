"""The diagonal linear recurrence x_t = a_t x_{t-1} + b_t.

Torch sees one operation, `adptnet::linear_scan`, to differentiate, compile and export. Without a kernel, the PyTorch
implementation in `chunked.py` runs.
"""

from typing import Any

import torch
from torch import Tensor

from .. import _gpu
from .._torch_state import constant_when_compiled, is_transformed, separate_views
from . import chunked, cpu

__all__ = ["linear_scan"]


@constant_when_compiled
def _has_kernel(dtype: torch.dtype, device: str) -> bool:
    if _gpu.is_cpu(torch.device(device)):
        return cpu.has_kernel(dtype)
    return _gpu.is_available(device) and dtype in cpu.SCALARS


def linear_scan(
    transition: Tensor,
    offset: Tensor,
    initial: Tensor | None = None,
    *,
    reset: Tensor | None = None,
    reverse: bool = False,
    overwrite: bool = False,
) -> Tensor:
    """Return the states of a diagonal linear recurrence; see `reference.linear_scan`.

    Args:
        transition, offset, initial, reset, reverse: As in `reference.linear_scan`.
        overwrite: Allow the states to overwrite `offset`; not if a gradient is needed.
    """
    if not _is_supported(transition, offset, initial, reset):
        return chunked.linear_scan(
            transition, offset, initial, reset=reset, reverse=reverse, overwrite=overwrite and _has_no_overlap(offset)
        )
    if initial is not None:
        initial = initial.expand(*offset.shape[:-2], offset.shape[-1])
    if reset is not None:
        reset = reset.expand(offset.shape[:-1])
    if overwrite and _has_no_overlap(offset):
        _scan_over(transition, offset, initial, reset, reverse)
        return offset
    states: Tensor = _scan(transition, offset, initial, reset, reverse)
    return states


def _is_supported(transition: Tensor, offset: Tensor, initial: Tensor | None, reset: Tensor | None) -> bool:
    tensors = [transition, offset] + ([] if initial is None else [initial])
    return (
        all(t.device == offset.device and t.dtype == offset.dtype for t in tensors)
        and (reset is None or reset.device == offset.device)
        and transition.dim() <= offset.dim()
        and offset.numel() > 0
        and _has_kernel(offset.dtype, offset.device.type)
        and not is_transformed(*tensors, reset)
    )


def _has_no_overlap(offset: Tensor) -> bool:
    """Return whether no two entries share memory."""
    return all(stride or count <= 1 for stride, count in zip(offset.stride(), offset.shape, strict=True))


def _select_kernel(values: Tensor) -> Any:
    """Return the module with the kernel for the device of `values`, `cpu` or `triton`; both have the same functions."""
    if _gpu.is_cpu(values.device):
        return cpu
    from . import triton

    return triton


@torch.library.custom_op("adptnet::linear_scan", mutates_args=(), device_types=["cpu", "cuda"])
def _scan(transition: Tensor, offset: Tensor, initial: Tensor | None, reset: Tensor | None, reverse: bool) -> Tensor:
    states: Tensor = _select_kernel(offset).forward(transition, offset, initial, reset, reverse)
    return states


@torch.library.custom_op("adptnet::linear_scan_over", mutates_args=("offset",), device_types=["cpu", "cuda"])
def _scan_over(transition: Tensor, offset: Tensor, initial: Tensor | None, reset: Tensor | None, reverse: bool) -> None:
    _select_kernel(offset).forward(transition, offset, initial, reset, reverse, overwrite=True)


@torch.library.custom_op("adptnet::linear_scan_backward", mutates_args=(), device_types=["cpu", "cuda"])
def _scan_backward(
    gradient: Tensor,
    states: Tensor,
    transition: Tensor,
    initial: Tensor | None,
    reset: Tensor | None,
    reverse: bool,
    needs_transition_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = _select_kernel(gradient).backward(
        gradient, states, transition, initial, reset, reverse, needs_transition_grad=needs_transition_grad
    )
    return gradients


@_scan.register_fake
def _(transition: Tensor, offset: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(offset, memory_format=torch.contiguous_format)


@_scan_over.register_fake
def _(*_: Any) -> None:
    return None


@_scan_backward.register_fake
def _(gradient: Tensor, states: Tensor, transition: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_transition = transition.new_empty(transition.shape if others[-1] else 0)
    shape = gradient.shape
    return grad_transition, gradient.new_empty(shape), gradient.new_empty(*shape[:-2], shape[-1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    transition, offset, initial, reset, reverse = inputs
    ctx.save_for_backward(transition, offset, initial, reset, output)
    ctx.reverse = reverse


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    transition, offset, initial, reset, states = ctx.saved_tensors
    needed = ctx.needs_input_grad[:3]
    if torch.is_grad_enabled():  # the kernel does not support double backward
        inputs = separate_views((transition, offset, initial))
        required = [t for t, need in zip(inputs, needed, strict=True) if need]
        recomputed = chunked.linear_scan(*inputs, reset=reset, reverse=ctx.reverse)
        differentiable = iter(
            torch.autograd.grad(recomputed, required, gradient, create_graph=True, materialize_grads=True)
        )
        return *(next(differentiable) if need else None for need in needed), None, None
    gradients = _scan_backward(gradient, states, transition, initial, reset, ctx.reverse, needed[0])
    return *(g if need else None for g, need in zip(gradients, needed, strict=True)), None, None


_scan.register_autograd(_differentiate, setup_context=_setup_context)
