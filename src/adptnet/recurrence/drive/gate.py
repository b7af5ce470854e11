"""The input gate i(u) = softplus(U D' u + bias), of low rank (eq:input_gate_ADPTNet)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..._typing import Device, DType, Vector
from ...ops.products import multiply
from ...spec import Spec, check_size, spec

__all__ = ["Gate", "SoftplusGate"]


@spec
class SoftplusGate(Spec):
    """A gate on each feature of the projected input that depends on all features. It is initialised at 1.

    Attributes:
        rank: Number of columns of U and D; state_size / 16, rounded up, if None.
    """

    rank: int | None = None

    def __post_init__(self) -> None:
        if self.rank is not None:
            check_size(self, rank=self.rank)

    def build(self, state_size: int, *, device: Device = None, dtype: DType = None) -> "Gate":
        """Build the gate.

        Args:
            state_size: State dimension.
            device: Device of the parameters.
            dtype: Dtype of the parameters.
        """
        return Gate(state_size, self.rank or math.ceil(state_size / 16), device, dtype)


class Gate(nn.Module):
    """softplus(U D' u + bias).

    Args:
        state_size: State dimension n.
        rank: Number of columns of U and D.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, state_size: int, rank: int, device: Device, dtype: DType):
        super().__init__()
        bound = state_size**-0.5
        self.down = nn.Parameter(torch.empty(rank, state_size, device=device, dtype=dtype).uniform_(-bound, bound))
        self.up = nn.Parameter(torch.zeros(state_size, rank, device=device, dtype=dtype))
        at_one = math.log(math.e - 1)  # softplus(0.5413…) = 1
        self.bias = nn.Parameter(torch.full((state_size,), at_one, device=device, dtype=dtype))

    def forward(self, u: Vector) -> Vector:
        """Return the gate of each state dimension.

        Args:
            u: The projected input, (*b, n).
        """
        up, down, bias = (part.to(u.dtype) for part in (self.up, self.down, self.bias))
        gate: Tensor = functional.softplus(multiply(multiply(u, down.mT), up.mT) + bias)
        return gate
