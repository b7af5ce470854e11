"""Retractions: from a key-value pair to a rotation of the state.

Each one steps from the identity along `key value' - value key'` and comes back to the orthogonal matrices. They
turn the same plane and differ in how far: by the angle itself, or by twice the arc tangent of its half.
"""

import abc

import torch
from torch import Tensor

from .._typing import Column, Matrix, Vector
from ..ops._linalg import solve
from ..ops.plane_rotation import PlaneRotation, cayley, exponential, plane_rotation
from ..spec import Spec, spec

__all__ = ["Cayley", "Exponential", "Retraction"]


class Retraction(Spec, abc.ABC):
    """Two coefficients (fast) and a definition (slow, what the fast one is compared with)."""

    @abc.abstractmethod
    def coefficients(self, angle_squared: Column) -> tuple[Column, Column]:
        """Coefficients of S and S² for a step of squared length `angle_squared`."""

    @abc.abstractmethod
    def define(self, step: Matrix) -> Matrix:
        """The rotation by its definition, from the dense step beta (key value' - value key')."""

    def __call__(self, key: Vector, value: Vector, beta: float | Tensor) -> PlaneRotation:
        """Step from the identity along `key value' - value key'`.

        Paper: eq:Q_func, eq:details_skew_kv. Closed form, O(n) per rotation, no inverse.

        Args:
            key: Usually of unit length; any length is exact.
            value: Likewise.
            beta: Step size on the orthogonal manifold; 0 gives the identity.

        Returns:
            The rotation; the identity where `key` and `value` are parallel, with the right derivative there.
        """
        return plane_rotation(key, value, beta, self.coefficients)


@spec
class Exponential(Retraction):
    """The matrix exponential (eq:Q_func). The angle is beta times the sine between key and value."""

    def coefficients(self, angle_squared: Column) -> tuple[Column, Column]:
        return exponential(angle_squared)

    def define(self, step: Matrix) -> Matrix:
        rotation: Tensor = torch.linalg.matrix_exp(step)
        return rotation


@spec
class Cayley(Retraction):
    """The Cayley map (eq:cayley_map_rec). Agrees with `Exponential` to second order; its angle stops at pi."""

    def coefficients(self, angle_squared: Column) -> tuple[Column, Column]:
        return cayley(angle_squared)

    def define(self, step: Matrix) -> Matrix:
        eye = torch.eye(step.shape[-1], dtype=step.dtype, device=step.device)
        rotation: Tensor = solve(eye - step / 2, eye + step / 2)
        return rotation
