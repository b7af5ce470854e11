"""Apply plane rotations: one operation, `adptnet::plane_rotation`, for large tensors on a CPU."""

from typing import Any

import torch
from torch import Tensor

from .. import _gpu
from .._torch_state import has_dispatch_mode, is_transformed, separate_views
from . import cpu, reference

__all__ = ["rotate"]

MIN_ELEMENTS = 1 << 16  # for smaller tensors a few torch operations are faster than the dispatch of this one


def rotate(
    x: Tensor,
    key: Tensor,
    offset: Tensor,
    skew_coefficient: Tensor,
    key_coefficient: Tensor,
    offset_coefficient: Tensor,
) -> Tensor:
    """Return the rotated vectors.

    Args:
        x, key, offset, skew_coefficient, key_coefficient, offset_coefficient: As in `reference.rotate`.
    """
    if not _is_supported(x, key, offset, skew_coefficient, key_coefficient, offset_coefficient):
        return reference.rotate(x, key, offset, skew_coefficient, key_coefficient, offset_coefficient)
    rotated: Tensor = _rotate(x, key, offset, skew_coefficient, key_coefficient, offset_coefficient)
    return rotated


def _is_supported(x: Tensor, *others: Tensor) -> bool:
    column = (*x.shape[:-1], 1)
    return (
        # Counters and compilers should see the single operations, and an exported batch has no size yet.
        not has_dispatch_mode()
        and 0 < x.numel() >= MIN_ELEMENTS
        and _gpu.is_cpu(x.device)
        and all(t.dtype == x.dtype and t.device == x.device for t in others)
        and all(t.shape == x.shape for t in others[:2])
        and all(t.shape == column for t in others[2:])
        and not is_transformed(x, *others)
        and cpu.has_kernel(x.dtype)
    )


@torch.library.custom_op("adptnet::plane_rotation", mutates_args=(), device_types=["cpu"])
def _rotate(
    x: Tensor,
    key: Tensor,
    offset: Tensor,
    skew_coefficient: Tensor,
    key_coefficient: Tensor,
    offset_coefficient: Tensor,
) -> Tensor:
    return cpu.forward(x, key, offset, skew_coefficient, key_coefficient, offset_coefficient)


@torch.library.custom_op("adptnet::plane_rotation_backward", mutates_args=(), device_types=["cpu"])
def _rotate_backward(
    gradient: Tensor,
    x: Tensor,
    key: Tensor,
    offset: Tensor,
    skew_coefficient: Tensor,
    key_coefficient: Tensor,
    offset_coefficient: Tensor,
) -> list[Tensor]:
    return cpu.backward(gradient, x, key, offset, skew_coefficient, key_coefficient, offset_coefficient)


@_rotate.register_fake
def _(x: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_rotate_backward.register_fake
def _(gradient: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs]


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    inputs, needed = ctx.saved_tensors, ctx.needs_input_grad
    if torch.is_grad_enabled():  # the kernel does not support double backward
        inputs = separate_views(inputs)
        required = [t for t, need in zip(inputs, needed, strict=True) if need]
        recomputed = reference.rotate(*inputs)
        found = iter(torch.autograd.grad(recomputed, required, gradient, create_graph=True, materialize_grads=True))
        return tuple(next(found) if need else None for need in needed)
    gradients = _rotate_backward(gradient, *inputs)
    return tuple(t if need else None for t, need in zip(gradients, needed, strict=True))


_rotate.register_autograd(_differentiate, setup_context=_setup_context)
