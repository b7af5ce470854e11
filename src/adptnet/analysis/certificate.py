"""Certificates: proved bounds on Jacobians and Lyapunov exponents, for every input or along one trajectory.

They are the paper's lemmas (lemma:J_singular_vals, coro:lipschitz, lemma:le_spectrum) with 2rβs in place
of 8βλ̄_max, where s <= κ(K) + κ(V) is the joint condition number of K and V, and with bounds on sums of exponents in
place of lemma:le_exact_match, which bounds single ones. Proofs are in docs/explanation/bounds.md.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from ..cells import (
    ADPTCell,
    ADPTSpec,
    ADPTState,
    CoupledCell,
    OrthogonalRNNCell,
    ReLURNNCell,
    StatefulCell,
    TanhRNNCell,
)
from ..recurrence.conjugates import Exact, Taylor
from ..recurrence.directions import FromInput, FromState, FromWholeState
from .ball import Ball
from .head_constants import HeadConstants, bound_deviation, bound_singular_value_shift, compute_head_constants
from .lyapunov import check_transient
from .trajectory import Trajectory, describe, make_trajectory, resolve_cell
from .trajectory_bounds import measure_trajectory

__all__ = ["Certificate", "certificate"]


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Bounds on the Jacobians J_t of a recurrence and on its Lyapunov exponents.

    A bound that is not known is infinite; `reasons` then says why.
    """

    bound: str  # which bound applies, in words
    reasons: tuple[str, ...]  # why no bound applies; empty if one does
    deviation: float  # upper bound on ‖J_t - M_t‖
    lower: Tensor  # (n,), descending: lower bounds on the singular values of J_t
    upper: Tensor  # (n,), descending: upper bounds on the singular values of J_t
    exponents: tuple[float, float]  # interval that contains every exponent
    upper_sums: Tensor  # (n,): upper bounds on the sum of the k largest exponents
    lower_sums: Tensor  # (n,): lower bounds on the sum of the k smallest exponents
    lipschitz: float  # Lipschitz constant of the step with respect to the state
    paper: float  # the paper's bound on ‖J_t - M_t‖; infinite where the paper has none
    ball: Ball | None  # bounds the norm of the state, for any weights of K and V; None where there is no such bound
    everywhere: bool = True  # holds for every input and state; otherwise along the given trajectories only

    @property
    def holds(self) -> bool:
        """Whether bounds on the Jacobian and the exponents are known."""
        return not self.reasons

    @property
    def contracts(self) -> bool:
        """Whether any two states come closer at every step. Bounds along a trajectory alone do not show it."""
        return self.everywhere and self.lipschitz < 1

    def __str__(self) -> str:
        if self.reasons:
            lines = ["no bound on the Jacobian holds for every input:"]
            lines += [f"  - {reason}" for reason in self.reasons]
            lines.append("certificate(layer, inputs) gives the bounds along one trajectory.")
        else:
            low, high = self.exponents
            lines = [
                f"bound: {self.bound}",
                *self._format_deviation(),
                f"  singular values of J in [{float(self.lower[-1]):.4g}, {float(self.upper[0]):.4g}]",
                f"  Lyapunov exponents in [{low:.4g}, {high:.4g}], their sum at most {float(self.upper_sums[-1]):.4g}",
                f"  Lipschitz constant of a step {self.lipschitz:.4g}: "
                + ("any two states come closer" if self.contracts else "contraction is not certified")
                if self.everywhere
                else f"  ‖J_t‖ <= {self.lipschitz:.4g} along the trajectory",
            ]
        if self.ball is not None:
            factor, radius = self.ball.contraction, self.ball.radius(1.0)
            lines.append(
                f"  the norm of the state is asymptotically at most {radius:.4g} times that of the largest drive"
                if factor < 1
                else f"  the state may grow by a factor of {factor:.4g} per step"
            )
        return "\n".join(lines)

    def _format_deviation(self) -> list[str]:
        if math.isinf(self.deviation):
            return []  # there is no M
        paper = f" (paper: {self.paper:.4g})" if self.paper < math.inf else ""
        return [f"  ‖J - M‖ <= {self.deviation:.4g}{paper}"]


