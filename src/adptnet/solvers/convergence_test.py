"""The convergence test of the solvers and of the adjoint: a small residual, and a small estimated error."""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..ops.tolerance import Tolerance
from .rounding import random_signs
from .time_axis import TimeAxis

__all__ = ["Contraction", "Drift", "allowed_drift", "default_rtol", "measure_rate", "rounding_excess", "sum_one_sign"]


def default_rtol(dtype: torch.dtype) -> float:
    """Return the default relative tolerance: 2e-6 in float32, 9e-14 in float64.

    With it the rounding error of gradients is a few times that of back-propagation.

    Args:
        dtype: The dtype of the states.
    """
    return float(torch.finfo(dtype).eps ** (5 / 6))


def allowed_drift(tolerance: Tolerance, steps: int, dtype: torch.dtype) -> float:
    """Return the allowed error of a step, in tolerances: three, or the accumulated rounding error of all steps.

    Residuals of one sign add up along a long memory, so a small residual alone does not imply a small error.

    Args:
        tolerance: The tolerance of the residual.
        steps: The length of the sequence.
        dtype: The dtype of the states.
    """
    rounding = torch.finfo(dtype).eps
    return 3 * max(1.0, math.sqrt(steps) * rounding / max(tolerance.relative, rounding))


def rounding_excess(tolerance: Tolerance, dtype: torch.dtype) -> float:
    """Return the residual that rounding alone causes in an exact solution, in tolerances.

    Args:
        tolerance: The tolerance of the residual.
        dtype: The dtype of the states.
    """
    rounding = torch.finfo(dtype).eps
    return 2 * rounding / max(tolerance.relative, rounding)


class Contraction:
    """Estimate of the error of each step, from its change in the next iteration and the rate of convergence.

    If every iteration multiplies the error by θ, the error after the next iteration is θ / (1 - θ) times its change.
    The estimate is that, or the change itself if larger. It holds for every transition, whereas the change alone says
    nothing if the transition is far from the Jacobian. θ is the rate at which the residual falls. It is measured for
    each step over the steps up to it, down to the tolerance, or down to rounding if the first iterate was within
    tolerance. Below that, a fast θ is discarded once the residual rises, because only rounding is left. A slow θ is
    kept, because residuals of the size of rounding add up as well.

    "Excess" is a residual divided by its tolerance.

    Args:
        excess: (batch, time), of the first iterate.
        rounding: The excess of an exact solution.
    """

    SLOW = 0.9
    STAGNATING = 0.75
    SHARE = 1 / 16  # weight of the last iteration in the mean of ln θ: near rounding the residual falls in jumps

    def __init__(self, excess: Tensor, rounding: float):
        self.rounding = rounding
        self.now = _prefix_maximum(excess)
        self.rate = torch.zeros_like(self.now)  # 0: unknown
        self.sure = torch.zeros_like(self.now, dtype=torch.bool)  # whether the rate was measured above the tolerance

    def update(self, excess: Tensor) -> None:
        """Update the rates.

        Args:
            excess: (batch, time), of the next iterate.
        """
        following, above = _prefix_maximum(excess), self.now > 1
        last = torch.where(self.now.isfinite(), (following / self.now).clamp(max=1.0), 1.0)
        mean = torch.where(self.rate > 0, self.rate ** (1 - self.SHARE) * last**self.SHARE, last)
        self.rate = torch.where(above | (~self.sure & (self.now > self.rounding)), mean, self.rate)
        self.sure |= above
        forget = ~above & (following > self.now) & (~self.sure | (self.rate < self.SLOW))
        self.rate = torch.where(forget, 0.0, self.rate)
        self.now = following

    def mark_stagnating(self, excess: Tensor) -> Tensor:
        """Return whether the residual of each step is above rounding but has hardly fallen, (batch, time).

        Args:
            excess: (batch, time), of the next iterate.
        """
        return (excess > self.rounding) & (_prefix_maximum(excess) > self.STAGNATING * self.now)

    def error(self, move: Tensor, steps: int) -> Tensor:
        """Return the estimated error of each step, in the units of `move`.

        Args:
            move: (batch, leading steps), the change of each step in the next iteration.
            steps: The length of the sequence, which limits the rate.
        """
        rate = self.rate[:, : move.shape[1]].clamp(max=1 - 1 / max(2, steps))
        return move * (rate / (1 - rate)).clamp(min=1.0)

    def part(self, rows: Tensor | None, start: int) -> "Contraction":
        """Return the estimate of a part of the batch and of the time.

        Args:
            rows: Indices of the sequences; None for all.
            start: The first step.
        """
        left = copy.copy(self)
        for name in ("now", "rate", "sure"):
            every = getattr(self, name)[:, start:]
            setattr(left, name, every if rows is None else every.index_select(0, rows))
        return left


