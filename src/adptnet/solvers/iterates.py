"""Iterates of the Newton loop: their residual, and the next iterate."""

import abc
import copy
import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.tolerance import Tolerance, largest, recent_scale
from .convergence_test import measure_rate, rounding_excess, sum_one_sign
from .rounding import CancellingSteps, allow_accumulated, allow_rounding, select
from .system import System, chunk_length
from .transitions import Transition

__all__ = [
    "EvaluatedIterate",
    "Iterate",
    "MeasureFunction",
    "MeasuredIterate",
    "Residual",
    "UpdateFunction",
    "measure_residual",
    "newton_update",
]


class Iterate(NamedTuple):
    """An iterate s, with f evaluated at it."""

    states: Tensor  # (batch, time, n)
    entering: Tensor  # (batch, time, n), the states that enter the steps
    values: Tensor  # (batch, time, n), f of the entering states


# From the transition, the system, the iterate and the strength of the damping, to the next states
UpdateFunction = Callable[[Transition, System, Iterate, Tensor], Tensor]


def newton_update(transition: Transition, system: System, at: Iterate) -> Tensor:
    """Return the undamped update scan(A, f(s) - A s) (eq:deer_step), (batch, time, n).

    Args:
        transition: The linearization A.
        system: The equations.
        at: The current iterate. Its `values` are overwritten when gradients are disabled.
    """
    states, entering, values = at
    if transition.rounded:  # s + scan(A, f(s) - s) is equal, and exact where f(s) = s, whatever the rounding of A
        zero = torch.zeros_like(system.initial)
        return states + system.axis.scan(transition, values - states, zero, system.reset)
    reset = None if system.reset is None else system.reset.unsqueeze(-1)  # A is 0 at a reset
    if torch.is_grad_enabled():
        product = transition.mv(entering)
        offset = values - (product if reset is None else product.masked_fill(reset, 0.0))
        return system.axis.scan(transition, offset, system.initial, system.reset)
    length = chunk_length(values)
    for start in range(0, values.shape[1], length):
        times = slice(start, min(start + length, values.shape[1]))
        part = transition if values.shape[1] <= length else transition.part(None, times.start, times.stop)
        product = part.mv(entering[:, times])
        values[:, times] -= product if reset is None else product.masked_fill(reset[:, times], 0.0)
    return system.axis.scan(transition, values, system.initial, system.reset)


