"""Closed-form Jacobians of the cells of `torch.nn`, dense or only their diagonal.

With the rows of a weight W scaled by a vector s written as s W, and the gates named as in the documentation of torch:

- `RNNCell`: s W with s = 1 - h'² (tanh) or [h' > 0] (ReLU).
- `GRUCell`: diag(z) + (h - n) z (1 - z) W_hz + (1 - z)(1 - n²) [r W_hn + m r (1 - r) W_hr] with m = W_hn h + b_hn.
- `LSTMCell`, on the state (h, c): ∂c'/∂h = c f (1 - f) W_hf + g i (1 - i) W_hi + i (1 - g²) W_hg, ∂c'/∂c = diag(f),
  ∂h'/∂h = tanh(c') o (1 - o) W_ho + k ∂c'/∂h and ∂h'/∂c = diag(k f) with k = o (1 - tanh² c').
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .._typing import Matrix, Vector

__all__ = ["compute_jacobian", "compute_jacobian_diagonal"]

Terms = list[tuple[Tensor, Tensor]]  # scales (..., n) and the weights (n, n) whose rows they multiply


class _Derivative(NamedTuple):
    """The blocks of a Jacobian. Those of the memory c are absent unless the cell is an LSTM."""

    hidden: Terms  # ∂h'/∂h without `carried`
    carried: Tensor | None = None  # diagonal matrix that is added to ∂h'/∂h
    memory: Terms | None = None  # ∂c'/∂h
    read: Tensor | None = None  # diagonal of ∂h'/∂c
    forget: Tensor | None = None  # diagonal of ∂c'/∂c


def compute_jacobian(cell: nn.RNNCellBase, state: Vector, inputs: Tensor) -> Matrix:
    """Return the derivative of the next state with respect to the state, (..., state_size, state_size).

    Args:
        cell: An `nn.RNNCell`, `nn.GRUCell` or `nn.LSTMCell`.
        state: (..., state_size); h and c of an LSTM are concatenated.
        inputs: (..., input_size).
    """
    derivative = _differentiate(cell, state, inputs)
    hidden = _sum_dense(derivative.hidden, derivative.carried)
    if derivative.memory is None:
        return hidden
    assert derivative.read is not None
    assert derivative.forget is not None
    above = torch.cat((hidden, torch.diag_embed(derivative.read)), -1)
    below = torch.cat((_sum_dense(derivative.memory, None), torch.diag_embed(derivative.forget)), -1)
    return torch.cat((above, below), -2)


def compute_jacobian_diagonal(cell: nn.RNNCellBase, state: Vector, inputs: Tensor) -> Vector:
    """Return the diagonal of `compute_jacobian`, (..., state_size), without computing the other entries.

    Args:
        cell: An `nn.RNNCell`, `nn.GRUCell` or `nn.LSTMCell`.
        state: (..., state_size).
        inputs: (..., input_size).
    """
    derivative = _differentiate(cell, state, inputs)
    diagonal = torch.zeros_like(derivative.hidden[0][0]) if derivative.carried is None else derivative.carried
    for scale, weight in derivative.hidden:
        diagonal = torch.addcmul(diagonal, scale, weight.diagonal())
    return diagonal if derivative.forget is None else torch.cat((diagonal, derivative.forget), -1)


def _sum_dense(terms: Terms, carried: Tensor | None) -> Tensor:
    """Return the sum of the weights with scaled rows, plus a diagonal matrix."""
    (scale, weight), *rest = terms
    total = scale.unsqueeze(-1) * weight
    for scale, weight in rest:
        total = torch.addcmul(total, scale.unsqueeze(-1), weight)
    if carried is not None:
        total.diagonal(dim1=-2, dim2=-1).add_(carried)
    return total


def _differentiate(cell: nn.RNNCellBase, state: Vector, inputs: Tensor) -> _Derivative:
    if isinstance(cell, nn.LSTMCell):
        return _differentiate_lstm(cell, state, inputs)
    if isinstance(cell, nn.GRUCell):
        return _differentiate_gru(cell, state, inputs)
    assert isinstance(cell, nn.RNNCell)
    following = linear(inputs, cell.weight_ih, cell.bias_ih) + linear(state, cell.weight_hh, cell.bias_hh)
    slope = (following > 0).to(following) if cell.nonlinearity == "relu" else 1 - following.tanh().square()
    return _Derivative([(slope, cell.weight_hh)])


def _differentiate_gru(cell: nn.GRUCell, state: Vector, inputs: Tensor) -> _Derivative:
    from_input = linear(inputs, cell.weight_ih, cell.bias_ih).chunk(3, -1)
    from_state = linear(state, cell.weight_hh, cell.bias_hh).chunk(3, -1)
    reset_weight, update_weight, new_weight = cell.weight_hh.chunk(3)
    reset, update = ((x + h).sigmoid() for x, h in zip(from_input[:2], from_state[:2], strict=True))
    new = torch.tanh(from_input[2] + reset * from_state[2])
    keep = 1 - update
    by_new = keep * (1 - new.square()) * reset
    terms = [
        ((state - new) * update * keep, update_weight),
        (by_new, new_weight),
        (by_new * (1 - reset) * from_state[2], reset_weight),
    ]
    return _Derivative(terms, carried=update)


def _differentiate_lstm(cell: nn.LSTMCell, state: Vector, inputs: Tensor) -> _Derivative:
    hidden, memory = state.chunk(2, -1)
    gates = linear(inputs, cell.weight_ih, cell.bias_ih) + linear(hidden, cell.weight_hh, cell.bias_hh)
    enter, forget, new, out = gates.chunk(4, -1)
    enter, forget, new, out = enter.sigmoid(), forget.sigmoid(), new.tanh(), out.sigmoid()
    enter_weight, forget_weight, new_weight, out_weight = cell.weight_hh.chunk(4)
    bounded = torch.tanh(forget * memory + enter * new)
    read = out * (1 - bounded.square())
    on_memory = [
        (new * enter * (1 - enter), enter_weight),
        (memory * forget * (1 - forget), forget_weight),
        (enter * (1 - new.square()), new_weight),
    ]
    on_hidden = [(read * scale, weight) for scale, weight in on_memory]
    on_hidden.append((bounded * out * (1 - out), out_weight))
    return _Derivative(on_hidden, memory=on_memory, read=read * forget, forget=forget)
