"""Specs on the command line: a flag for every field, whose value is typed as the spec prints.

`--model.beta 4 --model.spectrum 'Negative(S4DReal(), 0.5)' --training.schedule cosine`
"""

import ast
import collections.abc
import contextlib
import dataclasses
import functools
import math
import re
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import docstring_parser  # a dependency of tyro
import tyro
from tyro.constructors import PrimitiveConstructorSpec

from adptnet.cells import ADPTSpec, CellSpec, SlowMemory, SpikingADPT
from adptnet.cells.spiking import NeuronSpec
from adptnet.errors import AdptnetError, InputError, SpecError
from adptnet.nn import GatedSpec, SpikingModelSpec, SwiGLUBlockSpec, spiking_adpt_for_speech
from adptnet.nn.adpt_layer import LayerSpec
from adptnet.nn.block import BlockSpec
from adptnet.nn.model import ModelSpec
from adptnet.nn.presets import PRESETS
from adptnet.nn.spiking_layer import spiking_adpt
from adptnet.recurrence.conjugates import Taylor
from adptnet.recurrence.directions import FromInput
from adptnet.spec import ModuleSpec, Spec, known_specs, suggest_name

from .. import baselines  # noqa: F401 - makes their specs known
from .._own_objects import find_own
from ..tasks import TASKS, Task, get_preset, get_task
from ..training import Cosine, Experiment, TrainConfig, read_experiment

__all__ = [
    "Draft",
    "apply_flags",
    "default_draft",
    "describe_experiment",
    "draft_from_experiment",
    "known_layers",
    "known_networks",
    "make_experiment",
    "make_flags",
    "make_layer",
    "parse_value",
    "read_draft",
]

WIDTH = 64  # default width of a model
NEURON_DT = 0.004  # seconds per step: the default of every neuron with a time step
BLOCKS = (BlockSpec, SwiGLUBlockSpec)
TRAINING = TrainConfig(  # with every preset but the paper's
    learning_rate=4e-3, weight_decay=0.01, decay_directions=False, schedule=Cosine(warmup=0.05), clip=1.0
)

Field = tuple[str, Any, Any]  # name, type and default, as `dataclasses.make_dataclass` takes them


def parse_value(text: str, expected: tuple[type, ...] = (Spec,)) -> Any:
    """Parse the printed form of a spec, number, text, tuple or None, such as "Negative(S4DReal(), 0.5)".

    Args:
        text: What was typed. The name of a spec alone stands for the spec with all of its defaults.
        expected: The kinds of spec that an error about an unknown name suggests, and float where numbers are valid too.

    Raises:
        SpecError: The text is not of this form, or the values do not fit the spec.
    """
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body, expected)
    except SyntaxError:
        raise SpecError(f"{text!r} is neither a number nor a spec such as Linspace(dt_min=0.001).") from None


def _evaluate(node: ast.expr, expected: tuple[type, ...] = (Spec,)) -> Any:
    if isinstance(node, ast.Name):
        return _find_spec(node.id, expected)()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        kind = _find_spec(node.func.id, expected)
        keywords = {str(keyword.arg): _evaluate(keyword.value) for keyword in node.keywords}
        known = [field.name for field in dataclasses.fields(kind)]
        for name in keywords:
            if name not in known:
                raise SpecError(f"{kind.__name__} has no field {name!r}.{suggest_name(name, known)}")
        try:
            return kind(*map(_evaluate, node.args), **keywords)
        except TypeError as error:
            raise SpecError(f"{ast.unparse(node)}: {error}.") from None
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(map(_evaluate, node.elts))
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise SpecError(f"{ast.unparse(node)} is neither a number nor a spec such as Linspace(dt_min=0.001).") from None