class MeasuredIterate(abc.ABC):
    """Base class of iterates with their residuals, which compute the next iterate.

    Attributes:
        system: The equations.
        tolerance: The tolerance of the residual.
        states: (batch, time, n).
        residual: (batch, time), the largest residual of each step.
        excess: (batch, time), the same, each channel divided by its tolerance.
        largest_residual: (batch,), the largest residual of each sequence when it was measured, in all processes.
        scale: (batch, time), the largest entry of each step, of its entering state and of f.
        within_tolerance: (batch, time) bool, whether the excess is at most 1.
    """

    system: System
    tolerance: Tolerance
    states: Tensor
    residual: Tensor
    excess: Tensor
    largest_residual: Tensor
    scale: Tensor
    within_tolerance: Tensor

    @abc.abstractmethod
    def next_states(self, strength: Tensor) -> Tensor:
        """Return the next iterate, (batch, time, n). The tensors of this one may be overwritten.

        Args:
            strength: (batch,), the strength of the damping.
        """

    @abc.abstractmethod
    def allow_rounding(self, found: CancellingSteps | None) -> None:
        """Raise the tolerances of some steps to the rounding error of f.

        Args:
            found: The steps; None if there are none in this process, but in another one.
        """

    def mark_settled(self) -> Tensor:
        """Return whether each step is within tolerance relative to its largest entry, (batch, time)."""
        return self.residual <= self.tolerance.relative * self.scale + self.tolerance.floor(self.scale.dtype)

    @abc.abstractmethod
    def next_change(self) -> Tensor:
        """Return the size of the undamped change of the next iteration, in tolerances, (batch, leading steps).

        The leading steps are those of `count_leading`.
        """

    @abc.abstractmethod
    def next_change_beyond_rounding(self, rows: Tensor, slack: float) -> Tensor:
        """Return `next_change` of sequences in which all steps are within tolerance, (len(rows), time).

        The tolerances are raised to the rounding errors of f that accumulate along the sequence.

        Args:
            rows: Indices of the sequences.
            slack: The largest error allowed, in tolerances.
        """

    @abc.abstractmethod
    def refine(self, rows: Tensor | None, steps: int) -> None:
        """Add the undamped change of the next iteration to the first `steps` states of some sequences, in place.

        `next_change` has computed that change for the convergence test, so this last update of converged steps needs
        no evaluation of f. `residual` and `excess` remain those before it.

        Args:
            rows: Indices of the sequences; None for all.
            steps: The number of steps, at most that of `next_change`.
        """

    @abc.abstractmethod
    def part(self, rows: Tensor | None, start: int) -> "MeasuredIterate":
        """Return a part of the batch and of the time.

        Args:
            rows: Indices of the sequences; None for all.
            start: The first step.
        """

    @abc.abstractmethod
    def linearization_of(self, rows: Tensor) -> Transition:
        """Return the transition of some sequences.

        Args:
            rows: Indices of the sequences.
        """

    def sum_one_sign(self, rows: Tensor) -> Tensor:
        """Return the largest sum of residuals of the size of rounding up to each step, (len(rows), time).

        It is in tolerances of the largest |f| since the last reset.

        Args:
            rows: Indices of the sequences.
        """
        part, states = select(self.system, rows), self.states.index_select(0, rows)
        values = part.evaluate(part.entering_states(states))
        scale = recent_scale(values, part.reset, part.recent_scale, half_life=math.inf)
        allowed = scale.mul_(self.tolerance.relative).add_(self.tolerance.floor(scale.dtype))
        residual = values - states
        if part.valid is not None:
            residual = residual * part.valid.unsqueeze(-1)
        return sum_one_sign(residual, allowed, rounding_excess(self.tolerance, states.dtype))

    def measure_rate(self, rows: Tensor) -> Tensor:
        """Return the rate at which the undamped iteration contracts an error at these states, (len(rows),).

        The derivative of f is a finite difference, which needs nothing of f but its values.

        Args:
            rows: Indices of the sequences.
        """
        part, states = select(self.system, rows), self.states.index_select(0, rows)
        axis, transition, zero = part.axis, self.linearization_of(rows), torch.zeros_like(part.initial)
        values = part.evaluate(part.entering_states(states))
        size = math.sqrt(torch.finfo(states.dtype).eps)

        def advance(error: Tensor) -> Tensor:
            moved = states + size * error
            there = axis.with_previous(part, moved)
            change = (there.evaluate(there.entering_states(moved)) - values) / size
            return error + axis.scan(transition, change - error, zero, part.reset)

        scale = recent_scale(values, part.reset, part.recent_scale, half_life=math.inf)
        if part.valid is not None:
            scale = scale * part.valid.unsqueeze(-1)
        return measure_rate(advance, scale, axis.maximum)

    def exclude_rounding(
        self, rows: Tensor, slack: float, transition: Transition, change: Tensor, allowed: Tensor
    ) -> Tensor:
        """Return the size of a change in tolerances that are raised to accumulated rounding errors, (len(rows), time).

        Args:
            rows, slack: As in `next_change_beyond_rounding`.
            transition: The linearization of the sequences.
            change: (len(rows), time, n).
            allowed: (len(rows), time, n), their tolerances.
        """
        part, states = select(self.system, rows), self.states.index_select(0, rows)
        accumulated = allow_accumulated(part, states, transition, self.tolerance, slack)
        size = (change.abs() / torch.maximum(allowed, accumulated / slack)).amax(-1)
        return size if part.valid is None else torch.where(part.valid, size, 0.0)

    def count_leading(self) -> int:
        """Return the number of steps before the first that is not within tolerance, in the sequence that has most.

        If the time axis is split, all steps of this process are counted, because every process must take part in a
        scan.
        """
        if self.system.axis.is_split:
            return self.states.shape[1]
        return int(self.within_tolerance.long().cumprod(-1).sum(-1).max())

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


# From the remaining system, the states and the tolerance
MeasureFunction = Callable[[System, Tensor, Tolerance], MeasuredIterate]


