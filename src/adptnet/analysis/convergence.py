"""How fast Newton iterations over a whole sequence converge: local errors, their sum, and the quadratic basin.

The paper's terms (table:error_summary, eq:total_approx_error, eq:quad_basin), measured, beside what is proved of them
(docs/explanation/bounds.md).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cells import ADPTCell, ADPTState
from ..errors import IncompatibleError, InputError
from ..recurrence.conjugates import Taylor, nearest_blocks
from .bounds import certificate
from .jacobians import stretches
from .systems import cell_of, describe, posed
from .turning import turnings

__all__ = ["LocalErrors", "accumulated_error", "jacobian_lipschitz", "local_errors", "overshoot", "quadratic_basin"]


class LocalErrors(NamedTuple):
    """How far the transitions of the solvers are from each other at every step of a trajectory, (batch, time).

    The first five are norms of matrices, the paper's terms; the rest are what they do to the state that enters.
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
    derivative_to_state: Tensor  # ‖(J - M) s‖: zero, since the step is homogeneous
    state_norm: Tensor  # ‖s‖


@torch.no_grad()
def local_errors(
    system: Any, inputs: Tensor | None = None, *, state: Tensor | ADPTState | None = None, steps: int | None = None
) -> LocalErrors:
    """The local errors of Conv-, Forward- and Quasi-DEER along a trajectory (table:error_summary, eq:approx_error).

    The paper's product of a norm and ‖s‖ is an upper bound: (J - M) s = 0, so ε^der does not act against DEER at all
    (docs/explanation/deviations.md, point 15).
    """
    cell = _adpt(system, "local_errors")
    trajectory = posed(system, inputs, state, steps)
    eigen = cell.spectrum().dense()
    if cell.start is not None:
        start = cell.start.dense().to(eigen.dtype)
        eigen = start @ eigen @ start.mT
    pairs = cell.spec.spectrum.is_complex
    parts: list[LocalErrors] = []
    for stretch in stretches(trajectory):
        states, full = stretch.entering, stretch.jacobians
        conjugate = cell.conjugate(states, stretch.drive).dense().expand_as(full)
        constant = eigen.expand_as(full)
        quasi, forward = (nearest_blocks(matrices, pairs).dense() for matrices in (full, conjugate))
        parts.append(
            LocalErrors(
                similarity=_norm(constant - conjugate),
                derivative=_norm(full - conjugate),
                forward=_norm(forward - constant),
                diagonal=_norm(conjugate - forward),
                derivative_diagonal=_norm(quasi - forward),
                conv_to_deer=_moved(constant - full, states),
                forward_to_deer=_moved(forward - full, states),
                quasi_to_deer=_moved(quasi - full, states),
                conv_to_quasi=_moved(constant - quasi, states),
                forward_to_quasi=_moved(forward - quasi, states),
                derivative_to_state=_moved(full - conjugate, states),
                state_norm=states.norm(dim=-1),
            )
        )
    whole = (torch.cat(values, 1) for values in zip(*parts, strict=True))
    return LocalErrors(*(values if trajectory.batched else values.squeeze(0) for values in whole))


def accumulated_error(local: Tensor, growth: float) -> tuple[Tensor, Tensor]:
    """Local errors carried on by a factor `growth` a step: at each step (eq:error_per_timestep), and in all.

    Args:
        local: (..., time), such as `LocalErrors.conv_to_deer`.
        growth: σ̃_max, such as `certificate(layer).lipschitz`.

    Returns:
        (..., time), and its sum over time (...) (eq:total_approx_error).
    """
    if not 0 <= growth < math.inf:
        raise InputError(
            f"growth={growth}: a finite factor from 0. Where certificate(layer) has none, take the one along a "
            "trajectory: certificate(layer, inputs).lipschitz."
        )
    if not local.dim() or not local.shape[-1]:
        raise InputError(f"local errors are (..., time), of at least one step; got shape {tuple(local.shape)}.")
    error, errors = torch.zeros_like(local[..., 0]), []
    for each in local.unbind(-1):
        error = growth * error + each
        errors.append(error)
    along = torch.stack(errors, -1)
    return along, along.sum(-1)