def _find_spec(name: str, expected: tuple[type, ...]) -> type[Spec]:
    """Return the spec of this name, in any case."""
    known = known_specs()
    found = known.get(name) or {other.lower(): kind for other, kind in known.items()}.get(name.lower())
    if found is None:
        fitting = [other for other, kind in known.items() if issubclass(kind, expected)]
        if float in expected:
            raise SpecError(f"{name!r} is not a number, a tuple of numbers, or one of: {', '.join(sorted(fitting))}.")
        raise SpecError(f"there is no spec {name!r}.{suggest_name(name, fitting)}")
    return found


def known_layers() -> dict[str, Callable[[int], Any]]:
    """Return the layers that a block can contain, by name: functions of the width.

    They are the variants of ADPTNet, every other cell, and every other sequence mixer.
    """
    named: dict[str, Callable[[int], Any]] = {
        "adpt": lambda width: PRESETS["general"](width).layer,
        "paper-adpt": lambda width: LayerSpec(ADPTSpec(width)),
        "linear-adpt": lambda width: LayerSpec(ADPTSpec(width, direction=FromInput())),
        "taylor-adpt": lambda width: LayerSpec(ADPTSpec(width, conjugate=Taylor())),
        "coupled-adpt": lambda width: LayerSpec(ADPTSpec(width, memory=SlowMemory())),
        "spiking-adpt": lambda width: LayerSpec(spiking_adpt(width)),
    }
    mixers = typing.get_args(typing.get_type_hints(BlockSpec)["layer"])
    for kind in known_specs().values():
        fields = [field.name for field in dataclasses.fields(kind)]
        if kind in (ADPTSpec, GatedSpec) or "width" not in fields:
            continue
        if issubclass(kind, CellSpec):
            named[_hyphenate(kind)] = functools.partial(_make_layer_spec, kind)
        elif issubclass(kind, mixers):
            named[_hyphenate(kind)] = kind
    return named


def known_networks() -> dict[str, Callable[[int], SpikingModelSpec]]:
    """Return the spiking networks by name: functions of the width. The task replaces their input and output sizes."""
    named: dict[str, Callable[[int], SpikingModelSpec]] = {
        "spiking-adpt-network": lambda width: spiking_adpt_for_speech(width, input_size=1, output_size=1, dropout=0.0)
    }
    for kind in known_specs().values():
        if issubclass(kind, NeuronSpec):
            named[f"{_hyphenate(kind)}-network"] = functools.partial(_make_network_spec, kind)
    return named


def _make_network_spec(kind: type[NeuronSpec], width: int) -> SpikingModelSpec:
    return SpikingModelSpec(kind(width), input_size=1, output_size=1)


def _make_layer_spec(kind: type[CellSpec], width: int) -> LayerSpec:
    return LayerSpec(kind(width))  # type: ignore[call-arg]


def _hyphenate(kind: type) -> str:
    """Return the name of a class for the command line: relu-rnn for ReLURNN, gated-delta-net for GatedDeltaNet."""
    name = re.sub(r"(?<=.)RNN$", "-rnn", kind.__name__.removesuffix("Spec"))
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "-", name).lower()


def make_layer(name: str, width: int) -> Any:
    """Return the spec of a layer or of a spiking network.

    Args:
        name: One of `known_layers` or `known_networks`; or of your own: "module:Name", or the name of an entry point in
            the group `adptnet.layers` or `adptnet.cells`. It is the class of a spec, or a function of the width.
        width: Its width.

    Raises:
        InputError: There is none of this name.
    """
    known = {**known_layers(), **known_networks()}
    if name in known:
        return known[name](width)
    own = find_own(name, "adptnet.layers", "adptnet.cells")
    if own is None:
        raise InputError(f"there is no layer {name!r}.{suggest_name(name, known)} One of your own: module:Name.")
    made = own(width) if callable(own) else own
    made = LayerSpec(made) if isinstance(made, CellSpec) else made
    if not isinstance(made, (*typing.get_args(typing.get_type_hints(BlockSpec)["layer"]), SpikingModelSpec)):
        raise InputError(
            f"{name}({width}) is a {type(made).__name__}. It must be the spec of a cell, layer or mixer, marked "
            "with @spec."
        )
    return made


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
    kind = dataclasses.make_dataclass("TaskFlags", [_make_group("task", [type(task)], _own_fields(task))])
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