def certificate(
    system: Any,
    inputs: Tensor | None = None,
    *,
    state: Tensor | ADPTState | None = None,
    steps: int | None = None,
    transient: int = 0,
) -> Certificate:
    """Return bounds that hold for every input; with `inputs` or `steps`, bounds that hold along that trajectory.

    Bounds for every input follow from the weights alone. They cover ADPT cells as far as there is a proof (bounds.md),
    coupled cells and plain RNNs. Bounds along a trajectory cover any cell: the singular values of J_t are computed at
    every step, and Horn's inequality gives bounds on the exponents of that window.

    Args:
        system: A layer or a cell; with a trajectory also a function, as for `lyapunov_exponents`.
        inputs: (batch, time, features), or (time, features) for one sequence.
        state: Initial states.
        steps: Number of steps, for a system without inputs.
        transient: Number of initial steps to leave out.
    """
    if inputs is not None or steps is not None:
        return _certify_trajectory(make_trajectory(system, inputs, state, steps), transient)
    cell = resolve_cell(system)
    with torch.no_grad():
        if isinstance(cell, ADPTCell):
            return _certify_adpt(cell)
        if isinstance(cell, CoupledCell):
            return _certify_coupled(cell)
        if isinstance(cell, TanhRNNCell | ReLURNNCell | OrthogonalRNNCell):
            weight = torch.linalg.svdvals(cell.recurrent.dense().double())
            bound = "the slope of the activation is at most 1, so σ_i(J) <= σ_i(W)"
            return _make_certificate(bound, torch.zeros_like(weight), weight)
        size = cell.state_size
        if isinstance(cell, StatefulCell):
            reason = (
                "Stateful(): the stored rotation accumulates the directions of all steps, and so do its derivatives"
            )
            return _make_empty(
                (reason,), size, _make_ball(cell.memoryless.spec, compute_head_constants(cell.memoryless))
            )
        return _make_empty((f"{describe(cell)}: its Jacobians have no bound known in advance",), size, None)


def _certify_adpt(cell: ADPTCell) -> Certificate:
    spec, heads = cell.spec, compute_head_constants(cell)
    reasons = _find_obstacles(spec, heads)
    ball = _make_ball(spec, heads)
    if reasons:
        return _make_empty(reasons, cell.state_size, ball)
    moduli = torch.cat([head.moduli for head in heads])
    deviations = [bound_deviation(spec, head) for head in heads]
    largest = max(deviations)
    shifts = torch.cat(
        [
            # where K and V see the whole state, J - M is not block-diagonal
            torch.full_like(
                head.moduli,
                (largest if spec.direction.sees_whole_state else deviation) + bound_singular_value_shift(spec, head),
            )
            for head, deviation in zip(heads, deviations, strict=True)
        ]
    )
    lower, upper = ((moduli + sign * shifts).clamp(min=0).sort(descending=True).values for sign in (-1, 1))
    certified = _make_certificate(_describe_bound(spec, heads), lower, upper)
    return dataclasses.replace(certified, deviation=largest, paper=_paper_bound(spec, heads), ball=ball)


def _paper_bound(spec: ADPTSpec, heads: list[HeadConstants]) -> float:
    """Return 4βλ̄_max (κ(K) + κ(V)), 8βλ̄_max for orthogonal K and V (lemma:J_singular_vals, eq:KV_update_lemm1)."""
    covered = isinstance(spec.conjugate, Exact) and isinstance(spec.direction, FromState)
    if not covered or spec.spectrum.is_complex or spec.spectrum.has_negative or spec.spectrum.grows:
        return math.inf
    return max(4 * head.beta * float(head.moduli.max()) * sum(head.condition_numbers) for head in heads)


def _describe_bound(spec: ADPTSpec, heads: list[HeadConstants]) -> str:
    if isinstance(spec.direction, FromInput) or not spec.conjugate.has_directions:
        return "J = M, since the rotation does not depend on the state"
    if all(head.beta == 0 or head.radius == 0 for head in heads):
        return "J = M, since β is 0 or the eigenvalues are all equal"
    planes = f", summed over {spec.conjugate.planes} planes" if spec.conjugate.planes > 1 else ""
    largest = ", the largest over the heads" if len(heads) > 1 else ""
    widened = (
        f", widened for a Taylor form of order {spec.conjugate.order}" if isinstance(spec.conjugate, Taylor) else ""
    )
    soft = isinstance(spec.direction, FromWholeState) and spec.direction.softness > 0
    matrices = "[K; εI] and [V; εI]" if soft else "K and V"
    return f"2rβs with s <= κ(K) + κ(V), the joint condition number of {matrices}{planes}{largest}{widened}"


def _find_obstacles(spec: ADPTSpec, heads: list[HeadConstants]) -> tuple[str, ...]:
    """Return the reasons why no bound holds for every input (docs/explanation/deviations.md, point 13)."""
    if (
        isinstance(spec.direction, FromInput)
        or not spec.conjugate.has_directions
        or all(head.beta == 0 for head in heads)
    ):
        return ()
    reasons = []
    if spec.rotation_aware:
        reasons.append("rotation_aware=True: J has a term ‖drive‖/‖x‖, which is unbounded")
    if all(head.radius == 0 for head in heads):  # M = λ̄ I for any directions
        return tuple(reasons)
    direction = spec.direction
    if isinstance(direction, FromState) and direction.relu:
        reasons.append(
            "FromState(relu=True): J has a term ‖x‖/‖ReLU(x)‖, which is unbounded (the paper says otherwise)"
        )
    if isinstance(direction, FromState) and direction.spike is not None:
        reasons.append("FromState(spike=...): the step is discontinuous where a component crosses the threshold")
    if direction.layer_norm:
        reasons.append("layer_norm=True: the norm divides by a standard deviation that may be near zero")
    if direction.dot is not None:
        reasons.append("dot=...: where Kx and Vx are almost parallel, the key rotates arbitrarily fast")
    if spec.projection.bias:
        reasons.append("a bias on K and V: Kx + bias may be near zero for a large x")
    if not direction.keeps_lemmas and isinstance(direction, FromWholeState):
        reasons.append(
            f"{direction}: K_h and V_h have null spaces, near which key and value rotate arbitrarily fast; "
            "softness=0.1 gives a bound"
        )
    elif any(math.isinf(head.rotation_rate) and head.beta > 0 and head.radius > 0 for head in heads):
        reasons.append("singular K or V, κ = ∞: near their null space, key and value rotate arbitrarily fast")
    return tuple(reasons)


