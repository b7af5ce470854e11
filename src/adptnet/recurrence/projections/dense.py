"""Projections with a full matrix: unconstrained, or orthogonal."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from ..._dtype import compute_dtype
from ..._typing import Device, DType
from ...errors import IncompatibleError
from ...spec import spec
from .base import Projection, ProjectionSpec, with_bias

__all__ = ["Dense", "Orthogonal"]


@spec
class Dense(ProjectionSpec):
    """An unconstrained matrix, initialised as `nn.Linear`: uniform in ±1/√in_features.

    Attributes:
        bias: Whether a bias is added.
    """

    bias: bool = False

    def build(self, in_features: int, out_features: int, *, device: Device = None, dtype: DType = None) -> Projection:
        weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
        reach = in_features**-0.5
        return with_bias(DenseProjection(nn.Parameter(weight.uniform_(-reach, reach))), self.bias)


@spec
class Orthogonal(ProjectionSpec):
    """A matrix with orthonormal rows or columns, whichever are fewer. It stays so during training.

    With orthogonal K and V, applied to the state itself, lemma:J_singular_vals holds for every input.

    Attributes:
        bias: Whether a bias is added.
    """

    bias: bool = False

    def build(self, in_features: int, out_features: int, *, device: Device = None, dtype: DType = None) -> Projection:
        dtype = compute_dtype(dtype or torch.get_default_dtype())  # no factorisation in half precision
        weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
        if weight.is_meta:  # there is nothing to factorise; only names and sizes are needed
            layout = DenseProjection(nn.Parameter(weight))
            parametrize.register_parametrization(layout, "weight", _OrthogonalLayout(weight), unsafe=True)
            return with_bias(layout, self.bias)
        projection = DenseProjection(nn.Parameter(nn.init.orthogonal_(weight)))
        parametrizations.orthogonal(projection, "weight")
        return with_bias(projection, self.bias)


class _OrthogonalLayout(nn.Module):
    """The tensors of PyTorch's orthogonal parametrisation, for the meta device, where it cannot be computed."""

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
    """A projection that stores its matrix.

    Args:
        weight: (out_features, in_features).
    """

    weight: Tensor

    def __init__(self, weight: nn.Parameter):
        super().__init__(weight.shape[1], weight.shape[0])
        self.weight = weight

    def dense(self) -> Tensor:
        return self.weight
