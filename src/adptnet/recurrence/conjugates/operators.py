"""M = Q Λ̄ Q' as an operator on the state. Its matrix is formed only by `dense`."""

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from ..._typing import Matrix, Vector
from ...errors import IncompatibleError
from ...ops.plane_rotation import PlaneRotation
from ..directions import KeyValue
from ..spectra import BlockDiagonal
from .blocks import Eigen, RotatedBlocks, block_diagonal, nearest_blocks, scaled_skew

__all__ = [
    "Conjugate",
    "MultiHeadConjugate",
    "PhasedConjugate",
    "RotatedConjugate",
    "StaticConjugate",
    "TaylorConjugate",
    "taylor_matrix",
]


class Conjugate(abc.ABC):
    """Base class of the operator M.

    Where M does not depend on the state, `diagonal` and `dense` have no batch dimensions.
    """

    @abc.abstractmethod
    def mv(self, x: Vector) -> Vector:
        """Return M x.

        Args:
            x: (*b, n).
        """

    @abc.abstractmethod
    def diagonal(self) -> Vector:
        """Return the diagonal of M (eq:diag_M).

        In O(n) for one plane and diagonal eigenvalues; from `dense` otherwise, and for a Taylor form of order two.
        """

    @abc.abstractmethod
    def dense(self) -> Matrix:
        """Return M as a matrix."""

    @abc.abstractmethod
    def blocks(self) -> BlockDiagonal:
        """Return the block-diagonal matrix nearest to M, of the same kind as Λ̄.

        For real eigenvalues it is the diagonal of M. For complex pairs it is the nearest a + ib of each 2-by-2 block on
        the diagonal.
        """

    def weighted_sum(self, weight: Tensor) -> Tensor:
        """Return Σ_t weight_t M_t, the sum over time.

        Args:
            weight: (*b, time, 1).

        Returns:
            (*b, n, n).
        """
        return (weight.unsqueeze(-1) * self.dense()).sum(-3)

    def rotate(self, x: Vector) -> Vector:
        """Return Q x, for the rotation-aware drive.

        Args:
            x: (*b, n).

        Raises:
            IncompatibleError: M is not given by a rotation Q.
        """
        raise IncompatibleError(f"{type(self).__name__} has no rotation. Use conjugates.Exact() or Product().")


