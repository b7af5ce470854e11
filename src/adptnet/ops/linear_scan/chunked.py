"""The same scan in two levels: what each chunk makes of the state that enters it, then all chunks at once.

About 2√T operations instead of T. Within a chunk the steps are those of the reference.
"""

import math

import torch
from torch import Tensor

from . import reference

__all__ = ["linear_scan"]

SHORT = 16  # steps below which one loop is the quicker way


def linear_scan(
    transition: Tensor,
    offset: Tensor,
    initial: Tensor | None = None,
    *,
    reset: Tensor | None = None,
    reverse: bool = False,
    overwrite: bool = False,
) -> Tensor:
    """As `reference.linear_scan`. With `overwrite` the states may take the place of `offset`; not for gradients."""
    steps = offset.shape[-2]
    if steps < SHORT:
        return reference.linear_scan(transition, offset, initial, reset=reset, reverse=reverse)
    varies = reset is not None or (transition.dim() > 1 and transition.shape[-2] > 1)
    if varies:
        transition = torch.broadcast_to(transition, offset.shape)
    if reset is not None:
        transition = torch.where(reset.unsqueeze(-1), 0, transition)

    # Whole chunks first (in the order of the scan), then the steps that are left over.
    length = math.isqrt(steps)
    chunks = steps // length
    left = steps - chunks * length
    whole = slice(left, steps) if reverse else slice(0, steps - left)
    rest = slice(0, left) if reverse else slice(steps - left, steps)
    rows = offset[..., whole, :].unflatten(-2, (chunks, length)).unbind(-2)  # length times (..., chunks, n)
    parts = transition[..., whole, :].unflatten(-2, (chunks, length)).unbind(-2) if varies else None
    factors = (transition,) * length if parts is None else parts
    resets = None
    if reset is not None:
        resets = torch.broadcast_to(reset, offset.shape[:-1])[..., whole].unflatten(-1, (chunks, length))

    def entered(values: Tensor, i: int) -> Tensor:
        """Return the state that enters step i of each chunk; a factor of zero would keep a NaN."""
        return values if resets is None else torch.where(resets[..., i, None], 0, values)

    order = range(length - 1, -1, -1) if reverse else range(length)

    end, reach = rows[order[0]], factors[order[0]]
    for i in order[1:]:
        end = torch.addcmul(rows[i], factors[i], entered(end, i))
        reach = factors[i] * entered(reach, i)
    ends = end.unbind(-2)
    across = reach.unbind(-2) if varies else (reach.squeeze(-2) if reach.dim() > 1 else reach,) * chunks
    entering = [torch.zeros_like(ends[0]) if initial is None else initial.expand_as(ends[0])]
    cut = None if resets is None else resets.any(-1, keepdim=True)  # whether nothing crosses the chunk
    for j in range(chunks - 1, -1, -1) if reverse else range(chunks):
        enters = entering[-1] if cut is None else torch.where(cut[..., j, :], 0, entering[-1])
        entering.append(torch.addcmul(ends[j], across[j], enters))
    last = entering.pop()

    state = torch.stack(entering[::-1] if reverse else entering, -2)  # (..., chunks, n)
    remaining = transition[..., rest, :] if varies else transition
    tail = None
    if left:
        later = None if reset is None else reset[..., rest]
        tail = reference.linear_scan(remaining, offset[..., rest, :], last, reset=later, reverse=reverse)
    if overwrite:
        for i in order:
            state = torch.addcmul(rows[i], factors[i], entered(state, i), out=rows[i])
        if tail is not None:
            offset[..., rest, :] = tail
        return offset
    states = []
    for i in order:
        state = torch.addcmul(rows[i], factors[i], entered(state, i))
        states.append(state)
    found = torch.stack(states[::-1] if reverse else states, -2).flatten(-3, -2)
    if tail is None:
        return found
    return torch.cat((tail, found) if reverse else (found, tail), -2)
