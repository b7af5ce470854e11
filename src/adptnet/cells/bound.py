"""The evaluated parameters of an ADPT cell, and everything that is computed from them."""

import abc
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._typing import Matrix, Vector
from ..ops._backends import Backend, note_run
from ..ops.linear_scan import linear_scan
from ..recurrence.conjugates import Conjugate, Eigen, Exact, MultiHeadConjugate, Product, RotatedBlocks, Taylor
from ..recurrence.directions import Directions, FromState, KeyValue
from ..recurrence.spectra import BlockDiagonal, Spectrum
from ..solvers.transitions import BasisTransition, DiagonalTransition, Transition
from .base import Cell
from .jacobian import ProjectedDirection, StepJacobian, rotation_coefficients, step_jacobian, taylor_coefficients
from .spec import ADPTSpec

__all__ = ["BindableCell", "BoundParameters"]

_CLOSED_FORM = Backend("closed form", "the step of this cell has a Jacobian in closed form.")


class _DriveParts(NamedTuple):
    """The parts that are concatenated in the drive, see `ADPTCell.prepare_with_arguments`."""

    drive: Tensor  # (*b, n)
    planes: list[KeyValue] | None  # None if the directions come from the state
    dt: Tensor | None  # (*b, 1)
    beta: Tensor | None  # (*b, 1)


class BoundParameters(NamedTuple):
    """The evaluated parameters of an ADPT cell, which are the same at every step of a sequence."""

    spec: ADPTSpec
    spectrum: Spectrum
    blocks: BlockDiagonal | None  # Λ̄; None if it depends on the `dt` in the drive
    start: Tensor | None  # Q₀
    beta: float | Tensor | None  # None if it is part of the drive
    directions: list[Callable[[Tensor], KeyValue]] | None  # None if key and value are part of the drive
    projections: list[nn.Module]  # the modules that the directions were bound from

    def step(self, state: Tensor, drive: Tensor, carried: Tensor | None = None) -> Tensor:
        """Return the next state M x + drive.

        Args:
            state: The state that M is computed from, (*b, n).
            drive: (*b, features).
            carried: The vector x that M is applied to; `state` if None.
        """
        parts = self.split_drive(drive)
        conjugate = self.conjugate(state, parts)
        driven = conjugate.rotate(parts.drive) if self.spec.rotation_aware else parts.drive
        return conjugate.mv(state if carried is None else carried) + driven

    def conjugate(self, state: Tensor, parts: _DriveParts) -> Conjugate:
        """Return M at a state.

        Args:
            state: (*b, n).
            parts: The parts of the drive at this step.
        """
        operator = self.spec.conjugate.operator(*self.evaluate(state, parts), self.spec.retraction)
        return operator if self.spec.heads == 1 else MultiHeadConjugate(operator, self.spec.heads)

    def evaluate(self, state: Tensor, parts: _DriveParts) -> tuple[Eigen, list[KeyValue], float | Tensor]:
        """Return eigenvalues, key-value pairs and β at a state. If there are several heads, they are dimension -2.

        Args:
            state: (*b, n).
            parts: The parts of the drive at this step.
        """
        eigen: Eigen = self.spectrum(parts.dt) if self.blocks is None else self.blocks
        beta = parts.beta if self.beta is None else self.beta
        assert beta is not None
        if self.spec.heads > 1:
            assert isinstance(eigen, BlockDiagonal)
            eigen = eigen.split_heads(self.spec.heads)
            beta = beta.unsqueeze(-2) if parts.beta is not None and isinstance(beta, Tensor) else beta
        if self.start is not None:
            assert isinstance(eigen, BlockDiagonal)
            eigen = RotatedBlocks(eigen, self.start)
        if self.directions is not None:
            return eigen, [directions(state) for directions in self.directions], beta
        assert parts.planes is not None
        return eigen, parts.planes, beta

    def linear_transition(self, drive: Tensor) -> Transition:
        """Return Λ̄, or Q₀ Λ̄ Q₀' with a learned start, as a transition: M without the rotation.

        Args:
            drive: (*b, features).
        """
        blocks: BlockDiagonal = self.spectrum(self.split_drive(drive).dt) if self.blocks is None else self.blocks
        if self.start is None:
            return DiagonalTransition(blocks)
        return BasisTransition(self.start.unsqueeze(0), DiagonalTransition(blocks))

    def jacobian(self, state: Tensor, drive: Tensor) -> StepJacobian | Conjugate | None:
        """Return the Jacobian in closed form, or M if that is the Jacobian; None if there is no closed form.

        Args:
            state: (*b, n).
            drive: (*b, features).
        """
        parts, spec = self.split_drive(drive), self.spec
        if self.directions is None or not spec.conjugate.has_directions:
            return self.conjugate(state, parts)  # M does not depend on the state
        direction, conjugate = spec.direction, spec.conjugate
        if type(conjugate) not in (Exact, Product, Taylor) or type(direction) is not FromState:
            return None  # a subclass may define another step
        unmodified = direction.heads == 1 and direction.dot is None and not direction.layer_norm
        if not unmodified or self.blocks is None or self.start is not None or conjugate.planes > 1:
            return None
        module = self.projections[0]
        if not isinstance(module, Directions) or not module.is_stock():
            return None  # hooks and other modules are differentiated by autograd
        beta = parts.beta if self.beta is None else self.beta
        assert beta is not None
        if isinstance(conjugate, Taylor):
            coefficients = taylor_coefficients(self.blocks, beta, conjugate.order)
        else:
            rotated = parts.drive if spec.rotation_aware else None
            coefficients = rotation_coefficients(self.blocks, beta, spec.retraction, rotated)
        dtype = self.blocks.real.dtype
        pair = (module.key_projection, module.value_projection)
        directions = [ProjectedDirection(projection.dense().to(dtype), projection.bind(dtype)) for projection in pair]
        return step_jacobian(state, self.blocks, direction.source, directions, coefficients)

    def radius(self, state: Tensor, drive: Tensor, fresh: Tensor, reset: Tensor | None) -> Tensor | None:
        """Return the bound ‖x_t‖ <= |λ̄|_max ‖x_{t-1}‖ + ‖drive_t‖, which holds for any β, K and V.

        None for `Taylor`, whose M may have a larger norm than |λ̄|_max. Arguments as for `Cell.radius`.
        """
        if isinstance(self.spec.conjugate, Taylor):
            return None
        parts = self.split_drive(drive)
        blocks: BlockDiagonal = self.spectrum(parts.dt) if self.blocks is None else self.blocks
        largest = blocks.modulus().amax(-1, keepdim=True)
        added = torch.linalg.vector_norm(parts.drive, dim=-1, keepdim=True)
        if reset is not None:
            restarted = largest * torch.linalg.vector_norm(fresh, dim=-1)[:, None, None]
            added = torch.where(reset.unsqueeze(-1), added + restarted, added)
        entering = torch.linalg.vector_norm(state, dim=-1, keepdim=True)
        return linear_scan(largest, added, entering, reset=reset).squeeze(-1)

    def split_drive(self, drive: Tensor) -> _DriveParts:
        """Split the drive into the drive itself and the arguments that follow it.

        Args:
            drive: (*b, features).
        """
        if self.directions is not None and self.blocks is not None and self.beta is not None:
            return _DriveParts(drive, None, None, None)
        size, heads = self.spec.size, self.spec.heads
        count = 0 if self.directions is not None else 2 * self.spec.conjugate.planes
        sizes = [size, *[size] * count, *[1] * (self.blocks is None), *[1] * (self.beta is None)]
        driven, *rest = drive.split(sizes, -1)
        vectors = [v if heads == 1 else v.unflatten(-1, (heads, -1)) for v in rest[:count]]
        planes = [KeyValue(*vectors[i : i + 2]) for i in range(0, count, 2)]
        return _DriveParts(
            driven,
            None if self.directions is not None else planes,
            rest[count] if self.blocks is None else None,
            rest[-1] if self.beta is None else None,
        )


