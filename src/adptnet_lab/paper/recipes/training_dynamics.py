"""One training on Copy Memory with long distraction: signs of eigenvalues, shifts of singular values, iterations.

Behind fig:trained_pos_vs_neg_eig, fig:delta_distribution and fig:trained_damping, which show the same two networks.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from adptnet import analysis, solvers
from adptnet.analysis import plot
from adptnet.nn import ADPTNet

from ..evidence import rank_correlation
from ..recipe import Check, Finding, Outcome, Point, Recipe, Row, Rows, Scale, Table, Verdict
from .deer_iterations import METHODS, RTOL
from .trained_timescales import spectrum_of, trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = "fig:trained_pos_vs_neg_eig"
FACTORS = [1.0, 0.99, 0.9]
BLOCKS = 8
PASSED = 90.0  # percent: below it, says the paper, a network has not learnt the task
EDGES = np.linspace(-0.1, 0.1, 82)  # of the histogram of shifts; the outermost bins hold the tails as well
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"lengths": [24], "width": 8, "sequences": 64, "test": 16, "epochs": [1, 2, 3]},
    "laptop": {"lengths": [256], "width": 64, "sequences": 2000, "test": 500, "epochs": [1, 5, 10, 20, 30, 40, 50]},
    "paper": {
        "lengths": [256, 512, 1024],  # the paper's is 1024: hours on a core, and the largest that was run counts
        "width": 128,
        "sequences": 10_000,
        "test": 1000,
        "epochs": [1, 5, 10, 20, 40, 60, 80, 100],
    },
}


def _points(scale: Scale) -> list[Point]:
    shared: dict[str, Any] = {"weights": "dense", "beta": 0.0125, "rate": 4e-3, **SIZES[scale]}
    lengths = shared.pop("lengths")
    return [Point({"negative": share, "length": steps, **shared}) for steps in lengths for share in (0.0, 0.25)]


def _run(point: Point) -> Finding:
    return trained(point, _snapshot)


@torch.no_grad()
def _snapshot(layer: ADPTNet, x: Tensor) -> dict[str, Any]:
    shifts = analysis.singular_value_shifts(layer, x[0]).double().flatten()
    clipped = shifts.clamp(float(EDGES[0]), float(EDGES[-1])).numpy()
    return {
        **spectrum_of(layer, x),
        "spread": analysis.eigenvalue_spread(layer),
        "shift mean": float(shifts.mean()),
        "shift deviation": float(shifts.std()),
        "shift counts": np.histogram(clipped, EDGES)[0].tolist(),
        "iterations": {f"{factor:g}": _iterations(layer, x, factor) for factor in FACTORS},
        "in blocks": _iterations(layer, x, 1.0, BLOCKS),
    }


def _iterations(layer: Any, x: Tensor, factor: float, blocks: int = 1) -> dict[str, int]:
    """Of each method; as many as steps where it did not converge."""
    found = {}
    for name, method in METHODS.items():
        damping = solvers.Scale(factor) if factor < 1 else None
        solver: Any = method(damping, rtol=RTOL, max_iterations=x.shape[1], patience=None, on_failure=solvers.Return())
        solution = (solvers.BlockWise(solver, num_blocks=blocks) if blocks > 1 else solver)(layer.cell, x)
        right = solution.result == solvers.Result.CONVERGED
        found[name] = int(solution.iterations.max()) if right else x.shape[1]
    return found


def _positive(rows: Rows) -> Row:
    row: Row = rows.where(negative=0.0)[0]
    return row


def _series(rows: Rows, negative: float, key: str) -> list[Any]:
    return [snapshot[key] for snapshot in rows.where(negative=negative)[0].numbers["snapshots"]]


def _not_learnt(rows: Rows) -> Verdict | None:
    """What is said of claims on the size of an effect of training where a network did not learn its task."""
    found = rows.numbers("accuracy")
    if min(found) >= PASSED:
        return None
    shown = ", ".join(f"{value:.1f}" for value in found)
    return Verdict(Outcome.NOT_TESTABLE, f"the networks have not learnt the task: {shown} %")


# fig:trained_pos_vs_neg_eig


def _aligned(rows: Rows) -> Verdict:
    """At the last epoch the mean |α_i - ln |λ̄|_(i)| is below 10 % of the width of ln |λ̄|, with either sign."""
    found = []
    for row in rows:
        last = row.numbers["snapshots"][-1]
        wanted = np.asarray(last["log_eigenvalues"])
        found.append(float(np.abs(np.asarray(last["exponents"]) - wanted).mean() / np.ptp(wanted)))
    return Verdict.of(max(found) < 0.1, f"positive {found[0]:.1%}, both signs {found[1]:.1%}")


def _minimum(rows: Rows) -> Verdict:
    """At the last epoch |λ̄|_min of the positive network is at most a hundredth of that of the other.

    Not testable where a network has not learnt its task: the paper's are at 90 % or above.
    """
    lows = [min(_series(rows, negative, "log_eigenvalues")[-1]) for negative in (0.0, 0.25)]
    verdict = Verdict.of(lows[0] <= lows[1] - np.log(100), f"ln |λ̄|_min {lows[0]:.2f} and {lows[1]:.2f}")
    return _not_learnt(rows) or verdict


def _spread_grows(rows: Rows) -> Verdict:
    """Spearman's correlation of epoch and spread is at least 0.8 in both, and both end larger than they began."""
    shown, holds = [], True
    for negative in (0.0, 0.25):
        spreads = _series(rows, negative, "spread")
        holds &= rank_correlation(rows[0].settings["epochs"], spreads) >= 0.8 and spreads[-1] > spreads[0]
        shown.append(f"{spreads[0]:.2f} → {spreads[-1]:.2f}")
    return Verdict.of(holds, ", ".join(shown))


