"""Twin runs: one network learns Copy Memory and, from the same start, Selective Copy (sec:selective_copy_results).

Symbols, tokens, noise and training are the same; only the places of the symbols differ. Behind fig:sel_copy_lyapunov,
table:trainable_beta_sc, fig:materialise_matrices_layer0 and fig:sel_copy_deer. The layers are looked at as copies in
float64.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from adptnet import analysis, solvers
from adptnet.analysis import plot
from adptnet.cells import ADPTCell, ADPTSpec
from adptnet.nn import ADPTNet, LayerSpec
from adptnet.nn.block import BlockSpec
from adptnet.recurrence.beta import BetaValue, TrainableBeta
from adptnet.recurrence.projections import Expand
from adptnet.recurrence.spectra import S4DInv

from ...tasks import SelectiveCopy
from ...training import Cosine, TrainConfig
from ..evidence import Difference, paired, within
from ..recipe import Check, Finding, Point, Recipe, Row, Rows, Scale, Table, Verdict
from ..scoring import difference, mean_accuracy, scored
from .deer_iterations import counts
from .trained_timescales import SLACK, spectrum_of, still

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = "fig:sel_copy_lyapunov"
TASKS = ["Copy Memory", "Selective Copy"]
BETAS = ["fixed", "trainable"]
LAYERS = (0, 1)
BETA, LOWEST, HIGHEST = 0.0125, 1e-4, 0.025
PIXELS = 64  # the largest side of a picture of M that a row keeps
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"length": 16, "symbols": 2, "vocabulary": 4, "width": 4, "expansion": 2, "steps": 3, "batch": 4},
    "laptop": {"length": 40, "symbols": 6, "vocabulary": 8, "width": 32, "expansion": 2, "steps": 1200, "batch": 64},
    # 100 epochs of 157 batches
    "paper": {"length": 128, "symbols": 16, "vocabulary": 16, "width": 64, "expansion": 4, "steps": 15700, "batch": 64},
}
TRAINING: dict[str, dict[str, Any]] = {
    "smoke": {"rate": 3e-3, "test": 8, "samples": 2},
    "laptop": {"rate": 3e-3, "test": 2000, "samples": 16},
    "paper": {"rate": 5e-4, "test": 1000, "samples": 16},
}


def _points(scale: Scale) -> list[Point]:
    shared = {**SIZES[scale], **TRAINING[scale]}
    seeds = 3 if scale == "laptop" else 1
    return [
        Point({"task": task, "beta": beta, **shared}, seed) for task in TASKS for beta in BETAS for seed in range(seeds)
    ]


def _run(point: Point) -> Finding:
    settings = point.settings
    task = SelectiveCopy(
        settings["length"],
        settings["symbols"],
        settings["vocabulary"],
        variable=settings["task"] == "Selective Copy",
    )
    beta: BetaValue = BETA if settings["beta"] == "fixed" else TrainableBeta(BETA, LOWEST, HIGHEST)
    cell = ADPTSpec(
        settings["width"],
        state_size=2 * settings["expansion"] * settings["width"],  # so many complex numbers
        beta=beta,
        spectrum=S4DInv(),
        input_projection=Expand(),
    )
    spec = task.model(BlockSpec(LayerSpec(cell)), depth=len(LAYERS))
    config = TrainConfig(
        steps=settings["steps"],
        batch_size=settings["batch"],
        learning_rate=settings["rate"],
        schedule=Cosine(),
        clip=None,
        seed=point.seed,
    )
    samples = next(task.evaluation("test", settings["samples"], settings["samples"])).inputs
    drawn = point.seed == 0 and settings["beta"] == "fixed"

    def watch(model: nn.Module) -> Callable[[int], Any]:
        def look(step: int) -> list[dict[str, Any]] | None:
            if step not in (0, settings["steps"]):
                return None
            return [_seen(layer, x, drawn) for layer, x in still(model, samples)]

        return look

    found = scored(spec, task, config, sequences=settings["test"], watch=watch)
    before, after = found.seen
    return Finding({"before": before, "after": after, **found.numbers}, spec)


@torch.no_grad()
def _seen(layer: ADPTNet, x: Tensor, drawn: bool) -> dict[str, Any]:
    """One layer: its spectrum along the first sample; iterations and entropy of each sample, M at the last step."""
    assert isinstance(layer.cell, ADPTCell)
    steps = x.shape[1]
    solution = counts("Conv", layer, x, steps)
    converged = solution.results == solvers.Result.CONVERGED
    conjugate = analysis.materialised(layer, x)
    numbers = {
        **spectrum_of(layer, x),
        "iterations": torch.where(converged, solution.iterations, steps),
        "entropy": analysis.offdiagonal_entropy(conjugate, pairs=True),
        "beta": layer.cell.beta.report()["raw"][0],
    }
    return {**numbers, "picture": _picture(conjugate[0])} if drawn else numbers


def _picture(conjugate: Tensor) -> Tensor:
    """The norms of the blocks of M that couple pairs, or their means over tiles; four digits will do."""
    pairs = functional.avg_pool2d(conjugate.square()[None], 2, divisor_override=1)
    tile = -(-pairs.shape[-1] // PIXELS)
    return functional.avg_pool2d(pairs, tile).sqrt()[0].float().round(decimals=4)


# Of one layer, or of its mean over seeds


def _layers(rows: Rows) -> list[tuple[Row, int, Any]]:
    """Every trained layer."""
    return [(row, layer, row.numbers["after"][layer]) for row in rows for layer in LAYERS]


def _lowest(seen: Any) -> float:
    return float(min(seen["log_eigenvalues"]))


def _spread(seen: Any) -> float:
    return float(np.exp(max(seen["log_eigenvalues"])) - np.exp(_lowest(seen)))


def _iterations(seen: Any) -> float:
    return float(np.mean(seen["iterations"]))


def _entropy(seen: Any) -> float:
    return float(np.mean(seen["entropy"]))


def _mean(rows: Rows, layer: int, number: Callable[[Any], float], when: str = "after", **settings: Any) -> float:
    return float(np.mean([number(row.numbers[when][layer]) for row in rows.where(**settings)]))


def _pairs(rows: Rows, number: Callable[[Any], float], **settings: Any) -> list[tuple[float, float]]:
    """Copy Memory and Selective Copy, layer by layer."""
    return [
        (_mean(rows, i, number, task=TASKS[0], **settings), _mean(rows, i, number, task=TASKS[1], **settings))
        for i in LAYERS
    ]


def _by_layer(pairs: list[tuple[float, float]]) -> str:
    return "; ".join(
        f"layer {i}: Copy Memory {copy:.3g}, Selective Copy {far:.3g}" for i, (copy, far) in enumerate(pairs)
    )


# fig:sel_copy_lyapunov


def _contained(rows: Rows) -> Verdict:
    """No exponent leaves the range of ln |λ̄| of its layer by more than 1 % of its width, in any run with a fixed β."""
    worst = -np.inf
    for _, _, seen in _layers(rows.where(beta="fixed")):
        low, high = _lowest(seen), max(seen["log_eigenvalues"])
        worst = max(worst, within(seen["exponents"], low, high) / (high - low))
    return Verdict.of(worst <= SLACK, f"largest excess {max(worst, 0):.2%} of the width")


def _minimum(rows: Rows) -> Verdict:
    """With a fixed β the mean of ln |λ̄|_min over seeds is lower for Selective Copy, in both layers."""
    pairs = _pairs(rows, _lowest, beta="fixed")
    return Verdict.of(all(selective < copy for copy, selective in pairs), _by_layer(pairs))


def _deeper_spread(rows: Rows) -> Verdict:
    """With a fixed β the mean of |λ̄|_max − |λ̄|_min over seeds is larger in the second layer, for both tasks."""
    pairs = _pairs(rows, _spread, beta="fixed")
    return Verdict.of(all(second > first for first, second in zip(*pairs, strict=True)), _by_layer(pairs))


def _gap(rows: Rows) -> Verdict:
    """With a fixed β the smallest exponent is at most 0.02 from ln |λ̄|_min, in every layer of both."""
    gaps = [abs(min(seen["exponents"]) - _lowest(seen)) for _, _, seen in _layers(rows.where(beta="fixed"))]
    return Verdict.of(max(gaps) <= 0.02, f"from {min(gaps):.2g} to {max(gaps):.2g}")


def _draw_spectra(rows: Rows) -> "Figure":
    panels = {
        f"{row.settings['task']}, layer {layer}": seen
        for row, layer, seen in _layers(Rows([row for row in rows.where(beta="fixed") if row.seed == 0]))
    }
    return plot.spectra(
        {name: torch.tensor(seen["exponents"]) for name, seen in panels.items()},
        {name: torch.tensor(seen["log_eigenvalues"]) for name, seen in panels.items()},
        columns=2,
    )


def _spectrum_table(rows: Rows) -> Table:
    ends: dict[str, Callable[[Any], float]] = {
        "ln |λ̄|_min": _lowest,
        "smallest exponent": lambda seen: min(seen["exponents"]),
        "ln |λ̄|_max": lambda seen: max(seen["log_eigenvalues"]),
        "largest exponent": lambda seen: max(seen["exponents"]),
    }
    lines = [
        [task, i, *(f"{_mean(rows, i, number, task=task, beta='fixed'):.4f}" for number in ends.values())]
        for task in TASKS
        for i in LAYERS
    ]
    return Table(["Task", "Layer", *ends], lines)


# table:trainable_beta_sc


def _gain(rows: Rows, task: str) -> Difference:
    return difference(rows.where(task=task), {"beta": "trainable"}, {"beta": "fixed"})


def _saturates(rows: Rows) -> Verdict:
    """In every run and layer the trained β ends within 1 % of its upper limit 0.025, or beyond it."""
    found = [seen["beta"] for _, _, seen in _layers(rows.where(beta="trainable"))]
    return Verdict.of(min(found) >= 0.99 * HIGHEST, f"from {min(found):.4f} to {max(found):.4f}")


def _helps_selective(rows: Rows) -> Verdict:
    """On Selective Copy trainable minus fixed, paired by seed, has a 95 % interval above 0; one pair is above 0."""
    found = _gain(rows, "Selective Copy")
    return Verdict.of((found.low if found.pairs > 1 else found.mean) > 0, f"{found} (%)")


def _not_copy(rows: Rows) -> Verdict:
    """On Copy Memory trainable minus fixed, paired by seed, has no 95 % interval above 0; one pair is not above 0."""
    found = _gain(rows, "Copy Memory")
    return Verdict.of((found.low if found.pairs > 1 else found.mean) <= 0, f"{found} (%)")


def _beta_table(rows: Rows) -> Table:
    lines = []
    for task in TASKS:
        fixed, free = (mean_accuracy(rows.where(task=task, beta=beta)) for beta in BETAS)
        for layer in LAYERS:
            learned = _mean(rows, layer, lambda seen: seen["beta"], task=task, beta="trainable")
            lines.append([task, layer, f"{learned:.4f}", f"{free - fixed:+.1f}%", f"{fixed:.2f}%", f"{free:.2f}%"])
    return Table(["Task", "Layer", "Learned β", "Acc. Diff.", "fixed β", "trainable β"], lines)


# fig:materialise_matrices_layer0


def _higher_entropy(rows: Rows) -> Verdict:
    """With a fixed β the mean entropy after training is higher for Selective Copy, in both layers."""
    pairs = _pairs(rows, _entropy, beta="fixed")
    return Verdict.of(all(selective > copy for copy, selective in pairs), _by_layer(pairs))


def _draw_matrices(rows: Rows) -> "Figure":
    from matplotlib.colors import LogNorm

    figure = plot.blank(10, 5.4)
    axes = figure.subplots(2, 4)
    runs = {task: next(row for row in rows.where(task=task, beta="fixed") if row.seed == 0) for task in TASKS}
    for layer in LAYERS:
        places = ((task, when) for task in TASKS for when in ("before", "after"))
        for axis, (task, when) in zip(axes[layer], places, strict=True):
            seen = runs[task].numbers[when][layer]
            picture = np.maximum(seen["picture"], 1e-4)
            shown = axis.imshow(picture, cmap="magma", norm=LogNorm(1e-4, 1), interpolation="none")
            axis.set(xticks=[], yticks=[])
            axis.set_title(f"{task}, layer {layer},\n{when} training: H = {_entropy(seen):.2f}", fontsize=8)
    figure.colorbar(shown, ax=axes, shrink=0.8)
    return figure


def _entropy_table(rows: Rows) -> Table:
    lines = []
    for layer in LAYERS:
        cells = [
            _mean(rows, layer, _entropy, when, task=t, beta="fixed") for t in TASKS for when in ("before", "after")
        ]
        lines.append([layer, *(f"{value:.3f}" for value in cells)])
    return Table(["Layer", *(f"{t} H, {when}" for t in TASKS for when in ("start", "end"))], lines)


# fig:sel_copy_deer


def _conditions(rows: Rows) -> list[dict[str, Any]]:
    return [{"task": task, "beta": beta} for task in TASKS for beta in BETAS]


def _counts(rows: Rows, layer: int, when: str = "after", **settings: Any) -> float:
    return _mean(rows, layer, _iterations, when, **settings)


def _all_counts(rows: Rows) -> str:
    each = (
        f"{c['task']}, {c['beta']} β: "
        + ", ".join(f"{_counts(rows, i, 'before', **c):.1f} → {_counts(rows, i, **c):.1f}" for i in LAYERS)
        for c in _conditions(rows)
    )
    return "; ".join(each)


def _training(rows: Rows) -> Verdict:
    """The mean count over samples and seeds is larger after training, for both tasks, β and layers."""
    holds = all(_counts(rows, i, **c) > _counts(rows, i, "before", **c) for c in _conditions(rows) for i in LAYERS)
    return Verdict.of(holds, _all_counts(rows))


def _deeper_counts(rows: Rows) -> Verdict:
    """After training the mean count is larger in the second layer, for both tasks and β."""
    return Verdict.of(all(_counts(rows, 1, **c) > _counts(rows, 0, **c) for c in _conditions(rows)), _all_counts(rows))


def _beta_counts(rows: Rows) -> Verdict:
    """After training the mean count is larger with the trained β, for both tasks and layers."""
    holds = all(
        _counts(rows, i, task=task, beta="trainable") > _counts(rows, i, task=task, beta="fixed")
        for task in TASKS
        for i in LAYERS
    )
    return Verdict.of(holds, _all_counts(rows))


def _selective_counts(rows: Rows) -> Verdict:
    """After training the count of Copy Memory minus that of Selective Copy, paired by seed, β and layer, has a 95 %
    interval above 0, and the mean spread of Selective Copy is larger."""
    copy, selective = ([_iterations(seen) for _, _, seen in _layers(rows.where(task=task))] for task in TASKS)
    more, spreads = paired(copy, selective), np.mean(_pairs(rows, _spread), axis=0)
    shown = f"iterations {np.mean(copy):.3g} and {np.mean(selective):.3g}, difference {more}"
    return Verdict.of(
        bool(more.low > 0 and spreads[1] > spreads[0]),
        f"Copy Memory and Selective Copy: {shown}; spread {spreads[0]:.3g} and {spreads[1]:.3g}",
    )


def _draw_counts(rows: Rows) -> "Figure":
    figure = plot.blank(8, 3.2)
    for axis, layer in zip(figure.subplots(1, 2, sharey=True), LAYERS, strict=True):
        for place, (condition, colour) in enumerate(zip(_conditions(rows), plot.COLOURS, strict=False)):
            some = rows.where(**condition)
            for x, when in ((place - 0.18, "before"), (place + 0.18, "after")):
                found = [_iterations(row.numbers[when][layer]) for row in some]
                axis.bar(x, np.mean(found), 0.33, color=colour, alpha=0.35 if when == "before" else 0.8)
                axis.plot([x] * len(found), found, ".", color="black", markersize=3)
        names = [f"{c['task'].split()[0]},\n{c['beta']} β" for c in _conditions(rows)]
        axis.set_xticks(range(len(names)), names, fontsize=8)
        axis.set_title(f"layer {layer}", fontsize=9)
        plot.bare(axis)
        if layer == 0:
            axis.set_ylabel("iterations (pale: before training)")
    return figure


def _count_table(rows: Rows) -> Table:
    lines = [
        [c["task"], c["beta"], i, f"{_counts(rows, i, 'before', **c):.2f}", f"{_counts(rows, i, **c):.2f}"]
        for c in _conditions(rows)
        for i in LAYERS
    ]
    return Table(["Task", "β", "Layer", "before training", "after training"], lines)


_SHARED: dict[str, Any] = {"version": 1, "points": _points, "run": _run, "dtype": torch.float32}
_COST: dict[Scale, str] = {"smoke": "1 s", "laptop": "9 min", "paper": "15 h"}
_NONE: dict[Scale, str] = dict.fromkeys(_COST, "nothing more")

RECIPES = {
    SOURCE: Recipe(
        checks={
            "contained": Check(_contained, "laptop"),
            "minimum": Check(_minimum, "laptop"),
            "deeper": Check(_deeper_spread, "laptop"),
            "gap": Check(_gap, "laptop"),
        },
        figures={"Exponents and ln |λ̄| of both layers after training": _draw_spectra},
        table=_spectrum_table,
        cost=_COST,
        **_SHARED,
    ),
    "table:trainable_beta_sc": Recipe(
        checks={
            "saturates": Check(_saturates, "laptop"),
            "helps-selective": Check(_helps_selective, "laptop"),
            "not-copy": Check(_not_copy, "laptop"),
        },
        table=_beta_table,
        cost=_NONE,
        source=SOURCE,
        **_SHARED,
    ),
    "fig:materialise_matrices_layer0": Recipe(
        checks={"entropy": Check(_higher_entropy, "laptop")},
        figures={"|M| before and after training, by pairs of the state": _draw_matrices},
        table=_entropy_table,
        cost=_NONE,
        source=SOURCE,
        **_SHARED,
    ),
    "fig:sel_copy_deer": Recipe(
        checks={
            "training": Check(_training, "laptop"),
            "deeper": Check(_deeper_counts, "laptop"),
            "beta": Check(_beta_counts, "laptop"),
            "selective": Check(_selective_counts, "laptop"),
        },
        figures={"Iterations of Conv-DEER before and after training": _draw_counts},
        table=_count_table,
        cost=_NONE,
        source=SOURCE,
        **_SHARED,
    ),
}
