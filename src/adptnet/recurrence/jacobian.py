"""The Jacobian of an ADPT step in closed form.

For one plane the step is x' = Λ(x + a k + b v) + c k + d v + drive, where the coefficients a, b, c, d are scalar
functions of k, v and x. So J = Λ + (aΛ + c) dk/dx + (bΛ + d) dv/dx + Λk ∇a + Λv ∇b + k ∇c + v ∇d: four gradients, and
matrices that are the same at every state. J and its diagonal cost a few products with K and V, not n derivatives.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._typing import Column, Matrix, Vector
from .directions import unit
from .retractions import Retraction
from .spectra import BlockDiagonal

__all__ = ["ProjectedDirection", "StepJacobian", "rotation_coefficients", "step_jacobian", "taylor_coefficients"]

# A function of key, value and x that returns a, b, c, d, (*b, 1) each
Coefficients = Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]


class ProjectedDirection(NamedTuple):
    """The projection that key or value is computed with."""

    matrix: Tensor  # K or V, (n, n)
    project: Callable[[Tensor], Tensor]  # the same as a function, with its bias


class StepJacobian(NamedTuple):
    """The Jacobian Λ + (Σ diag(weight_i) W_i) diag(slope) + columns rows, at states (*b, n).

    With a phase it is P times that.
    """

    eigen: BlockDiagonal
    matrices: list[tuple[Tensor, Tensor]]  # weight (*b, n), W (n, n)
    slope: Tensor | None  # (*b, n), the derivative of the function of x that K and V act on; None if they act on x
    columns: Tensor  # (*b, n, r)
    rows: Tensor  # (*b, r, n)
    phase: BlockDiagonal | None = None  # P, (*b, n)

    def dense(self) -> Matrix:
        """Return the Jacobian as a matrix, (*b, n, n)."""
        dense = self._unphased()
        return dense if self.phase is None else self.phase.mm(dense)

    def _unphased(self) -> Matrix:
        (weight, matrix), *others = self.matrices
        dense = weight.unsqueeze(-1) * matrix
        for weight, matrix in others:
            dense.addcmul_(weight.unsqueeze(-1), matrix)
        if self.slope is not None:
            dense = dense * self.slope.unsqueeze(-2)
        shape = dense.shape
        flat = (part.reshape(-1, *part.shape[-2:]) for part in (dense, self.columns, self.rows))
        dense = torch.baddbmm(*flat).reshape(shape)
        if self.eigen.imag is not None:
            return dense + self.eigen.dense()
        dense.diagonal(dim1=-2, dim2=-1).add_(self.eigen.real)
        return dense

    def slice_steps(self, start: int, stop: int) -> "StepJacobian":
        """Return the Jacobians of some steps, at states (*b, time, n).

        Args:
            start: The first step.
            stop: The step after the last.
        """
        return StepJacobian(
            self.eigen,
            [(weight[..., start:stop, :], matrix) for weight, matrix in self.matrices],
            None if self.slope is None else self.slope[..., start:stop, :],
            self.columns[..., start:stop, :, :],
            self.rows[..., start:stop, :, :],
            None if self.phase is None else self.phase.map(lambda part: part[..., start:stop, :]),
        )

    def blocks(self) -> BlockDiagonal:
        """Return the diagonal; for complex pairs, and with a phase, the nearest a + ib of each 2-by-2 block."""
        index = torch.arange(self.rows.shape[-1], device=self.rows.device)
        diagonal = self.eigen.real + self._entries(index, index)
        if self.eigen.imag is None and self.phase is None:
            return BlockDiagonal(diagonal)
        beside = self._entries(index, index ^ 1)  # above the diagonal in even rows, below it in odd ones
        real = (diagonal[..., ::2] + diagonal[..., 1::2]) / 2
        imag = (beside[..., 1::2] - beside[..., ::2]) / 2
        imag = imag if self.eigen.imag is None else self.eigen.imag[..., ::2] + imag
        blocks = BlockDiagonal(real.repeat_interleave(2, -1), imag.repeat_interleave(2, -1))
        return blocks if self.phase is None else self.phase.multiply(blocks)

    def _entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the entries (i, columns[i]) of all terms but Λ; `rows` holds all i."""
        picked = sum(weight * matrix[rows, columns] for weight, matrix in self.matrices)
        assert isinstance(picked, Tensor)
        if self.slope is not None:
            picked = picked * self.slope[..., columns]
        return picked + (self.columns * self.rows.mT[..., columns, :]).sum(-1)


