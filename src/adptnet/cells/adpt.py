"""The ADPT cell: x_t = M(x_{t-1}) x_{t-1} + drive_t with M = Q Λ̄ Q' (eq:recurrence_eq)."""

import torch
from torch import Tensor, nn

from .._typing import Device, DType, Positions
from ..errors import IncompatibleError, InputError
from ..ops._torch_state import has_values
from ..recurrence.beta import Beta
from ..recurrence.directions import Directions, bind_directions
from ..recurrence.drive import Drive
from ..recurrence.projections import Orthogonal
from ..recurrence.spectra import BlockDiagonal
from ..recurrence.step import DirectionFunction, Parameters
from .base import Cell
from .dispatch import Recurrence, make_form
from .evaluated import EvaluatedCell
from .spec import ADPTSpec

__all__ = ["ADPTCell", "CellWithArguments"]


class ADPTCell(EvaluatedCell):
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
        self.phase = None if spec.phase is None else spec.phase.build(spec.size, device=device, dtype=dtype)
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
            (..., time, features): the drive, key and value of each plane if they come from the input, the phase if
            there is one, then `dt` and `beta` if they are not None.
        """
        parts: list[Tensor] = []
        from_input = self.spec.has_directions_in_drive(beta_in_drive=beta is not None)
        needs_input = from_input or self.phase is not None
        drive = None if needs_input or dt is not None else self.drive.project_and_scale(inputs, self.spectrum)
        if drive is None:
            u = self.drive.project(inputs)
            drive = self.drive(u, position, self.spectrum, dt)
            for directions in self.directions if from_input else []:
                parts += [part.reshape(u.shape) for part in bind_directions(directions, u.dtype)(u)]
            parts += [] if self.phase is None else [self.phase(u, dt)]
        parts += [part.expand(*inputs.shape[:-1], 1) for part in (dt, beta) if part is not None]
        return torch.cat([drive, *parts], -1) if parts else drive

    @property
    def recurrence(self) -> Recurrence:
        modules = (self.spectrum, self.beta, self.directions)
        return Recurrence(((self, ADPTCell),), self.spec, self.directions, modules, make_form(self.spec))

    def eigenvalues(self) -> BlockDiagonal | None:
        """Return Λ̄; None with a phase, or a learned start, whose constant part Q₀ Λ̄ Q₀' is not diagonal."""
        if self.start is not None or self.phase is not None:
            return None
        lambda_bar: BlockDiagonal = self.spectrum()
        return lambda_bar

    def with_arguments(self, *, dt: Tensor | None = None, beta: Tensor | None = None) -> Cell:
        if beta is not None and not self.spec.conjugate.has_directions:
            raise IncompatibleError(
                f"{self.spec.conjugate} does not rotate and takes no beta=. Drop it, or use Exact()."
            )
        return self if dt is None and beta is None else CellWithArguments(self, dt, beta)

    def evaluate(self, *, stacked: bool = False, dt: bool = False, beta: bool = False) -> Parameters:
        """Evaluate the parameters of the step.

        Args:
            stacked: Evaluate K and V as matrices, for a kernel, and not as functions.
            dt: Whether the length of each step is part of the drive.
            beta: Whether β is part of the drive.
        """
        spec = self.spec
        blocks: BlockDiagonal = self.spectrum()
        dtype = blocks.real.dtype
        directions: list[DirectionFunction] | None = None
        if not spec.has_directions_in_drive(beta_in_drive=beta):
            directions = [
                d.stack(dtype) if stacked and isinstance(d, Directions) else bind_directions(d, dtype)
                for d in self.directions
            ]
        return Parameters(
            size=spec.size,
            heads=spec.heads,
            conjugate=spec.conjugate,
            retraction=spec.retraction,
            rotation_aware=spec.rotation_aware,
            blocks=None if dt else blocks,
            beta=None if beta else self.beta(blocks.real),
            directions=directions,
            modules=list(self.directions),
            spectrum=self.spectrum,
            start=None if self.start is None else self.start.dense().to(dtype),
            phased=self.phase is not None,
        )


class CellWithArguments(EvaluatedCell):
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

    @property
    def recurrence(self) -> Recurrence:
        inner = self.cell.recurrence
        owners: tuple[tuple[Cell, type[Cell]], ...] = (self, CellWithArguments), *inner.owners
        form = inner.form if self.beta is None else make_form(self.cell.spec, beta_in_drive=True)
        return inner._replace(owners=owners, form=form, dt=self.dt is not None)

    def eigenvalues(self) -> BlockDiagonal | None:
        return self.cell.eigenvalues() if self.dt is None else None

    @property
    def dtype(self) -> torch.dtype | None:
        return self.cell.dtype

    @property
    def device(self) -> torch.device | None:
        return self.cell.device

    def evaluate(self, *, stacked: bool = False) -> Parameters:
        return self.cell.evaluate(stacked=stacked, dt=self.dt is not None, beta=self.beta is not None)


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
