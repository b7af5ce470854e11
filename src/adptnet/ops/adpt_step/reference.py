"""A pass of Newton's method along time in torch: the specification of `newton_pass`."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..linear_scan import linear_scan
from ..tolerance import Tolerance, largest, remembered_scale

__all__ = ["Pass", "newton_pass"]


class Pass(NamedTuple):
    """What one pass finds."""

    states: Tensor  # (batch, time, n): the next iterate
    residual: Tensor  # (batch, time): max |f(s_{t-1}) - s_t|
    excess: Tensor  # (batch, time): the same, each channel divided by its tolerance
    scale: Tensor  # (batch, time): the larger of max |s_{t-1}| and max |f(s_{t-1})|
    move: Tensor  # (batch, time): max |next - s_t|, each channel divided by its tolerance


def newton_pass(
    states: Tensor,
    drive: Tensor,
    initial: Tensor,
    fresh: Tensor,
    reset: Tensor | None,
    step: Callable[[Tensor, Tensor], Tensor],
    transition: Callable[[Tensor, Tensor], Tensor],
    shift: Tensor,
    *,
    tolerance: Tolerance,
    recent: Tensor | None = None,
    tiles: int | None = None,
) -> Pass:
    """s + scan(A, f(s) - s) (eq:deer_step), and how far s is from a solution.

    Args:
        states: (batch, time, n) the iterate. With `tiles` it is changed in place to the one that is measured.
        drive: (batch, time, n).
        initial: (batch, n), entering the first step.
        fresh: (batch, n), entering a step with a reset.
        reset: (batch, time) bool, or None.
        step: f, of states and drives.
        transition: The diagonal A, (batch, time, n) or (n,), of the same.
        shift: (n,) what a correction is multiplied by from step to step within a tile.
        tolerance: The largest residual of each channel.
        recent: (batch, n) recent scale of the states before the first step, or None.
        tiles: Sweep over tiles of so many steps, each of which starts from the corrected end of the one before: its
            guess is moved by shift, shift², ... times that correction, and only then f is evaluated. That takes fewer
            passes, but one tile after another.
    """
    length = states.shape[1] if tiles is None else tiles
    entry = expected = initial  # the state that enters a tile, and what it was before this pass
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, states.shape[1], max(1, length)):
        at = slice(start, min(start + length, states.shape[1]))
        guess, resets = states[:, at], None if reset is None else reset[:, at]
        before = states[:, start - 1] if start else initial
        if tiles is not None and start:
            guess[:, :-1] += linear_scan(shift, torch.zeros_like(guess), entry - expected, reset=resets)[:, :-1]
        entering = torch.cat((before.unsqueeze(1), guess[:, :-1]), 1)
        if resets is not None:
            entering = torch.where(resets.unsqueeze(-1), fresh.unsqueeze(1), entering)
        values = step(entering, drive[:, at])
        correction = linear_scan(transition(entering, drive[:, at]), values - guess, entry - before, reset=resets)
        following = guess + correction
        entry, expected = following[:, -1].clone(), guess[:, -1].clone()
        if tiles is not None:
            guess[:, -1] = entry
        allowed = tolerance.allowed(values, resets, recent)
        recent = remembered_scale(values, resets, recent)
        off, moved = (values - guess).abs(), (following - guess).abs()
        scale = torch.maximum(largest(entering), largest(values))
        parts.append((following, off.amax(-1), (off / allowed).amax(-1), scale, (moved / allowed).amax(-1)))
    return Pass(*(torch.cat(each, 1) for each in zip(*parts, strict=True)))
