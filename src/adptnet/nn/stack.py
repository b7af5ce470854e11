"""A stack of layers, like `num_layers` of `nn.GRU`."""

from typing import Any

from torch import Tensor, nn

from .._typing import Device, DType
from ..ops._fx import Proxy, record_call
from ..spec import ModuleSpec, check_fraction, check_size, reject_unknown, reset_from_spec, spec
from .adpt_layer import LayerSpec
from .bidirectional import BidirectionalSpec, check_layer
from .mixer import MixerSpec
from .packing import check_padded
from .states import LayerStates, make_initial_states, split_states
from .streaming import Streamable

__all__ = ["Stack", "StackSpec"]


@spec
class StackSpec(ModuleSpec):
    """Layers with the same spec, each on the outputs of the one below, with dropout in between.

    Attributes:
        layer: A recurrent layer, a bidirectional layer, or a mixer.
        num_layers: Number of layers.
        dropout: Dropout probability between layers.
    """

    layer: LayerSpec | BidirectionalSpec | MixerSpec
    num_layers: int = 1
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_layer(self, self.layer)
        check_size(self, num_layers=self.num_layers)
        check_fraction(self, below="at 1 nothing would pass", dropout=self.dropout)

    @property
    def width(self) -> int:
        return self.layer.width

    def build(self, *, device: Device = None, dtype: DType = None) -> "Stack":
        return Stack(self.layer, self.num_layers, dropout=self.dropout, device=device, dtype=dtype)


class Stack(Streamable):
    """A stack of layers: (batch, time, width) in and out, with a tuple of states.

    Args:
        layer: The spec of every layer, `layer.spec`.
        num_layers: Number of layers, as in `nn.GRU`. The argument of a `SequenceModel` is `depth`.
        dropout: Dropout probability between layers.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
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
        """Run all layers along a sequence.

        Args:
            x: (batch, time, width).
            state: The states that an earlier call returned.
            run: Keyword arguments of `RecurrentLayer.forward`, passed to every layer.

        Returns:
            Outputs (batch, time, width) and the state of each layer.
        """
        if isinstance(x, Proxy):
            return record_call(self, x, state, run)
        return self._run_layers(lambda layer: lambda y, s: layer(y, s, **run), x, state)

    def step(self, x: Tensor, state: tuple[Any, ...] | None = None) -> tuple[Tensor, LayerStates]:
        """Run one step on (batch, width).

        Args:
            x: (batch, width).
            state: The states that an earlier call returned.
        """
        return self._run_layers(lambda layer: layer.step, x, state)

    def initial_state(self, batch: int, *, device: Device = None, dtype: DType = None) -> LayerStates:
        """Return the state before the first step.

        Args:
            batch: Number of sequences.
            device: Device of the state; that of the parameters by default.
            dtype: Dtype of the state; that of the recurrence by default.
        """
        return make_initial_states(self.layers, batch, device, dtype)

    def reset_parameters(self) -> None:
        """Reinitialize all parameters in place, as the constructor does."""
        reset_from_spec(self, self.spec)

    def _run_layers(self, method: Any, x: Tensor, state: tuple[Any, ...] | None) -> tuple[Tensor, LayerStates]:
        check_padded(x)
        entering = split_states(self.layers, state)
        leaving = []
        for i, (layer, before) in enumerate(zip(self.layers, entering, strict=True)):
            x, after = method(layer)(self.dropout(x) if i else x, before)
            leaving.append(after)
        return x, LayerStates(leaving)
