"""Specs on the command line: a flag for every field, and the parts of a model as they print.

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

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from adptnet.cells import ADPTSpec, CellSpec, SlowMemory, SpikingADPT
from adptnet.cells.spiking import NeuronSpec
from adptnet.errors import AdptnetError, InputError, SpecError
from adptnet.nn.block import BlockSpec
from adptnet.nn.layer import LayerSpec
from adptnet.nn.model import ModelSpec
from adptnet.nn.spiking import SpikingModelSpec, spiking_adpt, spiking_adpt_for_speech
from adptnet.recurrence.conjugates import Taylor
from adptnet.recurrence.directions import FromInput
from adptnet.spec import ModuleSpec, Spec, known_specs, nearest

from ..tasks import TASKS, Task
from ..training import Experiment, TrainConfig
from ..training.runs import read_experiment

__all__ = ["Draft", "experiment_of", "flags", "parsed", "peeked", "summary", "with_flags"]

WIDTH = 64  # of a model, unless told otherwise
NEURON_DT = 0.004  # seconds of a step, the default of every neuron that has one


def parsed(text: str, wanted: tuple[type[Spec], ...] = (Spec,)) -> Any:
    """A spec, number, tuple or None from text such as "Negative(S4DReal(), 0.5)"; a name alone takes every default.

    A name that is unknown is answered with those of the `wanted` kinds.
    """
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, wanted)
    except SyntaxError:
        raise SpecError(f"{text!r} is neither a number nor a spec such as Linspace(dt_min=0.001).") from None


def _value(node: ast.expr, wanted: tuple[type[Spec], ...] = (Spec,)) -> Any:
    if isinstance(node, ast.Name):
        return _kind(node.id, wanted)()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        kind = _kind(node.func.id, wanted)
        given = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
        known = [field.name for field in dataclasses.fields(kind)]
        for name in given:
            if name not in known:
                raise SpecError(f"{kind.__name__} has no field {name!r}.{nearest(name, known)}")
        try:
            return kind(*map(_value, node.args), **given)
        except TypeError as error:
            raise SpecError(f"{ast.unparse(node)}: {error}.") from None
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(map(_value, node.elts))
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise SpecError(f"{ast.unparse(node)} is neither a number nor a spec such as Linspace(dt_min=0.001).") from None


def _kind(name: str, wanted: tuple[type[Spec], ...]) -> type[Spec]:
    known = known_specs()
    found = known.get(name) or {other.lower(): kind for other, kind in known.items()}.get(name.lower())
    if found is None:
        fitting = [other for other, kind in known.items() if issubclass(kind, wanted)]
        raise SpecError(f"there is no spec {name!r}.{nearest(name, fitting)}")
    return found


def _as_printed(wanted: tuple[type[Spec], ...]) -> PrimitiveConstructorSpec[Any]:
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="SPEC",
        instance_from_str=lambda given: parsed(given[0], wanted),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [repr(value)],
    )


def layers() -> dict[str, Callable[[int], Any]]:
    """What a block can be built around, by name, each made from a width: the variants and every other cell."""
    named: dict[str, Callable[[int], Any]] = {
        "adpt": lambda width: LayerSpec(ADPTSpec(width)),
        "linear-adpt": lambda width: LayerSpec(ADPTSpec(width, direction=FromInput())),
        "taylor-adpt": lambda width: LayerSpec(ADPTSpec(width, conjugate=Taylor())),
        "coupled-adpt": lambda width: LayerSpec(ADPTSpec(width, memory=SlowMemory())),
        "spiking-adpt": lambda width: LayerSpec(spiking_adpt(width)),
    }
    mixers = typing.get_args(typing.get_type_hints(BlockSpec)["layer"])
    for kind in known_specs().values():
        fields = [field.name for field in dataclasses.fields(kind)]
        if kind is ADPTSpec or "width" not in fields:
            continue
        if issubclass(kind, CellSpec):
            named[_spelled(kind)] = functools.partial(_around, kind)
        elif issubclass(kind, mixers):
            named[_spelled(kind)] = kind
    return named


def networks() -> dict[str, Callable[[int], SpikingModelSpec]]:
    """Spiking networks by name, each made from a width; a task says what goes in and comes out."""
    named: dict[str, Callable[[int], SpikingModelSpec]] = {
        "spiking-adpt-network": lambda width: spiking_adpt_for_speech(width, input_size=1, output_size=1, dropout=0.0)
    }
    for kind in known_specs().values():
        if issubclass(kind, NeuronSpec):
            named[f"{_spelled(kind)}-network"] = functools.partial(_network, kind)
    return named


def _network(kind: type[NeuronSpec], width: int) -> SpikingModelSpec:
    return SpikingModelSpec(kind(width), input_size=1, output_size=1)


def _around(kind: type[CellSpec], width: int) -> LayerSpec:
    return LayerSpec(kind(width))  # type: ignore[call-arg]


def _spelled(kind: type) -> str:
    """ReLURNN as relu-rnn, GatedDeltaNet as gated-delta-net, LSTM as lstm."""
    name = re.sub(r"(?<=.)RNN$", "-rnn", kind.__name__.removesuffix("Spec"))
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "-", name).lower()


def layer_named(name: str, width: int) -> Any:
    """What a block is built around, or a spiking network."""
    known = {**layers(), **networks()}
    if name not in known:
        raise InputError(f"there is no layer {name!r}.{nearest(name, known)}")
    return known[name](width)


class Draft(NamedTuple):
    """The parts of an experiment before flags. Its model is not there yet: a task may have to read data to know it."""

    task: Task
    body: BlockSpec | SpikingModelSpec
    depth: int = 1
    training: TrainConfig = TrainConfig()

    @property
    def width(self) -> int:
        body: Any = self.body
        width: int = body.width if isinstance(body, BlockSpec) else body.neuron.width
        return width

    @property
    def name(self) -> str | None:
        """Of what the blocks are built around, or of the network; None if it is none of those that have one."""
        for name in layers() if isinstance(self.body, BlockSpec) else networks():
            with contextlib.suppress(AdptnetError):  # not every width goes with every layer
                if self.around(name) == self:
                    return name
        return None

    def around(self, layer: str | None, width: int | None = None) -> "Draft":
        """The same with another layer, if one is named, or of another width; what else was chosen stays."""
        name = layer or (None if width is None else self.name)
        if name is None:
            return self
        made, body = layer_named(name, width or self.width), self.body
        made = _with_dt(made, NEURON_DT, self.task.step_seconds)
        if not isinstance(made, SpikingModelSpec):
            kept = body if isinstance(body, BlockSpec) else BlockSpec(made, dropout=body.dropout)
            return self._replace(body=dataclasses.replace(kept, layer=made))
        if isinstance(body, BlockSpec):
            depth = made.depth if self.depth == 1 else self.depth  # one block is the default, not a choice
            return self._replace(body=dataclasses.replace(made, depth=depth, dropout=body.dropout), depth=depth)
        return self._replace(body=dataclasses.replace(body, neuron=made.neuron, first=made.first, between=made.between))

    def on(self, task: Task) -> "Draft":
        """The same on another task. Neurons whose dt is the length of a step of this one follow it."""
        return self._replace(task=task, body=_with_dt(self.body, self.task.step_seconds, task.step_seconds))

    def peeked(self, arguments: Sequence[str]) -> "Draft":
        """The same with the task, layer and width that `arguments` name: which flags there are depends on them."""
        width = _option(arguments, "--model.width") or ""
        return self.on(_task_of(self.task, arguments)).around(
            _option(arguments, "--model.layer"), int(width) if width.isdecimal() and int(width) else None
        )


def _task_of(task: Task, arguments: Sequence[str]) -> Task:
    """`task` with its own flags in `arguments` applied, and no others."""
    own, chosen = [], False
    for argument in arguments:
        chosen = argument.startswith("--task.") or (chosen and not re.match(r"--|-[a-zA-Z]", argument))
        own += [argument] * chosen
    if not own:
        return task
    kind = dataclasses.make_dataclass("TaskFlags", [_group("task", [type(task)], _own(task))])
    given: Any = tyro.cli(kind, args=own, description="", prog="adptnet train")
    return type(task)(**vars(given.task))


def _with_dt(part: Any, old: float | None, new: float | None) -> Any:
    """A spec in which every `dt` of `old` seconds is `new`; unchanged where a task has no seconds."""
    if old is None or new is None:
        return part
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name == "dt" and isinstance(value, float) and math.isclose(value, old):
            changed["dt"] = new
        elif isinstance(value, Spec) and (inner := _with_dt(value, old, new)) != value:
            changed[field.name] = inner
    return dataclasses.replace(part, **changed) if changed else part


def draft_of(experiment: Experiment) -> Draft:
    if isinstance(experiment.model, SpikingModelSpec):
        return Draft(experiment.task, experiment.model, experiment.model.depth, experiment.training)
    return Draft(experiment.task, experiment.block, experiment.depth, experiment.training)


def drafted(task: Task) -> Draft:
    """A draft for a task, every choice left open."""
    return Draft(task, BlockSpec(layer_named("adpt", WIDTH)))


def task_named(name: str) -> Task:
    if name not in TASKS:
        raise InputError(f"there is no task {name!r}.{nearest(name, TASKS)}")
    return TASKS[name]()


def peeked(arguments: Sequence[str]) -> tuple[str, Draft]:
    """The task's name, and the draft that `--config` and `--model.layer` make: which flags there are depends on it."""
    task = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    config, output = _option(arguments, "--config"), _option(arguments, "--output")
    if config is None and not task and output is not None and "--resume" in arguments:
        config = output  # to go on, a folder is enough
    if config is not None:
        draft = draft_of(read_experiment(Path(config)))
        if task and type(task_named(task)) is not type(draft.task):
            raise InputError(f"{config} is of {type(draft.task).__name__}, and {task} was asked for. Drop one.")
    elif task:
        draft = drafted(task_named(task))
    elif {"-h", "--help"} & set(arguments):
        draft = drafted(task_named("word-problem"))
    else:
        late = next((argument for argument in arguments if argument in TASKS), None)
        if late is not None:
            raise InputError(f"{late} comes after an option. Name the task first, e.g. adptnet train {late} ...")
        raise InputError(f"name a task, or pass --config FILE.{nearest('', TASKS)}")
    return task, draft.peeked(arguments)


