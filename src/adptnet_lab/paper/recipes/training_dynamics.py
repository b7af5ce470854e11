"""Training on long Copy Memory: signs of eigenvalues, shifts of singular values, and iterations along training.

The same two networks are shown in fig:trained_pos_vs_neg_eig, fig:delta_distribution and fig:trained_damping.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from adptnet import analysis, solvers
from adptnet.analysis import plot
from adptnet.nn import ADPTNet

from ..evidence import rank_correlation
from ..recipe import Check, ClaimVerdict, GridPoint, Outcome, Recipe, Row, Rows, RunOutput, Scale, Table, decide
from ..settings.copy_memory import measure_spectrum, train_on_copy_memory
from ..settings.deer_networks import METHODS, make_solver

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = "fig:trained_pos_vs_neg_eig"
FACTORS = [1.0, 0.99, 0.9]
BLOCKS = 8
PASSED = 90.0  # percent; the paper counts a network below it as not having learned the task
EDGES = np.linspace(-0.1, 0.1, 82)  # of the histogram of shifts; the outermost bins include the tails
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"lengths": [24], "width": 8, "sequences": 64, "test": 16, "epochs": [1, 2, 3]},
    "laptop": {"lengths": [256], "width": 64, "sequences": 2000, "test": 500, "epochs": [1, 5, 10, 20, 30, 40, 50]},
    "paper": {
        "lengths": [256, 512, 1024],  # 1024 in the paper: hours on one core, so the longest that was run counts
        "width": 128,
        "sequences": 10_000,
        "test": 1000,
        "epochs": [1, 5, 10, 20, 40, 60, 80, 100],
    },
}


def _make_points(scale: Scale) -> list[GridPoint]:
    shared: dict[str, Any] = {"weights": "dense", "beta": 0.0125, "rate": 4e-3, **SIZES[scale]}
    lengths = shared.pop("lengths")
    return [GridPoint({"negative": share, "length": steps, **shared}) for steps in lengths for share in (0.0, 0.25)]


def _run(point: GridPoint) -> RunOutput:
    return train_on_copy_memory(point, _take_snapshot)


@torch.no_grad()
def _take_snapshot(layer: ADPTNet, x: Tensor) -> dict[str, Any]:
    shifts = analysis.singular_value_shifts(layer, x[0]).double().flatten()
    clipped = shifts.clamp(float(EDGES[0]), float(EDGES[-1])).numpy()
    return {
        **measure_spectrum(layer, x),
        "spread": analysis.eigenvalue_spread(layer),
        "shift mean": float(shifts.mean()),
        "shift deviation": float(shifts.std()),
        "shift counts": np.histogram(clipped, EDGES)[0].tolist(),
        "iterations": {f"{factor:g}": _count_iterations(layer, x, factor) for factor in FACTORS},
        "in blocks": _count_iterations(layer, x, 1.0, BLOCKS),
    }


def _count_iterations(layer: Any, x: Tensor, factor: float, blocks: int = 1) -> dict[str, int]:
    """Return the iterations of each method; the number of steps if it did not converge."""
    counts = {}
    for method in METHODS:
        solver = make_solver(method, factor, max_iterations=x.shape[1])
        solution = (solvers.BlockWise(solver, num_blocks=blocks) if blocks > 1 else solver)(layer.cell, x)
        converged = solution.result == solvers.Result.CONVERGED
        counts[method] = int(solution.iterations.max()) if converged else x.shape[1]
    return counts


def _positive_row(rows: Rows) -> Row:
    row: Row = rows.where(negative=0.0)[0]
    return row


def _series(rows: Rows, negative: float, key: str) -> list[Any]:
    return [snapshot[key] for snapshot in rows.where(negative=negative)[0].numbers["snapshots"]]


def _reject_unlearned(rows: Rows) -> ClaimVerdict | None:
    """Return `not testable` if a network did not learn its task, for claims on the size of an effect of training."""
    accuracies = rows.numbers("accuracy")
    if min(accuracies) >= PASSED:
        return None
    text = ", ".join(f"{value:.1f}" for value in accuracies)
    return ClaimVerdict(Outcome.NOT_TESTABLE, f"the networks have not learned the task: {text} %")


# fig:trained_pos_vs_neg_eig


def _check_aligned(rows: Rows) -> ClaimVerdict:
    """At the last epoch the mean |α_i - ln |λ̄|_(i)| is below 10 % of the width of ln |λ̄|, in both networks."""
    found = []
    for row in rows:
        last = row.numbers["snapshots"][-1]
        prescribed = np.asarray(last["log_eigenvalues"])
        found.append(float(np.abs(np.asarray(last["exponents"]) - prescribed).mean() / np.ptp(prescribed)))
    return decide(max(found) < 0.1, f"positive {found[0]:.1%}, both signs {found[1]:.1%}")


def _check_minimum(rows: Rows) -> ClaimVerdict:
    """At the last epoch |λ̄|_min of the positive network is at most a hundredth of that of the other.

    Not testable if a network has not learned its task; the paper's networks are at 90 % or above.
    """
    lows = [min(_series(rows, negative, "log_eigenvalues")[-1]) for negative in (0.0, 0.25)]
    verdict = decide(lows[0] <= lows[1] - np.log(100), f"ln |λ̄|_min {lows[0]:.2f} and {lows[1]:.2f}")
    return _reject_unlearned(rows) or verdict


def _check_spread_grows(rows: Rows) -> ClaimVerdict:
    """Spearman's correlation of epoch and spread is at least 0.8 in both networks, and both spreads end larger than
    they start."""
    texts, holds = [], True
    for negative in (0.0, 0.25):
        spreads = _series(rows, negative, "spread")
        holds &= rank_correlation(rows[0].settings["epochs"], spreads) >= 0.8 and spreads[-1] > spreads[0]
        texts.append(f"{spreads[0]:.2f} → {spreads[-1]:.2f}")
    return decide(holds, ", ".join(texts))


def _draw_signs(rows: Rows) -> "Figure":
    names = {0.0: "positive", 0.25: "both signs"}
    last = {names[row.settings["negative"]]: row.numbers["snapshots"][-1] for row in rows}
    return plot.spectra(
        {name: torch.tensor(s["exponents"]) for name, s in last.items()},
        {name: torch.tensor(s["log_eigenvalues"]) for name, s in last.items()},
    )


def _draw_spread(rows: Rows) -> "Figure":
    figure = plot.new_figure(5.4, 3.2)
    axis = figure.subplots()
    for negative, name, colour in zip((0.0, 0.25), ("positive", "both signs"), plot.COLORS, strict=False):
        axis.plot(
            rows[0].settings["epochs"], _series(rows, negative, "spread"), "-o", markersize=3, color=colour, label=name
        )
    axis.set(xlabel="epoch", ylabel="λ̄_max − λ̄_min", ylim=(0, 2.05))
    axis.legend(frameon=False, fontsize=8)
    plot.strip_axes(axis)
    return figure


def _make_table(rows: Rows) -> Table:
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


def _check_centred(rows: Rows) -> ClaimVerdict:
    """At every epoch the mean shift is below a tenth of the standard deviation."""
    ratios = [abs(s["shift mean"]) / s["shift deviation"] for s in _positive_row(rows).numbers["snapshots"]]
    return decide(max(ratios) < 0.1, f"at most {max(ratios):.2f} of it")


def _check_variance(rows: Rows) -> ClaimVerdict:
    """The standard deviation of the shifts is larger at the last epoch than at the second recorded epoch."""
    deviations = _series(rows, 0.0, "shift deviation")
    return decide(deviations[-1] > deviations[1], f"{deviations[1]:.2g} → {deviations[-1]:.2g}")


def _draw_shifts(rows: Rows) -> "Figure":
    row = _positive_row(rows)
    figure = plot.new_figure(8, 3)
    for axis, place in zip(figure.subplots(1, 2, sharey=True), (1, -1), strict=True):
        s = row.numbers["snapshots"][place]
        axis.stairs(np.maximum(s["shift counts"], 0.5), EDGES, fill=True, color=plot.COLORS[0])
        title = (
            f"epoch {row.settings['epochs'][place]}: mean {s['shift mean']:.2g}, deviation {s['shift deviation']:.2g}"
        )
        axis.set(xlabel="Δ = σ(J) − |λ̄|", yscale="log", ylim=(0.7, None), xticks=np.linspace(EDGES[0], EDGES[-1], 5))
        axis.set_title(title, fontsize=9)
        plot.strip_axes(axis)
    return figure


# fig:trained_damping


def _counts_by_epoch(rows: Rows, method: str, factor: float) -> list[int]:
    return [s[f"{factor:g}"][method] for s in _series(rows, 0.0, "iterations")]


def _block_counts_by_epoch(rows: Rows, method: str) -> list[int]:
    return [s[method] for s in _series(rows, 0.0, "in blocks")]


def _check_grows(rows: Rows) -> ClaimVerdict:
    """Without damping, Spearman's correlation of spread and iterations over epochs is at least 0.6 for every method."""
    spreads = _series(rows, 0.0, "spread")
    counts = {m: _counts_by_epoch(rows, m, 1.0) for m in METHODS}
    found = {m: rank_correlation(spreads, counts[m]) for m in METHODS}
    text = ", ".join(f"{m} {value:.2f} ({counts[m]})" for m, value in found.items())
    return decide(all(value >= 0.6 for value in found.values()), text)


