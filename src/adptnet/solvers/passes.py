"""Iterations of Conv- and Forward-DEER as one pass over time each, where the cell has an operation for it."""

import copy
import functools
from collections.abc import Callable

from torch import Tensor

from ..cells.base import Cell
from ..errors import IncompatibleError
from ..ops.adpt_step import Pass, reference
from ..ops.linear_scan import linear_scan
from ..ops.tolerance import Tolerance
from .damping import Damping, Undamped
from .fixed_point import Measure, Measured, fails_only_per_channel, measured
from .linearisations import ConjugateDiagonal, Linear, Linearisation
from .system import System

__all__ = ["passes"]


def passes(
    cell: Cell, system: System, linearisation: Linearisation, damping: Damping, tiles: int | None
) -> Measure | None:
    """What measures an iterate and finds the next in one pass; None where there is nothing of the kind."""
    plain = isinstance(damping, Undamped) and system.lengths is None and len(system.givens) == 1
    by_scan = isinstance(linearisation, Linear) and linearisation.by is linear_scan
    found: Callable[..., Pass] | None = None
    if plain and (by_scan or isinstance(linearisation, ConjugateDiagonal)):
        diagonal = isinstance(linearisation, ConjugateDiagonal)
        found = cell.newton_pass(system.initial, system.givens[0], diagonal=diagonal)
        if found is None and tiles is not None:
            found = _in_torch(cell, system, diagonal)
    if found is not None:
        return lambda part, rows, start, states, limits: _Passed(part, states, limits, found, tiles)
    if tiles is None:
        return None
    raise IncompatibleError(
        f"tiles={tiles}: a sweep over tiles is for undamped ConvDEER and ForwardDEER of cells with a real spectrum, "
        "without lengths=. Drop tiles=."
    )


def _in_torch(cell: Cell, system: System, diagonal: bool) -> Callable[..., Pass] | None:
    blocks = cell.eigenvalues()
    if blocks is None or blocks.imag is not None or blocks.real.dim() != 1:
        return None

    def transition(state: Tensor, drive: Tensor) -> Tensor:
        conjugate = cell.conjugate(state, drive) if diagonal else None
        return blocks.real if conjugate is None else conjugate.diagonal()

    return functools.partial(reference.newton_pass, step=system.step, transition=transition, shift=blocks.real)


class _Passed(Measured):
    """By one pass, which finds the next iterate as well."""

    def __init__(
        self,
        system: System,
        states: Tensor,
        tolerance: Tolerance,
        run: Callable[..., Pass],
        tiles: int | None,
    ):
        rows_follow = states.stride(2) == 1 and states.stride(1) == states.shape[2]
        self.states = states.clone() if tiles is not None else states if rows_follow else states.contiguous()
        self.system = system
        drive, initial, fresh, reset = system.givens[0], system.initial, system.fresh, system.reset
        found = run(self.states, drive, initial, fresh, reset, tolerance=tolerance, recent=system.recent, tiles=tiles)
        self.next, self.residual, self.excess, self.move = found.states, found.residual, found.excess, found.move
        if fails_only_per_channel(tolerance, found.residual, found.excess, found.scale):
            residual = measured(system, self.states, tolerance)
            self.excess = residual.excess
            self.move = ((self.next - self.states).abs() / residual.allowed).amax(-1)
        self.right = self.excess <= 1  # False for NaN

    def following(self, strength: Tensor) -> Tensor:
        return self.next

    def moved(self) -> Tensor:
        return self.move[:, : int(self.right.long().cumprod(-1).sum(-1).max())]

    def part(self, rows: Tensor | None, start: int) -> "_Passed":
        left = copy.copy(self)
        left.system = self.left(rows, start)
        for name in ("states", "next", "residual", "excess", "move", "right"):
            every = getattr(self, name)[:, start:]
            setattr(left, name, every if rows is None else every.index_select(0, rows))
        return left
