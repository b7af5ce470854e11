"""`adptnet train TASK`: train a model in a folder of its own."""

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional

from .. import training
from ..tasks import TASKS
from ..training import SaveOptions
from .draft import read_draft
from .evaluate import print_scores
from .spec_flags import describe_experiment, make_experiment, make_flags

__all__ = ["make_options", "run"]

_OPTIONS: list[tuple[str, Any, Any]] = [
    ("config", Annotated[Path | None, tyro.conf.arg(help="Start from this config.json, or from that of a run.")], None),
    ("output", Annotated[Path | None, tyro.conf.arg(help="Folder of the run. Under runs/ if not given.")], None),
    ("resume", Annotated[bool, tyro.conf.arg(help="Resume from the newest checkpoint, if there is one.")], False),
    ("sharded", Annotated[bool, tyro.conf.arg(help="Shard the weights over the processes (FSDP).")], False),
    ("device", Annotated[str | None, tyro.conf.arg(help="Device to train on; a GPU if there is one.")], None),
    ("keep", SaveOptions, SaveOptions()),
]


def make_options(arguments: Sequence[str]) -> type:
    """Return the dataclass of the options. Its flags depend on the task and the layer in `arguments`.

    Args:
        arguments: The arguments after `adptnet train`.
    """
    name, draft = read_draft(arguments)
    task = Annotated[
        Positional[str],
        tyro.conf.arg(metavar="TASK", help="Task to learn: " + ", ".join(TASKS) + "; or your own, module:Name."),
    ]
    options = dataclasses.make_dataclass(
        "Train", [("name", task, name), *_OPTIONS, *make_flags(draft)], frozen=True, namespace={"draft": draft}
    )
    options.__doc__ = "Train a model on a task. Everything is saved in a folder, and an interrupted run can be resumed."
    return options


def run(options: Any) -> None:
    """Train the model, then print its scores on test data.

    Args:
        options: An instance of the class that `make_options` returned.
    """
    experiment = make_experiment(options, options.draft)
    strategy = training.detect_strategy(experiment.training.precision, sharded=options.sharded, device=options.device)
    output = options.output or Path("runs") / f"{options.name.replace(':', '.') or 'train'}-{experiment.digest}"
    if strategy.is_main:
        with suppress(BrokenPipeError):  # a run continues when nobody reads its lines
            if options.draft.preset:
                print(f"preset: {options.draft.preset}, with the flags you passed")
            print(describe_experiment(experiment), flush=True)
    result = training.run(experiment, output, resume=options.resume, strategy=strategy, save_options=options.keep)
    if strategy.is_main:
        print_scores(experiment, {int(length): scores for length, scores in result["test"].items()})
        print(f"{result['parameters']:,} parameters, step {result['step']}, {result['seconds']:.1f} s. In {output}")
