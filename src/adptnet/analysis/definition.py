"""The definition of the ADPT cells with dense matrices: slow, and what `verify` and the tests compare every step with.

Q is computed by its definition (`matrix_exp`, or the linear solve of the Cayley map), and M = Q Λ̄ Q' as a matrix.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .._typing import Matrix, Vector
from ..cells import ADPTCell, Cell, CoupledCell, StatefulCell
from ..errors import IncompatibleError
from ..ops.plane_rotation import skew
from ..recurrence.conjugates import Taylor, block_diagonal, scaled_skew
from ..recurrence.conjugates.operators import taylor_matrix
from ..recurrence.directions import KeyValue
from ..recurrence.step import evaluate_plane, split_drive

__all__ = ["define_conjugate", "define_step"]


def define_conjugate(cell: ADPTCell, state: Vector, drive: Tensor) -> Matrix:
    """Return M, or P M with an input-driven phase P, computed from its definition.

    Args:
        cell: The cell.
        state: (..., state_size).
        drive: (..., features).

    Returns:
        (..., state_size, state_size).
    """
    parameters, conjugate = cell.evaluate(), cell.spec.conjugate
    parts = split_drive(parameters, drive)
    eigen, planes, beta = evaluate_plane(parameters, state, parts)
    if conjugate.has_rotation:
        rotation = _define_rotation(cell, planes, beta)
        dense = rotation @ eigen.dense() @ rotation.mT
    elif isinstance(conjugate, Taylor):
        dense = taylor_matrix(eigen, planes[0], beta, conjugate.order)
    else:
        dense = eigen.dense()
    dense = block_diagonal(dense) if parameters.heads > 1 else dense
    dense = dense if parts.phase is None else parts.phase.dense() @ dense
    return dense.expand(*state.shape, cell.state_size)


def _define_rotation(cell: ADPTCell, planes: Sequence[KeyValue], beta: float | Tensor) -> Matrix:
    """Return Q, the product of the rotations of all planes, for each head."""
    rotations = [cell.spec.retraction.reference_matrix(scaled_skew(beta, plane)) for plane in planes]
    return functools.reduce(lambda product, rotation: rotation @ product, rotations)


@functools.singledispatch
def define_step(cell: Cell, state: Vector, drive: Tensor) -> Vector:
    """Return the next state computed from its definition.

    Args:
        cell: An `ADPTCell`, `CoupledCell` or `StatefulCell`.
        state: (..., state_size).
        drive: (..., features).

    Raises:
        IncompatibleError: The cell is of another class.
    """
    raise IncompatibleError(f"{type(cell).__name__} has no definition with dense matrices; ADPT cells have one.")


@define_step.register
def _(cell: ADPTCell, state: Tensor, drive: Tensor) -> Tensor:
    parameters, spec = cell.evaluate(), cell.spec
    parts = split_drive(parameters, drive)
    driven = parts.drive
    if spec.rotation_aware:
        _, planes, beta = evaluate_plane(parameters, state, parts)
        rotation = _define_rotation(cell, planes, beta)
        rotation = block_diagonal(rotation) if spec.heads > 1 else rotation
        rotation = rotation if parts.phase is None else parts.phase.dense() @ rotation
        driven = (rotation @ driven.unsqueeze(-1)).squeeze(-1)
    return (define_conjugate(cell, state, drive) @ state.unsqueeze(-1)).squeeze(-1) + driven


@define_step.register
def _(cell: CoupledCell, state: Tensor, drive: Tensor) -> Tensor:
    size = cell.spec.size
    fast, slow = state.split(size, -1)
    gain, decay = cell.fast.drive.gain(cell.fast.spectrum).dense(), cell.slow().dense()
    fed = drive[..., :size] + (cell.feedback * slow) @ gain.mT
    fast = define_step(cell.fast, fast, torch.cat((fed, drive[..., size:]), -1))
    return torch.cat((fast, slow @ decay.mT + fast - fast @ decay.mT), -1)


@define_step.register
def _(cell: StatefulCell, state: Tensor, drive: Tensor) -> Tensor:
    parameters = cell.memoryless.evaluate()
    assert parameters.blocks is not None
    assert parameters.beta is not None
    assert parameters.directions is not None
    x, old = cell.output(state), cell.rotation(state)
    key, value = parameters.directions[0](x)
    step = parameters.beta * skew(key, (old @ value.unsqueeze(-1)).squeeze(-1))
    new = old @ cell.spec.retraction.reference_matrix(step)
    conjugate = new @ parameters.blocks.dense() @ new.mT
    return torch.cat(((conjugate @ x.unsqueeze(-1)).squeeze(-1) + drive, new.flatten(-2)), -1)