class EvaluatedIterate(MeasuredIterate):
    """An iterate whose residual is computed by evaluating f, and which is updated by a transition.

    Args:
        system: The equations.
        states: (batch, time, n).
        tolerance: The tolerance of the residual.
        linearize: Returns the transition from the states that enter the steps.
        update: Returns the next states.
    """

    def __init__(
        self,
        system: System,
        states: Tensor,
        tolerance: Tolerance,
        linearize: Callable[[System, Tensor], Transition],
        update: UpdateFunction,
    ):
        self.system, self.states, self.update = system.axis.with_previous(system, states), states, update
        self.tolerance = tolerance
        self.entering, self.values, self.residual, self.own_excess, self.scale, self.allowed = measure_residual(
            self.system, states, tolerance
        )
        own_largest = largest(self.residual)
        self.excess, self.largest_residual = self.system.axis.earlier_maximum(self.own_excess, own_largest)
        self.within_tolerance = self.excess <= 1  # False for NaN
        self.linearize = linearize
        self._transition: Transition | None = None
        self._change: Tensor | None = None

    @property
    def transition(self) -> Transition:
        """The transition at this iterate, computed at first use."""
        if self._transition is None:
            self._transition = self.linearize(self.system, self.entering)
        return self._transition

    def next_states(self, strength: Tensor) -> Tensor:
        self._change = None
        return self.update(self.transition, self.system, Iterate(self.states, self.entering, self.values), strength)

    def allow_rounding(self, found: CancellingSteps | None) -> None:
        if found is not None:
            for part in found.split(self.states.shape[2]):
                _, allowed = allow_rounding(self.system, self.states, self.tolerance, part)
                self.allowed[part.rows, : part.steps] = allowed
            self.own_excess = _distance(self.system, self.values, self.states, self.allowed)[1]
        self.excess, _ = self.system.axis.earlier_maximum(self.own_excess, self.largest_residual[:0])
        self.within_tolerance = self.excess <= 1

    def next_change(self) -> Tensor:
        change = self._change = self._leading_change()
        size, valid = (change.abs() / self.allowed[:, : change.shape[1]]).amax(-1), self.system.valid
        return size if valid is None else torch.where(valid[:, : size.shape[1]], size, 0.0)

    def next_change_beyond_rounding(self, rows: Tensor, slack: float) -> Tensor:
        assert self._change is not None
        change, allowed = self._change.index_select(0, rows), self.allowed.index_select(0, rows)
        return self.exclude_rounding(rows, slack, self.transition.part(rows, 0), change, allowed)

    def linearization_of(self, rows: Tensor) -> Transition:
        return self.transition.part(rows, 0)

    def _leading_change(self) -> Tensor:
        """Return the undamped change of the next iteration in the leading steps, (batch, leading steps, n)."""
        system, steps = self.system, self.count_leading()
        if not steps:
            return self.states[:, :0]
        reset = None if system.reset is None else system.reset[:, :steps]
        residual, zero = self.values[:, :steps] - self.states[:, :steps], torch.zeros_like(system.initial)
        return system.axis.scan(self.transition.part(None, 0, steps), residual, zero, reset)

    def refine(self, rows: Tensor | None, steps: int) -> None:
        assert self._change is not None
        if rows is None:
            self.states[:, :steps] += self._change[:, :steps]
        else:
            self.states[rows, :steps] += self._change[rows, :steps]

    def part(self, rows: Tensor | None, start: int) -> "EvaluatedIterate":
        left = copy.copy(self)
        left.system, left._transition = self.part_system(rows, start), self.transition.part(rows, start)
        per_step = ("residual", "own_excess", "excess", "scale", "within_tolerance")
        for name in ("states", "entering", "values", "allowed", *per_step):
            values = getattr(self, name)[:, start:]
            setattr(left, name, values if rows is None else values.index_select(0, rows))
        if self._change is not None:
            change = self._change[:, start:]
            left._change = change if rows is None else change.index_select(0, rows)
        return left


class Residual(NamedTuple):
    """Residual of an iterate."""

    entering: Tensor  # (batch, time, n), the states that enter the steps
    values: Tensor  # (batch, time, n), f of the entering states
    size: Tensor  # (batch, time), max |f(s_{t-1}) - s_t|
    excess: Tensor  # (batch, time), the same, each channel divided by its tolerance
    scale: Tensor  # (batch, time), the largest entry of each step, of its entering state and of f
    allowed: Tensor  # (batch, time, n), the tolerances


def measure_residual(system: System, states: Tensor, tolerance: Tolerance) -> Residual:
    """Return the residual of an iterate.

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
    return Residual(entering, values, size, excess, scale, allowed)


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
