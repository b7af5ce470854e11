"""Iterations of Quasi-, Forward- and Conv-DEER at initialisation, by eigenvalues, β and length, in float32.

The networks are those of table:baseline_deer_untrained_config. A count is the number of updates until every step of the
new iterate has converged; -1 means that it did not converge.
"""

from collections.abc import Iterable, Mapping
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from adptnet.analysis import plot
from adptnet.nn import ADPTNet

from ..evidence import rank_correlation
from ..recipe import Check, ClaimVerdict, GridPoint, Recipe, Rows, RunOutput, Scale, Table, decide
from ..settings.deer_networks import MAX_ITERATIONS, METHODS, build_network, solve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETAS = [0.125, 1.0, 4.0, 20.0, 100.0]
LENGTHS = (512, 1024, 4096, 8192, 16384)  # the paper's 1204 is 1024


def _make_network(point: GridPoint) -> tuple[ADPTNet, Tensor]:
    settings = point.settings
    layer = build_network(settings["width"], settings["beta"], settings["dt_min"], settings["dt_max"])
    x = torch.randn(settings["samples"], settings["steps"], settings["width"])
    return layer, x


def _run(point: GridPoint) -> RunOutput:
    layer, x = _make_network(point)
    counts = {}
    for method in METHODS:
        history = solve(method, layer, x).history
        assert history is not None
        counts[method] = history.iterations_for(point.settings["steps"])
    return RunOutput(counts, layer.spec)


def _run_lengths(point: GridPoint) -> RunOutput:
    """Solve the longest sequence. It gives the count of every shorter one, since no state depends on a later one."""
    layer, x = _make_network(point)
    counts = {}
    for method in METHODS:
        history = solve(method, layer, x).history
        assert history is not None
        counts[method] = [history.iterations_for(steps) for steps in point.settings["lengths"]]
    return RunOutput(counts, layer.spec)


def _make_eigenvalue_points(scale: Scale) -> list[GridPoint]:
    width, steps, samples, seeds = {"smoke": (8, 24, 2, 1), "laptop": (64, 512, 2, 3), "paper": (64, 1024, 5, 3)}[scale]
    pairs = [(1e-2, 1e-1), (1e-3, 1e-1), (1e-3, 1e-2), (1e-3, 5e-3), (1e-3, 1e-3)]
    shared = {"width": width, "steps": steps, "samples": samples}
    return [
        GridPoint({"dt_min": low, "dt_max": high, "beta": beta, **shared}, seed)
        for seed in range(seeds)
        for low, high in pairs
        for beta in BETAS
    ]


def _make_length_points(scale: Scale) -> list[GridPoint]:
    width, longest, samples, seeds = {"smoke": (8, 64, 2, 1), "laptop": (64, 4096, 2, 3), "paper": (64, 16384, 5, 3)}[
        scale
    ]
    lengths = [16, 32, 64] if scale == "smoke" else [steps for steps in LENGTHS if steps <= longest]
    settings = {"dt_min": 1e-4, "dt_max": 1e-1, "beta": 0.125, "width": width, "steps": longest, "lengths": lengths}
    return [GridPoint({**settings, "samples": samples}, seed) for seed in range(seeds)]


# Statistics of the counts


def _converged_counts(rows: Rows) -> dict[str, list[int]]:
    """Return, by method, the counts of the samples where every method converged."""
    return _select_converged(_all_counts(rows))


def _all_counts(rows: Rows) -> dict[str, list[int]]:
    return {method: list(chain.from_iterable(rows.numbers(method))) for method in METHODS}


def _select_converged(counts: Mapping[str, list[int]]) -> dict[str, list[int]]:
    samples = [sample for sample in zip(*counts.values(), strict=True) if min(sample) > 0]
    return {method: [sample[place] for sample in samples] for place, method in enumerate(counts)}


def _mean(values: list[int]) -> float:
    """Return the mean; NaN, with which every comparison is false, if there are no values."""
    return float(np.mean(values)) if values else np.nan


def _means(rows: Rows) -> dict[str, float]:
    return {method: _mean(values) for method, values in _converged_counts(rows).items()}


def _largest(counts: Mapping[str, list[int]]) -> dict[str, int]:
    """Return the largest count of each method. A run that did not converge counts as one more than the limit."""
    return {method: max(n if n > 0 else MAX_ITERATIONS + 1 for n in values) for method, values in counts.items()}


def _format_largest(counts: Iterable[int]) -> str:
    return "/".join(str(n) if n <= MAX_ITERATIONS else f">{MAX_ITERATIONS}" for n in counts)


def _count_censored(rows: Rows) -> int:
    return sum(value < 0 for method in METHODS for counts in rows.numbers(method) for value in counts)