def with_flags(base: Draft, arguments: Sequence[str]) -> Experiment:
    """The experiment of a draft with the flags in `arguments`, and no others, applied."""
    base = base.peeked(arguments)
    kind = dataclasses.make_dataclass("Flags", flags(base))
    return experiment_of(tyro.cli(kind, args=list(arguments), description="", prog="adptnet train"), base)


def flags(base: Draft) -> list[tuple[str, Any, Any]]:
    """The fields `task`, `model` and `training` of a command, with the values of `base` as defaults."""
    inner = _inner(base.body)
    values = {field.name: getattr(part, field.name) for part in inner for field in dataclasses.fields(part)}
    if "width" in values and values.get("state_size") == values["width"]:
        values["state_size"] = None  # tied
    told = f"What the blocks are built around: {', '.join(layers())}. Or a spiking network: {', '.join(networks())}."
    choice = Annotated[str, tyro.conf.arg(help=told)]
    model = [("layer", choice, base.name or "as given"), ("depth", int, base.depth)]
    skipped = {"cell", "layer", "batch_first", "neuron", "input_size", "output_size", "depth"}
    for part in inner:
        model += [(n, kind, values[n]) for n, kind in _types(type(part)).items() if n not in skipped]
    return [
        _group("task", [type(base.task)], _own(base.task)),
        _group("model", [*map(type, inner), ModelSpec], model),
        _group("training", [TrainConfig], _own(base.training)),
    ]


