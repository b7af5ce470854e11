"""The tolerance of a parallel solve: how large a residual each channel of each step may have."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["HALF_LIFE", "Tolerance", "largest", "recent_scale", "remembered_scale"]

HALF_LIFE = 8  # steps after which a loud step counts half


class Tolerance(NamedTuple):
    """A step is right when |f(s_{t-1}) - s_t| is small in every channel, compared with its recent scale.

    The recent scale of a channel is its largest |f| since the last reset, where a step counts half after each
    `HALF_LIFE` steps: a channel that crosses zero keeps its scale, a quiet channel is not measured by a loud one, and
    quiet steps are not measured by loud ones before them. It is never more than the largest entry of f in this step.
    Later steps are not looked at, because an iterate may be arbitrary there.
    """

    absolute: float
    relative: float

    def allowed(self, values: Tensor, reset: Tensor | None = None, recent: Tensor | None = None) -> Tensor:
        """Return the largest residual of each channel, (batch, time, n).

        Args:
            values: (batch, time, n) f of the states that enter the steps.
            reset: (batch, time) bool.
            recent: (batch, n) recent scale before the first step.
        """
        scale = recent_scale(values, reset, recent)
        return torch.minimum(scale, largest(values).unsqueeze(-1)).mul_(self.relative).add_(self.floor(values.dtype))

    def allowed_for_rounding(
        self, step: Callable[[Tensor], Tensor], entering: Tensor, values: Tensor, reset: Tensor | None
    ) -> Tensor:
        """Return the residual that rounding alone may cause in each channel, (batch, time, n).

        It is how far f moves when the states that enter it move by their own rounding: in a channel that is small
        because large numbers cancel in it, more than the relative tolerance of that channel. It never exceeds the
        relative tolerance of the largest entry of the step.
        """
        rounding = torch.finfo(values.dtype).eps
        generator = torch.Generator("cpu").manual_seed(0)
        signs = torch.randint(0, 2, entering.shape, generator=generator, device="cpu").to(entering)
        moved = (step(entering * (1 + rounding * (2 * signs - 1))) - values).abs()
        size = torch.maximum(largest(entering), largest(values)).unsqueeze(-1)
        return torch.minimum(recent_scale(8 * moved, reset), self.relative * size)

    def floor(self, dtype: torch.dtype) -> float:
        """Return what is allowed at any scale: the absolute tolerance, but at least the smallest normal number."""
        return max(self.absolute, torch.finfo(dtype).tiny)


def largest(values: Tensor) -> Tensor:
    """Return the largest absolute entry of each state, over the last dimension."""
    return values.abs().amax(-1) if values.shape[-1] else values.new_zeros(values.shape[:-1])


def recent_scale(values: Tensor, reset: Tensor | None = None, recent: Tensor | None = None) -> Tensor:
    """Return max |values| over the steps since the last reset, halved every `HALF_LIFE` steps: (batch, time, n).

    Computed as a running maximum of logarithms to which the time is added, and the number of resets so far times more
    than the range of floating point.
    """
    steps = values.shape[1]
    if not steps:
        return values.abs()
    dtype = torch.float64 if reset is not None and steps > 2048 else values.dtype
    shift = torch.arange(steps, dtype=dtype, device=values.device).div_(HALF_LIFE).unsqueeze(-1)
    if reset is not None:
        span = 300 if values.dtype == torch.float32 else 2200
        shift = shift + span * reset.cumsum(1, dtype=dtype).unsqueeze(-1)
    keys = values.abs().to(dtype).log2_().add_(shift)
    if recent is not None:
        before = recent.to(dtype).log2() - 1 / HALF_LIFE
        keys[:, 0] = torch.maximum(keys[:, 0], before)  # below anything that follows a reset
    return keys.cummax(1).values.sub_(shift).exp2_().to(values.dtype)


def remembered_scale(values: Tensor, reset: Tensor | None = None, recent: Tensor | None = None) -> Tensor:
    """Return the recent scale after the last of `values`, (batch, n), for the steps that follow."""
    window = 16 * HALF_LIFE  # beyond, a step counts for less than 1/65536
    first = max(0, values.shape[1] - window)
    last = None if reset is None else reset[:, first:]
    if first:
        recent = None
    if not values.shape[1]:
        return values.new_zeros(values.shape[0], values.shape[2]) if recent is None else recent
    return recent_scale(values[:, first:], last, recent)[:, -1]
