"""Certificates: what holds for every input, or why nothing does; and what holds along one trajectory.

The paper's lemmas (lemma:J_singular_vals, coro:lipschitz, lemma:le_spectrum) with an exact constant in place of
8βλ̄_max, and sums of exponents in place of lemma:le_exact_match. Proofs are in docs/explanation/bounds.md.
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
    Cell,
    CoupledCell,
    OrthogonalRNNCell,
    ReLURNNCell,
    StatefulCell,
    TanhRNNCell,
)
from ..errors import IncompatibleError, InputError
from ..recurrence.conjugates import Exact, Taylor
from ..recurrence.directions import Directions, FromInput, FromState
from .ball import Ball
from .jacobians import stretches
from .lyapunov import check_transient
from .systems import cell_of, describe, posed
from .turning import Turning, turnings

__all__ = ["Certificate", "certificate", "deviation_bounds", "singular_value_shifts"]


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Bounds on the Jacobians J_t of a recurrence and on its Lyapunov exponents.

    Where nothing is known a bound is infinite, and `reasons` says why.
    """

    bound: str  # what is in force, in words
    reasons: tuple[str, ...]  # why nothing is; empty if something is
    deviation: float  # ‖J_t - M_t‖ is at most this
    lower: Tensor  # (n,), descending: the i-th singular value of J_t is at least this
    upper: Tensor  # (n,), and at most this
    exponents: tuple[float, float]  # every exponent lies between these
    upper_sums: Tensor  # (n,): the k largest exponents sum to at most this
    lower_sums: Tensor  # (n,): the k smallest exponents sum to at least this
    lipschitz: float  # of the step, in the state
    paper: float  # the paper's bound on ‖J_t - M_t‖; infinite where the paper has none
    ball: Ball | None  # where the state stays, whatever the weights of K and V; None where it need not
    everywhere: bool = True  # for every input and state; otherwise at the states of one trajectory, or of some

    @property
    def holds(self) -> bool:
        return not self.reasons

    @property
    def contracts(self) -> bool:
        """Whether any two states come closer at every step. A trajectory alone cannot tell."""
        return self.everywhere and self.lipschitz < 1

    def __str__(self) -> str:
        if self.reasons:
            lines = ["no bound that holds for every input, because of"]
            lines += [f"  - {reason}" for reason in self.reasons]
            lines.append("certificate(layer, inputs) gives the bounds along one trajectory.")
        else:
            low, high = self.exponents
            lines = [
                f"in force: {self.bound}",
                *self._deviation_in_words(),
                f"  singular values of J in [{float(self.lower[-1]):.4g}, {float(self.upper[0]):.4g}]",
                f"  Lyapunov exponents in [{low:.4g}, {high:.4g}], their sum at most {float(self.upper_sums[-1]):.4g}",
                f"  Lipschitz constant of a step {self.lipschitz:.4g}: "
                + ("every two states come closer" if self.contracts else "contraction is not certified")
                if self.everywhere
                else f"  a step stretches by at most {self.lipschitz:.4g} here",
            ]
        if self.ball is not None:
            factor = self.ball.contraction
            lines.append(
                f"  the state stays within {self.ball.radius(1.0):.4g} times the largest drive"
                if factor < 1
                else f"  the state may grow by a factor of {factor:.4g} a step"
            )
        return "\n".join(lines)

    def _deviation_in_words(self) -> list[str]:
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
    """What holds for every input; with `inputs`, or a number of `steps`, what holds along that trajectory.

    For every input it needs the weights only, and covers ADPT cells as far as that can be proved (bounds.md),
    coupled cells and plain RNNs. Along a trajectory it covers any cell: σ(J_t) is measured at every step, and Horn's
    inequality turns it into bounds on the exponents of that window.

    Args:
        system: A layer or a cell; with a trajectory also a function, as for `lyapunov_exponents`.
        inputs: (batch, time, features), or (time, features) for one sequence.
        state: Where trajectories start.
        steps: How many steps, for a system without inputs.
        transient: Steps at the beginning that are left out.
    """
    if inputs is not None or steps is not None:
        return _along(system, inputs, state, steps, transient)
    cell = cell_of(system)
    with torch.no_grad():
        if isinstance(cell, ADPTCell):
            return _adpt(cell)
        if isinstance(cell, CoupledCell):
            return _coupled(cell)
        if isinstance(cell, TanhRNNCell | ReLURNNCell | OrthogonalRNNCell):
            weight = torch.linalg.svdvals(cell.recurrent.dense().double())
            bound = "the slope of the activation is at most 1, so σ_i(J) <= σ_i(W)"
            return _made(bound, torch.zeros_like(weight), weight)
        size = cell.state_size
        if isinstance(cell, StatefulCell):
            reason = (
                "Stateful(): the remembered rotation adds up the directions of all steps, and so do its derivatives"
            )
            return _nothing((reason,), size, _ball(cell.memoryless.spec, turnings(cell.memoryless)))
        return _nothing((f"{describe(cell)}: nothing is known about its Jacobians ahead of a trajectory",), size, None)


