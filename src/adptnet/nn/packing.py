"""Sequences of different lengths in one row or in torch's packed form, brought to a padded batch and back."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ..cells import ADPTState
from ..errors import InputError
from ..solvers.problem import check_not_nested

__all__ = ["check_padded", "packed_sequence", "ragged"]

# From a padded batch (batch, time, width) and its lengths to outputs and state.
Run = Callable[[Tensor, Tensor], tuple[Tensor, ADPTState]]


def check_padded(x: object) -> None:
    """Raise `InputError` on torch's packed and nested forms; only a call of a bare layer takes the packed one."""
    check_not_nested(x)
    if isinstance(x, PackedSequence):
        raise InputError(
            "a PackedSequence goes to a bare layer only. Unpack it: "
            "x, lengths = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True), and pass lengths=lengths."
        )


def packed_sequence(packed: PackedSequence, run: Run) -> tuple[PackedSequence, ADPTState]:
    """Runs on torch's packed form; the output is packed the same way, the state is in the caller's order."""
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    outputs, state = run(padded, lengths)
    if packed.sorted_indices is not None:
        order = packed.sorted_indices
        outputs, lengths = outputs.index_select(0, order), lengths.index_select(0, order.cpu())
    data = pack_padded_sequence(outputs, lengths, batch_first=True).data
    return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices), state


def ragged(x: Tensor, cu_seqlens: Tensor, run: Run) -> tuple[Tensor, ADPTState]:
    """Runs on sequences laid end to end in one row, (1, total, width)."""
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
            f"cu_seqlens = {bounds.tolist()}; it must be whole numbers from 0 to the total length, {total}, "
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