def _draw_signs(rows: Rows) -> "Figure":
    names = {0.0: "positive", 0.25: "both signs"}
    last = {names[row.settings["negative"]]: row.numbers["snapshots"][-1] for row in rows}
    return plot.spectra(
        {name: torch.tensor(s["exponents"]) for name, s in last.items()},
        {name: torch.tensor(s["log_eigenvalues"]) for name, s in last.items()},
    )


def _draw_spread(rows: Rows) -> "Figure":
    figure = plot.blank(5.4, 3.2)
    axis = figure.subplots()
    for negative, name, colour in zip((0.0, 0.25), ("positive", "both signs"), plot.COLOURS, strict=False):
        axis.plot(
            rows[0].settings["epochs"], _series(rows, negative, "spread"), "-o", markersize=3, color=colour, label=name
        )
    axis.set(xlabel="epoch", ylabel="λ̄_max − λ̄_min", ylim=(0, 2.05))
    axis.legend(frameon=False, fontsize=8)
    plot.bare(axis)
    return figure


def _table(rows: Rows) -> Table:
    lines = []
    for row in rows:
        for epoch, s in zip(row.settings["epochs"], row.numbers["snapshots"], strict=True):
            lines.append(
                [
                    f"{row.settings['negative']:.0%}",
                    epoch,
                    f"{s['spread']:.3f}",
                    f"{min(s['log_eigenvalues']):.3f}",
                    f"{max(s['exponents']):.4f}",
                    f"{row.numbers['accuracy']:.1f}",
                ]
            )
    return Table(["negative", "Epoch", "spread", "ln |λ̄|_min", "LLE", "final accuracy (%)"], lines)


# fig:delta_distribution


def _centred(rows: Rows) -> Verdict:
    """At every epoch the mean shift is below a tenth of the standard deviation."""
    ratios = [abs(s["shift mean"]) / s["shift deviation"] for s in _positive(rows).numbers["snapshots"]]
    return Verdict.of(max(ratios) < 0.1, f"at most {max(ratios):.2f} of it")


