"""Iterations of Conv- and Forward-DEER as one fused pass over time each, for cells that have such an operation."""

import copy
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..cells.base import Cell
from ..cells.structure import find_eigenvalues
from ..errors import IncompatibleError
from ..ops import _gpu
from ..ops._backends import REFERENCE, Backend, note_run
from ..ops.adpt_step import DevicePass, Pass, reference
from ..ops.tolerance import Tolerance
from ..recurrence.spectra import BlockDiagonal
from .damping import Damping
from .iterates import MeasuredIterate, MeasureFunction
from .linearizations import Linearization
from .rounding import CancellingSteps, allow_rounding, select
from .system import System
from .transitions import DiagonalTransition, Transition

__all__ = ["find_newton_pass", "make_measure"]


def find_newton_pass(
    cell: Cell, system: System, linearization: Linearization, damping: Damping, tiles: int | None
) -> Callable[..., Pass] | None:
    """Return the operation that computes residuals and the next iterate in one pass; None if there is none.

    Args:
        cell: The cell of the system.
        system: The equations.
        linearization: The linearization of the solver.
        damping: The damping of the solver.
        tiles: The number of steps per tile of a Gauss-Seidel sweep; None for a parallel update.

    Raises:
        IncompatibleError: If tiles are requested and there is no fused pass.
    """
    newton_pass: Callable[..., Pass] | None = None
    unsupported = _explain_unsupported(system, linearization, damping, tiles)
    if unsupported is not None:
        note_run("iteration", unsupported, log=False)
    else:
        diagonal = bool(linearization.fused_diagonal)
        make_pass = cell.structure().newton_pass
        if make_pass is None:
            reason = f"{type(cell).__name__} has no kernel for a Newton iteration."
            note_run("iteration", Backend(REFERENCE, reason), log=False)
        else:
            newton_pass = make_pass(system.initial, system.step_inputs[0], diagonal=diagonal)
        if tiles is not None and (newton_pass is None or isinstance(newton_pass, DevicePass)):
            newton_pass = _make_reference_pass(cell, system, diagonal)
        if system.axis.is_split and not _all_have(newton_pass, system):
            if newton_pass is not None:
                note_run("iteration", Backend(REFERENCE, "another process has no kernel for it."), log=False)
            newton_pass = None
    if newton_pass is not None or tiles is None:
        return newton_pass
    raise IncompatibleError(
        f"tiles={tiles}: a sweep over tiles needs undamped ConvDEER or ForwardDEER, a cell with a real spectrum, and "
        "no lengths=. Drop tiles=."
    )


def make_measure(
    newton_pass: Callable[..., Pass] | None, cell: Cell, linearization: Linearization, tiles: int | None
) -> MeasureFunction | None:
    """Return a function that measures an iterate by one pass; None without such an operation.

    Args:
        newton_pass: The operation.
        cell, linearization, tiles: As in `find_newton_pass`.
    """
    if newton_pass is None:
        return None

    def linearize(part: System, entering: Tensor) -> Transition:
        return linearization.transition(cell, part, entering)

    return lambda part, states, tolerance: _FusedIterate(part, states, tolerance, newton_pass, linearize, tiles)


def _all_have(newton_pass: Callable[..., Pass] | None, system: System) -> bool:
    """Return whether there is a pass in every process; otherwise they would send different messages."""
    missing = torch.tensor([newton_pass is None], dtype=torch.uint8, device=system.initial.device)
    return not bool(system.axis.maximum(missing))


def _explain_unsupported(
    system: System, linearization: Linearization, damping: Damping, tiles: int | None
) -> Backend | None:
    """Return the reference with the reason if no fused pass supports these iterations, whatever the cell."""
    if linearization.fused_diagonal is None:
        reason, advice = f"the kernel does not support {linearization}.", "Try solvers.ConvDEER() or ForwardDEER()."
    elif not damping.has_fused_pass:
        reason, advice = f"the kernel does not support damping, {damping}.", "Drop it if the solve converges without."
    elif system.lengths is not None:
        reason, advice = "the kernel does not support lengths=.", "Batch sequences of equal length."
    elif len(system.step_inputs) != 1:
        reason, advice = "the kernel needs one tensor of inputs.", ""
    elif system.axis.is_split and (tiles is not None or _gpu.is_gpu(system.initial.device)):
        reason, advice = "the kernel does not support a time axis split over processes.", ""
    else:
        return None
    return Backend(REFERENCE, reason, advice)


