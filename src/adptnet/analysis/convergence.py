"""Convergence of Newton iterations over a whole sequence: local errors, their sum, and the quadratic basin.

These are the paper's terms (table:error_summary, eq:total_approx_error, eq:quad_basin), measured along a trajectory.
Proofs are in docs/explanation/bounds.md.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cells import ADPTState
from ..errors import IncompatibleError, InputError
from ..recurrence.conjugates import Taylor, nearest_blocks
from ..recurrence.step import split_drive
from .certificate import certificate
from .head_constants import compute_head_constants
from .jacobians import iterate_chunks
from .trajectory import make_trajectory, resolve_adpt_cell

__all__ = ["LocalErrors", "accumulated_error", "jacobian_lipschitz", "local_errors", "overshoot", "quadratic_basin"]


class LocalErrors(NamedTuple):
    """Differences between the transition matrices of the solvers at every step of a trajectory, (batch, time).

    The first five are matrix norms, the paper's terms. The others are norms of the difference applied to the entering
    state s. With an input-driven phase P, Λ̄, M and diag M stand for P Λ̄, P M and P diag M.
    """

    similarity: Tensor  # ε^sim = ‖Λ̄ - M‖
    derivative: Tensor  # ε^der = ‖J - M‖
    forward: Tensor  # ε^fwd = ‖diag M - Λ̄‖
    diagonal: Tensor  # ‖M - diag M‖
    derivative_diagonal: Tensor  # ‖diag J - diag M‖
    conv_to_deer: Tensor  # ‖(Λ̄ - J) s‖
    forward_to_deer: Tensor  # ‖(diag M - J) s‖
    quasi_to_deer: Tensor  # ‖(diag J - J) s‖
    conv_to_quasi: Tensor  # ‖(Λ̄ - diag J) s‖
    forward_to_quasi: Tensor  # ‖(diag M - diag J) s‖
    derivative_to_state: Tensor  # ‖(J - M) s‖: zero, because the step is homogeneous
    state_norm: Tensor  # ‖s‖


@torch.no_grad()
def local_errors(
    system: Any, inputs: Tensor | None = None, *, state: Tensor | ADPTState | None = None, steps: int | None = None
) -> LocalErrors:
    """Measure the local errors of Conv-, Forward- and Quasi-DEER along a trajectory.

    These are the terms of table:error_summary and eq:approx_error. The paper's product of a norm and ‖s‖ is an upper
    bound: (J - M) s = 0, so ε^der does not contribute to the difference from DEER (docs/explanation/deviations.md,
    point 15).

    Args:
        system: An ADPT layer or cell.
        inputs: (batch, time, features), or (time, features) for one sequence; None for an autonomous system.
        state: Initial states.
        steps: Number of steps, for a system without inputs.
    """
    cell = resolve_adpt_cell(system, "local_errors")
    trajectory = make_trajectory(system, inputs, state, steps)
    eigen = cell.spectrum().dense()
    if cell.start is not None:
        start = cell.start.dense().to(eigen.dtype)
        eigen = start @ eigen @ start.mT
    pairs = cell.spec.spectrum.is_complex
    parts: list[LocalErrors] = []
    for chunk in iterate_chunks(trajectory):
        states, full = chunk.entering, chunk.jacobians
        conjugate = cell.conjugate(states, chunk.drive).dense().expand_as(full)
        phase = split_drive(cell.evaluate(), chunk.drive).phase
        constant = eigen.expand_as(full) if phase is None else phase.mm(eigen)
        quasi = nearest_blocks(full, pairs or phase is not None).dense()
        if phase is None:
            forward = nearest_blocks(conjugate, pairs).dense()
        else:
            forward = phase.mm(nearest_blocks(phase.transpose().mm(conjugate), pairs).dense())
        parts.append(
            LocalErrors(
                similarity=_spectral_norm(constant - conjugate),
                derivative=_spectral_norm(full - conjugate),
                forward=_spectral_norm(forward - constant),
                diagonal=_spectral_norm(conjugate - forward),
                derivative_diagonal=_spectral_norm(quasi - forward),
                conv_to_deer=_norm_on_state(constant - full, states),
                forward_to_deer=_norm_on_state(forward - full, states),
                quasi_to_deer=_norm_on_state(quasi - full, states),
                conv_to_quasi=_norm_on_state(constant - quasi, states),
                forward_to_quasi=_norm_on_state(forward - quasi, states),
                derivative_to_state=_norm_on_state(full - conjugate, states),
                state_norm=states.norm(dim=-1),
            )
        )
    fields = (torch.cat(values, 1) for values in zip(*parts, strict=True))
    return LocalErrors(*(values if trajectory.batched else values.squeeze(0) for values in fields))


def accumulated_error(local: Tensor, growth: float) -> tuple[Tensor, Tensor]:
    """Propagate local errors by a factor `growth` per step and sum them.

    Args:
        local: (..., time) local errors, such as `LocalErrors.conv_to_deer`.
        growth: σ̃_max, such as `certificate(layer).lipschitz`.

    Returns:
        The error at each step, (..., time) (eq:error_per_timestep), and its sum over time (eq:total_approx_error).
    """
    if not 0 <= growth < math.inf:
        raise InputError(
            f"growth={growth}: must be finite and at least 0. Where certificate(layer) has no bound, take the one "
            "along a trajectory: certificate(layer, inputs).lipschitz."
        )
    if not local.dim() or not local.shape[-1]:
        raise InputError(f"local errors are (..., time), of at least one step; got shape {tuple(local.shape)}.")
    error, errors = torch.zeros_like(local[..., 0]), []
    for local_error in local.unbind(-1):
        error = growth * error + local_error
        errors.append(error)
    along = torch.stack(errors, -1)
    return along, along.sum(-1)


def quadratic_basin(largest_exponent: float | Tensor, steps: int, lipschitz: float, overshoot: float = 1.0) -> float:
    """Return the residual ‖r(s)‖₂ below which DEER converges quadratically (eq:quad_basin).

    It is 2/(a² L) ((e^α - 1)/(e^{αT} - 1))², which is 2/(a² L T²) at α = 0.

    Args:
        largest_exponent: α, the largest Lyapunov exponent.
        steps: T, the length of the sequence.
        lipschitz: L, the Lipschitz constant of the Jacobian; see `jacobian_lipschitz`.
        overshoot: a ≥ 1; see `overshoot`.
    """
    largest_exponent = _to_float(largest_exponent)
    if not (steps >= 1 and lipschitz >= 0 and overshoot >= 1):
        raise InputError(f"steps={steps}, lipschitz={lipschitz}, overshoot={overshoot}: need ≥ 1, ≥ 0 and ≥ 1.")
    if lipschitz == 0:
        return math.inf  # a linear system converges in one iteration
    if largest_exponent * steps > 700:
        return 0.0  # underflow
    grown = steps if largest_exponent == 0 else math.expm1(largest_exponent * steps) / math.expm1(largest_exponent)
    return 2 / (overshoot**2 * lipschitz * grown**2)


def jacobian_lipschitz(system: Any, smallest_norm: float) -> float:
    """Return L(ρ), a Lipschitz constant of the Jacobian outside the ball of radius ρ = `smallest_norm`.

    ‖J(x) - J(y)‖ ≤ L(ρ) ‖x - y‖ if the segment between x and y stays outside the ball of radius ρ, in each head (as a
    whole, for directions from the whole state). J is
    homogeneous of degree zero, so L(ρ) grows as 1/ρ and no constant holds for all states (deviations.md, point 15).
    With s the joint condition number of K and V, L(ρ) = 2rβ s (2 + (3β + 2/√3) s) / ρ (docs/explanation/bounds.md).

    Args:
        system: An ADPT layer or cell.
        smallest_norm: ρ, a positive lower bound on ‖x‖ in each head.

    Raises:
        IncompatibleError: The cell has no such constant.
    """
    cell = resolve_adpt_cell(system, "jacobian_lipschitz")
    certified = certificate(cell)
    if not certified.holds or cell.spec.conjugate == Taylor(2):
        why = certified.reasons[0] if certified.reasons else "none is proved for the second-order Taylor form"
        raise IncompatibleError(f"no constant holds for all states: {why}.")
    if not smallest_norm > 0:
        raise InputError(f"smallest_norm={smallest_norm}: J changes arbitrarily fast near the zero state. Pass ρ > 0.")
    with torch.no_grad():
        heads = compute_head_constants(cell)
    constants = [
        2 * h.radius * h.beta * h.rotation_rate * (2 + (3 * h.beta + 2 / math.sqrt(3)) * h.rotation_rate)
        if h.radius * h.beta
        else 0.0
        for h in heads
    ]
    return max(constants) / smallest_norm


@torch.no_grad()
def overshoot(
    system: Any,
    inputs: Tensor | None,
    largest_exponent: float | Tensor,
    *,
    state: Tensor | ADPTState | None = None,
    steps: int | None = None,
    starts: int = 16,
) -> float:
    """Measure the smallest a ≥ 1 with ‖J_{t+k-1} … J_t‖ ≤ a e^{αk} along a trajectory (eq:DEER_As, with its missing k).

    The products run from `starts` evenly spaced steps t to the end. More starts can only increase the result.

    Args:
        system: A layer, a cell or a function, as for `lyapunov_exponents`.
        inputs: (batch, time, features), or (time, features) for one sequence; None for an autonomous system.
        largest_exponent: α, the largest Lyapunov exponent.
        state: Initial states.
        steps: Number of steps, for a system without inputs.
        starts: Number of steps t from which products begin.
    """
    largest_exponent = _to_float(largest_exponent)
    if starts < 1:
        raise InputError(f"starts={starts}: must be at least 1.")
    trajectory = make_trajectory(system, inputs, state, steps)
    begins = {round(i * trajectory.steps / starts) for i in range(min(starts, trajectory.steps))}
    batch, size = trajectory.state.shape
    eye = torch.eye(size, dtype=trajectory.state.dtype, device=trajectory.state.device).expand(batch, size, size)
    running: Tensor | None = None  # (starts, batch, n, n): the products divided by e^{αk}
    largest = 1.0
    for chunk in iterate_chunks(trajectory):
        for offset, matrix in enumerate(chunk.jacobians.unbind(1)):
            if chunk.start + offset in begins:
                running = eye.unsqueeze(0) if running is None else torch.cat((running, eye.unsqueeze(0)))
            assert running is not None  # the first step is always among the starts
            running = matrix @ running * math.exp(-largest_exponent)
            largest = max(largest, float(torch.linalg.matrix_norm(running, 2).max()))
    return largest


def _to_float(exponent: float | Tensor) -> float:
    if isinstance(exponent, Tensor) and exponent.numel() != 1:
        raise InputError(
            f"largest_exponent has shape {tuple(exponent.shape)}; it is one number. Pass spectrum.largest.max()."
        )
    number = float(exponent.detach() if isinstance(exponent, Tensor) else exponent)
    if not math.isfinite(number):
        raise InputError(f"largest_exponent={number}: must be finite.")
    return number


def _spectral_norm(matrices: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.matrix_norm(matrices, 2)
    return norms


def _norm_on_state(matrices: Tensor, states: Tensor) -> Tensor:
    norms: Tensor = (matrices @ states.unsqueeze(-1)).squeeze(-1).norm(dim=-1)
    return norms
