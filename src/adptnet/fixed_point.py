"""The loop of every parallel solver: s ← scan(A, f(s) - A s), with steps and sequences dropped as they converge."""

import abc
import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .system import System, stretch
from .transitions import Transition

__all__ = [
    "Found",
    "History",
    "Iterate",
    "Measure",
    "Measured",
    "Tolerance",
    "default_rtol",
    "measured",
    "newton_update",
    "solve",
]


def default_rtol(dtype: torch.dtype) -> float:
    """2e-6 in float32, 9e-14 in float64: gradients then err a few times as much as those of back-propagation."""
    return float(torch.finfo(dtype).eps ** (5 / 6))


class Tolerance(NamedTuple):
    """A step is right when |f(s_{t-1}) - s_t| <= absolute + relative · scale, the scale being that of step t.

    Unless it is given, `absolute` is the rounding of the largest state up to step t, so that states of any size are
    found to as many digits. It looks at no later step: an iterate may be anything there.
    It is measured step by step and not over the sequence, so that a wild guess far off cannot make a wrong step pass.
    In a long memory small errors of one sign add up, so the next iteration must not move a right step far either: not
    beyond `slack` times as much.
    """

    absolute: float | None
    relative: float

    def allowed(self, entering: Tensor, values: Tensor) -> Tensor:
        """(batch, time)."""
        return self.at(torch.maximum(_largest(entering), _largest(values)))

    def at(self, scale: Tensor) -> Tensor:
        """The same, from the scale of each step."""
        if self.absolute is not None or not scale.shape[1]:
            return (self.absolute or 0.0) + self.relative * scale
        return torch.finfo(scale.dtype).eps * scale.cummax(1).values + self.relative * scale

    def slack(self, steps: int, dtype: torch.dtype) -> float:
        """Rounding adds up as well, with the root of the length: of that the move may be four times as large."""
        rounding = torch.finfo(dtype).eps
        return 4 * max(1.0, math.sqrt(steps) * rounding / max(self.relative, rounding))


