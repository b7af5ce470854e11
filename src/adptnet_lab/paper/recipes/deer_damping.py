"""Damping: iterations of each method by damping factor, with 16 of 64 eigenvalues negative (sec:scale_elk_damping)."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adptnet import solvers
from adptnet.analysis import plot

from ..recipe import Check, ClaimVerdict, GridPoint, Outcome, Recipe, Rows, RunOutput, Scale, Table, decide
from ..settings.deer_networks import METHODS, build_network, make_solver

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FACTORS = [1.0, 0.999, 0.99, 0.95, 0.9]
JACOBIAN_FREE = ("Forward", "Conv")


def _make_points(scale: Scale) -> list[GridPoint]:
    width, steps, samples = {"smoke": (8, 24, 2), "laptop": (64, 512, 6), "paper": (64, 1024, 30)}[scale]
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


def _relative_gap(rows: Rows, method: str, factor: float) -> float:
    """Return the mean absolute difference of the counts from Quasi-DEER's, relative to Quasi-DEER's."""
    quasi = _counts(rows, "Quasi", factor)
    return float(np.mean(np.abs(_counts(rows, method, factor) - quasi) / quasi))


def _check_outliers(rows: Rows) -> ClaimVerdict:
    """The largest count minus the median, at the better of 0.999 and 0.99, is below half of that without damping.

    Not testable if no count without damping is three above the median.
    """

    def tail(method: str, factor: float) -> float:
        counts = _counts(rows, method, factor)
        return float(counts.max() - np.median(counts))

    found = {m: (tail(m, 1.0), min(tail(m, 0.999), tail(m, 0.99))) for m in JACOBIAN_FREE}
    text = "; ".join(f"{m} {a:g} → {b:g} above the median" for m, (a, b) in found.items())
    if max(before for before, _ in found.values()) < 3:
        return ClaimVerdict(Outcome.NOT_TESTABLE, f"there is no outlier to remove: {text}")
    return decide(all(after < before / 2 for before, after in found.values()), text)


def _check_over_damped(rows: Rows) -> ClaimVerdict:
    """The median count at the strongest damping is above that without damping, for every method."""
    medians = {m: [float(np.median(_counts(rows, m, f))) for f in FACTORS] for m in METHODS}
    text = "; ".join(f"{m} " + " → ".join(f"{v:g}" for v in values) for m, values in medians.items())
    return decide(all(v[-1] > v[0] for v in medians.values()), f"medians by factor 1 … 0.9: {text}")


def _check_aligned(rows: Rows) -> ClaimVerdict:
    """The mean relative difference from Quasi-DEER is smaller at the strongest damping than without damping, for
    Forward- and for Conv-DEER."""
    found = {m: (_relative_gap(rows, m, 1.0), _relative_gap(rows, m, FACTORS[-1])) for m in JACOBIAN_FREE}
    return decide(
        all(b < a for a, b in found.values()), "; ".join(f"{m} {a:.2%} → {b:.2%}" for m, (a, b) in found.items())
    )


def _check_conv_further(rows: Rows) -> ClaimVerdict:
    """The mean relative difference from Quasi-DEER is at least as large for Conv- as for Forward-DEER at every
    factor."""
    found = [(_relative_gap(rows, "Conv", f), _relative_gap(rows, "Forward", f)) for f in FACTORS]
    text = ", ".join(f"{c:.2%} / {f:.2%}" for c, f in found)
    return decide(all(c >= f for c, f in found) and any(c > f for c, f in found), f"Conv / Forward by factor {text}")


def _check_negative(rows: Rows) -> ClaimVerdict:
    """Without damping, the median count of Quasi-DEER is larger with negative eigenvalues than without."""
    both = [float(np.median([row.numbers["Quasi"][0] for row in rows.where(negative=share)])) for share in (0.25, 0.0)]
    return decide(both[0] > both[1], f"medians {both[0]:g} and {both[1]:g}")


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
        cost={"smoke": "2 s", "laptop": "2 min", "paper": "12 min"},
        dtype=torch.float32,
    ),
}
