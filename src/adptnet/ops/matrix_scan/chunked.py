"""The same scan in two levels: all chunks at once, with the products of their matrices, then from chunk to chunk."""

import math

import torch
from torch import Tensor

from . import reference

__all__ = ["matrix_scan"]

SHORT = 16  # steps below which one loop is the quicker way


def matrix_scan(
    transition: Tensor, offset: Tensor, initial: Tensor | None = None, *, reset: Tensor | None = None, reverse: bool = False
) -> Tensor:
    """As `reference.matrix_scan`."""
    steps = offset.shape[-2]
    if steps < SHORT:
        return reference.matrix_scan(transition, offset, initial, reset=reset, reverse=reverse)
    varies = reset is not None or transition.shape[-3] > 1
    if varies:
        transition = torch.broadcast_to(transition, (*offset.shape, offset.shape[-1]))
    if reset is not None:
        transition = torch.where(reset[..., None, None], 0, transition)
    if reverse:
        offset, transition = offset.flip(-2), transition.flip(-3) if varies else transition
    states = _forward(transition, offset, initial, varies)
    return states.flip(-2) if reverse else states


def _forward(transition: Tensor, offset: Tensor, initial: Tensor | None, varies: bool) -> Tensor:
    steps = offset.shape[-2]
    length = math.isqrt(steps)
    chunks = -(-steps // length)
    missing = chunks * length - steps
    rows = torch.cat((offset, offset.new_zeros(*offset.shape[:-2], missing, offset.shape[-1])), -2)
    inputs = rows.unflatten(-2, (chunks, length)).unsqueeze(-1).unbind(-3)  # length times (..., chunks, n, 1)
    if varies:
        filled = torch.cat((transition, transition.new_zeros(*transition.shape[:-3], missing, *transition.shape[-2:])), -3)
        matrices = filled.unflatten(-3, (chunks, length)).unbind(-3)  # length times (..., chunks, n, n)
    else:
        matrices = (transition,) * length

    local, reach = [inputs[0]], [matrices[0]]
    for i in range(1, length):
        local.append(matrices[i] @ local[-1] + inputs[i])
        reach.append(matrices[i] @ reach[-1])

    ends = local[-1].unbind(-3)
    across = reach[-1].unbind(-3) if varies else (reach[-1].squeeze(-3),) * chunks
    entering = [torch.zeros_like(ends[0]) if initial is None else initial.unsqueeze(-1)]
    for j in range(chunks - 1):
        entering.append(across[j] @ entering[-1] + ends[j])

    carried = torch.stack(entering, -3)  # (..., chunks, n, 1)
    states = torch.stack([b + a @ carried for a, b in zip(reach, local, strict=True)], -3)
    return states.squeeze(-1).flatten(-3, -2)[..., :steps, :]
