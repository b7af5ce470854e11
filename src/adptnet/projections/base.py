"""What a projection is: a linear map with a matrix, and a way to apply it many times."""

import abc
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..spec import Spec
from ..typing import Device, DType

__all__ = ["Biased", "Projection", "ProjectionSpec", "with_bias"]


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

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one application."""
        return self.in_features * self.out_features

    @property
    def parameter_count(self) -> int:
        """Numbers that are stored and learn."""
        return sum(parameter.numel() for parameter in self.parameters())

    def condition_number(self) -> Tensor:
        """Largest over smallest singular value of the matrix; infinite if it is singular."""
        dense = self.dense().detach()
        singular = torch.linalg.svdvals(dense.double())
        tiny = singular[0] * max(self.in_features, self.out_features) * torch.finfo(dense.dtype).eps
        return torch.where(singular[-1] > tiny, singular[0] / singular[-1].clamp(min=tiny), torch.inf)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Biased(Projection):
    """A projection and a bias, which starts at zero."""

    def __init__(self, projection: Projection):
        super().__init__(projection.in_features, projection.out_features)
        self.projection = projection
        like = next(projection.parameters())
        self.bias = nn.Parameter(torch.zeros(projection.out_features, device=like.device, dtype=like.dtype))

    def dense(self) -> Tensor:
        return self.projection.dense()

    def bound(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        project, bias = self.projection.bound(dtype), self.bias.to(dtype)
        return lambda x: project(x) + bias

    @property
    def macs(self) -> int:
        return self.projection.macs


def with_bias(projection: Projection, bias: bool) -> Projection:
    """`projection`, with a bias if asked for."""
    return Biased(projection) if bias else projection


class ProjectionSpec(Spec, abc.ABC):
    """The description of a projection.

    Attributes:
        bias: Whether a bias is added. On K or V it takes the layer outside the lemmas (docs/deviations.md, point 13).
    """

    bias: bool

    @abc.abstractmethod
    def build(self, in_features: int, out_features: int, *, device: Device = None, dtype: DType = None) -> Projection:
        """Makes the map from `in_features` to `out_features`, with fresh weights."""
