"""The ADPT cell: x_t = M(x_{t-1}) x_{t-1} + drive_t with M = Q Λ̄ Q' (eq:recurrence_eq)."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .._typing import Device, DType, Matrix, Positions, Vector
from ..errors import IncompatibleError, InputError
from ..ops import adpt_step
from ..ops._torch_state import has_values, transformed
from ..ops.adpt_scan import Constants, Form
from ..ops.adpt_step import Pass
from ..recurrence.beta import Beta
from ..recurrence.conjugates import block_diagonal, dense_step
from ..recurrence.directions import FromInput, bind_directions
from ..recurrence.drive import Drive
from ..recurrence.projections import Orthogonal
from ..recurrence.spectra import BlockDiagonal
from . import fused
from .base import Cell
from .bound import Bound, BoundCell
from .spec import ADPTSpec

__all__ = ["ADPTCell", "GivenCell"]


class ADPTCell(BoundCell):
    """The recurrence of the paper. Its parameters are the spectrum, K and V, B, the gain, the gate and β."""

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
        return self.prepare_given(inputs, position, None, None)

    def prepare_given(self, inputs: Tensor, position: Tensor, dt: Tensor | None, beta: Tensor | None) -> Tensor:
        """The drive, then what else a step needs: directions that come from the input, and `dt` and `beta` if given."""
        parts: list[Tensor] = []
        from_input = isinstance(self.spec.direction, FromInput)
        drive = None if from_input or dt is not None else self.drive.by_one_product(inputs, self.spectrum)
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
        if not self.is_stock(log=True) or not fused.covers(self.spec, drive.dtype, drive.device, log=True):
            return None
        return self.scan_given(drive, state, reset, lengths, lean, beta=False)

    def scans(self, device: torch.device | str) -> bool:
        covered = fused.covers(self.spec, self.dtype, torch.device(device))
        return self.is_stock() and covered and not transformed(*self.parameters())

    def is_stock(self, *, log: bool = False) -> bool:
        """Return whether the step is this class's, of K and V that are the package's own, without hooks."""
        return fused.own_steps(self, ADPTCell) and fused.own_directions(self.directions, log=log)

    def scan_given(
        self, drive: Tensor, state: Tensor, reset: Tensor | None, lengths: Tensor | None, lean: bool, *, beta: bool
    ) -> Tensor | None:
        """`scan`; `beta` says whether β comes with the drive."""
        constants, form = self.constants(beta=beta)
        if self.start is None:
            factors = fused.factors_of(self.directions, form, drive.dtype)
            return fused.scan(constants, form, drive, state, reset, lengths, lean, factors)
        start = self.start.dense().to(drive.dtype)
        seen = fused.in_basis(start, constants, form, drive, state)
        states = fused.scan(seen.constants, form, seen.drive, seen.state, reset, lengths, lean)
        return None if states is None else states @ start.mT

    def constants(self, *, beta: bool) -> tuple[Constants, Form]:
        """The parameters, evaluated, as the fused operation takes them; `beta` says whether β comes with the drive."""
        form = fused.form_of(self.spec, beta_given=beta)
        return fused.constants_of(self.spectrum(), self.directions, None if beta else self.beta, form), form

    def eigenvalues(self) -> BlockDiagonal | None:
        """Λ̄; None with a learned start, whose constant part Q₀ Λ̄ Q₀' is not diagonal."""
        if self.start is not None:
            return None
        lambda_bar: BlockDiagonal = self.spectrum()
        return lambda_bar

    def jacobian(self, state: Vector, drive: Tensor) -> Matrix:
        found = self._fused_jacobians(state.reshape(1, -1, state.shape[-1]), drive)
        if found is None:
            return super().jacobian(state, drive)
        return found(0, found.states.shape[1]).reshape(*state.shape, -1)

    def jacobians(self, states: Tensor, drive: Tensor) -> Callable[[int, int], Tensor]:
        found = self._fused_jacobians(states, drive)
        return super().jacobians(states, drive) if found is None else found

    def _fused_jacobians(self, states: Tensor, drive: Tensor) -> adpt_step.Jacobians | None:
        return fused.jacobians(self.spec, *self.constants(beta=False), states, drive) if self.is_stock() else None

    def newton_pass(self, state: Tensor, drive: Tensor, *, diagonal: bool) -> Callable[..., Pass] | None:
        if not self.is_stock():
            return None
        constants, form = self.constants(beta=False)
        if not fused.steps_known(self.spec, state, drive, constants, form):
            return None
        return functools.partial(adpt_step.newton_pass, constants=constants, form=form, diagonal=diagonal)

    def define_conjugate(self, state: Vector, drive: Tensor) -> Matrix:
        """M by its definition, with dense matrices: the slow reference of `conjugate`."""
        bound, spec = self.bind(), self.spec
        eigen, planes, beta = bound.evaluated(state, bound.parts(drive))
        dense = spec.conjugate.define(eigen, planes, beta, spec.retraction)
        dense = block_diagonal(dense) if spec.heads > 1 else dense
        return dense.expand(*state.shape, self.state_size)

    def define_step(self, state: Vector, drive: Tensor) -> Vector:
        """`step` by its definition, with dense matrices."""
        bound, spec = self.bind(), self.spec
        parts = bound.parts(drive)
        driven = parts.drive
        if spec.rotation_aware:
            _, planes, beta = bound.evaluated(state, parts)
            rotation = torch.eye(spec.size // spec.heads, dtype=state.dtype, device=state.device)
            for plane in planes:
                rotation = spec.retraction.define(dense_step(beta, plane)) @ rotation
            rotation = block_diagonal(rotation) if spec.heads > 1 else rotation
            driven = (rotation @ driven.unsqueeze(-1)).squeeze(-1)
        return (self.define_conjugate(state, drive) @ state.unsqueeze(-1)).squeeze(-1) + driven

    def given(self, *, dt: Tensor | None = None, beta: Tensor | None = None) -> Cell:
        """This cell with steps of lengths `dt` (batch, time), or with one `beta` for each sequence (batch,)."""
        if beta is not None and not self.spec.conjugate.turns:
            raise IncompatibleError(f"{self.spec.conjugate} does not turn and takes no beta=. Drop it, or use Exact().")
        return self if dt is None and beta is None else GivenCell(self, dt, beta)

    def bind(self, *, dt: bool = False, beta: bool = False) -> Bound:
        """The cell with its parameters evaluated; `dt` and `beta` say whether they come with the drive."""
        blocks: BlockDiagonal = self.spectrum()
        dtype = blocks.real.dtype
        from_state = not isinstance(self.spec.direction, FromInput)
        return Bound(
            spec=self.spec,
            spectrum=self.spectrum,
            blocks=None if dt else blocks,
            start=None if self.start is None else self.start.dense().to(dtype),
            beta=None if beta else self.beta(blocks.real),
            directions=[bind_directions(d, dtype) for d in self.directions] if from_state else None,
            projections=list(self.directions),
        )


class GivenCell(BoundCell):
    """An `ADPTCell` with what one call gives it: the length of each step, or a β for each sequence."""

    def __init__(self, cell: ADPTCell, dt: Tensor | None, beta: Tensor | None):
        super().__init__()
        self.cell = cell
        self.input_size = cell.input_size
        self.state_size = cell.state_size
        self.dt = dt
        self.beta = beta

    def gathered(self, index: Tensor) -> Cell:
        if self.dt is None:
            return self
        dt = torch.as_tensor(self.dt, device=index.device)
        dt = dt.unsqueeze(0) if dt.dim() == 1 else dt
        return GivenCell(self.cell, dt.gather(1, index), self.beta) if dt.shape == index.shape else self

    def prepare(self, inputs: Tensor, position: Positions) -> Tensor:
        dt = None if self.dt is None else _shaped("dt", self.dt, inputs, inputs.shape[:-1], "(batch, time)", 1e15)
        beta = None if self.beta is None else _shaped("beta", self.beta, inputs, inputs.shape[:-2], "(batch,)", 1e6)
        return self.cell.prepare_given(
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
        if not self._scans(drive.dtype, drive.device, log=True):
            return None
        return self.cell.scan_given(drive, state, reset, lengths, lean, beta=self.beta is not None)

    def scans(self, device: torch.device | str) -> bool:
        return self._scans(self.dtype, torch.device(device)) and not transformed(*self.parameters())

    def _scans(self, dtype: torch.dtype | None, device: torch.device, *, log: bool = False) -> bool:
        own = fused.own_steps(self, GivenCell) and self.cell.is_stock(log=log)
        dt, beta = self.dt is not None, self.beta is not None
        return own and fused.covers(self.cell.spec, dtype, device, dt=dt, beta=beta, log=log)

    def eigenvalues(self) -> BlockDiagonal | None:
        return self.cell.eigenvalues() if self.dt is None else None

    @property
    def dtype(self) -> torch.dtype | None:
        return self.cell.dtype

    @property
    def device(self) -> torch.device | None:
        return self.cell.device

    def bind(self) -> Bound:
        return self.cell.bind(dt=self.dt is not None, beta=self.beta is not None)


def _shaped(name: str, values: Tensor, inputs: Tensor, shape: torch.Size, layout: str, largest: float) -> Tensor:
    values = torch.as_tensor(values, dtype=inputs.dtype, device=inputs.device)
    if values.dim() == len(shape) - 1:
        values = values.unsqueeze(0)  # one sequence
    if values.shape != shape:
        raise InputError(f"{name} has shape {tuple(values.shape)}; it must be {layout}, {tuple(shape)}.")
    if not has_values(values):
        return values
    try:
        right = bool(((values >= 0) & (values <= largest)).all())
    except RuntimeError:  # under vmap the values are not to be had
        return values
    if not right:
        low, high = values.min().item(), values.max().item()
        raise InputError(f"{name} must be in 0 to {largest:g} everywhere, and no NaN; it goes from {low} to {high}.")
    return values
