"""The ADPT cell: x_t = M(x_{t-1}) x_{t-1} + drive_t with M = Q Λ̄ Q' (eq:recurrence_eq)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..beta import Beta
from ..conjugates import Conjugate, Eigen, HeadedConjugate, StartedBlocks, Taylor, block_diagonal, dense_step
from ..directions import Directions, FromInput, KeyValue
from ..drive import Drive
from ..errors import IncompatibleError, InputError
from ..ops.adpt_scan import Constants, Form
from ..ops.linear_scan import linear_scan
from ..projections import Orthogonal
from ..spectra import BlockDiagonal, Spectrum
from ..transitions import Diagonal, InBasis, Transition
from ..typing import Device, DType, Matrix, Positions, Vector
from . import fused
from .base import Cell
from .jacobian import Direction, StepJacobian, rotation_numbers, step_jacobian, taylor_numbers
from .spec import ADPTSpec

__all__ = ["ADPTCell", "GivenCell"]


class ADPTCell(Cell):
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
        u = self.drive.project(inputs)
        parts: list[Tensor] = [self.drive(u, position, self.spectrum, dt)]
        if isinstance(self.spec.direction, FromInput):
            for directions in self._directions():
                parts += [part.reshape(u.shape) for part in directions.bound(u.dtype)(u)]
        parts += [part.expand(*u.shape[:-1], 1) for part in (dt, beta) if part is not None]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def step(self, state: Vector, drive: Tensor) -> Vector:
        return self.bound().step(state, drive)

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        return self.bound().step

    def scan(
        self,
        drive: Tensor,
        state: Tensor,
        *,
        reset: Tensor | None = None,
        lengths: Tensor | None = None,
        lean: bool = False,
    ) -> Tensor | None:
        if not fused.own_steps(self, ADPTCell) or not fused.covers(self.spec, drive):
            return None
        return self.scan_given(drive, state, reset, lengths, lean, beta=False)

    def scan_given(
        self, drive: Tensor, state: Tensor, reset: Tensor | None, lengths: Tensor | None, lean: bool, *, beta: bool
    ) -> Tensor | None:
        """`scan`; `beta` says whether β comes with the drive."""
        constants, form = self.constants(beta=beta)
        if self.start is None:
            return fused.scan(constants, form, drive, state, reset, lengths, lean)
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

    def conjugate(self, state: Vector, drive: Tensor) -> Conjugate:
        bound = self.bound()
        return bound.conjugate(state, bound.parts(drive))

    def linear_transition(self, drive: Tensor) -> Transition:
        return self.bound().linear_transition(drive)

    def jacobian(self, state: Vector, drive: Tensor) -> Matrix:
        closed = self.bound().jacobian(state, drive)
        return super().jacobian(state, drive) if closed is None else closed.dense().expand(*state.shape, -1)

    def jacobian_blocks(self, state: Vector, drive: Tensor) -> BlockDiagonal:
        closed = self.bound().jacobian(state, drive)
        return super().jacobian_blocks(state, drive) if closed is None else closed.blocks()

    def radius(self, state: Vector, drive: Tensor, fresh: Vector, reset: Tensor | None) -> Tensor | None:
        return self.bound().radius(state, drive, fresh, reset)

    def define_conjugate(self, state: Vector, drive: Tensor) -> Matrix:
        """M by its definition, with dense matrices: the slow reference of `conjugate`."""
        bound, spec = self.bound(), self.spec
        eigen, planes, beta = bound.evaluated(state, bound.parts(drive))
        dense = spec.conjugate.define(eigen, planes, beta, spec.retraction)
        dense = block_diagonal(dense) if spec.heads > 1 else dense
        return dense.expand(*state.shape, self.state_size)

    def define_step(self, state: Vector, drive: Tensor) -> Vector:
        """`step` by its definition, with dense matrices."""
        bound, spec = self.bound(), self.spec
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

    def bound(self, *, dt: bool = False, beta: bool = False) -> "Bound":
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
            directions=[d.bound(dtype) for d in self._directions()] if from_state else None,
            projections=self._directions(),
        )

    def _directions(self) -> list[Directions]:
        return [directions for directions in self.directions if isinstance(directions, Directions)]


class _Parts(NamedTuple):
    """A slice of the drive, taken apart."""

    drive: Tensor
    planes: list[KeyValue] | None
    dt: Tensor | None
    beta: Tensor | None


class Bound(NamedTuple):
    """A cell with its parameters evaluated: what is the same at every step."""

    spec: ADPTSpec
    spectrum: Spectrum
    blocks: BlockDiagonal | None  # None: depends on the length of the step
    start: Tensor | None
    beta: float | Tensor | None  # None: comes with the drive
    directions: list[Callable[[Tensor], KeyValue]] | None  # None: come with the drive
    projections: list[Directions]

    def step(self, state: Tensor, drive: Tensor) -> Tensor:
        parts = self.parts(drive)
        conjugate = self.conjugate(state, parts)
        driven = conjugate.turn(parts.drive) if self.spec.rotation_aware else parts.drive
        return conjugate.mv(state) + driven

    def conjugate(self, state: Tensor, parts: _Parts) -> Conjugate:
        operator = self.spec.conjugate.operator(*self.evaluated(state, parts), self.spec.retraction)
        return operator if self.spec.heads == 1 else HeadedConjugate(operator, self.spec.heads)

    def evaluated(self, state: Tensor, parts: _Parts) -> tuple[Eigen, list[KeyValue], float | Tensor]:
        """Eigenvalues, directions and β at this step, with the heads along a dimension of their own."""
        eigen: Eigen = self.spectrum(parts.dt) if self.blocks is None else self.blocks
        beta = parts.beta if self.beta is None else self.beta
        assert beta is not None
        if self.spec.heads > 1:
            assert isinstance(eigen, BlockDiagonal)
            eigen = eigen.heads(self.spec.heads)
            beta = beta.unsqueeze(-2) if parts.beta is not None and isinstance(beta, Tensor) else beta
        if self.start is not None:
            assert isinstance(eigen, BlockDiagonal)
            eigen = StartedBlocks(eigen, self.start)
        if self.directions is not None:
            return eigen, [directions(state) for directions in self.directions], beta
        assert parts.planes is not None
        return eigen, parts.planes, beta

    def linear_transition(self, drive: Tensor) -> Transition:
        """Λ̄, or Q₀ Λ̄ Q₀' with a learned start: what M is without turning."""
        blocks: BlockDiagonal = self.spectrum(self.parts(drive).dt) if self.blocks is None else self.blocks
        if self.start is None:
            return Diagonal(blocks)
        return InBasis(self.start.unsqueeze(0), Diagonal(blocks))

    def jacobian(self, state: Tensor, drive: Tensor) -> StepJacobian | Conjugate | None:
        """The Jacobian in closed form; None where there is none."""
        parts, spec = self.parts(drive), self.spec
        if self.directions is None or not spec.conjugate.turns:
            return self.conjugate(state, parts)  # M does not depend on the state
        direction, conjugate = spec.direction, spec.conjugate
        plain = direction.heads == 1 and direction.dot is None and not direction.layer_norm
        if not plain or self.blocks is None or self.start is not None or conjugate.planes > 1:
            return None
        beta = parts.beta if self.beta is None else self.beta
        assert beta is not None
        if isinstance(conjugate, Taylor):
            numbers = taylor_numbers(self.blocks, beta, conjugate.order)
        else:
            turned = parts.drive if spec.rotation_aware else None
            numbers = rotation_numbers(self.blocks, beta, spec.retraction, turned)
        dtype = self.blocks.real.dtype
        pair = (self.projections[0].key_projection, self.projections[0].value_projection)
        directions = [Direction(projection.dense().to(dtype), projection.bound(dtype)) for projection in pair]
        return step_jacobian(state, self.blocks, direction.source, directions, numbers)

    def radius(self, state: Tensor, drive: Tensor, fresh: Tensor, reset: Tensor | None) -> Tensor | None:
        """‖x_t‖ <= |λ̄|_max ‖x_{t-1}‖ + ‖drive_t‖, whatever β, K and V; not so for Taylor, whose M may stretch."""
        if isinstance(self.spec.conjugate, Taylor):
            return None
        parts = self.parts(drive)
        blocks: BlockDiagonal = self.spectrum(parts.dt) if self.blocks is None else self.blocks
        largest = blocks.modulus().amax(-1, keepdim=True)
        pushed = torch.linalg.vector_norm(parts.drive, dim=-1, keepdim=True)
        if reset is not None:
            anew = largest * torch.linalg.vector_norm(fresh, dim=-1)[:, None, None]
            pushed = torch.where(reset.unsqueeze(-1), pushed + anew, pushed)
        entering = torch.linalg.vector_norm(state, dim=-1, keepdim=True)
        return linear_scan(largest, pushed, entering, reset=reset).squeeze(-1)

    def parts(self, drive: Tensor) -> _Parts:
        if self.directions is not None and self.blocks is not None and self.beta is not None:
            return _Parts(drive, None, None, None)
        size, heads = self.spec.size, self.spec.heads
        count = 0 if self.directions is not None else 2 * self.spec.conjugate.planes
        sizes = [size, *[size] * count, *[1] * (self.blocks is None), *[1] * (self.beta is None)]
        driven, *rest = drive.split(sizes, -1)
        vectors = [v if heads == 1 else v.unflatten(-1, (heads, -1)) for v in rest[:count]]
        planes = [KeyValue(*vectors[i : i + 2]) for i in range(0, count, 2)]
        return _Parts(
            driven,
            None if self.directions is not None else planes,
            rest[count] if self.blocks is None else None,
            rest[-1] if self.beta is None else None,
        )