def step_jacobian(
    state: Vector,
    eigen: BlockDiagonal,
    source: Callable[[Tensor], Tensor],
    directions: Sequence[ProjectedDirection],
    coefficients: Coefficients,
) -> StepJacobian:
    """Return the Jacobian of a step whose key and value are K and V applied to `source(state)`, normalised.

    If autograd records, it is differentiable with respect to the state and to all parameters.

    Args:
        state: (*b, n).
        eigen: Λ̄.
        source: The elementwise function of the state that K and V are applied to.
        directions: K and V.
        coefficients: The function that returns a, b, c, d.
    """
    needs_graph = torch.is_grad_enabled() and _requires_grad(state, eigen, source, directions, coefficients)
    with torch.enable_grad():
        x = state.view_as(state) if needs_graph and state.requires_grad else state.detach().requires_grad_()
        sources, slope = source(x), None
        if sources is not x:
            (slope,) = torch.autograd.grad(sources.sum(), x, retain_graph=True, create_graph=needs_graph)
        projected = [direction.project(sources) for direction in directions]
        # views, so that each derivative below is along one argument alone
        key, value, point = (part.view_as(part) for part in (*map(unit, projected), x))
        scalars = coefficients(key, value, point)
        gradients = [
            torch.autograd.grad(
                scalar.sum(), (point, key, value), retain_graph=True, create_graph=needs_graph, materialize_grads=True
            )
            for scalar in scalars
        ]
        jacobian = _assemble(eigen, slope, directions, (key, value), projected, scalars, gradients)
    if needs_graph:
        return jacobian
    return StepJacobian(
        eigen,
        [(weight.detach(), matrix.detach()) for weight, matrix in jacobian.matrices],
        slope,
        jacobian.columns.detach(),
        jacobian.rows.detach(),
    )


def _requires_grad(
    state: Tensor,
    eigen: BlockDiagonal,
    source: Callable[[Tensor], Tensor],
    directions: Sequence[ProjectedDirection],
    coefficients: Coefficients,
) -> bool:
    """Return whether anything that the Jacobian depends on requires a gradient."""
    point = state.detach()
    projected = [direction.project(source(point)) for direction in directions]
    key, value = (unit(vector.detach()) for vector in projected)
    scalars = coefficients(key, value, point)
    return any(part.requires_grad for part in (state, eigen.real, *projected, *scalars))