def _variance(rows: Rows) -> Verdict:
    """The standard deviation of the shifts is larger at the last epoch than at the second that was recorded."""
    deviations = _series(rows, 0.0, "shift deviation")
    return Verdict.of(deviations[-1] > deviations[1], f"{deviations[1]:.2g} → {deviations[-1]:.2g}")


def _draw_shifts(rows: Rows) -> "Figure":
    row = _positive(rows)
    figure = plot.blank(8, 3)
    for axis, place in zip(figure.subplots(1, 2, sharey=True), (1, -1), strict=True):
        s = row.numbers["snapshots"][place]
        axis.stairs(np.maximum(s["shift counts"], 0.5), EDGES, fill=True, color=plot.COLOURS[0])
        title = (
            f"epoch {row.settings['epochs'][place]}: mean {s['shift mean']:.2g}, deviation {s['shift deviation']:.2g}"
        )
        axis.set(xlabel="Δ = σ(J) − |λ̄|", yscale="log", ylim=(0.7, None), xticks=np.linspace(EDGES[0], EDGES[-1], 5))
        axis.set_title(title, fontsize=9)
        plot.bare(axis)
    return figure


# fig:trained_damping


def _counts(rows: Rows, method: str, factor: float) -> list[int]:
    return [s[f"{factor:g}"][method] for s in _series(rows, 0.0, "iterations")]


def _blocks(rows: Rows, method: str) -> list[int]:
    return [s[method] for s in _series(rows, 0.0, "in blocks")]


def _grows(rows: Rows) -> Verdict:
    """Without damping, Spearman's correlation of spread and iterations over epochs is at least 0.6 for every method."""
    spreads = _series(rows, 0.0, "spread")
    found = {m: rank_correlation(spreads, _counts(rows, m, 1.0)) for m in METHODS}
    shown = ", ".join(f"{m} {value:.2f} ({_counts(rows, m, 1.0)})" for m, value in found.items())
    return Verdict.of(all(value >= 0.6 for value in found.values()), shown)


def _collapse(rows: Rows) -> Verdict:
    """Without damping both take as many iterations as steps at some epoch, and Quasi-DEER never does.

    Not testable where the network has not learnt its task: the paper's is at 90 % or above.
    """
    steps = rows[0].settings["length"]
    tops = {m: max(_counts(rows, m, 1.0)) for m in METHODS}
    holds = min(tops["Conv"], tops["Forward"]) >= steps > tops["Quasi"]
    verdict = Verdict.of(holds, ", ".join(f"{m} at most {top}" for m, top in tops.items()) + f" of {steps}")
    return _not_learnt(rows.where(negative=0.0)) or verdict


def _damped_forward(rows: Rows) -> Verdict:
    """Damped by 0.9, Forward-DEER never takes as many iterations as steps, and more than undamped in the median.

    Not testable where it never does so undamped.
    """
    steps, damped, free = rows[0].settings["length"], _counts(rows, "Forward", 0.9), _counts(rows, "Forward", 1.0)
    shown = f"median {np.median(free):g} → {np.median(damped):g}, most {max(free)} → {max(damped)} of {steps}"
    if max(free) < steps:
        return Verdict(Outcome.NOT_TESTABLE, f"there is no extreme to remove: {shown}")
    return Verdict.of(bool(max(damped) < steps and np.median(damped) > np.median(free)), shown)


def _damped_conv(rows: Rows) -> Verdict:
    """Damped by 0.9, Conv-DEER still takes as many iterations as steps at some epoch.

    Not testable where it never does so, damped or not.
    """
    steps, damped, free = rows[0].settings["length"], _counts(rows, "Conv", 0.9), _counts(rows, "Conv", 1.0)
    shown = f"most {max(free)} → {max(damped)} of {steps}"
    if max(*damped, *free) < steps:
        return Verdict(Outcome.NOT_TESTABLE, f"there is no extreme to remove: {shown}")
    return Verdict.of(max(damped) >= steps, shown)