def apply_flags(draft: Draft, arguments: Sequence[str]) -> Experiment:
    """Return the experiment of a draft with flags applied.

    Args:
        draft: Provides the defaults.
        arguments: Flags of the groups `task`, `model` and `training`.

    Raises:
        SystemExit: A flag does not exist or cannot be parsed; tyro has printed the reason.
    """
    draft = draft.with_choices(arguments)
    kind = dataclasses.make_dataclass("Flags", make_flags(draft))
    return make_experiment(tyro.cli(kind, args=list(arguments), description="", prog="adptnet train"), draft)


def make_flags(draft: Draft) -> list[Field]:
    """Return the fields `task`, `model` and `training` of a command, with the values of `draft` as defaults.

    Args:
        draft: Provides the fields and their defaults.
    """
    specs = _nested_specs(draft.body)
    values = {field.name: getattr(spec, field.name) for spec in specs for field in dataclasses.fields(spec)}
    if "width" in values and values.get("state_size") == specs[0].width:
        values["state_size"] = None  # follows the width
    model: list[Field] = [("preset", str, draft.preset or "as given"), ("layer", str, draft.layer_name or "as given")]
    model.append(("depth", int, draft.depth))
    kinds = {name: kind for spec in specs for name, kind in _field_types(type(spec)).items()}
    skipped = {"cell", "layer", "batch_first", "neuron", "input_size", "output_size", "depth"}
    model += [(name, kind, values[name]) for name, kind in kinds.items() if name not in skipped]
    layers, networks = ", ".join(known_layers()), ", ".join(known_networks())
    presets = f"Block and training settings by purpose: {', '.join(PRESETS)}. That of the task if not given."
    choices = f"Layer of the blocks: {layers}. Or a spiking network: {networks}."
    return [
        _make_group("task", [type(draft.task)], _own_fields(draft.task)),
        _make_group("model", [*map(type, specs), ModelSpec], model, layer=choices, preset=presets),
        _make_group("training", [TrainConfig], _own_fields(draft.training)),
    ]


