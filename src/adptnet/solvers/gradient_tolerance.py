"""The tolerance and the convergence test of g, the gradient with respect to the states of a solve."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..ops.tolerance import Tolerance, largest, recent_scale, running_maximum_
from .convergence_test import Contraction, Drift, allowed_drift, rounding_excess, sum_one_sign
from .rounding import split_batch
from .system import System
from .time_axis import LaterSteps, TimeAxis, mark_before_reset

__all__ = ["GradientProgress", "GradientTolerance", "largest_ratio"]


class GradientTolerance:
    """Tolerance of g in a block, strict enough for the gradients that are computed from g.

    The gradient of a parameter is a sum over time of g times the state or the input of a step. An error of g at a step
    with a large state is multiplied by that state, so g_t times the size of the state is compared with its largest
    value in this step and the later ones. The gradient of an initial state is J'g of one step alone, which is compared
    with g of that step.

    Args:
        rtol: The relative tolerance.
        part: The system of the block, or of the chunk of this process.
        entering: (batch, time, n), the states that enter its steps.
        has_initial_gradient: Whether the initial state or the reset state requires a gradient.
    """

    UNIFORM = 16.0  # if the size of the states varies by less, the recent scale of g is strict enough

    def __init__(self, rtol: float, part: System, entering: Tensor, has_initial_gradient: bool):
        self.rtol, self.axis, self.reset = rtol, part.axis, part.reset
        # (batch, time, 1), the size of the state and the input of each step; None if it is about the same for all
        self.magnitude: Tensor | None = torch.maximum(largest(entering), largest(part.step_inputs[0])).unsqueeze(-1)
        self.magnitude.clamp_(min=torch.finfo(entering.dtype).tiny)
        needed = self.magnitude.new_tensor(float(has_initial_gradient))
        bounds = self.axis.maximum(torch.stack((self.magnitude.amax(), -self.magnitude.amin(), needed)))
        if bool(bounds[0] <= self.UNIFORM * -bounds[1]):
            self.magnitude = None
        self.starts: Tensor | None = None  # (batch, time, 1) bool: whether an initial or reset state enters the step
        if bool(bounds[2]):
            starts = torch.zeros_like(entering[..., :1], dtype=torch.bool)
            self.starts = starts if part.reset is None else part.reset.unsqueeze(-1).clone()
            if self.axis.rank == 0:
                self.starts[:, 0] = True

    def weigh(self, g: Tensor) -> Tensor | None:
        """Return the largest weighted |g| of this process, (batch, n); None if the weights are uniform.

        Args:
            g: (batch, time, n).
        """
        if self.magnitude is None:
            return None
        return torch.cat([g[at].abs().mul_(self.magnitude[at]).amax(1) for at in split_batch(g)])

    def allowed(self, g: Tensor, later: LaterSteps | None, to: Tensor) -> Tensor:
        """Return the tolerance of the residual of the leading steps that have not converged.

        Args:
            g: (batch, time, n).
            later: What is known of the steps of later processes; None if there is one process.
            to: (batch, left, n), filled with the tolerances and returned: a new tensor in each iteration, between
                smaller ones, would leave gaps in memory.
        """
        least, cut, left = torch.finfo(g.dtype).tiny, mark_before_reset(self.reset), to.shape[1]
        for at in split_batch(g):
            reset, after = None if cut is None else cut[at], None if later is None else later.scale[at]
            allowed = recent_scale(g[at], reset, after, reverse=True).mul_(self.rtol).add_(least)[:, :left]
            if self.magnitude is not None:
                weighted = running_maximum_(g[at].abs().mul_(self.magnitude[at]), reverse=True)[:, :left]
                if later is not None and later.weighted is not None:
                    weighted = torch.maximum(weighted, later.weighted[at].unsqueeze(1))
                weighted.div_(self.magnitude[at, :left]).mul_(self.rtol).add_(least)
                torch.minimum(allowed, weighted, out=allowed)
            if self.starts is not None:
                alone = g[at, :left].abs().mul_(self.rtol).add_(least)
                allowed = torch.where(self.starts[at, :left], torch.minimum(allowed, alone), allowed)
            to[at] = allowed
        return to

    def find_cancelling(self, g: Tensor, size: Tensor, suspected: Tensor) -> tuple[Tensor, Tensor]:
        """Return the steps that are within tolerance as a whole, as all after them are, in suspected sequences.

        Args:
            g: (batch, time, n).
            size: (batch, left), the largest residual of each step.
            suspected: (batch, left) bool, whether the residual of a step may be a rounding error.

        Returns:
            (batch, left) bool, False for sequences without a suspected step; and (batch, left, 1), the residual allowed
            relative to the largest entry of the step.
        """
        entries = largest(g)
        entries[:, :-1] = torch.maximum(entries[:, :-1], entries[:, 1:])
        whole = entries[:, : size.shape[1]].mul_(self.rtol).add_(torch.finfo(g.dtype).tiny)
        settled = (size <= whole).flip(1).cumprod(1).flip(1).bool()
        return settled & (settled & suspected).any(1, keepdim=True), whole.unsqueeze(-1)


class GradientProgress:
    """Convergence test of g. Its tensors are (batch, remaining steps), from the last step to the first.

    Args:
        rtol: The relative tolerance of g.
        axis: The time axis.
        g: (batch, time, n), of this process.
    """

    def __init__(self, rtol: float, axis: TimeAxis, g: Tensor):
        self.steps, self.axis = axis.total(g.shape[1]), axis
        self.slack = allowed_drift(Tolerance(0.0, rtol), self.steps, g.dtype)
        self.rounding = rounding_excess(Tolerance(0.0, rtol), g.dtype)
        self.drift = Drift(self.slack, self.rounding, g)
        self.contraction: Contraction | None = None
        self.is_rate_known = False

    def mark_stagnating(self, excess: Tensor) -> Tensor:
        """Return whether the residual of each step may be a rounding error, (batch, remaining steps).

        Args:
            excess: The residual of each step, in tolerances.
        """
        if self.contraction is None:
            return torch.zeros_like(excess, dtype=torch.bool)
        return self.contraction.mark_stagnating(excess)

    def update(self, excess: Tensor) -> None:
        """Update the rate of convergence.

        Args:
            excess: The residual of each step, in tolerances.
        """
        if self.contraction is None:
            self.contraction = Contraction(excess, self.rounding)
        else:
            self.contraction.update(excess)
            self.is_rate_known = True

    def error(self, excess: Tensor, move: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the estimated error of each step, (batch, remaining steps); infinity if its residual is too large.

        Args:
            excess: The residual of each step, in tolerances.
            move: The change of each step in the next iteration, in tolerances.
            rows: The sequences that they belong to; None for all.
        """
        assert self.contraction is not None
        error = self.contraction.part(rows, 0).error(move, self.steps)
        return torch.where(excess <= (1 if self.is_rate_known else self.rounding), error, torch.inf)

    def sum_one_sign(self, residual: Tensor, allowed: Tensor, excess: Tensor) -> Tensor | None:
        """Return `sum_one_sign` with time running backwards, (batch, remaining steps); None if it is not needed.

        Args:
            residual, allowed: (batch, remaining steps, n), in the order of time.
            excess: (batch, remaining steps), in the order of time.
        """
        if not self.axis.is_split and bool(
            (excess.clamp(max=1).sum(1) + self.drift.before[:, 0] <= self.drift.limit).all()
        ):
            return None
        parts = (sum_one_sign(residual[at].flip(1), allowed[at].flip(1), self.rounding) for at in split_batch(residual))
        return torch.cat(list(parts))

    def count_not_drifting(
        self, count: int, excess: Tensor, move: Tensor, one_sign: Tensor | None, measure: Callable[[], Tensor]
    ) -> int:
        """Return how many of the converged steps, from the last, have no errors that may add up in any sequence.

        Args:
            count: The number of converged steps, in all processes.
            excess: (batch, remaining steps), the residual of each step, in tolerances.
            move: (batch, remaining steps), the change of each step in the next iteration, in tolerances.
            one_sign: From `sum_one_sign`.
            measure: Measures the rate of convergence of each sequence.
        """
        if not count or (self.axis.is_split and count < self.steps):
            return 0
        for is_measured in (False, True):
            bound = self.drift.bound(excess, move, self.steps, self.axis, one_sign)
            fits = (bound <= self.drift.limit).all(0)
            fits = fits if self.axis.is_split else fits[:count]
            if bool(fits.all()):
                return count
            if not is_measured and bool(self.drift.rate.isnan().any()):
                self.drift.rate = measure().unsqueeze(1)
        return 0 if self.axis.is_split else int(fits.long().cumprod(0).sum())

    def drop(self, count: int) -> None:
        """Exclude steps that have converged in all sequences.

        Args:
            count: The number of steps, from the last.
        """
        assert self.contraction is not None
        if count:
            self.drift.drop(count)
        self.contraction = self.contraction.part(None, count)


def largest_ratio(values: Tensor, limits: Tensor) -> Tensor:
    """Return the largest |values| / limits of each step, (batch, time), computed for a few sequences at a time.

    Args:
        values, limits: (batch, time, n).
    """
    return torch.cat([(values[at] / limits[at]).abs_().amax(-1) for at in split_batch(values)])
