"""What rounding errors of f do to the convergence test in channels where large terms cancel.

There the rounding error of f exceeds the tolerance of the channel, so that no iterate can meet it. It is measured: f is
evaluated again, with its argument perturbed by one rounding error. All of it is per sequence, step and channel.
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

__all__ = ["CancellingSteps", "allow_accumulated", "allow_rounding", "find_cancelling_steps", "measure_rounding"]

PROBES = 3  # perturbations of the argument of f, of which the largest change counts
WALKS = 4  # random sums of rounding errors, whose root mean square is their expected size
MARGIN = 8  # how many times its measured size a rounding error may be
ACCUMULATED_MARGIN = 32  # the same for a sum of rounding errors, which later iterations do not remove but amplify
LARGEST_ACCUMULATED = 32  # relative tolerances of the largest |f| since the last reset


def random_signs(steps: int, size: int, like: Tensor, seed: int) -> Tensor:
    """Return -1 or 1 for each step and channel, (steps, size).

    They are the same at every call and counted from the last step, so that they depend neither on other sequences nor
    on how many leading steps have been dropped.

    Args:
        steps: The number of steps.
        size: The number of channels.
        like: Determines dtype and device.
        seed: Selects the signs.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    signs = torch.randint(0, 2, (steps, size), generator=generator, dtype=like.dtype, device="cpu")
    return signs.flip(0).mul_(2).sub_(1).to(like.device)


def measure_rounding(function: Callable[[Tensor], Tensor], at: Tensor, values: Tensor) -> Tensor:
    """Return the change of a function when its argument is perturbed by one rounding error, (batch, time, n).

    Args:
        function: From (batch, time, n) to (batch, time, n).
        at: (batch, time, n), its argument.
        values: function(at).
    """
    eps, change = torch.finfo(values.dtype).eps, torch.zeros_like(values)
    for seed in range(PROBES):
        perturbed = random_signs(*at.shape[1:], at, seed).mul_(eps).add_(1).mul(at)
        change = torch.maximum(change, function(perturbed).sub_(values).abs_())
    return change


class CancellingSteps(NamedTuple):
    """The leading steps of some sequences in which only the tolerance of single channels is exceeded."""

    rows: Tensor  # indices of the sequences
    steps: int
    settled: Tensor  # (len(rows), steps) bool: whether the step and all before it are within tolerance as a whole


def find_cancelling_steps(
    tolerance: Tolerance, size: Tensor, excess: Tensor, scale: Tensor
) -> CancellingSteps | None:
    """Return the steps that are within tolerance relative to their largest entry, but not in every channel.

    Steps after one that is not within tolerance as a whole do not count: their states will still change.

    Args:
        tolerance: The tolerance of the residual.
        size: (batch, time), the largest residual of each step.
        excess: (batch, time), the same, each channel divided by its tolerance.
        scale: (batch, time), the largest entry of each step, in its entering state and in f.
    """
    settled = (size <= tolerance.relative * scale + tolerance.floor(scale.dtype)).cumprod(1).bool()
    found = ((excess > 1) & settled).nonzero()
    if not len(found):
        return None
    rows, steps = found[:, 0].unique(), int(found[:, 1].max()) + 1
    return CancellingSteps(rows, steps, settled.index_select(0, rows)[:, :steps])


def allow_rounding(
    system: System, states: Tensor, tolerance: Tolerance, found: CancellingSteps
) -> tuple[Tensor, Tensor]:
    """Return f and the residual allowed in `found`, (len(rows), steps, n): the tolerance, or the rounding error of f.

    A rounding error of the largest entry of a step is within tolerance, so this allows at most the relative tolerance of
    that entry.

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


def allow_accumulated(
    system: System, states: Tensor, transition: Transition, tolerance: Tolerance, slack: float
) -> Tensor:
    """Return the error that accumulated rounding errors of f cause in each channel, (batch, time, n).

    They are added up by the linear recurrence with random signs. Errors of one sign, which are no rounding errors, add up
    to far more. The result is limited by the relative tolerance of the largest |f| of the channel since the last reset.

    Args:
        system: The equations.
        states: (batch, time, n), the iterate.
        transition: The linearization at the iterate.
        tolerance: The tolerance of the residual.
        slack: The number of tolerances that an error may be.
    """
    entering = system.entering_states(states)
    values = system.evaluate(entering)
    rounding = measure_rounding(system.evaluate, entering, values)
    zero, total = torch.zeros_like(system.initial), torch.zeros_like(states)
    for seed in range(WALKS):
        signs = random_signs(*states.shape[1:], states, PROBES + seed)
        total += system.axis.scan(transition, signs * rounding, zero, system.reset).square()
    accumulated = recent_scale(total.div_(WALKS).sqrt_(), system.reset)
    scale = recent_scale(values, system.reset, system.recent_scale, half_life=math.inf)
    limit = min(4 * slack, LARGEST_ACCUMULATED) * tolerance.relative
    return torch.minimum(ACCUMULATED_MARGIN * accumulated, limit * scale)


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