def _check_beta(rows: Rows) -> ClaimVerdict:
    """Spearman's correlation of β and the mean count is at least 0.6 for each method and pair of different Δt."""
    found = []
    for low, high in _dt_pairs(rows):
        group = rows.where(dt_min=low, dt_max=high)
        for method in METHODS:
            found.append(rank_correlation(BETAS, [_means(group.where(beta=b))[method] for b in BETAS]))
    means = [_means(rows.where(dt_min=1e-3, dt_max=1e-1, beta=b))["Conv"] for b in BETAS]
    by_beta = ", ".join(f"{b:g}: {mean:.1f}" for b, mean in zip(BETAS, means, strict=True))
    return decide(
        all(value >= 0.6 for value in found),
        f"smallest correlation {min(found):.2f}; Conv at Δt_min = 0.001 by β {by_beta}",
    )


def _dt_pairs(rows: Rows) -> list[tuple[float, float]]:
    pairs = dict.fromkeys((row.settings["dt_min"], row.settings["dt_max"]) for row in rows)
    return [pair for pair in pairs if pair[0] != pair[1]]


def _extra_iterations(rows: Rows, beta: float, method: str) -> float:
    """Return the mean count at Δt_min = 0.001 minus that at 0.01."""
    long, short = (_means(rows.where(dt_min=low, dt_max=1e-1, beta=beta))[method] for low in (1e-3, 1e-2))
    return long - short


def _check_memory(rows: Rows) -> ClaimVerdict:
    """The mean count is larger at Δt_min = 0.001 than at 0.01 for every method and β."""
    extra = [_extra_iterations(rows, b, m) for b in BETAS for m in METHODS]
    return decide(all(d > 0 for d in extra), f"differences {min(extra):+.1f} to {max(extra):+.1f}")


def _check_memory_by_beta(rows: Rows) -> ClaimVerdict:
    """Spearman's correlation of β and that difference is at least 0.6 for every method."""
    found = [rank_correlation(BETAS, [_extra_iterations(rows, b, m) for b in BETAS]) for m in METHODS]
    by_beta = ", ".join(f"{_extra_iterations(rows, b, 'Conv'):+.1f}" for b in BETAS)
    return decide(all(value >= 0.6 for value in found), f"smallest correlation {min(found):.2f}; Conv by β {by_beta}")


def _check_spread(rows: Rows) -> ClaimVerdict:
    """At every β and for every method the mean count decreases from Δt_max = 0.01 over 0.005 to 0.001."""
    falls = []
    for beta in BETAS:
        for method in METHODS:
            series = [_means(rows.where(dt_min=1e-3, dt_max=high, beta=beta))[method] for high in (1e-2, 5e-3, 1e-3)]
            falls.append(series[0] >= series[1] >= series[2] and series[0] > series[2])
    return decide(all(falls), f"in {sum(falls)} of {len(falls)} series")


def _check_linear(rows: Rows) -> ClaimVerdict:
    """At Δt_min = Δt_max the mean count of Quasi- and Forward-DEER is 1."""
    means = _means(rows.where(dt_min=1e-3, dt_max=1e-3))
    return decide(means["Quasi"] == means["Forward"] == 1, _format(means))


def _check_conv_more(rows: Rows) -> ClaimVerdict:
    """At Δt_min = Δt_max the mean count of Conv-DEER is above 1 and below 2."""
    means = _means(rows.where(dt_min=1e-3, dt_max=1e-3))
    return decide(1 < means["Conv"] < 2, _format(means) + ": convergence is tested by the residual, relative tolerance")


def _check_same_mean(rows: Rows) -> ClaimVerdict:
    """At β = 1 the medians differ by at most 10 % or one iteration, for either Δt_min."""
    found = [_medians(rows.where(dt_min=low, dt_max=1e-1, beta=1.0)) for low in (1e-2, 1e-3)]
    holds = all(max(m.values()) - min(m.values()) <= max(1, 0.1 * m["Quasi"]) for m in found)
    return decide(holds, "medians " + "; ".join(_format(medians) for medians in found))


def _medians(rows: Rows) -> dict[str, float]:
    counts = _converged_counts(rows)
    return {method: float(np.median(values)) if values else np.nan for method, values in counts.items()}


def _check_order(rows: Rows) -> ClaimVerdict:
    """At β = 100 and Δt_min = 0.001, Quasi <= Forward <= Conv in the mean and the median, and Quasi < Conv."""
    group = rows.where(dt_min=1e-3, dt_max=1e-1, beta=100.0)
    both = [_means(group), _medians(group)]
    holds = all(m["Quasi"] <= m["Forward"] <= m["Conv"] and m["Quasi"] < m["Conv"] for m in both)
    return decide(holds, f"means {_format(both[0])}; medians {_format(both[1])}")


