"""The Newton loop of the parallel solvers: s ← scan(A, f(s) - A s). Converged steps and sequences are dropped."""

import abc
import copy
import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.tolerance import Tolerance, largest
from .system import System, chunk_length
from .transitions import Transition

__all__ = [
    "Contraction",
    "History",
    "Iterate",
    "IterationResult",
    "MeasureFunction",
    "MeasuredIterate",
    "Residual",
    "allowed_drift",
    "default_rtol",
    "fails_only_per_channel",
    "measure_residual",
    "newton_update",
    "rounding_excess",
    "solve",
]


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

    If every iteration multiplies the error by θ, the error of an iterate is 1 / (1 - θ) times the change of the next
    iteration. That holds for every transition, whereas the change alone says nothing if the transition is far from the
    Jacobian. θ is the rate at which the residual falls. It is measured for each step over the steps up to it, down to
    the tolerance, or down to rounding if the first iterate was within tolerance. Below that, a fast θ is discarded once
    the residual rises, because only rounding is left. A slow θ is kept, because residuals of the size of rounding add
    up as well.

    "Excess" is a residual divided by its tolerance.

    Args:
        excess: (batch, time), of the first iterate.
        rounding: The excess of an exact solution.
    """

    SLOW = 0.9
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


class History(NamedTuple):
    """Residual and number of converged steps after each iteration; row 0 is the guess.

    Attributes:
        residual: (iterations + 1, batch).
        converged_steps: (iterations + 1, batch).
    """

    residual: Tensor
    converged_steps: Tensor

    def iterations_for(self, steps: int) -> Tensor:
        """Return the iterations (batch,) after which the first `steps` steps had converged; -1 if they never had.

        No state depends on a later one, so one run gives the iteration count of every shorter sequence.

        Args:
            steps: The number of leading steps.
        """
        reached = self.converged_steps[1:] >= steps
        first = reached.to(torch.int64).argmax(0) + 1 if len(reached) else torch.zeros_like(self.converged_steps[0])
        return torch.where(reached.any(0), first, -1)


class IterationResult(NamedTuple):
    """Outcome of the loop. All fields but `states` and `history` are per sequence, (batch,)."""

    states: Tensor  # (batch, time, n)
    converged: Tensor  # bool
    finite: Tensor  # bool: False if an iterate had NaN or infinity
    rising: Tensor  # bool: whether the iteration was stopped because the residual kept rising
    iterations: Tensor
    residual: Tensor
    converged_steps: Tensor
    history: History


class Iterate(NamedTuple):
    """An iterate, evaluated."""

    states: Tensor  # (batch, time, n)
    entering: Tensor  # (batch, time, n), the states that enter the steps
    values: Tensor  # (batch, time, n), f of the entering states


# From the remaining system, the indices of its sequences, its first step and the entering states, to the transition
LinearizeFunction = Callable[[System, Tensor | None, int, Tensor], Transition]
# From the transition, the system, the iterate and the strength of the damping, to the next states
UpdateFunction = Callable[[Transition, System, Iterate, Tensor], Tensor]
# From the strength of the damping, the residual and the previous residual, to the next strength
AdaptFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def newton_update(transition: Transition, system: System, at: Iterate) -> Tensor:
    """Return the undamped update scan(A, f(s) - A s) (eq:deer_step), (batch, time, n).

    Args:
        transition: The linearization A.
        system: The equations.
        at: The current iterate. Its `values` are overwritten when gradients are disabled.
    """
    states, entering, values = at
    if transition.rounded:  # s + scan(A, f(s) - s) is equal, and exact where f(s) = s, whatever the rounding of A
        return states + transition.scan(values - states, torch.zeros_like(system.initial), system.reset)
    reset = None if system.reset is None else system.reset.unsqueeze(-1)  # A is 0 at a reset
    if torch.is_grad_enabled():
        product = transition.mv(entering)
        offset = values - (product if reset is None else product.masked_fill(reset, 0.0))
        return transition.scan(offset, system.initial, system.reset)
    length = chunk_length(values)
    for start in range(0, values.shape[1], length):
        times = slice(start, min(start + length, values.shape[1]))
        part = transition if values.shape[1] <= length else transition.part(None, times.start, times.stop)
        product = part.mv(entering[:, times])
        values[:, times] -= product if reset is None else product.masked_fill(reset[:, times], 0.0)
    return transition.scan(values, system.initial, system.reset)


def solve(
    system: System,
    guess: Tensor,
    linearize: LinearizeFunction,
    update: UpdateFunction,
    tolerance: Tolerance,
    *,
    max_iterations: int,
    patience: int | None,
    strength: Tensor,
    adapt: AdaptFunction,
    min_iterations: int = 1,
    measure: "MeasureFunction | None" = None,
) -> IterationResult:
    """Iterate until every sequence has converged, diverged, or reached the maximum number of iterations.

    Args:
        system: The equations.
        guess: (batch, time, n), the states to start from.
        linearize: Returns the transition of an iteration.
        update: Returns the next states.
        tolerance: The tolerance of a converged step. Convergence is tested on each new iterate.
        max_iterations: The maximum number of updates.
        patience: Stop iterating a sequence after this many rises of its residual in a row, if it is then above that of
            the guess; None to continue.
        strength: (batch,), the initial strength of the damping.
        adapt: Returns the strength of the next update, from the strength, the residual and the previous residual.
        min_iterations: The minimum number of updates.
        measure: Measures an iterate and computes the next one, in place of `linearize` and `update`.
    """

    def measure_by_steps(
        part: System, rows: Tensor | None, start: int, states: Tensor, tolerance: Tolerance
    ) -> MeasuredIterate:
        return _EvaluatedIterate(
            part, states, tolerance, lambda entering: linearize(part, rows, start, entering), update
        )

    measure = measure or measure_by_steps
    batch, steps, size = guess.shape
    device = guess.device
    kept: Tensor | None = None  # the states of dropped steps and sequences, allocated when the first are dropped
    finished = False
    progress = _Progress(batch, steps, system.lengths, guess)
    rows: Tensor | None = None  # the remaining sequences; None for all
    start = 0  # the first remaining step
    frozen = guess.new_zeros(batch)  # the largest residual among dropped steps
    slack = allowed_drift(tolerance, system.total_steps or steps, guess.dtype)
    if system.total_steps:  # a block: the errors of all blocks add up
        slack = max(slack * math.sqrt(steps / system.total_steps), rounding_excess(tolerance, guess.dtype))
    at = measure(system, rows, start, guess, tolerance)
    contraction = Contraction(at.excess, rounding_excess(tolerance, at.excess.dtype))
    del guess  # as large as the states, and the caller holds no reference either
    progress.record(rows, start, at.residual.amax(-1) if steps else frozen, at.within_tolerance, frozen)
    first = previous = progress.last_residual.clone()
    rises = torch.zeros(batch, dtype=torch.int64, device=device)
    for iteration in range(1, max_iterations + 1):
        if not batch or not steps:
            break
        part, current = at.system, at.next_states(strength)
        del at  # several times as large as the states
        at = measure(part, rows, start, current, tolerance)
        del current
        contraction.update(at.excess)
        error = contraction.error(at.next_change(), steps)
        right, near = at.within_tolerance, slice(0, error.shape[1])
        settling = right[:, near] & (error <= min(1.0, slack))
        right[:, near] &= error <= slack
        worst = at.residual.amax(-1)
        progress.count_iteration(rows)
        progress.record(rows, start, worst, right, frozen)
        finite = worst.isfinite()
        rises = torch.where(worst > previous, rises + 1, 0)
        given_up = (rises >= patience) & (worst > first) if patience is not None else torch.zeros_like(finite)
        strength = adapt(strength, worst, previous)
        previous = worst
        done = right.all(-1)
        stop = ((done | given_up) if iteration >= min_iterations else torch.zeros_like(done)) | ~finite
        progress.mark(rows, done, finite, given_up)
        if bool(done.any()):
            at.states = torch.where(done[:, None, None], at.refined_states(), at.states)
        if bool(stop.all()) and rows is None and not start:  # nothing was dropped before
            break
        if bool(stop.any()):
            index = torch.arange(batch, device=device) if rows is None else rows
            kept = at.states.new_empty(batch, steps, size) if kept is None else kept
            kept[index[stop], start:] = at.states[stop]
            keep = (~stop).nonzero().squeeze(-1)
            rows = index.index_select(0, keep)
            if not len(keep):
                finished = True
                break
            frozen, strength, previous, first, rises, settling, error = (
                every.index_select(0, keep) for every in (frozen, strength, previous, first, rises, settling, error)
            )
            at, contraction = at.part(keep, 0), contraction.part(keep, 0)
        # Leading steps that have converged in all remaining sequences are not computed again.
        settled = 0
        if iteration >= min_iterations:
            settled = _count_droppable_steps(settling, error, slack / max(1, steps))
        settled = min(settled, at.states.shape[1] - 1)
        if settled:
            at.states = torch.cat((at.refined_states()[:, :settled], at.states[:, settled:]), 1)
            kept = at.states.new_empty(batch, steps, size) if kept is None else kept
            kept[slice(None) if rows is None else rows, start : start + settled] = at.states[:, :settled]
            frozen = torch.maximum(frozen, at.residual[:, :settled].amax(-1))
            at, contraction = at.part(None, settled), contraction.part(None, settled)
            start += settled
    if kept is None:
        return progress.make_result(at.states)
    if not finished:
        kept[slice(None) if rows is None else rows, start:] = at.states
    return progress.make_result(kept)


def _count_droppable_steps(settling: Tensor, error: Tensor, share: float) -> int:
    """Return how many leading steps can be dropped.

    Later steps start from the last dropped state, so its error remains in them. The error may be `share` times the
    number of dropped steps. However often steps are dropped, these errors then add up to no more than the error that is
    allowed for all steps.
    """
    prefix = int(settling.all(0).long().cumprod(0).sum())
    allowed = share * torch.arange(1, prefix + 1, dtype=error.dtype, device=error.device)
    fits = (error[:, :prefix].amax(0) <= allowed).nonzero()
    return int(fits[-1]) + 1 if len(fits) else 0


class MeasuredIterate(abc.ABC):
    """Base class of iterates with their residuals, which compute the next iterate.

    Attributes:
        system: The equations.
        states: (batch, time, n).
        residual: (batch, time), the largest residual of each step.
        excess: (batch, time), the same, each channel divided by its tolerance.
        within_tolerance: (batch, time) bool, whether the excess is at most 1.
    """

    system: System
    states: Tensor
    residual: Tensor
    excess: Tensor
    within_tolerance: Tensor

    @abc.abstractmethod
    def next_states(self, strength: Tensor) -> Tensor:
        """Return the next iterate, (batch, time, n). The tensors of this one may be overwritten.

        Args:
            strength: (batch,), the strength of the damping.
        """

    @abc.abstractmethod
    def next_change(self) -> Tensor:
        """Return the size of the undamped change of the next iteration, in tolerances, (batch, leading steps).

        The leading steps are those before the first that is not within tolerance, in the sequence that has most.
        """

    @abc.abstractmethod
    def refined_states(self) -> Tensor:
        """Return the states plus the undamped change of the leading steps, after `next_change`, (batch, time, n).

        The convergence test has computed that change, so a last update of converged steps costs nothing.
        """

    @abc.abstractmethod
    def part(self, rows: Tensor | None, start: int) -> "MeasuredIterate":
        """Return a part of the batch and of the time.

        Args:
            rows: Indices of the sequences; None for all.
            start: The first step.
        """

    def part_system(self, rows: Tensor | None, start: int) -> System:
        """Return the system of a part of the batch and of the time.

        Args:
            rows: Indices of the sequences; None for all.
            start: The first step.
        """
        initial = self.states[:, start - 1] if start else self.system.initial
        recent = self.system.recent_scale_after(self.states, start)
        if rows is not None:
            initial = initial.index_select(0, rows)
            recent = None if recent is None else recent.index_select(0, rows)
        return dataclasses.replace(self.system.part(rows, start, initial), recent_scale=recent)


# From the remaining system, the indices of its sequences, its first step, the states and the tolerance
MeasureFunction = Callable[[System, Tensor | None, int, Tensor, Tolerance], MeasuredIterate]


class _EvaluatedIterate(MeasuredIterate):
    """An iterate that is measured by evaluating f, and updated by a transition."""

    def __init__(
        self,
        system: System,
        states: Tensor,
        tolerance: Tolerance,
        linearize: Callable[[Tensor], Transition],
        update: UpdateFunction,
    ):
        self.system, self.states, self.tolerance, self.update = system, states, tolerance, update
        self.entering, self.values, self.residual, self.excess, self.allowed = measure_residual(
            system, states, tolerance
        )
        self.within_tolerance = self.excess <= 1  # False for NaN
        self.linearize = linearize
        self._transition: Transition | None = None
        self._change: Tensor | None = None

    @property
    def transition(self) -> Transition:
        """The transition at this iterate, computed at first use."""
        if self._transition is None:
            self._transition = self.linearize(self.entering)
        return self._transition

    def next_states(self, strength: Tensor) -> Tensor:
        self._change = None
        return self.update(self.transition, self.system, Iterate(self.states, self.entering, self.values), strength)

    def next_change(self) -> Tensor:
        move = _leading_change(self.transition, self.system, self.states, self.values, self.within_tolerance)
        self._change = move
        size, valid = (move.abs() / self.allowed[:, : move.shape[1]]).amax(-1), self.system.valid
        return size if valid is None else torch.where(valid[:, : size.shape[1]], size, 0.0)

    def refined_states(self) -> Tensor:
        assert self._change is not None
        steps = self._change.shape[1]
        return torch.cat((self.states[:, :steps] + self._change, self.states[:, steps:]), 1)

    def part(self, rows: Tensor | None, start: int) -> "_EvaluatedIterate":
        left = copy.copy(self)
        change = self._change
        left._change = None if change is None else change[:, start:] if rows is None else change[:, start:].index_select(0, rows)
        left.system, left._transition = self.part_system(rows, start), self.transition.part(rows, start)
        for name in ("states", "entering", "values", "residual", "excess", "within_tolerance", "allowed"):
            every = getattr(self, name)[:, start:]
            setattr(left, name, every if rows is None else every.index_select(0, rows))
        return left


class Residual(NamedTuple):
    """Residual of an iterate."""

    entering: Tensor  # (batch, time, n), the states that enter the steps
    values: Tensor  # (batch, time, n), f of the entering states
    size: Tensor  # (batch, time), max |f(s_{t-1}) - s_t|
    excess: Tensor  # (batch, time), the same, each channel divided by its tolerance
    allowed: Tensor  # (batch, time, n), the tolerances


def measure_residual(system: System, states: Tensor, tolerance: Tolerance) -> Residual:
    """Return the residual of an iterate.

    If every step is within tolerance relative to its largest entry but some channel is not, the tolerances are raised
    to the rounding error of f.

    Args:
        system: The equations.
        states: (batch, time, n), the iterate.
        tolerance: The tolerance of the residual.
    """
    entering = system.entering_states(states)
    values = system.evaluate(entering)
    allowed = tolerance.allowed(values, system.reset, system.recent_scale)
    size, excess = _distance(system, values, states, allowed)
    scale = torch.maximum(largest(entering), largest(values))
    if not torch.compiler.is_compiling() and fails_only_per_channel(tolerance, size, excess, scale):
        rounding = tolerance.allowed_for_rounding(system.evaluate, entering, values, system.reset)
        allowed = torch.maximum(allowed, rounding)
        size, excess = _distance(system, values, states, allowed)
    return Residual(entering, values, size, excess, allowed)


def fails_only_per_channel(tolerance: Tolerance, size: Tensor, excess: Tensor, scale: Tensor) -> bool:
    """Return whether some sequence is within tolerance relative to the largest entry of each step, but not per channel.

    Args:
        tolerance: The tolerance of the residual.
        size: (batch, time), the largest residual of each step.
        excess: (batch, time), the same, each channel divided by its tolerance.
        scale: (batch, time), the largest entry of each step.
    """
    whole = size <= tolerance.relative * scale + tolerance.floor(scale.dtype)
    return bool(((excess > 1).any(-1) & whole.all(-1)).any())


def _distance(system: System, values: Tensor, states: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Return max |values - states| of each step, and the same in tolerances, (batch, time), one chunk after another."""
    if not values.shape[-1] or not values.shape[1]:
        return values.new_zeros(values.shape[:2]), values.new_zeros(values.shape[:2])
    length = chunk_length(states)
    chunks = []
    for value, state, limit in zip(*(every.split(length, 1) for every in (values, states, allowed)), strict=True):
        difference = (value - state).abs()
        chunks.append((difference.amax(-1), (difference / limit).amax(-1)))
    size, excess = (torch.cat(parts, 1) for parts in zip(*chunks, strict=True))
    valid = system.valid
    return (size, excess) if valid is None else (torch.where(valid, size, 0.0), torch.where(valid, excess, 0.0))


