"""From projections to directions: unit vectors, a fixed dot product of two of them, and spikes."""

import math

import torch
from torch import Tensor

from .._typing import Vector

__all__ = ["fix_dot_product", "spike", "unit"]


def fix_dot_product(key: Tensor, value: Tensor, dot: float) -> Tensor:
    """Return the unit key in the plane of `key` and `value` whose dot product with `value` is `dot`.

    Implements eq:parametric_kv_dot.

    Args:
        key, value: (..., n), of length one.
        dot: Between -1 and 1.
    """
    orthogonal = key
    for _ in range(2):  # if the two are nearly parallel, the remainder is mostly rounding error: orthogonalise twice
        orthogonal = unit(orthogonal - (orthogonal * value).sum(-1, keepdim=True) * value)
    return math.sqrt(1 - dot**2) * orthogonal + dot * value


def unit(x: Vector) -> Vector:
    """Return `x` scaled to length one; zero stays zero, with zero gradient.

    It works for any length that floating point can invert: `x` is first divided by its largest entry, as a constant.
    The direction does not depend on it, so neither value nor gradient change, and squares neither overflow nor
    underflow.

    Args:
        x: (..., n).
    """
    if x.shape[-1] == 0:
        return x
    scale = x.detach().abs().amax(-1, keepdim=True)
    zero = scale < 2**10 * torch.finfo(x.dtype).tiny  # below 1e-35 in float32, where 1/scale would overflow
    scaled = x / torch.where(zero, 1.0, scale)
    return scaled * torch.where(zero, 1.0, scaled.square().sum(-1, keepdim=True)).rsqrt().masked_fill(zero, 0.0)


def spike(x: Tensor) -> Tensor:
    """Return 1 where x >= 0, else 0; the derivative is 1 for |x| < 1/2, else 0 (the boxcar surrogate).

    Args:
        x: Any shape.
    """
    slope = x.clamp(-0.5, 0.5)
    return (x >= 0).to(x.dtype) + (slope - slope.detach())
