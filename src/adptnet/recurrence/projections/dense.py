"""Projections with a full matrix: free, or kept orthogonal."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from ..._typing import Device, DType
from ...errors import IncompatibleError
from ...spec import spec
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
        if weight.is_meta:  # nothing to factorise: only names and sizes are needed
            layout = DenseProjection(nn.Parameter(weight))
            parametrize.register_parametrization(layout, "weight", _OrthogonalLayout(weight), unsafe=True)
            return with_bias(layout, self.bias)
        projection = DenseProjection(nn.Parameter(nn.init.orthogonal_(weight)))
        parametrizations.orthogonal(projection, "weight")
        return with_bias(projection, self.bias)


class _OrthogonalLayout(nn.Module):
    """The tensors of torch's orthogonal parametrisation on the meta device, where it cannot be made."""

    base: Tensor

    def __init__(self, weight: Tensor):
        super().__init__()
        self.register_buffer("base", weight.new_empty(max(weight.shape), max(weight.shape)))

    def forward(self, original: Tensor) -> Tensor:
        if not original.is_meta:
            raise IncompatibleError(
                "Orthogonal() was built on the meta device, which gives its sizes only. Build it on a device with "
                "memory: spec.build(device='cpu')."
            )
        return original


class DenseProjection(Projection):
    weight: Tensor

    def __init__(self, weight: nn.Parameter):
        super().__init__(weight.shape[1], weight.shape[0])
        self.weight = weight

    def dense(self) -> Tensor:
        return self.weight