def _make_ball(spec: ADPTSpec, heads: list[HeadConstants]) -> Ball:
    """Return the ball that follows from ‖M‖ = |λ̄|_max; a Taylor form of M adds its `bound_singular_value_shift`."""
    factor = max(float(head.moduli.max()) + bound_singular_value_shift(spec, head) for head in heads)
    return Ball(
        torch.tensor([[factor]], dtype=torch.float64), torch.ones(1, dtype=torch.float64), (spec.size,), spec.size
    )


def _certify_coupled(cell: CoupledCell) -> Certificate:
    """Bound the norms of the fast and slow states by a 2×2 matrix, whose spectral radius bounds the exponents."""
    fast = _certify_adpt(cell.fast)
    gain = cell.fast.drive.gain(cell.fast.spectrum).modulus().double()
    decay = cell.slow().real.double()
    feed = float((gain * cell.feedback.double().abs()).max())
    charge, slowest, fastest = float((1 - decay).max()), float(decay.max()), float(decay.min())

    def norm_matrix(largest: float) -> Tensor:
        return torch.tensor([[largest, feed], [charge * largest, slowest + charge * feed]], dtype=torch.float64)

    assert fast.ball is not None
    entry = torch.tensor([1.0, charge], dtype=torch.float64)
    size = cell.spec.size
    ball = Ball(norm_matrix(float(fast.ball.transition)), entry, (size, size), size)
    if not fast.holds:
        return _make_empty(fast.reasons, cell.state_size, ball)
    growth = norm_matrix(fast.lipschitz)
    upper = torch.full((cell.state_size,), float(torch.linalg.matrix_norm(growth, 2)), dtype=torch.float64)
    lower = torch.zeros_like(upper)
    low = -math.inf
    smallest = float(fast.lower[-1])
    if smallest > 0 and fastest > 0:  # then J is invertible, and its inverse has a bound of the same form
        inverse_growth = torch.tensor(
            [[(1 + feed * charge / fastest) / smallest, feed / (fastest * smallest)], [charge / fastest, 1 / fastest]],
            dtype=torch.float64,
        )
        lower = torch.full_like(upper, 1 / float(torch.linalg.matrix_norm(inverse_growth, 2)))
        low = -math.log(float(torch.linalg.eigvals(inverse_growth).abs().max()))
    high = math.log(float(torch.linalg.eigvals(growth).abs().max()))
    bound = f"for the fast state {fast.bound}; coupled to the slow memory by a 2×2 matrix of norms"
    certified = _make_certificate(bound, lower, upper)
    count = torch.arange(1, cell.state_size + 1, dtype=torch.float64)
    return dataclasses.replace(
        certified,
        deviation=fast.deviation,
        exponents=(low, high),
        upper_sums=count * high,
        lower_sums=count * low,
        ball=ball,
    )


def _make_certificate(bound: str, lower: Tensor, upper: Tensor) -> Certificate:
    """Return the certificate for singular values between `lower` and `upper`, both descending."""
    return Certificate(
        bound=bound,
        reasons=(),
        deviation=math.inf,
        lower=lower,
        upper=upper,
        exponents=(float(lower[-1].log()), float(upper[0].log())),
        upper_sums=upper.log().cumsum(0),
        lower_sums=lower.log().flip(0).cumsum(0),
        lipschitz=float(upper[0]),
        paper=math.inf,
        ball=None,
    )


def _make_empty(reasons: tuple[str, ...], size: int, ball: Ball | None) -> Certificate:
    """Return a certificate without bounds on the Jacobian."""
    upper = torch.full((size,), math.inf, dtype=torch.float64)
    return dataclasses.replace(_make_certificate("none", torch.zeros_like(upper), upper), reasons=reasons, ball=ball)


def _certify_trajectory(trajectory: Trajectory, transient: int) -> Certificate:
    check_transient(transient, trajectory.steps)
    measured = measure_trajectory(trajectory, transient)
    count = len(trajectory.state)
    bound = f"σ(J_t) along {'this trajectory' if count == 1 else f'these {count} trajectories'}"
    means = measured.mean_logs
    return dataclasses.replace(
        _make_certificate(bound, measured.lower, measured.upper),
        deviation=measured.deviation,
        exponents=(float(means[:, -1].min()), float(means[:, 0].max())),
        upper_sums=means.cumsum(1).amax(0),
        lower_sums=means.flip(1).cumsum(1).amin(0),
        everywhere=False,
    )
