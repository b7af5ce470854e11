"""A stack of layers, like an `nn.GRU` with several."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from .._typing import Device, DType
from ..ops._fx import Proxy, record_call
from ..spec import ModuleSpec, check_fraction, check_size, reject_unknown, reset_from_spec, spec
from .adpt_layer import LayerSpec
from .bidirectional import BidirectionalSpec, check_layer
from .given import choose_depth, make_layer, place
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
        depth: Number of layers.
        dropout: Dropout probability between layers.
    """

    renamed_fields: ClassVar[Mapping[str, str]] = {"num_layers": "depth"}

    layer: LayerSpec | BidirectionalSpec | MixerSpec
    depth: int = 1
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_layer(self, self.layer)
        check_size(self, depth=self.depth)
        check_fraction(self, below="at 1 nothing would pass", dropout=self.dropout)

    @property
    def width(self) -> int:
        return self.layer.width

    def build(self, *, device: Device = None, dtype: DType = None) -> "Stack":
        return Stack(self.layer, self.depth, dropout=self.dropout, device=device, dtype=dtype)


class Stack(Streamable):
    """A stack of layers: (batch, time, width) in and out, with a tuple of states.

    Args:
        layer: The spec of every layer; or a layer, whose weights are copied into each place, as
            `nn.TransformerEncoder` does.
        depth: Number of layers. The name `num_layers`, as in `nn.GRU`, is accepted too.
        dropout: Dropout probability between layers.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(
        self,
        layer: LayerSpec | BidirectionalSpec | MixerSpec | nn.Module,
        depth: int = 1,
        *,
        dropout: float = 0.0,
        device: Device = None,
        dtype: DType = None,
        **others: Any,
    ):
        depth = choose_depth("Stack", depth, others)
        reject_unknown("Stack", others, ("depth", "dropout", "device", "dtype"))
        super().__init__()
        layer = make_layer(layer)
        self.spec = StackSpec(layer, depth, dropout)  # type: ignore[arg-type]  # replaced by its spec
        self.width = self.spec.width
        self.layers = nn.ModuleList(place(layer, self.spec.layer, device, dtype) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, state: Any = None, **run: Any) -> tuple[Tensor, LayerStates]:
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

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, LayerStates]:
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

    def _run_layers(self, method: Any, x: Tensor, state: Any) -> tuple[Tensor, LayerStates]:
        check_padded(x)
        entering = split_states(self.layers, state)
        leaving = []
        for i, (layer, before) in enumerate(zip(self.layers, entering, strict=True)):
            x, after = method(layer)(self.dropout(x) if i else x, before)
            leaving.append(after)
        return x, LayerStates(leaving)
