"""Copy Memory against Selective Copy: the same network, initialisation and training (sec:selective_copy_results).

Symbols, tokens, noise and training are the same; only the positions of the symbols differ. The same runs are shown in
fig:sel_copy_lyapunov, table:trainable_beta_sc, fig:materialise_matrices_layer0 and fig:sel_copy_deer. Layers are
analysed as float64 copies.
"""

from collections.abc import Callable, Mapping
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
from ..evidence import EXPONENT_TOLERANCE, Estimate, estimate_mean, largest_excess, paired_difference
from ..recipe import Check, GridPoint, Recipe, Row, Rows, RunOutput, Scale, Table
from ..scoring import accuracy_difference, mean_accuracy, train_and_score
from ..settings.copy_memory import copy_layers, measure_spectrum
from ..settings.deer_networks import solve
from ..verdicts import ClaimVerdict, combine, judge_absence, judge_increase, judge_limit, judge_trained

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
    seeds = 1 if scale == "smoke" else 3
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
    beta: BetaValue = (
        BETA
        if settings["beta"] == "fixed"
        else TrainableBeta(BETA, LOWEST, HIGHEST, straight_through=settings.get("straight_through", True))
    )
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


def _values(
    rows: Rows, layer: int, number: Callable[[Any], float], when: str = "after", **settings: Any
) -> dict[int, float]:
    """Return a number of one layer by seed."""
    return {row.seed: number(row.numbers[when][layer]) for row in rows.where(**settings)}


def _paired(first: Mapping[int, float], second: Mapping[int, float], unit: str = "Δ") -> Estimate:
    """Return the difference of two numbers, paired by seed."""
    seeds = sorted(first.keys() & second.keys())
    return paired_difference([first[s] for s in seeds], [second[s] for s in seeds], unit)


def _compare_tasks(rows: Rows, number: Callable[[Any], float], sign: int, relevant: float) -> ClaimVerdict:
    """Judge whether a number is larger (sign 1) or smaller (-1) for Selective Copy, in both layers, paired by seed."""
    parts = []
    for layer in LAYERS:
        copy, selective = (_values(rows, layer, number, task=task, beta="fixed") for task in TASKS)
        more = _paired(selective, copy) if sign > 0 else _paired(copy, selective)
        parts.append(judge_increase(more, relevant, f"layer {layer}"))
    return combine(
        parts, f"{'; '.join(p.why for p in parts)}; {_format_by_layer(_task_means(rows, number, beta='fixed'))}"
    )


def _check_contained(rows: Rows) -> ClaimVerdict:
    """No exponent leaves the range of ln |λ̄| of its layer by more than 1 % of its width, in any run with a fixed β."""
    worst: dict[int, float] = {}
    for row, _, numbers in _trained_layers(rows.where(beta="fixed")):
        low, high = _smallest_log_eigenvalue(numbers), max(numbers["log_eigenvalues"])
        excess = largest_excess(numbers["exponents"], low, high) / (high - low)
        worst[row.seed] = max(worst.get(row.seed, -np.inf), excess)
    text = f"largest excess {max(*worst.values(), 0):.2%} of the width"
    return judge_trained([value <= EXPONENT_TOLERANCE for value in worst.values()], text)


def _check_minimum(rows: Rows) -> ClaimVerdict:
    """With a fixed β, ln |λ̄|_min of Copy Memory minus that of Selective Copy, paired by seed, has an interval above 0
    in both layers. A tenth matters, half of the paper's difference."""
    return _compare_tasks(rows, _smallest_log_eigenvalue, -1, 0.1)


def _check_deeper_spread(rows: Rows) -> ClaimVerdict:
    """With a fixed β, |λ̄|_max − |λ̄|_min of the second layer minus that of the first, paired by seed, has an interval
    above 0 for both tasks. A tenth of the spread matters."""
    parts = []
    for task in TASKS:
        first, second = (_values(rows, layer, _spread, task=task, beta="fixed") for layer in LAYERS)
        parts.append(judge_increase(_paired(second, first), 0.1 * float(np.mean(list(first.values()))), task))
    return combine(parts)


