"""`adptnet evaluate RUN`: score the weights of a run."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from adptnet._io.json_values import to_json_value
from adptnet.analysis import efficiency
from adptnet.errors import InputError
from adptnet.nn import SpikingModel

from .. import training
from .._json_files import write_json
from ..training import Experiment, load_model, read_experiment

__all__ = ["Evaluate", "print_scores", "run"]


@dataclass(frozen=True)
class Evaluate:
    """Score the weights of a run at any sequence lengths."""

    run: Positional[Path]
    """Folder of the run. A run that has not finished is scored by its best weights so far."""
    lengths: tuple[int, ...] = ()
    """Lengths to score at; those of the run if none are given."""
    split: Literal["train", "validation", "test"] = "test"
    """Part of the data."""
    size: int = 4096
    """Number of sequences of each length."""
    batch_size: int = 512
    """Number of sequences that are run together."""
    efficiency: bool = False
    """Also print spikes, operations and energy of a spiking network, measured on the first of these sequences."""


def run(options: Evaluate) -> None:
    """Print the scores and write them to the folder of the run.

    Args:
        options: The options.

    Raises:
        InputError: The scores could not be written, or `efficiency` is set for a network without spikes.
    """
    model = load_model(options.run)
    experiment = read_experiment(options.run)
    lengths = options.lengths or experiment.training.lengths or (None,)
    if options.efficiency and not isinstance(model, SpikingModel):
        raise InputError(f"{options.run} holds no spiking network. Drop --efficiency.")
    scores = training.evaluate(
        model,
        experiment.task,
        lengths,
        split=options.split,
        size=options.size,
        batch_size=options.batch_size,
    )
    print_scores(experiment, scores)
    path = options.run / f"evaluation-{options.split}.json"
    try:
        write_json(path, to_json_value(scores))
    except OSError as error:
        raise InputError(f"these scores could not be saved: {path} cannot be written ({error.strerror}).") from None
    if options.efficiency:
        assert isinstance(model, SpikingModel)
        first = next(iter(experiment.task.evaluation(options.split, options.batch_size, options.batch_size)))
        print(efficiency(model, first.inputs, lengths=first.lengths))


def print_scores(experiment: Experiment, scores: dict[int, Any]) -> None:
    """Print the scores that are single numbers, a row for each length.

    Args:
        experiment: Provides the task, its metric and its chance level.
        scores: Scores by length.
    """
    from rich.console import Console
    from rich.table import Table

    names = [name for name, value in next(iter(scores.values())).items() if isinstance(value, float)]
    shown = Table(title=f"{experiment.task}", caption=f"chance: {experiment.task.metric} {experiment.task.chance:.4g}")
    for name in ("length", *names):
        shown.add_column(name, justify="right")
    for length, each in scores.items():
        shown.add_row(str(length), *(f"{each[name]:.4f}" for name in names))
    Console(file=sys.stdout).print(shown)
