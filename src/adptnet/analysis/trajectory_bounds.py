"""Bounds and singular values of the Jacobians at given states or along one trajectory.

Proofs are in docs/explanation/bounds.md.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cells import ADPTState
from ..errors import IncompatibleError, InputError
from ..recurrence.directions import Directions, FromInput, FromState
from .head_constants import bound_deviation, compute_head_constants
from .jacobians import iterate_chunks
from .trajectory import Trajectory, make_trajectory, resolve_adpt_cell

__all__ = ["TrajectoryBounds", "deviation_bounds", "measure_trajectory", "singular_value_shifts"]


class TrajectoryBounds(NamedTuple):
    """Extremes and means over the steps of one or more trajectories. Singular values are in descending order."""

    lower: Tensor  # (n,): smallest σ_i(J_t)
    upper: Tensor  # (n,): largest σ_i(J_t)
    deviation: float  # largest ‖J_t - M_t‖; infinite where the cell has no M
    mean_logs: Tensor  # (batch, n): mean over the steps of ln σ_i(J_t)


@torch.no_grad()
def measure_trajectory(trajectory: Trajectory, transient: int) -> TrajectoryBounds:
    """Return extremes and mean logarithms of the singular values of J_t over all steps after the first `transient`.

    Args:
        trajectory: The trajectory.
        transient: Number of initial steps to leave out.
    """
    batch, size = trajectory.state.shape
    logs = torch.zeros(batch, size, dtype=torch.float64)
    lower, upper = torch.full((size,), math.inf, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    deviation = 0.0
    for chunk in iterate_chunks(trajectory):
        skipped = max(0, transient - chunk.start)
        matrices = chunk.jacobians[:, skipped:].double()
        if not matrices.shape[1]:
            continue
        values = torch.linalg.svdvals(matrices)
        logs += values.log().sum(1).cpu()
        lower = torch.minimum(lower, values.amin((0, 1)).cpu())
        upper = torch.maximum(upper, values.amax((0, 1)).cpu())
        conjugate = trajectory.cell.structure().conjugate
        if conjugate is None:
            deviation = math.inf
        else:
            difference = matrices - conjugate(chunk.entering[:, skipped:], chunk.drive[:, skipped:]).dense().double()
            deviation = max(deviation, float(torch.linalg.matrix_norm(difference, 2).max()))
    return TrajectoryBounds(lower, upper, deviation, logs / (trajectory.steps - transient))


@torch.no_grad()
def deviation_bounds(system: Any, states: Tensor) -> Tensor:
    """Return the upper bound 2rβ (‖K‖‖x‖/‖Kx‖ + ‖V‖‖x‖/‖Vx‖) of ‖J - M‖ at each state x, without a Jacobian.

    It also holds where no certificate does: for singular K or V, and for directions from ReLU(x), which then replaces x
    in Kx and Vx. It grows without limit as ‖Kx‖/‖x‖ or ‖Vx‖/‖x‖ tends to zero. At x = 0, where J = M = Λ̄, it is 0.

    Args:
        system: An ADPT layer or cell.
        states: (..., n).

    Returns:
        (...), float64.

    Raises:
        IncompatibleError: Directions for which there is no such bound.
    """
    cell = resolve_adpt_cell(system, "deviation_bounds")
    spec = cell.spec
    if states.dim() < 1 or states.shape[-1] != spec.size:
        raise InputError(f"states have shape {tuple(states.shape)}; they must be (..., {spec.size}).")
    covered = isinstance(spec.direction, FromState) and spec.direction.spike is None and not spec.direction.layer_norm
    if isinstance(spec.direction, FromInput) or not spec.conjugate.has_directions:
        return states.new_zeros(states.shape[:-1], dtype=torch.float64)
    if not covered or spec.direction.dot is not None or spec.projection.bias or spec.rotation_aware:
        raise IncompatibleError(
            f"deviation_bounds covers directions computed from x or ReLU(x), without a bias; got {spec.direction}, "
            f"projection={spec.projection}, rotation_aware={spec.rotation_aware}. "
            "Use certificate(layer, inputs).deviation, which measures ‖J - M‖."
        )
    heads = compute_head_constants(cell)
    parts = states.double().unflatten(-1, (spec.heads, -1))
    largest = parts.abs().amax(
        -1, keepdim=True
    )  # divided out: the quotients do not depend on the scale, and squares of small numbers underflow
    parts = parts / torch.where(largest == 0, 1.0, largest)
    sources = spec.direction.source(parts.flatten(-2))
    total = torch.zeros_like(parts[..., 0])
    for directions in cell.directions:
        assert isinstance(directions, Directions)
        for projection in (directions.key_projection, directions.value_projection):
            weight = projection.dense().double()
            size = spec.size // spec.heads
            norms = [
                torch.linalg.matrix_norm(weight[i * size : (i + 1) * size, i * size : (i + 1) * size], 2)
                for i in range(spec.heads)
            ]
            reached = (sources @ weight.mT).unflatten(-1, (spec.heads, -1)).norm(dim=-1)
            quotient = torch.stack(norms) * parts.norm(dim=-1) / reached
            total = total + torch.where(largest.squeeze(-1) == 0, 0.0, quotient)  # at zero nothing rotates, and J = M
    factors = torch.tensor(
        [bound_deviation(spec, head._replace(rotation_rate=1.0)) for head in heads], dtype=torch.float64
    )
    return torch.where(factors == 0, 0.0, factors * total).amax(-1)


@torch.no_grad()
def singular_value_shifts(
    system: Any, inputs: Tensor | None = None, *, state: Tensor | ADPTState | None = None, steps: int | None = None
) -> Tensor:
    """Return Δ_i^(t) = σ_i(J_t) - |λ̄|_(i) at every step, both sorted in descending order (lemma:le_exact_match).

    Args:
        system: An ADPT layer or cell.
        inputs: (batch, time, features), or (time, features) for one sequence; None for an autonomous system.
        state: Initial states.
        steps: Number of steps, for a system without inputs.

    Returns:
        (batch, time, n), or (time, n) for one sequence.
    """
    cell = resolve_adpt_cell(system, "singular_value_shifts")
    trajectory = make_trajectory(system, inputs, state, steps)
    moduli = cell.spectrum().modulus().sort(descending=True).values
    shifts = torch.cat([torch.linalg.svdvals(s.jacobians) - moduli for s in iterate_chunks(trajectory)], 1)
    return shifts if trajectory.batched else shifts.squeeze(0)