def _adpt(cell: ADPTCell) -> Certificate:
    spec, heads = cell.spec, turnings(cell)
    reasons = _refusals(spec, heads)
    ball = _ball(spec, heads)
    if reasons:
        return _nothing(reasons, cell.state_size, ball)
    moduli = torch.cat([head.moduli for head in heads])
    deviations = [_deviation(spec, head) for head in heads]
    shifts = torch.cat(
        [
            torch.full_like(head.moduli, deviation + _displacement(spec, head))
            for head, deviation in zip(heads, deviations, strict=True)
        ]
    )
    lower, upper = ((moduli + sign * shifts).clamp(min=0).sort(descending=True).values for sign in (-1, 1))
    found = _made(_in_words(spec, heads), lower, upper)
    return dataclasses.replace(found, deviation=max(deviations), paper=_paper(spec, heads), ball=ball)


def _deviation(spec: ADPTSpec, head: Turning) -> float:
    """‖J - M‖ ≤ 2rβ (κ(K) + κ(V)), the exact bound; in the form for both matrices at once, which is never larger."""
    if head.beta == 0 or head.radius == 0 or head.rate == 0:
        return 0.0
    second_order = 1 + 2 * head.beta if spec.conjugate == Taylor(2) else 1.0
    return 2 * head.radius * head.beta * head.rate * second_order


def _displacement(spec: ADPTSpec, head: Turning) -> float:
    """How far M itself is from having the moduli |λ̄| as singular values: only a Taylor form is."""
    if not isinstance(spec.conjugate, Taylor):
        return 0.0
    return 2 * head.radius * head.beta * (1 + head.beta if spec.conjugate.order == 2 else 1.0)


def _paper(spec: ADPTSpec, heads: list[Turning]) -> float:
    """4βλ̄_max (κ(K) + κ(V)), 8βλ̄_max for orthogonal ones (lemma:J_singular_vals, eq:KV_update_lemm1)."""
    covered = isinstance(spec.conjugate, Exact) and isinstance(spec.direction, FromState)
    if not covered or spec.spectrum.is_complex or spec.spectrum.has_negative or spec.spectrum.grows:
        return math.inf
    return max(4 * head.beta * float(head.moduli.max()) * sum(head.conditions) for head in heads)


def _in_words(spec: ADPTSpec, heads: list[Turning]) -> str:
    if isinstance(spec.direction, FromInput) or not spec.conjugate.turns:
        return "J = M, since nothing turns with the state"
    if all(head.beta == 0 or head.radius == 0 for head in heads):
        return "J = M, since β is 0 or the eigenvalues are all alike"
    if isinstance(spec.conjugate, Taylor):
        return f"the exact bound, widened for a Taylor form of order {spec.conjugate.order}"
    planes = f", summed over {spec.conjugate.planes} planes" if spec.conjugate.planes > 1 else ""
    each = ", the largest of the heads" if len(heads) > 1 else ""
    return f"the exact bound 2rβ(κ(K) + κ(V)){planes}{each}"