class BindableCell(Cell):
    """Base class of the cells whose step is computed from `BoundParameters`; implements the interface of solvers."""

    @abc.abstractmethod
    def bind(self) -> BoundParameters:
        """Evaluate the parameters."""

    def step(self, state: Vector, drive: Tensor) -> Vector:
        return self.bind().step(state, drive)

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        return self.bind().step

    def conjugate(self, state: Vector, drive: Tensor) -> Conjugate:
        bound = self.bind()
        return bound.conjugate(state, bound.split_drive(drive))

    def linear_transition(self, drive: Tensor) -> Transition:
        return self.bind().linear_transition(drive)

    def jacobian(self, state: Vector, drive: Tensor) -> Matrix:
        closed = self.bind().jacobian(state, drive)
        if closed is None:
            return super().jacobian(state, drive)
        note_run("jacobian", _CLOSED_FORM)
        return closed.dense().expand(*state.shape, -1)

    def jacobian_chunks(self, states: Tensor, drive: Tensor) -> Callable[[int, int], Tensor]:
        closed = self.bind().jacobian(states, drive)
        if not isinstance(closed, StepJacobian):
            return super().jacobian_chunks(states, drive)
        return lambda start, stop: closed.slice_steps(start, stop).dense()

    def jacobian_blocks(self, state: Vector, drive: Tensor) -> BlockDiagonal:
        closed = self.bind().jacobian(state, drive)
        if closed is None:
            return super().jacobian_blocks(state, drive)
        note_run("jacobian", _CLOSED_FORM)
        return closed.blocks()

    def radius(self, state: Vector, drive: Tensor, fresh: Vector, reset: Tensor | None) -> Tensor | None:
        return self.bind().radius(state, drive, fresh, reset)
