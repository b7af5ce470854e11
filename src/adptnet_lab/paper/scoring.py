"""Training and scoring of networks in recipes, and the statistics, table and figure of their accuracies."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import nn

from adptnet._io.files import write_atomic
from adptnet.analysis import plot
from adptnet.checkpoint import save
from adptnet.errors import CheckpointError
from adptnet.spec import ModuleSpec, Spec

from .._json_files import read_json
from ..tasks import Scores, Task
from ..training import RunFolder, SaveOptions, SingleProcess, TrainConfig, evaluate, train
from ..training.run_lock import lock_folder
from .evidence import Estimate, estimate_mean, paired_difference
from .forecast import TrainingProgress
from .recipe import Row, Rows, Table
from .rows import to_row_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "CEILING",
    "TrainedNetwork",
    "accuracy_difference",
    "checkpoint_folder",
    "draw_accuracies",
    "estimate_accuracy",
    "format_accuracies",
    "format_estimate",
    "make_accuracy_table",
    "mean_accuracy",
    "network_file",
    "train_and_score",
    "training_device",
]

CEILING = 99.0  # percent; differences between accuracies above it are not judged

training_device: ContextVar[str] = ContextVar("training_device", default="cpu")
checkpoint_folder: ContextVar[Path | None] = ContextVar("checkpoint_folder", default=None)  # None: no checkpoints
network_file: ContextVar[Path | None] = ContextVar("network_file", default=None)  # None: networks are not kept


class TrainedNetwork(NamedTuple):
    """A trained network, the numbers of its row, and all of its scores."""

    model: nn.Module
    numbers: dict[str, Any]  # accuracies in percent
    scores: list[Scores]  # one per length
    observations: list[Any]  # made by `watch`, in the order of steps


def train_and_score(
    spec: ModuleSpec,
    task: Task,
    config: TrainConfig,
    *,
    sequences: int,
    lengths: Sequence[int] = (),
    batch: int = 512,
    watch: Callable[[nn.Module], Callable[[int], Any] | None] | None = None,
) -> TrainedNetwork:
    """Build a network, train it and score it on test data.

    Args:
        spec: The network.
        task: The task.
        config: Optimisation settings.
        sequences: Number of test sequences.
        lengths: Lengths at which to score, which make the accuracy a list. Default: the length of the task alone.
        batch: Batch size of scoring.
        watch: Called with the network before training. It may return a function that is called with the number of
            steps, before training and after each step; what that function returns, unless None, is an observation.
    """
    model = spec.build().to(training_device.get())  # initialised on the CPU: the same weights on every device
    look = None if watch is None else watch(model)
    folder = checkpoint_folder.get()
    parts: dict[str, Spec] = {"task": task, "model": spec, "training": config}
    with ExitStack() as stack:
        keeper = None
        if folder is not None:
            hold = stack.enter_context(lock_folder(folder))
            settings = {name: json.loads(part.to_json())["spec"] for name, part in parts.items()}
            keeper = RunFolder(
                folder, SingleProcess(training_device.get(), config.precision), SaveOptions(), settings, hold
            )
            keeper.resume_hint = ". The same command resumes from the last checkpoint."
            stack.callback(keeper.close)
        observations = _Observations(folder)
        if look is not None:
            observations.add(0, look(0))

        progress = TrainingProgress(config.steps)

        def on_step(step: int, loss: float) -> None:
            progress.show(step, loss)
            if look is not None:
                observations.add(step, look(step))

        record = train(model, task, config, on_step=on_step, recorder=keeper)
    kept = network_file.get()
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        save(model, kept)
    scores = list(evaluate(model, task, lengths or (None,), size=sequences, batch_size=batch).values())
    accuracies = [100 * float(each["accuracy"]) for each in scores]  # type: ignore[arg-type]
    numbers = {
        "accuracy": accuracies if lengths else accuracies[0],
        "chance": 100 * task.chance,
        "loss": record.losses[-1],
        "parameters": sum(p.numel() for p in model.parameters()),
        "training": config.to_json(),
    }
    return TrainedNetwork(model, numbers, scores, observations.values)


class _Observations:
    """Observations along a training run, by step. With a folder they are also written to a file, so that a run that
    resumes from a checkpoint has them all."""

    def __init__(self, folder: Path | None):
        self._path = None if folder is None else folder / "seen.json"
        self._by_step: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            content = read_json(self._path)
            if not isinstance(content, dict) or not all(step.isdecimal() for step in content):
                raise CheckpointError(
                    f"{self._path} is damaged: it must be an object with numbers of steps as keys. "
                    f"Delete {folder} to run the point from the start."
                )
            self._by_step = content

    def add(self, step: int, value: Any) -> None:
        if value is None:
            return
        self._by_step[str(step)] = to_row_value(value)
        if self._path is not None:
            write_atomic(self._path, json.dumps(self._by_step).encode())

    @property
    def values(self) -> list[Any]:
        return [self._by_step[step] for step in sorted(self._by_step, key=int)]


def _accuracy(row: Row, place: int) -> float:
    accuracy = row.numbers["accuracy"]
    return float(accuracy[place] if isinstance(accuracy, list) else accuracy)


def mean_accuracy(rows: Rows, place: int = 0) -> float:
    """Return the mean accuracy over runs, in percent.

    Args:
        rows: The runs.
        place: Index of the length, for runs that were scored at several lengths.
    """
    return float(np.mean([_accuracy(row, place) for row in rows]))


def estimate_accuracy(rows: Rows, place: int = 0) -> Estimate:
    """Return the mean accuracy over runs with its interval, in percent.

    Args:
        rows: The runs.
        place: Index of the length, for runs that were scored at several lengths.
    """
    return estimate_mean([_accuracy(row, place) for row in rows], "%")


def format_estimate(found: Estimate) -> str:
    """Return an accuracy with its interval as the cell of a table; without the interval if there is a single run.

    Args:
        found: From `estimate_accuracy`.
    """
    if found.runs < 2:
        return f"{found.mean:.1f}"
    return f"{found.mean:.1f} [{max(found.low, 0):.1f}, {min(found.high, 100):.1f}]"


def format_accuracies(rows: Rows, key: str) -> str:
    """Return the mean accuracy for each value of a setting, as text.

    Args:
        rows: The runs.
        key: The setting.
    """
    return ", ".join(f"{value} {mean_accuracy(some):.1f}" for (value,), some in rows.groups(key).items()) + " %"


def accuracy_difference(rows: Rows, first: Mapping[str, Any], second: Mapping[str, Any], place: int = 0) -> Estimate:
    """Return the difference of accuracies under two conditions, paired by seed and by all other settings.

    Args:
        rows: The runs.
        first: Settings of the first condition.
        second: Settings of the second condition, which is subtracted.
        place: Index of the length, for runs that were scored at several lengths.
    """

    def by_pair(condition: Mapping[str, Any]) -> dict[Any, float]:
        accuracies = {}
        for row in rows.where(**condition):
            others = (str(value) for key, value in sorted(row.settings.items()) if key not in condition)
            accuracies[row.seed, *others] = _accuracy(row, place)
        return accuracies

    left, right = by_pair(first), by_pair(second)
    pairs = [key for key in left if key in right]
    return paired_difference([left[key] for key in pairs], [right[key] for key in pairs], "points")


def make_accuracy_table(
    rows: Rows, columns: Mapping[str, str], *, score: Callable[[Rows], float] = mean_accuracy
) -> Table:
    """Return a table with score, range and number of runs for each combination of settings.

    Args:
        rows: The runs.
        columns: Headings of the settings, by their keys.
        score: Combines the accuracies of several runs.
    """
    lines: list[list[Any]] = []
    for settings, some in rows.groups(*columns).items():
        accuracies = some.numbers("accuracy")
        counts = sorted({row.numbers["parameters"] for row in some})
        size = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        named = ["--" if value is None else value for value in settings]
        interval = format_estimate(estimate_accuracy(some)) if score is mean_accuracy else f"{score(some):.1f}"
        spread = f"{min(accuracies):.1f} to {max(accuracies):.1f}"
        lines.append([*named, interval, spread, len(accuracies), size])
    return Table([*columns.values(), "Acc (%)", "range", "runs", "N. Param."], lines)


def draw_accuracies(
    rows: Rows, key: str, *, score: Callable[[Rows], float] = mean_accuracy, panels: str | None = None
) -> "Figure":
    """Draw a bar for each value of a setting, and a dot for each run.

    Args:
        rows: The runs.
        key: The setting.
        score: Combines the accuracies of several runs into the height of a bar.
        panels: Another setting, with one panel for each of its values.
    """
    parts = [((None,), rows)] if panels is None else list(rows.groups(panels).items())
    figure = plot.new_figure(1.5 + 3.5 * len(parts), 3.2)
    for axis, ((name,), part) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        values = part.values(key)
        for place, value in enumerate(values):
            some = part.where(**{key: value})
            axis.bar(place, score(some), 0.6, color=plot.COLORS[0], alpha=0.4)
            axis.plot([place] * len(some), some.numbers("accuracy"), ".", color=plot.COLORS[0])
        axis.axhline(np.mean(part.numbers("chance")), color="black", linewidth=0.8, linestyle="--")
        names = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
        long = max(map(len, names)) > 6
        axis.set_xticks(range(len(values)), names, rotation=30 if long else 0, ha="right" if long else "center")
        axis.set(xlabel="β" if key == "beta" else "", ylabel="accuracy (%; dashed: chance)", ylim=(0, 104))
        if name is not None:
            axis.set_title(str(name))
        plot.strip_axes(axis)
    return figure
