"""Cost of A_t, FFT against scan, and local errors of the solvers (table:conv_forward_flops, table:error_summary)."""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adptnet import analysis, projections, solvers, spectra
from adptnet.analysis import plot
from adptnet.analysis.cost import macs
from adptnet.cells import ADPTCell
from adptnet.nn import ADPTNet
from adptnet.ops.linear_scan import linear_scan
from adptnet.ops.lti_convolution import lti_convolution
from adptnet.recurrence.step import evaluate_eigenvalues, split_drive

from ..evidence import paired_difference
from ..recipe import Check, GridPoint, Recipe, Rows, RunOutput, Scale, Table
from ..verdicts import ClaimVerdict, combine, decide, judge_every, judge_increase

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _count_listing(size: int) -> int:
    """Count the operations of the listing in appendix:code_fwd_macs: diag M from the two factors of Q - I."""
    left, core, right, eigen = torch.randn(size, 2), torch.randn(2, 2), torch.randn(size, 2), torch.rand(size)

    def diagonal() -> object:
        product = left @ core
        first = product[:, 0] * right[:, 0] + product[:, 1] * right[:, 1]
        both = right @ ((product.mT * eigen) @ product)
        second = both[:, 0] * right[:, 0] + both[:, 1] * right[:, 1]
        return eigen + 2 * eigen * first + second

    return macs(diagonal)


def _make_cost_points(scale: Scale) -> list[GridPoint]:
    sizes = {"smoke": [8, 16], "laptop": [16, 32, 64, 128], "paper": [16, 32, 64, 128, 256]}[scale]
    return [GridPoint({"size": size, "steps": 64 if scale == "smoke" else 1024}) for size in sizes]


def _run_cost(point: GridPoint) -> RunOutput:
    size = point.settings["size"]
    layer = ADPTNet.paper(size, beta=0.125).requires_grad_(False)
    counted = analysis.cost(layer)
    x = torch.randn(1, point.settings["steps"], size)
    by_scan, by_fft = (
        solvers.ConvDEER(by=by, fixed_iterations=3, on_failure=solvers.Return())(layer.cell, x).states
        for by in (linear_scan, lti_convolution)
    )
    drive = layer.cell.prepare(x[:, :1], torch.zeros(1, 1, dtype=torch.int64))
    assert isinstance(layer.cell, ADPTCell)
    parameters = layer.cell.evaluate()  # evaluates everything that a step needs
    conv = macs(lambda: evaluate_eigenvalues(parameters, split_drive(parameters, drive)))
    numbers: dict[str, Any] = {
        "listing": _count_listing(size),
        "Conv": conv,
        "Forward": counted.conjugate_diagonal,
        "Quasi": counted.jacobian_diagonal,
        "step": counted.step,
        "fft": float((by_scan - by_fft).abs().max() / by_scan.abs().max()),
    }
    return RunOutput(numbers, layer.spec)


def _check_conv(rows: Rows) -> ClaimVerdict:
    """The transition of Conv-DEER costs no operation beyond the eigenvalues, which the step needs anyway."""
    counts = rows.numbers("Conv")
    return decide(max(counts) == 0, f"{max(counts)} multiply-accumulates")


def _check_forward(rows: Rows) -> ClaimVerdict:
    """The listing costs exactly 20·D at every size."""
    counts = {row.settings["size"]: row.numbers["listing"] for row in rows}
    text = ", ".join(f"D = {n}: {count / n:g}·D" for n, count in counts.items())
    return decide(all(count == 20 * n for n, count in counts.items()), text)


def _check_linear(rows: Rows) -> ClaimVerdict:
    """The count of our diag M, divided by D, changes by less than 10 % from the smallest to the largest size."""
    each = [row.numbers["Forward"] / row.settings["size"] for row in rows]
    return decide(max(each) < 1.1 * min(each), f"{each[0]:.1f}·D to {each[-1]:.1f}·D")


def _check_quasi(rows: Rows) -> ClaimVerdict:
    """The count of our diag J, divided by D, changes by less than 10 % over the sizes and is above Forward's."""
    each = [row.numbers["Quasi"] / row.settings["size"] for row in rows]
    above = all(row.numbers["Quasi"] > row.numbers["Forward"] for row in rows)
    text = f"{each[0]:.0f}·D to {each[-1]:.0f}·D"
    return decide(above and max(each) < 1.1 * min(each), text)