def quadratic_basin(largest_exponent: float | Tensor, steps: int, lipschitz: float, overshoot: float = 1.0) -> float:
    """How small the residual ‖r(s)‖₂ must be for DEER to converge quadratically (eq:quad_basin).

    2/(a² L) ((e^α - 1)/(e^{αT} - 1))², which is 2/(a² L T²) at α = 0.

    Args:
        largest_exponent: α, the largest Lyapunov exponent.
        steps: T.
        lipschitz: L, of the Jacobian; see `jacobian_lipschitz`.
        overshoot: a ≥ 1; see `overshoot`.
    """
    largest_exponent = _number(largest_exponent)
    if not (steps >= 1 and lipschitz >= 0 and overshoot >= 1):
        raise InputError(f"steps={steps}, lipschitz={lipschitz}, overshoot={overshoot}: need ≥ 1, ≥ 0 and ≥ 1.")
    if lipschitz == 0:
        return math.inf  # a linear system: one iteration
    if largest_exponent * steps > 700:
        return 0.0  # below the smallest number
    grown = steps if largest_exponent == 0 else math.expm1(largest_exponent * steps) / math.expm1(largest_exponent)
    return 2 / (overshoot**2 * lipschitz * grown**2)


def jacobian_lipschitz(system: Any, smallest_norm: float) -> float:
    """L(ρ): how fast J changes with the state, where ‖x‖ (in each head) is at least ρ = `smallest_norm`.

    ‖J(x) - J(y)‖ ≤ L(ρ) ‖x - y‖ if the segment between x and y stays outside the ball of radius ρ. J has degree zero,
    so L(ρ) grows as 1/ρ and there is none for all states (deviations.md, point 15). With s the joint condition of
    K and V, L(ρ) = 2rβ s (2 + (3β + 2/√3) s) / ρ (docs/explanation/bounds.md).
    """
    cell = _adpt(system, "jacobian_lipschitz")
    held = certificate(cell)
    if not held.holds or cell.spec.conjugate == Taylor(2):
        why = held.reasons[0] if held.reasons else "the second-order Taylor form has no such constant here"
        raise IncompatibleError(f"no constant holds for all states: {why}.")
    if not smallest_norm > 0:
        raise InputError(f"smallest_norm={smallest_norm}: J turns without limit at the zero state. Pass ρ > 0.")
    with torch.no_grad():
        heads = turnings(cell)
    constants = [
        2 * h.radius * h.beta * h.rate * (2 + (3 * h.beta + 2 / math.sqrt(3)) * h.rate) if h.radius * h.beta else 0.0
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
    """The smallest a ≥ 1 with ‖J_{t+k-1} … J_t‖ ≤ a e^{αk} along a trajectory (eq:DEER_As, with the missing power k).

    Measured from `starts` places t, evenly spread, to the end: a larger number can only make it larger.
    """
    largest_exponent = _number(largest_exponent)
    if starts < 1:
        raise InputError(f"starts={starts}: at least one place to start from.")
    trajectory = posed(system, inputs, state, steps)
    begins = {round(i * trajectory.steps / starts) for i in range(min(starts, trajectory.steps))}
    batch, size = trajectory.state.shape
    eye = torch.eye(size, dtype=trajectory.state.dtype, device=trajectory.state.device).expand(batch, size, size)
    running: Tensor | None = None  # (places, batch, n, n), divided by e^{αk} as it goes
    largest = 1.0
    for stretch in stretches(trajectory):
        for offset, matrix in enumerate(stretch.jacobians.unbind(1)):
            if stretch.start + offset in begins:
                running = eye.unsqueeze(0) if running is None else torch.cat((running, eye.unsqueeze(0)))
            assert running is not None  # the first step is always among the places
            running = matrix @ running * math.exp(-largest_exponent)
            largest = max(largest, float(torch.linalg.matrix_norm(running, 2).max()))
    return largest


def _number(exponent: float | Tensor) -> float:
    """One exponent as a number."""
    if isinstance(exponent, Tensor) and exponent.numel() != 1:
        raise InputError(
            f"largest_exponent has shape {tuple(exponent.shape)}; it is one number. Pass spectrum.largest.max()."
        )
    number = float(exponent.detach() if isinstance(exponent, Tensor) else exponent)
    if not math.isfinite(number):
        raise InputError(f"largest_exponent={number}: must be finite.")
    return number


def _adpt(system: Any, what: str) -> ADPTCell:
    cell = cell_of(system)
    if not isinstance(cell, ADPTCell):
        raise IncompatibleError(f"{what} is about M = QΛ̄Q'; {describe(cell)} has no M. Pass an ADPT layer or cell.")
    return cell


def _norm(matrices: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.matrix_norm(matrices, 2)
    return norms


def _moved(matrices: Tensor, states: Tensor) -> Tensor:
    moved: Tensor = (matrices @ states.unsqueeze(-1)).squeeze(-1).norm(dim=-1)
    return moved
