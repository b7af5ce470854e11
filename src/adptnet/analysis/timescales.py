"""Statistics of timescales and rotations: eigenvalue spread, memory horizon, angle between key and value."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cells import ADPTState
from ..cells.structure import make_step
from ..errors import IncompatibleError, InputError
from ..recurrence.directions import KeyValue
from ..recurrence.retractions import Cayley
from ..recurrence.step import evaluate_plane, split_drive
from .head_constants import enclosing_radius
from .trajectory import make_trajectory, resolve_adpt_cell

__all__ = ["KeyValueStatistics", "eigenvalue_spread", "key_value_statistics", "memory_horizon"]


def eigenvalue_spread(system: Any) -> float:
    """Return λ̄_max - λ̄_min, an upper bound on ‖M(x) - M(y)‖ for two states x and y (eq:unitary_max_dist).

    For complex eigenvalues it is the diameter of the smallest disc, centred on the real axis, that contains them.

    Args:
        system: An ADPT layer or cell.
    """
    with torch.no_grad():
        return 2 * enclosing_radius(resolve_adpt_cell(system, "eigenvalue_spread").spectrum())


def memory_horizon(exponents: Tensor | float, left: float = math.exp(-1)) -> Tensor:
    """Return the number of steps after which a perturbation has decayed to a fraction `left`.

    Args:
        exponents: Lyapunov exponents, or ln |λ̄|.
        left: The fraction that remains, between 0 and 1.

    Returns:
        A tensor shaped as `exponents`; infinite where a perturbation does not decay.
    """
    if not 0 < left < 1:
        raise InputError(f"left={left}: must be a fraction between 0 and 1, e.g. left=0.01.")
    values = torch.as_tensor(exponents)
    return torch.where(values < 0, math.log(left) / values, math.inf)


class KeyValueStatistics(NamedTuple):
    """Statistics of key and value along a trajectory, (batch, time, planes, heads)."""

    dot: Tensor  # key · value
    angle: Tensor  # rotation angle of Q, in radians

    def __str__(self) -> str:
        return (
            f"k·v {float(self.dot.mean()):.3f} ± {float(self.dot.std()):.3f}, "
            f"angle {float(self.angle.mean()):.3f} ± {float(self.angle.std()):.3f} rad"
        )


@torch.no_grad()
def key_value_statistics(system: Any, inputs: Tensor, *, state: Tensor | ADPTState | None = None) -> KeyValueStatistics:
    """Return the dot product of key and value and the rotation angle at every step.

    Args:
        system: An ADPT layer or cell with a rotation.
        inputs: (batch, time, features), or (time, features) for one sequence.
        state: Initial states.
    """
    cell = resolve_adpt_cell(system, "key_value_statistics")
    if not cell.spec.conjugate.has_directions:
        raise IncompatibleError(f"{cell.spec.conjugate} does not rotate: it has no key and value.")
    trajectory = make_trajectory(system, inputs, state)
    parameters, run = cell.evaluate(), make_step(cell)
    entering, dots, angles = trajectory.state, [], []
    for drive in trajectory.drive.unbind(1):
        _, planes, beta = evaluate_plane(parameters, entering, split_drive(parameters, drive))
        dots.append(torch.stack([_dot(plane, cell.spec.heads) for plane in planes], 1))
        lengths = [_squared_lengths(plane, cell.spec.heads) for plane in planes]
        step = torch.as_tensor(beta).reshape(-1) * (torch.stack(lengths, 1) - dots[-1].square()).clamp(min=0).sqrt()
        angles.append(2 * (step / 2).atan() if isinstance(cell.spec.retraction, Cayley) else step)
        entering = run(entering, drive)
    return KeyValueStatistics(torch.stack(dots, 1), torch.stack(angles, 1))


def _squared_lengths(plane: KeyValue, heads: int) -> Tensor:
    """Return ‖key‖² ‖value‖²: 1 for unit vectors, less if `softness` is positive or one of them is zero."""
    squared = plane.key.square().sum(-1) * plane.value.square().sum(-1)
    return squared if heads > 1 else squared.unsqueeze(-1)


def _dot(plane: KeyValue, heads: int) -> Tensor:
    dot = (plane.key * plane.value).sum(-1)
    return dot if heads > 1 else dot.unsqueeze(-1)
