"""The rotation of a plane: Q = I + linear S + quadratic S², S = beta (key value' - value key').

Both retractions of the paper have this form and differ only in the two coefficients, which are smooth functions
of the squared angle. Nothing is divided by an angle, and no n-by-n matrix is formed.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..._typing import Column, Matrix, Vector
from .._torch_state import plain
from .reference import weights
from .turn import turned

__all__ = ["PlaneRotation", "cayley", "exponential", "plane_rotation", "skew"]


class PlaneRotation(NamedTuple):
    """Turns the plane of `key` and `offset`, which are orthogonal, and leaves the rest of the space alone."""

    key: Vector
    offset: Vector  # beta times the part of `value` orthogonal to `key`
    turn: Column  # weight of key offset' - offset key'
    shrink_key: Column  # weight of key key'
    shrink_offset: Column  # weight of offset offset'

    def apply(self, x: Vector) -> Vector:
        """Q x."""
        return turned(x, *self)

    def apply_transposed(self, x: Vector) -> Vector:
        """Q' x, which is also the inverse."""
        return turned(x, *self._replace(turn=-self.turn))

    def dense(self) -> Matrix:
        """Q as a matrix, for figures and small checks."""
        size = self.key.shape[-1]
        eye = torch.eye(size, dtype=self.key.dtype, device=self.key.device).expand(*self.key.shape, size)
        return PlaneRotation(*(part.unsqueeze(-2) for part in self)).apply(eye).mT

    def weights(self, x: Vector) -> tuple[Column, Column]:
        """What Q x adds to x: weights of `key` and of `offset`."""
        return weights(x, *self)

    def weights_transposed(self, x: Vector) -> tuple[Column, Column]:
        """What Q' x adds to x."""
        return weights(x, *self._replace(turn=-self.turn))


def plane_rotation(
    key: Vector, value: Vector, beta: float | Tensor, coefficients: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> PlaneRotation:
    """The rotation I + linear S + quadratic S² with `linear, quadratic = coefficients(squared angle)`.

    Equal to its dense definition, value and derivative, for any `key` and `value`: of unit length or not, parallel
    (the identity, with the right derivative), or zero.
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
    """key value' - value key' (eq:details_skew_kv), dense: what every rotation here is defined by."""
    outer = key.unsqueeze(-1) * value.unsqueeze(-2)
    return outer - outer.mT


# Coefficients of the series of sin(a)/a and (1 - cos(a))/a² in a². On a² <= 1, ten terms leave less than 1e-19.
_SERIES = [((-1) ** k / math.factorial(2 * k + 1), (-1) ** k / math.factorial(2 * k + 2)) for k in range(10)]


def _terms(like: Tensor) -> Tensor:
    """_SERIES as a tensor. Away from the CPU it is kept: a copy to a GPU waits until all before it has run."""
    if like.device.type == "cpu" or not plain(like):  # a tensor made inside a transform or a mode is none outside
        return torch.tensor(_SERIES, dtype=like.dtype, device=like.device)
    return _kept_terms(like.dtype, like.device)


@functools.cache
def _kept_terms(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):  # a tensor made in inference mode could not be used for derivatives
        return torch.tensor(_SERIES, dtype=dtype, device=device)


def exponential(angle_squared: Column) -> tuple[Column, Column]:
    """Coefficients of S and S² of the matrix exponential."""
    small = angle_squared.clamp(max=1.0)
    terms = _terms(small)
    series = terms[-1]
    for term in terms[:-1].flip(0):
        series = torch.addcmul(term, series, small)
    angle = angle_squared.clamp(min=1.0).sqrt()
    near = angle_squared < 1
    linear = torch.where(near, series[..., :1], angle.sin() / angle)
    quadratic = torch.where(near, series[..., 1:], 2 * ((angle / 2).sin() / angle).square())
    return linear, quadratic


def cayley(angle_squared: Column) -> tuple[Column, Column]:
    """Coefficients of S and S² of the Cayley map."""
    linear = 1 / (1 + angle_squared / 4)
    return linear, linear / 2