class RotatedConjugate(Conjugate):
    """The operator M = Q Λ̄ Q' for a product Q of plane rotations.

    Args:
        rotations: The factors of Q, the first one innermost.
        eigen: Λ̄, or Q₀ Λ̄ Q₀'.
    """

    def __init__(self, rotations: Sequence[PlaneRotation], eigen: Eigen):
        self.rotations = rotations
        self.eigen = eigen

    def mv(self, x: Vector) -> Vector:
        for rotation in reversed(self.rotations):
            x = rotation.apply_transposed(x)
        return self.rotate(self.eigen.mv(x))

    def rotate(self, x: Vector) -> Vector:
        for rotation in self.rotations:
            x = rotation.apply(x)
        return x

    def diagonal(self) -> Vector:
        """Return the diagonal of M (eq:diag_M), in O(n) for one rotation.

        Undamped Forward-DEER on a CPU computes it in `TransitionDiagonal` of `ops/adpt_step/csrc/kernel.cpp`.
        """
        if len(self.rotations) > 1 or isinstance(self.eigen, RotatedBlocks):
            return self.dense().diagonal(dim1=-2, dim2=-1)
        # Q = I + F G F' with F = [key offset], so diag M = diag(Λ + F G F'Λ + ΛF (F G)' + F G (F'ΛF) (F G)'). The skew
        # part of Λ (complex pairs) cancels in every term.
        key, offset, rotated_key, rotated_offset = self._columns()
        real = self.eigen.real
        key_key = (key * real * key).sum(-1, keepdim=True)
        key_offset = (key * real * offset).sum(-1, keepdim=True)
        offset_offset = (offset * real * offset).sum(-1, keepdim=True)
        linear = 2 * real * (rotated_key * key + rotated_offset * offset)
        quadratic = (
            key_key * rotated_key.square()
            + 2 * key_offset * rotated_key * rotated_offset
            + offset_offset * rotated_offset.square()
        )
        return real + linear + quadratic

    def _columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the columns of F = [key offset] and of F G, for one rotation."""
        key, offset, skew_coefficient, key_coefficient, offset_coefficient = self.rotations[0]
        rotated_key = key_coefficient * key - skew_coefficient * offset
        return key, offset, rotated_key, skew_coefficient * key + offset_coefficient * offset

    def blocks(self) -> BlockDiagonal:
        if len(self.rotations) > 1 or isinstance(self.eigen, RotatedBlocks):
            return nearest_blocks(self.dense(), self.eigen.imag is not None)
        diagonal = self.diagonal()
        if self.eigen.imag is None:
            return BlockDiagonal(diagonal)
        # (M - M')/2 = Q W Q' with W the skew part of Λ. Its entry below the diagonal of each 2-by-2 block is computed
        # from the same F and F G as in `diagonal`.
        key, offset, rotated_key, rotated_offset = self._columns()
        skew_part = BlockDiagonal(torch.zeros_like(self.eigen.real), self.eigen.imag)
        imag = self.eigen.imag[..., ::2]
        for column, rotated in ((key, rotated_key), (offset, rotated_offset)):
            moved = skew_part.mv(column)
            imag = imag + moved[..., 1::2] * rotated[..., ::2] - rotated[..., 1::2] * moved[..., ::2]
        across = (key * skew_part.mv(offset)).sum(-1, keepdim=True)
        imag = imag + across * (
            rotated_key[..., 1::2] * rotated_offset[..., ::2] - rotated_offset[..., 1::2] * rotated_key[..., ::2]
        )
        real = (diagonal[..., ::2] + diagonal[..., 1::2]) / 2
        return BlockDiagonal(real.repeat_interleave(2, -1), imag.repeat_interleave(2, -1))

    def dense(self) -> Matrix:
        dense = self.eigen.dense()
        for rotation in self.rotations:
            matrix = rotation.dense()
            dense = matrix @ dense @ matrix.mT
        return dense

    def weighted_sum(self, weight: Tensor) -> Tensor:
        if len(self.rotations) > 1 or isinstance(self.eigen, RotatedBlocks) or self.eigen.real.dim() > 1:
            return super().weighted_sum(weight)
        # Σ w M = Σ w Λ + P Λ + Λ P' + Σ w (F G)(F'ΛF)(F G)' with P = Σ w F G F': products of (time, n) matrices only
        key, offset, rotated_key, rotated_offset = self._columns()
        eigen = self.eigen
        moved_key, moved_offset = eigen.mv(key), eigen.mv(offset)
        left = (
            rotated_key * (key * moved_key).sum(-1, keepdim=True)
            + rotated_offset * (offset * moved_key).sum(-1, keepdim=True),
            rotated_key * (key * moved_offset).sum(-1, keepdim=True)
            + rotated_offset * (offset * moved_offset).sum(-1, keepdim=True),
        )
        rotated = self.weighted_rotation_sum(weight)
        both = (weight * left[0]).mT @ rotated_key + (weight * left[1]).mT @ rotated_offset
        scaled = weight.sum(-2).unsqueeze(-1) * eigen.dense()
        return scaled + eigen.transpose().mv(rotated) + eigen.mv(rotated).mT + both

    def weighted_rotation_sum(self, weight: Tensor) -> Tensor:
        """Return Σ_t weight_t (Q_t - I), the sum over time, for one rotation.

        Args:
            weight: (*b, time, 1).

        Returns:
            (*b, n, n).
        """
        key, offset, rotated_key, rotated_offset = self._columns()
        return (weight * rotated_key).mT @ key + (weight * rotated_offset).mT @ offset


class TaylorConjugate(Conjugate):
    """The Taylor form M = Λ̄ + β[S, Λ̄], plus ½β²[S, [S, Λ̄]] at order two, with S = key value' - value key'.

    Args:
        plane: Key and value.
        eigen: Λ̄, or Q₀ Λ̄ Q₀'.
        beta: β; a tensor is (*b, 1).
        order: 1 or 2.
    """

    def __init__(self, plane: KeyValue, eigen: Eigen, beta: float | Tensor, order: int):
        self.plane = plane
        self.eigen = eigen
        self.beta = beta
        self.order = order

    def mv(self, x: Vector) -> Vector:
        eigen, skew_of = self.eigen.mv, self._skew
        remembered, moved = eigen(x), skew_of(x)
        first = skew_of(remembered) - eigen(moved)  # [S, Λ] x
        if self.order == 1:
            return remembered + self.beta * first
        second = skew_of(first) - (skew_of(eigen(moved)) - eigen(skew_of(moved)))  # [S, [S, Λ]] x
        return remembered + self.beta * first + self.beta * self.beta / 2 * second

    def _skew(self, x: Tensor) -> Tensor:
        """Return S x."""
        key, value = self.plane
        return key * (value * x).sum(-1, keepdim=True) - value * (key * x).sum(-1, keepdim=True)

    def diagonal(self) -> Vector:
        if self.order == 2 or not isinstance(self.eigen, BlockDiagonal):
            return self.dense().diagonal(dim1=-2, dim2=-1)
        # diag [S, Λ] is zero up to rounding, for real eigenvalues and for complex pairs
        key, value = self.plane
        back = self.eigen.transpose()
        first = key * back.mv(value) - value * back.mv(key) - self.eigen.mv(key) * value + self.eigen.mv(value) * key
        return self.eigen.real + self.beta * first

    def blocks(self) -> BlockDiagonal:
        if self.order == 2 or not isinstance(self.eigen, BlockDiagonal):
            return nearest_blocks(self.dense(), self.eigen.imag is not None)
        return self.eigen  # the 2-by-2 blocks of S are skew and commute with those of Λ, so [S, Λ] adds nothing

    def dense(self) -> Matrix:
        return taylor_matrix(self.eigen, self.plane, self.beta, self.order)


def taylor_matrix(eigen: Eigen, plane: KeyValue, beta: float | Tensor, order: int) -> Matrix:
    """Return the dense matrix Λ̄ + β[S, Λ̄], with ½β²[S, [S, Λ̄]] added at order two.

    Args:
        eigen: Λ̄, or Q₀ Λ̄ Q₀'.
        plane: Key and value, S = key value' - value key'.
        beta: β; a tensor is (*b, 1).
        order: 1 or 2.

    Returns:
        (*b, n, n).
    """
    dense, step = eigen.dense(), scaled_skew(beta, plane)
    first = step @ dense - dense @ step
    return dense + first + ((step @ first - first @ step) / 2 if order == 2 else 0)


class StaticConjugate(Conjugate):
    """The operator M = Λ̄, or Q₀ Λ̄ Q₀', which is the same at every state.

    Args:
        eigen: Λ̄, or Q₀ Λ̄ Q₀'.
    """

    def __init__(self, eigen: Eigen):
        self.eigen = eigen

    def mv(self, x: Vector) -> Vector:
        return self.eigen.mv(x)

    def diagonal(self) -> Vector:
        if isinstance(self.eigen, RotatedBlocks):
            return self.dense().diagonal(dim1=-2, dim2=-1)
        return self.eigen.real

    def blocks(self) -> BlockDiagonal:
        if isinstance(self.eigen, RotatedBlocks):
            return nearest_blocks(self.dense(), self.eigen.imag is not None)
        return self.eigen

    def dense(self) -> Matrix:
        return self.eigen.dense()


class MultiHeadConjugate(Conjugate):
    """A conjugate for each head, on that head's part of the state.

    Args:
        each: The conjugates of all heads, with a separate dimension for the heads.
        heads: The number of heads.
    """

    def __init__(self, each: Conjugate, heads: int):
        self.each = each
        self.heads = heads

    def mv(self, x: Vector) -> Vector:
        return self.each.mv(x.unflatten(-1, (self.heads, -1))).flatten(-2)

    def rotate(self, x: Vector) -> Vector:
        return self.each.rotate(x.unflatten(-1, (self.heads, -1))).flatten(-2)

    def diagonal(self) -> Vector:
        return self.each.diagonal().flatten(-2)

    def blocks(self) -> BlockDiagonal:
        return self.each.blocks().map(lambda part: part.flatten(-2))

    def dense(self) -> Matrix:
        return block_diagonal(self.each.dense())


class PhasedConjugate(Conjugate):
    """The operator P M: a conjugate followed by an input-driven phase.

    Args:
        inner: M.
        phase: P.
    """

    def __init__(self, inner: Conjugate, phase: BlockDiagonal):
        self.inner = inner
        self.phase = phase

    def mv(self, x: Vector) -> Vector:
        return self.phase.mv(self.inner.mv(x))

    def rotate(self, x: Vector) -> Vector:
        return self.phase.mv(self.inner.rotate(x))

    def diagonal(self) -> Vector:
        return self.dense().diagonal(dim1=-2, dim2=-1)

    def blocks(self) -> BlockDiagonal:
        """Return the nearest a + ib of each 2-by-2 block, also for real eigenvalues.

        It is that of M times e^(iφ). A real M is symmetric, so that the nearest a + ib of its block is real.
        """
        return self.phase.multiply(self.inner.blocks().pairs())

    def dense(self) -> Matrix:
        return self.phase.mm(self.inner.dense())