def _largest(values: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(values, torch.inf, -1)
    return largest


class History(NamedTuple):
    """What each iteration left, from the guess (row 0) on."""

    residual: Tensor  # (iterations + 1, batch)
    converged_steps: Tensor  # (iterations + 1, batch)

    def iterations_for(self, steps: int) -> Tensor:
        """(batch,) iterations after which the first `steps` steps had converged; -1 if they never had.

        One run so tells the count for every shorter sequence, as no state depends on a later one.
        """
        reached = self.converged_steps[1:] >= steps
        first = reached.to(torch.int64).argmax(0) + 1 if len(reached) else torch.zeros_like(self.converged_steps[0])
        return torch.where(reached.any(0), first, -1)


class Found(NamedTuple):
    """Where the loop ended. All but the states are per sequence, (batch,)."""

    states: Tensor
    converged: Tensor  # bool
    finite: Tensor  # bool: False if NaN or infinity came up
    rising: Tensor  # bool: the residual rose too often
    iterations: Tensor
    residual: Tensor
    converged_steps: Tensor
    history: History


class Iterate(NamedTuple):
    """States, what enters each step of them, and f of that: all (batch, time, n)."""

    states: Tensor
    entering: Tensor
    values: Tensor


# From the system, the sequences and the first step left of the whole, and what enters each step, to the transition
Linearise = Callable[[System, Tensor | None, int, Tensor], Transition]
# From the transition, the system, the iterate and the strength of damping, to the next states
Advance = Callable[[Transition, System, Iterate, Tensor], Tensor]
Adapt = Callable[[Tensor, Tensor, Tensor], Tensor]


def newton_update(transition: Transition, system: System, at: Iterate) -> Tensor:
    """scan(A, f(s) - A s) (eq:deer_step). Without a graph, `at.values` are overwritten."""
    states, entering, values = at
    if transition.rounded:  # s + scan(A, f(s) - s): the same, and right wherever f(s) = s, however A is rounded
        return states + transition.scan(values - states, torch.zeros_like(system.initial), system.reset)
    none = None if system.reset is None else system.reset.unsqueeze(-1)  # A is 0 where another state enters
    if torch.is_grad_enabled():
        moved = transition.mv(entering)
        offset = values - (moved if none is None else moved.masked_fill(none, 0.0))
        return transition.scan(offset, system.initial, system.reset)
    length = stretch(values)
    for start in range(0, values.shape[1], length):
        times = slice(start, min(start + length, values.shape[1]))
        part = transition if values.shape[1] <= length else transition.part(None, times.start, times.stop)
        moved = part.mv(entering[:, times])
        values[:, times] -= moved if none is None else moved.masked_fill(none[:, times], 0.0)
    return transition.scan(values, system.initial, system.reset)


def solve(
    system: System,
    guess: Tensor,
    linearise: Linearise,
    advance: Advance,
    tolerance: Tolerance,
    *,
    max_iterations: int,
    patience: int | None,
    strength: Tensor,
    adapt: Adapt,
    least: int = 1,
    measure: "Measure | None" = None,
) -> Found:
    """Iterates until every step of every sequence is right, or until it is clear that it will not be.

    Args:
        system: The equations.
        guess: (batch, time, n) where to start.
        linearise: The transition of an iteration.
        advance: The next states.
        tolerance: When a step is right. Convergence is tested on each new iterate.
        max_iterations: Updates at most.
        patience: Give a sequence up after this many rises of its residual in a row, if it is then above the guess's.
        strength: (batch,) of damping, at the start.
        adapt: From strength, residual and the residual before, to the strength of the next update.
        least: Updates at least.
        measure: What an iterate is measured by, and the next one found, instead of `linearise` and `advance`.
    """

    def evaluated(part: System, rows: Tensor | None, start: int, states: Tensor, limits: Tolerance) -> Measured:
        return _Evaluated(part, states, limits, lambda entering: linearise(part, rows, start, entering), advance)

    measure = measure or evaluated
    batch, steps, numbers = guess.shape
    device = guess.device
    kept: Tensor | None = None  # what is settled, once anything is
    finished = False
    totals = _Totals(batch, steps, system.lengths, guess)
    rows: Tensor | None = None  # None: all are left
    start = 0
    frozen = guess.new_zeros(batch)  # the largest residual among dropped steps
    slack = tolerance.slack(steps, guess.dtype)
    at = measure(system, rows, start, guess, tolerance)
    del guess  # as large as the states; the caller keeps none either
    totals.record(rows, start, at.residual.amax(-1) if steps else frozen, at.right, frozen)
    first = previous = totals.last_residual.clone()
    rises = torch.zeros(batch, dtype=torch.int64, device=device)
    for iteration in range(1, max_iterations + 1):
        if not batch or not steps:
            break
        part, current = at.system, at.following(strength)
        del at  # several times as large as the states
        at = measure(part, rows, start, current, tolerance)
        del current
        size, reach = at.moved()
        right, near = at.right, slice(0, size.shape[1])
        settling = right[:, near] & (size <= reach)
        right[:, near] &= size <= slack * reach
        worst = at.residual.amax(-1)
        totals.count(rows)
        totals.record(rows, start, worst, right, frozen)
        finite = worst.isfinite()
        rises = torch.where(worst > previous, rises + 1, 0)
        given_up = (rises >= patience) & (worst > first) if patience is not None else torch.zeros_like(finite)
        strength = adapt(strength, worst, previous)
        previous = worst
        done = right.all(-1)
        stop = ((done | given_up) if iteration >= least else torch.zeros_like(done)) | ~finite
        totals.mark(rows, done, finite, given_up)
        if bool(stop.all()) and rows is None and not start:  # the whole batch at once: nothing to put together
            break
        if bool(stop.any()):
            index = torch.arange(batch, device=device) if rows is None else rows
            kept = at.states.new_empty(batch, steps, numbers) if kept is None else kept
            kept[index[stop], start:] = at.states[stop]
            keep = (~stop).nonzero().squeeze(-1)
            rows = index.index_select(0, keep)
            if not len(keep):
                finished = True
                break
            frozen, strength, previous, first, rises, settling = (
                every.index_select(0, keep) for every in (frozen, strength, previous, first, rises, settling)
            )
            at = at.part(keep, 0)
        # Steps that are right in every sequence that is left need not be done again.
        settled = int(settling.long().cumprod(-1).sum(-1).min()) if iteration >= least else 0
        settled = min(settled, at.states.shape[1] - 1)
        if settled:
            kept = at.states.new_empty(batch, steps, numbers) if kept is None else kept
            kept[slice(None) if rows is None else rows, start : start + settled] = at.states[:, :settled]
            frozen = torch.maximum(frozen, at.residual[:, :settled].amax(-1))
            at = at.part(None, settled)
            start += settled
    if kept is None:
        return totals.found(at.states)
    if not finished:
        kept[slice(None) if rows is None else rows, start:] = at.states
    return totals.found(kept)


class Measured(abc.ABC):
    """An iterate of a system, how far each of its steps is from right, and what follows it."""

    system: System
    states: Tensor
    residual: Tensor  # (batch, time)
    right: Tensor  # (batch, time), bool: whether the residual is small enough

    @abc.abstractmethod
    def following(self, strength: Tensor) -> Tensor:
        """The next states, with so much damping (batch,). What was measured may be overwritten."""

    @abc.abstractmethod
    def moved(self) -> tuple[Tensor, Tensor]:
        """How far the next iteration would move each step up to the last that is right so far, and what is near."""

    @abc.abstractmethod
    def part(self, rows: Tensor | None, start: int) -> "Measured":
        """Of the sequences `rows` (all if None), the steps from `start`."""

    def left(self, rows: Tensor | None, start: int) -> System:
        """The system of such a part."""
        initial = self.states[:, start - 1] if start else self.system.initial
        return self.system.part(rows, start, initial if rows is None else initial.index_select(0, rows))


# From the system, the sequences and the first step left of the whole, the iterate and the tolerance
Measure = Callable[[System, Tensor | None, int, Tensor, Tolerance], Measured]


class _Evaluated(Measured):
    """By f of what enters each step, and a transition."""

    def __init__(
        self,
        system: System,
        states: Tensor,
        tolerance: Tolerance,
        linearise: Callable[[Tensor], Transition],
        advance: Advance,
    ):
        self.system, self.states, self.tolerance, self.advance = system, states, tolerance, advance
        self.entering, self.values, self.residual, self.right = measured(system, states, tolerance)
        self.linearise = linearise
        self.transition: Transition | None = None

    def linear(self) -> Transition:
        if self.transition is None:
            self.transition = self.linearise(self.entering)
        return self.transition

    def following(self, strength: Tensor) -> Tensor:
        return self.advance(self.linear(), self.system, Iterate(self.states, self.entering, self.values), strength)

    def moved(self) -> tuple[Tensor, Tensor]:
        move = _move(self.linear(), self.system, self.states, self.values, self.right)
        steps = move.shape[1]
        size, valid = _largest(move), self.system.valid
        if valid is not None:
            size = torch.where(valid[:, :steps], size, 0.0)
        return size, self.tolerance.allowed(self.entering[:, :steps], self.values[:, :steps])

    def part(self, rows: Tensor | None, start: int) -> "_Evaluated":
        left = copy.copy(self)
        left.system, left.transition = self.left(rows, start), self.linear().part(rows, start)
        for name in ("states", "entering", "values", "residual", "right"):
            every = getattr(self, name)[:, start:]
            setattr(left, name, every if rows is None else every.index_select(0, rows))
        return left


def measured(system: System, states: Tensor, tolerance: Tolerance) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What enters each step, f of it, its distance from the states (batch, time), and whether that is small enough."""
    entering = system.entering(states)
    values = system.evaluate(entering)
    residual = _distance(values, states)
    right = residual <= tolerance.allowed(entering, values)  # False for NaN
    valid = system.valid
    if valid is not None:
        residual, right = torch.where(valid, residual, 0.0), right | ~valid
    return entering, values, residual, right


def _distance(values: Tensor, states: Tensor) -> Tensor:
    """max |values - states| of each step, (batch, time), a part of the time at a time."""
    length = stretch(states)
    parts = zip(values.split(length, 1), states.split(length, 1), strict=True)
    return torch.cat([_largest(value - state) for value, state in parts], 1)


def _move(transition: Transition, system: System, states: Tensor, values: Tensor, right: Tensor) -> Tensor:
    """How far the next iteration would move the steps up to the last that is right so far: (batch, these steps, n)."""
    steps = int(right.long().cumprod(-1).sum(-1).max())
    reset = None if system.reset is None else system.reset[:, :steps]
    if not steps:
        return states[:, :0]
    none = torch.zeros_like(system.initial)
    return transition.part(None, 0, steps).scan(values[:, :steps] - states[:, :steps], none, reset)


class _Totals:
    """What is known of each sequence of the whole batch while only some are left."""

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

    def count(self, rows: Tensor | None) -> None:
        self.iterations[slice(None) if rows is None else rows] += 1

    def record(self, rows: Tensor | None, start: int, worst: Tensor, right: Tensor, frozen: Tensor) -> None:
        at = slice(None) if rows is None else rows
        self.last_residual[at] = torch.maximum(worst, frozen)
        prefix = right.long().cumprod(-1).sum(-1) + start
        self.converged_steps[at] = torch.minimum(prefix, self.lengths[at])
        self.residuals.append(self.last_residual.clone())
        self.prefixes.append(self.converged_steps.clone())

    def mark(self, rows: Tensor | None, done: Tensor, finite: Tensor, rising: Tensor) -> None:
        at = slice(None) if rows is None else rows
        self.converged[at], self.finite[at], self.rising[at] = done, finite, rising

    def found(self, states: Tensor) -> Found:
        if not states.shape[1]:
            self.converged[:] = True
        history = History(torch.stack(self.residuals), torch.stack(self.prefixes))
        return Found(
            states,
            self.converged,
            self.finite,
            self.rising,
            self.iterations,
            self.last_residual,
            self.converged_steps,
            history,
        )
