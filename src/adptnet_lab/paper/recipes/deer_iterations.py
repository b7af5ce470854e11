"""Iterations of Quasi-, Forward- and Conv-DEER as initialised, by eigenvalues, β and length, in float32.

The networks are those of table:baseline_deer_untrained_config. Counts are of updates until every step of the new
iterate is right; -1 where that was not reached.
"""

from collections.abc import Iterable, Mapping
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from adptnet import drive, solvers, spectra
from adptnet.analysis import plot
from adptnet.nn import ADPTNet

from ..evidence import rank_correlation
from ..recipe import Check, Finding, Point, Recipe, Rows, Scale, Table, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["METHODS", "RECIPES", "RTOL", "counts", "network"]

RTOL = 6.4e-6  # a quarter of the digits of float32 to spare
METHODS = {"Quasi": solvers.QuasiDEER, "Forward": solvers.ForwardDEER, "Conv": solvers.ConvDEER}
BETAS = [0.125, 1.0, 4.0, 20.0, 100.0]
LENGTHS = (512, 1024, 4096, 8192, 16384)  # the paper's 1204 is 1024
MOST = 150  # iterations before a run is given up


def network(width: int, beta: float, dt_min: float, dt_max: float = 1e-1, negative: float = 0.0) -> ADPTNet:
    """Dense K and V, EMA gain, RoPE, decay 0.5, Δt spaced in the logarithm."""
    spectrum: spectra.SpectrumSpec = spectra.Linspace(dt_min=dt_min, dt_max=dt_max, decay=0.5)
    if negative:
        spectrum = spectra.Negative(spectrum, negative)
    layer = ADPTNet(width, beta=beta, spectrum=spectrum, rope=drive.RoPE(), gain=drive.EMA())
    return layer.requires_grad_(False)


def counts(method: str, layer: ADPTNet, x: Tensor, most: int = MOST) -> solvers.Solution:
    """A solve to the end: undamped, no sequence given up, what did not converge handed back."""
    options = {"rtol": RTOL, "max_iterations": most, "patience": None, "on_failure": solvers.Return()}
    return METHODS[method](**options)(layer.cell, x)  # type: ignore[arg-type]


def _network(point: Point) -> tuple[ADPTNet, Tensor]:
    settings = point.settings
    layer = network(settings["width"], settings["beta"], settings["dt_min"], settings["dt_max"])
    x = torch.randn(settings["samples"], settings["steps"], settings["width"])
    return layer, x


def _run(point: Point) -> Finding:
    layer, x = _network(point)
    found = {}
    for method in METHODS:
        history = counts(method, layer, x).history
        assert history is not None
        found[method] = history.iterations_for(point.settings["steps"])
    return Finding(found, layer.spec)


def _run_lengths(point: Point) -> Finding:
    """One run of the longest sequence gives the count for every shorter one: no state depends on a later one."""
    layer, x = _network(point)
    found = {}
    for method in METHODS:
        history = counts(method, layer, x).history
        assert history is not None
        found[method] = [history.iterations_for(steps) for steps in point.settings["lengths"]]
    return Finding(found, layer.spec)


def _eigenvalue_points(scale: Scale) -> list[Point]:
    width, steps, samples, seeds = {"smoke": (8, 24, 2, 1), "laptop": (64, 512, 2, 3), "paper": (64, 1024, 5, 3)}[scale]
    pairs = [(1e-2, 1e-1), (1e-3, 1e-1), (1e-3, 1e-2), (1e-3, 5e-3), (1e-3, 1e-3)]
    shared = {"width": width, "steps": steps, "samples": samples}
    return [
        Point({"dt_min": low, "dt_max": high, "beta": beta, **shared}, seed)
        for seed in range(seeds)
        for low, high in pairs
        for beta in BETAS
    ]


def _length_points(scale: Scale) -> list[Point]:
    width, longest, samples, seeds = {"smoke": (8, 64, 2, 1), "laptop": (64, 4096, 2, 3), "paper": (64, 16384, 5, 3)}[
        scale
    ]
    lengths = [16, 32, 64] if scale == "smoke" else [steps for steps in LENGTHS if steps <= longest]
    settings = {"dt_min": 1e-4, "dt_max": 1e-1, "beta": 0.125, "width": width, "steps": longest, "lengths": lengths}
    return [Point({**settings, "samples": samples}, seed) for seed in range(seeds)]


