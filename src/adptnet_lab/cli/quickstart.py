"""`adptnet quickstart`: a first run, in which raising β turns a linear model into one that tracks states."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adptnet.cells import ADPTCell, ADPTSpec, ReLURNN
from adptnet.nn import LayerSpec, SequenceModel
from adptnet.nn.block import BlockSpec
from adptnet.nn.model import ModelSpec
from adptnet.recurrence.drive import LRU, SoftplusGate
from adptnet.recurrence.spectra import Negative, S4DReal

from .._json_files import write_json
from .._runtime import describe_environment
from ..tasks import WordProblem
from ..training import TrainConfig, evaluate, train
from ..training.progress_display import show_progress

__all__ = ["Quickstart", "make_models", "run"]


@dataclass(frozen=True)
class Quickstart:
    """Train ADPTNet at β = 0, 1 and 4 and a ReLU RNN on the S3 word problem; print a table and draw a figure."""

    output: Path = Path("runs/quickstart")
    """Folder for the figure and the numbers."""
    width: int = 64
    """Width of every model."""
    steps: int = 1500
    """Optimizer steps of every model."""
    seed: int = 0
    """Seed of weights and data."""


def make_models(width: int) -> dict[str, ModelSpec]:
    """Return the four models by their names in the table. They differ in the recurrence only.

    Args:
        width: Width of every model.
    """

    def adpt(beta: float) -> LayerSpec:
        return LayerSpec(ADPTSpec(width, beta=beta, spectrum=Negative(S4DReal(), 0.5), gain=LRU(), gate=SoftplusGate()))

    layers = {
        "ADPTNet β=0": adpt(0.0),
        "ADPTNet β=1": adpt(1.0),
        "ADPTNet β=4": adpt(4.0),
        "ReLU RNN": LayerSpec(ReLURNN(width)),
    }
    vocabulary = WordProblem().vocabulary
    return {
        name: ModelSpec(BlockSpec(layer, norm="batch", dropout=0.05), vocabulary=vocabulary)
        for name, layer in layers.items()
    }


def run(options: Quickstart) -> dict[str, Any]:
    """Run the quickstart on one thread and return every number that was written.

    Models this narrow gain nothing from a second thread, and slow down much if another program needs its core.

    Args:
        options: The options.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(options)
    finally:
        torch.set_num_threads(threads)


def _run(options: Quickstart) -> dict[str, Any]:
    task = WordProblem("S3", length=8)
    config = TrainConfig(steps=options.steps, seed=options.seed)
    lengths = [task.length, 2 * task.length, 4 * task.length]
    rows = {}
    for name, spec in make_models(options.width).items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            model = spec.build()
        before = _eigenvalues(model)
        with show_progress(options.steps, f"{name:<12}") as display:
            record = train(model, task, config, display=display)
        rows[name] = {
            "spec": spec.to_json(),
            "parameters": sum(p.numel() for p in model.parameters()),
            "seconds": record.seconds,
            "losses": record.losses,
            "scores": {str(length): scores for length, scores in evaluate(model, task, lengths).items()},
            "eigenvalues": {"initial": before, "trained": _eigenvalues(model)},
        }
    numbers = {
        "task": task.to_json(),
        "training": config.to_json(),
        "chance": task.chance,
        "environment": describe_environment(),
        "models": rows,
    }
    write_json(options.output / "quickstart.json", numbers)
    _print_table(numbers, lengths)
    _draw(numbers, lengths, options.output / "quickstart.png")
    print(f"\nFigure and numbers: {options.output / 'quickstart.png'}, {options.output / 'quickstart.json'}")
    return numbers


def _eigenvalues(model: SequenceModel) -> list[float] | None:
    cells = [module for module in model.modules() if isinstance(module, ADPTCell)]
    return cells[0].spectrum().eigenvalues().tolist() if cells else None


def _print_table(numbers: dict[str, Any], lengths: list[int]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="S3 word problem: accuracy (%) over the last min(10, length) positions")
    table.add_column("model")
    table.add_column("parameters", justify="right")
    for factor, length in zip((1, 2, 4), lengths, strict=True):
        table.add_column(f"{factor}× (length {length})", justify="right")
    table.add_column("seconds", justify="right")
    for name, row in numbers["models"].items():
        accuracies = [f"{100 * row['scores'][str(length)]['accuracy']:.1f}" for length in lengths]
        table.add_row(name, f"{row['parameters']:,}", *accuracies, f"{row['seconds']:.0f}")
    table.caption = f"Trained at length {lengths[0]}; chance is {100 * numbers['chance']:.1f} %."
    Console().print(table)


def _draw(numbers: dict[str, Any], lengths: list[int], path: Path) -> None:
    """Draw the accuracy per position at the longest length, and the eigenvalues before and after training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = ["#999999", "#56b4e9", "#0072b2", "#d55e00"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), width_ratios=(3, 2), layout="constrained")
    for colour, (name, row) in zip(colours, numbers["models"].items(), strict=True):
        accuracy = [100 * a for a in row["scores"][str(lengths[-1])]["per_position"]]
        left.plot(range(1, len(accuracy) + 1), accuracy, color=colour, label=name, linewidth=2)
    left.axvline(lengths[0] + 0.5, color="black", linewidth=0.8, linestyle=":")
    left.text(lengths[0] + 0.8, 4, "longer than in training →", fontsize=8)
    left.axhline(100 * numbers["chance"], color="black", linewidth=0.8, linestyle="--")
    left.text(lengths[-1], 100 * numbers["chance"] + 2, "chance", fontsize=8, ha="right")
    left.set(xlabel="position", ylabel="accuracy (%)", ylim=(0, 104), title="The product so far, at each position")
    left.legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1, 0.9))
    spectra = {name: row["eigenvalues"] for name, row in numbers["models"].items() if row["eigenvalues"]["initial"]}
    for place, (colour, values) in enumerate(zip(colours, spectra.values(), strict=False)):
        count = len(values["initial"])
        spread = [place - 0.3 + 0.25 * i / count for i in range(count)]
        right.scatter(spread, sorted(values["initial"]), s=8, color="#cccccc", label="initial" if not place else None)
        right.scatter([s + 0.3 for s in spread], sorted(values["trained"]), s=8, color=colour)
    right.set_xticks(range(len(spectra)), [f"{name.split()[-1]}" for name in spectra])
    right.set(ylabel="eigenvalue λ̄", ylim=(-1.05, 1.05), title="Eigenvalues: initial (grey), trained")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
