"""Numbers about timescales and directions: the spread of the eigenvalues, the memory, the angle of key and value."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cells import ADPTCell, ADPTState
from ..errors import IncompatibleError, InputError
from ..recurrence.directions import KeyValue
from ..recurrence.retractions import Cayley
from .systems import cell_of, describe, posed
from .turning import enclosing_radius

__all__ = ["KeyValueStatistics", "eigenvalue_spread", "key_value_statistics", "memory_horizon"]


def eigenvalue_spread(system: Any) -> float:
    """λ̄_max - λ̄_min, how far apart two M can be (eq:unitary_max_dist); for complex ones, the diameter of their disc."""
    with torch.no_grad():
        return 2 * enclosing_radius(_adpt(system).spectrum())


def memory_horizon(exponents: Tensor | float, left: float = math.exp(-1)) -> Tensor:
    """After how many steps a perturbation has shrunk to `left` of itself; infinite where it does not shrink.

    Args:
        exponents: Lyapunov exponents, or ln |λ̄|.
        left: The share that counts as forgotten.
    """
    if not 0 < left < 1:
        raise InputError(f"left={left}: a share between 0 and 1, e.g. left=0.01.")
    values = torch.as_tensor(exponents)
    return torch.where(values < 0, math.log(left) / values, math.inf)


class KeyValueStatistics(NamedTuple):
    """Key and value along a trajectory, (batch, time, planes, heads)."""

    dot: Tensor  # key · value
    angle: Tensor  # how far M turns the state, in radians

    def __str__(self) -> str:
        return (
            f"k·v {float(self.dot.mean()):.3f} ± {float(self.dot.std()):.3f}, "
            f"angle {float(self.angle.mean()):.3f} ± {float(self.angle.std()):.3f} rad"
        )


@torch.no_grad()
def key_value_statistics(system: Any, inputs: Tensor, *, state: Tensor | ADPTState | None = None) -> KeyValueStatistics:
    """The dot product of key and value, and the angle of the rotation, at every step."""
    cell = _adpt(system)
    if not cell.spec.conjugate.turns:
        raise IncompatibleError(f"{cell.spec.conjugate} does not turn: it has no key and value.")
    trajectory = posed(system, inputs, state)
    bound, run = cell.bind(), cell.stepper()
    entering, dots, angles = trajectory.state, [], []
    for drive in trajectory.drive.unbind(1):
        _, planes, beta = bound.evaluated(entering, bound.parts(drive))
        dots.append(torch.stack([_dot(plane, cell.spec.heads) for plane in planes], 1))
        step = torch.as_tensor(beta).reshape(-1) * (1 - dots[-1].square()).clamp(min=0).sqrt()
        angles.append(2 * (step / 2).atan() if isinstance(cell.spec.retraction, Cayley) else step)
        entering = run(entering, drive)
    return KeyValueStatistics(torch.stack(dots, 1), torch.stack(angles, 1))


def _dot(plane: KeyValue, heads: int) -> Tensor:
    dot = (plane.key * plane.value).sum(-1)
    return dot if heads > 1 else dot.unsqueeze(-1)


def _adpt(system: Any) -> ADPTCell:
    cell = cell_of(system)
    if not isinstance(cell, ADPTCell):
        raise IncompatibleError(
            f"{describe(cell)} has no Λ̄. Pass an ADPT layer or cell, without memory= or Stateful()."
        )
    return cell