def _refusals(spec: ADPTSpec, heads: list[Turning]) -> tuple[str, ...]:
    """Why no bound holds for every input (docs/explanation/deviations.md, point 13)."""
    if isinstance(spec.direction, FromInput) or not spec.conjugate.turns or all(head.beta == 0 for head in heads):
        return ()
    reasons = []
    if spec.rotation_aware:
        reasons.append("rotation_aware=True: J gains ‖drive‖/‖x‖, which has no limit")
    if all(head.radius == 0 for head in heads):  # M = λ̄ I for any directions
        return tuple(reasons)
    direction = spec.direction
    if isinstance(direction, FromState) and direction.relu:
        reasons.append("FromState(relu=True): J gains ‖x‖/‖ReLU(x)‖, which has no limit (the paper says otherwise)")
    if isinstance(direction, FromState) and direction.spike is not None:
        reasons.append("FromState(spike=...): the step jumps where a number crosses the threshold")
    if direction.layer_norm:
        reasons.append("layer_norm=True: the norm divides by a deviation that may be near zero")
    if direction.dot is not None:
        reasons.append("dot=...: where Kx and Vx are almost parallel, the key turns without limit")
    if spec.projection.bias:
        reasons.append("a bias on K and V: Kx + bias may be near zero for a large x")
    if any(math.isinf(head.rate) and head.beta > 0 and head.radius > 0 for head in heads):
        reasons.append("singular K or V, κ = ∞: near their null space, key and value turn without limit")
    return tuple(reasons)


def _ball(spec: ADPTSpec, heads: list[Turning]) -> Ball:
    """‖M‖ = |λ̄|_max for every rotation; a Taylor form has its displacement on top."""
    factor = max(float(head.moduli.max()) + _displacement(spec, head) for head in heads)
    return Ball(
        torch.tensor([[factor]], dtype=torch.float64), torch.ones(1, dtype=torch.float64), (spec.size,), spec.size
    )


def _coupled(cell: CoupledCell) -> Certificate:
    """Fast and slow norms bound each other by a 2×2 matrix, whose spectral radius bounds the exponents."""
    fast = _adpt(cell.fast)
    gain = cell.fast.drive.gain(cell.fast.spectrum).modulus().double()
    decay = cell.slow().real.double()
    feed = float((gain * cell.feedback.double().abs()).max())
    charge, slowest, fastest = float((1 - decay).max()), float(decay.max()), float(decay.min())

    def forward(largest: float) -> Tensor:
        return torch.tensor([[largest, feed], [charge * largest, slowest + charge * feed]], dtype=torch.float64)

    assert fast.ball is not None
    entry = torch.tensor([1.0, charge], dtype=torch.float64)
    size = cell.spec.size
    ball = Ball(forward(float(fast.ball.transition)), entry, (size, size), size)
    if not fast.holds:
        return _nothing(fast.reasons, cell.state_size, ball)
    growth = forward(fast.lipschitz)
    upper = torch.full((cell.state_size,), float(torch.linalg.matrix_norm(growth, 2)), dtype=torch.float64)
    lower = torch.zeros_like(upper)
    low = -math.inf
    smallest = float(fast.lower[-1])
    if smallest > 0 and fastest > 0:  # then J can be inverted, and its inverse bounded likewise
        back = torch.tensor(
            [[(1 + feed * charge / fastest) / smallest, feed / (fastest * smallest)], [charge / fastest, 1 / fastest]],
            dtype=torch.float64,
        )
        lower = torch.full_like(upper, 1 / float(torch.linalg.matrix_norm(back, 2)))
        low = -math.log(float(torch.linalg.eigvals(back).abs().max()))
    high = math.log(float(torch.linalg.eigvals(growth).abs().max()))
    found = _made(
        "the exact bound of the fast state, coupled to the slow memory by a 2×2 matrix of norms", lower, upper
    )
    count = torch.arange(1, cell.state_size + 1, dtype=torch.float64)
    return dataclasses.replace(
        found,
        deviation=fast.deviation,
        exponents=(low, high),
        upper_sums=count * high,
        lower_sums=count * low,
        ball=ball,
    )


def _made(bound: str, lower: Tensor, upper: Tensor) -> Certificate:
    """The certificate for singular values between `lower` and `upper`, both descending."""
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


def _nothing(reasons: tuple[str, ...], size: int, ball: Ball | None) -> Certificate:
    upper = torch.full((size,), math.inf, dtype=torch.float64)
    return dataclasses.replace(_made("none", torch.zeros_like(upper), upper), reasons=reasons, ball=ball)


