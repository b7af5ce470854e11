"""Cells to compare with."""

import torch
from torch import Tensor, nn

from ..spec import check_size, spec
from ..typing import Positions, Vector
from .base import Cell, CellSpec

__all__ = ["ReLURNN", "ReLURNNCell"]


@spec
class ReLURNN(CellSpec):
    """x_t = ReLU(W x_{t-1} + U o_t + b) (eq vanilla_rnn), started as `nn.RNN` is."""

    width: int
    state_size: int | None = None

    def __post_init__(self) -> None:
        if self.state_size is None:
            object.__setattr__(self, "state_size", self.width)
        check_size(self, width=self.width, state_size=self.size)

    @property
    def size(self) -> int:
        """The state size, resolved."""
        return self.width if self.state_size is None else self.state_size

    def build(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "ReLURNNCell":
        return ReLURNNCell(self, device=device, dtype=dtype)


class ReLURNNCell(Cell):
    def __init__(self, spec: ReLURNN, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.spec = spec
        self.input_size = spec.width
        self.state_size = spec.size
        bound = spec.size**-0.5

        def uniform(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype).uniform_(-bound, bound))

        self.recurrent_weight = uniform(spec.size, spec.size)
        self.input_weight = uniform(spec.size, spec.width)
        self.bias = uniform(spec.size)

    def prepare(self, inputs: Tensor, position: Positions) -> Tensor:
        return inputs @ self.input_weight.to(inputs.dtype).mT + self.bias.to(inputs.dtype)

    def step(self, state: Vector, drive: Vector) -> Vector:
        return (state @ self.recurrent_weight.to(state.dtype).mT + drive).relu()
