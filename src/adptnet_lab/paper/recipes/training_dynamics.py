"""Training on long Copy Memory: signs of eigenvalues, shifts of singular values, and iterations along training.

The same two networks are shown in fig:trained_pos_vs_neg_eig, fig:delta_distribution and fig:trained_damping.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from adptnet import analysis, solvers
from adptnet.analysis import plot
from adptnet.nn import ADPTNet

from ..evidence import estimate_mean, has_outlier, paired_difference, rank_correlation
from ..recipe import Check, GridPoint, Recipe, Row, Rows, RunOutput, Scale, Table
from ..settings.copy_memory import OPTIONS, SCALAR, measure_spectrum, rank_of_encoding, train_on_copy_memory
from ..settings.deer_networks import METHODS, make_solver
from ..verdicts import (
    ClaimVerdict,
    combine,
    judge_equal,
    judge_increase,
    judge_limit,
    judge_trained,
    not_testable,
)

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
        "lengths": [
            64,
            128,
            256,
            512,
            1024,
        ],  # 1024 in the paper; the longest that was run counts
        "width": 128,
        "sequences": 10_000,
        "test": 1000,
        "epochs": [1, 5, 10, 20, 40, 60, 80, 100],
    },
}


def _make_points(scale: Scale) -> list[GridPoint]:
    shared: dict[str, Any] = {"weights": "dense", "beta": 0.0125, "rate": 4e-3, **SIZES[scale]}
    lengths = shared.pop("lengths")
    return [
        GridPoint({"negative": share, "length": steps, **shared, **encoding}, seed)
        for encoding in (SCALAR, {})
        for steps in lengths
        for share in (0.0, 0.25)
        for seed in range(3 if scale == "paper" else 1)
    ]


def _rank(settings: Mapping[str, Any]) -> tuple[bool, int]:
    """Return the rank of a point: scalar input before tokens, then the longest sequences."""
    return rank_of_encoding(settings), settings["length"]


def _describe_reduction(settings: Mapping[str, Any]) -> str:
    full = SIZES["paper"]["lengths"][-1]
    return "" if settings["length"] == full else f"{settings['length']} of {full} steps"


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
    """Return the first positive network, which the figures show."""
    row: Row = rows.where(negative=0.0)[0]
    return row


def _series(rows: Rows, negative: float, key: str) -> list[Any]:
    """Return a number of the first network of one kind, by epoch."""
    return _history(rows.where(negative=negative)[0], key)


def _history(row: Row, key: str) -> list[Any]:
    return [snapshot[key] for snapshot in row.numbers["snapshots"]]


def _reject_unlearned(rows: Rows) -> ClaimVerdict | None:
    """Return `not testable` if a network did not learn its task, for claims on the size of an effect of training."""
    accuracies = rows.numbers("accuracy")
    if min(accuracies) >= PASSED:
        return None
    text = ", ".join(f"{value:.1f}" for value in accuracies)
    return not_testable(f"the networks have not learned the task: {text} %")


# fig:trained_pos_vs_neg_eig


def _check_learned(rows: Rows) -> ClaimVerdict:
    """Every network has an accuracy of at least 90 % after training."""
    accuracies = rows.numbers("accuracy")
    return judge_trained([value >= PASSED for value in accuracies], f"{min(accuracies):.1f} to {max(accuracies):.1f} %")


def _check_stable(rows: Rows) -> ClaimVerdict:
    """At the last epoch the largest exponent is below 0 in every positive network and above 0 in every other."""
    tops = {share: [max(_history(row, "exponents")[-1]) for row in rows.where(negative=share)] for share in (0.0, 0.25)}
    text = "; ".join(
        f"{name} " + ", ".join(f"{top:+.4f}" for top in tops[share])
        for share, name in ((0.0, "positive"), (0.25, "both signs"))
    )
    parts = [judge_trained([top < 0 for top in tops[0.0]], text), judge_trained([top > 0 for top in tops[0.25]], text)]
    return combine(parts, text)


def _check_aligned(rows: Rows) -> ClaimVerdict:
    """At the last epoch the mean |α_i - ln |λ̄|_(i)| over networks is below 10 % of the width of ln |λ̄|, for both
    kinds. Exponents paired at random would give a third of it."""

    def mismatch(row: Row) -> float:
        last = row.numbers["snapshots"][-1]
        prescribed = np.asarray(last["log_eigenvalues"])
        return float(np.abs(np.asarray(last["exponents"]) - prescribed).mean() / np.ptp(prescribed))

    parts = []
    for share, name in ((0.0, "positive"), (0.25, "both signs")):
        found = estimate_mean([mismatch(row) for row in rows.where(negative=share)], "of the width")
        parts.append(judge_limit(found, below=0.1, why=name))
    return combine(parts)


def _check_minimum(rows: Rows) -> ClaimVerdict:
    """At the last epoch ln |λ̄|_min of the network with both signs minus that of the positive one, paired by seed, is
    above ln 100.

    Not testable if a network has not learned its task; the paper's networks are at 90 % or above.
    """
    lows = {s: {r.seed: min(_history(r, "log_eigenvalues")[-1]) for r in rows.where(negative=s)} for s in (0.0, 0.25)}
    seeds = sorted(lows[0.0].keys() & lows[0.25].keys())
    more = paired_difference([lows[0.25][s] for s in seeds], [lows[0.0][s] for s in seeds], "Δ")
    means = [float(np.mean(list(each.values()))) for each in lows.values()]
    verdict = judge_limit(more, above=float(np.log(100)), why=f"ln |λ̄|_min {means[0]:.2f} and {means[1]:.2f}")
    return _reject_unlearned(rows) or verdict


def _check_spread_grows(rows: Rows) -> ClaimVerdict:
    """Spearman's correlation of epoch and spread is at least 0.8 in every positive network, whose spread ends larger
    than it starts. With both signs the spread begins at its maximum of 2, and must stay above 1.9."""
    inside: dict[int, bool] = {}
    texts = []
    for row in rows:
        spreads = _history(row, "spread")
        grows = rank_correlation(row.settings["epochs"], spreads) >= 0.8 and spreads[-1] > spreads[0]
        holds = min(spreads) > 1.9 if row.settings["negative"] else grows
        inside[row.seed] = inside.get(row.seed, True) and holds
        texts.append(f"{spreads[0]:.2f} → {spreads[-1]:.2f}")
    return judge_trained(list(inside.values()), ", ".join(texts))


def _draw_signs(rows: Rows) -> "Figure":
    names = {0.0: "positive", 0.25: "both signs"}
    last = {names[row.settings["negative"]]: row.numbers["snapshots"][-1] for row in rows if row.seed == rows[0].seed}
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
                    row.seed,
                    epoch,
                    f"{s['spread']:.3f}",
                    f"{min(s['log_eigenvalues']):.3f}",
                    f"{max(s['exponents']):.4f}",
                    f"{row.numbers['accuracy']:.1f}",
                ]
            )
    return Table(["negative", "seed", "Epoch", "spread", "ln |λ̄|_min", "LLE", "final accuracy (%)"], lines)


# fig:delta_distribution


def _check_centred(rows: Rows) -> ClaimVerdict:
    """At every epoch the mean shift of every positive network is below 0.005, which is printed as 0.00."""
    means = [max(abs(s["shift mean"]) for s in row.numbers["snapshots"]) for row in rows.where(negative=0.0)]
    return judge_trained([mean < 0.005 for mean in means], f"at most {max(means):.1g}")


def _check_variance(rows: Rows) -> ClaimVerdict:
    """The standard deviation of the shifts at the last epoch minus that at the second recorded epoch has an interval
    above 0 over positive networks. A tenth of it matters."""
    series = [_history(row, "shift deviation") for row in rows.where(negative=0.0)]
    more = paired_difference([s[-1] for s in series], [s[1] for s in series], "Δ")
    text = f"{np.mean([s[1] for s in series]):.2g} → {np.mean([s[-1] for s in series]):.2g}"
    return judge_increase(more, 0.1 * float(np.mean([s[1] for s in series])), text)


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


def _counts_by_epoch(row: Row, method: str, factor: float) -> list[int]:
    return [s[f"{factor:g}"][method] for s in _history(row, "iterations")]


def _block_counts_by_epoch(row: Row, method: str) -> list[int]:
    return [s[method] for s in _history(row, "in blocks")]


def _judge_set(holds: bool, rows: Rows, why: str) -> ClaimVerdict:
    """Judge a statement about all networks together, such as that something occurs in one of them."""
    return judge_trained([holds] * len(rows), why)._replace(estimate=None)


def _check_grows(rows: Rows) -> ClaimVerdict:
    """Without damping, Spearman's correlation of spread and iterations over epochs, averaged over methods, has an
    interval over positive networks above 0. A correlation of 0.5 matters."""
    found, texts = [], []
    for row in rows.where(negative=0.0):
        counts = {m: _counts_by_epoch(row, m, 1.0) for m in METHODS}
        each = [rank_correlation(_history(row, "spread"), values) for values in counts.values()]
        found.append(float(np.nanmean([0.0 if np.isnan(value) else value for value in each])))
        texts.append(_format_counts(counts))
    return judge_increase(estimate_mean(found, "(rank correlation)"), 0.5, "; ".join(texts))


def _check_collapse(rows: Rows) -> ClaimVerdict:
    """Without damping Conv- and Forward-DEER take as many iterations as steps at some epoch of some positive network,
    and Quasi-DEER never does.

    Not testable if a network has not learned its task; the paper's network is at 90 % or above.
    """
    positive, steps = rows.where(negative=0.0), rows[0].settings["length"]
    tops = {m: max(max(_counts_by_epoch(row, m, 1.0)) for row in positive) for m in METHODS}
    holds = min(tops["Conv"], tops["Forward"]) >= steps > tops["Quasi"]
    text = ", ".join(f"{m} at most {top}" for m, top in tops.items()) + f" of {steps}"
    return _reject_unlearned(positive) or _judge_set(holds, positive, text)


def _check_damped_forward(rows: Rows) -> ClaimVerdict:
    """Damped by 0.9, Forward-DEER never takes as many iterations as steps, and its median count is above that without
    damping.

    Not testable if it never takes as many iterations as steps without damping.
    """
    positive, steps = rows.where(negative=0.0), rows[0].settings["length"]
    damped, free = ([n for row in positive for n in _counts_by_epoch(row, "Forward", f)] for f in (0.9, 1.0))
    text = f"median {np.median(free):g} → {np.median(damped):g}, largest {max(free)} → {max(damped)} of {steps}"
    if max(free) < steps:
        return not_testable(f"there is no extreme to remove: {text}")
    holds = bool(max(damped) < steps and np.median(damped) > np.median(free))
    return _judge_set(holds, positive, text)


def _check_damped_conv(rows: Rows) -> ClaimVerdict:
    """Damped by 0.9, Conv-DEER still takes as many iterations as steps at some epoch.

    Not testable if it never does so, damped or not.
    """
    positive, steps = rows.where(negative=0.0), rows[0].settings["length"]
    damped, free = ([n for row in positive for n in _counts_by_epoch(row, "Conv", f)] for f in (0.9, 1.0))
    text = f"largest {max(free)} → {max(damped)} of {steps}"
    if max(*damped, *free) < steps:
        return not_testable(f"there is no extreme to remove: {text}")
    return _judge_set(max(damped) >= steps, positive, text)


def _check_in_blocks(rows: Rows) -> ClaimVerdict:
    """In eight blocks no count is an outlier, that is above twice the median of its method over epochs.

    Not testable if no count is without blocks.
    """
    positive = rows.where(negative=0.0)
    whole = {(row.seed, m): _counts_by_epoch(row, m, 1.0) for row in positive for m in METHODS}
    blocks = {(row.seed, m): _block_counts_by_epoch(row, m) for row in positive for m in METHODS}
    first = positive[0]
    text = f"whole sequence {_format_first(whole, first)}; in blocks {_format_first(blocks, first)}"
    if not any(map(has_outlier, whole.values())):
        return not_testable(f"there is no outlier to remove: {text}")
    return _judge_set(not any(map(has_outlier, blocks.values())), positive, text)


def _format_first(counts: dict[tuple[int, str], list[int]], row: Row) -> str:
    return _format_counts({method: values for (seed, method), values in counts.items() if seed == row.seed})


def _format_counts(counts: dict[str, list[int]]) -> str:
    return ", ".join(f"{method} {values}" for method, values in counts.items())


def _check_blocks_alike(rows: Rows) -> ClaimVerdict:
    """In eight blocks the mean counts over epochs of Forward- and Conv-DEER differ from Quasi-DEER's by less than one
    iteration, over positive networks."""
    positive = rows.where(negative=0.0)
    means = {m: [float(np.mean(_block_counts_by_epoch(row, m))) for row in positive] for m in METHODS}
    text = ", ".join(f"{m} {np.mean(values):.2f}" for m, values in means.items())
    return combine(
        [judge_equal(paired_difference(means[m], means["Quasi"], "Δ iterations"), 1, m) for m in ("Forward", "Conv")],
        f"mean counts {text}",
    )


def _draw_iterations(rows: Rows) -> "Figure":
    epochs = rows[0].settings["epochs"]
    figure = plot.new_figure(10, 3.2)
    axes = figure.subplots(1, len(FACTORS) + 1, sharey=True)
    for method, colour in zip(METHODS, plot.COLORS, strict=False):
        for axis, factor in zip(axes, FACTORS, strict=False):
            counts = _counts_by_epoch(_positive_row(rows), method, factor)
            axis.semilogy(epochs, counts, "-o", markersize=3, color=colour, label=method)
        counts = _block_counts_by_epoch(_positive_row(rows), method)
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
    "rank": _rank,
    "reduction": _describe_reduction,
    "options": OPTIONS,
}
_COST: dict[Scale, str] = {"smoke": "3 s", "laptop": "16 min", "paper": "2.7 h a network at T = 1024, 1.7 h at 512"}
_NONE: dict[Scale, str] = dict.fromkeys(_COST, "no further runs")

RECIPES = {
    SOURCE: Recipe(
        checks={
            "aligned": Check(_check_aligned, "laptop"),
            "learned": Check(_check_learned, "laptop"),
            "stable": Check(_check_stable, "laptop"),
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