def _check_collapse(rows: Rows) -> ClaimVerdict:
    """Without damping Conv- and Forward-DEER take as many iterations as steps at some epoch, and Quasi-DEER never does.

    Not testable if the network has not learned its task; the paper's network is at 90 % or above.
    """
    steps = rows[0].settings["length"]
    tops = {m: max(_counts_by_epoch(rows, m, 1.0)) for m in METHODS}
    holds = min(tops["Conv"], tops["Forward"]) >= steps > tops["Quasi"]
    verdict = decide(holds, ", ".join(f"{m} at most {top}" for m, top in tops.items()) + f" of {steps}")
    return _reject_unlearned(rows.where(negative=0.0)) or verdict


def _check_damped_forward(rows: Rows) -> ClaimVerdict:
    """Damped by 0.9, Forward-DEER never takes as many iterations as steps, and its median count is above that without
    damping.

    Not testable if it never takes as many iterations as steps without damping.
    """
    steps = rows[0].settings["length"]
    damped, free = _counts_by_epoch(rows, "Forward", 0.9), _counts_by_epoch(rows, "Forward", 1.0)
    text = f"median {np.median(free):g} → {np.median(damped):g}, largest {max(free)} → {max(damped)} of {steps}"
    if max(free) < steps:
        return ClaimVerdict(Outcome.NOT_TESTABLE, f"there is no extreme to remove: {text}")
    return decide(bool(max(damped) < steps and np.median(damped) > np.median(free)), text)


