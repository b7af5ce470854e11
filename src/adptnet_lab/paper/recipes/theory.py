"""Lemmas and statements of the theory: bounds on J and on the exponents, searched for counterexamples in float64.

The step and its Jacobian are written from their definitions with dense matrices, independently of the library, so that
a bound is tested rather than our code for it. States are searched by random hill climbing for the largest violation.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adptnet import analysis, directions, projections, spectra
from adptnet.cells import ADPTCell
from adptnet.nn import ADPTNet

from ..evidence import estimate_mean, paired_difference
from ..recipe import Check, GridPoint, Recipe, Row, Rows, RunOutput, Scale, Table
from ..verdicts import ClaimVerdict, combine, decide, judge_every, judge_increase, judge_limit

SIZE = 6
BETAS = (0.01, 0.125, 1.0, 4.0)
STARTS, ROUNDS = {"smoke": 8, "laptop": 64, "paper": 64}, {"smoke": 2, "laptop": 40, "paper": 40}
SEEDS = {"smoke": 1, "laptop": 3, "paper": 8}
DRAWS = {"smoke": 2, "laptop": 5, "paper": 20}
KINDS = ("orthogonal", "dense", "ReLU")  # of K and V; ReLU: orthogonal, after ReLU(x)
UNIT = "of the networks"


def _unit(vector: Tensor) -> Tensor:
    normalized: Tensor = vector / torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    return normalized


def _conjugate(key: Tensor, value: Tensor, beta: float, eigenvalues: Tensor) -> Tensor:
    """Return M = Q Λ̄ Q' with Q = exp(β(kv' - vk')), by the closed form of the exponential."""
    skew = beta * (torch.outer(key, value) - torch.outer(value, key))
    angle = beta * (1 - (key @ value).square()).clamp(min=1e-24).sqrt()
    rotation = torch.eye(len(key)) + angle.sin() / angle * skew + (1 - angle.cos()) / angle.square() * skew @ skew
    conjugate: Tensor = rotation * eigenvalues @ rotation.mT
    return conjugate


