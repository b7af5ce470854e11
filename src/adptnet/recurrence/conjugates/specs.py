"""Specs of the conjugates: which approximation or variant of M = Q Λ̄ Q' a cell applies."""

import abc
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ...errors import IncompatibleError, SpecError
from ...spec import Spec, check_size, spec
from ..directions import KeyValue
from ..retractions import Retraction
from .blocks import Eigen
from .operators import Conjugate, RotatedConjugate, StaticConjugate, TaylorConjugate

__all__ = ["ConjugateSpec", "Diagonal", "Exact", "Product", "Stateful", "Taylor"]


class ConjugateSpec(Spec, abc.ABC):
    """Base class of the specs of a conjugate."""

    has_directions: ClassVar[bool] = True  # whether M depends on key and value
    has_rotation: ClassVar[bool] = True  # whether M is given by an orthogonal Q

    @property
    def planes(self) -> int:
        """The number of key-value pairs, each with its own K and V."""
        return 1

    @abc.abstractmethod
    def operator(
        self, eigen: Eigen, planes: Sequence[KeyValue], beta: float | Tensor, retraction: Retraction
    ) -> Conjugate:
        """Return the operator M.

        Args:
            eigen: Λ̄, or Q₀ Λ̄ Q₀'.
            planes: A key-value pair for each plane.
            beta: β; a tensor is (*b, 1).
            retraction: The map from key and value to a rotation.
        """


@spec
class Exact(ConjugateSpec):
    """M = Q Λ̄ Q' (eq:state_dependent_similarity)."""

    def operator(
        self, eigen: Eigen, planes: Sequence[KeyValue], beta: float | Tensor, retraction: Retraction
    ) -> Conjugate:
        return RotatedConjugate([retraction(*planes[0], beta)], eigen)


@spec
class Product(ConjugateSpec):
    """M = Q Λ̄ Q' with Q the product of `steps` plane rotations, the first one innermost: Q = Q_m … Q_2 Q_1.

    Each rotation has its own K and V, applied to the same state. `Product(1)` equals `Exact`. More rotations reach
    further from the identity, as DeltaProduct does for linear recurrences.

    Attributes:
        steps: The number of plane rotations.
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


@spec
class Taylor(ConjugateSpec):
    """The exact conjugate expanded to first or second order in β, without a rotation: for small β only.

    Λ̄ + β[S, Λ̄] + ½β²[S, [S, Λ̄]] with S = k v' - v k' and [A, B] = AB - BA (eq:taylor_ADPTNet has the opposite sign,
    which belongs to Q'Λ̄Q). The error is O(β²) at order one and O(β³) at order two. The singular values of M are no
    longer the moduli |λ̄|, so for large β the state may grow.

    Attributes:
        order: 1 or 2.
    """

    has_rotation: ClassVar[bool] = False
    order: int = 1

    def __post_init__(self) -> None:
        if self.order not in (1, 2):
            raise SpecError(f"Taylor(order={self.order!r}): must be 1 or 2. For all orders use conjugates.Exact().")

    def operator(
        self, eigen: Eigen, planes: Sequence[KeyValue], beta: float | Tensor, retraction: Retraction
    ) -> Conjugate:
        return TaylorConjugate(planes[0], eigen, beta, self.order)


@spec
class Diagonal(ConjugateSpec):
    """M = Λ̄: β = 0, a diagonal state-space model. There are no K and V."""

    has_directions: ClassVar[bool] = False
    has_rotation: ClassVar[bool] = False

    @property
    def planes(self) -> int:
        return 0

    def operator(
        self, eigen: Eigen, planes: Sequence[KeyValue], beta: float | Tensor, retraction: Retraction
    ) -> Conjugate:
        return StaticConjugate(eigen)


@spec
class Stateful(ConjugateSpec):
    """M = Q_t Λ̄ Q_t' with Q_t part of the state: Q_t = Q_{t-1} exp(β S), S = k (Q_{t-1}v)' - (Q_{t-1}v) k'.

    The paper's first formulation (eq:naive_ortho_update), for comparison. The state holds the n² entries of Q beside x,
    so n must be small. `cells.StatefulCell` runs it.
    """

    def operator(
        self, eigen: Eigen, planes: Sequence[KeyValue], beta: float | Tensor, retraction: Retraction
    ) -> Conjugate:
        raise IncompatibleError(
            "Stateful needs Q from the state of a cell. Build it with cells.ADPTSpec(conjugate=Stateful()).build()."
        )
