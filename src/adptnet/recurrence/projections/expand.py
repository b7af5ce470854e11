"""Expansion of each channel to several state dimensions, with one weight each (sec:state_expansion)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..._typing import Device, DType
from ...errors import SpecError
from ...spec import spec
from .base import Projection, ProjectionSpec, with_bias

__all__ = ["Expand"]


@spec
class Expand(ProjectionSpec):
    """Maps channel i to the state dimensions i·m … i·m + m - 1, with one weight each; m is state_size / width.

    As an input projection it expands each channel. As a read-out it sums the state dimensions of each channel. Weights
    are Gaussian, with variance 1 for an expansion (the input keeps its scale) and 1/m for a sum.

    Attributes:
        bias: Whether a bias is added.
    """

    bias: bool = False

    def build(self, in_features: int, out_features: int, *, device: Device = None, dtype: DType = None) -> Projection:
        small, large = sorted((in_features, out_features))
        if large % small:
            raise SpecError(
                f"Expand() from {in_features} to {out_features} features: one must be a multiple of the other. "
                f"Pass state_size={(large // small + 1) * small}, or Dense()."
            )
        expands = in_features == small
        weight = torch.randn(large, device=device, dtype=dtype) * (1.0 if expands else (small / large) ** 0.5)
        return with_bias(ExpandProjection(weight, in_features, out_features), self.bias)


class ExpandProjection(Projection):
    """The projection of `Expand`.

    Args:
        weight: (max(in_features, out_features),).
        in_features: Size of the input.
        out_features: Size of the output.
    """

    def __init__(self, weight: Tensor, in_features: int, out_features: int):
        super().__init__(in_features, out_features)
        self.weight = nn.Parameter(weight)

    def dense(self) -> Tensor:
        small = min(self.in_features, self.out_features)
        blocks: Tensor = torch.block_diag(*self.weight.unflatten(0, (small, -1)))
        return blocks if self.out_features == small else blocks.mT

    def bind(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        weight = self.weight.to(dtype)
        if self.in_features <= self.out_features:
            return lambda x: x.repeat_interleave(self.out_features // self.in_features, -1) * weight
        return lambda x: (x * weight).unflatten(-1, (self.out_features, -1)).sum(-1)

    def expand(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return `scale` times the expansion of `x`, in one pass over the result.

        Args:
            x: (..., in_features), with in_features <= out_features.
            scale: (out_features,).
        """
        both: Tensor = (scale * self.weight.to(x.dtype)).unflatten(0, (self.in_features, -1))
        return (x.unsqueeze(-1) * both).flatten(-2)

    @property
    def macs(self) -> int:
        return self.weight.numel()
