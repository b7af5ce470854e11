"""Conjugates: how M = Q Λ̄ Q' acts on the state, as an operator that is never formed."""

import abc
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .._typing import Matrix, Vector
from ..errors import IncompatibleError, SpecError
from ..ops.plane_rotation import PlaneRotation, skew
from ..spec import Spec, check_size, spec
from .directions import KeyValue
from .retractions import Exponential, Retraction
from .spectra import BlockDiagonal

__all__ = [
    "Conjugate",
    "ConjugateSpec",
    "Diagonal",
    "Exact",
    "HeadedConjugate",
    "Product",
    "RotatedConjugate",
    "StartedBlocks",
    "Stateful",
    "StaticConjugate",
    "Taylor",
    "TaylorConjugate",
    "block_diagonal",
    "dense_step",
    "nearest_blocks",
]


class Conjugate(abc.ABC):
    """M, as what solvers and figures ask of it.

    Where M does not depend on the state, `diagonal` and `dense` have no batch dimensions.
    """

    @abc.abstractmethod
    def mv(self, x: Vector) -> Vector:
        """M x."""

    @abc.abstractmethod
    def diagonal(self) -> Vector:
        """The diagonal of M; in O(n) for one plane and diagonal eigenvalues, by `dense` otherwise."""

    @abc.abstractmethod
    def dense(self) -> Matrix:
        """M as a matrix."""

    @abc.abstractmethod
    def blocks(self) -> BlockDiagonal:
        """The nearest to M of the kind of Λ̄: its diagonal, or where eigenvalues are pairs, the nearest a + ib of each
        2-by-2 block on the diagonal."""

    def weighted_sum(self, weight: Tensor) -> Tensor:
        """Σ_t weight_t M_t over time (the last dimension but one of `weight`, (*b, time, 1)): (*b, n, n)."""
        return (weight.unsqueeze(-1) * self.dense()).sum(-3)

    def turn(self, x: Vector) -> Vector:
        """Q x, where there is one: for the rotation-aware drive."""
        raise IncompatibleError(f"{type(self).__name__} has no rotation. Use conjugates.Exact() or Product().")


def nearest_blocks(dense: Tensor, pairs: bool) -> BlockDiagonal:
    """The diagonal of a matrix, or the nearest a + ib, [[a, -b], [b, a]], of each 2-by-2 block on it."""
    diagonal = dense.diagonal(dim1=-2, dim2=-1)
    if not pairs:
        return BlockDiagonal(diagonal)
    below = dense.diagonal(-1, -2, -1)[..., ::2]
    above = dense.diagonal(1, -2, -1)[..., ::2]
    real = (diagonal[..., ::2] + diagonal[..., 1::2]) / 2
    return BlockDiagonal(real.repeat_interleave(2, -1), ((below - above) / 2).repeat_interleave(2, -1))


class StartedBlocks(NamedTuple):
    """Q₀ Λ̄ Q₀' for a learned start Q₀: in the place of Λ̄ wherever only its action is asked for."""

    blocks: BlockDiagonal
    start: Tensor  # (n, n), orthogonal

    def mv(self, x: Vector) -> Vector:
        return self.blocks.mv(x @ self.start) @ self.start.mT

    def dense(self) -> Tensor:
        return self.start @ self.blocks.dense() @ self.start.mT

    @property
    def imag(self) -> Tensor | None:
        return self.blocks.imag


Eigen = BlockDiagonal | StartedBlocks


class ConjugateSpec(Spec, abc.ABC):
    """The description of a conjugate."""

    turns: ClassVar[bool] = True  # whether it uses key and value
    rotates: ClassVar[bool] = True  # whether it has an orthogonal Q

    @property
    def planes(self) -> int:
        """How many pairs of key and value it uses, each with a K and a V of its own."""
        return 1

    @abc.abstractmethod
    def operator(
        self, eigen: Eigen, planes: Sequence[KeyValue], beta: float | Tensor, retraction: Retraction
    ) -> Conjugate:
        """M for these eigenvalues and directions."""

    @abc.abstractmethod
    def define(self, eigen: Eigen, planes: Sequence[KeyValue], beta: float | Tensor, retraction: Retraction) -> Matrix:
        """The same by its definition, with dense matrices: slow, and what `operator` is compared with."""


