"""A pass of Newton's method over time in PyTorch: the specification of `newton_pass`."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..linear_scan import linear_scan
from ..tolerance import Tolerance, largest, remembered_scale

__all__ = ["Pass", "newton_pass"]


class Pass(NamedTuple):
    """The result of one pass."""

    states: Tensor  # (batch, time, n): the next iterate
    residual: Tensor  # (batch, time): max |f(s_{t-1}) - s_t|
    excess: Tensor  # (batch, time): the same with each channel divided by its tolerance
    scale: Tensor  # (batch, time): the larger of max |s_{t-1}| and max |f(s_{t-1})|
    move: Tensor  # (batch, time): max |next - s_t| with each channel divided by its tolerance
    transition: Tensor | None = None  # (batch or 1, time or 1, n): A, where it is asked for
    allowed: Tensor | None = None  # (batch, time, n): the tolerances, where they are asked for


def newton_pass(
    states: Tensor,
    drive: Tensor,
    initial: Tensor,
    reset_state: Tensor,
    reset: Tensor | None,
    step: Callable[[Tensor, Tensor], Tensor],
    transition: Callable[[Tensor, Tensor], Tensor],
    shift: Tensor,
    *,
    tolerance: Tolerance,
    recent: Tensor | None = None,
    tiles: int | None = None,
    complete: bool = False,
) -> Pass:
    """Return s + scan(A, f(s) - s) (eq:deer_step), and the residual of s.

    Args:
        states: (batch, time, n), the iterate s. With `tiles` it is overwritten by the corrected iterate.
        drive: (batch, time, n).
        initial: (batch, n), the state before the first step.
        reset_state: (batch, n), the state that enters a step with a reset.
        reset: (batch, time) bool, or None.
        step: f, from states and drives to states.
        transition: The diagonal A, (batch, time, n) or (n,), from states and drives.
        shift: (n,), the factor that propagates a correction from step to step within a tile.
        tolerance: The largest residual of each channel.
        recent: (batch, n), the recent scale of the states before the first step, or None.
        tiles: Sweep sequentially over tiles of this many steps (Gauss-Seidel). Before f is evaluated in a tile, shift,
            shift², ... times the correction at the last step of the previous tile are added to its states. The
            residuals are those of the states so corrected. This takes fewer passes, but is sequential over tiles.
        complete: Whether to return the transition and the tolerances as well.
    """
    length = states.shape[1] if tiles is None else tiles
    entry = previous_entry = initial  # the state that enters a tile, after and before this pass
    parts: list[tuple[Tensor, ...]] = []
    factors: list[Tensor] = []
    limits: list[Tensor] = []
    for start in range(0, states.shape[1], max(1, length)):
        at = slice(start, min(start + length, states.shape[1]))
        guess, resets = states[:, at], None if reset is None else reset[:, at]
        before = states[:, start - 1] if start else initial
        if tiles is not None and start:
            guess[:, :-1] += linear_scan(shift, torch.zeros_like(guess), entry - previous_entry, reset=resets)[:, :-1]
        entering = torch.cat((before.unsqueeze(1), guess[:, :-1]), 1)
        if resets is not None:
            entering = torch.where(resets.unsqueeze(-1), reset_state.unsqueeze(1), entering)
        values = step(entering, drive[:, at])
        factors.append(transition(entering, drive[:, at]))
        correction = linear_scan(factors[-1], values - guess, entry - before, reset=resets)
        updated = guess + correction
        entry, previous_entry = updated[:, -1].clone(), guess[:, -1].clone()
        if tiles is not None:
            guess[:, -1] = entry
        allowed = tolerance.allowed(values, resets, recent)
        limits.append(allowed)
        recent = remembered_scale(values, resets, recent)
        residual, change = (values - guess).abs(), (updated - guess).abs()
        scale = torch.maximum(largest(entering), largest(values))
        parts.append((updated, residual.amax(-1), (residual / allowed).amax(-1), scale, (change / allowed).amax(-1)))
    found = Pass(*(torch.cat(each, 1) for each in zip(*parts, strict=True)))
    if not complete:
        return found
    every = factors[0].expand(1, 1, -1) if factors[0].dim() == 1 else torch.cat(factors, 1)
    return found._replace(transition=every, allowed=torch.cat(limits, 1))