def _leading_change(
    transition: Transition, system: System, states: Tensor, values: Tensor, within_tolerance: Tensor
) -> Tensor:
    """Return the undamped change of the next iteration in the leading steps within tolerance, (batch, steps, n)."""
    steps = int(within_tolerance.long().cumprod(-1).sum(-1).max())
    reset = None if system.reset is None else system.reset[:, :steps]
    if not steps:
        return states[:, :0]
    zero = torch.zeros_like(system.initial)
    return transition.part(None, 0, steps).scan(values[:, :steps] - states[:, :steps], zero, reset)


class _Progress:
    """Progress of all sequences of the batch, of which only some are still iterated."""

    def __init__(self, batch: int, steps: int, lengths: Tensor | None, like: Tensor):
        device = like.device
        self.lengths = torch.full((batch,), steps, device=device) if lengths is None else lengths.clamp(min=0)
        self.iterations = torch.zeros(batch, dtype=torch.int64, device=device)
        self.last_residual = torch.zeros(batch, dtype=like.dtype, device=device)
        self.converged_steps = torch.zeros(batch, dtype=torch.int64, device=device)
        self.converged = torch.zeros(batch, dtype=torch.bool, device=device)
        self.finite = torch.ones(batch, dtype=torch.bool, device=device)
        self.rising = torch.zeros(batch, dtype=torch.bool, device=device)
        self.residuals: list[Tensor] = []
        self.prefixes: list[Tensor] = []

    def count_iteration(self, rows: Tensor | None) -> None:
        """Count one iteration of the sequences `rows`."""
        self.iterations[slice(None) if rows is None else rows] += 1

    def record(self, rows: Tensor | None, start: int, worst: Tensor, right: Tensor, frozen: Tensor) -> None:
        """Record the residuals and the converged steps of `rows`, of which the first `start` steps were dropped."""
        at = slice(None) if rows is None else rows
        self.last_residual[at] = torch.maximum(worst, frozen)
        prefix = right.long().cumprod(-1).sum(-1) + start
        self.converged_steps[at] = torch.minimum(prefix, self.lengths[at])
        self.residuals.append(self.last_residual.clone())
        self.prefixes.append(self.converged_steps.clone())

    def mark(self, rows: Tensor | None, done: Tensor, finite: Tensor, rising: Tensor) -> None:
        """Record whether `rows` have converged, are finite, and have a rising residual."""
        at = slice(None) if rows is None else rows
        self.converged[at], self.finite[at], self.rising[at] = done, finite, rising

    def make_result(self, states: Tensor) -> IterationResult:
        """Return the result of the loop. A sequence without steps has converged."""
        if not states.shape[1]:
            self.converged[:] = True
        history = History(torch.stack(self.residuals), torch.stack(self.prefixes))
        return IterationResult(
            states,
            self.converged,
            self.finite,
            self.rising,
            self.iterations,
            self.last_residual,
            self.converged_steps,
            history,
        )
