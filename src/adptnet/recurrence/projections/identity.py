"""The identity, for inputs that already have the size of the state."""

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
    """The identity map, without parameters: for models that project the input before the recurrence.

    Attributes:
        bias: Must be False.
    """

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
    """The identity map."""

    def dense(self) -> Tensor:
        return torch.eye(self.out_features)

    def bind(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        return lambda x: x

    @property
    def macs(self) -> int:
        return 0
