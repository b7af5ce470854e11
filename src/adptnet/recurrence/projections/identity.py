"""No map at all, for inputs that are already what the state takes."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..._typing import Device, DType
from ...errors import SpecError
from ...spec import spec
from .base import Projection, ProjectionSpec

__all__ = ["Identity"]


@spec
class Identity(ProjectionSpec):
    """x itself: where a layer of its own, with its norm, stands before the recurrence. No parameters."""

    bias: bool = False

    def __post_init__(self) -> None:
        if self.bias:
            raise SpecError("Identity(bias=True): it has no parameters. Pass projections.Dense(bias=True).")

    def build(self, in_features: int, out_features: int, *, device: Device = None, dtype: DType = None) -> Projection:
        if in_features != out_features:
            raise SpecError(
                f"Identity() from {in_features} to {out_features} features: the two must be equal. "
                f"Pass state_size={in_features}, or projections.Dense()."
            )
        return IdentityProjection(in_features, out_features)


class IdentityProjection(Projection):
    def dense(self) -> Tensor:
        return torch.eye(self.out_features)

    def bound(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        return lambda x: x

    @property
    def macs(self) -> int:
        return 0
