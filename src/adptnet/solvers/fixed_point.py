"""The Newton loop of the parallel solvers: s ← scan(A, f(s) - A s), until every step has converged.

`_NewtonLoop` repeats `update`, `test` and `drop`. Sequences that have finished are dropped from the batch.
Leading steps that have converged in all sequences are dropped from the time axis, unless it is split over processes:
the process with the last steps would still have all of its own to compute, and the others would wait for it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..ops.adpt_step import Outcome, Rules
from ..ops.tolerance import Tolerance
from .convergence_test import Contraction, Drift, allowed_drift, rounding_excess
from .iterates import EvaluatedIterate, Iterate, MeasuredIterate, MeasureFunction
from .rounding import find_cancelling_steps, split_rows
from .system import System
from .transitions import Transition

__all__ = ["History", "IterationResult", "Limits", "UpdateRule", "solve"]


class History(NamedTuple):
    """Residual and number of converged steps after each iteration; row 0 is the initial guess.

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
    finite: Tensor  # bool: False if iterates had NaN or infinity, also after they were reset
    rising: Tensor  # bool: whether the iteration was stopped because the residual kept rising
    iterations: Tensor
    residual: Tensor
    converged_steps: Tensor
    history: History
    all_converged: bool | None = None  # the same for all sequences, where the host knows it already


class Limits(NamedTuple):
    """Limits of the loop.

    Attributes:
        most: The maximum number of iterations.
        least: The minimum number of iterations.
        patience: Stop iterating a sequence after this many rises of its residual in a row, if it is then above that of
            the initial guess; None to continue.
    """

    most: int
    least: int = 1
    patience: int | None = None


class StepDamping(Protocol):
    """The part of `damping.Damping` that the loop uses."""

    def begin(self, like: Tensor) -> Tensor: ...

    def adapt(self, strength: Tensor, residual: Tensor, previous: Tensor) -> Tensor: ...

    def update(self, transition: Transition, system: System, at: Iterate, strength: Tensor) -> Tensor: ...


@dataclasses.dataclass(frozen=True)
class UpdateRule:
    """How the residual of an iterate and the next iterate are computed.

    Attributes:
        linearize: Returns the transition of the remaining part of the system, from that part, the indices of its
            sequences (None for all), its first step, and the states that enter its steps.
        damping: The damping of the iteration.
        fused: Computes the residual of an iterate and the next iterate in one operation, in place of `linearize` and
            `damping`.
        iterate: Runs the whole loop on a GPU; see `DevicePass`.
    """

    linearize: Callable[[System, Tensor | None, int, Tensor], Transition]
    damping: StepDamping
    fused: MeasureFunction | None = None
    iterate: Callable[..., Outcome | None] | None = None


RETRIES = 3  # how often a sequence with a non-finite iterate is reset before it is given up


def solve(system: System, guess: Tensor, rule: UpdateRule, tolerance: Tolerance, limits: Limits) -> IterationResult:
    """Iterate until every sequence has converged, diverged, or reached the maximum number of iterations.

    Args:
        system: The equations.
        guess: (batch, time, n), the states to start from.
        rule: How residuals and the next iterate are computed.
        tolerance: The tolerance of a converged step. Convergence is tested on each new iterate.
        limits: The limits of the loop.
    """
    if rule.iterate is not None and guess.numel() and limits.most:
        found = _solve_on_device(system, guess, rule.iterate, tolerance, limits)
        if found is not None:
            return found
    loop = _NewtonLoop(system, guess, rule, tolerance, limits)
    del guess  # as large as the states, and the caller holds no reference either
    while not loop.is_finished:
        loop.update()
        loop.test()
        loop.drop()
    return loop.result()


def _solve_on_device(
    system: System, guess: Tensor, iterate: Callable[..., Outcome | None], tolerance: Tolerance, limits: Limits
) -> IterationResult | None:
    """Run the loop on a GPU; None if a sequence needs the loop on the host, which then starts anew."""
    total = system.axis.total(system.steps)
    slack = _allowed_error(system, tolerance, total, guess.dtype)
    rules = Rules(*limits, slack, rounding_excess(tolerance, guess.dtype), total)
    given = system.step_inputs[0], system.initial, system.reset_state, system.reset
    found = iterate(guess, *given, tolerance=tolerance, recent=system.recent_scale, rules=rules)
    if found is None:
        return None
    return IterationResult(
        found.states,
        found.converged,
        torch.ones_like(found.converged),
        found.rising,
        found.iterations,
        found.residual,
        found.converged_steps,
        History(found.residuals, found.prefixes),
        found.all_converged,
    )


