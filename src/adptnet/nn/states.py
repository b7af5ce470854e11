"""The hidden states of several layers as one tuple."""

from collections.abc import Iterable, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._typing import Device, DType
from ..errors import InputError

__all__ = ["LayerStates", "make_initial_states", "split_states"]


class LayerStates(tuple[Any, ...]):
    """Tuple of the hidden state of each layer of a stack or model, first to last.

    It can be detached, moved to a device, and indexed by sequence.
    """

    __slots__ = ()

    def detach(self) -> "LayerStates":
        """Return the states detached from the autograd graph, for truncated backpropagation."""
        return LayerStates([state.detach() for state in self])

    def to(self, *target: Any, **options: Any) -> "LayerStates":
        """Return the states moved or cast.

        Args:
            target: A device or a dtype, as for `Tensor.to`.
            options: Keyword arguments of `Tensor.to`.
        """
        return LayerStates([state.to(*target, **options) for state in self])

    def select(self, rows: Any) -> "LayerStates":
        """Return the states of some sequences.

        Args:
            rows: Indices or a mask over the batch.
        """
        return LayerStates([state.select(rows) for state in self])


torch.serialization.add_safe_globals([LayerStates])
pytree.register_pytree_node(
    LayerStates,
    lambda states: (list(states), None),
    lambda states, _: LayerStates(states),
    serialized_type_name="adptnet.nn.LayerStates",
    flatten_with_keys_fn=lambda states: ([(pytree.SequenceKey(i), state) for i, state in enumerate(states)], None),
)


def split_states(layers: Sized, state: Any) -> tuple[Any, ...]:
    """Return one state per layer: those of `state`, or None for each layer if there is no state.

    Args:
        layers: The layers.
        state: The states that an earlier call returned, a tensor (layers, batch, state_size), or None.

    Raises:
        InputError: `state` does not have one entry per layer.
    """
    if state is None:
        return (None,) * len(layers)
    if isinstance(state, Tensor) and state.dim() == 3:
        state = state.unbind()
    if not isinstance(state, (tuple, list)) or len(state) != len(layers):
        raise InputError(
            f"state must be the tuple of {len(layers)} states an earlier call returned; got {type(state).__name__}"
            + (f" of {len(state)}." if isinstance(state, (tuple, list)) else ".")
        )
    return tuple(state)


def make_initial_states(layers: Iterable[Any], batch: int, device: Device, dtype: DType) -> LayerStates:
    """Return the state of each layer before the first step.

    Args:
        layers: The layers.
        batch: Number of sequences.
        device: Device of the states; that of the parameters if None.
        dtype: Dtype of the states; that of the recurrences if None.

    Raises:
        InputError: A layer has no initial state, such as a mixer.
    """
    layers = list(layers)
    for layer in layers:
        inner = getattr(layer, "layer", layer)
        if not hasattr(inner, "initial_state"):
            raise InputError(f"{type(inner).__name__} has no initial state of its own. Pass None as the state instead.")
    return LayerStates([layer.initial_state(batch, device=device, dtype=dtype) for layer in layers])