def dense_step(beta: float | Tensor, plane: KeyValue) -> Tensor:
    """beta (key value' - value key'), dense."""
    return (beta.unsqueeze(-1) if isinstance(beta, Tensor) else beta) * skew(plane.key, plane.value)


@spec
class Exact(ConjugateSpec):
    """M = Q Λ̄ Q' (eq:state_dependent_similarity)."""

    def operator(
        self, eigen: Eigen, planes: Sequence[KeyValue], beta: float | Tensor, retraction: Retraction
    ) -> Conjugate:
        return RotatedConjugate([retraction(*planes[0], beta)], eigen)

    def define(self, eigen: Eigen, planes: Sequence[KeyValue], beta: float | Tensor, retraction: Retraction) -> Matrix:
        rotation = retraction.define(dense_step(beta, planes[0]))
        return rotation @ eigen.dense() @ rotation.mT


@spec
class Product(ConjugateSpec):
    """M = Q Λ̄ Q' with Q the product of `steps` plane rotations, the first one innermost: Q = Q_m … Q_2 Q_1.

    Each has its own K and V of the same state. One step is `Exact`; more reach further from the identity, as
    DeltaProduct does for linear recurrences.
    """

    steps: int = 2

    def __post_init__(self) -> None:
        check_size(self, steps=self.steps)

    @property
    def planes(self) -> int:
        return self.steps

    def operator(
        self, eigen: Eigen, planes: Sequence[KeyValue], beta: float | Tensor, retraction: Retraction
    ) -> Conjugate:
        return RotatedConjugate([retraction(*plane, beta) for plane in planes], eigen)

    def define(self, eigen: Eigen, planes: Sequence[KeyValue], beta: float | Tensor, retraction: Retraction) -> Matrix:
        dense = eigen.dense()
        for plane in planes:
            rotation = retraction.define(dense_step(beta, plane))
            dense = rotation @ dense @ rotation.mT
        return dense


@spec
class Taylor(ConjugateSpec):
    """The exact conjugate to first or second order in β, without a rotation: for small β only.

    Λ̄ + β[S, Λ̄] + ½β²[S, [S, Λ̄]] with S = k v' - v k' and [A, B] = AB - BA (eq:taylor_ADPTNet has the opposite sign,
    which belongs to Q'Λ̄Q). The error falls with β² or β³. M no longer has the moduli |λ̄| as its singular values, so
    for large β the state may grow.
    """

    rotates: ClassVar[bool] = False
    order: int = 1

    def __post_init__(self) -> None:
        if self.order not in (1, 2):
            raise SpecError(f"Taylor(order={self.order!r}): must be 1 or 2. For all orders use conjugates.Exact().")

    def operator(
        self, eigen: Eigen, planes: Sequence[KeyValue], beta: float | Tensor, retraction: Retraction
    ) -> Conjugate:
        return TaylorConjugate(planes[0], eigen, beta, self.order)

    def define(self, eigen: Eigen, planes: Sequence[KeyValue], beta: float | Tensor, retraction: Retraction) -> Matrix:
        dense, step = eigen.dense(), dense_step(beta, planes[0])
        first = step @ dense - dense @ step
        return dense + first + ((step @ first - first @ step) / 2 if self.order == 2 else 0)


@spec
class Diagonal(ConjugateSpec):
    """M = Λ̄: β = 0, a diagonal state-space model. There are no K and V."""

    turns: ClassVar[bool] = False
    rotates: ClassVar[bool] = False

    @property
    def planes(self) -> int:
        return 0

    def operator(
        self, eigen: Eigen, planes: Sequence[KeyValue], beta: float | Tensor, retraction: Retraction
    ) -> Conjugate:
        return StaticConjugate(eigen)

    def define(self, eigen: Eigen, planes: Sequence[KeyValue], beta: float | Tensor, retraction: Retraction) -> Matrix:
        return eigen.dense()