def _check_outliers(rows: Rows) -> ClaimVerdict:
    """At β = 1 and 100 and Δt_min = 0.001 the largest count of Conv-DEER is above those of the others.

    A run that did not converge within 150 iterations counts as 151.
    """
    tops = [_largest(_all_counts(rows.where(dt_min=1e-3, dt_max=1e-1, beta=b))) for b in (1.0, 100.0)]
    holds = all(top["Conv"] > max(top["Quasi"], top["Forward"]) for top in tops)
    return decide(holds, "largest " + "; ".join(_format(top) for top in tops))


def _format(values: Mapping[str, float]) -> str:
    return ", ".join(f"{method} {value:.1f}" for method, value in values.items())


def _counts_by_length(rows: Rows) -> dict[int, dict[str, list[int]]]:
    """Return the counts of all samples, by length and method."""
    lengths: list[int] = rows[0].settings["lengths"]
    return {
        steps: {method: [n for row in rows for n in row.numbers[method][place]] for method in METHODS}
        for place, steps in enumerate(lengths)
    }


def _means_by_length(rows: Rows) -> dict[int, dict[str, float]]:
    """Return the means over the samples where every method converged, by length and method."""
    return {
        t: {m: _mean(v) for m, v in _select_converged(counts).items()} for t, counts in _counts_by_length(rows).items()
    }


def _check_grows(rows: Rows) -> ClaimVerdict:
    """For every method the mean count never decreases with the length, and is larger at the longest than the
    shortest."""
    means = _means_by_length(rows)
    series = [[means[t][m] for t in means] for m in METHODS]
    holds = all(all(a <= b for a, b in pairwise(s)) and s[-1] > s[0] for s in series)
    return decide(holds, "; ".join(f"T = {t}: {_format(m)}" for t, m in means.items()))


def _check_lengths_same_mean(rows: Rows) -> ClaimVerdict:
    """At every length the mean counts differ by at most 10 % or half an iteration."""
    gaps = []
    for by_method in _means_by_length(rows).values():
        means = list(by_method.values())
        gaps.append((max(means) - min(means), means[0]))
    return decide(all(g <= max(0.5, 0.1 * m) for g, m in gaps), f"largest difference {max(g for g, _ in gaps):.2f}")


def _check_lengths_outliers(rows: Rows) -> ClaimVerdict:
    """At every length the largest counts of Conv- and Forward-DEER are above that of Quasi-DEER."""
    tops = {t: _largest(counts) for t, counts in _counts_by_length(rows).items()}
    holds = all(min(top["Conv"], top["Forward"]) > top["Quasi"] for top in tops.values())
    return decide(holds, "largest " + "; ".join(f"T = {t}: {_format(top)}" for t, top in tops.items()))


def _check_magnitude(rows: Rows) -> ClaimVerdict:
    """At every length the largest count of any method is below ten times that of Quasi-DEER."""
    tops = [_largest(counts) for counts in _counts_by_length(rows).values()]
    ratios = [max(top.values()) / top["Quasi"] for top in tops]
    return decide(max(ratios) < 10, f"largest ratio {max(ratios):.2f}")


# Figures and tables

_COLOUR = dict(zip(METHODS, plot.COLORS, strict=False))


def _draw_eigenvalues(rows: Rows) -> "Figure":
    figure = plot.new_figure(9.5, 3.4)
    left, right = figure.subplots(1, 2, sharey=True)
    styles = {1e-2: ":", 1e-3: "-", 5e-3: "--"}
    for axis, pairs, key in (
        (left, [(1e-2, 1e-1), (1e-3, 1e-1)], 0),
        (right, [(1e-3, 1e-2), (1e-3, 5e-3), (1e-3, 1e-3)], 1),
    ):
        for pair in pairs:
            group = rows.where(dt_min=pair[0], dt_max=pair[1])
            for method in METHODS:
                means = [_means(group.where(beta=b))[method] for b in BETAS]
                style = styles[pair[key]] if pair[0] != pair[1] else "-."
                name = "Δt_min" if key == 0 else "Δt_max"
                axis.plot(
                    BETAS,
                    means,
                    style,
                    marker="o",
                    markersize=3,
                    color=_COLOUR[method],
                    label=f"{method}, {name} = {pair[key]:g}",
                )
        axis.set(xscale="log", xlabel="β")
        axis.legend(frameon=False, fontsize=7)
        plot.strip_axes(axis)
    left.set(ylabel="mean iterations", title="Longer memory")
    right.set(title="Smaller spread (Δt_min = 0.001)")
    return figure