def _check_fft(rows: Rows) -> ClaimVerdict:
    """After three iterations in float64, the states by FFT and by scan differ by less than 10⁻¹⁰ of the largest
    state."""
    worst = max(rows.numbers("fft"))
    return decide(worst < 1e-10, f"relative difference {worst:.1g}")


def _make_cost_table(rows: Rows) -> Table:
    keys = ["Conv", "listing", "Forward", "Quasi", "step"]
    lines = [[row.settings["size"], *(row.numbers[key] for key in keys), f"{row.numbers['fft']:.1g}"] for row in rows]
    return Table(
        ["D", "Conv", "Forward, the paper's listing", "Forward, ours", "Quasi, ours", "step", "FFT − scan"], lines
    )


# table:error_summary

BETAS = [0.0125, 0.05, 0.125, 0.5, 1.0]
UNIT = "of the trajectories"
SPREADS = {"narrow": (1e-2, 1e-1), "wide": (1e-2, 2.0)}


def _make_error_points(scale: Scale) -> list[GridPoint]:
    steps, seeds = {"smoke": (12, 1), "laptop": (512, 3), "paper": (1024, 5)}[scale]
    return [
        GridPoint({"spread": spread, "beta": beta, "steps": steps}, seed)
        for seed in range(seeds)
        for spread in SPREADS
        for beta in BETAS
    ]


def _run_errors(point: GridPoint) -> RunOutput:
    low, high = SPREADS[point.settings["spread"]]
    spectrum = spectra.Linspace(dt_min=low, dt_max=high)
    layer = ADPTNet.paper(
        16, beta=point.settings["beta"], projection=projections.Orthogonal(), spectrum=spectrum
    ).requires_grad_(False)
    errors = analysis.local_errors(layer, torch.randn(point.settings["steps"], 16))
    keep = slice(1, None)  # the first state is zero
    numbers: dict[str, Any] = {
        name: float(getattr(errors, name)[keep].max()) for name in ("similarity", "derivative", "forward")
    }
    for name in ("conv_to_deer", "derivative_to_state", "forward_to_quasi", "conv_to_quasi"):
        numbers[name] = float((getattr(errors, name)[keep] / errors.state_norm[keep]).mean())
    assert isinstance(layer.cell, ADPTCell)
    modulus = layer.cell.spectrum.log_modulus().exp()
    numbers |= {"largest": float(modulus.max()), "spread": analysis.eigenvalue_spread(layer)}
    return RunOutput(numbers, layer.spec)


def _check_similarity(rows: Rows) -> ClaimVerdict:
    """The largest ‖Λ̄ - M‖ along every trajectory is at most λ̄_max - λ̄_min."""
    ratios = [row.numbers["similarity"] / row.numbers["spread"] for row in rows]
    return judge_every([ratio <= 1 + 1e-9 for ratio in ratios], f"at most {max(ratios):.3f} of it", UNIT)


def _check_derivative(rows: Rows) -> ClaimVerdict:
    """The largest ‖J - M‖ along every trajectory is at most 8βλ̄_max."""
    ratios = [row.numbers["derivative"] / (8 * row.settings["beta"] * row.numbers["largest"]) for row in rows]
    exact = [row.numbers["derivative"] / (2 * row.settings["beta"] * row.numbers["spread"]) for row in rows]
    text = f"at most {max(ratios):.2g} of it (of our bound 2β(λ̄_max − λ̄_min): {max(exact):.2g})"
    return judge_every([ratio <= 1 for ratio in ratios], text, UNIT)


def _check_derivative_acts(rows: Rows) -> ClaimVerdict:
    """The mean of ‖(J - M) s‖ / ‖s‖ exceeds 10⁻⁹ along some trajectory."""
    worst = max(rows.numbers("derivative_to_state"))
    return decide(worst > 1e-9, f"at most {worst:.1g}", runs=len(rows))


def _by_seed(rows: Rows, key: str) -> list[float]:
    return [float(np.mean([r.numbers[key] for r in rows if r.seed == s])) for s in sorted({r.seed for r in rows})]


