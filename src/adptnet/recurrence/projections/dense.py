"""Projections with a full matrix: unconstrained, or orthogonal."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from ..._dtype import compute_dtype
from ..._typing import Device, DType
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
        if weight.is_meta:
            return with_bias(_make_meta_orthogonal(weight), self.bias)
        projection = DenseProjection(nn.Parameter(nn.init.orthogonal_(weight)))
        _parametrize(projection)
        return with_bias(projection, self.bias)


def _parametrize(projection: "DenseProjection") -> None:
    """Make the matrix of a projection orthogonal."""
    parametrizations.orthogonal(projection, "weight")
    if projection.in_features != projection.out_features:
        parametrized: Any = projection.parametrizations
        parametrized.weight[0].register_forward_pre_hook(_restore_signs)


def _restore_signs(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Replace the diagonal of a matrix by its signs.

    PyTorch stores signs there and truncates them to integers. Weight decay or a rounding error in an average of weights
    would turn them, and with them the whole matrix, into zeros.
    """
    (original,) = given
    return (original.diagonal_scatter(original.detach().diagonal().sign()),)


def _make_meta_orthogonal(weight: Tensor) -> "DenseProjection":
    """Return the projection for a weight on the meta device, where PyTorch cannot factorise an initial value.

    It is made for the smallest matrix that PyTorch parametrizes in the same way, square, tall or wide.
    """
    rows, columns = weight.shape
    small = torch.ones(1 + (rows > columns), 1 + (columns > rows), device="cpu")
    projection = DenseProjection(nn.Parameter(small))
    with torch.random.fork_rng(devices=[]):
        _parametrize(projection)
    projection.in_features, projection.out_features = columns, rows
    parametrized: Any = projection.parametrizations
    parametrized.weight.original = nn.Parameter(weight)
    parametrized.weight[0].shape = weight.shape
    parametrized.weight[0].base = weight.new_empty(max(rows, columns), max(rows, columns))
    return projection


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
