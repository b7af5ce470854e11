"""The diagonal linear recurrence x_t = a_t x_{t-1} + b_t.

`linear_scan` is what to call. Torch sees one operation, `adptnet::linear_scan`, to differentiate, compile and export;
where there is no kernel, the torch program of `chunked.py` runs.
"""

from typing import Any

import torch
from torch import Tensor

from .. import _gpu
from .._torch_state import apart, constant_when_compiled, transformed
from . import chunked, cpu

__all__ = ["linear_scan"]


def _has_kernel(dtype: torch.dtype, device: str) -> bool:
    return cpu.ready(dtype) if device == "cpu" else _gpu.ready(device) and dtype in cpu.NAMES


_ready = constant_when_compiled(_has_kernel)


def linear_scan(
    transition: Tensor,
    offset: Tensor,
    initial: Tensor | None = None,
    *,
    reset: Tensor | None = None,
    reverse: bool = False,
    overwrite: bool = False,
) -> Tensor:
    """As `reference.linear_scan`. With `overwrite` the states may take the place of `offset`; not for gradients."""
    if not _covered(transition, offset, initial, reset):
        return chunked.linear_scan(
            transition, offset, initial, reset=reset, reverse=reverse, overwrite=overwrite and _own_places(offset)
        )
    if initial is not None:
        initial = initial.expand(*offset.shape[:-2], offset.shape[-1])
    if reset is not None:
        reset = reset.expand(offset.shape[:-1])
    if overwrite and _own_places(offset):
        _scan_over(transition, offset, initial, reset, reverse)
        return offset
    states: Tensor = _scan(transition, offset, initial, reset, reverse)
    return states


def _covered(transition: Tensor, offset: Tensor, initial: Tensor | None, reset: Tensor | None) -> bool:
    given = [transition, offset] + ([] if initial is None else [initial])
    return (
        all(t.device == offset.device and t.dtype == offset.dtype for t in given)
        and (reset is None or reset.device == offset.device)
        and transition.dim() <= offset.dim()
        and offset.numel() > 0
        and _ready(offset.dtype, offset.device.type)
        and not transformed(*given, reset)
    )


def _own_places(offset: Tensor) -> bool:
    """Whether no two entries are the same memory."""
    return all(stride or count <= 1 for stride, count in zip(offset.stride(), offset.shape, strict=True))


def _kernel(values: Tensor) -> Any:
    """The module that runs there: both have the same functions."""
    if values.device.type == "cpu":
        return cpu
    from . import triton

    return triton


@torch.library.custom_op("adptnet::linear_scan", mutates_args=(), device_types=["cpu", "cuda"])
def _scan(transition: Tensor, offset: Tensor, initial: Tensor | None, reset: Tensor | None, reverse: bool) -> Tensor:
    states: Tensor = _kernel(offset).forward(transition, offset, initial, reset, reverse)
    return states


@torch.library.custom_op("adptnet::linear_scan_over", mutates_args=("offset",), device_types=["cpu", "cuda"])
def _scan_over(transition: Tensor, offset: Tensor, initial: Tensor | None, reset: Tensor | None, reverse: bool) -> None:
    _kernel(offset).forward(transition, offset, initial, reset, reverse, over=True)


@torch.library.custom_op("adptnet::linear_scan_backward", mutates_args=(), device_types=["cpu", "cuda"])
def _scan_backward(
    gradient: Tensor,
    states: Tensor,
    transition: Tensor,
    initial: Tensor | None,
    reset: Tensor | None,
    reverse: bool,
    to_transition: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = _kernel(gradient).backward(
        gradient, states, transition, initial, reset, reverse, to_transition=to_transition
    )
    return found


@_scan.register_fake
def _(transition: Tensor, offset: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(offset, memory_format=torch.contiguous_format)


@_scan_over.register_fake
def _(*_: Any) -> None:
    return None


@_scan_backward.register_fake
def _(gradient: Tensor, states: Tensor, transition: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    to_transition = transition.new_empty(transition.shape if others[-1] else 0)
    shape = gradient.shape
    return to_transition, gradient.new_empty(shape), gradient.new_empty(*shape[:-2], shape[-1])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    transition, offset, initial, reset, reverse = inputs
    ctx.save_for_backward(transition, offset, initial, reset, output)
    ctx.reverse = reverse


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    transition, offset, initial, reset, states = ctx.saved_tensors
    needed = ctx.needs_input_grad[:3]
    if torch.is_grad_enabled():  # a derivative of a derivative, of which the kernel has one only
        inputs = apart((transition, offset, initial))
        wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
        again = chunked.linear_scan(*inputs, reset=reset, reverse=ctx.reverse)
        found = iter(torch.autograd.grad(again, wanted, gradient, create_graph=True, materialize_grads=True))
        return *(next(found) if need else None for need in needed), None, None
    every = _scan_backward(gradient, states, transition, initial, reset, ctx.reverse, needed[0])
    return *(g if need else None for g, need in zip(every, needed, strict=True)), None, None


_scan.register_autograd(_differentiate, setup_context=_remember)