def _make_reference_pass(cell: Cell, system: System, diagonal: bool) -> Callable[..., Pass] | None:
    """Return the pass in torch operations; None if the cell has no real, constant eigenvalues."""
    blocks, make_conjugate = find_eigenvalues(cell), cell.structure().conjugate
    if blocks is None or blocks.imag is not None or blocks.real.dim() != 1:
        return None

    def transition(state: Tensor, drive: Tensor) -> Tensor:
        conjugate = make_conjugate(state, drive) if diagonal and make_conjugate is not None else None
        return blocks.real if conjugate is None else conjugate.diagonal()

    return functools.partial(reference.newton_pass, step=system.step, transition=transition, shift=blocks.real)


class _FusedIterate(MeasuredIterate):
    """An iterate whose residuals are computed by one fused pass, together with the next iterate."""

    def __init__(
        self,
        system: System,
        states: Tensor,
        tolerance: Tolerance,
        newton_pass: Callable[..., Pass],
        linearize: Callable[[System, Tensor], Transition],
        tiles: int | None,
    ):
        has_dense_rows = states.stride(2) == 1 and states.stride(1) == states.shape[2]
        self.states = states.clone() if tiles is not None else states if has_dense_rows else states.contiguous()
        system = self.system = system.axis.with_previous(system, self.states)
        self.tolerance, self.linearize = tolerance, linearize
        result = newton_pass(
            self.states,
            system.step_inputs[0],
            system.initial,
            system.reset_state,
            system.reset,
            tolerance=tolerance,
            recent=system.recent_scale,
            tiles=tiles,
            complete=system.axis.is_split,
        )
        self.next, self.residual, self.scale, self.move = result.states, result.residual, result.scale, result.move
        if result.transition is not None and result.allowed is not None:
            self._add_earlier_correction(result.transition, result.allowed)
        own_largest = self.residual.amax(1) if self.residual.shape[1] else self.residual.new_zeros(len(states))
        self.own_excess = result.excess
        self.excess, self.largest_residual = system.axis.earlier_maximum(self.own_excess, own_largest)
        self.within_tolerance = self.excess <= 1  # False for NaN

    def _add_earlier_correction(self, factors: Tensor, allowed: Tensor) -> None:
        """Propagate the correction of the last state of the previous process into the next states of this one.

        Args:
            factors: (batch or 1, time or 1, n), the diagonal of the transition.
            allowed: (batch, time, n), the tolerances.
        """
        system, transition = self.system, DiagonalTransition(BlockDiagonal(factors))
        correction = self.next[:, -1] - self.states[:, -1]  # as if zero entered
        entering = system.axis.entering(transition, correction, system.reset, system.steps)
        if entering is None:
            return
        self.next += transition.scan(torch.zeros_like(self.next), entering, system.reset)
        self.move = torch.sub(self.next, self.states).abs_().div_(allowed).amax(-1)

    def allow_rounding(self, found: CancellingSteps | None) -> None:
        for part in [] if found is None else found.split(self.states.shape[2]):
            rows, at = part.rows, slice(None, part.steps)
            values, allowed = allow_rounding(self.system, self.states, self.tolerance, part)
            before, after = (each.index_select(0, rows)[:, at] for each in (self.states, self.next))
            self.own_excess[rows, at] = ((values - before).abs_() / allowed).amax(-1)
            self.move[rows, at] = ((after - before).abs_() / allowed).amax(-1)
        self.excess, _ = self.system.axis.earlier_maximum(self.own_excess, self.largest_residual[:0])
        self.within_tolerance = self.excess <= 1

    def next_states(self, strength: Tensor) -> Tensor:
        return self.next

    def next_change(self) -> Tensor:
        return self.move[:, : self.count_leading()]

    def next_change_beyond_rounding(self, rows: Tensor, slack: float) -> Tensor:
        states, part = self.states.index_select(0, rows), select(self.system, rows)
        entering = part.entering_states(states)
        transition = self.linearize(part, entering)
        allowed = self.tolerance.allowed(part.evaluate(entering), part.reset, part.recent_scale)
        return self.exclude_rounding(rows, slack, transition, self.next.index_select(0, rows) - states, allowed)

    def linearization_of(self, rows: Tensor) -> Transition:
        part = select(self.system, rows)
        return self.linearize(part, part.entering_states(self.states.index_select(0, rows)))

    def refine(self, rows: Tensor | None, steps: int) -> None:
        at = slice(None) if rows is None else rows
        self.states[at, :steps] = self.next[at, :steps]

    def part(self, rows: Tensor | None, start: int) -> "_FusedIterate":
        left = copy.copy(self)
        left.system = self.part_system(rows, start)
        for name in ("states", "next", "residual", "own_excess", "excess", "scale", "move", "within_tolerance"):
            every = getattr(self, name)[:, start:]
            setattr(left, name, every if rows is None else every.index_select(0, rows))
        return left
