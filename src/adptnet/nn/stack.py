"""Layers on top of one another, as `num_layers` of `nn.GRU` does."""

from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import InputError, SpecError
from ..mixers import MixerSpec
from ..spec import ModuleSpec, check_fraction, check_size, spec
from ..typing import Device, DType
from .bidirectional import BidirectionalSpec, refuse_time_major
from .layer import LayerSpec
from .packing import refuse_packed

__all__ = ["LayerStates", "Stack", "StackSpec", "states_of"]


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
    """Layers on top of one another: (batch, time, width) in and out, a tuple of states."""

    def __init__(
        self,
        layer: LayerSpec | BidirectionalSpec | MixerSpec,
        num_layers: int = 1,
        *,
        dropout: float = 0.0,
        device: Device = None,
        dtype: DType = None,
    ):
        super().__init__()
        self.spec = StackSpec(layer, num_layers, dropout)
        self.width = layer.width
        self.layers = nn.ModuleList(layer.build(device=device, dtype=dtype) for _ in range(num_layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, state: tuple[Any, ...] | None = None, **run: Any) -> tuple[Tensor, LayerStates]:
        """As `RecurrentLayer.forward`; `run` holds its keyword arguments and reaches every layer."""
        return self._through(lambda layer: lambda y, s: layer(y, s, **run), x, state)

    def step(self, x: Tensor, state: tuple[Any, ...] | None = None) -> tuple[Tensor, LayerStates]:
        """As `RecurrentLayer.step`."""
        return self._through(lambda layer: layer.step, x, state)

    def _through(self, way: Any, x: Tensor, state: tuple[Any, ...] | None) -> tuple[Tensor, LayerStates]:
        refuse_packed(x)
        entering = states_of(self.layers, state)
        leaving = []
        for i, (layer, before) in enumerate(zip(self.layers, entering, strict=True)):
            x, after = way(layer)(self.dropout(x) if i else x, before)
            leaving.append(after)
        return x, LayerStates(leaving)


class LayerStates(tuple[Any, ...]):
    """The state of each layer of a stack or model, first to last: a tuple that can be detached, moved and selected."""

    __slots__ = ()

    def detach(self) -> "LayerStates":
        """As `ADPTState.detach`."""
        return LayerStates([state.detach() for state in self])

    def to(self, *target: Any, **options: Any) -> "LayerStates":
        """As `ADPTState.to`."""
        return LayerStates([state.to(*target, **options) for state in self])

    def select(self, rows: Any) -> "LayerStates":
        """As `ADPTState.select`."""
        return LayerStates([state.select(rows) for state in self])


torch.serialization.add_safe_globals([LayerStates])
pytree.register_pytree_node(
    LayerStates,
    lambda states: (list(states), None),
    lambda states, _: LayerStates(states),
    serialized_type_name="adptnet.nn.LayerStates",
    flatten_with_keys_fn=lambda states: ([(pytree.SequenceKey(i), state) for i, state in enumerate(states)], None),
)


def states_of(layers: Sized, state: tuple[Any, ...] | None) -> tuple[Any, ...]:
    """One state for each layer: those given, or none."""
    if state is None:
        return (None,) * len(layers)
    if not isinstance(state, (tuple, list)) or len(state) != len(layers):
        raise InputError(
            f"state must be the tuple of {len(layers)} states an earlier call returned; got {type(state).__name__}"
            + (f" of {len(state)}." if isinstance(state, (tuple, list)) else ".")
        )
    return tuple(state)
