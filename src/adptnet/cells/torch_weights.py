"""The layers inside a module of `torch.nn`, and one step of each as plain tensor operations."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

__all__ = ["LayerWeights", "advance", "list_layers"]


class LayerWeights(NamedTuple):
    """The weights of one recurrent layer, of a cell or of a whole `nn.RNN`, `nn.GRU` or `nn.LSTM`."""

    kind: str  # "RNN_TANH", "RNN_RELU", "GRU" or "LSTM", as `mode` of nn.RNNBase
    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None

    @property
    def hidden_size(self) -> int:
        """Features of h."""
        return self.weight_hh.shape[1]

    @property
    def has_memory(self) -> bool:
        """Whether the state is h and c, concatenated."""
        return self.kind == "LSTM"


def list_layers(module: nn.Module) -> list[LayerWeights]:
    """Return the weights of each layer, first to last. Parametrized weights are computed.

    Args:
        module: An `nn.RNNCell`, `nn.GRUCell` or `nn.LSTMCell`, or an `nn.RNN`, `nn.GRU` or `nn.LSTM`.
    """
    if isinstance(module, nn.RNNBase):
        return [_read_layer(module, module.mode, f"_l{k}") for k in range(module.num_layers)]
    kind = "LSTM" if isinstance(module, nn.LSTMCell) else "GRU"
    if isinstance(module, nn.RNNCell):
        kind = f"RNN_{module.nonlinearity.upper()}"
    return [_read_layer(module, kind, "")]


def _read_layer(module: nn.Module, kind: str, suffix: str) -> LayerWeights:
    weights: list[Any] = [getattr(module, f"{name}{suffix}", None) for name in LayerWeights._fields[1:]]
    return LayerWeights(kind, *weights)


def advance(layer: LayerWeights, state: Tensor, inputs: Tensor) -> Tensor:
    """Return the next state of a layer. Unlike the functions of torch, it has batching rules for `vmap`.

    Args:
        layer: The weights.
        state: (..., n); h and c of an LSTM are concatenated.
        inputs: (..., features).
    """
    hidden = state[..., : layer.hidden_size]
    from_input = linear(inputs, layer.weight_ih, layer.bias_ih)
    from_state = linear(hidden, layer.weight_hh, layer.bias_hh)
    if layer.kind == "GRU":
        (reset_in, update_in, new_in), (reset, update, new) = from_input.chunk(3, -1), from_state.chunk(3, -1)
        update = (update_in + update).sigmoid()
        new = torch.tanh(new_in + (reset_in + reset).sigmoid() * new)
        return new + update * (hidden - new)
    if layer.has_memory:
        enter, forget, new, out = (from_input + from_state).chunk(4, -1)
        memory = forget.sigmoid() * state[..., layer.hidden_size :] + enter.sigmoid() * new.tanh()
        return torch.cat((out.sigmoid() * memory.tanh(), memory), -1)
    both = from_input + from_state
    return both.relu() if layer.kind == "RNN_RELU" else both.tanh()