# What is said of counts


def _samples(rows: Rows) -> dict[str, list[int]]:
    """The counts of the samples where every method converged, by method."""
    return _converged(_every(rows))


def _every(rows: Rows) -> dict[str, list[int]]:
    return {method: list(chain.from_iterable(rows.numbers(method))) for method in METHODS}


def _converged(counts: Mapping[str, list[int]]) -> dict[str, list[int]]:
    whole = [sample for sample in zip(*counts.values(), strict=True) if min(sample) > 0]
    return {method: [sample[place] for sample in whole] for place, method in enumerate(counts)}


def _mean(values: list[int]) -> float:
    """NaN, which no comparison is true of, if there are none."""
    return float(np.mean(values)) if values else np.nan


def _means(rows: Rows) -> dict[str, float]:
    return {method: _mean(values) for method, values in _samples(rows).items()}


def _most(counts: Mapping[str, list[int]]) -> dict[str, int]:
    """The largest count of each method; a run that was given up counts as one more than it was given."""
    return {method: max(n if n > 0 else MOST + 1 for n in values) for method, values in counts.items()}


def _capped(counts: Iterable[int]) -> str:
    return "/".join(str(n) if n <= MOST else f">{MOST}" for n in counts)


def _censored(rows: Rows) -> int:
    return sum(value < 0 for method in METHODS for counts in rows.numbers(method) for value in counts)


def _beta(rows: Rows) -> Verdict:
    """Spearman's correlation of β and the mean count is at least 0.6 for each method and pair of different Δt."""
    found = []
    for low, high in _pairs(rows):
        group = rows.where(dt_min=low, dt_max=high)
        for method in METHODS:
            found.append(rank_correlation(BETAS, [_means(group.where(beta=b))[method] for b in BETAS]))
    means = [_means(rows.where(dt_min=1e-3, dt_max=1e-1, beta=b))["Conv"] for b in BETAS]
    shown = ", ".join(f"{b:g}: {mean:.1f}" for b, mean in zip(BETAS, means, strict=True))
    return Verdict.of(
        all(value >= 0.6 for value in found),
        f"smallest correlation {min(found):.2f}; Conv at Δt_min = 0.001 by β {shown}",
    )


def _pairs(rows: Rows) -> list[tuple[float, float]]:
    found = dict.fromkeys((row.settings["dt_min"], row.settings["dt_max"]) for row in rows)
    return [pair for pair in found if pair[0] != pair[1]]


def _longer(rows: Rows, beta: float, method: str) -> float:
    """What Δt_min = 0.001 takes more than 0.01."""
    long, short = (_means(rows.where(dt_min=low, dt_max=1e-1, beta=beta))[method] for low in (1e-3, 1e-2))
    return long - short


def _memory(rows: Rows) -> Verdict:
    """The mean count is larger at Δt_min = 0.001 than at 0.01 for every method and β."""
    found = {(b, m): _longer(rows, b, m) for b in BETAS for m in METHODS}
    return Verdict.of(
        all(d > 0 for d in found.values()), f"differences {min(found.values()):+.1f} to {max(found.values()):+.1f}"
    )


def _memory_by_beta(rows: Rows) -> Verdict:
    """Spearman's correlation of β and that difference is at least 0.6 for every method."""
    found = {m: rank_correlation(BETAS, [_longer(rows, b, m) for b in BETAS]) for m in METHODS}
    shown = ", ".join(f"{_longer(rows, b, 'Conv'):+.1f}" for b in BETAS)
    return Verdict.of(
        all(value >= 0.6 for value in found.values()),
        f"smallest correlation {min(found.values()):.2f}; Conv by β {shown}",
    )


def _spread(rows: Rows) -> Verdict:
    """At every β and for every method the mean count falls from Δt_max = 0.01 over 0.005 to 0.001."""
    falls = []
    for beta in BETAS:
        for method in METHODS:
            series = [_means(rows.where(dt_min=1e-3, dt_max=high, beta=beta))[method] for high in (1e-2, 5e-3, 1e-3)]
            falls.append(series[0] >= series[1] >= series[2] and series[0] > series[2])
    return Verdict.of(all(falls), f"in {sum(falls)} of {len(falls)} series")


