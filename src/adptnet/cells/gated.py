"""GRU and LSTM, by torch's own cells, as specs: baselines that can be saved and solved like any other."""

from torch import nn

from .._typing import Device, DType
from ..spec import check_size, spec
from .base import CellSpec
from .wrap import TorchCell

__all__ = ["GRU", "LSTM"]


class _GatedSpec(CellSpec):
    """What both have: a width and a state size.

    Attributes:
        width: Features of the input.
        state_size: Numbers in the state; `width` if not given.
    """

    width: int
    state_size: int | None

    def __post_init__(self) -> None:
        if self.state_size is None:
            object.__setattr__(self, "state_size", self.width)
        check_size(self, width=self.width, state_size=self.state_size)

    @property
    def size(self) -> int:
        """The state size, resolved."""
        return self.width if self.state_size is None else self.state_size


@spec
class GRU(_GatedSpec):
    """A gated recurrent unit (`nn.GRUCell`)."""

    width: int
    state_size: int | None = None

    def build(self, *, device: Device = None, dtype: DType = None) -> TorchCell:
        return TorchCell(nn.GRUCell(self.width, self.size, device=device, dtype=dtype))


@spec
class LSTM(_GatedSpec):
    """Long short-term memory (`nn.LSTMCell`); `state_size` counts what is shown, and as many are kept beside it."""

    width: int
    state_size: int | None = None

    def build(self, *, device: Device = None, dtype: DType = None) -> TorchCell:
        return TorchCell(nn.LSTMCell(self.width, self.size, device=device, dtype=dtype))
