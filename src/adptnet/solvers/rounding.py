"""Rounding errors of f in the convergence test, in channels where large terms cancel.

There the rounding error of f can exceed the tolerance, which no iterate then meets. That error is measured: f is
evaluated again, with its argument perturbed by one rounding error. All quantities are per sequence, step and channel.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.tolerance import Tolerance, largest, recent_scale
from .system import System
from .transitions import Transition

__all__ = [
    "PROBES",
    "CancellingSteps",
    "accumulate",
    "allow_accumulated",
    "allow_rounding",
    "find_cancelling_steps",
    "limit_accumulated",
    "random_signs",
    "select",
    "split_batch",
    "split_rows",
]

WORKING_SET = 2**18  # state elements of the sequences that are processed at a time
PROBES = 3  # perturbations of the argument of f, of which the largest change counts
WALKS = 4  # random sums of rounding errors, whose root mean square is their expected size
MARGIN = 16  # a rounding error may be up to this many times its measured size
ACCUMULATED_MARGIN = 32  # the same for a sum of rounding errors, which later iterations do not remove but amplify
LARGEST_ACCUMULATED = 32  # relative tolerances of the largest |f| since the last reset


def random_signs(like: Tensor, seed: int, *, reverse: bool = False) -> Tensor:
    """Return -1 or 1 for each step and channel, (time, n).

    They are the same at every call, and drawn from the last step on, so that they depend neither on other sequences nor
    on how many leading steps have been dropped.

    Args:
        like: (batch, time, n), determines shape, dtype and device.
        seed: Selects the signs.
        reverse: Draw from the first step on, for solves backwards in time, which drop the last steps.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    signs = torch.randint(0, 2, like.shape[1:], generator=generator, dtype=like.dtype, device="cpu")
    return (signs if reverse else signs.flip(0)).mul_(2).sub_(1).to(like.device)


def measure_rounding(function: Callable[[Tensor], Tensor], at: Tensor, values: Tensor) -> Tensor:
    """Return the change of a function when its argument is perturbed by one rounding error, (batch, time, n).

    Args:
        function: From (batch, time, n) to (batch, time, n).
        at: (batch, time, n), its argument.
        values: function(at).
    """
    eps, change = torch.finfo(values.dtype).eps, torch.zeros_like(values)
    for seed in range(PROBES):
        perturbed = random_signs(at, seed).mul_(eps).add_(1).mul(at)
        torch.maximum(change, function(perturbed).sub_(values).abs_(), out=change)
        del perturbed
    return change


class CancellingSteps(NamedTuple):
    """The leading steps of some sequences in which a residual may be the rounding error of f."""

    rows: Tensor  # indices of the sequences
    steps: int
    settled: Tensor  # (len(rows), steps) bool: whether the step and all before it are within tolerance as a whole

    def split(self, size: int) -> "list[CancellingSteps]":
        """Split the sequences, as `split_rows` does.

        Args:
            size: The state size.
        """
        rows = split_rows(self.rows, self.steps * size)
        settled = self.settled.split(len(rows[0]))
        return [CancellingSteps(each, self.steps, part) for each, part in zip(rows, settled, strict=True)]


def find_cancelling_steps(suspected: Tensor, settled: Tensor) -> CancellingSteps | None:
    """Return the settled steps of the sequences in which rounding errors are suspected, up to the last suspected step.

    Args:
        suspected: (batch, time) bool.
        settled: (batch, time) bool, whether the step is within tolerance relative to its largest entry. Steps after
            one that is not within tolerance do not count, because their states will still change.
    """
    settled = settled.cumprod(1).bool()
    found = (suspected & settled).nonzero()
    if not len(found):
        return None
    rows, steps = found[:, 0].unique(), int(found[:, 1].max()) + 1
    return CancellingSteps(rows, steps, settled.index_select(0, rows)[:, :steps])