def experiment_of(options: Any, base: Draft) -> Experiment:
    """The experiment that a parsed command describes; `base` is what its flags were made from."""
    given = vars(options.model)

    def remade(part: Any, **parts: Any) -> Any:
        fields = {f.name: given.get(f.name, getattr(part, f.name)) for f in dataclasses.fields(part)}
        return type(part)(**{**fields, **parts})

    def rebuilt(part: Any) -> Any:
        """A layer, or a cell, with the cell in it if there is one."""
        return remade(part, cell=rebuilt(part.cell)) if isinstance(part, LayerSpec | SpikingADPT) else remade(part)

    task = type(base.task)(**vars(options.task))
    if isinstance(base.body, SpikingModelSpec):
        model: ModuleSpec = task.spiking_model(remade(base.body, neuron=rebuilt(base.body.neuron)))
    else:
        model = task.model(remade(base.body, layer=rebuilt(base.body.layer)), given["depth"])
    return Experiment(task, model, TrainConfig(**vars(options.training)))


def summary(experiment: Experiment) -> str:
    """Return the settings of an experiment for people: every choice of the model, what is not the default elsewhere."""
    draft = draft_of(experiment)
    parts = _inner(draft.body)
    settings = [
        f"{field.name}={value!r}"
        for part in parts
        for field in dataclasses.fields(part)
        if not isinstance(value := getattr(part, field.name), CellSpec | LayerSpec | ModuleSpec)
        and field.name not in ("batch_first", "depth")
    ]
    seconds = experiment.task.step_seconds
    lines = [
        f"task: {_list_changes(experiment.task)}" + ("" if seconds is None else f", steps of {1000 * seconds:g} ms"),
        f"model: {draft.name or type(parts[0]).__name__}, depth {draft.depth}: {', '.join(settings)}",
        f"training: {_list_changes(experiment.training)}",
    ]
    return "\n".join(lines)


