"""Vectors turned in planes: one operation, `adptnet::plane_rotation`, where there are many of them on a CPU."""

from typing import Any

import torch
from torch import Tensor

from .._torch_state import apart, transformed, watched
from . import cpu, reference

__all__ = ["turned"]

LEAST = 1 << 16  # numbers below which some operations of torch take less than one call of ours


def turned(x: Tensor, key: Tensor, offset: Tensor, turn: Tensor, shrink_key: Tensor, shrink_offset: Tensor) -> Tensor:
    """As `reference.turned`."""
    if not _covered(x, key, offset, turn, shrink_key, shrink_offset):
        return reference.turned(x, key, offset, turn, shrink_key, shrink_offset)
    found: Tensor = _turned(x, key, offset, turn, shrink_key, shrink_offset)
    return found


def _covered(x: Tensor, *others: Tensor) -> bool:
    column = (*x.shape[:-1], 1)
    return (
        not watched()  # what counts operations, or fuses them, is to see them; an exported batch has no size yet
        and 0 < x.numel() >= LEAST
        and x.device.type == "cpu"
        and all(t.dtype == x.dtype and t.device == x.device for t in others)
        and all(t.shape == x.shape for t in others[:2])
        and all(t.shape == column for t in others[2:])
        and not transformed(x, *others)
        and cpu.ready(x.dtype)
    )


@torch.library.custom_op("adptnet::plane_rotation", mutates_args=(), device_types=["cpu"])
def _turned(x: Tensor, key: Tensor, offset: Tensor, turn: Tensor, shrink_key: Tensor, shrink_offset: Tensor) -> Tensor:
    return cpu.forward(x, key, offset, turn, shrink_key, shrink_offset)


@torch.library.custom_op("adptnet::plane_rotation_backward", mutates_args=(), device_types=["cpu"])
def _turned_backward(
    gradient: Tensor,
    x: Tensor,
    key: Tensor,
    offset: Tensor,
    turn: Tensor,
    shrink_key: Tensor,
    shrink_offset: Tensor,
) -> list[Tensor]:
    return cpu.backward(gradient, x, key, offset, turn, shrink_key, shrink_offset)


@_turned.register_fake
def _(x: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_turned_backward.register_fake
def _(gradient: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs]


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    inputs, needed = ctx.saved_tensors, ctx.needs_input_grad
    if torch.is_grad_enabled():  # a derivative of a derivative, of which the kernel has one only
        inputs = apart(inputs)
        wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
        again = reference.turned(*inputs)
        every = iter(torch.autograd.grad(again, wanted, gradient, create_graph=True, materialize_grads=True))
        return tuple(next(every) if need else None for need in needed)
    found = _turned_backward(gradient, *inputs)
    return tuple(t if need else None for t, need in zip(found, needed, strict=True))


_turned.register_autograd(_differentiate, setup_context=_remember)
