"""Specs of GRU and LSTM, built from the cells of `torch.nn`: baselines that can be saved and solved like any other."""

from torch import nn

from .._typing import Device, DType
from ..spec import spec
from .base import SizedCellSpec
from .torch_cell import TorchCell

__all__ = ["GRU", "LSTM"]


@spec
class GRU(SizedCellSpec):
    """A gated recurrent unit (`nn.GRUCell`).

    Attributes:
        width: Features of the input.
        state_size: State dimension; `width` if None.
    """

    width: int
    state_size: int | None = None

    def build(self, *, device: Device = None, dtype: DType = None) -> TorchCell:
        return TorchCell(nn.GRUCell(self.width, self.size, device=device, dtype=dtype))


@spec
class LSTM(SizedCellSpec):
    """Long short-term memory (`nn.LSTMCell`).

    Attributes:
        width: Features of the input.
        state_size: Hidden size; `width` if None. The state holds as many cell values beside it.
    """

    width: int
    state_size: int | None = None

    def build(self, *, device: Device = None, dtype: DType = None) -> TorchCell:
        return TorchCell(nn.LSTMCell(self.width, self.size, device=device, dtype=dtype))