def _list_changes(part: Spec) -> str:
    """A spec with those of its fields that are not as they are by default."""
    values = [(field.name, getattr(part, field.name), field.default) for field in dataclasses.fields(part)]
    return f"{type(part).__name__}({', '.join(f'{name}={value!r}' for name, value, usual in values if value != usual)})"


def _inner(body: Any) -> list[Any]:
    """The specs whose fields are the model's flags, the innermost first."""
    parts: dict[type, str] = {BlockSpec: "layer", LayerSpec: "cell", SpikingModelSpec: "neuron", SpikingADPT: "cell"}
    inside = parts.get(type(body))
    return [body] if inside is None else [*_inner(getattr(body, inside)), body]


def _group(name: str, documented: list[type], fields: list[tuple[str, Any, Any]]) -> tuple[str, Any, Any]:
    made = dataclasses.make_dataclass(name.capitalize(), fields, frozen=True)
    made.__doc__ = f"{documented[0].__name__}.\n\nAttributes:\n" + "".join(
        _one_by_one((each.__doc__ or "").partition("Attributes:\n")[2].rstrip()) + "\n"
        for kind in documented
        for each in kind.__mro__
    )
    return name, made, made()


def _one_by_one(attributes: str) -> str:
    """A line for each name of "first, second: text", as help is looked up by one name."""
    return re.sub(
        r"^( +)(\w+(?:, \w+)+):(.*)$",
        lambda line: "\n".join(f"{line[1]}{name}:{line[3]}" for name in line[2].split(", ")),
        attributes,
        flags=re.MULTILINE,
    )


def _own(part: Any) -> list[tuple[str, Any, Any]]:
    return [(name, kind, getattr(part, name)) for name, kind in _types(type(part)).items()]


def _types(kind: type) -> dict[str, Any]:
    """The types of a spec's fields, as tyro takes them: what may be a spec is written as it prints."""
    hints = typing.get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        options = typing.get_args(hint) or (hint,)
        specs = tuple(option for option in options if isinstance(option, type) and issubclass(option, Spec))
        typed = specs or _called(hint)
        found[field.name] = Annotated[hint, _as_printed(specs or (Spec,))] if typed else hint
    return found


def _called(hint: Any) -> bool:
    """Whether a field takes a function, such as a surrogate; the ones that can be typed are specs."""
    return typing.get_origin(hint) is collections.abc.Callable


def _option(arguments: Sequence[str], name: str) -> str | None:
    """The value that follows an option."""
    for place, argument in enumerate(arguments):
        if argument == name and place + 1 < len(arguments):
            return arguments[place + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None
