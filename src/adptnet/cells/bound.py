"""A cell with its parameters evaluated: what is the same at every step, and what follows from it."""

import abc
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._typing import Matrix, Vector
from ..ops.linear_scan import linear_scan
from ..recurrence.conjugates import Conjugate, Eigen, HeadedConjugate, StartedBlocks, Taylor
from ..recurrence.directions import Directions, KeyValue
from ..recurrence.spectra import BlockDiagonal, Spectrum
from ..solvers.transitions import Diagonal, InBasis, Transition
from .base import Cell
from .jacobian import Direction, StepJacobian, rotation_numbers, step_jacobian, taylor_numbers
from .spec import ADPTSpec

__all__ = ["Bound", "BoundCell"]


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
    projections: list[nn.Module]

    def step(self, state: Tensor, drive: Tensor, carried: Tensor | None = None) -> Tensor:
        """M, that of `state`, applied to it, or to what is `carried` on instead, and the drive."""
        parts = self.parts(drive)
        conjugate = self.conjugate(state, parts)
        driven = conjugate.turn(parts.drive) if self.spec.rotation_aware else parts.drive
        return conjugate.mv(state if carried is None else carried) + driven

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
        found = self.projections[0]
        if not isinstance(found, Directions) or not found.is_stock():
            return None  # the derivative of whatever hooks and other modules do is autograd's
        beta = parts.beta if self.beta is None else self.beta
        assert beta is not None
        if isinstance(conjugate, Taylor):
            numbers = taylor_numbers(self.blocks, beta, conjugate.order)
        else:
            turned = parts.drive if spec.rotation_aware else None
            numbers = rotation_numbers(self.blocks, beta, spec.retraction, turned)
        dtype = self.blocks.real.dtype
        pair = (found.key_projection, found.value_projection)
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


class BoundCell(Cell):
    """A cell that says what it is bound to; all that a solver may ask of it follows."""

    @abc.abstractmethod
    def bind(self) -> Bound:
        """The cell with its parameters evaluated."""

    def step(self, state: Vector, drive: Tensor) -> Vector:
        return self.bind().step(state, drive)

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        return self.bind().step

    def conjugate(self, state: Vector, drive: Tensor) -> Conjugate:
        bound = self.bind()
        return bound.conjugate(state, bound.parts(drive))

    def linear_transition(self, drive: Tensor) -> Transition:
        return self.bind().linear_transition(drive)

    def jacobian(self, state: Vector, drive: Tensor) -> Matrix:
        closed = self.bind().jacobian(state, drive)
        return super().jacobian(state, drive) if closed is None else closed.dense().expand(*state.shape, -1)

    def jacobians(self, states: Tensor, drive: Tensor) -> Callable[[int, int], Tensor]:
        closed = self.bind().jacobian(states, drive)
        if not isinstance(closed, StepJacobian):
            return super().jacobians(states, drive)
        return lambda start, stop: closed.steps(start, stop).dense()

    def jacobian_blocks(self, state: Vector, drive: Tensor) -> BlockDiagonal:
        closed = self.bind().jacobian(state, drive)
        return super().jacobian_blocks(state, drive) if closed is None else closed.blocks()

    def radius(self, state: Vector, drive: Tensor, fresh: Vector, reset: Tensor | None) -> Tensor | None:
        return self.bind().radius(state, drive, fresh, reset)