class Drift:
    """Upper bound of the error that small residuals may add up to, whatever the history of the iteration.

    `Contraction` measures the rate of the largest residual. An error component with a long memory has a small residual,
    so in a good initial guess, or beside a component that decays quickly, its rate is not seen. Two bounds do not
    depend on that: the sum of the residuals so far, which suffices if no step amplifies errors, and the largest change
    times θ / (1 - θ), where θ is the rate of `measure_rate`. In the sum, residuals of the size of rounding may cancel.
    θ costs a few evaluations of f, so it is only measured if the sum is too large.

    Args:
        allowed: The largest error allowed to a converged step, in tolerances.
        rounding: The excess of an exact solution.
        like: (batch, ...), determines batch, dtype and device.
    """

    MARGIN = 8  # the bound may exceed the allowed error by this factor, since it is seldom reached
    DROPPED = 0.25  # share of the bound for dropped steps, whose residuals count in full

    def __init__(self, allowed: float, rounding: float, like: Tensor):
        self.limit = self.MARGIN * allowed
        self.rounding = rounding
        self.sum = self.before = like.new_zeros(like.shape[0], 1)  # the sum so far; that of the dropped steps
        self.rate = torch.full_like(self.before, torch.nan)  # θ; NaN: not measured

    def bound(self, excess: Tensor, change: Tensor, steps: int, axis: TimeAxis, one_sign: Tensor | None) -> Tensor:
        """Return the bound of each of the leading steps, (batch, leading steps), in tolerances.

        Args:
            excess: (batch, leading steps), the residual.
            change: (batch, leading steps), the change in the next iteration, in tolerances.
            steps: The length of the sequence, which limits the rate.
            axis: The time axis. If it is split, only the bound of the last step is returned, (batch, 1).
            one_sign: From `sum_one_sign`; None to let no residuals cancel.
        """
        rate = self.rate.clamp(max=1 - 1 / max(2, steps))
        total, peak = excess.cumsum(1), _prefix_maximum(change)
        if one_sign is not None:
            total = torch.minimum(total, (excess - self.rounding).clamp(min=0).cumsum(1) + one_sign)
        if axis.is_split:
            total, peak = (part[:, -1:] if part.shape[1] else torch.zeros_like(self.before) for part in (total, peak))
            total, peak = axis.sum(total), axis.maximum(peak)
        self.sum = total + self.before
        return torch.where(rate.isnan(), self.sum, torch.minimum(self.sum, peak * rate / (1 - rate)))

    def drop(self, count: int) -> None:
        """Exclude the first `count` steps, whose residuals still count.

        Args:
            count: The number of steps, at least one.
        """
        self.before = self.sum[:, count - 1 : count]

    def select(self, rows: Tensor) -> "Drift":
        """Return the bound of some sequences.

        Args:
            rows: Indices of the sequences.
        """
        left = copy.copy(self)
        for name in ("sum", "before", "rate"):
            setattr(left, name, getattr(self, name).index_select(0, rows))
        return left


def sum_one_sign(residual: Tensor, allowed: Tensor, rounding: float) -> Tensor:
    """Return the largest sum of residuals of the size of rounding over consecutive steps up to each, (batch, time).

    Args:
        residual: (batch, time, n).
        allowed: (batch, time, n), the tolerances.
        rounding: The excess of an exact solution.
    """
    total = (residual / allowed).clamp_(-rounding, rounding).cumsum(1)
    most = total.clamp(min=0).cummax(1).values - total.clamp(max=0).cummin(1).values
    return most.amax(-1)


ITERATIONS = 8  # of a random error: components with a short memory then hardly contribute to the last rate
NEGLIGIBLE = 0.01  # a rate that is not measured more accurately


def measure_rate(
    advance: Callable[[Tensor], Tensor], scale: Tensor, maximum: Callable[[Tensor], Tensor], *, reverse: bool = False
) -> Tensor:
    """Return the rate at which the iteration contracts a random error, (batch,), relative to the scale of each channel.

    The error has one sign in each channel, so that it also has components with a long memory.

    Args:
        advance: Returns the error after the next iteration, from that before it. It is linear.
        scale: (batch, time, n), the size of the error; zero where there is none.
        maximum: Returns the maximum over all processes.
        reverse: Whether the recurrence runs backwards in time.
    """
    signs = random_signs(scale, 0, reverse=reverse) if scale.shape[1] else scale[0]
    of_channels = random_signs(scale[:, :1], 1)
    error, rates = scale * (1 + 0.5 * signs) * of_channels, []
    for _ in range(ITERATIONS):
        size = maximum(_relative_size(error, scale)).clamp(min=torch.finfo(scale.dtype).tiny)
        error = advance(error / size[:, None, None])
        rates.append(maximum(_relative_size(error, scale)).nan_to_num(torch.inf, torch.inf))
        if bool((rates[-1] <= NEGLIGIBLE).all()):
            return rates[-1]
    return torch.maximum(rates[-1], torch.stack(rates[1:]).log().mean(0).exp())


def _relative_size(error: Tensor, scale: Tensor) -> Tensor:
    """Return the largest |error| / scale of each sequence, (batch,), where the scale is not zero."""
    relative = torch.where(scale > 0, error.abs() / scale, 0.0)
    return relative.flatten(1).amax(1) if relative[0].numel() else relative.new_zeros(relative.shape[0])


def _prefix_maximum(excess: Tensor) -> Tensor:
    """Return the running maximum of the excess over time, (batch, time); infinity from the first NaN."""
    return excess.nan_to_num(torch.inf, torch.inf).cummax(1).values if excess.shape[1] else excess