def _check_damped_conv(rows: Rows) -> ClaimVerdict:
    """Damped by 0.9, Conv-DEER still takes as many iterations as steps at some epoch.

    Not testable if it never does so, damped or not.
    """
    steps = rows[0].settings["length"]
    damped, free = _counts_by_epoch(rows, "Conv", 0.9), _counts_by_epoch(rows, "Conv", 1.0)
    text = f"largest {max(free)} → {max(damped)} of {steps}"
    if max(*damped, *free) < steps:
        return ClaimVerdict(Outcome.NOT_TESTABLE, f"there is no extreme to remove: {text}")
    return decide(max(damped) >= steps, text)


def _check_in_blocks(rows: Rows) -> ClaimVerdict:
    """In eight blocks no count is above twice the median of its method over epochs.

    Not testable if no count is without blocks.
    """
    whole = {m: _counts_by_epoch(rows, m, 1.0) for m in METHODS}
    blocks = {m: _block_counts_by_epoch(rows, m) for m in METHODS}
    text = f"whole sequence {_format_counts(whole)}; in blocks {_format_counts(blocks)}"
    if not any(map(_has_outlier, whole.values())):
        return ClaimVerdict(Outcome.NOT_TESTABLE, f"there is no outlier to remove: {text}")
    return decide(not any(map(_has_outlier, blocks.values())), text)