class GivenCell(Cell):
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

    def step(self, state: Vector, drive: Tensor) -> Vector:
        return self._bound().step(state, drive)

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        return self._bound().step

    def scan(
        self,
        drive: Tensor,
        state: Tensor,
        *,
        reset: Tensor | None = None,
        lengths: Tensor | None = None,
        lean: bool = False,
    ) -> Tensor | None:
        own = fused.own_steps(self, GivenCell) and fused.own_steps(self.cell, ADPTCell)
        if not own or not fused.covers(self.cell.spec, drive, dt=self.dt, beta=self.beta):
            return None
        return self.cell.scan_given(drive, state, reset, lengths, lean, beta=self.beta is not None)

    def eigenvalues(self) -> BlockDiagonal | None:
        return self.cell.eigenvalues() if self.dt is None else None

    def conjugate(self, state: Vector, drive: Tensor) -> Conjugate:
        bound = self._bound()
        return bound.conjugate(state, bound.parts(drive))

    def linear_transition(self, drive: Tensor) -> Transition:
        return self._bound().linear_transition(drive)

    def jacobian(self, state: Vector, drive: Tensor) -> Matrix:
        closed = self._bound().jacobian(state, drive)
        return super().jacobian(state, drive) if closed is None else closed.dense().expand(*state.shape, -1)

    def jacobian_blocks(self, state: Vector, drive: Tensor) -> BlockDiagonal:
        closed = self._bound().jacobian(state, drive)
        return super().jacobian_blocks(state, drive) if closed is None else closed.blocks()

    def radius(self, state: Vector, drive: Tensor, fresh: Vector, reset: Tensor | None) -> Tensor | None:
        return self._bound().radius(state, drive, fresh, reset)

    def _bound(self) -> Bound:
        return self.cell.bound(dt=self.dt is not None, beta=self.beta is not None)


def _shaped(name: str, values: Tensor, inputs: Tensor, shape: torch.Size, layout: str, largest: float) -> Tensor:
    values = torch.as_tensor(values, dtype=inputs.dtype, device=inputs.device)
    if values.dim() == len(shape) - 1:
        values = values.unsqueeze(0)  # one sequence
    if values.shape != shape:
        raise InputError(f"{name} has shape {tuple(values.shape)}; it must be {layout}, {tuple(shape)}.")
    try:
        right = bool(((values >= 0) & (values <= largest)).all())
    except RuntimeError:  # under vmap the values are not to be had
        return values
    if not right:
        low, high = values.min().item(), values.max().item()
        raise InputError(f"{name} must be in 0 to {largest:g} everywhere, and no NaN; it goes from {low} to {high}.")
    return values
