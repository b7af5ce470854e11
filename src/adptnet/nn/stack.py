"""Layers on top of one another, as `num_layers` of `nn.GRU` does."""

from typing import Any

from torch import Tensor, nn

from .._typing import Device, DType
from ..errors import SpecError
from ..ops._fx import Proxy, record_call
from ..spec import ModuleSpec, check_fraction, check_size, reject_unknown, reset_from_spec, spec
from .bidirectional import BidirectionalSpec, refuse_time_major
from .layer import LayerSpec
from .mixer import MixerSpec
from .packing import check_padded
from .states import LayerStates, states_of

__all__ = ["Stack", "StackSpec"]


@spec
class StackSpec(ModuleSpec):
    """`num_layers` layers of one kind, each on the outputs of the one below, with dropout in between."""

    layer: LayerSpec | BidirectionalSpec | MixerSpec
    num_layers: int = 1
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.layer, (LayerSpec, BidirectionalSpec, MixerSpec)):
            raise SpecError(
                f"StackSpec(layer={type(self.layer).__name__}): must be a LayerSpec, BidirectionalSpec or MixerSpec: "
                "layer.spec."
            )
        if isinstance(self.layer, LayerSpec):
            refuse_time_major(self, self.layer)
        check_size(self, num_layers=self.num_layers)
        check_fraction(self, below="at 1 nothing would pass", dropout=self.dropout)

    @property
    def width(self) -> int:
        return self.layer.width

    def build(self, *, device: Device = None, dtype: DType = None) -> "Stack":
        return Stack(self.layer, self.num_layers, dropout=self.dropout, device=device, dtype=dtype)


class Stack(nn.Module):
    """Layers on top of one another: (batch, time, width) in and out, a tuple of states.

    Args:
        layer: What each layer is: `layer.spec`.
        num_layers: How many, as in `nn.GRU`. A `SequenceModel` counts blocks, as `depth`.
        dropout: Between layers.
    """

    def __init__(
        self,
        layer: LayerSpec | BidirectionalSpec | MixerSpec,
        num_layers: int = 1,
        *,
        dropout: float = 0.0,
        device: Device = None,
        dtype: DType = None,
        **unknown: Any,
    ):
        reject_unknown("Stack", unknown, ("num_layers", "dropout", "device", "dtype"), depth="num_layers")
        super().__init__()
        self.spec = StackSpec(layer, num_layers, dropout)
        self.width = layer.width
        self.layers = nn.ModuleList(layer.build(device=device, dtype=dtype) for _ in range(num_layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, state: tuple[Any, ...] | None = None, **run: Any) -> tuple[Tensor, LayerStates]:
        """As `RecurrentLayer.forward`; `run` holds its keyword arguments and reaches every layer."""
        if isinstance(x, Proxy):
            return record_call(self, x, state, run)
        return self._through(lambda layer: lambda y, s: layer(y, s, **run), x, state)

    def step(self, x: Tensor, state: tuple[Any, ...] | None = None) -> tuple[Tensor, LayerStates]:
        """As `RecurrentLayer.step`."""
        return self._through(lambda layer: layer.step, x, state)

    def reset_parameters(self) -> None:
        """Draw all parameters again, in place, as the constructor does."""
        reset_from_spec(self, self.spec)

    def _through(self, way: Any, x: Tensor, state: tuple[Any, ...] | None) -> tuple[Tensor, LayerStates]:
        check_padded(x)
        entering = states_of(self.layers, state)
        leaving = []
        for i, (layer, before) in enumerate(zip(self.layers, entering, strict=True)):
            x, after = way(layer)(self.dropout(x) if i else x, before)
            leaving.append(after)
        return x, LayerStates(leaving)
