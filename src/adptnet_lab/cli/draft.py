"""An experiment before its flags are applied, and the arguments that determine which flags exist."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from adptnet.errors import AdptnetError, InputError
from adptnet.nn import SpikingModelSpec, SwiGLUBlockSpec
from adptnet.nn.block import BlockSpec
from adptnet.nn.presets import PRESETS
from adptnet.spec import Spec, suggest_name

from ..tasks import TASKS, Task, get_preset, get_task
from ..training import Cosine, Experiment, TrainConfig, read_experiment
from .flag_fields import make_group, own_fields
from .layer_names import known_layers, known_networks, make_layer

__all__ = ["BLOCKS", "TRAINING", "Draft", "default_draft", "draft_from_experiment", "read_draft"]

WIDTH = 64  # default width of a model
NEURON_DT = 0.004  # seconds per step: the default of every neuron with a time step
BLOCKS = (BlockSpec, SwiGLUBlockSpec)
TRAINING = TrainConfig(  # with every preset but the paper's
    learning_rate=4e-3, weight_decay=0.01, decay_directions=False, schedule=Cosine(warmup=0.05), clip=1.0
)


class Draft(NamedTuple):
    """An experiment before its flags are applied. It has no model yet, because a task may have to read data for that.

    Attributes:
        task: The task.
        body: The block that the model repeats, or the spiking network.
        depth: The number of blocks or layers.
        training: The settings of the training.
    """

    task: Task
    body: BlockSpec | SwiGLUBlockSpec | SpikingModelSpec
    depth: int = 1
    training: TrainConfig = TrainConfig()

    @property
    def width(self) -> int:
        """The width of the block, or of the neurons."""
        body: Any = self.body
        width: int = body.width if isinstance(body, BLOCKS) else body.neuron.width
        return width

    @property
    def preset(self) -> str | None:
        """The name of the preset that the block is; None if it is not one of them."""
        return next((name for name, make in PRESETS.items() if make(self.width) == self.body), None)

    @property
    def layer_name(self) -> str | None:
        """The name of the layer in the blocks, or of the network; None if it is not one of those with a name."""
        for name in known_layers() if isinstance(self.body, BLOCKS) else known_networks():
            with contextlib.suppress(AdptnetError):  # not every layer can have every width
                if self.with_layer(name) == self:
                    return name
        return None

    def with_layer(self, layer: str | None, width: int | None = None) -> "Draft":
        """Return a draft with another layer or network; everything else stays.

        Args:
            layer: Its name; the present one by default.
            width: Its width; the present one by default.
        """
        name = layer or (None if width is None else self.layer_name)
        if name is None:
            return self
        made, body = make_layer(name, width or self.width), self.body
        made = _replace_dt(made, NEURON_DT, self.task.step_seconds)
        if not isinstance(made, SpikingModelSpec):
            block = body if isinstance(body, BLOCKS) else BlockSpec(made, dropout=body.dropout)
            return self._replace(body=dataclasses.replace(block, layer=made))
        if isinstance(body, BLOCKS):
            depth = made.depth if self.depth == 1 else self.depth  # one block is the default, not a choice
            config = TrainConfig() if self.training == TRAINING else self.training  # not chosen for spiking networks
            network = dataclasses.replace(made, depth=depth, dropout=body.dropout)
            return self._replace(body=network, depth=depth, training=config)
        return self._replace(body=dataclasses.replace(body, neuron=made.neuron, first=made.first, between=made.between))

    def with_preset(self, preset: str | None, width: int | None = None) -> "Draft":
        """Return a draft with the block of a preset, and with the training settings that go with it.

        Args:
            preset: Its name; the present one by default, if the block is one.
            width: Its width; the present one by default.

        Raises:
            InputError: There is no preset of this name.
        """
        name = preset or (None if width is None else self.preset)
        if name is None:
            return self
        if name not in PRESETS:
            raise InputError(f"there is no preset {name!r}.{suggest_name(name, PRESETS)}")
        training = self.training if preset is None else TrainConfig() if name == "paper" else TRAINING
        return self._replace(body=PRESETS[name](width or self.width), training=training)

    def with_task(self, task: Task) -> "Draft":
        """Return a draft for another task. Neurons whose `dt` is the time step of this task follow the new one.

        Args:
            task: The new task.
        """
        return self._replace(task=task, body=_replace_dt(self.body, self.task.step_seconds, task.step_seconds))

    def with_choices(self, arguments: Sequence[str]) -> "Draft":
        """Return a draft with the task settings, preset, layer and width in `arguments`, on which the flags depend.

        Args:
            arguments: Arguments of a command; those that are not choices are ignored.
        """
        typed = _find_option(arguments, "--model.width") or ""
        width = int(typed) if typed.isdecimal() and int(typed) else None
        draft = self.with_task(_apply_task_flags(self.task, arguments))
        draft = draft.with_preset(_find_option(arguments, "--model.preset"), width)
        return draft.with_layer(_find_option(arguments, "--model.layer"), None if draft.preset else width)


def _apply_task_flags(task: Task, arguments: Sequence[str]) -> Task:
    """Return `task` with the `--task.` flags in `arguments`; all others are ignored."""
    own, is_own = [], False
    for argument in arguments:
        is_own = argument.startswith("--task.") or (is_own and not re.match(r"--|-[a-zA-Z]", argument))
        own += [argument] * is_own
    if not own:
        return task
    kind = dataclasses.make_dataclass("TaskFlags", [make_group("task", [type(task)], own_fields(task))])
    options: Any = tyro.cli(kind, args=own, description="", prog="adptnet train")
    return type(task)(**vars(options.task))


def _replace_dt(part: Any, old: float | None, new: float | None) -> Any:
    """Return a spec in which every `dt` of `old` seconds is `new`; unchanged if either task has no time step."""
    if old is None or new is None:
        return part
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name == "dt" and isinstance(value, float) and math.isclose(value, old):
            changed["dt"] = new
        elif isinstance(value, Spec) and (inner := _replace_dt(value, old, new)) != value:
            changed[field.name] = inner
    return dataclasses.replace(part, **changed) if changed else part


def draft_from_experiment(experiment: Experiment) -> Draft:
    """Return the draft whose flags, left alone, give `experiment`.

    Args:
        experiment: The experiment.
    """
    if isinstance(experiment.model, SpikingModelSpec):
        return Draft(experiment.task, experiment.model, experiment.model.depth, experiment.training)
    return Draft(experiment.task, experiment.block, experiment.depth, experiment.training)


def default_draft(task: Task) -> Draft:
    """Return a draft for `task` with its preset and the training settings that go with it.

    Args:
        task: The task.
    """
    return Draft(task, PRESETS[get_preset(task)](WIDTH), training=TRAINING)


def _make_task(name: str) -> Task:
    return get_task(name)()


def read_draft(arguments: Sequence[str]) -> tuple[str, Draft]:
    """Read the arguments that determine which flags exist: task, `--config`, `--task.`, preset, layer and width.

    Args:
        arguments: Those of `adptnet train` or `adptnet sweep`.

    Returns:
        The name of the task, empty if the draft is from a file, and the draft.

    Raises:
        InputError: There is no task, or it contradicts the file.
    """
    task = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    config, output = _find_option(arguments, "--config"), _find_option(arguments, "--output")
    if config is None and not task and output is not None and "--resume" in arguments:
        config = output  # the folder of a run is enough to resume it
    if config is not None:
        draft = draft_from_experiment(read_experiment(Path(config)))
        if task and type(_make_task(task)) is not type(draft.task):
            raise InputError(f"{config} is of {type(draft.task).__name__}, and {task} was requested. Drop one.")
    elif task:
        draft = default_draft(_make_task(task))
    elif {"-h", "--help"} & set(arguments):
        draft = default_draft(_make_task("word-problem"))
    else:
        late = next((argument for argument in arguments if argument in TASKS), None)
        if late is not None:
            raise InputError(f"{late} comes after an option. Name the task first, e.g. adptnet train {late} ...")
        raise InputError(f"name a task, or pass --config FILE.{suggest_name('', TASKS)}")
    return task, draft.with_choices(arguments)


def _find_option(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of an option, given as `NAME VALUE` or `NAME=VALUE`."""
    for place, argument in enumerate(arguments):
        if argument == name and place + 1 < len(arguments):
            return arguments[place + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None
