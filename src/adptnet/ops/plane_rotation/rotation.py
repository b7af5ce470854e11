"""Rotations in a plane: Q = I + linear S + quadratic S², S = beta (key value' - value key').

Both retractions of the paper have this form and differ only in the two coefficients, which are smooth functions of the
squared angle. Nothing is divided by an angle, and no n-by-n matrix is formed.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..._typing import Column, Matrix, Vector
from .. import _gpu
from .._torch_state import can_bypass_dispatcher
from .apply import rotate
from .reference import weights

__all__ = ["PlaneRotation", "cayley", "exponential", "plane_rotation", "skew"]


class PlaneRotation(NamedTuple):
    """A rotation in the plane of `key` and `offset`, which are orthogonal. Vectors orthogonal to both are unchanged."""

    key: Vector
    offset: Vector  # beta times the part of `value` orthogonal to `key`
    skew_coefficient: Column  # of key offset' - offset key'
    key_coefficient: Column  # of key key'
    offset_coefficient: Column  # of offset offset'

    def apply(self, x: Vector) -> Vector:
        """Return Q x.

        Args:
            x: (..., n).
        """
        return rotate(x, *self)

    def apply_transposed(self, x: Vector) -> Vector:
        """Return Q' x, which is also the inverse.

        Args:
            x: (..., n).
        """
        return rotate(x, *self._replace(skew_coefficient=-self.skew_coefficient))

    def dense(self) -> Matrix:
        """Return Q as a matrix, for figures and small checks."""
        size = self.key.shape[-1]
        eye = torch.eye(size, dtype=self.key.dtype, device=self.key.device).expand(*self.key.shape, size)
        return PlaneRotation(*(part.unsqueeze(-2) for part in self)).apply(eye).mT

    def weights(self, x: Vector) -> tuple[Column, Column]:
        """Return the coefficients of `key` and of `offset` in Q x - x.

        Args:
            x: (..., n).
        """
        return weights(x, *self)

    def weights_transposed(self, x: Vector) -> tuple[Column, Column]:
        """Return the coefficients of `key` and of `offset` in Q' x - x.

        Args:
            x: (..., n).
        """
        return weights(x, *self._replace(skew_coefficient=-self.skew_coefficient))


def plane_rotation(
    key: Vector, value: Vector, beta: float | Tensor, coefficients: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> PlaneRotation:
    """Return the rotation I + linear S + quadratic S² with `linear, quadratic = coefficients(squared angle)`.

    It equals its dense definition, in value and gradient, for any `key` and `value`: of unit length or not, parallel
    (the identity, with the correct gradient), or zero.

    Args:
        key, value: (..., n).
        beta: A number, or (..., 1).
        coefficients: `exponential` or `cayley`.
    """
    key_squared = key.square().sum(-1, keepdim=True)
    shared = (key * value).sum(-1, keepdim=True)
    nonzero = key_squared > 0
    overlap = torch.where(nonzero, shared / torch.where(nonzero, key_squared, 1.0), 0.0)
    offset = beta * (value - overlap * key)
    offset_squared = offset.square().sum(-1, keepdim=True)
    linear, quadratic = coefficients(key_squared * offset_squared)
    return PlaneRotation(key, offset, linear, -quadratic * offset_squared, -quadratic * key_squared)


def skew(key: Vector, value: Vector) -> Matrix:
    """Return the dense matrix key value' - value key' (eq:details_skew_kv), which defines every rotation here.

    Args:
        key, value: (..., n).
    """
    outer = key.unsqueeze(-1) * value.unsqueeze(-2)
    return outer - outer.mT


# Coefficients of the series of sin(a)/a and (1 - cos(a))/a² in a². On a² <= 1, ten terms leave less than 1e-19.
_SERIES = [((-1) ** k / math.factorial(2 * k + 1), (-1) ** k / math.factorial(2 * k + 2)) for k in range(10)]


def _series_tensor(like: Tensor) -> Tensor:
    """Return _SERIES as a tensor. It is cached except on the CPU, because a copy to a GPU synchronises."""
    # A tensor created inside a transform or a mode must not be used outside it.
    if _gpu.is_cpu(like.device) or not can_bypass_dispatcher(like):
        return torch.tensor(_SERIES, dtype=like.dtype, device=like.device)
    return _cached_series(like.dtype, like.device)


@functools.cache
def _cached_series(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):  # autograd cannot use a tensor created in inference mode
        return torch.tensor(_SERIES, dtype=dtype, device=device)


def exponential(angle_squared: Column) -> tuple[Column, Column]:
    """Return the coefficients of S and S² of the matrix exponential.

    Args:
        angle_squared: (..., 1).
    """
    small = angle_squared.clamp(max=1.0)
    terms = _series_tensor(small)
    series = terms[-1]
    for term in terms[:-1].flip(0):
        series = torch.addcmul(term, series, small)
    angle = angle_squared.clamp(min=1.0).sqrt()
    near = angle_squared < 1
    linear = torch.where(near, series[..., :1], angle.sin() / angle)
    quadratic = torch.where(near, series[..., 1:], 2 * ((angle / 2).sin() / angle).square())
    return linear, quadratic


def cayley(angle_squared: Column) -> tuple[Column, Column]:
    """Return the coefficients of S and S² of the Cayley map.

    Args:
        angle_squared: (..., 1).
    """
    linear = 1 / (1 + angle_squared / 4)
    return linear, linear / 2
