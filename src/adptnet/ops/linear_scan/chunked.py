"""The same scan in two levels: all chunks at once, then from chunk to chunk. About 2√T operations instead of T."""

import math

import torch
from torch import Tensor

from . import reference

__all__ = ["linear_scan"]

SHORT = 16  # steps below which one loop is the quicker way


def linear_scan(
    transition: Tensor, offset: Tensor, initial: Tensor | None = None, *, reset: Tensor | None = None, reverse: bool = False
) -> Tensor:
    """As `reference.linear_scan`."""
    steps = offset.shape[-2]
    if steps < SHORT:
        return reference.linear_scan(transition, offset, initial, reset=reset, reverse=reverse)
    varies = reset is not None or (transition.dim() > 1 and transition.shape[-2] > 1)
    if varies:
        transition = torch.broadcast_to(transition, offset.shape)
    if reset is not None:
        transition = torch.where(reset.unsqueeze(-1), 0, transition)
    if reverse:
        offset, transition = offset.flip(-2), transition.flip(-2) if varies else transition
    states = _forward(transition, offset, initial, varies)
    return states.flip(-2) if reverse else states


def _forward(transition: Tensor, offset: Tensor, initial: Tensor | None, varies: bool) -> Tensor:
    steps = offset.shape[-2]
    length = math.isqrt(steps)
    chunks = -(-steps // length)
    rows = _chunked(offset, chunks, length)  # length tensors of (..., chunks, n)
    if varies:
        factors = _chunked(transition, chunks, length)
    else:
        factors = (transition,) * length  # (n,) or (..., 1, n): the same for all chunks

    local, reach = [rows[0]], [factors[0]]
    for i in range(1, length):
        local.append(torch.addcmul(rows[i], factors[i], local[-1]))
        reach.append(factors[i] * reach[-1])

    whole = reach[-1]  # what a chunk makes of the state that enters it: (..., chunks, n), or the same for all
    ends = local[-1].unbind(-2)
    across = whole.unbind(-2) if varies else (whole.squeeze(-2) if whole.dim() > 1 else whole,) * chunks
    entering = [torch.zeros_like(ends[0]) if initial is None else initial]
    for j in range(chunks - 1):
        entering.append(torch.addcmul(ends[j], across[j], entering[-1]))

    carried = torch.stack(entering, -2).unsqueeze(-2)  # (..., chunks, 1, n)
    states = torch.addcmul(torch.stack(local, -2), torch.stack(reach, -2), carried)
    return states.flatten(-3, -2)[..., :steps, :]


def _chunked(values: Tensor, chunks: int, length: int) -> tuple[Tensor, ...]:
    missing = chunks * length - values.shape[-2]
    if missing:
        values = torch.cat((values, values.new_zeros(*values.shape[:-2], missing, values.shape[-1])), -2)
    return values.unflatten(-2, (chunks, length)).unbind(-2)
