"""Directions: where the key and the value come from."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .projections import ProjectionSpec
from .spec import Spec, spec
from .typing import Vector

__all__ = ["Directions", "FromState", "KeyValue", "unit"]


class KeyValue(NamedTuple):
    """The pair that spans the plane of a rotation."""

    key: Vector
    value: Vector


@spec
class FromState(Spec):
    """Key and value are unit vectors along K x and V x (eq:details_skew_kv).

    Attributes:
        relu: Take K and V of ReLU(x). Stronger on state tracking; the step is then only positively homogeneous,
            the certificates do not hold (the paper says otherwise, see docs/deviations.md), and a state with no
            positive entry takes the identity, where the step is discontinuous.
    """

    relu: bool = False

    def build(
        self,
        state_size: int,
        projection: ProjectionSpec,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> "Directions":
        """Makes K and V, both described by `projection`."""
        return Directions(self, state_size, projection, device, dtype)


class Directions(nn.Module):
    """K and V, and what happens around them."""

    def __init__(
        self,
        spec: FromState,
        state_size: int,
        projection: ProjectionSpec,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ):
        super().__init__()
        self.spec = spec
        self.key_projection = projection.build(state_size, state_size, device=device, dtype=dtype)
        self.value_projection = projection.build(state_size, state_size, device=device, dtype=dtype)

    def bound(self, dtype: torch.dtype) -> Callable[[Tensor], KeyValue]:
        """The directions of a state, with the projections evaluated once."""
        key_of, value_of = self.key_projection.bound(dtype), self.value_projection.bound(dtype)
        relu = self.spec.relu

        def directions(state: Tensor) -> KeyValue:
            source = state.relu() if relu else state
            return KeyValue(unit(key_of(source)), unit(value_of(source)))

        return directions

    def forward(self, state: Vector) -> KeyValue:
        return self.bound(state.dtype)(state)


def unit(x: Vector) -> Vector:
    """`x` at length one, for any finite length; zero stays zero, with zero derivative.

    The largest entry is divided out first, as a constant: the direction does not depend on it, so neither value nor
    derivative change, and squares neither overflow nor vanish.
    """
    if x.shape[-1] == 0:
        return x
    scale = x.detach().abs().amax(-1, keepdim=True)
    zero = scale == 0
    scaled = x / torch.where(zero, 1.0, scale)
    return scaled * torch.where(zero, 1.0, scaled.square().sum(-1, keepdim=True)).rsqrt().masked_fill(zero, 0.0)
