"""The loop of every parallel solver: s ← scan(A, f(s) - A s), with steps and sequences dropped as they converge."""

import abc
import copy
import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.tolerance import Tolerance, largest
from .system import System, stretch
from .transitions import Transition

__all__ = [
    "Contraction",
    "Found",
    "History",
    "Iterate",
    "Measure",
    "Measured",
    "Residual",
    "allowed_drift",
    "default_rtol",
    "fails_only_per_channel",
    "measured",
    "newton_update",
    "rounding_excess",
    "solve",
]


def default_rtol(dtype: torch.dtype) -> float:
    """2e-6 in float32, 9e-14 in float64: gradients then err a few times as much as those of back-propagation."""
    return float(torch.finfo(dtype).eps ** (5 / 6))


def allowed_drift(tolerance: Tolerance, steps: int, dtype: torch.dtype) -> float:
    """Return how many tolerances the error of a step may be: three, or what the rounding of all steps adds up to.

    Residuals of one sign add up along a long memory, so a small residual alone does not make a step right.
    """
    rounding = torch.finfo(dtype).eps
    return 3 * max(1.0, math.sqrt(steps) * rounding / max(tolerance.relative, rounding))


def rounding_excess(tolerance: Tolerance, dtype: torch.dtype) -> float:
    """Return the residual of an exact solution, in tolerances."""
    rounding = torch.finfo(dtype).eps
    return 2 * rounding / max(tolerance.relative, rounding)


class Contraction:
    """Estimates the error of each step from its next move, by how fast the residual has fallen.

    If every iteration leaves the share θ of the error, an iterate is 1 / (1 - θ) moves away from the solution. That is
    true whatever the transition is, while the move alone says nothing where the transition is far from the Jacobian.
    θ is measured for each step over the steps up to it, down to the tolerance, or down to rounding if the first iterate
    was within tolerance. Below it a fast θ is forgotten once the residual rises, because what is left is rounding; a
    slow one is not, because residuals of the size of rounding add up as well.
    """

    SLOW = 0.9
    SHARE = 1 / 16  # of the last iteration in the mean of ln θ: near rounding a residual falls in jumps

    def __init__(self, excess: Tensor, rounding: float):
        """Begin with the excess (batch, time) of a first iterate; `rounding` is that of an exact one."""
        self.rounding = rounding
        self.now = _prefix_maximum(excess)
        self.rate = torch.zeros_like(self.now)  # 0: not known
        self.sure = torch.zeros_like(self.now, dtype=torch.bool)  # whether it was measured above the tolerance

    def update(self, excess: Tensor) -> None:
        """Take in the excess (batch, time) of the next iterate."""
        following, above = _prefix_maximum(excess), self.now > 1
        last = torch.where(self.now.isfinite(), (following / self.now).clamp(max=1.0), 1.0)
        mean = torch.where(self.rate > 0, self.rate ** (1 - self.SHARE) * last**self.SHARE, last)
        self.rate = torch.where(above | (~self.sure & (self.now > self.rounding)), mean, self.rate)
        self.sure |= above
        forget = ~above & (following > self.now) & (~self.sure | (self.rate < self.SLOW))
        self.rate = torch.where(forget, 0.0, self.rate)
        self.now = following

    def error(self, move: Tensor, steps: int) -> Tensor:
        """Return the error of each step from its `move` (batch, some steps), in an iteration over so many `steps`."""
        rate = self.rate[:, : move.shape[1]].clamp(max=1 - 1 / max(2, steps))
        return move * (rate / (1 - rate)).clamp(min=1.0)

    def part(self, rows: Tensor | None, start: int) -> "Contraction":
        """Return the estimate for the sequences `rows` (all if None) and the steps from `start`."""
        left = copy.copy(self)
        for name in ("now", "rate", "sure"):
            every = getattr(self, name)[:, start:]
            setattr(left, name, every if rows is None else every.index_select(0, rows))
        return left


def _prefix_maximum(excess: Tensor) -> Tensor:
    """Return the largest excess up to each step, (batch, time); infinity from the first NaN on."""
    return excess.nan_to_num(torch.inf, torch.inf).cummax(1).values if excess.shape[1] else excess


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
    slack = allowed_drift(tolerance, system.whole or steps, guess.dtype)
    if system.whole:  # a block: the errors of all blocks add up
        slack = max(slack * math.sqrt(steps / system.whole), rounding_excess(tolerance, guess.dtype))
    at = measure(system, rows, start, guess, tolerance)
    contraction = Contraction(at.excess, rounding_excess(tolerance, at.excess.dtype))
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
        contraction.update(at.excess)
        error = contraction.error(at.moved(), steps)
        right, near = at.right, slice(0, error.shape[1])
        settling = right[:, near] & (error <= min(1.0, slack))
        right[:, near] &= error <= slack
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
            frozen, strength, previous, first, rises, settling, error = (
                every.index_select(0, keep) for every in (frozen, strength, previous, first, rises, settling, error)
            )
            at, contraction = at.part(keep, 0), contraction.part(keep, 0)
        # Steps that are right in every sequence that is left need not be done again.
        settled = _droppable(settling, error, slack / max(1, steps)) if iteration >= least else 0
        settled = min(settled, at.states.shape[1] - 1)
        if settled:
            kept = at.states.new_empty(batch, steps, numbers) if kept is None else kept
            kept[slice(None) if rows is None else rows, start : start + settled] = at.states[:, :settled]
            frozen = torch.maximum(frozen, at.residual[:, :settled].amax(-1))
            at, contraction = at.part(None, settled), contraction.part(None, settled)
            start += settled
    if kept is None:
        return totals.found(at.states)
    if not finished:
        kept[slice(None) if rows is None else rows, start:] = at.states
    return totals.found(kept)