def _draw_network(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return K, V and λ̄ between 0.05 and 0.99, in descending order."""
    weights = torch.randn(2, SIZE, SIZE)
    if kind != "dense":
        weights = torch.linalg.qr(weights).Q
    eigenvalues = (0.05 + 0.94 * torch.rand(SIZE)).sort(descending=True).values
    return weights[0], weights[1], eigenvalues


def _run_bounds(point: GridPoint) -> RunOutput:
    """Search the state with the largest ‖J - M‖ and with the largest |σ_i(J) - λ̄_i|."""
    settings = point.settings
    beta, kind = settings["beta"], settings["kind"]
    key_weight, value_weight, eigenvalues = _draw_network(kind)

    def conjugate(x: Tensor) -> Tensor:
        seen = x
        if kind == "ReLU":  # a silent state has no direction; any constant one will do
            seen = torch.where((x > 0).any(), x.relu(), torch.ones(SIZE))
        return _conjugate(_unit(key_weight @ seen), _unit(value_weight @ seen), beta, eigenvalues)

    jacobian = torch.func.jacrev(lambda x: conjugate(x) @ x)

    def gap(x: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.matrix_norm(jacobian(x) - conjugate(x), 2)
        return norm

    def shift(x: Tensor) -> Tensor:
        largest: Tensor = (torch.linalg.svdvals(jacobian(x)) - eigenvalues).abs().max()
        return largest

    conditions = [float(torch.linalg.cond(weight, 2)) for weight in (key_weight, value_weight)]
    numbers = {
        "gap": _climb(gap, settings),
        "shift": _climb(shift, settings),  # at most as large as the gap (Weyl), so no counterexample is missed
        "largest": float(eigenvalues[0]),
        "spread": float(eigenvalues[0] - eigenvalues[-1]),
        "condition": sum(conditions),
        "attained": _attained(beta, eigenvalues),
    }
    return RunOutput(numbers)


def _climb(number: Callable[[Tensor], Tensor], settings: Any) -> float:
    """Return the largest value of a function of the hidden state that random hill climbing finds."""
    evaluate = torch.vmap(number, randomness="error")
    states = torch.randn(settings["starts"], SIZE)
    best = evaluate(states).nan_to_num(0.0)
    scale = 1.0
    for _ in range(settings["rounds"]):
        tries = _unit(states) + scale * torch.randn_like(states)
        found = evaluate(tries).nan_to_num(0.0)
        better = found > best
        states, best = torch.where(better[:, None], tries, states), torch.where(better, found, best)
        scale *= 0.94
    return float(best.max())


def _attained(beta: float, eigenvalues: Tensor) -> float:
    """Return ‖J - M‖ at the state e_n for V = I and K = diag(-1, 1, …), where our bound is attained."""
    key_weight = torch.eye(SIZE)
    key_weight[0, 0] = -1

    def conjugate(x: Tensor) -> Tensor:
        return _conjugate(_unit(key_weight @ x), _unit(x), beta, eigenvalues)

    # e_n is fixed by K and V: k = v, where the closed form is 0 / 0, so approach it
    x = torch.eye(SIZE)[-1] + 1e-7 * torch.randn(SIZE)
    difference = torch.func.jacrev(lambda s: conjugate(s) @ s)(x) - conjugate(x)
    return float(torch.linalg.matrix_norm(difference, 2))


def _make_bound_points(scale: Scale) -> list[GridPoint]:
    search = {"starts": STARTS[scale], "rounds": ROUNDS[scale]}
    return [
        GridPoint({"kind": kind, "beta": beta, **search}, seed)
        for kind in KINDS
        for beta in BETAS
        for seed in range(SEEDS[scale])
    ]


def _judge_bound(rows: Rows, key: str, bound: Callable[[Row], float]) -> ClaimVerdict:
    ratios = [row.numbers[key] / bound(row) for row in rows]
    text = f"at most {max(ratios):.3g} of the bound, {len(ratios)} networks and β"
    return judge_every([ratio <= 1 + 1e-9 for ratio in ratios], text, UNIT)


def _paper_bound(row: Row) -> float:
    return float(8 * row.settings["beta"] * row.numbers["largest"])


def _check_singular(rows: Rows) -> ClaimVerdict:
    """No state is found, by hill climbing, at which a singular value of J is further than 8βλ̄_max from its λ̄_i, for
    orthogonal K, V and β from 0.01 to 4."""
    return _judge_bound(rows, "shift", _paper_bound)


def _check_general(rows: Rows) -> ClaimVerdict:
    """No state is found at which ‖J - M‖ exceeds 4βλ̄_max(κ(K) + κ(V)), for dense K, V."""
    return _judge_bound(
        rows, "gap", lambda row: 4 * row.settings["beta"] * row.numbers["largest"] * row.numbers["condition"]
    )


def _check_relu(rows: Rows) -> ClaimVerdict:
    """No state is found at which ‖J - M‖ exceeds 8βλ̄_max if ReLU precedes orthogonal K, V."""
    return _judge_bound(rows, "gap", _paper_bound)


def _check_sharp(rows: Rows) -> ClaimVerdict:
    """No state is found at which ‖J - M‖ exceeds 2β(λ̄_max - λ̄_min), for orthogonal K, V, and the constructed state
    attains it to 10⁻⁶."""

    def bound(row: Row) -> float:
        return float(2 * row.settings["beta"] * row.numbers["spread"])

    reached = min(row.numbers["attained"] / bound(row) for row in rows)
    attained = decide(reached > 1 - 1e-6, f"attained to {abs(1 - reached):.0e}", runs=len(rows))
    return combine([_judge_bound(rows, "gap", bound), attained])


def _make_bound_table(rows: Rows) -> Table:
    lines = []
    for (kind, beta), some in rows.groups("kind", "beta").items():
        ratios = [max(row.numbers[key] / _paper_bound(row) for row in some) for key in ("shift", "gap")]
        lines.append([kind, beta, len(some), *(f"{ratio:.3g}" for ratio in ratios)])
    return Table(["K, V", "β", "networks", "|σ_i − λ̄_i| / 8βλ̄_max", "‖J − M‖ / 8βλ̄_max"], lines)


# Lyapunov exponents: lemma:le_spectrum, lemma:le_exact_match, coro:deltas


EXPONENT_BETAS = (0.001, 0.01, 0.05)  # for which λ̄_min - 8βλ̄_max can be positive
STEPS = {"smoke": 40, "laptop": 2000, "paper": 8000}


def _make_exponent_points(scale: Scale) -> list[GridPoint]:
    return [
        GridPoint({"beta": beta, "steps": STEPS[scale]}, seed)
        for beta in EXPONENT_BETAS
        for seed in range(DRAWS[scale])
    ]


@torch.no_grad()
def _run_exponents(point: GridPoint) -> RunOutput:
    settings = point.settings
    spectrum = spectra.Linspace(dt_min=0.02, dt_max=1.0)
    layer = ADPTNet(8, beta=settings["beta"], projection=projections.Orthogonal(), spectrum=spectrum)
    layer.requires_grad_(False)
    x = torch.randn(settings["steps"], 8)
    assert isinstance(layer.cell, ADPTCell)
    moduli = layer.cell.spectrum.log_modulus().exp().sort(descending=True).values
    numbers = {
        "exponents": analysis.lyapunov_exponents(layer, x).exponents,
        "means": analysis.mean_log_singular_values(layer, x),
        "eigenvalues": moduli,
    }
    return RunOutput(numbers, layer.spec)


def _check_spectrum(rows: Rows) -> ClaimVerdict:
    """Every exponent lies in [ln(λ̄_min - 8βλ̄_max), ln(λ̄_max + 8βλ̄_max)], the lower end being -∞ where it does not
    exist."""
    inside, used = [], []
    for row in rows:
        eigenvalues, width = row.numbers["eigenvalues"], 8 * row.settings["beta"] * row.numbers["eigenvalues"][0]
        lowest = eigenvalues[-1] - width
        low, high = math.log(lowest) if lowest > 0 else -math.inf, math.log(eigenvalues[0] + width)
        inside.append(low <= min(row.numbers["exponents"]) and max(row.numbers["exponents"]) <= high)
        used.append((max(row.numbers["exponents"]) - math.log(eigenvalues[0])) / (high - math.log(eigenvalues[0])))
    return judge_every(inside, f"largest exponents use at most {max(0, *used):.0%} of the upper margin", UNIT)


def _judge_match(rows: Rows, key: str) -> ClaimVerdict:
    """Judge whether each number is within 8βλ̄_max / λ̄_i of ln λ̄_i."""
    shares = []
    for row in rows:
        eigenvalues = np.asarray(row.numbers["eigenvalues"])
        margin = 8 * row.settings["beta"] * eigenvalues[0] / eigenvalues
        shares.append(float((np.abs(np.sort(row.numbers[key])[::-1] - np.log(eigenvalues)) / margin).max()))
    return judge_every([share <= 1 for share in shares], f"at most {max(shares):.2f} of the margin", UNIT)


def _check_match(rows: Rows) -> ClaimVerdict:
    """Every exponent, by QR, is within 8βλ̄_max / λ̄_i of its ln λ̄_i."""
    return _judge_match(rows, "exponents")


def _check_means(rows: Rows) -> ClaimVerdict:
    """Every time average of the sorted ln σ_i(J_t), which the paper calls exponents, is within 8βλ̄_max / λ̄_i of its
    ln λ̄_i."""
    return _judge_match(rows, "means")


def _check_deltas(rows: Rows) -> ClaimVerdict:
    """For Δ uniform in ±βλ̄_max, the example of coro:deltas, the mean of ln(λ̄ + Δ) equals ln λ̄ to 10⁻⁹, at β = 0.05,
    λ̄_max = 1 and λ̄ = 0.1 (by its integral)."""
    half, middle = 0.05, 0.1
    ends = [middle + half, middle - half]
    mean = sum(sign * (end * math.log(end) - end) for sign, end in zip((1, -1), ends, strict=True)) / (2 * half)
    return decide(abs(mean - math.log(middle)) < 1e-9, f"ln λ̄ = {math.log(middle):.4f}, mean {mean:.4f}")


def _make_exponent_table(rows: Rows) -> Table:
    lines = []
    for (beta,), some in rows.groups("beta").items():
        gaps = [
            np.abs(np.asarray(row.numbers[key]) - np.log(row.numbers["eigenvalues"])).max()
            for key in ("exponents", "means")
            for row in some
        ]
        lines.append([beta, len(some), *(f"{max(part):.2g}" for part in np.array_split(gaps, 2))])
    return Table(["β", "networks", "largest |α_i − ln λ̄_i|", "largest |mean ln σ_i − ln λ̄_i|"], lines)


# Directions from the input: sec:linear_ADPTNet


INPUT_BETAS = (0.0125, 0.125, 1.0, 4.0)


def _make_input_points(scale: Scale) -> list[GridPoint]:
    seeds = {"smoke": 1, "laptop": 3, "paper": 5}[scale]
    return [GridPoint({"beta": beta, "steps": STEPS[scale]}, seed) for beta in INPUT_BETAS for seed in range(seeds)]


@torch.no_grad()
def _run_input(point: GridPoint) -> RunOutput:
    settings = point.settings
    spectrum = spectra.Linspace(dt_min=0.02, dt_max=2.0)
    layer = ADPTNet(8, beta=settings["beta"], direction=directions.FromInput(), spectrum=spectrum).requires_grad_(False)
    x = torch.randn(settings["steps"], 8)
    assert isinstance(layer.cell, ADPTCell)
    numbers = {
        "exponents": analysis.lyapunov_exponents(layer, x).exponents,
        "log_eigenvalues": layer.cell.spectrum.log_modulus().sort(descending=True).values,
    }
    return RunOutput(numbers, layer.spec)


def _mismatch(row: Row) -> float:
    prescribed = np.asarray(row.numbers["log_eigenvalues"])
    return float(np.abs(np.asarray(row.numbers["exponents"]) - prescribed).max() / np.ptp(prescribed))


def _format_mismatch(rows: Rows) -> str:
    each = (f"β = {b:g}: {np.mean([_mismatch(r) for r in s]):.1%}" for (b,), s in rows.groups("beta").items())
    return "largest mismatch " + ", ".join(each) + " of the width"


def _check_identical(rows: Rows) -> ClaimVerdict:
    """The largest |α_i - ln λ̄_i| is below 1 % of the width of ln λ̄ at every β from 0.0125 to 4."""
    return judge_every([_mismatch(row) < 0.01 for row in rows], _format_mismatch(rows), UNIT)


def _check_small_beta(rows: Rows) -> ClaimVerdict:
    """At β = 0.0125 the mean over networks of the largest |α_i - ln λ̄_i| is below 1 % of the width of ln λ̄."""
    return judge_limit(estimate_mean([_mismatch(row) for row in rows], "of the width"), below=0.01)


def _make_input_table(rows: Rows) -> Table:
    lines = [
        [beta, len(some), f"{np.mean([_mismatch(row) for row in some]):.2%}"]
        for (beta,), some in rows.groups("beta").items()
    ]
    return Table(["β", "networks", "largest |α_i − ln λ̄_i| / width"], lines)


# The Cayley map by the Woodbury identity: sec:efficient_exp


WIDTHS = {"smoke": [8, 16], "laptop": [16, 64, 256], "paper": [16, 64, 256, 1024]}


def _make_woodbury_points(scale: Scale) -> list[GridPoint]:
    return [GridPoint({"size": size, "beta": 1.0}, seed) for size in WIDTHS[scale] for seed in range(DRAWS[scale])]


def _run_woodbury(point: GridPoint) -> RunOutput:
    """Compute Q x in float32 by both routes, and their errors relative to float64."""
    size, beta = point.settings["size"], point.settings["beta"]
    key, value, x = _unit(torch.randn(3, size))
    left, right = torch.stack([key, -value], -1), torch.stack([value, key], -1)  # S = E F'

    def woodbury(e: Tensor, f: Tensor, x: Tensor) -> Tensor:
        y = x + beta / 2 * e @ (f.mT @ x)
        core = torch.eye(2, dtype=x.dtype) - beta / 2 * f.mT @ e
        turned: Tensor = y + beta / 2 * e @ torch.linalg.solve(core, f.mT @ y)
        return turned

    def invert(e: Tensor, f: Tensor, x: Tensor) -> Tensor:
        skew, identity = e @ f.mT, torch.eye(size, dtype=x.dtype)
        turned: Tensor = torch.linalg.inv(identity - beta / 2 * skew) @ (identity + beta / 2 * skew) @ x
        return turned

    exact = invert(left, right, x)
    low = [part.float() for part in (left, right, x)]
    errors = {
        name: float((route(*low).double() - exact).norm() / exact.norm())
        for name, route in (("Woodbury", woodbury), ("inversion", invert))
    }
    return RunOutput(errors)


def _log_errors(rows: Rows, name: str) -> list[float]:
    return [math.log(max(value, 1e-12)) for value in rows.numbers(name)]


def _check_worse(rows: Rows) -> ClaimVerdict:
    """The error of Woodbury divided by that of plain inversion, as a logarithm paired by network, has an interval above
    0 at the largest width. A factor of two matters."""
    wide = rows.where(size=max(rows.values("size")))
    more = paired_difference(_log_errors(wide, "Woodbury"), _log_errors(wide, "inversion"), "Δ ln of the ratio")
    return judge_increase(more, math.log(2), f"n = {wide[0].settings['size']}")


def _check_degrades(rows: Rows) -> ClaimVerdict:
    """The error of Woodbury at the largest width divided by that at the smallest, as a logarithm paired by network, has
    an interval above 0. A factor of two matters."""
    sizes = rows.values("size")
    small, large = (_log_errors(rows.where(size=size), "Woodbury") for size in (min(sizes), max(sizes)))
    errors = [float(np.exp(np.mean(_log_errors(rows.where(size=size), "Woodbury")))) for size in sizes]
    steps = ", ".join(f"{a:.1e} → {b:.1e}" for a, b in pairwise(errors))
    return judge_increase(paired_difference(large, small, "Δ ln of the ratio"), math.log(2), f"by width {steps}")


def _make_woodbury_table(rows: Rows) -> Table:
    lines = [
        [size, len(some), *(f"{np.exp(np.mean(_log_errors(some, name))):.2e}" for name in ("Woodbury", "inversion"))]
        for (size,), some in rows.groups("size").items()
    ]
    return Table(["n", "networks", "error of Woodbury", "error of inversion"], lines)


_ORTHOGONAL = {"kind": ["orthogonal"]}

RECIPES = {
    "lemma:J_singular_vals": Recipe(
        version=1,
        points=_make_bound_points,
        run=_run_bounds,
        checks={
            "singular": Check(_check_singular, subset=_ORTHOGONAL),
            "general": Check(_check_general, subset={"kind": ["dense"]}),
            "relu": Check(_check_relu, "laptop", {"kind": ["ReLU"]}),
            "sharp": Check(_check_sharp, subset=_ORTHOGONAL),
        },
        table=_make_bound_table,
        cost={"smoke": "3 s", "laptop": "30 s", "paper": "2 min"},
    ),
    "lemma:le_spectrum": Recipe(
        version=1,
        points=_make_exponent_points,
        run=_run_exponents,
        checks={
            "spectrum": Check(_check_spectrum),
            "match": Check(_check_match, "laptop"),
            "means": Check(_check_means),
            "deltas": Check(_check_deltas),
        },
        table=_make_exponent_table,
        cost={"smoke": "1 s", "laptop": "10 s", "paper": "2 min"},
    ),
    "sec:linear_ADPTNet": Recipe(
        version=1,
        points=_make_input_points,
        run=_run_input,
        checks={
            "identical": Check(_check_identical, "laptop"),
            "small-beta": Check(_check_small_beta, "laptop", {"beta": [0.0125]}),
        },
        table=_make_input_table,
        cost={"smoke": "1 s", "laptop": "5 s", "paper": "1 min"},
    ),
    "sec:efficient_exp": Recipe(
        version=1,
        points=_make_woodbury_points,
        run=_run_woodbury,
        checks={"worse": Check(_check_worse, "laptop"), "degrades": Check(_check_degrades, "laptop")},
        table=_make_woodbury_table,
        cost={"smoke": "1 s", "laptop": "2 s", "paper": "10 s"},
    ),
}
