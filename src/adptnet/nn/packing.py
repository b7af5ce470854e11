"""Conversion of packed and concatenated sequences to a padded batch and back."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from .._validate import check_not_nested
from ..errors import InputError

__all__ = ["check_padded", "run_packed", "run_ragged"]

S = TypeVar("S")  # the state
# Runs a layer on a padded batch (batch, time, width) and its lengths; returns outputs and state.
Run = Callable[[Tensor, Tensor], tuple[Tensor, S]]


def check_padded(x: object) -> None:
    """Raise `InputError` unless `x` is a padded tensor. Only a call of a single layer takes a `PackedSequence`.

    Args:
        x: The inputs of a module.
    """
    check_not_nested(x)
    if isinstance(x, PackedSequence):
        raise InputError(
            "only a single layer takes a PackedSequence. Unpack it: "
            "x, lengths = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True), and pass lengths=lengths."
        )
    if not isinstance(x, Tensor):
        raise InputError(f"x must be a tensor; got {type(x).__name__}. Pass torch.as_tensor(x).")


def run_packed(packed: PackedSequence, run: Run[S]) -> tuple[PackedSequence, S]:
    """Run a layer on a `PackedSequence`.

    Args:
        packed: The inputs.
        run: Runs the layer on a padded batch.

    Returns:
        The outputs, packed in the same way, and the state in the order of the unsorted sequences.
    """
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    outputs, state = run(padded, lengths)
    if packed.sorted_indices is not None:
        order = packed.sorted_indices
        outputs, lengths = outputs.index_select(0, order), lengths.index_select(0, order.cpu())
    data = pack_padded_sequence(outputs, lengths, batch_first=True).data
    return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices), state


def run_ragged(x: Tensor, cu_seqlens: Tensor, run: Run[S]) -> tuple[Tensor, S]:
    """Run a layer on sequences that are concatenated along time.

    Args:
        x: (1, total, width).
        cu_seqlens: (sequences + 1,) cumulative lengths, from 0 to `total`.
        run: Runs the layer on a padded batch.

    Returns:
        Outputs (1, total, width) and a state with one row for each sequence.
    """
    lengths = _segment_lengths(x, cu_seqlens)
    row = x[0]
    padded = torch.nn.utils.rnn.pad_sequence(list(row.split(lengths.tolist())), batch_first=True)
    outputs, state = run(padded, lengths)
    kept = torch.arange(outputs.shape[1]) < lengths.unsqueeze(-1)
    return outputs[kept.to(outputs.device)].unsqueeze(0), state


def _segment_lengths(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    if x.dim() != 3 or x.shape[0] != 1:
        raise InputError(f"with cu_seqlens, x is one row of sequences, (1, total, width); got {tuple(x.shape)}.")
    bounds = torch.as_tensor(cu_seqlens).cpu()
    total = x.shape[1]
    if bounds.is_floating_point() or bounds.dim() != 1 or len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != total:
        raise InputError(
            f"cu_seqlens = {bounds.tolist()}; it must be integers from 0 to the total length, {total}, "
            "e.g. torch.tensor([0, 3, 8]) for sequences of 3 and 5."
        )
    lengths = bounds.diff()
    if bool((lengths < 1).any()):
        i = int((lengths < 1).nonzero()[0, 0])
        raise InputError(
            f"cu_seqlens has an empty segment: sequence {i} runs from {int(bounds[i])} to {int(bounds[i + 1])}. "
            "Drop empty sequences: cu_seqlens.unique_consecutive()."
        )
    return lengths
