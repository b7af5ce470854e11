"""Base class of the cells whose step is that of `recurrence.step`: all that solvers need, from evaluated parameters."""

import abc
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .._typing import Matrix, Vector
from ..ops import _gpu, adpt_step
from ..ops._backends import REFERENCE, Backend, note_run
from ..ops.adpt_scan import Constants, Form
from ..ops.adpt_scan.packing import pack
from ..ops.adpt_step import Pass
from ..ops.products import has_bfloat16_products
from ..recurrence import step as recurrence_step
from ..recurrence.conjugates import Conjugate, PhasedConjugate, RotatedBlocks, nearest_blocks
from ..recurrence.jacobian import StepJacobian
from ..recurrence.spectra import BlockDiagonal
from ..recurrence.step import Parameters
from ..solvers.transitions import BasisTransition, DenseTransition, DiagonalTransition, PairTransition, Transition
from .base import Cell
from .dispatch import Recurrence, choose_scan, choose_step, run_scan
from .structure import Structure, differentiate

__all__ = ["EvaluatedCell"]

_BFLOAT16 = Backend(
    REFERENCE, "products with K and V run in bfloat16, for which there is no kernel.", is_announced=True
)
_CLOSED_FORM = Backend("closed form", "the step of this cell has a Jacobian in closed form.")


