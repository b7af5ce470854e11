"""The Jacobian of an ADPT step in closed form.

For one plane the step is x' = Λ(x + a k + b v) + c k + d v + drive, where a, b, c, d are numbers made of k, v and x.
So J = Λ + (aΛ + c) dk/dx + (bΛ + d) dv/dx + Λk ∇a + Λv ∇b + k ∇c + v ∇d: four rows of numbers and
matrices that are the same at every state. J and its diagonal cost a few products with K and V, not n derivatives.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._typing import Column, Matrix, Vector
from ..recurrence.directions import unit
from ..recurrence.retractions import Retraction
from ..recurrence.spectra import BlockDiagonal

__all__ = ["Direction", "StepJacobian", "rotation_numbers", "step_jacobian", "taylor_numbers"]

# From key, value and x to a, b, c, d
Numbers = Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]


class Direction(NamedTuple):
    """How one of key and value comes from the state."""

    matrix: Tensor  # K or V, (n, n)
    project: Callable[[Tensor], Tensor]  # the same with its bias


class StepJacobian(NamedTuple):
    """Λ + (Σ diag(weight_i) W_i) diag(slope) + columns rows, at states (*b, n)."""

    eigen: BlockDiagonal
    matrices: list[tuple[Tensor, Tensor]]  # weight (*b, n), W (n, n)
    slope: Tensor | None  # (*b, n), the derivative of what K and V are applied to; None where that is the state
    columns: Tensor  # (*b, n, r)
    rows: Tensor  # (*b, r, n)

    def dense(self) -> Matrix:
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

    def steps(self, start: int, stop: int) -> "StepJacobian":
        """Those of some steps, of states (*b, time, n)."""
        return StepJacobian(
            self.eigen,
            [(weight[..., start:stop, :], matrix) for weight, matrix in self.matrices],
            None if self.slope is None else self.slope[..., start:stop, :],
            self.columns[..., start:stop, :, :],
            self.rows[..., start:stop, :, :],
        )

    def blocks(self) -> BlockDiagonal:
        """The diagonal, in pairs where eigenvalues are."""
        index = torch.arange(self.rows.shape[-1], device=self.rows.device)
        diagonal = self.eigen.real + self._entries(index, index)
        if self.eigen.imag is None:
            return BlockDiagonal(diagonal)
        beside = self._entries(index, index ^ 1)  # above the diagonal in even rows, below it in odd ones
        real = (diagonal[..., ::2] + diagonal[..., 1::2]) / 2
        imag = self.eigen.imag[..., ::2] + (beside[..., 1::2] - beside[..., ::2]) / 2
        return BlockDiagonal(real.repeat_interleave(2, -1), imag.repeat_interleave(2, -1))

    def _entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Entries (i, columns[i]) of all but Λ, where `rows` are all i."""
        picked = sum(weight * matrix[rows, columns] for weight, matrix in self.matrices)
        assert isinstance(picked, Tensor)
        if self.slope is not None:
            picked = picked * self.slope[..., columns]
        return picked + (self.columns * self.rows.mT[..., columns, :]).sum(-1)


def step_jacobian(
    state: Vector,
    eigen: BlockDiagonal,
    source: Callable[[Tensor], Tensor],
    directions: Sequence[Direction],
    of: Numbers,
) -> StepJacobian:
    """The Jacobian where key and value are unit vectors along K and V of `source(state)`.

    Differentiable where gradients are recorded, with respect to the state and to all parameters.

    Args:
        state: (*b, n).
        eigen: Λ̄.
        source: What K and V are applied to; acts on each number by itself.
        directions: K and V.
        of: a, b, c, d.
    """
    recorded = torch.is_grad_enabled() and _learns(state, eigen, source, directions, of)
    with torch.enable_grad():
        x = state.view_as(state) if recorded and state.requires_grad else state.detach().requires_grad_()
        seen, slope = source(x), None
        if seen is not x:
            (slope,) = torch.autograd.grad(seen.sum(), x, retain_graph=True, create_graph=recorded)
        reaches = [direction.project(seen) for direction in directions]
        # views, so that each derivative below is along one argument alone
        key, value, point = (part.view_as(part) for part in (*map(unit, reaches), x))
        numbers = of(key, value, point)
        gradients = [
            torch.autograd.grad(
                number.sum(), (point, key, value), retain_graph=True, create_graph=recorded, materialize_grads=True
            )
            for number in numbers
        ]
        jacobian = _assembled(eigen, slope, directions, (key, value), reaches, numbers, gradients)
    if recorded:
        return jacobian
    return StepJacobian(
        eigen,
        [(weight.detach(), matrix.detach()) for weight, matrix in jacobian.matrices],
        slope,
        jacobian.columns.detach(),
        jacobian.rows.detach(),
    )


