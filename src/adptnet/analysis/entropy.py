"""The conjugate M as a dense matrix, and the entropy of its off-diagonal entries (eq:entropy)."""

import math
from typing import Any

import torch
from torch import Tensor

from ..cells import ADPTState
from ..cells.structure import make_step
from ..errors import InputError
from .trajectory import make_trajectory, resolve_adpt_cell

__all__ = ["materialize_conjugate", "offdiagonal_entropy"]


@torch.no_grad()
def materialize_conjugate(
    system: Any, inputs: Tensor, *, step: int = -1, state: Tensor | ADPTState | None = None
) -> Tensor:
    """Return M_t as a dense matrix at one step of a trajectory.

    Args:
        system: An ADPT layer or cell.
        inputs: (batch, time, features), or (time, features).
        step: Index of the step; the last by default.
        state: Initial states.

    Returns:
        (batch, n, n), or (n, n) for one sequence.
    """
    cell = resolve_adpt_cell(system, "materialize_conjugate")
    trajectory = make_trajectory(system, inputs, state)
    index = step + trajectory.steps if step < 0 else step
    if not 0 <= index < trajectory.steps:
        raise InputError(f"step={step}: the trajectory has {trajectory.steps} steps.")
    run = make_step(cell)
    entering = trajectory.state
    for drive in trajectory.drive[:, :index].unbind(1):
        entering = run(entering, drive)
    dense = cell.conjugate(entering, trajectory.drive[:, index]).dense()
    dense = dense.expand(len(entering), *dense.shape[-2:])
    return dense if trajectory.batched else dense.squeeze(0)


def offdiagonal_entropy(conjugate: Tensor, *, pairs: bool = False) -> Tensor:
    """Return the normalized Shannon entropy of the squared off-diagonal entries of M.

    It is 1 if all entries are equal in magnitude, 0 if a single one is not zero, and NaN if all are zero, as for β = 0.

    Args:
        conjugate: M, (..., n, n), from `materialize_conjugate` or `cell.conjugate(...).dense()`.
        pairs: Whether eigenvalues are complex, with two state dimensions each. Each 2×2 block then counts as one entry,
            by its Frobenius norm, and the diagonal blocks are left out.

    Returns:
        (...), between 0 and 1.
    """
    if conjugate.dim() < 2 or conjugate.shape[-1] != conjugate.shape[-2]:
        raise InputError(f"conjugate must be a square matrix M; got shape {tuple(conjugate.shape)}.")
    if pairs and conjugate.shape[-1] % 2:
        raise InputError(f"pairs=True: M of size {conjugate.shape[-1]} is not made of pairs. Drop pairs=.")
    weights = conjugate.square()
    if pairs:
        size = weights.shape[-1] // 2
        weights = weights.unflatten(-1, (size, 2)).unflatten(-3, (size, 2)).sum((-3, -1))
    size = weights.shape[-1]
    if size < 2:
        raise InputError("M has no off-diagonal entries. The entropy needs a state dimension of at least two.")
    off = weights[..., ~torch.eye(size, dtype=torch.bool, device=weights.device)]
    share = off / off.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(share).sum(-1) / math.log(off.shape[-1])
    return entropy
