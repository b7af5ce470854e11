"""Iterations of Quasi-, Forward- and Conv-DEER at initialisation, by eigenvalues, β and length, in float32.

The networks are those of table:baseline_deer_untrained_config. A count is the number of updates until every step of the
new iterate has converged; -1 means that it did not converge.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from adptnet.analysis import plot
from adptnet.nn import ADPTNet

from ..evidence import Estimate, estimate_mean, paired_difference, rank_correlation
from ..recipe import Check, GridPoint, Recipe, Rows, RunOutput, Scale, Table, use_complete_seeds
from ..settings.deer_networks import MAX_ITERATIONS, METHODS, build_network, solve
from ..verdicts import ClaimVerdict, combine, decide, judge_equal, judge_increase

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETAS = [0.125, 1.0, 4.0, 20.0, 100.0]
ALIKE = 0.15  # counts within this fraction of each other are the same: half an iteration of the 3 at T = 512
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
    width, steps, samples, seeds = {"smoke": (8, 24, 2, 1), "laptop": (64, 512, 2, 3), "paper": (64, 1024, 5, 10)}[
        scale
    ]
    pairs = [(1e-2, 1e-1), (1e-3, 1e-1), (1e-3, 1e-2), (1e-3, 5e-3), (1e-3, 1e-3)]
    shared = {"width": width, "steps": steps, "samples": samples}
    return [
        GridPoint({"dt_min": low, "dt_max": high, "beta": beta, **shared}, seed)
        for seed in range(seeds)
        for low, high in pairs
        for beta in BETAS
    ]


def _make_length_points(scale: Scale) -> list[GridPoint]:
    width, longest, samples, seeds = {"smoke": (8, 64, 2, 1), "laptop": (64, 4096, 2, 3), "paper": (64, 16384, 5, 10)}[
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


def _by_network(rows: Rows, method: str) -> list[float]:
    """Return the mean count of a method for each network (seed), over samples where every method converged.

    Samples of one network are not independent, so a network counts as one run. NaN if no sample converged.
    """
    seeds = sorted({row.seed for row in rows})
    return [_means(Rows([row for row in rows if row.seed == seed]))[method] for seed in seeds]


def _difference(first: Rows, second: Rows, method: str) -> Estimate:
    return paired_difference(_by_network(first, method), _by_network(second, method), "Δ iterations")


def _pooled(pairs: Iterable[tuple[Rows, Rows]]) -> Estimate:
    """Return the mean difference over pairs of conditions and methods, network by network."""
    differences = [
        np.subtract(_by_network(first, method), _by_network(second, method))
        for first, second in pairs
        for method in METHODS
    ]
    return estimate_mean(np.mean(differences, axis=0).tolist(), "Δ iterations")


@use_complete_seeds
def _check_beta(rows: Rows) -> ClaimVerdict:
    """The mean count at β = 100 minus that at β = 1, the two β that the paper names, has an interval over networks
    above 0, for each method and either Δt_min. One iteration matters."""
    parts = []
    for low in (1e-2, 1e-3):
        group = rows.where(dt_min=low, dt_max=1e-1)
        parts += [
            judge_increase(_difference(group.where(beta=100.0), group.where(beta=1.0), m), 1, f"{m}, Δt_min = {low:g}")
            for m in METHODS
        ]
    means = [_means(rows.where(dt_min=1e-3, dt_max=1e-1, beta=b))["Conv"] for b in BETAS]
    by_beta = ", ".join(f"{b:g}: {mean:.1f}" for b, mean in zip(BETAS, means, strict=True))
    weakest = min(parts, key=lambda part: part.estimate.low)  # type: ignore[union-attr]
    return combine(parts, f"smallest {weakest.why}; Conv at Δt_min = 0.001 by β {by_beta} (no growth beyond β = 4)")


@use_complete_seeds
def _check_memory(rows: Rows) -> ClaimVerdict:
    """The count at Δt_min = 0.001 minus that at 0.01, averaged over methods and β, has an interval over networks above
    0, and is positive in the mean for every method and β."""
    short, long = (rows.where(dt_min=low, dt_max=1e-1) for low in (1e-2, 1e-3))
    pooled = _pooled((long.where(beta=b), short.where(beta=b)) for b in BETAS)
    each = [_difference(long.where(beta=b), short.where(beta=b), m).mean for b in BETAS for m in METHODS]
    text = f"{min(each):+.1f} to {max(each):+.1f} over β and methods"
    return combine([judge_increase(pooled, 1, text), decide(min(each) > 0, text, runs=pooled.runs)])


@use_complete_seeds
def _check_memory_by_beta(rows: Rows) -> ClaimVerdict:
    """Spearman's correlation of β and that difference, averaged over methods, computed for each network, has an
    interval above 0 over networks. A correlation of 0.5 matters."""
    found = []
    for seed in sorted({row.seed for row in rows}):
        own = Rows([row for row in rows if row.seed == seed])
        extra = [float(np.mean([_extra_iterations(own, b, m) for m in METHODS])) for b in BETAS]
        found.append(rank_correlation(BETAS, extra))
    by_beta = ", ".join(f"{_extra_iterations(rows, b, 'Conv'):+.1f}" for b in BETAS)
    return judge_increase(estimate_mean(found, "(rank correlation)"), 0.5, f"Conv by β {by_beta}")


def _extra_iterations(rows: Rows, beta: float, method: str) -> float:
    """Return the mean count at Δt_min = 0.001 minus that at 0.01."""
    long, short = (_means(rows.where(dt_min=low, dt_max=1e-1, beta=beta))[method] for low in (1e-3, 1e-2))
    return long - short


@use_complete_seeds
def _check_spread(rows: Rows) -> ClaimVerdict:
    """From Δt_max = 0.01 to 0.005 and from 0.005 to 0.001 the count, averaged over methods and β, decreases, with an
    interval over networks above 0; and for every method and β it is smaller at 0.001 than at 0.01."""
    steps = [rows.where(dt_min=1e-3, dt_max=high) for high in (1e-2, 5e-3, 1e-3)]
    parts = [
        judge_increase(_pooled((first.where(beta=b), second.where(beta=b)) for b in BETAS), 0.5, name)
        for first, second, name in zip(steps, steps[1:], ("0.01 → 0.005", "0.005 → 0.001"), strict=False)
    ]
    falls = [_difference(steps[0].where(beta=b), steps[2].where(beta=b), m).mean > 0 for b in BETAS for m in METHODS]
    ends = decide(
        all(falls), f"smaller at 0.001 than at 0.01 in {sum(falls)} of {len(falls)} series", runs=parts[0].runs
    )
    return combine([*parts, ends])


@use_complete_seeds
def _check_linear(rows: Rows) -> ClaimVerdict:
    """At Δt_min = Δt_max the mean count of Quasi- and Forward-DEER is 1."""
    means = _means(rows.where(dt_min=1e-3, dt_max=1e-3))
    return decide(means["Quasi"] == means["Forward"] == 1, _format(means))


@use_complete_seeds
def _check_conv_more(rows: Rows) -> ClaimVerdict:
    """At Δt_min = Δt_max the mean count of Conv-DEER is above 1 and below 2."""
    means = _means(rows.where(dt_min=1e-3, dt_max=1e-3))
    return decide(1 < means["Conv"] < 2, _format(means))


@use_complete_seeds
def _check_same_mean(rows: Rows) -> ClaimVerdict:
    """At β = 1, for either Δt_min, the mean counts of Forward- and Conv-DEER differ from Quasi-DEER's by less than
    15 % of it, over networks."""
    parts = []
    for low in (1e-2, 1e-3):
        group = rows.where(dt_min=low, dt_max=1e-1, beta=1.0)
        quasi = _by_network(group, "Quasi")
        for method in ("Forward", "Conv"):
            more = paired_difference(_by_network(group, method), quasi, "Δ iterations")
            parts.append(judge_equal(more, ALIKE * float(np.mean(quasi)), f"{method} − Quasi, Δt_min = {low:g}"))
    return combine(parts)


@use_complete_seeds
def _check_order(rows: Rows) -> ClaimVerdict:
    """At β = 100 and Δt_min = 0.001 the count of Forward- minus that of Quasi-DEER, and of Conv- minus Forward-DEER,
    has an interval over networks above 0. Half an iteration matters."""
    group = rows.where(dt_min=1e-3, dt_max=1e-1, beta=100.0)
    parts = []
    for first, second in (("Forward", "Quasi"), ("Conv", "Forward")):
        more = paired_difference(_by_network(group, first), _by_network(group, second), "Δ iterations")
        parts.append(judge_increase(more, 0.5, f"{first} − {second}"))
    return combine(parts)


@use_complete_seeds
def _check_outliers(rows: Rows) -> ClaimVerdict:
    """At β = 1 and 100 and Δt_min = 0.001 the largest count of Conv-DEER in each network minus the larger of the
    others' has an interval over networks above 0. One iteration matters; a run without convergence within 150 counts as
    151."""
    parts = []
    for beta in (1.0, 100.0):
        more = []
        group = rows.where(dt_min=1e-3, dt_max=1e-1, beta=beta)
        for row in group:
            top = _largest({method: row.numbers[method] for method in METHODS})
            more.append(top["Conv"] - max(top["Quasi"], top["Forward"]))
        text = f"β = {beta:g}: largest {_format(_largest(_all_counts(group)))}"
        parts.append(judge_increase(estimate_mean(more, "Δ iterations"), 1, text))
    return combine(parts)


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


def _lengths_by_network(rows: Rows, method: str) -> list[list[float]]:
    """Return the mean count by network and length, over samples where every method converged at that length."""
    found = []
    for row in rows:
        means = _means_by_length(Rows([row]))
        found.append([by_method[method] for by_method in means.values()])
    return found


@use_complete_seeds
def _check_grows(rows: Rows) -> ClaimVerdict:
    """For every method the mean count at each length minus that at the length before has an interval over networks
    above 0 in at least the step from the shortest to the longest, and no step has a negative mean. One iteration
    matters."""
    parts = []
    for method in METHODS:
        counts = np.asarray(_lengths_by_network(rows, method))
        steps = np.diff(counts, axis=1).mean(0)
        found = estimate_mean((counts[:, -1] - counts[:, 0]).tolist(), "Δ iterations")
        parts += [judge_increase(found, 1, f"{method}, longest − shortest"), decide(bool(steps.min() >= 0), method)]
        parts[-1] = parts[-1]._replace(runs=len(counts))
    text = "; ".join(f"T = {t}: {_format(m)}" for t, m in _means_by_length(rows).items())
    return combine(parts, f"{'; '.join(part.why for part in parts[::2])}; {text}")


@use_complete_seeds
def _check_lengths_same_mean(rows: Rows) -> ClaimVerdict:
    """At every length the mean counts of Forward- and Conv-DEER differ from Quasi-DEER's by less than 15 % of it, over
    networks."""
    quasi = np.asarray(_lengths_by_network(rows, "Quasi"))
    parts = []
    for method in ("Forward", "Conv"):
        counts = np.asarray(_lengths_by_network(rows, method))
        for place, length in enumerate(rows[0].settings["lengths"]):
            more = estimate_mean((counts[:, place] - quasi[:, place]).tolist(), "Δ iterations")
            parts.append(judge_equal(more, ALIKE * float(quasi[:, place].mean()), f"{method} − Quasi at T = {length}"))
    return combine(parts, max(parts, key=lambda part: part.estimate.high).why)  # type: ignore[union-attr]


@use_complete_seeds
def _check_lengths_outliers(rows: Rows) -> ClaimVerdict:
    """The largest counts of Conv- and of Forward-DEER minus that of Quasi-DEER, averaged over lengths, have an interval
    over networks above 0, and at every length both are above it over all samples. Half an iteration matters."""
    tops = {t: _largest(counts) for t, counts in _counts_by_length(rows).items()}
    text = "largest " + "; ".join(f"T = {t}: {_format(top)}" for t, top in tops.items())
    parts = []
    for method in ("Conv", "Forward"):
        more = []
        for row in rows:
            own = [_largest(counts) for counts in _counts_by_length(Rows([row])).values()]
            more.append(float(np.mean([top[method] - top["Quasi"] for top in own])))
        parts.append(judge_increase(estimate_mean(more, "Δ iterations"), 0.5, method))
    above = all(min(top["Conv"], top["Forward"]) > top["Quasi"] for top in tops.values())
    return combine([*parts, decide(above, text, runs=len(rows))])


@use_complete_seeds
def _check_magnitude(rows: Rows) -> ClaimVerdict:
    """At every length the largest count of any method is below ten times that of Quasi-DEER."""
    tops = [_largest(counts) for counts in _counts_by_length(rows).values()]
    ratios = [max(top.values()) / top["Quasi"] for top in tops]
    return decide(max(ratios) < 10, f"largest ratio {max(ratios):.2f}", runs=len(rows))


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
        cost={"smoke": "3 s", "laptop": "2 min", "paper": "8 min"},
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
        cost={"smoke": "1 s", "laptop": "10 s", "paper": "7 min"},
        dtype=torch.float32,
    ),
}
