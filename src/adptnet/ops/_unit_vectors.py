"""From a projection to a direction: unit vectors, a fixed angle between two of them, spikes."""

import math

import torch
from torch import Tensor

from .._typing import Vector

__all__ = ["mixed", "spike", "unit"]


def mixed(key: Tensor, value: Tensor, dot: float) -> Tensor:
    """A unit key in the plane of both, with key·value = `dot` (eq:parametric_kv_dot)."""
    across = key
    for _ in range(2):  # what is left of a key that is almost the value is mostly rounding: take its part again
        across = unit(across - (across * value).sum(-1, keepdim=True) * value)
    return math.sqrt(1 - dot**2) * across + dot * value


def unit(x: Vector) -> Vector:
    """`x` at length one, for any length that floating point can invert; zero stays zero, with zero derivative.

    The largest entry is divided out first, as a constant: the direction does not depend on it, so neither value nor
    derivative change, and squares neither overflow nor vanish.
    """
    if x.shape[-1] == 0:
        return x
    scale = x.detach().abs().amax(-1, keepdim=True)
    zero = scale < 2**10 * torch.finfo(x.dtype).tiny  # below 1e-35 in float32, where 1/scale would overflow
    scaled = x / torch.where(zero, 1.0, scale)
    return scaled * torch.where(zero, 1.0, scaled.square().sum(-1, keepdim=True)).rsqrt().masked_fill(zero, 0.0)


def spike(x: Tensor) -> Tensor:
    """1 where x >= 0, else 0; the derivative is 1 for |x| < 1/2, else 0 (the boxcar surrogate)."""
    slope = x.clamp(-0.5, 0.5)
    return (x >= 0).to(x.dtype) + (slope - slope.detach())