def _linear(rows: Rows) -> Verdict:
    """At Δt_min = Δt_max the mean count of Quasi- and Forward-DEER is 1."""
    means = _means(rows.where(dt_min=1e-3, dt_max=1e-3))
    return Verdict.of(means["Quasi"] == means["Forward"] == 1, _shown(means))


def _conv_more(rows: Rows) -> Verdict:
    """At Δt_min = Δt_max the mean count of Conv-DEER is above 1 and below 2."""
    means = _means(rows.where(dt_min=1e-3, dt_max=1e-3))
    return Verdict.of(1 < means["Conv"] < 2, _shown(means) + ": the residual is tested, to a relative tolerance")


def _same_mean(rows: Rows) -> Verdict:
    """At β = 1 the medians differ by at most 10 % or one iteration, for either Δt_min."""
    found = [_medians(rows.where(dt_min=low, dt_max=1e-1, beta=1.0)) for low in (1e-2, 1e-3)]
    holds = all(max(m.values()) - min(m.values()) <= max(1, 0.1 * m["Quasi"]) for m in found)
    return Verdict.of(holds, "medians " + "; ".join(_shown(medians) for medians in found))


def _medians(rows: Rows) -> dict[str, float]:
    return {method: float(np.median(values)) if values else np.nan for method, values in _samples(rows).items()}


def _order(rows: Rows) -> Verdict:
    """At β = 100 and Δt_min = 0.001, Quasi <= Forward <= Conv in the mean and the median, and Quasi < Conv."""
    group = rows.where(dt_min=1e-3, dt_max=1e-1, beta=100.0)
    both = [_means(group), _medians(group)]
    holds = all(m["Quasi"] <= m["Forward"] <= m["Conv"] and m["Quasi"] < m["Conv"] for m in both)
    return Verdict.of(holds, f"means {_shown(both[0])}; medians {_shown(both[1])}")


def _outliers(rows: Rows) -> Verdict:
    """At β = 1 and 100 and Δt_min = 0.001 the largest count of Conv-DEER is above those of the others.

    A run that was given up counts as 151.
    """
    tops = [_most(_every(rows.where(dt_min=1e-3, dt_max=1e-1, beta=b))) for b in (1.0, 100.0)]
    holds = all(top["Conv"] > max(top["Quasi"], top["Forward"]) for top in tops)
    return Verdict.of(holds, "largest " + "; ".join(_shown(top) for top in tops))


def _shown(values: Mapping[str, float]) -> str:
    return ", ".join(f"{method} {value:.1f}" for method, value in values.items())


def _by_length(rows: Rows) -> dict[int, dict[str, list[int]]]:
    """The counts of all samples, by length and method."""
    lengths: list[int] = rows[0].settings["lengths"]
    return {
        steps: {method: [n for row in rows for n in row.numbers[method][place]] for method in METHODS}
        for place, steps in enumerate(lengths)
    }


def _means_by_length(rows: Rows) -> dict[int, dict[str, float]]:
    """Over the samples where every method converged."""
    return {t: {m: _mean(v) for m, v in _converged(counts).items()} for t, counts in _by_length(rows).items()}


def _grows(rows: Rows) -> Verdict:
    """The mean count never falls with the length, and is larger at the longest than the shortest, for all methods."""
    means = _means_by_length(rows)
    series = [[means[t][m] for t in means] for m in METHODS]
    holds = all(all(a <= b for a, b in pairwise(s)) and s[-1] > s[0] for s in series)
    return Verdict.of(holds, "; ".join(f"T = {t}: {_shown(m)}" for t, m in means.items()))


def _lengths_same_mean(rows: Rows) -> Verdict:
    """At every length the mean counts differ by at most 10 % or half an iteration."""
    gaps = []
    for found in _means_by_length(rows).values():
        means = list(found.values())
        gaps.append((max(means) - min(means), means[0]))
    return Verdict.of(all(g <= max(0.5, 0.1 * m) for g, m in gaps), f"largest difference {max(g for g, _ in gaps):.2f}")


def _lengths_outliers(rows: Rows) -> Verdict:
    """At every length the largest counts of Conv- and Forward-DEER are above that of Quasi-DEER."""
    tops = {t: _most(found) for t, found in _by_length(rows).items()}
    holds = all(min(top["Conv"], top["Forward"]) > top["Quasi"] for top in tops.values())
    return Verdict.of(holds, "largest " + "; ".join(f"T = {t}: {_shown(top)}" for t, top in tops.items()))


