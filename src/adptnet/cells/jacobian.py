"""The Jacobian of an ADPT step in closed form.

For one plane the step is x' = Λ(x + a k + b v) + c k + d v + drive, where a, b, c, d are numbers made of k, v and x.
So J = Λ + (aΛ + c) dk/dx + (bΛ + d) dv/dx + Λk ∇a + Λv ∇b + k ∇c + v ∇d: four rows of numbers and
matrices that are the same at every state. J and its diagonal cost a few products with K and V, not n derivatives.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..directions import unit
from ..retractions import Retraction
from ..spectra import BlockDiagonal
from ..typing import Column, Matrix, Vector

__all__ = ["Direction", "StepJacobian", "rotation_numbers", "step_jacobian", "taylor_numbers"]

# From key, value and x to a, b, c, d
Numbers = Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]


class Direction(NamedTuple):
    """How one of key and value comes from the state."""

    matrix: Tensor  # K or V, (n, n)
    project: Callable[[Tensor], Tensor]  # the same with its bias


class StepJacobian(NamedTuple):
    """Λ + Σ weight_i W_i diag(slope) + Σ column_j row_j'."""

    eigen: BlockDiagonal
    matrices: list[tuple[Tensor, Tensor]]  # weight (*b, 1), W (n, n)
    slope: Tensor  # (*b, n), the derivative of what K and V are applied to
    outer: list[tuple[Tensor, Tensor]]  # column, row (*b, n)

    def dense(self) -> Matrix:
        dense = torch.zeros_like(self.slope).unsqueeze(-1)
        for weight, matrix in self.matrices:
            dense = dense + weight.unsqueeze(-1) * matrix
        columns = torch.stack([column for column, _ in self.outer], -1)
        rows = torch.stack([row for _, row in self.outer], -2)
        return self.eigen.dense() + dense * self.slope.unsqueeze(-2) + columns @ rows

    def blocks(self) -> BlockDiagonal:
        """The diagonal, in pairs where eigenvalues are."""
        index = torch.arange(self.slope.shape[-1], device=self.slope.device)
        diagonal = self.eigen.real + self._entries(index, index)
        if self.eigen.imag is None:
            return BlockDiagonal(diagonal)
        beside = self._entries(index, index ^ 1)  # above the diagonal in even rows, below it in odd ones
        real = (diagonal[..., ::2] + diagonal[..., 1::2]) / 2
        imag = self.eigen.imag[..., ::2] + (beside[..., 1::2] - beside[..., ::2]) / 2
        return BlockDiagonal(real.repeat_interleave(2, -1), imag.repeat_interleave(2, -1))

    def _entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Entries (rows[i], columns[i]) of all but Λ."""
        picked = torch.zeros_like(self.slope)
        for weight, matrix in self.matrices:
            picked = picked + weight * matrix[rows, columns]
        picked = picked * self.slope[..., columns]
        for column, row in self.outer:
            picked = picked + column * row[..., columns]
        return picked


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
        seen = source(x)
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
        [(column.detach(), row.detach()) for column, row in jacobian.outer],
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
    slope: Tensor,
    directions: Sequence[Direction],
    vectors: Sequence[Tensor],
    reaches: Sequence[Tensor],
    numbers: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> StepJacobian:
    rows = [parts[0] for parts in gradients]  # ∇a, ∇b, ∇c, ∇d: first what depends on x itself
    matrices: list[tuple[Tensor, Tensor]] = []
    outer: list[tuple[Tensor, Tensor]] = []
    moved = [eigen.mv(vector) for vector in vectors]
    for i, (direction, vector, reach) in enumerate(zip(directions, vectors, reaches, strict=True)):
        matrix, inverse = direction.matrix, _inverse_length(reach)
        on_moved, on_itself = inverse * numbers[i], inverse * numbers[i + 2]
        # d vector / dx = (matrix - vector (vector' matrix)) slope / length
        matrices += [(on_moved, eigen.mv(matrix.mT).mT), (on_itself, matrix)]
        outer.append((-(on_moved * moved[i] + on_itself * vector), (vector @ matrix) * slope))
        partials = torch.stack([parts[1 + i] for parts in gradients], -2)
        across = partials - (partials @ vector.unsqueeze(-1)) * vector.unsqueeze(-2)
        pulled = (inverse * slope).unsqueeze(-2) * (across @ matrix)
        rows = [row + more for row, more in zip(rows, pulled.unbind(-2), strict=True)]
    outer += list(zip((*moved, *vectors), rows, strict=True))
    return StepJacobian(eigen, matrices, slope, outer)


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
