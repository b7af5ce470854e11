"""Closed-form Jacobians of the recurrent layers of `torch.nn`, dense or only their diagonal.

With the rows of a weight W scaled by a vector s written as s W, and the gates named as in the documentation of torch:

- `RNNCell`: s W with s = 1 - h'² (tanh) or [h' > 0] (ReLU).
- `GRUCell`: diag(z) + (h - n) z (1 - z) W_hz + (1 - z)(1 - n²) [r W_hn + m r (1 - r) W_hr] with m = W_hn h + b_hn.
- `LSTMCell`, on the state (h, c): ∂c'/∂h = c f (1 - f) W_hf + g i (1 - i) W_hi + i (1 - g²) W_hg, ∂c'/∂c = diag(f),
  ∂h'/∂h = tanh(c') o (1 - o) W_ho + k ∂c'/∂h and ∂h'/∂c = diag(k f) with k = o (1 - tanh² c').

The derivatives with respect to the input x have W_i in place of W_h and no diagonal matrices; in the GRU, W_in
without r. Of several layers, each takes h' of the layer below as x: the Jacobian is block lower triangular.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from .._typing import Matrix, Vector
from .torch_weights import LayerWeights, advance

__all__ = ["compute_jacobian", "compute_jacobian_diagonal"]

Terms = list[tuple[Tensor, Tensor]]  # scales (..., n) and the weights whose rows they multiply


class _Derivative(NamedTuple):
    """The blocks of a Jacobian. Those of the memory c are absent unless the layer is an LSTM."""

    hidden: Terms  # ∂h'/∂h without `carried`
    hidden_by_input: Terms  # ∂h'/∂x
    carried: Tensor | None = None  # diagonal matrix that is added to ∂h'/∂h
    memory: Terms | None = None  # ∂c'/∂h
    memory_by_input: Terms | None = None  # ∂c'/∂x
    read: Tensor | None = None  # diagonal of ∂h'/∂c
    forget: Tensor | None = None  # diagonal of ∂c'/∂c


def compute_jacobian(layers: list[LayerWeights], state: Vector, inputs: Tensor) -> Matrix:
    """Return the derivative of the next state with respect to the state, (..., state_size, state_size).

    Args:
        layers: The weights of each layer.
        state: (..., state_size), the states of the layers one after another; in each, h and c of an LSTM.
        inputs: (..., input_size).
    """
    rows: list[Tensor] = []
    states = state.chunk(len(layers), -1)
    for k, (layer, own) in enumerate(zip(layers, states, strict=True)):
        derivative = _differentiate(layer, own, inputs)
        block = _by_state(derivative)
        if len(layers) == 1:
            return block
        if k:
            below = rows[-1][..., : layer.hidden_size, : k * own.shape[-1]]  # of the h' that enters this layer
            block = torch.cat((_by_input(derivative) @ below, block), -1)
        rows.append(torch.nn.functional.pad(block, (0, state.shape[-1] - block.shape[-1])))
        if k + 1 < len(layers):
            inputs = advance(layer, own, inputs)[..., : layer.hidden_size]
    return torch.cat(rows, -2)


def compute_jacobian_diagonal(layers: list[LayerWeights], state: Vector, inputs: Tensor) -> Vector:
    """Return the diagonal of `compute_jacobian`, (..., state_size), without computing the other entries.

    Args:
        layers: The weights of each layer.
        state: (..., state_size).
        inputs: (..., input_size).
    """
    diagonals = []
    for layer, own in zip(layers, state.chunk(len(layers), -1), strict=True):
        derivative = _differentiate(layer, own, inputs)
        diagonal = torch.zeros_like(derivative.hidden[0][0]) if derivative.carried is None else derivative.carried
        for scale, weight in derivative.hidden:
            diagonal = torch.addcmul(diagonal, scale, weight.diagonal())
        diagonals += [diagonal] if derivative.forget is None else [diagonal, derivative.forget]
        if layer is not layers[-1]:
            inputs = advance(layer, own, inputs)[..., : layer.hidden_size]
    return torch.cat(diagonals, -1)


def _by_state(derivative: _Derivative) -> Tensor:
    hidden = _sum_dense(derivative.hidden, derivative.carried)
    if derivative.memory is None:
        return hidden
    assert derivative.read is not None
    assert derivative.forget is not None
    above = torch.cat((hidden, torch.diag_embed(derivative.read)), -1)
    below = torch.cat((_sum_dense(derivative.memory, None), torch.diag_embed(derivative.forget)), -1)
    return torch.cat((above, below), -2)


def _by_input(derivative: _Derivative) -> Tensor:
    hidden = _sum_dense(derivative.hidden_by_input, None)
    if derivative.memory_by_input is None:
        return hidden
    return torch.cat((hidden, _sum_dense(derivative.memory_by_input, None)), -2)


def _sum_dense(terms: Terms, carried: Tensor | None) -> Tensor:
    """Return the sum of the weights with scaled rows, plus a diagonal matrix."""
    (scale, weight), *rest = terms
    total = scale.unsqueeze(-1) * weight
    for scale, weight in rest:
        total = torch.addcmul(total, scale.unsqueeze(-1), weight)
    if carried is not None:
        total.diagonal(dim1=-2, dim2=-1).add_(carried)
    return total


def _differentiate(layer: LayerWeights, state: Vector, inputs: Tensor) -> _Derivative:
    if layer.has_memory:
        return _differentiate_lstm(layer, state, inputs)
    if layer.kind == "GRU":
        return _differentiate_gru(layer, state, inputs)
    following = linear(inputs, layer.weight_ih, layer.bias_ih) + linear(state, layer.weight_hh, layer.bias_hh)
    slope = (following > 0).to(following) if layer.kind == "RNN_RELU" else 1 - following.tanh().square()
    return _Derivative([(slope, layer.weight_hh)], [(slope, layer.weight_ih)])


def _differentiate_gru(layer: LayerWeights, state: Vector, inputs: Tensor) -> _Derivative:
    from_input = linear(inputs, layer.weight_ih, layer.bias_ih).chunk(3, -1)
    from_state = linear(state, layer.weight_hh, layer.bias_hh).chunk(3, -1)
    reset, update = ((x + h).sigmoid() for x, h in zip(from_input[:2], from_state[:2], strict=True))
    new = torch.tanh(from_input[2] + reset * from_state[2])
    keep = 1 - update
    by_new = keep * (1 - new.square())
    by_update, by_reset = (state - new) * update * keep, by_new * reset * (1 - reset) * from_state[2]
    terms = []
    for weight, new_scale in ((layer.weight_hh, by_new * reset), (layer.weight_ih, by_new)):
        reset_weight, update_weight, new_weight = weight.chunk(3)
        terms.append([(by_update, update_weight), (new_scale, new_weight), (by_reset, reset_weight)])
    return _Derivative(terms[0], terms[1], carried=update)


def _differentiate_lstm(layer: LayerWeights, state: Vector, inputs: Tensor) -> _Derivative:
    hidden, memory = state.chunk(2, -1)
    gates = linear(inputs, layer.weight_ih, layer.bias_ih) + linear(hidden, layer.weight_hh, layer.bias_hh)
    enter, forget, new, out = gates.chunk(4, -1)
    enter, forget, new, out = enter.sigmoid(), forget.sigmoid(), new.tanh(), out.sigmoid()
    bounded = torch.tanh(forget * memory + enter * new)
    read = out * (1 - bounded.square())
    scales = new * enter * (1 - enter), memory * forget * (1 - forget), enter * (1 - new.square())
    on_memory, on_hidden = [], []
    for weight in (layer.weight_hh, layer.weight_ih):
        *others, out_weight = weight.chunk(4)
        on_memory.append(list(zip(scales, others, strict=True)))
        on_hidden.append([(read * scale, part) for scale, part in on_memory[-1]])
        on_hidden[-1].append((bounded * out * (1 - out), out_weight))
    return _Derivative(
        on_hidden[0],
        on_hidden[1],
        memory=on_memory[0],
        memory_by_input=on_memory[1],
        read=read * forget,
        forget=forget,
    )
