"""`adptnet train`, `evaluate` and `replay`."""

import dataclasses
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from adptnet.analysis import efficiency
from adptnet.errors import InputError
from adptnet.nn import SpikingModel

from .. import training
from ..tasks import TASKS
from ..training import Experiment, Keeping
from ..training.metrics import plain
from ..training.runs import read_experiment, trained
from .spec_flags import experiment_of, flags, peeked, summary

__all__ = ["Evaluate", "Replay", "command", "evaluate", "replay"]

_OPTIONS: list[tuple[str, Any, Any]] = [
    ("config", Annotated[Path | None, tyro.conf.arg(help="Begin from a config.json, or the one of a run.")], None),
    ("output", Annotated[Path | None, tyro.conf.arg(help="Folder of the run. Under runs/ if not given.")], None),
    ("resume", Annotated[bool, tyro.conf.arg(help="Go on from the newest checkpoint, if there is one.")], False),
    ("sharded", Annotated[bool, tyro.conf.arg(help="Spread the weights over the processes (FSDP).")], False),
    ("device", Annotated[str | None, tyro.conf.arg(help="Where to train; a GPU if there is one.")], None),
    ("keep", Keeping, Keeping()),
]


def command(arguments: Sequence[str]) -> tuple[Any, Any]:
    """The command `train` as `arguments` make it, and the function that runs it."""
    name, base = peeked(arguments)
    task = Annotated[Positional[str], tyro.conf.arg(metavar="TASK", help="What to learn: " + ", ".join(TASKS) + ".")]
    kind = dataclasses.make_dataclass("Train", [("name", task, name), *_OPTIONS, *flags(base)], frozen=True)
    kind.__doc__ = "Train a model on a task; everything is kept in a folder, and a run that was cut off can go on."

    def run(options: Any) -> None:
        experiment = experiment_of(options, base)
        place = training.launched(experiment.training.precision, sharded=options.sharded, device=options.device)
        output = options.output or Path("runs") / f"{options.name or 'train'}-{experiment.digest}"
        if place.first:
            with suppress(BrokenPipeError):  # a run continues when nobody reads its lines
                print(summary(experiment), flush=True)
        result = training.run(experiment, output, resume=options.resume, place=place, keeping=options.keep)
        if place.first:
            table(experiment, {int(length): scores for length, scores in result["test"].items()})
            print(f"{result['parameters']:,} parameters, step {result['step']}, {result['seconds']:.1f} s. In {output}")

    return kind, run


@dataclass(frozen=True)
class Evaluate:
    """Score the weights of a run, at any lengths."""

    run: Positional[Path]
    """The folder of the run; one that has not ended is scored by its best weights so far."""
    lengths: tuple[int, ...] = ()
    """Lengths to score at; those of the run if none are given."""
    split: Literal["train", "validation", "test"] = "test"
    """Which sequences."""
    size: int = 4096
    """How many of each length."""
    batch_size: int = 512
    """How many at a time."""
    efficiency: bool = False
    """Also print spikes, operations and energy of a spiking network, on the first of these sequences."""


def evaluate(options: Evaluate) -> None:
    model = trained(options.run)
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
    table(experiment, scores)
    path = options.run / f"evaluation-{options.split}.json"
    try:
        training.write_json(path, plain(scores))
    except OSError as error:
        raise InputError(f"these scores could not be kept: {path} cannot be written ({error.strerror}).") from None
    if options.efficiency:
        assert isinstance(model, SpikingModel)
        first = next(iter(experiment.task.evaluation(options.split, options.batch_size, options.batch_size)))
        print(efficiency(model, first.inputs, lengths=first.lengths))


@dataclass(frozen=True)
class Replay:
    """Run the step at which a run failed once more, and say where it went wrong."""

    run: Positional[Path]
    """The folder of the run."""


def replay(options: Replay) -> None:
    step, diagnosis = training.replay(options.run)
    print(f"step {step}: the loss was {diagnosis.loss}; {diagnosis}.")


def table(experiment: Experiment, scores: dict[int, Any]) -> None:
    """Prints the single scores, a row for each length."""
    from rich.console import Console
    from rich.table import Table

    names = [name for name, value in next(iter(scores.values())).items() if isinstance(value, float)]
    shown = Table(title=f"{experiment.task}", caption=f"chance: {experiment.task.metric} {experiment.task.chance:.4g}")
    for name in ("length", *names):
        shown.add_column(name, justify="right")
    for length, each in scores.items():
        shown.add_row(str(length), *(f"{each[name]:.4f}" for name in names))
    Console(file=sys.stdout).print(shown)
