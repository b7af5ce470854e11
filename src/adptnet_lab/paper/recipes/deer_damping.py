"""Damping: iterations of each method by damping factor, with 16 of 64 eigenvalues negative (sec:scale_elk_damping)."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adptnet import solvers
from adptnet.analysis import plot

from ..evidence import has_outlier, paired_difference
from ..recipe import Check, GridPoint, Recipe, Rows, RunOutput, Scale, Table, use_complete_seeds
from ..settings.deer_networks import METHODS, build_network, make_solver
from ..verdicts import ClaimVerdict, combine, decide, judge_increase, not_testable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FACTORS = [1.0, 0.999, 0.99, 0.95, 0.9]
JACOBIAN_FREE = ("Forward", "Conv")


def _make_points(scale: Scale) -> list[GridPoint]:
    width, steps, samples = {"smoke": (8, 24, 2), "laptop": (64, 512, 6), "paper": (64, 1024, 50)}[scale]
    return [
        GridPoint({"width": width, "steps": steps, "negative": share}, s)
        for share in (0.25, 0.0)
        for s in range(samples)
    ]


def _run(point: GridPoint) -> RunOutput:
    settings = point.settings
    layer = build_network(settings["width"], 0.125, 1e-4, negative=settings["negative"])
    x = torch.randn(1, settings["steps"], settings["width"])
    factors = FACTORS if settings["negative"] else FACTORS[:1]  # without negative eigenvalues only medians are compared
    counts: dict[str, list[int]] = {method: [] for method in METHODS}
    for method in METHODS:
        for factor in factors:
            solution = make_solver(method, factor, max_iterations=settings["steps"])(layer.cell, x)
            converged = solution.result == solvers.Result.CONVERGED
            counts[method].append(int(solution.iterations) if converged else settings["steps"])
    return RunOutput(counts, layer.spec)


def _counts(rows: Rows, method: str, factor: float) -> np.ndarray[Any, Any]:
    return np.asarray([row.numbers[method][FACTORS.index(factor)] for row in rows.where(negative=0.25)])


def _relative_gaps(rows: Rows, method: str, factor: float) -> np.ndarray[Any, Any]:
    """Return the absolute difference of each count from Quasi-DEER's, relative to Quasi-DEER's."""
    quasi = _counts(rows, "Quasi", factor)
    return np.asarray(np.abs(_counts(rows, method, factor) - quasi) / quasi)


@use_complete_seeds
def _check_outliers(rows: Rows) -> ClaimVerdict:
    """With a factor of 0.999 or 0.99 no count of Conv- or Forward-DEER is an outlier, that is above twice the median.

    Not testable if none is without damping.
    """
    counts = {m: [_counts(rows, m, factor) for factor in (1.0, 0.999, 0.99)] for m in JACOBIAN_FREE}
    text = "; ".join(
        f"{m} median {np.median(c[0]):g}, largest {c[0].max():g} → {min(c[1].max(), c[2].max()):g}"
        for m, c in counts.items()
    )
    if not any(has_outlier(c[0].tolist()) for c in counts.values()):
        return not_testable(f"there is no outlier to remove: {text}")
    removed = [not all(has_outlier(each.tolist()) for each in c[1:]) for c in counts.values()]
    return decide(all(removed), text, runs=len(rows.where(negative=0.25)))


@use_complete_seeds
def _check_over_damped(rows: Rows) -> ClaimVerdict:
    """The count at the strongest damping minus that without damping, paired by network, has an interval above 0 for
    every method. A tenth of the count matters."""
    parts = []
    for method in METHODS:
        free, damped = (_counts(rows, method, factor) for factor in (1.0, FACTORS[-1]))
        parts.append(judge_increase(paired_difference(damped, free, "Δ iterations"), 0.1 * float(free.mean()), method))
    medians = "; ".join(f"{m} " + " → ".join(f"{np.median(_counts(rows, m, f)):g}" for f in FACTORS) for m in METHODS)
    return combine(parts, f"{'; '.join(part.why for part in parts)}; medians by factor 1 … 0.9: {medians}")


@use_complete_seeds
def _check_aligned(rows: Rows) -> ClaimVerdict:
    """The relative difference from Quasi-DEER without damping minus that at the strongest damping, paired by network,
    has an interval above 0, for Forward- and for Conv-DEER. One percent matters."""
    parts = []
    for method in JACOBIAN_FREE:
        free, damped = (100 * _relative_gaps(rows, method, factor) for factor in (1.0, FACTORS[-1]))
        parts.append(judge_increase(paired_difference(free, damped, "Δ %"), 1, method))
    return combine(parts)


@use_complete_seeds
def _check_conv_further(rows: Rows) -> ClaimVerdict:
    """The relative difference from Quasi-DEER of Conv- minus that of Forward-DEER, averaged over the factors and paired
    by network, has an interval above 0. Half a percent matters."""
    conv, forward = (
        np.mean([100 * _relative_gaps(rows, method, factor) for factor in FACTORS], axis=0)
        for method in ("Conv", "Forward")
    )
    each = ", ".join(
        f"{_relative_gaps(rows, 'Conv', f).mean():.2%} / {_relative_gaps(rows, 'Forward', f).mean():.2%}"
        for f in FACTORS
    )
    return judge_increase(paired_difference(conv, forward, "Δ %"), 0.5, f"Conv / Forward by factor {each}")


@use_complete_seeds
def _check_negative(rows: Rows) -> ClaimVerdict:
    """Without damping, the count of Quasi-DEER with negative eigenvalues minus that without, paired by seed, has an
    interval above 0. One iteration matters."""
    with_signs, without = ([row.numbers["Quasi"][0] for row in rows.where(negative=share)] for share in (0.25, 0.0))
    text = f"medians {np.median(with_signs):g} and {np.median(without):g}"
    return judge_increase(paired_difference(with_signs, without, "Δ iterations"), 1, text)


def _draw(rows: Rows) -> "Figure":
    figure = plot.new_figure(9.5, 3.4)
    left, right = figure.subplots(1, 2)
    rng = np.random.default_rng(0)
    for shift, (method, colour) in enumerate(zip(METHODS, plot.COLORS, strict=False)):
        for place, factor in enumerate(FACTORS):
            counts = _counts(rows, method, factor)
            where = place + 0.25 * (shift - 1)
            left.bar(
                where,
                np.median(counts),
                0.22,
                color=colour,
                alpha=0.35,
                label=None if place else f"{method} (bar: median)",
            )
            left.plot(where + 0.06 * rng.standard_normal(len(counts)), counts, ".", color=colour, markersize=4)
    for method, colour in zip(JACOBIAN_FREE, plot.COLORS[1:], strict=False):
        for place, factor in enumerate(FACTORS):
            quasi = _counts(rows, "Quasi", factor)
            relative = 100 * (_counts(rows, method, factor) - quasi) / quasi
            where = place + (0.12 if method == "Conv" else -0.12)
            right.plot(
                where + 0.03 * rng.standard_normal(len(relative)),
                relative,
                ".",
                color=colour,
                markersize=5,
                label=None if place else method,
            )
    left.set(ylabel="iterations", title="Iterations", yscale="log")
    right.set(ylabel="% more than Quasi-DEER", title="Difference from Quasi-DEER")
    right.axhline(0, color="black", linewidth=0.7, linestyle=":")
    for axis in (left, right):
        axis.set_xticks(range(len(FACTORS)), [f"{f:g}" for f in FACTORS])
        axis.set(xlabel="damping factor")
        axis.legend(frameon=False, fontsize=8)
        plot.strip_axes(axis)
    return figure


def _make_table(rows: Rows) -> Table:
    lines = []
    for factor in FACTORS:
        counts = [_counts(rows, m, factor) for m in METHODS]
        lines.append([factor, *(f"{np.median(c):g}" for c in counts), *(int(c.max()) for c in counts)])
    return Table(["factor", *(f"{m}, median" for m in METHODS), *(f"{m}, largest" for m in METHODS)], lines)


RECIPES = {
    "fig:damping_delta_and_iter": Recipe(
        version=1,
        points=_make_points,
        run=_run,
        checks={
            "outliers": Check(_check_outliers, "laptop"),
            "over-damped": Check(_check_over_damped),
            "aligned": Check(_check_aligned, "laptop"),
            "conv-further": Check(_check_conv_further, "laptop"),
            "negative": Check(_check_negative, "laptop"),
        },
        figures={"Iterations by damping factor": _draw},
        table=_make_table,
        cost={"smoke": "2 s", "laptop": "2 min", "paper": "20 min"},
        dtype=torch.float32,
    ),
}
