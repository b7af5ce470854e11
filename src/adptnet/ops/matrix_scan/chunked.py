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
    steps = offset.shape[-2]
    if steps < MIN_STEPS:
        return reference.matrix_scan(transition, offset, initial, reset=reset, reverse=reverse)
    varies = reset is not None or transition.shape[-3] > 1
    if varies:
        transition = torch.broadcast_to(transition, (*offset.shape, offset.shape[-1]))
    if reset is not None:
        transition = torch.where(reset[..., None, None], 0, transition)

    length = math.isqrt(steps)
    chunks = -(-steps // length)
    missing = chunks * length - steps  # filled by steps after the last
    rows = _split_chunks(offset.unsqueeze(-1), chunks, length, missing, reverse)
    matrices = _split_chunks(transition, chunks, length, missing, reverse) if varies else (transition,) * length
    order = range(length - 1, -1, -1) if reverse else range(length)
    resets = None
    if reset is not None:
        marks = torch.broadcast_to(reset, offset.shape[:-1])[..., None, None]
        resets = torch.stack(_split_chunks(marks, chunks, length, missing, reverse), -3)  # (..., chunks, length, 1, 1)

    def apply_reset(values: Tensor, i: int) -> Tensor:
        """Return the state before step i of each chunk, zeroed by resets: a product with zeros would keep a NaN."""
        return values if resets is None else torch.where(resets[..., i, :, :], 0, values)

    end, reach = rows[order[0]], matrices[order[0]]
    for i in order[1:]:
        end = matrices[i] @ apply_reset(end, i) + rows[i]
        reach = matrices[i] @ apply_reset(reach, i)
    ends = end.unbind(-3)
    across = reach.unbind(-3) if varies else (reach.squeeze(-3),) * chunks
    entering = [torch.zeros_like(ends[0]) if initial is None else initial.unsqueeze(-1).expand_as(ends[0])]
    cut = None if resets is None else resets.any(-3)  # whether a reset in the chunk cuts off the state that enters it
    for j in range(chunks - 1, 0, -1) if reverse else range(chunks - 1):
        enters = entering[-1] if cut is None else torch.where(cut[..., j, :, :], 0, entering[-1])
        entering.append(across[j] @ enters + ends[j])

    state = torch.stack(entering[::-1] if reverse else entering, -3)  # (..., chunks, n, 1)
    states = []
    for i in order:
        state = matrices[i] @ apply_reset(state, i) + rows[i]
        states.append(state.squeeze(-1))
    whole = torch.stack(states[::-1] if reverse else states, -2).flatten(-3, -2)
    return whole.narrow(-2, missing if reverse else 0, steps)


def _split_chunks(values: Tensor, chunks: int, length: int, missing: int, before: bool) -> tuple[Tensor, ...]:
    """Return one tensor per step of a chunk, `length` of them, each (..., chunks, n, n or 1)."""
    if missing:
        filling = values.new_zeros(*values.shape[:-3], missing, *values.shape[-2:])
        values = torch.cat((filling, values) if before else (values, filling), -3)
    parts: tuple[Tensor, ...] = values.unflatten(-3, (chunks, length)).unbind(-3)
    return parts