@torch.no_grad()
def _along(
    system: Any, inputs: Tensor | None, state: Tensor | ADPTState | None, steps: int | None, transient: int
) -> Certificate:
    trajectory = posed(system, inputs, state, steps)
    check_transient(transient, trajectory.steps)
    batch, size = trajectory.state.shape
    logs = torch.zeros(batch, size, dtype=torch.float64)
    lower, upper = torch.full((size,), math.inf, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    deviation = 0.0
    for stretch in stretches(trajectory):
        skipped = max(0, transient - stretch.start)
        matrices = stretch.jacobians[:, skipped:].double()
        if not matrices.shape[1]:
            continue
        values = torch.linalg.svdvals(matrices)
        logs += values.log().sum(1).cpu()
        lower = torch.minimum(lower, values.amin((0, 1)).cpu())
        upper = torch.maximum(upper, values.amax((0, 1)).cpu())
        conjugate = _conjugate(trajectory.cell, stretch.entering[:, skipped:], stretch.drive[:, skipped:])
        gap = math.inf if conjugate is None else float(torch.linalg.matrix_norm(matrices - conjugate, 2).max())
        deviation = max(deviation, gap)
    means = logs / (trajectory.steps - transient)
    made = _made(f"σ(J_t) along {'this trajectory' if batch == 1 else f'these {batch} trajectories'}", lower, upper)
    return dataclasses.replace(
        made,
        deviation=deviation,
        exponents=(float(means[:, -1].min()), float(means[:, 0].max())),
        upper_sums=means.cumsum(1).amax(0),
        lower_sums=means.flip(1).cumsum(1).amin(0),
        everywhere=False,
    )


def _conjugate(cell: Cell, states: Tensor, drive: Tensor) -> Tensor | None:
    operator = cell.conjugate(states, drive)
    return None if operator is None else operator.dense().double()


def _plain_adpt(system: Any, what: str) -> ADPTCell:
    cell = cell_of(system)
    if not isinstance(cell, ADPTCell):
        raise IncompatibleError(f"{what} compares J with Λ̄; {describe(cell)} has no Λ̄. Pass an ADPT layer or cell.")
    return cell


@torch.no_grad()
def deviation_bounds(system: Any, states: Tensor) -> Tensor:
    """What ‖J - M‖ cannot exceed at each of `states` (..., n), without a Jacobian: 2rβ (‖K‖‖x‖/‖Kx‖ + ‖V‖‖x‖/‖Vx‖).

    It also holds where no certificate does: for singular K and V, and for directions from ReLU(x). Near the states that
    break a certificate it grows without limit. At zero, where J = M = Λ̄ by definition, it is 0.
    """
    cell = _plain_adpt(system, "deviation_bounds")
    spec = cell.spec
    covered = isinstance(spec.direction, FromState) and spec.direction.spike is None and not spec.direction.layer_norm
    if isinstance(spec.direction, FromInput) or not spec.conjugate.turns:
        return states.new_zeros(states.shape[:-1])
    if not covered or spec.direction.dot is not None or spec.projection.bias or spec.rotation_aware:
        raise IncompatibleError(
            f"deviation_bounds covers directions straight from x or ReLU(x), without a bias; got {spec.direction}, "
            f"projection={spec.projection}, rotation_aware={spec.rotation_aware}. "
            "Use certificate(layer, inputs).deviation, which measures it."
        )
    if states.dim() < 1 or states.shape[-1] != spec.size:
        raise InputError(f"states have shape {tuple(states.shape)}; they are (..., {spec.size}).")
    heads = turnings(cell)
    parts = states.double().unflatten(-1, (spec.heads, -1))
    largest = parts.abs().amax(-1, keepdim=True)  # divided out: the quotients do not depend on it, squares would vanish
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
            total = total + torch.where(largest.squeeze(-1) == 0, 0.0, quotient)  # at zero nothing turns, and J = M
    factors = torch.tensor([_deviation(spec, head._replace(rate=1.0)) for head in heads], dtype=torch.float64)
    return torch.where(factors == 0, 0.0, factors * total).amax(-1)


@torch.no_grad()
def singular_value_shifts(
    system: Any, inputs: Tensor | None = None, *, state: Tensor | ADPTState | None = None, steps: int | None = None
) -> Tensor:
    """Δ_i^(t) = σ_i(J_t) - |λ̄|_(i), both descending, at every step (lemma:le_exact_match), (batch, time, n)."""
    cell = _plain_adpt(system, "singular_value_shifts")
    trajectory = posed(system, inputs, state, steps)
    moduli = cell.spectrum().modulus().sort(descending=True).values
    shifts = torch.cat([torch.linalg.svdvals(s.jacobians) - moduli for s in stretches(trajectory)], 1)
    return shifts if trajectory.batched else shifts.squeeze(0)
