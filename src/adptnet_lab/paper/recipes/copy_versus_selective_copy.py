"""Copy Memory against Selective Copy: the same network, initialisation and training (sec:selective_copy_results).

Symbols, tokens, noise and training are the same; only the positions of the symbols differ. The same runs are shown in
fig:sel_copy_lyapunov, table:trainable_beta_sc, fig:materialise_matrices_layer0 and fig:sel_copy_deer. Layers are
analysed as float64 copies.
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
from ..evidence import EXPONENT_TOLERANCE, PairedDifference, largest_excess, paired_difference
from ..recipe import Check, ClaimVerdict, GridPoint, Recipe, Row, Rows, RunOutput, Scale, Table, decide
from ..scoring import accuracy_difference, mean_accuracy, train_and_score
from ..settings.copy_memory import copy_layers, measure_spectrum
from ..settings.deer_networks import solve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = "fig:sel_copy_lyapunov"
TASKS = ["Copy Memory", "Selective Copy"]
BETAS = ["fixed", "trainable"]
LAYERS = (0, 1)
BETA, LOWEST, HIGHEST = 0.0125, 1e-4, 0.025
PIXELS = 64  # largest width and height of the image of M that is stored in a row
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


def _make_points(scale: Scale) -> list[GridPoint]:
    shared = {**SIZES[scale], **TRAINING[scale]}
    seeds = 3 if scale == "laptop" else 1
    return [
        GridPoint({"task": task, "beta": beta, **shared}, seed)
        for task in TASKS
        for beta in BETAS
        for seed in range(seeds)
    ]


def _run(point: GridPoint) -> RunOutput:
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
        state_size=2 * settings["expansion"] * settings["width"],  # expansion * width complex numbers
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
    with_image = point.seed == 0 and settings["beta"] == "fixed"

    def watch(model: nn.Module) -> Callable[[int], Any]:
        def look(step: int) -> list[dict[str, Any]] | None:
            if step not in (0, settings["steps"]):
                return None
            return [_measure_layer(layer, x, with_image) for layer, x in copy_layers(model, samples)]

        return look

    trained = train_and_score(spec, task, config, sequences=settings["test"], watch=watch)
    before, after = trained.observations
    return RunOutput({"before": before, "after": after, **trained.numbers}, spec)


@torch.no_grad()
def _measure_layer(layer: ADPTNet, x: Tensor, with_image: bool) -> dict[str, Any]:
    """Return the spectrum along the first sample, iterations and entropy of each sample, and |M| at the last step."""
    assert isinstance(layer.cell, ADPTCell)
    steps = x.shape[1]
    solution = solve("Conv", layer, x, steps)
    converged = solution.results == solvers.Result.CONVERGED
    conjugate = analysis.materialize_conjugate(layer, x)
    numbers = {
        **measure_spectrum(layer, x),
        "iterations": torch.where(converged, solution.iterations, steps),
        "entropy": analysis.offdiagonal_entropy(conjugate, pairs=True),
        "beta": layer.cell.beta.report()["raw"][0],
    }
    return {**numbers, "picture": _make_image(conjugate[0])} if with_image else numbers


def _make_image(conjugate: Tensor) -> Tensor:
    """Return the norms of the 2 x 2 blocks of M, to four digits, averaged over tiles if more than `PIXELS`."""
    pairs = functional.avg_pool2d(conjugate.square()[None], 2, divisor_override=1)
    tile = -(-pairs.shape[-1] // PIXELS)
    return functional.avg_pool2d(pairs, tile).sqrt()[0].float().round(decimals=4)


# Statistics of one layer, or their mean over seeds


def _trained_layers(rows: Rows) -> list[tuple[Row, int, Any]]:
    """Return the row, the index and the numbers of every trained layer."""
    return [(row, layer, row.numbers["after"][layer]) for row in rows for layer in LAYERS]


def _smallest_log_eigenvalue(numbers: Any) -> float:
    return float(min(numbers["log_eigenvalues"]))


def _spread(numbers: Any) -> float:
    return float(np.exp(max(numbers["log_eigenvalues"])) - np.exp(_smallest_log_eigenvalue(numbers)))


def _iterations(numbers: Any) -> float:
    return float(np.mean(numbers["iterations"]))


def _entropy(numbers: Any) -> float:
    return float(np.mean(numbers["entropy"]))


def _mean(rows: Rows, layer: int, number: Callable[[Any], float], when: str = "after", **settings: Any) -> float:
    return float(np.mean([number(row.numbers[when][layer]) for row in rows.where(**settings)]))


def _task_means(rows: Rows, number: Callable[[Any], float], **settings: Any) -> list[tuple[float, float]]:
    """Return the means of a number for Copy Memory and for Selective Copy, layer by layer."""
    return [
        (_mean(rows, i, number, task=TASKS[0], **settings), _mean(rows, i, number, task=TASKS[1], **settings))
        for i in LAYERS
    ]


def _format_by_layer(means: list[tuple[float, float]]) -> str:
    return "; ".join(
        f"layer {i}: Copy Memory {copy:.3g}, Selective Copy {selective:.3g}"
        for i, (copy, selective) in enumerate(means)
    )


# fig:sel_copy_lyapunov


def _check_contained(rows: Rows) -> ClaimVerdict:
    """No exponent leaves the range of ln |λ̄| of its layer by more than 1 % of its width, in any run with a fixed β."""
    worst = -np.inf
    for _, _, numbers in _trained_layers(rows.where(beta="fixed")):
        low, high = _smallest_log_eigenvalue(numbers), max(numbers["log_eigenvalues"])
        worst = max(worst, largest_excess(numbers["exponents"], low, high) / (high - low))
    return decide(worst <= EXPONENT_TOLERANCE, f"largest excess {max(worst, 0):.2%} of the width")


def _check_minimum(rows: Rows) -> ClaimVerdict:
    """With a fixed β the mean of ln |λ̄|_min over seeds is lower for Selective Copy, in both layers."""
    means = _task_means(rows, _smallest_log_eigenvalue, beta="fixed")
    return decide(all(selective < copy for copy, selective in means), _format_by_layer(means))


def _check_deeper_spread(rows: Rows) -> ClaimVerdict:
    """With a fixed β the mean of |λ̄|_max − |λ̄|_min over seeds is larger in the second layer, for both tasks."""
    means = _task_means(rows, _spread, beta="fixed")
    return decide(all(second > first for first, second in zip(*means, strict=True)), _format_by_layer(means))


def _check_gap(rows: Rows) -> ClaimVerdict:
    """With a fixed β the smallest exponent differs from ln |λ̄|_min by at most 0.02, in both layers and tasks."""
    layers = [numbers for _, _, numbers in _trained_layers(rows.where(beta="fixed"))]
    gaps = [abs(min(numbers["exponents"]) - _smallest_log_eigenvalue(numbers)) for numbers in layers]
    return decide(max(gaps) <= 0.02, f"from {min(gaps):.2g} to {max(gaps):.2g}")


def _draw_spectra(rows: Rows) -> "Figure":
    first_seeds = Rows([row for row in rows.where(beta="fixed") if row.seed == 0])
    panels = {f"{row.settings['task']}, layer {layer}": numbers for row, layer, numbers in _trained_layers(first_seeds)}
    return plot.spectra(
        {name: torch.tensor(numbers["exponents"]) for name, numbers in panels.items()},
        {name: torch.tensor(numbers["log_eigenvalues"]) for name, numbers in panels.items()},
        columns=2,
    )


def _make_spectrum_table(rows: Rows) -> Table:
    ends: dict[str, Callable[[Any], float]] = {
        "ln |λ̄|_min": _smallest_log_eigenvalue,
        "smallest exponent": lambda numbers: min(numbers["exponents"]),
        "ln |λ̄|_max": lambda numbers: max(numbers["log_eigenvalues"]),
        "largest exponent": lambda numbers: max(numbers["exponents"]),
    }
    lines = [
        [task, i, *(f"{_mean(rows, i, number, task=task, beta='fixed'):.4f}" for number in ends.values())]
        for task in TASKS
        for i in LAYERS
    ]
    return Table(["Task", "Layer", *ends], lines)


# table:trainable_beta_sc


def _gain(rows: Rows, task: str) -> PairedDifference:
    return accuracy_difference(rows.where(task=task), {"beta": "trainable"}, {"beta": "fixed"})


def _check_saturates(rows: Rows) -> ClaimVerdict:
    """In every run and layer the trained β ends within 1 % of its upper limit 0.025, or beyond it."""
    betas = [numbers["beta"] for _, _, numbers in _trained_layers(rows.where(beta="trainable"))]
    return decide(min(betas) >= 0.99 * HIGHEST, f"from {min(betas):.4f} to {max(betas):.4f}")


def _check_helps_selective(rows: Rows) -> ClaimVerdict:
    """On Selective Copy the accuracy with trainable β minus that with fixed β, paired by seed, has a 95 % interval
    above 0; with a single pair the difference is above 0."""
    found = _gain(rows, "Selective Copy")
    return decide((found.low if found.pairs > 1 else found.mean) > 0, f"{found} (%)")


def _check_not_copy(rows: Rows) -> ClaimVerdict:
    """On Copy Memory the accuracy with trainable β minus that with fixed β, paired by seed, has no 95 % interval above
    0; with a single pair the difference is not above 0."""
    found = _gain(rows, "Copy Memory")
    return decide((found.low if found.pairs > 1 else found.mean) <= 0, f"{found} (%)")


def _make_beta_table(rows: Rows) -> Table:
    lines = []
    for task in TASKS:
        fixed, free = (mean_accuracy(rows.where(task=task, beta=beta)) for beta in BETAS)
        for layer in LAYERS:
            learned = _mean(rows, layer, lambda numbers: numbers["beta"], task=task, beta="trainable")
            lines.append([task, layer, f"{learned:.4f}", f"{free - fixed:+.1f}%", f"{fixed:.2f}%", f"{free:.2f}%"])
    return Table(["Task", "Layer", "Learned β", "Acc. Diff.", "fixed β", "trainable β"], lines)


# fig:materialise_matrices_layer0


def _check_higher_entropy(rows: Rows) -> ClaimVerdict:
    """With a fixed β the mean entropy after training is higher for Selective Copy, in both layers."""
    means = _task_means(rows, _entropy, beta="fixed")
    return decide(all(selective > copy for copy, selective in means), _format_by_layer(means))


def _draw_matrices(rows: Rows) -> "Figure":
    from matplotlib.colors import LogNorm

    figure = plot.new_figure(10, 5.4)
    axes = figure.subplots(2, 4)
    runs = {task: next(row for row in rows.where(task=task, beta="fixed") if row.seed == 0) for task in TASKS}
    for layer in LAYERS:
        panels = ((task, when) for task in TASKS for when in ("before", "after"))
        for axis, (task, when) in zip(axes[layer], panels, strict=True):
            numbers = runs[task].numbers[when][layer]
            matrix = np.maximum(numbers["picture"], 1e-4)
            image = axis.imshow(matrix, cmap="magma", norm=LogNorm(1e-4, 1), interpolation="none")
            axis.set(xticks=[], yticks=[])
            axis.set_title(f"{task}, layer {layer},\n{when} training: H = {_entropy(numbers):.2f}", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


def _make_entropy_table(rows: Rows) -> Table:
    lines = []
    for layer in LAYERS:
        cells = [
            _mean(rows, layer, _entropy, when, task=t, beta="fixed") for t in TASKS for when in ("before", "after")
        ]
        lines.append([layer, *(f"{value:.3f}" for value in cells)])
    return Table(["Layer", *(f"{t} H, {when}" for t in TASKS for when in ("start", "end"))], lines)


# fig:sel_copy_deer


CONDITIONS: list[dict[str, Any]] = [{"task": task, "beta": beta} for task in TASKS for beta in BETAS]


def _mean_count(rows: Rows, layer: int, when: str = "after", **settings: Any) -> float:
    return _mean(rows, layer, _iterations, when, **settings)


def _format_counts(rows: Rows) -> str:
    each = (
        f"{c['task']}, {c['beta']} β: "
        + ", ".join(f"{_mean_count(rows, i, 'before', **c):.1f} → {_mean_count(rows, i, **c):.1f}" for i in LAYERS)
        for c in CONDITIONS
    )
    return "; ".join(each)


def _check_training(rows: Rows) -> ClaimVerdict:
    """The mean count over samples and seeds is larger after training than before, for both tasks, β and layers."""
    holds = all(_mean_count(rows, i, **c) > _mean_count(rows, i, "before", **c) for c in CONDITIONS for i in LAYERS)
    return decide(holds, _format_counts(rows))


def _check_deeper_counts(rows: Rows) -> ClaimVerdict:
    """After training the mean count is larger in the second layer, for both tasks and β."""
    holds = all(_mean_count(rows, 1, **c) > _mean_count(rows, 0, **c) for c in CONDITIONS)
    return decide(holds, _format_counts(rows))


def _check_beta_counts(rows: Rows) -> ClaimVerdict:
    """After training the mean count is larger with the trained β than with the fixed one, for both tasks and layers."""
    holds = all(
        _mean_count(rows, i, task=task, beta="trainable") > _mean_count(rows, i, task=task, beta="fixed")
        for task in TASKS
        for i in LAYERS
    )
    return decide(holds, _format_counts(rows))


def _check_selective_counts(rows: Rows) -> ClaimVerdict:
    """After training the count of Copy Memory minus that of Selective Copy, paired by seed, β and layer, has a 95 %
    interval above 0, and the mean spread of Selective Copy is larger."""
    copy, selective = (
        [_iterations(numbers) for _, _, numbers in _trained_layers(rows.where(task=task))] for task in TASKS
    )
    more, spreads = paired_difference(copy, selective), np.mean(_task_means(rows, _spread), axis=0)
    text = f"iterations {np.mean(copy):.3g} and {np.mean(selective):.3g}, difference {more}"
    return decide(
        bool(more.low > 0 and spreads[1] > spreads[0]),
        f"Copy Memory and Selective Copy: {text}; spread {spreads[0]:.3g} and {spreads[1]:.3g}",
    )


def _draw_counts(rows: Rows) -> "Figure":
    figure = plot.new_figure(8, 3.2)
    for axis, layer in zip(figure.subplots(1, 2, sharey=True), LAYERS, strict=True):
        for place, (condition, colour) in enumerate(zip(CONDITIONS, plot.COLORS, strict=False)):
            some = rows.where(**condition)
            for x, when in ((place - 0.18, "before"), (place + 0.18, "after")):
                counts = [_iterations(row.numbers[when][layer]) for row in some]
                axis.bar(x, np.mean(counts), 0.33, color=colour, alpha=0.35 if when == "before" else 0.8)
                axis.plot([x] * len(counts), counts, ".", color="black", markersize=3)
        names = [f"{c['task'].split()[0]},\n{c['beta']} β" for c in CONDITIONS]
        axis.set_xticks(range(len(names)), names, fontsize=8)
        axis.set_title(f"layer {layer}", fontsize=9)
        plot.strip_axes(axis)
        if layer == 0:
            axis.set_ylabel("iterations (pale: before training)")
    return figure


def _make_count_table(rows: Rows) -> Table:
    lines = [
        [c["task"], c["beta"], i, f"{_mean_count(rows, i, 'before', **c):.2f}", f"{_mean_count(rows, i, **c):.2f}"]
        for c in CONDITIONS
        for i in LAYERS
    ]
    return Table(["Task", "β", "Layer", "before training", "after training"], lines)


_SHARED: dict[str, Any] = {"version": 1, "points": _make_points, "run": _run, "dtype": torch.float32}
_COST: dict[Scale, str] = {"smoke": "1 s", "laptop": "9 min", "paper": "15 h"}
_NONE: dict[Scale, str] = dict.fromkeys(_COST, "no further runs")

RECIPES = {
    SOURCE: Recipe(
        checks={
            "contained": Check(_check_contained, "laptop"),
            "minimum": Check(_check_minimum, "laptop"),
            "deeper": Check(_check_deeper_spread, "laptop"),
            "gap": Check(_check_gap, "laptop"),
        },
        figures={"Exponents and ln |λ̄| of both layers after training": _draw_spectra},
        table=_make_spectrum_table,
        cost=_COST,
        **_SHARED,
    ),
    "table:trainable_beta_sc": Recipe(
        checks={
            "saturates": Check(_check_saturates, "laptop"),
            "helps-selective": Check(_check_helps_selective, "laptop"),
            "not-copy": Check(_check_not_copy, "laptop"),
        },
        table=_make_beta_table,
        cost=_NONE,
        source=SOURCE,
        **_SHARED,
    ),
    "fig:materialise_matrices_layer0": Recipe(
        checks={"entropy": Check(_check_higher_entropy, "laptop")},
        figures={"|M| before and after training, by complex state dimensions": _draw_matrices},
        table=_make_entropy_table,
        cost=_NONE,
        source=SOURCE,
        **_SHARED,
    ),
    "fig:sel_copy_deer": Recipe(
        checks={
            "training": Check(_check_training, "laptop"),
            "deeper": Check(_check_deeper_counts, "laptop"),
            "beta": Check(_check_beta_counts, "laptop"),
            "selective": Check(_check_selective_counts, "laptop"),
        },
        figures={"Iterations of Conv-DEER before and after training": _draw_counts},
        table=_make_count_table,
        cost=_NONE,
        source=SOURCE,
        **_SHARED,
    ),
}