def _magnitude(rows: Rows) -> Verdict:
    """At every length the largest count of any method is below ten times that of Quasi-DEER."""
    tops = [_most(found) for found in _by_length(rows).values()]
    ratios = [max(top.values()) / top["Quasi"] for top in tops]
    return Verdict.of(max(ratios) < 10, f"largest ratio {max(ratios):.2f}")


# Figures and tables

_COLOUR = dict(zip(METHODS, plot.COLOURS, strict=False))


def _draw_eigenvalues(rows: Rows) -> "Figure":
    figure = plot.blank(9.5, 3.4)
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
        plot.bare(axis)
    left.set(ylabel="mean iterations", title="Longer memory")
    right.set(title="Smaller spread (Δt_min = 0.001)")
    return figure


def _draw_distribution(rows: Rows) -> "Figure":
    figure = plot.blank(9.5, 2.8)
    for axis, beta in zip(figure.subplots(1, 2), (1.0, 100.0), strict=True):
        samples = _samples(rows.where(dt_min=1e-3, dt_max=1e-1, beta=beta))
        top = max((max(v) for v in samples.values() if v), default=1)
        edges = np.arange(0.5, top + 1.6, max(1, top // 25))
        for method, values in samples.items():
            axis.hist(values, bins=edges, histtype="step", linewidth=1.8, color=_COLOUR[method], label=method)
            if values:
                axis.axvline(float(np.median(values)), color=_COLOUR[method], linewidth=0.9, linestyle="--")
        axis.set(xlabel="iterations", ylabel="samples", title=f"β = {beta:g} (dashed: median)")
        axis.legend(frameon=False, fontsize=8)
        plot.bare(axis)
    return figure


def _draw_lengths(rows: Rows) -> "Figure":
    figure = plot.blank(6, 3.4)
    axis = figure.subplots()
    means, tops = _means_by_length(rows), {t: _most(found) for t, found in _by_length(rows).items()}
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
            label=f"{method}, most",
        )
    axis.set_xscale("log", base=2)
    axis.set(xlabel="length T", ylabel="iterations", ylim=(0, None))
    axis.legend(frameon=False, fontsize=8, ncols=3)
    plot.bare(axis)
    return figure


def _eigenvalue_table(rows: Rows) -> Table:
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
                    _capped(_most(_every(group)).values()),
                    _censored(group),
                ]
            )
    return Table(["Δt_min", "Δt_max", "β", *METHODS, "most (" + "/".join(METHODS) + ")", "censored"], lines)


def _length_table(rows: Rows) -> Table:
    lines = [
        [t, *(f"{mean:.1f}" for mean in _means_by_length(rows)[t].values()), *(_capped([n]) for n in _most(c).values())]
        for t, c in _by_length(rows).items()
    ]
    return Table(["T", *(f"{m}, mean" for m in METHODS), *(f"{m}, most" for m in METHODS)], lines)


RECIPES = {
    "fig:eigenvalue_dt_min_max": Recipe(
        version=1,
        points=_eigenvalue_points,
        run=_run,
        checks={
            "beta": Check(_beta, "laptop"),
            "memory": Check(_memory, "laptop"),
            "memory-by-beta": Check(_memory_by_beta, "laptop"),
            "spread": Check(_spread, "laptop"),
            "linear": Check(_linear),
            "conv-more": Check(_conv_more),
            "same-mean": Check(_same_mean, "laptop"),
            "order": Check(_order, "laptop"),
            "outliers": Check(_outliers, "laptop"),
        },
        figures={
            "Mean iterations by β": _draw_eigenvalues,
            "Distribution of iterations, Δt_min = 0.001": _draw_distribution,
        },
        table=_eigenvalue_table,
        cost={"smoke": "3 s", "laptop": "2 min", "paper": "3 min"},
        dtype=torch.float32,
    ),
    "fig:deer_seq_len": Recipe(
        version=1,
        points=_length_points,
        run=_run_lengths,
        checks={
            "grows": Check(_grows, "laptop"),
            "same-mean": Check(_lengths_same_mean, "laptop"),
            "outliers": Check(_lengths_outliers, "laptop"),
            "magnitude": Check(_magnitude),
        },
        figures={"Iterations by length": _draw_lengths},
        table=_length_table,
        cost={"smoke": "1 s", "laptop": "10 s", "paper": "2 min"},
        dtype=torch.float32,
    ),
}