def _has_outlier(counts: list[int]) -> bool:
    return bool(max(counts) > 2 * np.median(counts))


def _format_counts(counts: dict[str, list[int]]) -> str:
    return ", ".join(f"{method} {values}" for method, values in counts.items())


def _check_blocks_alike(rows: Rows) -> ClaimVerdict:
    """In eight blocks the mean counts over epochs differ by at most 10 % or 0.5."""
    blocks = {m: _block_counts_by_epoch(rows, m) for m in METHODS}
    means = [float(np.mean(counts)) for counts in blocks.values()]
    return decide(max(means) - min(means) <= max(0.5, 0.1 * means[0]), _format_counts(blocks))


def _draw_iterations(rows: Rows) -> "Figure":
    epochs = rows[0].settings["epochs"]
    figure = plot.new_figure(10, 3.2)
    axes = figure.subplots(1, len(FACTORS) + 1, sharey=True)
    for method, colour in zip(METHODS, plot.COLORS, strict=False):
        for axis, factor in zip(axes, FACTORS, strict=False):
            counts = _counts_by_epoch(rows, method, factor)
            axis.semilogy(epochs, counts, "-o", markersize=3, color=colour, label=method)
        counts = _block_counts_by_epoch(rows, method)
        axes[-1].semilogy(epochs, counts, "-o", markersize=3, color=colour, label=method)
    for axis, title in zip(axes, (*(f"damping {f:g}" for f in FACTORS), f"{BLOCKS} blocks"), strict=True):
        axis.axhline(rows[0].settings["length"], color="black", linewidth=0.7, linestyle=":")
        axis.set(xlabel="epoch", title=title)
        plot.strip_axes(axis)
    axes[0].set_ylabel("iterations (dotted: steps)")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


_SHARED: dict[str, Any] = {
    "version": 1,
    "points": _make_points,
    "run": _run,
    "dtype": torch.float32,
    "largest_of": "length",
}
_COST: dict[Scale, str] = {"smoke": "3 s", "laptop": "8 min", "paper": "T = 1024: 10 h; 512: 3.5 h; 256: 1.8 h"}
_NONE: dict[Scale, str] = dict.fromkeys(_COST, "no further runs")

RECIPES = {
    SOURCE: Recipe(
        checks={
            "aligned": Check(_check_aligned, "laptop"),
            "minimum": Check(_check_minimum, "laptop"),
            "spread": Check(_check_spread_grows, "laptop"),
        },
        figures={"Exponents and ln |λ̄| after training": _draw_signs, "Spread of the eigenvalues": _draw_spread},
        table=_make_table,
        cost=_COST,
        **_SHARED,
    ),
    "fig:delta_distribution": Recipe(
        checks={"centred": Check(_check_centred, "laptop"), "variance": Check(_check_variance, "laptop")},
        figures={"Shifts of the singular values": _draw_shifts},
        cost=_NONE,
        source=SOURCE,
        **_SHARED,
    ),
    "fig:trained_damping": Recipe(
        checks={
            "grows": Check(_check_grows, "laptop"),
            "collapse": Check(_check_collapse, "laptop"),
            "damped-forward": Check(_check_damped_forward, "laptop"),
            "damped-conv": Check(_check_damped_conv, "laptop"),
            "blocks": Check(_check_in_blocks, "laptop"),
            "blocks-alike": Check(_check_blocks_alike, "laptop"),
        },
        figures={"Iterations along training": _draw_iterations},
        cost=_NONE,
        source=SOURCE,
        **_SHARED,
    ),
}