def make_experiment(options: Any, draft: Draft) -> Experiment:
    """Return the experiment that parsed options describe.

    Args:
        options: Has the attributes `task`, `model` and `training` that `make_flags` defined.
        draft: The draft that the flags were made from.
    """
    values = vars(options.model)

    def replace_fields(spec: Any, **parts: Any) -> Any:
        fields = {f.name: values.get(f.name, getattr(spec, f.name)) for f in dataclasses.fields(spec)}
        return type(spec)(**{**fields, **parts})

    def rebuild(spec: Any, **parts: Any) -> Any:
        """Return a layer or a cell with new fields, and with a new inner layer or cell if it has one."""
        if isinstance(spec, GatedSpec):  # `--model.width` is the width outside; the one inside follows it
            return replace_fields(
                spec, layer=rebuild(spec.layer, width=values["width"] * spec.layer.width // spec.width)
            )
        if isinstance(spec, LayerSpec | SpikingADPT):
            return replace_fields(spec, cell=rebuild(spec.cell, **parts))
        return replace_fields(spec, **parts)

    task = type(draft.task)(**vars(options.task))
    if isinstance(draft.body, SpikingModelSpec):
        model: ModuleSpec = task.spiking_model(replace_fields(draft.body, neuron=rebuild(draft.body.neuron)))
    else:
        model = task.model(replace_fields(draft.body, layer=rebuild(draft.body.layer)), values["depth"])
    return Experiment(task, model, TrainConfig(**vars(options.training)))


def describe_experiment(experiment: Experiment) -> str:
    """Return the settings as three lines of text: all of the model's, and those of the rest that are not defaults.

    Args:
        experiment: The experiment.
    """
    draft = draft_from_experiment(experiment)
    specs = _nested_specs(draft.body)
    settings = [
        f"{field.name}={value!r}"
        for spec in specs
        for field in dataclasses.fields(spec)
        if not isinstance(value := getattr(spec, field.name), CellSpec | LayerSpec | ModuleSpec)
        and field.name not in ("batch_first", "depth")
    ]
    seconds = experiment.task.step_seconds
    steps = "" if seconds is None else f", steps of {1000 * seconds:g} ms"
    lines = [
        f"task: {_format_changes(experiment.task)}{steps}",
        f"model: {draft.layer_name or type(specs[0]).__name__}, depth {draft.depth}: {', '.join(settings)}",
        f"training: {_format_changes(experiment.training)}",
    ]
    return "\n".join(lines)


def _format_changes(spec: Spec) -> str:
    """Return a spec as text with only those fields that differ from their defaults."""
    values = [(field.name, getattr(spec, field.name), field.default) for field in dataclasses.fields(spec)]
    changed = [f"{name}={value!r}" for name, value, default in values if value != default]
    return f"{type(spec).__name__}({', '.join(changed)})"


def _nested_specs(body: Any) -> list[Any]:
    """Return the specs whose fields are the flags of the model, the innermost first."""
    parts: dict[type, str] = {LayerSpec: "cell", SpikingModelSpec: "neuron", SpikingADPT: "cell"}
    parts |= dict.fromkeys((*BLOCKS, GatedSpec), "layer")
    inside = parts.get(type(body))
    return [body] if inside is None else [*_nested_specs(getattr(body, inside)), body]


def _make_group(name: str, specs: list[type], fields: list[Field], **help_texts: str) -> Field:
    """Return a field whose type is a dataclass of `fields`. Help is in `help_texts` or the docstrings of `specs`."""
    texts = {**_read_help(specs), **help_texts}
    helped = [(n, Annotated[kind, tyro.conf.arg(help=texts[n])] if n in texts else kind, v) for n, kind, v in fields]
    group = dataclasses.make_dataclass(name.capitalize(), helped, frozen=True)
    group.__doc__ = f"{specs[0].__name__}."
    return name, group, group()


def _read_help(specs: list[type]) -> dict[str, str]:
    """Return what the sections `Attributes:` in the docstrings of specs and their bases say on each field."""
    texts: dict[str, str] = {}
    for spec in specs:
        for kind in spec.__mro__[:-1]:
            for entry in docstring_parser.parse(kind.__doc__ or "").params:
                for name in entry.arg_name.split(", "):  # fields that share an entry
                    texts.setdefault(name, " ".join((entry.description or "").split()))
    return texts


def _own_fields(spec: Any) -> list[Field]:
    return [(name, kind, getattr(spec, name)) for name, kind in _field_types(type(spec)).items()]


def _field_types(kind: type) -> dict[str, Any]:
    """Return the types of a spec's fields for tyro. A field that may hold a spec or a function is typed as it prints.

    Those functions that can be typed, such as surrogate gradients, are specs.
    """
    hints = typing.get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        options = typing.get_args(hint) or (hint,)
        specs = tuple(option for option in options if isinstance(option, type) and issubclass(option, Spec))
        is_function = typing.get_origin(hint) is collections.abc.Callable
        expected = (*specs, float) if float in options else specs or (Spec,)
        found[field.name] = Annotated[hint, _as_printed(expected)] if specs or is_function else hint
    return found


def _as_printed(expected: tuple[type, ...]) -> PrimitiveConstructorSpec[Any]:
    """Return the rule by which tyro parses and prints a field that holds a spec, `expected` as in `parse_value`."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="SPEC",
        instance_from_str=lambda words: parse_value(words[0], expected),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [repr(value)],
    )


def _find_option(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of an option, given as `NAME VALUE` or `NAME=VALUE`."""
    for place, argument in enumerate(arguments):
        if argument == name and place + 1 < len(arguments):
            return arguments[place + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None