def allow_rounding(
    system: System, states: Tensor, tolerance: Tolerance, found: CancellingSteps
) -> tuple[Tensor, Tensor]:
    """Return f and the residual allowed in `found`, (len(rows), steps, n): the tolerance, or the rounding error of f.

    At most the relative tolerance of the largest entry of the step is allowed.

    Args:
        system: The equations.
        states: (batch, time, n), the iterate.
        tolerance: The tolerance of the residual.
        found: Sequences and steps.
    """
    part = select(system, found.rows, found.steps)
    entering = part.entering_states(states.index_select(0, found.rows)[:, : found.steps])
    values = part.evaluate(entering)
    allowed = tolerance.allowed(values, part.reset, part.recent_scale)
    rounding = recent_scale(measure_rounding(part.evaluate, entering, values).mul_(MARGIN), part.reset)
    size = torch.maximum(largest(entering), largest(values)).unsqueeze(-1)
    raised = torch.maximum(allowed, torch.minimum(rounding, tolerance.relative * size))
    return values, torch.where(found.settled.unsqueeze(-1), raised, allowed)


def accumulate(rounding: Tensor, scan: Callable[[Tensor], Tensor], *, reverse: bool = False) -> Tensor:
    """Return the expected size of the sum of rounding errors that a linear recurrence accumulates, (batch, time, n).

    They are added up with random signs. Errors of constant sign, which are not rounding errors, add up to far more.

    Args:
        rounding: (batch, time, n), the size of the rounding error of each step.
        scan: Runs the linear recurrence. It may overwrite its argument.
        reverse: Whether it runs from the last step to the first.
    """
    total = torch.zeros_like(rounding)
    for seed in range(WALKS):
        signs = random_signs(rounding, PROBES + seed, reverse=reverse)
        errors = scan(signs.mul(rounding))
        total.addcmul_(errors, errors)
        del errors
    return total.div_(WALKS).sqrt_()


def limit_accumulated(accumulated: Tensor, scale: Tensor, rtol: float, slack: float) -> Tensor:
    """Return the error allowed where rounding errors accumulate, (batch, time, n). The tensors are overwritten.

    Args:
        accumulated: (batch, time, n), the recent scale of the sum of the rounding errors.
        scale: (batch, time, n), the largest value of each channel since the last reset.
        rtol: The relative tolerance.
        slack: The largest error allowed, in tolerances.
    """
    largest_error = scale.mul_(min(4 * slack, LARGEST_ACCUMULATED) * rtol)
    return torch.minimum(accumulated.mul_(ACCUMULATED_MARGIN), largest_error, out=accumulated)


def allow_accumulated(
    system: System, states: Tensor, transition: Transition, tolerance: Tolerance, slack: float
) -> Tensor:
    """Return how large an error accumulated rounding errors of f can explain in each channel, (batch, time, n).

    Args:
        system: The equations.
        states: (batch, time, n), the iterate.
        transition: The linearization at the iterate.
        tolerance: The tolerance of the residual.
        slack: The largest error allowed, in tolerances.
    """
    entering, zero = system.entering_states(states), torch.zeros_like(system.initial)
    values = system.evaluate(entering)
    rounding = measure_rounding(system.evaluate, entering, values)
    total = accumulate(rounding, lambda offset: system.axis.scan(transition, offset, zero, system.reset))
    scale = recent_scale(values, system.reset, system.recent_scale, half_life=math.inf)
    return limit_accumulated(recent_scale(total, system.reset), scale, tolerance.relative, slack)


def split_rows(rows: Tensor, elements: int) -> tuple[Tensor, ...]:
    """Split the indices of sequences, so that the sequences of one part take little memory.

    Args:
        rows: Indices of the sequences.
        elements: The number of elements of the states of a sequence.
    """
    return rows.split(max(1, WORKING_SET // max(1, elements))) if len(rows) else ()


def split_batch(values: Tensor) -> list[slice]:
    """Return slices of the batch, so that the sequences of one part take little memory.

    Args:
        values: (batch, time, n).
    """
    count = max(1, WORKING_SET // max(1, values[:1].numel()))
    return [slice(start, start + count) for start in range(0, len(values), count)]


def select(system: System, rows: Tensor, steps: int | None = None) -> System:
    """Return the system of the leading steps of some sequences.

    Args:
        system: The equations.
        rows: Indices of the sequences.
        steps: The number of steps; None for all.
    """
    recent = None if system.recent_scale is None else system.recent_scale.index_select(0, rows)
    part = system.part(rows, 0, system.initial.index_select(0, rows), steps)
    return dataclasses.replace(part, recent_scale=recent)