class EvaluatedCell(Cell):
    """Base class of the cells that evaluate their parameters once for all steps of a call."""

    @abc.abstractmethod
    def evaluate(self, *, stacked: bool = False) -> Parameters:
        """Evaluate the parameters of the step.

        Args:
            stacked: Evaluate K and V as matrices, for a kernel, and not as functions.
        """

    @property
    @abc.abstractmethod
    def recurrence(self) -> Recurrence:
        """The recurrence, for the choice of a kernel."""

    def step(self, state: Vector, drive: Tensor) -> Vector:
        return self.stepper()(state, drive)

    def structure(self) -> Structure:
        if type(self).step is not EvaluatedCell.step or "step" in self.__dict__:
            return Structure(choose_scan=self.choose_scan)  # all else is of another step
        return Structure(
            stepper=self.stepper,
            scan=self.scan,
            choose_scan=self.choose_scan,
            eigenvalues=self.eigenvalues,
            linear=self._linear_transition,
            forward=self._forward_transition,
            conjugate=self.conjugate,
            jacobian=self.jacobian,
            jacobian_blocks=self._jacobian_blocks,
            jacobian_chunks=self._jacobian_chunks,
            newton_pass=self._make_newton_pass,
            radius=self._radius,
        )

    @abc.abstractmethod
    def eigenvalues(self) -> BlockDiagonal | None:
        """Return Λ̄; None if the constant part of the step is not Λ̄."""

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        return functools.partial(recurrence_step.step, self.evaluate())

    def scan(
        self,
        drive: Tensor,
        state: Tensor,
        *,
        reset: Tensor | None = None,
        lengths: Tensor | None = None,
        lean: bool = False,
    ) -> Tensor | None:
        """Run all steps by a kernel; see `Structure.scan`."""
        recurrence = self.recurrence
        backend = choose_scan(recurrence, drive.dtype, drive.device)
        if drive.dtype == torch.float32 and has_bfloat16_products() and recurrence.form.has_products:
            backend = _BFLOAT16
        note_run("forward", backend)
        if not backend.is_kernel:
            return None
        parameters = self.evaluate(stacked=True)
        return run_scan(parameters, recurrence, drive, state, reset=reset, lengths=lengths, lean=lean)

    def choose_scan(self, device: torch.device | str) -> Backend:
        """Return the program by which `scan` runs all steps on a device; see `Structure.choose_scan`."""
        return choose_scan(self.recurrence, self.dtype, torch.device(device), list(self.parameters()))

    def conjugate(self, state: Vector, drive: Tensor) -> Conjugate:
        """Return the operator M at a state.

        Args:
            state: (..., state_size).
            drive: (..., features).
        """
        return recurrence_step.conjugate(self.evaluate(), state, drive)

    def _linear_transition(self, drive: Tensor) -> Transition:
        parameters = self.evaluate()
        parts = recurrence_step.split_drive(parameters, drive)
        start, phase = parameters.start, parts.phase
        eigen = recurrence_step.evaluate_eigenvalues(parameters, parts)
        if start is None:
            return _make_transition(eigen, phase)
        if phase is None:
            return BasisTransition(start.unsqueeze(0), DiagonalTransition(eigen))
        return DenseTransition(phase.mm(RotatedBlocks(eigen, start).dense()))

    def _forward_transition(self, state: Vector, drive: Tensor) -> Transition:
        operator = self.conjugate(state, drive)
        if isinstance(operator, PhasedConjugate):
            return _make_transition(operator.inner.blocks(), operator.phase)
        return _make_transition(operator.blocks(), None)

    def jacobian(self, state: Vector, drive: Tensor) -> Matrix:
        """Return the derivative of the step with respect to the state, (..., state_size, state_size).

        Args:
            state: (..., state_size).
            drive: (..., features).
        """
        chunks = self._fused_jacobians(state.reshape(1, -1, state.shape[-1]), drive)
        if chunks is not None:
            return chunks(0, chunks.states.shape[1]).reshape(*state.shape, -1)
        closed = recurrence_step.jacobian(self.evaluate(), state, drive)
        if closed is None:
            return differentiate(self.stepper(), state, drive)
        note_run("jacobian", _CLOSED_FORM)
        return closed.dense().expand(*state.shape, -1)

    def _jacobian_chunks(self, states: Tensor, drive: Tensor) -> Callable[[int, int], Tensor]:
        chunks = self._fused_jacobians(states, drive)
        if chunks is not None:
            return chunks
        closed = recurrence_step.jacobian(self.evaluate(), states, drive)
        if not isinstance(closed, StepJacobian):
            return lambda start, stop: self.jacobian(states[:, start:stop], drive[:, start:stop])
        return lambda start, stop: closed.slice_steps(start, stop).dense()

    def _jacobian_blocks(self, state: Vector, drive: Tensor) -> BlockDiagonal:
        closed = recurrence_step.jacobian(self.evaluate(), state, drive)
        if closed is None:
            lambda_bar = self.eigenvalues()
            paired = self.recurrence.form.phased or (lambda_bar is not None and lambda_bar.imag is not None)
            return nearest_blocks(self.jacobian(state, drive), paired)
        note_run("jacobian", _CLOSED_FORM)
        return closed.blocks()

    def _make_newton_pass(self, state: Tensor, drive: Tensor, *, diagonal: bool) -> Callable[..., Pass] | None:
        arguments = self._step_arguments("iteration", state, drive, diagonal)
        if arguments is None:
            return None
        constants, form = arguments
        if _gpu.is_gpu(drive.device):
            return adpt_step.DevicePass(constants, form, diagonal)
        return functools.partial(adpt_step.newton_pass, constants=constants, form=form, diagonal=diagonal)

    def _radius(self, state: Vector, drive: Tensor, reset_state: Vector, reset: Tensor | None) -> Tensor | None:
        return recurrence_step.bound_radius(self.evaluate(), state, drive, reset_state, reset)

    def _fused_jacobians(self, states: Tensor, drive: Tensor) -> adpt_step.Jacobians | None:
        arguments = self._step_arguments("jacobian", states, drive)
        return None if arguments is None else adpt_step.Jacobians(states.detach(), *arguments)

    def _step_arguments(
        self, phase: str, states: Tensor, drive: Tensor, diagonal: bool | None = None
    ) -> tuple[Constants, Form] | None:
        """Return the arguments of the kernels of `adpt_step`; None if the reference runs. Record the choice."""
        recurrence = self.recurrence
        backend = choose_step(recurrence, states, drive, diagonal)
        note_run(phase, backend)
        if not backend.is_kernel:
            return None
        return pack(self.evaluate(stacked=True), recurrence.form), recurrence.form


def _make_transition(blocks: BlockDiagonal, phase: BlockDiagonal | None) -> Transition:
    """Return the transition of a diagonal, or of P times it with a phase."""
    if phase is None:
        return DiagonalTransition(blocks)
    if blocks.imag is not None:
        return DiagonalTransition(phase.multiply(blocks))
    return PairTransition(phase.pair_matrices() @ blocks.pair_matrices())
