"""The ADPT cell: x_t = M(x_{t-1}) x_{t-1} + drive_t with M = Q Λ̄ Q' (eq:recurrence_eq)."""

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .._typing import Device, DType, Matrix, Positions, Vector
from ..errors import IncompatibleError, InputError
from ..ops import adpt_step
from ..ops._backends import Backend, note_run
from ..ops._torch_state import has_values
from ..ops.adpt_scan import Constants, Form
from ..ops.adpt_step import Pass
from ..recurrence.beta import Beta
from ..recurrence.conjugates import block_diagonal, scaled_skew
from ..recurrence.directions import FromInput, bind_directions
from ..recurrence.drive import Drive
from ..recurrence.projections import Orthogonal
from ..recurrence.spectra import BlockDiagonal
from . import fused
from .base import Cell
from .bound import BindableCell, BoundParameters
from .dispatch import Recurrence, choose_scan, choose_step, run_scan
from .spec import ADPTSpec

__all__ = ["ADPTCell", "CellWithArguments"]


class ADPTCell(BindableCell):
    """The recurrence of the paper. Its parameters: the spectrum, K and V, the input projection B, gain, gate and β.

    Args:
        spec: All choices of the model.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: ADPTSpec, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = spec
        self.input_size = spec.width
        self.state_size = spec.size
        self.spectrum = spec.spectrum.build(spec.size, expansion=spec.expansion, device=device, dtype=dtype)
        self.beta = Beta(spec.beta, device=device, dtype=dtype)
        self.directions = nn.ModuleList(
            spec.direction.build(spec.size, spec.projection, device=device, dtype=dtype)
            for _ in range(spec.conjugate.planes)
        )
        self.start = Orthogonal().build(spec.size, spec.size, device=device, dtype=dtype) if spec.start else None
        self.drive = Drive(
            spec.input_projection.build(spec.width, spec.size, device=device, dtype=dtype),
            spec.gain.build(self.spectrum),
            None if spec.gate is None else spec.gate.build(spec.size, device=device, dtype=dtype),
            None if spec.rope is None else spec.rope.build(spec.size, device=device, dtype=dtype),
        )

    def prepare(self, inputs: Tensor, position: Positions) -> Tensor:
        return self.prepare_with_arguments(inputs, position, None, None)

    def prepare_with_arguments(
        self, inputs: Tensor, position: Tensor, dt: Tensor | None, beta: Tensor | None
    ) -> Tensor:
        """Return the drive, concatenated with all else that a step needs.

        Args:
            inputs: (..., time, width).
            position: Steps since the sequence began, (..., time).
            dt: The length of each step, (..., time, 1); None if all are 1.
            beta: β of each sequence, (..., 1, 1); None for that of the cell.

        Returns:
            (..., time, features): the drive, key and value of each plane if they come from the input, then `dt` and
            `beta` if they are not None.
        """
        parts: list[Tensor] = []
        from_input = isinstance(self.spec.direction, FromInput)
        drive = None if from_input or dt is not None else self.drive.project_and_scale(inputs, self.spectrum)
        if drive is None:
            u = self.drive.project(inputs)
            drive = self.drive(u, position, self.spectrum, dt)
            for directions in self.directions if from_input else []:
                parts += [part.reshape(u.shape) for part in bind_directions(directions, u.dtype)(u)]
        parts += [part.expand(*inputs.shape[:-1], 1) for part in (dt, beta) if part is not None]
        return torch.cat([drive, *parts], -1) if parts else drive

    def scan(
        self,
        drive: Tensor,
        state: Tensor,
        *,
        reset: Tensor | None = None,
        lengths: Tensor | None = None,
        lean: bool = False,
    ) -> Tensor | None:
        recurrence = self.recurrence
        backend = choose_scan(recurrence, drive.dtype, drive.device)
        note_run("forward", backend)
        return self.run_fused_scan(drive, state, reset, lengths, lean, recurrence.form) if backend.is_kernel else None

    def choose_scan(self, device: torch.device | str) -> Backend:
        return choose_scan(self.recurrence, self.dtype, torch.device(device), list(self.parameters()))

    @property
    def recurrence(self) -> Recurrence:
        """The recurrence, for the choice of a kernel."""
        return Recurrence(((self, ADPTCell),), self.spec, self.directions, fused.make_form(self.spec))

    def run_fused_scan(
        self, drive: Tensor, state: Tensor, reset: Tensor | None, lengths: Tensor | None, lean: bool, form: Form
    ) -> Tensor | None:
        """Run the compiled kernel, without checking whether it supports this cell.

        Args:
            drive: (batch, time, features).
            state: The state before the first step, (batch, state_size).
            reset: See `scan`.
            lengths: See `scan`.
            lean: See `scan`.
            form: The form of the recurrence.

        Returns:
            The states, (batch, time, state_size); None inside a `torch.func` transform.
        """
        constants = self.make_constants(form)
        if self.start is None:
            factors = fused.make_factors(self.directions, form, drive.dtype)
            return run_scan(constants, form, drive, state, reset=reset, lengths=lengths, lean=lean, factors=factors)
        start = self.start.dense().to(drive.dtype)
        changed = fused.change_basis(start, constants, form, drive, state)
        states = run_scan(
            changed.constants, form, changed.drive, changed.state, reset=reset, lengths=lengths, lean=lean
        )
        return None if states is None else states @ start.mT

    def make_constants(self, form: Form) -> Constants:
        """Return the evaluated parameters as the kernel takes them.

        Args:
            form: The form of the recurrence.
        """
        beta = None if form.beta_in_drive else self.beta
        return fused.make_constants(self.spectrum(), self.directions, beta, form)

    def eigenvalues(self) -> BlockDiagonal | None:
        """Return Λ̄; None with a learned start, whose constant part Q₀ Λ̄ Q₀' is not diagonal."""
        if self.start is not None:
            return None
        lambda_bar: BlockDiagonal = self.spectrum()
        return lambda_bar

    def jacobian(self, state: Vector, drive: Tensor) -> Matrix:
        chunks = self._fused_jacobians(state.reshape(1, -1, state.shape[-1]), drive)
        if chunks is None:
            return super().jacobian(state, drive)
        return chunks(0, chunks.states.shape[1]).reshape(*state.shape, -1)

    def jacobian_chunks(self, states: Tensor, drive: Tensor) -> Callable[[int, int], Tensor]:
        chunks = self._fused_jacobians(states, drive)
        return super().jacobian_chunks(states, drive) if chunks is None else chunks

    def _fused_jacobians(self, states: Tensor, drive: Tensor) -> adpt_step.Jacobians | None:
        arguments = self._step_arguments("jacobian", states, drive)
        return None if arguments is None else adpt_step.Jacobians(states.detach(), *arguments)

    def make_newton_pass(self, state: Tensor, drive: Tensor, *, diagonal: bool) -> Callable[..., Pass] | None:
        arguments = self._step_arguments("iteration", state, drive)
        if arguments is None:
            return None
        constants, form = arguments
        return functools.partial(adpt_step.newton_pass, constants=constants, form=form, diagonal=diagonal)

    def _step_arguments(self, phase: str, states: Tensor, drive: Tensor) -> tuple[Constants, Form] | None:
        """Return the arguments of the kernels of `adpt_step`; None if the reference runs. Record the choice."""
        parts = (self.spectrum, self.beta, self.directions)
        sources = [t for part in parts for t in itertools.chain(part.parameters(), part.buffers())]
        recurrence = self.recurrence
        backend = choose_step(recurrence, (states, drive, *sources))
        note_run(phase, backend)
        return (self.make_constants(recurrence.form), recurrence.form) if backend.is_kernel else None

    def reference_conjugate(self, state: Vector, drive: Tensor) -> Matrix:
        """Return M computed from its definition with dense matrices: the slow reference for `conjugate`.

        Args:
            state: (..., state_size).
            drive: (..., features).

        Returns:
            (..., state_size, state_size).
        """
        bound, spec = self.bind(), self.spec
        eigen, planes, beta = bound.evaluate(state, bound.split_drive(drive))
        dense = spec.conjugate.reference_matrix(eigen, planes, beta, spec.retraction)
        dense = block_diagonal(dense) if spec.heads > 1 else dense
        return dense.expand(*state.shape, self.state_size)

    def reference_step(self, state: Vector, drive: Tensor) -> Vector:
        """Return the next state computed from its definition with dense matrices: the slow reference for `step`.

        Args:
            state: (..., state_size).
            drive: (..., features).
        """
        bound, spec = self.bind(), self.spec
        parts = bound.split_drive(drive)
        driven = parts.drive
        if spec.rotation_aware:
            _, planes, beta = bound.evaluate(state, parts)
            rotation = torch.eye(spec.size // spec.heads, dtype=state.dtype, device=state.device)
            for plane in planes:
                rotation = spec.retraction.reference_matrix(scaled_skew(beta, plane)) @ rotation
            rotation = block_diagonal(rotation) if spec.heads > 1 else rotation
            driven = (rotation @ driven.unsqueeze(-1)).squeeze(-1)
        return (self.reference_conjugate(state, drive) @ state.unsqueeze(-1)).squeeze(-1) + driven

    def with_arguments(self, *, dt: Tensor | None = None, beta: Tensor | None = None) -> Cell:
        if beta is not None and not self.spec.conjugate.has_directions:
            raise IncompatibleError(
                f"{self.spec.conjugate} does not rotate and takes no beta=. Drop it, or use Exact()."
            )
        return self if dt is None and beta is None else CellWithArguments(self, dt, beta)

    def bind(self, *, dt: bool = False, beta: bool = False) -> BoundParameters:
        """Evaluate the parameters.

        Args:
            dt: Whether the length of each step is part of the drive.
            beta: Whether β is part of the drive.
        """
        blocks: BlockDiagonal = self.spectrum()
        dtype = blocks.real.dtype
        from_state = not isinstance(self.spec.direction, FromInput)
        return BoundParameters(
            spec=self.spec,
            spectrum=self.spectrum,
            blocks=None if dt else blocks,
            start=None if self.start is None else self.start.dense().to(dtype),
            beta=None if beta else self.beta(blocks.real),
            directions=[bind_directions(d, dtype) for d in self.directions] if from_state else None,
            projections=list(self.directions),
        )


class CellWithArguments(BindableCell):
    """An `ADPTCell` with the arguments of one call: the length of each step, a β for each sequence.

    Args:
        cell: The cell.
        dt: (batch, time), or None.
        beta: (batch,), or None.
    """

    def __init__(self, cell: ADPTCell, dt: Tensor | None, beta: Tensor | None):
        super().__init__()
        self.cell = cell
        self.input_size = cell.input_size
        self.state_size = cell.state_size
        self.dt = dt
        self.beta = beta

    def reindex_arguments(self, index: Tensor) -> Cell:
        if self.dt is None:
            return self
        dt = torch.as_tensor(self.dt, device=index.device)
        dt = dt.unsqueeze(0) if dt.dim() == 1 else dt
        return CellWithArguments(self.cell, dt.gather(1, index), self.beta) if dt.shape == index.shape else self

    def prepare(self, inputs: Tensor, position: Positions) -> Tensor:
        dt, beta = self.dt, self.beta
        dt = None if dt is None else _check_argument("dt", dt, inputs, inputs.shape[:-1], "(batch, time)", 1e15)
        beta = None if beta is None else _check_argument("beta", beta, inputs, inputs.shape[:-2], "(batch,)", 1e6)
        return self.cell.prepare_with_arguments(
            inputs,
            position,
            None if dt is None else dt.unsqueeze(-1),
            None if beta is None else beta.reshape(*beta.shape, 1, 1),
        )

    def scan(
        self,
        drive: Tensor,
        state: Tensor,
        *,
        reset: Tensor | None = None,
        lengths: Tensor | None = None,
        lean: bool = False,
    ) -> Tensor | None:
        recurrence = self.recurrence
        backend = choose_scan(recurrence, drive.dtype, drive.device)
        note_run("forward", backend)
        if not backend.is_kernel:
            return None
        return self.cell.run_fused_scan(drive, state, reset, lengths, lean, recurrence.form)

    def choose_scan(self, device: torch.device | str) -> Backend:
        return choose_scan(self.recurrence, self.dtype, torch.device(device), list(self.parameters()))

    @property
    def recurrence(self) -> Recurrence:
        """The recurrence, for the choice of a kernel."""
        inner = self.cell.recurrence
        owners: tuple[tuple[Cell, type[Cell]], ...] = (self, CellWithArguments), *inner.owners
        form = inner.form if self.beta is None else fused.make_form(self.cell.spec, beta_in_drive=True)
        return inner._replace(owners=owners, form=form, dt=self.dt is not None)

    def eigenvalues(self) -> BlockDiagonal | None:
        return self.cell.eigenvalues() if self.dt is None else None

    @property
    def dtype(self) -> torch.dtype | None:
        return self.cell.dtype

    @property
    def device(self) -> torch.device | None:
        return self.cell.device

    def bind(self) -> BoundParameters:
        return self.cell.bind(dt=self.dt is not None, beta=self.beta is not None)


def _check_argument(
    name: str, values: Tensor, inputs: Tensor, shape: torch.Size, layout: str, largest: float
) -> Tensor:
    """Return an argument of a call in the dtype of `inputs`; raise `InputError` for a wrong shape or value."""
    values = torch.as_tensor(values, dtype=inputs.dtype, device=inputs.device)
    if values.dim() == len(shape) - 1:
        values = values.unsqueeze(0)  # one sequence
    if values.shape != shape:
        raise InputError(f"{name} has shape {tuple(values.shape)}; it must be {layout}, {tuple(shape)}.")
    if not has_values(values):
        return values
    try:
        valid = bool(((values >= 0) & (values <= largest)).all())
    except RuntimeError:  # under vmap values cannot be read
        return values
    if not valid:
        low, high = values.min().item(), values.max().item()
        raise InputError(f"{name} must be in 0 to {largest:g} everywhere, and no NaN; it ranges from {low} to {high}.")
    return values
