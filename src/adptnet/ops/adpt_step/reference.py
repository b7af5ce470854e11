"""A pass of Newton's method along time in torch: the specification of `newton_pass`."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..linear_scan import linear_scan

__all__ = ["Pass", "newton_pass"]


class Pass(NamedTuple):
    """What one pass finds."""

    states: Tensor  # (batch, time, n): the next iterate
    residual: Tensor  # (batch, time): max |f(s_{t-1}) - s_t|
    scale: Tensor  # (batch, time): the larger of max |s_{t-1}| and max |f(s_{t-1})|
    move: Tensor  # (batch, time): max |next - s_t|


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
        tiles: Sweep over tiles of so many steps, each of which starts from the corrected end of the one before: its
            guess is moved by shift, shift², ... times that correction, and only then f is evaluated. That takes fewer
            passes, but one tile after another.
    """
    length = states.shape[1] if tiles is None else tiles
    entry = expected = initial  # the state that enters a tile, and what it was before this pass
    parts = []
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
        sizes = (values - guess, torch.maximum(entering.abs(), values.abs()), following - guess)
        parts.append((following, *(torch.linalg.vector_norm(size, torch.inf, -1) for size in sizes)))
    return Pass(*(torch.cat(each, 1) for each in zip(*parts, strict=True)))