def _judge_growth(rows: Rows, key: str, spread: str) -> ClaimVerdict:
    """Judge whether a number grows at every step of the grid of β, paired by seed; a tenth of its value matters."""
    parts = []
    for low, high in pairwise(BETAS):
        small, large = (_by_seed(rows.where(spread=spread, beta=b), key) for b in (low, high))
        more = paired_difference(large, small, "Δ")
        parts.append(judge_increase(more, 0.1 * float(np.mean(small)), f"{spread} spread, β {low:g} → {high:g}"))
    return combine(parts, f"{spread} spread: smallest step {min(parts, key=lambda part: part.estimate.low).why}")  # type: ignore[union-attr]


def _check_forward_beta(rows: Rows) -> ClaimVerdict:
    """The largest ‖diag M - Λ̄‖ of a trajectory grows at every step of the grid of β, paired by seed, for each
    spread."""
    return combine([_judge_growth(rows, "forward", spread) for spread in SPREADS])


def _check_smaller(rows: Rows) -> ClaimVerdict:
    """The mean relative error of Conv-DEER against DEER grows at every step of the grid of β, and is smaller for the
    narrow spread at every β, paired by seed."""
    parts = [_judge_growth(rows, "conv_to_deer", spread) for spread in SPREADS]
    narrower = []
    for beta in BETAS:
        narrow, wide = (_by_seed(rows.where(spread=s, beta=beta), "conv_to_deer") for s in SPREADS)
        narrower.append(
            judge_increase(paired_difference(wide, narrow, "Δ"), 0.1 * float(np.mean(wide)), f"β = {beta:g}")
        )
    text = "; ".join(part.why for part in (*parts, narrower[0]))
    return combine([*parts, *narrower], f"{text} (wide minus narrow)")


def _draw_errors(rows: Rows) -> "Figure":
    figure = plot.new_figure(9, 3.3)
    labels = {
        "similarity": "ε_sim = ‖Λ̄ − M‖",
        "derivative": "ε_der = ‖J − M‖",
        "forward": "ε_fwd = ‖diag M − Λ̄‖",
        "conv_to_deer": "‖(Λ̄ − J)s‖ / ‖s‖",
        "derivative_to_state": "‖(J − M)s‖ / ‖s‖",
    }
    for axis, spread in zip(figure.subplots(1, 2, sharey=True), SPREADS, strict=True):
        for (name, label), colour in zip(labels.items(), plot.COLORS, strict=False):
            means = [max(float(np.mean(rows.where(spread=spread, beta=b).numbers(name))), 1e-18) for b in BETAS]
            axis.loglog(BETAS, means, "-o", markersize=3, color=colour, label=label)
        width = rows.where(spread=spread)[0].numbers["spread"]
        axis.axhline(width, color="black", linewidth=0.8, linestyle="--")
        axis.set(xlabel="β (dashed: λ̄_max − λ̄_min)", title=f"{spread} spread, {width:.2f}")
        plot.strip_axes(axis)
    axis.legend(frameon=False, fontsize=8)
    return figure


def _make_error_table(rows: Rows) -> Table:
    keys = ["similarity", "derivative", "forward", "conv_to_deer", "conv_to_quasi", "forward_to_quasi"]
    lines = []
    for spread in SPREADS:
        for beta in BETAS:
            group = rows.where(spread=spread, beta=beta)
            lines.append([spread, beta, *(f"{np.mean(group.numbers(key)):.3g}" for key in keys)])
    names = ["ε_sim", "ε_der", "ε_fwd", "Conv − DEER", "Conv − Quasi", "Forward − Quasi"]
    return Table(["spread", "β", *names], lines)


RECIPES = {
    "table:conv_forward_flops": Recipe(
        version=1,
        points=_make_cost_points,
        run=_run_cost,
        checks={
            "conv": Check(_check_conv),
            "forward": Check(_check_forward),
            "linear": Check(_check_linear),
            "quasi": Check(_check_quasi),
            "fft": Check(_check_fft),
        },
        table=_make_cost_table,
        cost={"smoke": "1 s", "laptop": "3 s", "paper": "10 s"},
    ),
    "table:error_summary": Recipe(
        version=1,
        points=_make_error_points,
        run=_run_errors,
        checks={
            "similarity": Check(_check_similarity),
            "derivative": Check(_check_derivative),
            "derivative-acts": Check(_check_derivative_acts),
            "forward": Check(_check_forward_beta),
            "lipschitz": Check(_check_smaller),
        },
        figures={"Local errors by β": _draw_errors},
        table=_make_error_table,
        cost={"smoke": "1 s", "laptop": "10 s", "paper": "30 s"},
    ),
}