def _in_blocks(rows: Rows) -> Verdict:
    """In eight blocks no count is above twice the median of its method over epochs.

    Not testable where none is without blocks.
    """
    whole, found = {m: _counts(rows, m, 1.0) for m in METHODS}, {m: _blocks(rows, m) for m in METHODS}
    shown = f"whole {_each(whole)}; in blocks {_each(found)}"
    if not any(map(_outlier, whole.values())):
        return Verdict(Outcome.NOT_TESTABLE, f"there is no outlier to remove: {shown}")
    return Verdict.of(not any(map(_outlier, found.values())), shown)


def _outlier(counts: list[int]) -> bool:
    return bool(max(counts) > 2 * np.median(counts))


def _each(counts: dict[str, list[int]]) -> str:
    return ", ".join(f"{method} {values}" for method, values in counts.items())


def _blocks_alike(rows: Rows) -> Verdict:
    """In eight blocks the mean counts over epochs differ by at most 10 % or 0.5."""
    found = {m: _blocks(rows, m) for m in METHODS}
    means = [float(np.mean(counts)) for counts in found.values()]
    return Verdict.of(max(means) - min(means) <= max(0.5, 0.1 * means[0]), _each(found))


def _draw_iterations(rows: Rows) -> "Figure":
    epochs = rows[0].settings["epochs"]
    figure = plot.blank(10, 3.2)
    axes = figure.subplots(1, len(FACTORS) + 1, sharey=True)
    for method, colour in zip(METHODS, plot.COLOURS, strict=False):
        for axis, factor in zip(axes, FACTORS, strict=False):
            axis.semilogy(epochs, _counts(rows, method, factor), "-o", markersize=3, color=colour, label=method)
        axes[-1].semilogy(epochs, _blocks(rows, method), "-o", markersize=3, color=colour, label=method)
    for axis, title in zip(axes, (*(f"damping {f:g}" for f in FACTORS), f"{BLOCKS} blocks"), strict=True):
        axis.axhline(rows[0].settings["length"], color="black", linewidth=0.7, linestyle=":")
        axis.set(xlabel="epoch", title=title)
        plot.bare(axis)
    axes[0].set_ylabel("iterations (dotted: steps)")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


_SHARED: dict[str, Any] = {"version": 1, "points": _points, "run": _run, "dtype": torch.float32, "largest": "length"}
_COST: dict[Scale, str] = {"smoke": "3 s", "laptop": "8 min", "paper": "T = 1024: 10 h; 512: 3.5 h; 256: 1.8 h"}
_NONE: dict[Scale, str] = dict.fromkeys(_COST, "nothing more")

RECIPES = {
    SOURCE: Recipe(
        checks={
            "aligned": Check(_aligned, "laptop"),
            "minimum": Check(_minimum, "laptop"),
            "spread": Check(_spread_grows, "laptop"),
        },
        figures={"Exponents and ln |λ̄| after training": _draw_signs, "Spread of the eigenvalues": _draw_spread},
        table=_table,
        cost=_COST,
        **_SHARED,
    ),
    "fig:delta_distribution": Recipe(
        checks={"centred": Check(_centred, "laptop"), "variance": Check(_variance, "laptop")},
        figures={"Shifts of the singular values": _draw_shifts},
        cost=_NONE,
        source=SOURCE,
        **_SHARED,
    ),
    "fig:trained_damping": Recipe(
        checks={
            "grows": Check(_grows, "laptop"),
            "collapse": Check(_collapse, "laptop"),
            "damped-forward": Check(_damped_forward, "laptop"),
            "damped-conv": Check(_damped_conv, "laptop"),
            "blocks": Check(_in_blocks, "laptop"),
            "blocks-alike": Check(_blocks_alike, "laptop"),
        },
        figures={"Iterations along training": _draw_iterations},
        cost=_NONE,
        source=SOURCE,
        **_SHARED,
    ),
}