def _draw_distribution(rows: Rows) -> "Figure":
    figure = plot.new_figure(9.5, 2.8)
    for axis, beta in zip(figure.subplots(1, 2), (1.0, 100.0), strict=True):
        samples = _converged_counts(rows.where(dt_min=1e-3, dt_max=1e-1, beta=beta))
        top = max((max(v) for v in samples.values() if v), default=1)
        edges = np.arange(0.5, top + 1.6, max(1, top // 25))
        for method, values in samples.items():
            axis.hist(values, bins=edges, histtype="step", linewidth=1.8, color=_COLOUR[method], label=method)
            if values:
                axis.axvline(float(np.median(values)), color=_COLOUR[method], linewidth=0.9, linestyle="--")
        axis.set(xlabel="iterations", ylabel="samples", title=f"β = {beta:g} (dashed: median)")
        axis.legend(frameon=False, fontsize=8)
        plot.strip_axes(axis)
    return figure


def _draw_lengths(rows: Rows) -> "Figure":
    figure = plot.new_figure(6, 3.4)
    axis = figure.subplots()
    means = _means_by_length(rows)
    tops = {t: _largest(counts) for t, counts in _counts_by_length(rows).items()}
    for method, marker in zip(METHODS, "os^", strict=True):
        axis.plot(
            list(means),
            [means[t][method] for t in means],
            marker=marker,
            color=_COLOUR[method],
            label=f"{method}, mean",
        )
        axis.plot(
            list(tops),
            [tops[t][method] for t in tops],
            ":",
            marker=marker,
            markersize=4,
            color=_COLOUR[method],
            label=f"{method}, largest",
        )
    axis.set_xscale("log", base=2)
    axis.set(xlabel="length T", ylabel="iterations", ylim=(0, None))
    axis.legend(frameon=False, fontsize=8, ncols=3)
    plot.strip_axes(axis)
    return figure


def _make_eigenvalue_table(rows: Rows) -> Table:
    lines = []
    for low, high in dict.fromkeys((row.settings["dt_min"], row.settings["dt_max"]) for row in rows):
        for beta in BETAS:
            group = rows.where(dt_min=low, dt_max=high, beta=beta)
            lines.append(
                [
                    low,
                    high,
                    beta,
                    *(f"{v:.1f}" for v in _means(group).values()),
                    _format_largest(_largest(_all_counts(group)).values()),
                    _count_censored(group),
                ]
            )
    return Table(["Δt_min", "Δt_max", "β", *METHODS, "largest (" + "/".join(METHODS) + ")", "censored"], lines)


def _make_length_table(rows: Rows) -> Table:
    means = _means_by_length(rows)
    lines = [
        [t, *(f"{mean:.1f}" for mean in means[t].values()), *(_format_largest([n]) for n in _largest(c).values())]
        for t, c in _counts_by_length(rows).items()
    ]
    return Table(["T", *(f"{m}, mean" for m in METHODS), *(f"{m}, largest" for m in METHODS)], lines)


RECIPES = {
    "fig:eigenvalue_dt_min_max": Recipe(
        version=1,
        points=_make_eigenvalue_points,
        run=_run,
        checks={
            "beta": Check(_check_beta, "laptop"),
            "memory": Check(_check_memory, "laptop"),
            "memory-by-beta": Check(_check_memory_by_beta, "laptop"),
            "spread": Check(_check_spread, "laptop"),
            "linear": Check(_check_linear),
            "conv-more": Check(_check_conv_more),
            "same-mean": Check(_check_same_mean, "laptop"),
            "order": Check(_check_order, "laptop"),
            "outliers": Check(_check_outliers, "laptop"),
        },
        figures={
            "Mean iterations by β": _draw_eigenvalues,
            "Distribution of iterations, Δt_min = 0.001": _draw_distribution,
        },
        table=_make_eigenvalue_table,
        cost={"smoke": "3 s", "laptop": "2 min", "paper": "3 min"},
        dtype=torch.float32,
    ),
    "fig:deer_seq_len": Recipe(
        version=1,
        points=_make_length_points,
        run=_run_lengths,
        checks={
            "grows": Check(_check_grows, "laptop"),
            "same-mean": Check(_check_lengths_same_mean, "laptop"),
            "outliers": Check(_check_lengths_outliers, "laptop"),
            "magnitude": Check(_check_magnitude),
        },
        figures={"Iterations by length": _draw_lengths},
        table=_make_length_table,
        cost={"smoke": "1 s", "laptop": "10 s", "paper": "2 min"},
        dtype=torch.float32,
    ),
}