def _droppable(settling: Tensor, error: Tensor, share: float) -> int:
    """Return how many leading steps can be dropped.

    Later steps start from the last dropped state, so its error stays with them. It may be `share` for each step that is
    dropped: however often steps are dropped, these errors add up to no more than all steps are allowed.
    """
    prefix = int(settling.all(0).long().cumprod(0).sum())
    allowed = share * torch.arange(1, prefix + 1, dtype=error.dtype, device=error.device)
    fits = (error[:, :prefix].amax(0) <= allowed).nonzero()
    return int(fits[-1]) + 1 if len(fits) else 0


class Measured(abc.ABC):
    """An iterate of a system, how far each of its steps is from right, and what follows it."""

    system: System
    states: Tensor
    residual: Tensor  # (batch, time), the largest of each step
    excess: Tensor  # (batch, time), the largest residual of each step in units of the tolerance of its channel
    right: Tensor  # (batch, time), bool: whether that is at most 1

    @abc.abstractmethod
    def following(self, strength: Tensor) -> Tensor:
        """The next states, with so much damping (batch,). What was measured may be overwritten."""

    @abc.abstractmethod
    def moved(self) -> Tensor:
        """Return how far the next iteration would move each step up to the last that is right so far, in tolerances."""

    @abc.abstractmethod
    def part(self, rows: Tensor | None, start: int) -> "Measured":
        """Of the sequences `rows` (all if None), the steps from `start`."""

    def left(self, rows: Tensor | None, start: int) -> System:
        """The system of such a part."""
        initial = self.states[:, start - 1] if start else self.system.initial
        recent = self.system.recent_after(self.states, start)
        if rows is not None:
            initial = initial.index_select(0, rows)
            recent = None if recent is None else recent.index_select(0, rows)
        return dataclasses.replace(self.system.part(rows, start, initial), recent=recent)


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
        self.entering, self.values, self.residual, self.excess, self.allowed = measured(system, states, tolerance)
        self.right = self.excess <= 1  # False for NaN
        self.linearise = linearise
        self.transition: Transition | None = None

    def linear(self) -> Transition:
        if self.transition is None:
            self.transition = self.linearise(self.entering)
        return self.transition

    def following(self, strength: Tensor) -> Tensor:
        return self.advance(self.linear(), self.system, Iterate(self.states, self.entering, self.values), strength)

    def moved(self) -> Tensor:
        move = _move(self.linear(), self.system, self.states, self.values, self.right)
        size, valid = (move.abs_() / self.allowed[:, : move.shape[1]]).amax(-1), self.system.valid
        return size if valid is None else torch.where(valid[:, : size.shape[1]], size, 0.0)

    def part(self, rows: Tensor | None, start: int) -> "_Evaluated":
        left = copy.copy(self)
        left.system, left.transition = self.left(rows, start), self.linear().part(rows, start)
        for name in ("states", "entering", "values", "residual", "excess", "right", "allowed"):
            every = getattr(self, name)[:, start:]
            setattr(left, name, every if rows is None else every.index_select(0, rows))
        return left


class Residual(NamedTuple):
    """f of what enters each step of an iterate, and how far the iterate is from it."""

    entering: Tensor  # (batch, time, n)
    values: Tensor  # (batch, time, n), f of it
    size: Tensor  # (batch, time), max |f(s_{t-1}) - s_t|
    excess: Tensor  # (batch, time), the same, each channel divided by its tolerance
    allowed: Tensor  # (batch, time, n), the tolerances


def measured(system: System, states: Tensor, tolerance: Tolerance) -> Residual:
    """Return the residual of `states`.

    If every step passes by its largest entry but some channel does not, raise the tolerances to the rounding error of
    f.
    """
    entering = system.entering(states)
    values = system.evaluate(entering)
    allowed = tolerance.allowed(values, system.reset, system.recent)
    size, excess = _distance(system, values, states, allowed)
    scale = torch.maximum(largest(entering), largest(values))
    if not torch.compiler.is_compiling() and fails_only_per_channel(tolerance, size, excess, scale):
        rounding = tolerance.allowed_for_rounding(system.evaluate, entering, values, system.reset)
        allowed = torch.maximum(allowed, rounding)
        size, excess = _distance(system, values, states, allowed)
    return Residual(entering, values, size, excess, allowed)


def fails_only_per_channel(tolerance: Tolerance, size: Tensor, excess: Tensor, scale: Tensor) -> bool:
    """Return whether some sequence fails only per channel: each step passes when measured by its largest entry."""
    whole = size <= tolerance.relative * scale + tolerance.floor(scale.dtype)
    return bool(((excess > 1).any(-1) & whole.all(-1)).any())


def _distance(system: System, values: Tensor, states: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Return max |values - states| of each step, and the same in tolerances, (batch, time); a part at a time."""
    if not values.shape[-1] or not values.shape[1]:
        return values.new_zeros(values.shape[:2]), values.new_zeros(values.shape[:2])
    length = stretch(states)
    found = []
    for value, state, limit in zip(*(every.split(length, 1) for every in (values, states, allowed)), strict=True):
        off = (value - state).abs()
        found.append((off.amax(-1), (off / limit).amax(-1)))
    size, excess = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    valid = system.valid
    return (size, excess) if valid is None else (torch.where(valid, size, 0.0), torch.where(valid, excess, 0.0))


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