@dataclasses.dataclass
class _Sequences:
    """State of the loop for each sequence that is still iterated, (batch,)."""

    strength: Tensor  # of the damping
    residual: Tensor  # of the last iterate
    first_residual: Tensor  # of the initial guess
    rises: Tensor  # of the residual, in a row
    retries: Tensor  # how often the sequence was reset
    dropped_residual: Tensor  # the largest among its dropped steps
    next_probe: Tensor  # the iteration from which on rounding errors of f may be measured
    pause: Tensor  # iterations between the last measurement and the next

    def select(self, rows: Tensor) -> "_Sequences":
        """Select the sequences `rows`."""
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))
        return _Sequences(*(values.index_select(0, rows) for values in fields))


class _NewtonLoop:
    """The loop and its state: `at` is the current iterate of the remaining sequences and steps."""

    def __init__(self, system: System, guess: Tensor, rule: UpdateRule, tolerance: Tolerance, limits: Limits):
        self.rule, self.tolerance, self.limits = rule, tolerance, limits
        batch, steps, _ = self.shape = guess.shape
        self.total = system.axis.total(steps)
        self.slack = _allowed_error(system, tolerance, self.total, guess.dtype)
        self.rows: Tensor | None = None  # the remaining sequences; None for all
        self.start = 0  # the first remaining step
        self.iteration = 0
        self.kept: Tensor | None = None  # the states of dropped steps and sequences, allocated when needed
        self.progress = _Progress(batch, self.total, system, guess)
        self.is_finished = not batch or not steps or not limits.most
        self.at = self._measure(system, guess)
        self.contraction = Contraction(self.at.excess, rounding_excess(tolerance, guess.dtype))
        self.drift = Drift(self.slack, self.contraction.rounding, guess)
        zero = guess.new_zeros(batch)
        count = torch.zeros(batch, dtype=torch.int64, device=guess.device)
        self.residual = self.at.largest_residual
        self.progress.record(None, self.residual, system.axis.count_leading(self.at.within_tolerance, count[:0])[0])
        strength = rule.damping.begin(system.initial)
        once = torch.ones_like(count)
        self.sequences = _Sequences(
            strength, self.residual, self.residual, count, count.clone(), zero, once, once.clone()
        )

    def update(self) -> None:
        """Replace the iterate by the next one."""
        self.iteration += 1
        system, states = self.at.system, self.at.next_states(self.sequences.strength)
        del self.at  # several times as large as the states
        self.at = self._measure(system, states)
        self.residual = self.at.largest_residual
        self._reset_non_finite()

    def test(self) -> None:
        """Test which steps have converged, and which sequences are finished."""
        at, sequences, limits = self.at, self.sequences, self.limits
        self._allow_rounding()
        self.contraction.update(at.excess)
        self.change = at.next_change()
        self.error = self.contraction.error(self.change, self.total)
        residual, reached = self.residual, self._exclude_drifting(self._count_converged())
        self.droppable = at.within_tolerance[:, : self.error.shape[1]] & (self.error <= min(1.0, self.slack))
        self.done = reached == self.total
        finite = residual.isfinite()
        sequences.rises = torch.where(residual > sequences.residual, sequences.rises + 1, 0)
        is_rising = torch.zeros_like(finite)
        if limits.patience is not None:
            is_rising = (sequences.rises >= limits.patience) & (residual > sequences.first_residual)
        sequences.strength = self.rule.damping.adapt(sequences.strength, residual, sequences.residual)
        sequences.residual = residual
        self.progress.count_iteration(self.rows)
        self.progress.record(self.rows, torch.maximum(residual, sequences.dropped_residual), reached)
        self.progress.mark(self.rows, self.done, finite, is_rising)
        may_stop = self.iteration >= limits.least
        self.stopped = ((self.done | is_rising) if may_stop else torch.zeros_like(finite)) | ~finite

    def _allow_rounding(self) -> None:
        """Raise the tolerances of steps whose residual no longer falls to the rounding error of f.

        If that does not explain the residual of a sequence, its next attempts are made after 2, 4, 8, ... iterations.
        """
        at, axis, sequences = self.at, self.at.system.axis, self.sequences
        due = sequences.next_probe <= self.iteration
        if not bool(due.any()):
            return
        suspected = self.contraction.mark_stagnating(at.excess) & due.unsqueeze(1)
        found = find_cancelling_steps(suspected, at.mark_settled())
        attempted = torch.zeros_like(due, dtype=torch.uint8)
        if found is not None:
            attempted[found.rows] = 1
        attempted = axis.maximum(attempted).bool()
        if not bool(attempted.any()):
            return
        before = at.excess.clone()
        at.allow_rounding(found)
        helped = axis.maximum((at.excess < 0.5 * before).any(1).to(torch.uint8)).bool()
        pause = torch.where(helped, torch.ones_like(sequences.pause), 2 * sequences.pause)
        sequences.pause = torch.where(attempted, pause, sequences.pause)
        sequences.next_probe = torch.where(attempted, self.iteration + pause, sequences.next_probe)

    def _count_converged(self) -> Tensor:
        """Return how many steps, from the first of all, have converged in each remaining sequence, (batch,).

        In sequences that are within tolerance, but whose error is not, the error is first compared with accumulated
        rounding errors.
        """
        at, axis = self.at, self.at.system.axis
        flags = torch.cat((~at.within_tolerance.all(1), ~(self.error <= self.slack).all(1))).long()
        reached, flags = axis.count_leading(self._mark_converged(), flags)
        unsettled, drifting = flags.bool().chunk(2)
        drifting = (~unsettled & drifting).nonzero().squeeze(-1)
        if not len(drifting):
            return reached + self.start
        for rows in split_rows(drifting, self.total * self.shape[2]):
            move = at.next_change_beyond_rounding(rows, self.slack)
            self.error[rows] = self.contraction.part(rows, 0).error(move, self.total)
            self.change[rows] = move
        return axis.count_leading(self._mark_converged(), flags[:0])[0] + self.start

    def _exclude_drifting(self, reached: Tensor) -> Tensor:
        """Return how many steps have converged, without those whose errors may add up, in sequences that have finished.

        Args:
            reached: (batch,), how many have converged by the estimate of their errors.
        """
        at, axis = self.at, self.at.system.axis
        rows = (reached == self.total).nonzero().squeeze(-1)
        if not len(rows):
            return reached

        excess, change = (values.index_select(0, rows) for values in (at.excess, self.change))

        def find_drifting(one_sign: Tensor | None) -> Tensor:
            bound = self.drift.select(rows).bound(excess, change, self.total, axis, one_sign)
            return ~(bound <= self.drift.limit)

        drifting = find_drifting(None)
        if not bool(drifting.any()):
            return reached
        one_sign = torch.cat([at.sum_one_sign(some) for some in split_rows(rows, self.total * self.shape[2])])
        drifting = find_drifting(one_sign)
        unknown = rows[(drifting & self.drift.rate[rows].isnan()).any(1)]
        for some in split_rows(unknown, self.total * self.shape[2]):
            self.drift.rate[some] = at.measure_rate(some).unsqueeze(1)
        if len(unknown):
            drifting = find_drifting(one_sign)
        count = (~drifting).long().cumprod(1).sum(1) + self.start
        count = torch.where(drifting.any(1), torch.zeros_like(count) if axis.is_split else count, reached[rows])
        return reached.index_copy(0, rows, count)

    def _mark_converged(self) -> Tensor:
        """Return whether each remaining step is within tolerance, as its estimated error is, (batch, time)."""
        converged = self.at.within_tolerance.clone()
        converged[:, : self.error.shape[1]] &= self.error <= self.slack
        return converged

    def drop(self) -> None:
        """Drop finished sequences, then leading steps that have converged in all others."""
        if bool(self.done.any()):
            self.at.refine(None if bool(self.done.all()) else self.done.nonzero().squeeze(-1), self.at.states.shape[1])
        if bool(self.stopped.all()) or self.iteration == self.limits.most:
            self.is_finished = True
            return
        if bool(self.stopped.any()):
            self._keep(self.at.states[self.stopped], self.stopped.nonzero().squeeze(-1), self.start)
            left = (~self.stopped).nonzero().squeeze(-1)
            self.rows = left if self.rows is None else self.rows.index_select(0, left)
            self.at, self.contraction = self.at.part(left, 0), self.contraction.part(left, 0)
            self.sequences = self.sequences.select(left)
            self.drift, self.change = self.drift.select(left), self.change.index_select(0, left)
            self.droppable, self.error = (values.index_select(0, left) for values in (self.droppable, self.error))
        if self.iteration >= self.limits.least and not self.at.system.axis.is_split:
            bound = self.drift.bound(
                self.at.excess[:, : self.change.shape[1]], self.change, self.total, self.at.system.axis, None
            )
            self.droppable &= bound <= self.drift.DROPPED * self.drift.limit
            share = self.slack / max(1, self.total)
            self._drop_steps(min(_count_droppable(self.droppable, self.error, share), self.at.states.shape[1] - 1))

    def result(self) -> IterationResult:
        """Return the outcome of the loop."""
        if self.kept is None:
            return self.progress.make_result(self.at.states)
        self._keep(self.at.states, None, self.start)
        return self.progress.make_result(self.kept)

    def _drop_steps(self, count: int) -> None:
        """Drop the first `count` steps."""
        if not count:
            return
        at, residual = self.at, self.sequences.dropped_residual
        at.refine(None, count)
        self._keep(at.states[:, :count], None, self.start)
        self.sequences.dropped_residual = torch.maximum(residual, at.residual[:, :count].amax(-1))
        self.at, self.contraction = at.part(None, count), self.contraction.part(None, count)
        self.drift.drop(count)
        self.start += count

    def _keep(self, states: Tensor, rows: Tensor | None, start: int) -> None:
        """Store final states, from step `start` on, of `rows` among the remaining sequences (None for all)."""
        if self.kept is None:
            self.kept = states.new_empty(self.shape)
        if self.rows is not None:
            rows = self.rows if rows is None else self.rows.index_select(0, rows)
        self.kept[slice(None) if rows is None else rows, start : start + states.shape[1]] = states

    def _measure(self, system: System, states: Tensor) -> MeasuredIterate:
        if self.rule.fused is not None:
            return self.rule.fused(system, states, self.tolerance)

        rule, rows, start = self.rule, self.rows, self.start  # a reference to self would keep this iterate alive

        def linearize(part: System, entering: Tensor) -> Transition:
            return rule.linearize(part, rows, start, entering)

        return EvaluatedIterate(system, states, self.tolerance, linearize, self.rule.damping.update)

    def _reset_non_finite(self) -> None:
        """Set the steps that have not converged back to the reset state in sequences with a non-finite iterate."""
        at, sequences = self.at, self.sequences
        bad = ~self.residual.isfinite() & (sequences.retries < RETRIES)
        if not bool(bad.any()):
            return
        sequences.retries = sequences.retries + bad.long()
        remaining = bad[:, None] & (at.within_tolerance.long().cumprod(-1) == 0)
        states = torch.where(remaining.unsqueeze(-1), at.system.reset_state.unsqueeze(1), at.states)
        self.at = self._measure(at.system, states)
        self.residual = self.at.largest_residual
        lost = bad & ~self.residual.isfinite()  # the equations themselves are not finite: return the iterate as it was
        if bool(lost.any()):
            self.at.states = torch.where(lost[:, None, None], at.states, self.at.states)


