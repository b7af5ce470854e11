"""Retractions: from a key-value pair to a rotation of the state.

Each retraction maps the skew-symmetric step `beta (key value' - value key')` at the identity to an orthogonal matrix.
All rotate the same plane. They differ in the angle: the step length θ itself, or 2 arctan(θ / 2).
"""

import abc

import torch
from torch import Tensor

from .._typing import Column, Matrix, Vector
from ..ops._linalg import solve_linear
from ..ops.plane_rotation import PlaneRotation, cayley, exponential, plane_rotation
from ..spec import Spec, spec

__all__ = ["Cayley", "Exponential", "Retraction"]


class Retraction(Spec, abc.ABC):
    """Base class of the retractions: two coefficients for the fast form, and a dense reference to compare it with."""

    @abc.abstractmethod
    def coefficients(self, angle_squared: Column) -> tuple[Column, Column]:
        """Return the coefficients of S and S², S = beta (key value' - value key').

        Args:
            angle_squared: The squared length of the step, (*b, 1).
        """

    @abc.abstractmethod
    def reference_matrix(self, step: Matrix) -> Matrix:
        """Return the rotation computed from its definition with dense matrices.

        Args:
            step: beta (key value' - value key'), (*b, n, n).
        """

    def __call__(self, key: Vector, value: Vector, beta: float | Tensor) -> PlaneRotation:
        """Return the rotation reached from the identity along `key value' - value key'`.

        Paper: eq:Q_func, eq:details_skew_kv. Closed form, O(n) per rotation, no inverse.

        Args:
            key: (*b, n), usually of unit length; the result is exact for any length.
            value: Likewise.
            beta: Step size on the orthogonal manifold; 0 gives the identity. A tensor is (*b, 1).

        Returns:
            The rotation. Where `key` and `value` are parallel it is the identity, with the correct derivative.
        """
        return plane_rotation(key, value, beta, self.coefficients)


@spec
class Exponential(Retraction):
    """The matrix exponential (eq:Q_func). The angle is beta times the sine of the angle between key and value."""

    def coefficients(self, angle_squared: Column) -> tuple[Column, Column]:
        return exponential(angle_squared)

    def reference_matrix(self, step: Matrix) -> Matrix:
        rotation: Tensor = torch.linalg.matrix_exp(step)
        return rotation


@spec
class Cayley(Retraction):
    """The Cayley map (eq:cayley_map_rec). It agrees with `Exponential` to second order; its angle stays below pi."""

    def coefficients(self, angle_squared: Column) -> tuple[Column, Column]:
        return cayley(angle_squared)

    def reference_matrix(self, step: Matrix) -> Matrix:
        eye = torch.eye(step.shape[-1], dtype=step.dtype, device=step.device)
        rotation: Tensor = solve_linear(eye - step / 2, eye + step / 2)
        return rotation