def _check_gap(rows: Rows) -> ClaimVerdict:
    """With a fixed β the smallest exponent differs from ln |λ̄|_min by less than 0.02 in the mean over seeds, in both
    layers and tasks. The paper says about 10⁻²."""
    parts = []
    for task in TASKS:
        for layer in LAYERS:
            gaps = _values(
                rows, layer, lambda n: abs(min(n["exponents"]) - _smallest_log_eigenvalue(n)), task=task, beta="fixed"
            )
            parts.append(judge_limit(estimate_mean(list(gaps.values())), below=0.02, why=f"{task}, layer {layer}"))
    return combine(parts)


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


GAIN = 1.2  # points; half of the +2.4 that the paper reports


def _gain(rows: Rows, task: str) -> Estimate:
    return accuracy_difference(rows.where(task=task), {"beta": "trainable"}, {"beta": "fixed"})


def _check_saturates(rows: Rows) -> ClaimVerdict:
    """In every run and layer the trained β ends within 1 % of its upper limit 0.025, or beyond it."""
    lowest: dict[int, float] = {}
    betas = []
    for row, _, numbers in _trained_layers(rows.where(beta="trainable")):
        betas.append(numbers["beta"])
        lowest[row.seed] = min(lowest.get(row.seed, np.inf), numbers["beta"])
    text = f"from {min(betas):.4f} to {max(betas):.4f}"
    return judge_trained([value >= 0.99 * HIGHEST for value in lowest.values()], text)


def _check_helps_selective(rows: Rows) -> ClaimVerdict:
    """On Selective Copy the accuracy with trainable β minus that with fixed β, paired by seed, has an interval above 0.
    A gain of 1.2 points matters, half of the paper's."""
    return judge_increase(_gain(rows, "Selective Copy"), GAIN)


def _check_not_copy(rows: Rows) -> ClaimVerdict:
    """On Copy Memory the accuracy with trainable β minus that with fixed β, paired by seed, has an interval below 1.2
    points, half of the paper's gain on Selective Copy."""
    return judge_absence(_gain(rows, "Copy Memory"), GAIN)


def _check_only_selective(rows: Rows) -> ClaimVerdict:
    """The gain on Selective Copy minus that on Copy Memory, paired by seed, has an interval above 0. A difference of
    two points matters, half of the paper's 3.9."""
    gains = []
    for task in TASKS:
        free, fixed = (
            {r.seed: r.numbers["accuracy"] for r in rows.where(task=task, beta=b)} for b in ("trainable", "fixed")
        )
        gains.append({seed: free[seed] - fixed[seed] for seed in free.keys() & fixed.keys()})
    return judge_increase(_paired(gains[1], gains[0], "points"), 2)


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
    """With a fixed β the entropy after training of Selective Copy minus that of Copy Memory, paired by seed, has an
    interval above 0 in both layers. 0.05 matters, half of the paper's difference."""
    return _compare_tasks(rows, _entropy, 1, 0.05)


def _check_amplitudes(rows: Rows) -> ClaimVerdict:
    """Before training, the mean size of |M| off the diagonal of Selective Copy divided by that of Copy Memory is above
    1 in both layers, paired by seed. A tenth matters."""

    def size(numbers: Any) -> float:
        image = np.asarray(numbers["picture"])
        return float(np.log(image[~np.eye(len(image), dtype=bool)].mean()))

    pictured = Rows([row for row in rows if "picture" in row.numbers["before"][0]])
    parts = []
    for layer in LAYERS:
        copy, selective = (_values(pictured, layer, size, "before", task=task, beta="fixed") for task in TASKS)
        parts.append(judge_increase(_paired(selective, copy, "Δ ln of the ratio"), 0.1, f"layer {layer}"))
    return combine(parts)


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


