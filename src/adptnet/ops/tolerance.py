"""The tolerance of a parallel solve: the largest residual allowed in each channel of each step."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["HALF_LIFE", "Tolerance", "largest", "recent_scale", "remembered_scale", "running_maximum_"]

HALF_LIFE = 8  # steps after which the weight of a step halves
MAX_INDEXED = 2**18  # elements of a running maximum that are computed at a time


class Tolerance(NamedTuple):
    """Absolute and relative tolerance: a step has converged if |f(s_{t-1}) - s_t| is small relative to a recent scale.

    The recent scale of a channel is the largest |f| since the last reset, where the weight of a step halves every
    `HALF_LIFE` steps. So a channel that crosses zero keeps its scale, a small channel is not compared with a large one,
    and small steps are not compared with large ones long before them. The scale is at most the largest entry of f in
    this step. Later steps are not considered, because an iterate may be arbitrary there.
    """

    absolute: float
    relative: float

    def allowed(self, values: Tensor, reset: Tensor | None = None, recent: Tensor | None = None) -> Tensor:
        """Return the largest residual allowed in each channel, (batch, time, n).

        Args:
            values: (batch, time, n), f at the states before the steps.
            reset: (batch, time) bool.
            recent: (batch, n), the recent scale before the first step.
        """
        scale = recent_scale(values, reset, recent)
        return torch.minimum(scale, largest(values).unsqueeze(-1)).mul_(self.relative).add_(self.floor(values.dtype))

    def floor(self, dtype: torch.dtype) -> float:
        """Return the residual allowed at any scale: the absolute tolerance, but at least the smallest normal number.

        Args:
            dtype: The dtype of the states.
        """
        return max(self.absolute, torch.finfo(dtype).tiny)


def largest(values: Tensor) -> Tensor:
    """Return the largest absolute entry over the last dimension.

    Args:
        values: (..., n).
    """
    if not values.shape[-1]:
        return values.new_zeros(values.shape[:-1])
    return torch.maximum(values.amax(-1), -values.amin(-1))  # without a copy of the values


def running_maximum_(values: Tensor, *, reverse: bool = False) -> Tensor:
    """Replace `values` by their running maximum over time, and return them.

    torch.cummax also returns indices, which take twice the memory of float32 values, so it runs on a few sequences at a
    time.

    Args:
        values: (batch, time, n), without a graph.
        reverse: From the last step to the first.
    """

    def accumulate(part: Tensor) -> Tensor:
        return part.flip(1).cummax(1).values.flip(1) if reverse else part.cummax(1).values

    if torch.compiler.is_compiling():
        return accumulate(values)
    for part in values.split(max(1, MAX_INDEXED // max(1, values[:1].numel()))):
        part.copy_(accumulate(part))
    return values


def recent_scale(
    values: Tensor,
    reset: Tensor | None = None,
    recent: Tensor | None = None,
    *,
    reverse: bool = False,
    half_life: float = HALF_LIFE,
) -> Tensor:
    """Return max |values| over the steps since the last reset, halved every `half_life` steps, (batch, time, n).

    Computed as a running maximum of logarithms, shifted by the time, and by more than the range of floating point for
    each reset so far.

    Args:
        values: (batch, time, n).
        reset: (batch, time) bool.
        recent: (batch, n), the recent scale before the first step.
        reverse: Let time run backwards: a reset then cuts off the later steps, and `recent` follows the last.
        half_life: The number of steps after which the weight of a step halves.
    """
    steps = values.shape[1]
    if not steps:
        return values.abs()
    dtype = torch.float64 if reset is not None and steps > 2048 else values.dtype
    shift = torch.arange(steps, dtype=dtype, device=values.device).div_(half_life).unsqueeze(-1)
    if reset is not None:
        span = 300 if values.dtype == torch.float32 else 2200
        marks = reset.flip(1) if reverse else reset
        shift = shift + span * marks.cumsum(1, dtype=dtype).unsqueeze(-1)
    if reverse:
        shift = shift.flip(-2)
    keys = values.abs().to(dtype).log2_().add_(shift)
    if recent is not None:
        before = recent.to(dtype).log2() - 1 / half_life
        first = -1 if reverse else 0
        keys[:, first] = torch.maximum(keys[:, first], before)  # smaller than any key after a reset
    return running_maximum_(keys, reverse=reverse).sub_(shift).exp2_().to(values.dtype)


def remembered_scale(values: Tensor, reset: Tensor | None = None, recent: Tensor | None = None) -> Tensor:
    """Return the recent scale after the last step, (batch, n), for the steps that follow.

    Args:
        values, reset, recent: As in `recent_scale`.
    """
    window = 16 * HALF_LIFE  # earlier steps have a weight below 1/65536
    first = max(0, values.shape[1] - window)
    last = None if reset is None else reset[:, first:]
    if first:
        recent = None
    if not values.shape[1]:
        return values.new_zeros(values.shape[0], values.shape[2]) if recent is None else recent
    return recent_scale(values[:, first:], last, recent)[:, -1]
