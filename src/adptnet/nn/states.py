"""The state of several layers: one tuple, to be carried from call to call."""

from collections.abc import Sized
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import InputError

__all__ = ["LayerStates", "states_of"]


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
