"""Projections with a full matrix: free, or kept orthogonal."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from ..spec import spec
from ..typing import Device, DType
from .base import Projection, ProjectionSpec, with_bias

__all__ = ["Dense", "Orthogonal"]


@spec
class Dense(ProjectionSpec):
    """Every weight free; starts as `nn.Linear` does, uniform in ±1/√in_features."""

    bias: bool = False

    def build(self, in_features: int, out_features: int, *, device: Device = None, dtype: DType = None) -> Projection:
        weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
        reach = in_features**-0.5
        return with_bias(DenseProjection(nn.Parameter(weight.uniform_(-reach, reach))), self.bias)


@spec
class Orthogonal(ProjectionSpec):
    """A matrix with orthonormal rows or columns, whichever are fewer, that stays so while it learns.

    With orthogonal K and V and directions from the state itself, lemma:J_singular_vals holds for every input.
    """

    bias: bool = False

    def build(self, in_features: int, out_features: int, *, device: Device = None, dtype: DType = None) -> Projection:
        dtype = torch.promote_types(
            dtype or torch.get_default_dtype(), torch.float32
        )  # no factorisation in half precision
        weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
        if weight.is_meta:  # nothing to factorise: only the size is asked for
            return with_bias(DenseProjection(nn.Parameter(weight)), self.bias)
        projection = DenseProjection(nn.Parameter(nn.init.orthogonal_(weight)))
        parametrizations.orthogonal(projection, "weight")
        return with_bias(projection, self.bias)


class DenseProjection(Projection):
    weight: Tensor

    def __init__(self, weight: nn.Parameter):
        super().__init__(weight.shape[1], weight.shape[0])
        self.weight = weight

    def dense(self) -> Tensor:
        return self.weight
