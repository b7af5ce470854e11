"""What recipes that train a network and score it share: the run, means and differences of accuracies, their figure."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import nn

from adptnet._io.files import write_whole
from adptnet.analysis import plot
from adptnet.errors import CheckpointError
from adptnet.spec import ModuleSpec, Spec

from ..tasks import Scores, Task
from ..training import Alone, Keeping, RunFolder, TrainConfig, evaluate, train
from ..training.lock import hold_folder
from ..training.records import read_json
from .evidence import Difference, paired
from .recipe import Row, Rows, Table
from .rows import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "CEILING",
    "Scored",
    "bars",
    "by_setting",
    "device",
    "difference",
    "mean_accuracy",
    "scored",
    "shown",
    "unfinished",
]

CEILING = 99.0  # percent: between accuracies above it there is no difference to judge

device: ContextVar[str] = ContextVar("device", default="cpu")  # where networks are trained
unfinished: ContextVar[Path | None] = ContextVar("unfinished", default=None)  # where a long training can go on from


class Scored(NamedTuple):
    """A trained network, what its row says of it, and all of its scores."""

    model: nn.Module
    numbers: dict[str, Any]  # accuracies in percent
    scores: list[Scores]  # one for each length
    seen: list[Any]  # by `watch`


def scored(
    spec: ModuleSpec,
    task: Task,
    config: TrainConfig,
    *,
    sequences: int,
    lengths: Sequence[int] = (),
    batch: int = 512,
    watch: Callable[[nn.Module], Callable[[int], Any] | None] | None = None,
) -> Scored:
    """Builds a network, trains it and scores it on test data.

    Args:
        spec: The network.
        task: What it learns.
        config: How.
        sequences: How many to be scored on.
        lengths: At which lengths, for a list of accuracies; at the task's own, for one, if not given.
        batch: Sequences to score at a time.
        watch: Sees the network before it is trained; what it returns is called with the number of steps after each, and
            what that returns, unless it is None, is in `seen`.
    """
    model = spec.build().to(device.get())  # drawn on the CPU: the same weights everywhere
    look = None if watch is None else watch(model)
    folder = unfinished.get()
    parts: dict[str, Spec] = {"task": task, "model": spec, "training": config}
    with ExitStack() as stack:
        keeper = None
        if folder is not None:
            hold = stack.enter_context(hold_folder(folder))
            settings = {name: json.loads(part.to_json())["spec"] for name, part in parts.items()}
            keeper = RunFolder(folder, Alone(device.get()), Keeping(), settings, hold)
            keeper.how_to_go_on = ". The same command goes on from the last checkpoint."
            stack.callback(keeper.close)
        notes = _Notes(folder)
        if look is not None:
            notes.add(0, look(0))

        def on_step(step: int, loss: float) -> None:
            if look is not None:
                notes.add(step, look(step))

        record = train(model, task, config, on_step=on_step, keeper=keeper)
    scores = list(evaluate(model, task, lengths or (None,), size=sequences, batch_size=batch).values())
    found = [100 * float(each["accuracy"]) for each in scores]  # type: ignore[arg-type]
    numbers = {
        "accuracy": found if lengths else found[0],
        "chance": 100 * task.chance,
        "loss": record.losses[-1],
        "parameters": sum(p.numel() for p in model.parameters()),
        "training": config.to_json(),
    }
    return Scored(model, numbers, scores, notes.values)


class _Notes:
    """What was seen along a training, by its step; also in a file, for a training that goes on from a checkpoint."""

    def __init__(self, folder: Path | None):
        self._path = None if folder is None else folder / "seen.json"
        self._found: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            found = read_json(self._path)
            if not isinstance(found, dict) or not all(step.isdecimal() for step in found):
                raise CheckpointError(
                    f"{self._path} is not as it was written. Remove {folder}: the point begins again."
                )
            self._found = found

    def add(self, step: int, value: Any) -> None:
        if value is None:
            return
        self._found[str(step)] = plain(value)
        if self._path is not None:
            write_whole(self._path, json.dumps(self._found).encode())

    @property
    def values(self) -> list[Any]:
        return [self._found[step] for step in sorted(self._found, key=int)]


def _accuracy(row: Row, place: int) -> float:
    found = row.numbers["accuracy"]
    return float(found[place] if isinstance(found, list) else found)


def mean_accuracy(rows: Rows, place: int = 0) -> float:
    """Over runs; of accuracies at several lengths, that at `place`."""
    return float(np.mean([_accuracy(row, place) for row in rows]))


def shown(rows: Rows, key: str) -> str:
    """The mean accuracy for each value of a setting, in words."""
    return ", ".join(f"{value} {mean_accuracy(some):.1f}" for (value,), some in rows.groups(key).items()) + " %"


def difference(rows: Rows, first: Mapping[str, Any], second: Mapping[str, Any], place: int = 0) -> Difference:
    """Accuracies with the settings `first` minus those with `second`, paired by all other settings and by seed."""

    def keyed(chosen: Mapping[str, Any]) -> dict[Any, float]:
        found = {}
        for row in rows.where(**chosen):
            others = (str(value) for key, value in sorted(row.settings.items()) if key not in chosen)
            found[row.seed, *others] = _accuracy(row, place)
        return found

    left, right = keyed(first), keyed(second)
    pairs = [key for key in left if key in right]
    return paired([left[key] for key in pairs], [right[key] for key in pairs])


def by_setting(rows: Rows, columns: Mapping[str, str], *, heights: Callable[[Rows], float] = mean_accuracy) -> Table:
    """Mean, range and number of runs for each combination of settings; `columns` names them by their keys."""
    lines: list[list[Any]] = []
    for settings, some in rows.groups(*columns).items():
        found = some.numbers("accuracy")
        counts = sorted({row.numbers["parameters"] for row in some})
        size = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        named = ["--" if value is None else value for value in settings]
        lines.append([*named, f"{heights(some):.1f}", f"{min(found):.1f} to {max(found):.1f}", len(found), size])
    return Table([*columns.values(), "Acc (%)", "range", "runs", "N. Param."], lines)


def bars(
    rows: Rows, key: str, *, heights: Callable[[Rows], float] = mean_accuracy, panels: str | None = None
) -> "Figure":
    """Accuracies for each value of a setting, a point for each run; a panel for each value of another setting."""
    parts = [((None,), rows)] if panels is None else list(rows.groups(panels).items())
    figure = plot.blank(1.5 + 3.5 * len(parts), 3.2)
    for axis, ((name,), part) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        values = part.values(key)
        for place, value in enumerate(values):
            some = part.where(**{key: value})
            axis.bar(place, heights(some), 0.6, color=plot.COLOURS[0], alpha=0.4)
            axis.plot([place] * len(some), some.numbers("accuracy"), ".", color=plot.COLOURS[0])
        axis.axhline(np.mean(part.numbers("chance")), color="black", linewidth=0.8, linestyle="--")
        names = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
        long = max(map(len, names)) > 6
        axis.set_xticks(range(len(values)), names, rotation=30 if long else 0, ha="right" if long else "center")
        axis.set(xlabel="β" if key == "beta" else "", ylabel="accuracy (%; dashed: chance)", ylim=(0, 104))
        if name is not None:
            axis.set_title(str(name))
        plot.bare(axis)
    return figure
