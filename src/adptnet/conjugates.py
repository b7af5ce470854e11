"""Conjugates: how M = Q Λ̄ Q' acts on the state, as an operator that is never formed."""

import abc
from typing import ClassVar

from torch import Tensor

from .directions import KeyValue
from .ops.plane_rotation import PlaneRotation, skew
from .retractions import Retraction
from .spec import Spec, spec
from .spectra import BlockDiagonal
from .typing import Matrix, Vector

__all__ = ["Conjugate", "ConjugateSpec", "Diagonal", "Exact", "RotatedConjugate", "StaticConjugate"]


class Conjugate(abc.ABC):
    """M, as what solvers and figures ask of it.

    Where M does not depend on the state, `diagonal` and `dense` have no batch dimensions.
    """

    @abc.abstractmethod
    def mv(self, x: Vector) -> Vector:
        """M x."""

    @abc.abstractmethod
    def diagonal(self) -> Vector:
        """The diagonal of M, in O(n)."""

    @abc.abstractmethod
    def dense(self) -> Matrix:
        """M as a matrix."""


class ConjugateSpec(Spec, abc.ABC):
    """The description of a conjugate."""

    turns: ClassVar[bool]  # whether it uses key and value

    @abc.abstractmethod
    def operator(
        self, lambda_bar: BlockDiagonal, planes: KeyValue | None, beta: float | Tensor, retraction: Retraction
    ) -> Conjugate:
        """M for these eigenvalues and directions."""

    @abc.abstractmethod
    def define(
        self, lambda_bar: BlockDiagonal, planes: KeyValue | None, beta: float | Tensor, retraction: Retraction
    ) -> Matrix:
        """The same by its definition, with dense matrices: slow, and what `operator` is compared with."""


@spec
class Exact(ConjugateSpec):
    """M = Q Λ̄ Q' (eq:state_dependent_similarity)."""

    turns: ClassVar[bool] = True

    def operator(
        self, lambda_bar: BlockDiagonal, planes: KeyValue | None, beta: float | Tensor, retraction: Retraction
    ) -> Conjugate:
        assert planes is not None
        return RotatedConjugate(retraction(planes.key, planes.value, beta), lambda_bar)

    def define(
        self, lambda_bar: BlockDiagonal, planes: KeyValue | None, beta: float | Tensor, retraction: Retraction
    ) -> Matrix:
        assert planes is not None
        rotation = retraction.define(beta * skew(planes.key, planes.value))
        return rotation @ lambda_bar.dense() @ rotation.mT


@spec
class Diagonal(ConjugateSpec):
    """M = Λ̄: β = 0, a diagonal state-space model. There are no K and V."""

    turns: ClassVar[bool] = False

    def operator(
        self, lambda_bar: BlockDiagonal, planes: KeyValue | None, beta: float | Tensor, retraction: Retraction
    ) -> Conjugate:
        return StaticConjugate(lambda_bar)

    def define(
        self, lambda_bar: BlockDiagonal, planes: KeyValue | None, beta: float | Tensor, retraction: Retraction
    ) -> Matrix:
        return lambda_bar.dense()


class RotatedConjugate(Conjugate):
    """Q Λ̄ Q' for a plane rotation Q."""

    def __init__(self, rotation: PlaneRotation, lambda_bar: BlockDiagonal):
        self.rotation = rotation
        self.lambda_bar = lambda_bar

    def mv(self, x: Vector) -> Vector:
        return self.rotation.apply(self.lambda_bar.mv(self.rotation.apply_transposed(x)))

    def diagonal(self) -> Vector:
        # Q = I + F G F' with F = [key offset], so diag M = diag(Λ + F G F'Λ + ΛF (F G)' + F G (F'ΛF) (F G)'). The skew
        # part of Λ (complex pairs) cancels in every term.
        key, offset, turn, shrink_key, shrink_offset = self.rotation
        real = self.lambda_bar.real
        turned_key = shrink_key * key - turn * offset  # the columns of F G
        turned_offset = turn * key + shrink_offset * offset
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

    def dense(self) -> Matrix:
        rotation = self.rotation.dense()
        return rotation @ self.lambda_bar.dense() @ rotation.mT


class StaticConjugate(Conjugate):
    """Λ̄ itself."""

    def __init__(self, lambda_bar: BlockDiagonal):
        self.lambda_bar = lambda_bar

    def mv(self, x: Vector) -> Vector:
        return self.lambda_bar.mv(x)

    def diagonal(self) -> Vector:
        return self.lambda_bar.real

    def dense(self) -> Matrix:
        return self.lambda_bar.dense()
