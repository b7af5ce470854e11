"""Expansion of each channel to several numbers of the state, one weight each (sec:state_expansion)."""

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
    """Channel i reaches the numbers i·m … i·m + m - 1 of the state, with one weight each; m is state_size / width.

    As an input projection it spreads each channel; as a read-out it sums each channel's numbers back. Weights
    start at random with variance 1 when spreading (the input keeps its scale) and 1/m when summing.
    """

    bias: bool = False

    def build(self, in_features: int, out_features: int, *, device: Device = None, dtype: DType = None) -> Projection:
        small, large = sorted((in_features, out_features))
        if large % small:
            raise SpecError(
                f"Expand() from {in_features} to {out_features} features: one must be a multiple of the other. "
                f"Pass state_size={(large // small + 1) * small}, or Dense()."
            )
        spread = in_features == small
        weight = torch.randn(large, device=device, dtype=dtype) * (1.0 if spread else (small / large) ** 0.5)
        return with_bias(ExpandProjection(weight, in_features, out_features), self.bias)


class ExpandProjection(Projection):
    def __init__(self, weight: Tensor, in_features: int, out_features: int):
        super().__init__(in_features, out_features)
        self.weight = nn.Parameter(weight)

    def dense(self) -> Tensor:
        small = min(self.in_features, self.out_features)
        blocks: Tensor = torch.block_diag(*self.weight.unflatten(0, (small, -1)))
        return blocks if self.out_features == small else blocks.mT

    def bound(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        weight = self.weight.to(dtype)
        if self.in_features <= self.out_features:
            return lambda x: x.repeat_interleave(self.out_features // self.in_features, -1) * weight
        return lambda x: (x * weight).unflatten(-1, (self.out_features, -1)).sum(-1)

    @property
    def macs(self) -> int:
        return self.weight.numel()
