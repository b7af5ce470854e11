"""All steps of a recurrent layer of `torch.nn` in one call of torch, with resets and lengths."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from .._validate import make_validity_mask
from ..ops.linear_scan import linear_scan
from .torch_weights import LayerWeights

__all__ = ["run_layer"]

_FUNCTIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
    "GRU": torch.gru,
    "LSTM": torch.lstm,
}


def run_layer(
    layer: LayerWeights, inputs: Tensor, state: Tensor, reset: Tensor | None, lengths: Tensor | None
) -> Tensor:
    """Return the states after each step, (batch, time, state_size).

    Resets and lengths cut the batch into segments, which torch runs side by side as packed sequences: the number of
    successive steps is that of the longest segment.

    Args:
        layer: The weights.
        inputs: (batch, time, input_size).
        state: (batch, state_size); h and c of an LSTM are concatenated.
        reset: (batch, time) bool; where True, the step starts from zero.
        lengths: (batch,); states past the end are zero.
    """
    if reset is None and lengths is None:
        hidden = _call_layer(layer, inputs, state, None)
    else:
        segments = _cut_into_segments(inputs.shape[:2], reset, lengths, inputs.device)
        entering = torch.where(segments.restarts.unsqueeze(-1), 0.0, state[segments.rows])
        packed = _call_layer(layer, inputs.flatten(0, 1)[segments.steps], entering, segments.batch_sizes)
        flat = packed.new_zeros(inputs.shape[0] * inputs.shape[1], layer.hidden_size)
        hidden = flat.index_copy(0, segments.steps, packed).unflatten(0, inputs.shape[:2])
    if not layer.has_memory:
        return hidden
    memory = _compute_memory(layer, inputs, hidden, state, reset)
    if lengths is not None:
        memory = torch.where(make_validity_mask(lengths, inputs.shape[1]).unsqueeze(-1), memory, 0.0)
    return torch.cat((hidden, memory), -1)


def _call_layer(layer: LayerWeights, inputs: Tensor, state: Tensor, batch_sizes: Tensor | None) -> Tensor:
    """Return h after each step, of a batch (batch, time, input_size) or of packed sequences (steps, input_size)."""
    weights = [layer.weight_ih, layer.weight_hh]
    if layer.bias_ih is not None and layer.bias_hh is not None:
        weights += [layer.bias_ih, layer.bias_hh]
    # arguments: biases, number of layers, dropout, training, bidirectional; and for a batch: batch_first
    options = (len(weights) == 4, 1, 0.0, torch.is_grad_enabled(), False)
    entering: Tensor | tuple[Tensor, ...] = state.unsqueeze(0)
    if layer.has_memory:
        entering = tuple(part.contiguous() for part in state.unsqueeze(0).chunk(2, -1))
    run = _FUNCTIONS[layer.kind]
    if batch_sizes is None:
        return run(inputs, entering, weights, *options, True)[0]
    return run(inputs, batch_sizes, entering, weights, *options)[0]


def _compute_memory(layer: LayerWeights, inputs: Tensor, hidden: Tensor, state: Tensor, reset: Tensor | None) -> Tensor:
    """Return c after each step. The layer of torch returns only h, given which c is a diagonal linear recurrence."""
    entering, memory = state.chunk(2, -1)
    before = torch.cat((entering.unsqueeze(1), hidden[:, :-1]), 1)
    if reset is not None:
        before = torch.where(reset.unsqueeze(-1), 0.0, before)
    some = slice(0, 3 * layer.hidden_size)  # all gates but that of the output
    biases = (None if bias is None else bias[some] for bias in (layer.bias_ih, layer.bias_hh))
    gates = sum(map(linear, (inputs, before), (layer.weight_ih[some], layer.weight_hh[some]), biases))
    assert isinstance(gates, Tensor)
    enter, forget, new = gates.chunk(3, -1)
    return linear_scan(forget.sigmoid(), enter.sigmoid() * new.tanh(), memory, reset=reset)


class _Segments(NamedTuple):
    """Parts of the sequences without resets inside, the longest first, as a packed sequence."""

    steps: Tensor  # indices into the flattened (batch * time), in the order of the packed sequence
    batch_sizes: Tensor  # number of segments with a first, second, ... step, on the CPU
    rows: Tensor  # the sequence of each segment
    restarts: Tensor  # whether a segment starts from zero


def _cut_into_segments(
    shape: torch.Size, reset: Tensor | None, lengths: Tensor | None, device: torch.device
) -> _Segments:
    batch, time = shape
    steps = torch.arange(time, device=device).expand(batch, time)
    reset = torch.zeros(shape, dtype=torch.bool, device=device) if reset is None else reset
    valid = torch.ones_like(reset) if lengths is None else make_validity_mask(lengths, time)
    starts = (reset | (steps == 0)) & valid
    position = steps - torch.where(starts, steps, 0).cummax(-1).values
    segment = starts.flatten().cumsum(0) - 1
    used = valid.flatten().nonzero().squeeze(-1)
    position, segment = position.flatten()[used], segment[used]
    longest_first = segment.bincount().argsort(descending=True, stable=True)
    rank = torch.empty_like(longest_first)
    rank[longest_first] = torch.arange(len(rank), device=device)
    order = (position * len(rank) + rank[segment]).argsort()
    first = starts.flatten().nonzero().squeeze(-1)[longest_first]  # the first step of each segment
    return _Segments(used[order], position.bincount().cpu(), first // time, reset.flatten()[first])