@spec
class Stateful(ConjugateSpec):
    """M = Q_t Λ̄ Q_t' with a Q that is remembered: Q_t = Q_{t-1} exp(β S), S = k (Q_{t-1}v)' - (Q_{t-1}v) k'.

    The paper's first idea (eq:naive_ortho_update), for study: the state carries the n² numbers of Q beside x, so n must
    be small. `cells.StatefulCell` runs it.
    """

    def operator(
        self, eigen: Eigen, planes: Sequence[KeyValue], beta: float | Tensor, retraction: Retraction
    ) -> Conjugate:
        raise IncompatibleError(
            "Stateful needs its Q: build the cell with cells.ADPTSpec(conjugate=Stateful()).build()."
        )

    def define(self, eigen: Eigen, planes: Sequence[KeyValue], beta: float | Tensor, retraction: Retraction) -> Matrix:
        raise IncompatibleError(
            "Stateful needs its Q: build the cell with cells.ADPTSpec(conjugate=Stateful()).build()."
        )


class RotatedConjugate(Conjugate):
    """Q Λ̄ Q' for a product Q of plane rotations, the first one innermost."""

    def __init__(self, rotations: Sequence[PlaneRotation], eigen: Eigen):
        self.rotations = rotations
        self.eigen = eigen

    def mv(self, x: Vector) -> Vector:
        for rotation in reversed(self.rotations):
            x = rotation.apply_transposed(x)
        return self.turn(self.eigen.mv(x))

    def turn(self, x: Vector) -> Vector:
        for rotation in self.rotations:
            x = rotation.apply(x)
        return x

    def diagonal(self) -> Vector:
        if len(self.rotations) > 1 or isinstance(self.eigen, StartedBlocks):
            return self.dense().diagonal(dim1=-2, dim2=-1)
        # Q = I + F G F' with F = [key offset], so diag M = diag(Λ + F G F'Λ + ΛF (F G)' + F G (F'ΛF) (F G)'). The skew
        # part of Λ (complex pairs) cancels in every term.
        key, offset, turned_key, turned_offset = self._columns()
        real = self.eigen.real
        key_key = (key * real * key).sum(-1, keepdim=True)
        key_offset = (key * real * offset).sum(-1, keepdim=True)
        offset_offset = (offset * real * offset).sum(-1, keepdim=True)
        linear = 2 * real * (turned_key * key + turned_offset * offset)
        quadratic = (
            key_key * turned_key.square()
            + 2 * key_offset * turned_key * turned_offset
            + offset_offset * turned_offset.square()
        )
        return real + linear + quadratic

    def _columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The columns of F = [key offset] and of F G, for one rotation."""
        key, offset, turn, shrink_key, shrink_offset = self.rotations[0]
        return key, offset, shrink_key * key - turn * offset, turn * key + shrink_offset * offset

    def blocks(self) -> BlockDiagonal:
        if len(self.rotations) > 1 or isinstance(self.eigen, StartedBlocks):
            return nearest_blocks(self.dense(), self.eigen.imag is not None)
        diagonal = self.diagonal()
        if self.eigen.imag is None:
            return BlockDiagonal(diagonal)
        # (M - M')/2 = Q W Q' with W the skew part of Λ: below the diagonal of each block, in the terms of `diagonal`
        key, offset, turned_key, turned_offset = self._columns()
        skew_part = BlockDiagonal(torch.zeros_like(self.eigen.real), self.eigen.imag)
        imag = self.eigen.imag[..., ::2]
        for column, turned in ((key, turned_key), (offset, turned_offset)):
            moved = skew_part.mv(column)
            imag = imag + moved[..., 1::2] * turned[..., ::2] - turned[..., 1::2] * moved[..., ::2]
        across = (key * skew_part.mv(offset)).sum(-1, keepdim=True)
        imag = imag + across * (
            turned_key[..., 1::2] * turned_offset[..., ::2] - turned_offset[..., 1::2] * turned_key[..., ::2]
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
        if len(self.rotations) > 1 or isinstance(self.eigen, StartedBlocks) or self.eigen.real.dim() > 1:
            return super().weighted_sum(weight)
        # Σ w M = Σ w Λ + P Λ + Λ P' + Σ w (F G)(F'ΛF)(F G)' with P = Σ w F G F': products of (time, n) matrices only
        key, offset, turned_key, turned_offset = self._columns()
        eigen = self.eigen
        moved_key, moved_offset = eigen.mv(key), eigen.mv(offset)
        left = (
            turned_key * (key * moved_key).sum(-1, keepdim=True)
            + turned_offset * (offset * moved_key).sum(-1, keepdim=True),
            turned_key * (key * moved_offset).sum(-1, keepdim=True)
            + turned_offset * (offset * moved_offset).sum(-1, keepdim=True),
        )
        turned = self.turned_sum(weight)
        both = (weight * left[0]).mT @ turned_key + (weight * left[1]).mT @ turned_offset
        return weight.sum(-2).unsqueeze(-1) * eigen.dense() + eigen.transposed().mv(turned) + eigen.mv(turned).mT + both

    def turned_sum(self, weight: Tensor) -> Tensor:
        """Σ_t weight_t (Q_t - I), for one rotation: (*b, n, n)."""
        key, offset, turned_key, turned_offset = self._columns()
        return (weight * turned_key).mT @ key + (weight * turned_offset).mT @ offset


class TaylorConjugate(Conjugate):
    """Λ̄ + β[S, Λ̄], and ½β²[S, [S, Λ̄]] at order two, applied from the right to the left."""

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
        key, value = self.plane
        return key * (value * x).sum(-1, keepdim=True) - value * (key * x).sum(-1, keepdim=True)

    def diagonal(self) -> Vector:
        if self.order == 2 or not isinstance(self.eigen, BlockDiagonal):
            return self.dense().diagonal(dim1=-2, dim2=-1)
        # diag [S, Λ] vanishes for real eigenvalues, and for a pair by its two turned products
        key, value = self.plane
        back = self.eigen.transposed()
        first = key * back.mv(value) - value * back.mv(key) - self.eigen.mv(key) * value + self.eigen.mv(value) * key
        return self.eigen.real + self.beta * first

    def blocks(self) -> BlockDiagonal:
        if self.order == 2 or not isinstance(self.eigen, BlockDiagonal):
            return nearest_blocks(self.dense(), self.eigen.imag is not None)
        return self.eigen  # 2-by-2 blocks of S, which is skew, commute with those of Λ

    def dense(self) -> Matrix:
        return Taylor(self.order).define(self.eigen, [self.plane], self.beta, Exponential())


class StaticConjugate(Conjugate):
    """Λ̄ itself."""

    def __init__(self, eigen: Eigen):
        self.eigen = eigen

    def mv(self, x: Vector) -> Vector:
        return self.eigen.mv(x)

    def diagonal(self) -> Vector:
        if isinstance(self.eigen, StartedBlocks):
            return self.dense().diagonal(dim1=-2, dim2=-1)
        return self.eigen.real

    def blocks(self) -> BlockDiagonal:
        if isinstance(self.eigen, StartedBlocks):
            return nearest_blocks(self.dense(), self.eigen.imag is not None)
        return self.eigen

    def dense(self) -> Matrix:
        return self.eigen.dense()


class HeadedConjugate(Conjugate):
    """A conjugate for each head, on its own part of the state."""

    def __init__(self, each: Conjugate, heads: int):
        self.each = each
        self.heads = heads

    def mv(self, x: Vector) -> Vector:
        return self.each.mv(x.unflatten(-1, (self.heads, -1))).flatten(-2)

    def turn(self, x: Vector) -> Vector:
        return self.each.turn(x.unflatten(-1, (self.heads, -1))).flatten(-2)

    def diagonal(self) -> Vector:
        return self.each.diagonal().flatten(-2)

    def blocks(self) -> BlockDiagonal:
        return self.each.blocks().mapped(lambda part: part.flatten(-2))

    def dense(self) -> Matrix:
        return block_diagonal(self.each.dense())


def block_diagonal(blocks: Tensor) -> Tensor:
    """(*b, heads, m, m) to (*b, heads·m, heads·m)."""
    heads, size = blocks.shape[-3], blocks.shape[-1]
    eye = torch.eye(heads, dtype=blocks.dtype, device=blocks.device)
    spread = blocks.unsqueeze(-2) * eye[:, None, :, None]  # (*b, heads, m, heads, m)
    return spread.flatten(-2).flatten(-3, -2).reshape(*blocks.shape[:-3], heads * size, heads * size)
