"""The convergence test of the solvers and of the adjoint: a small residual, and a small estimated error."""

import copy
import math

import torch
from torch import Tensor

from ..ops.tolerance import Tolerance

__all__ = ["Contraction", "allowed_drift", "default_rtol", "rounding_excess"]


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


def _prefix_maximum(excess: Tensor) -> Tensor:
    """Return the running maximum of the excess over time, (batch, time); infinity from the first NaN."""
    return excess.nan_to_num(torch.inf, torch.inf).cummax(1).values if excess.shape[1] else excess
