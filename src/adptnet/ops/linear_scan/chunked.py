"""The diagonal scan in PyTorch, in two levels: a scan within all chunks in parallel, and a scan over the chunks.

It takes about 3√T operations instead of T. Within a chunk the steps are those of the reference.
"""

import math

import torch
from torch import Tensor

from . import reference

__all__ = ["linear_scan"]

MIN_STEPS = 16  # shorter sequences run as the reference, which is faster


def linear_scan(
    transition: Tensor,
    offset: Tensor,
    initial: Tensor | None = None,
    *,
    reset: Tensor | None = None,
    reverse: bool = False,
    overwrite: bool = False,
) -> Tensor:
    """Return the states of a diagonal linear recurrence; see `reference.linear_scan`.

    Args:
        transition, offset, initial, reset, reverse: As in `reference.linear_scan`.
        overwrite: Overwrite `offset` with the states; not if a gradient is needed.
    """
    steps = offset.shape[-2]
    if steps < MIN_STEPS:
        return reference.linear_scan(transition, offset, initial, reset=reset, reverse=reverse)
    varies = reset is not None or (transition.dim() > 1 and transition.shape[-2] > 1)
    if varies:
        transition = torch.broadcast_to(transition, offset.shape)
    if reset is not None:
        transition = torch.where(reset.unsqueeze(-1), 0, transition)

    # Whole chunks first, in the order of the scan, then the last steps, which do not fill a chunk.
    length = math.isqrt(steps)
    chunks = steps // length
    remaining_steps = steps - chunks * length
    chunk_range = slice(remaining_steps, steps) if reverse else slice(0, steps - remaining_steps)
    rest = slice(0, remaining_steps) if reverse else slice(steps - remaining_steps, steps)
    rows = offset[..., chunk_range, :].unflatten(-2, (chunks, length)).unbind(-2)  # length times (..., chunks, n)
    parts = transition[..., chunk_range, :].unflatten(-2, (chunks, length)).unbind(-2) if varies else None
    factors = (transition,) * length if parts is None else parts
    resets = None
    if reset is not None:
        resets = torch.broadcast_to(reset, offset.shape[:-1])[..., chunk_range].unflatten(-1, (chunks, length))

    def apply_reset(values: Tensor, i: int) -> Tensor:
        """Return the state before step i of each chunk, zeroed by resets: a factor of zero would keep a NaN."""
        return values if resets is None else torch.where(resets[..., i, None], 0, values)

    order = range(length - 1, -1, -1) if reverse else range(length)

    end, reach = rows[order[0]], factors[order[0]]
    for i in order[1:]:
        end = torch.addcmul(rows[i], factors[i], apply_reset(end, i))
        reach = factors[i] * apply_reset(reach, i)
    ends = end.unbind(-2)
    across = reach.unbind(-2) if varies else (reach.squeeze(-2) if reach.dim() > 1 else reach,) * chunks
    entering = [torch.zeros_like(ends[0]) if initial is None else initial.expand_as(ends[0])]
    cut = (
        None if resets is None else resets.any(-1, keepdim=True)
    )  # whether a reset in the chunk cuts off the state that enters it
    for j in range(chunks - 1, -1, -1) if reverse else range(chunks):
        enters = entering[-1] if cut is None else torch.where(cut[..., j, :], 0, entering[-1])
        entering.append(torch.addcmul(ends[j], across[j], enters))
    last = entering.pop()

    state = torch.stack(entering[::-1] if reverse else entering, -2)  # (..., chunks, n)
    last_transition = transition[..., rest, :] if varies else transition
    tail = None
    if remaining_steps:
        last_reset = None if reset is None else reset[..., rest]
        tail = reference.linear_scan(last_transition, offset[..., rest, :], last, reset=last_reset, reverse=reverse)
    if overwrite:
        for i in order:
            state = torch.addcmul(rows[i], factors[i], apply_reset(state, i), out=rows[i])
        if tail is not None:
            offset[..., rest, :] = tail
        return offset
    states = []
    for i in order:
        state = torch.addcmul(rows[i], factors[i], apply_reset(state, i))
        states.append(state)
    whole_states = torch.stack(states[::-1] if reverse else states, -2).flatten(-3, -2)
    if tail is None:
        return whole_states
    return torch.cat((tail, whole_states) if reverse else (whole_states, tail), -2)