def _judge_counts(
    rows: Rows, first: tuple[str, Mapping[str, Any]], second: tuple[str, Mapping[str, Any]], layers: tuple[int, int]
) -> ClaimVerdict:
    """Judge whether the first count is larger than the second, paired by seed; half an iteration matters."""
    (when, condition), (when_other, other) = first, second
    more = _paired(
        _values(rows, layers[0], _iterations, when, **condition),
        _values(rows, layers[1], _iterations, when_other, **other),
        "Δ iterations",
    )
    return judge_increase(more, 0.5)


def _check_training(rows: Rows) -> ClaimVerdict:
    """The mean count over samples after training minus that before, paired by seed, has an interval above 0 for both
    tasks, β and layers. Half an iteration matters."""
    parts = [_judge_counts(rows, ("after", c), ("before", c), (i, i)) for c in CONDITIONS for i in LAYERS]
    return combine(parts, _format_counts(rows))


def _check_deeper_counts(rows: Rows) -> ClaimVerdict:
    """After training the mean count of the second layer minus that of the first, paired by seed, has an interval above
    0 for both tasks and β. Half an iteration matters."""
    return combine([_judge_counts(rows, ("after", c), ("after", c), (1, 0)) for c in CONDITIONS], _format_counts(rows))


def _check_beta_counts(rows: Rows) -> ClaimVerdict:
    """After training the mean count with the trained β minus that with the fixed one, paired by seed, has an interval
    above 0 for both tasks and layers. Half an iteration matters."""
    parts = []
    for task in TASKS:
        free, fixed = ({"task": task, "beta": beta} for beta in ("trainable", "fixed"))
        parts += [_judge_counts(rows, ("after", free), ("after", fixed), (i, i)) for i in LAYERS]
    return combine(parts, _format_counts(rows))


def _check_selective_counts(rows: Rows) -> ClaimVerdict:
    """After training the count of Copy Memory minus that of Selective Copy, averaged over β and layers and paired by
    seed, has an interval above 0, and so has the spread of Selective Copy minus that of Copy Memory."""

    def by_seed(number: Callable[[Any], float], task: str) -> dict[int, float]:
        some = rows.where(task=task)
        seeds = {row.seed for row in some}
        layers = {s: [number(n) for row, _, n in _trained_layers(some) if row.seed == s] for s in seeds}
        return {seed: float(np.mean(values)) for seed, values in layers.items()}

    counts, spreads = ([by_seed(number, task) for task in TASKS] for number in (_iterations, _spread))
    fewer, wider = _paired(counts[0], counts[1], "Δ iterations"), _paired(spreads[1], spreads[0])
    narrow = float(np.mean(list(spreads[0].values())))
    return combine([judge_increase(fewer, 0.5, "iterations"), judge_increase(wider, 0.1 * narrow, "spread")])


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


_SHARED: dict[str, Any] = {
    "version": 1,
    "points": _make_points,
    "run": _run,
    "dtype": torch.float32,
    "options": {"straight_through": "false to cut the gradient of a trained β outside its range"},
}
_COST: dict[Scale, str] = {"smoke": "1 s", "laptop": "9 min", "paper": "41 h; 3.4 h a network"}
_NONE: dict[Scale, str] = dict.fromkeys(_COST, "no further runs")

RECIPES = {
    SOURCE: Recipe(
        checks={
            "contained": Check(_check_contained, "laptop"),
            "minimum": Check(_check_minimum, "laptop"),
            "deeper": Check(_check_deeper_spread, "laptop"),
            "gap": Check(_check_gap, "paper", reason="the paper's number is that of its own size"),
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
            "only-selective": Check(_check_only_selective, "laptop"),
        },
        table=_make_beta_table,
        cost=_NONE,
        source=SOURCE,
        **_SHARED,
    ),
    "fig:materialise_matrices_layer0": Recipe(
        checks={
            "entropy": Check(_check_higher_entropy, "laptop"),
            "amplitudes": Check(_check_amplitudes, "laptop"),
        },
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