def _assemble(
    eigen: BlockDiagonal,
    slope: Tensor | None,
    directions: Sequence[ProjectedDirection],
    vectors: Sequence[Tensor],
    projected: Sequence[Tensor],
    scalars: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> StepJacobian:
    """Return the Jacobian from key and value, their projections, the coefficients and the gradients of these."""
    rows = torch.stack([parts[0] for parts in gradients], -2)  # ∇a, ∇b, ∇c, ∇d: first their partials in x
    matrices: list[tuple[Tensor, Tensor]] = []
    more: list[tuple[Tensor, Tensor]] = []
    moved = [eigen.mv(vector) for vector in vectors]
    for i, (direction, vector, unscaled) in enumerate(zip(directions, vectors, projected, strict=True)):
        matrix, inverse = direction.matrix, _inverse_length(unscaled)
        on_moved, on_itself = inverse * scalars[i], inverse * scalars[i + 2]
        # d vector / dx = (matrix - vector (vector' matrix)) slope / length
        matrices.append((on_moved * eigen.real + on_itself, matrix))
        if eigen.imag is not None:
            quarter = BlockDiagonal(torch.zeros_like(eigen.real), eigen.imag)
            matrices.append((on_moved.expand_as(vector), quarter.mv(matrix.mT).mT))
        partials = torch.stack([parts[1 + i] for parts in gradients], -2)
        across = inverse.unsqueeze(-1) * (partials - (partials @ vector.unsqueeze(-1)) * vector.unsqueeze(-2))
        pulled, along = torch.cat((across, vector.unsqueeze(-2)), -2).matmul(matrix).split([len(scalars), 1], -2)
        more.append((-(on_moved * moved[i] + on_itself * vector), along))
        rows = rows + (pulled if slope is None else pulled * slope.unsqueeze(-2))
    added = torch.cat([row for _, row in more], -2)
    rows = torch.cat((added if slope is None else added * slope.unsqueeze(-2), rows), -2)
    columns = torch.stack([*(column for column, _ in more), *moved, *vectors], -1)
    return StepJacobian(eigen, matrices, slope, columns, rows)


def _inverse_length(x: Tensor) -> Tensor:
    """Return 1 / ‖x‖, and 0 where `unit` returns zero."""
    direction = unit(x)
    length = (direction * x).sum(-1, keepdim=True)
    zero = length == 0
    return torch.where(zero, 0.0, 1 / torch.where(zero, 1.0, length))


def rotation_coefficients(
    eigen: BlockDiagonal, beta: float | Tensor, retraction: Retraction, drive: Tensor | None
) -> Coefficients:
    """Return the coefficients for M = Q Λ̄ Q'.

    Args:
        eigen: Λ̄.
        beta: β; a tensor is (*b, 1).
        retraction: The map from key and value to Q.
        drive: The drive if it is rotated by Q (`rotation_aware`), None otherwise.
    """

    def coefficients(key: Tensor, value: Tensor, x: Tensor) -> Sequence[Tensor]:
        rotation = retraction(key, value, beta)
        squared = key.square().sum(-1, keepdim=True)
        overlap = (key * value).sum(-1, keepdim=True) / torch.where(squared > 0, squared, 1.0)

        def to_value(on_key: Column, on_offset: Column) -> tuple[Tensor, Tensor]:
            """Convert weights of key and offset = beta (value - overlap key) to weights of key and value."""
            return on_key - beta * overlap * on_offset, beta * on_offset

        inner = rotation.weights_transposed(x)
        moved = eigen.mv(x + inner[0] * rotation.key + inner[1] * rotation.offset)
        outer = rotation.weights(moved if drive is None else moved + drive)
        return *to_value(*inner), *to_value(*outer)

    return coefficients


def taylor_coefficients(eigen: BlockDiagonal, beta: float | Tensor, order: int) -> Coefficients:
    """Return the coefficients for M = Λ̄ + β[S, Λ̄] + ½β²[S, [S, Λ̄]] with S = k v' - v k'.

    Args:
        eigen: Λ̄.
        beta: β; a tensor is (*b, 1).
        order: 1 or 2.
    """

    def coefficients(key: Tensor, value: Tensor, x: Tensor) -> Sequence[Tensor]:
        def weights(y: Tensor) -> tuple[Tensor, Tensor]:
            """Return p and q of S y = p k + q v."""
            return (value * y).sum(-1, keepdim=True), -(key * y).sum(-1, keepdim=True)

        def apply_skew(y: Tensor) -> Tensor:
            on_key, on_value = weights(y)
            return on_key * key + on_value * value

        moved, skewed = eigen.mv(x), apply_skew(x)
        first = [-beta * weight for weight in weights(x)] + [beta * weight for weight in weights(moved)]
        if order == 1:
            return first
        half = beta * beta / 2
        around = zip(weights(apply_skew(moved)), weights(eigen.mv(skewed)), strict=True)
        second = [half * weight for weight in weights(skewed)] + [half * (p - 2 * q) for p, q in around]
        return [p + q for p, q in zip(first, second, strict=True)]

    return coefficients
