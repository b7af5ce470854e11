"""How evenly M couples the numbers of the state (eq:entropy)."""

import math
from typing import Any

import torch
from torch import Tensor

from ..cells import ADPTCell, ADPTState
from ..errors import IncompatibleError, InputError
from .systems import cell_of, describe, posed

__all__ = ["materialised", "offdiagonal_entropy"]


@torch.no_grad()
def materialised(system: Any, inputs: Tensor, *, step: int = -1, state: Tensor | ADPTState | None = None) -> Tensor:
    """M_t as a matrix, at one step of a trajectory: (batch, n, n), or (n, n) for one sequence.

    Args:
        system: An ADPT layer or cell.
        inputs: (batch, time, features), or (time, features).
        step: Which step; the last by default.
        state: Where trajectories start.
    """
    cell = cell_of(system)
    if not isinstance(cell, ADPTCell):
        raise IncompatibleError(
            f"{describe(cell)} has no M. Pass an ADPT layer or cell, without memory= or Stateful()."
        )
    trajectory = posed(system, inputs, state)
    index = step + trajectory.steps if step < 0 else step
    if not 0 <= index < trajectory.steps:
        raise InputError(f"step={step}: the trajectory has {trajectory.steps} steps.")
    run = cell.stepper()
    entering = trajectory.state
    for drive in trajectory.drive[:, :index].unbind(1):
        entering = run(entering, drive)
    dense = cell.conjugate(entering, trajectory.drive[:, index]).dense()
    dense = dense.expand(len(entering), *dense.shape[-2:])
    return dense if trajectory.batched else dense.squeeze(0)


def offdiagonal_entropy(conjugate: Tensor, *, pairs: bool = False) -> Tensor:
    """The normalised Shannon entropy of the squared entries off the diagonal of M, (..., n, n) to (...).

    1 if all entries are alike in size, 0 if one alone is left; NaN where there are none, as for β = 0.

    Args:
        conjugate: M, from `materialised` or `cell.conjugate(...).dense()`.
        pairs: Whether eigenvalues are complex, two numbers of the state each. Each 2×2 block then counts as one entry,
            by its Frobenius norm, and the blocks on the diagonal are left out.
    """
    if conjugate.dim() < 2 or conjugate.shape[-1] != conjugate.shape[-2]:
        raise InputError(f"M is square; got shape {tuple(conjugate.shape)}.")
    if pairs and conjugate.shape[-1] % 2:
        raise InputError(f"pairs=True: M of size {conjugate.shape[-1]} is not made of pairs. Drop pairs=.")
    weights = conjugate.square()
    if pairs:
        size = weights.shape[-1] // 2
        weights = weights.unflatten(-1, (size, 2)).unflatten(-3, (size, 2)).sum((-3, -1))
    size = weights.shape[-1]
    if size < 2:
        raise InputError("M has one entry and nothing off its diagonal. The entropy needs a state of at least two.")
    off = weights[..., ~torch.eye(size, dtype=torch.bool, device=weights.device)]
    share = off / off.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(share).sum(-1) / math.log(off.shape[-1])
    return entropy