def _learns(
    state: Tensor,
    eigen: BlockDiagonal,
    source: Callable[[Tensor], Tensor],
    directions: Sequence[Direction],
    of: Numbers,
) -> bool:
    """Whether a gradient of the Jacobian can be asked for at all."""
    point = state.detach()
    unturned = [direction.project(source(point)) for direction in directions]
    key, value = (unit(reach.detach()) for reach in unturned)
    numbers = of(key, value, point)
    return any(part.requires_grad for part in (state, eigen.real, *unturned, *numbers))


def _assembled(
    eigen: BlockDiagonal,
    slope: Tensor | None,
    directions: Sequence[Direction],
    vectors: Sequence[Tensor],
    reaches: Sequence[Tensor],
    numbers: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> StepJacobian:
    rows = torch.stack([parts[0] for parts in gradients], -2)  # ∇a, ∇b, ∇c, ∇d: first what depends on x itself
    matrices: list[tuple[Tensor, Tensor]] = []
    more: list[tuple[Tensor, Tensor]] = []
    moved = [eigen.mv(vector) for vector in vectors]
    for i, (direction, vector, reach) in enumerate(zip(directions, vectors, reaches, strict=True)):
        matrix, inverse = direction.matrix, _inverse_length(reach)
        on_moved, on_itself = inverse * numbers[i], inverse * numbers[i + 2]
        # d vector / dx = (matrix - vector (vector' matrix)) slope / length
        matrices.append((on_moved * eigen.real + on_itself, matrix))
        if eigen.imag is not None:
            quarter = BlockDiagonal(torch.zeros_like(eigen.real), eigen.imag)
            matrices.append((on_moved.expand_as(vector), quarter.mv(matrix.mT).mT))
        partials = torch.stack([parts[1 + i] for parts in gradients], -2)
        across = inverse.unsqueeze(-1) * (partials - (partials @ vector.unsqueeze(-1)) * vector.unsqueeze(-2))
        pulled, along = torch.cat((across, vector.unsqueeze(-2)), -2).matmul(matrix).split([len(numbers), 1], -2)
        more.append((-(on_moved * moved[i] + on_itself * vector), along))
        rows = rows + (pulled if slope is None else pulled * slope.unsqueeze(-2))
    added = torch.cat([row for _, row in more], -2)
    rows = torch.cat((added if slope is None else added * slope.unsqueeze(-2), rows), -2)
    columns = torch.stack([*(column for column, _ in more), *moved, *vectors], -1)
    return StepJacobian(eigen, matrices, slope, columns, rows)


def _inverse_length(x: Tensor) -> Tensor:
    """1 / ‖x‖, and 0 where `unit` leaves x as zero."""
    direction = unit(x)
    length = (direction * x).sum(-1, keepdim=True)
    silent = length == 0
    return torch.where(silent, 0.0, 1 / torch.where(silent, 1.0, length))


def rotation_numbers(
    eigen: BlockDiagonal, beta: float | Tensor, retraction: Retraction, drive: Tensor | None
) -> Numbers:
    """Of M = Q Λ̄ Q'; `drive` is the drive where it is turned by Q, None where it is added as it is."""

    def numbers(key: Tensor, value: Tensor, x: Tensor) -> Sequence[Tensor]:
        rotation = retraction(key, value, beta)
        squared = key.square().sum(-1, keepdim=True)
        overlap = (key * value).sum(-1, keepdim=True) / torch.where(squared > 0, squared, 1.0)

        def of_value(on_key: Column, on_offset: Column) -> tuple[Tensor, Tensor]:
            """Weights of key and offset = beta (value - overlap key) as weights of key and value."""
            return on_key - beta * overlap * on_offset, beta * on_offset

        inner = rotation.weights_transposed(x)
        turned = eigen.mv(x + inner[0] * rotation.key + inner[1] * rotation.offset)
        outer = rotation.weights(turned if drive is None else turned + drive)
        return *of_value(*inner), *of_value(*outer)

    return numbers


def taylor_numbers(eigen: BlockDiagonal, beta: float | Tensor, order: int) -> Numbers:
    """Of M = Λ̄ + β[S, Λ̄] + ½β²[S, [S, Λ̄]] with S = k v' - v k'."""

    def numbers(key: Tensor, value: Tensor, x: Tensor) -> Sequence[Tensor]:
        def weights(y: Tensor) -> tuple[Tensor, Tensor]:
            """S y = weight k + weight v."""
            return (value * y).sum(-1, keepdim=True), -(key * y).sum(-1, keepdim=True)

        def skewed(y: Tensor) -> Tensor:
            on_key, on_value = weights(y)
            return on_key * key + on_value * value

        moved, turned = eigen.mv(x), skewed(x)
        first = [-beta * weight for weight in weights(x)] + [beta * weight for weight in weights(moved)]
        if order == 1:
            return first
        half = beta * beta / 2
        around = zip(weights(skewed(moved)), weights(eigen.mv(turned)), strict=True)
        second = [half * weight for weight in weights(turned)] + [half * (p - 2 * q) for p, q in around]
        return [p + q for p, q in zip(first, second, strict=True)]

    return numbers
