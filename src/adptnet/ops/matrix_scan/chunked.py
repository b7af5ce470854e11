"""The matrix scan in two levels: a scan within all chunks in parallel, and a scan over the chunks."""

import math

import torch
from torch import Tensor

from . import reference

__all__ = ["matrix_scan"]

MIN_STEPS = 16  # shorter sequences run as the reference, which is faster


def matrix_scan(
    transition: Tensor,
    offset: Tensor,
    initial: Tensor | None = None,
    *,
    reset: Tensor | None = None,
    reverse: bool = False,
) -> Tensor:
    """Return the states of a linear recurrence.

    Args:
        transition, offset, initial, reset, reverse: As in `reference.matrix_scan`.
    """
    steps, n = offset.shape[-2:]
    if steps < MIN_STEPS or not offset.numel():
        return reference.matrix_scan(transition, offset, initial, reset=reset, reverse=reverse)
    lead = offset.shape[:-2]
    batch = math.prod(lead)
    length = math.isqrt(steps)
    chunks = -(-steps // length)
    missing = chunks * length - steps  # filled by steps after the last

    def split_chunks(values: Tensor) -> Tensor:
        """Return (batch, chunks, length, ...) of (..., time, ...)."""
        values = values.reshape(batch, steps, *values.shape[len(lead) + 1 :])
        if missing:
            filling = values.new_zeros(batch, missing, *values.shape[2:])
            values = torch.cat((filling, values) if reverse else (values, filling), 1)
        return values.reshape(batch, chunks, length, *values.shape[2:])

    # All products are of 3-dimensional tensors: torch.matmul would spend more time on shapes than on small products.
    # Chunks are part of the batch if each has matrices of its own; otherwise they are the columns of one state.
    varies = reset is not None or transition.shape[-3] > 1
    resets = cut = None
    if reset is not None:
        transition = torch.where(reset[..., None, None], 0, transition)
        mask = split_chunks(torch.broadcast_to(reset, offset.shape[:-1]))
        resets = mask.flatten(0, 1)[..., None, None].unbind(1)  # length times (batch * chunks, 1, 1)
        cut = mask.any(-1)[..., None, None].unbind(1)  # whether a reset in the chunk cuts off the state that enters
    if varies:
        transition = split_chunks(torch.broadcast_to(transition, (*offset.shape, n)))
        matrices = transition.flatten(0, 1).unbind(1)  # length times (batch * chunks, n, n)
        rows = split_chunks(offset).flatten(0, 1).unsqueeze(-1).unbind(1)  # length times (batch * chunks, n, 1)
    else:
        matrices = (torch.broadcast_to(transition, (*lead, 1, n, n)).reshape(batch, n, n),) * length
        rows = split_chunks(offset).transpose(1, 3).unbind(2)  # length times (batch, n, chunks)

    def apply_reset(state: Tensor, i: int) -> Tensor:
        """Return the state before step i of each chunk, zeroed by resets: a product with zeros would keep a NaN."""
        return state if resets is None else torch.where(resets[i], 0, state)

    order = range(length - 1, -1, -1) if reverse else range(length)
    end, reach = rows[order[0]], matrices[order[0]]
    for i in order[1:]:
        end = torch.baddbmm(rows[i], matrices[i], apply_reset(end, i))
        reach = torch.bmm(matrices[i], apply_reset(reach, i))
    ends = end.reshape(batch, chunks, n, 1).unbind(1) if varies else end.split(1, -1)
    across = reach.reshape(batch, chunks, n, n).unbind(1) if varies else (reach,) * chunks
    first = offset.new_zeros(()) if initial is None else initial
    entering = [torch.broadcast_to(first, (*lead, n)).reshape(batch, n, 1)]
    for j in range(chunks - 1, 0, -1) if reverse else range(chunks - 1):
        state = entering[-1] if cut is None else torch.where(cut[j], 0, entering[-1])
        entering.append(torch.baddbmm(ends[j], across[j], state))
    if reverse:
        entering.reverse()

    state = torch.stack(entering, 1).flatten(0, 1) if varies else torch.cat(entering, -1)
    states = []
    for i in order:
        state = torch.baddbmm(rows[i], matrices[i], apply_reset(state, i))
        states.append(state)
    if reverse:
        states.reverse()
    if varies:
        joined = torch.stack(states, 1).reshape(batch, chunks * length, n)
    else:
        joined = torch.stack(states, -1).reshape(batch, n, chunks * length).transpose(1, 2)
    return joined.narrow(1, missing if reverse else 0, steps).reshape(*lead, steps, n)
