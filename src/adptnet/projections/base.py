"""What a projection is: a linear map with a matrix, and a way to apply it many times."""

import abc
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..spec import Spec

__all__ = ["Projection", "ProjectionSpec"]


class Projection(nn.Module, abc.ABC):
    """A linear map on the last dimension."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features

    @abc.abstractmethod
    def dense(self) -> Tensor:
        """The matrix, (out_features, in_features)."""

    def bound(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """The map in `dtype`, with all that does not depend on its argument evaluated once."""
        transposed = self.dense().to(dtype).mT
        return lambda x: x @ transposed

    def forward(self, x: Tensor) -> Tensor:
        return self.bound(x.dtype)(x)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class ProjectionSpec(Spec, abc.ABC):
    """The description of a projection."""

    @abc.abstractmethod
    def build(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Projection:
        """Makes the map from `in_features` to `out_features`, with fresh weights."""