def _allowed_error(system: System, tolerance: Tolerance, steps: int, dtype: torch.dtype) -> float:
    """Return the error that a converged step may have, in tolerances."""
    if not system.total_steps:
        return allowed_drift(tolerance, steps, dtype)
    slack = allowed_drift(tolerance, system.total_steps, dtype)  # a block: the errors of all blocks add up
    return max(slack * math.sqrt(steps / system.total_steps), rounding_excess(tolerance, dtype))


def _count_droppable(droppable: Tensor, error: Tensor, share: float) -> int:
    """Return how many leading steps can be dropped.

    Later steps start from the last dropped state, so its error remains in them. The error may be `share` times the
    number of dropped steps. However often steps are dropped, these errors then add up to no more than the error that is
    allowed for all steps.
    """
    prefix = int(droppable.all(0).long().cumprod(0).sum())
    allowed = share * torch.arange(1, prefix + 1, dtype=error.dtype, device=error.device)
    fits = (error[:, :prefix].amax(0) <= allowed).nonzero()
    return int(fits[-1]) + 1 if len(fits) else 0


class _Progress:
    """Progress of all sequences of the batch, of which only some are still iterated."""

    def __init__(self, batch: int, steps: int, system: System, like: Tensor):
        device = like.device
        lengths = system.lengths
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

    def record(self, rows: Tensor | None, residual: Tensor, reached: Tensor) -> None:
        """Record the residuals and the numbers of converged steps of `rows`."""
        at = slice(None) if rows is None else rows
        self.last_residual[at] = residual
        self.converged_steps[at] = torch.minimum(reached, self.lengths[at])
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
