"""Specs on the command line: a flag for every field, whose value is typed as the spec prints.

`--model.beta 4 --model.spectrum 'Negative(S4DReal(), 0.5)' --training.schedule cosine`
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tyro

from adptnet.cells import CellSpec, SpikingADPT
from adptnet.nn import GatedSpec, SpikingModelSpec
from adptnet.nn.adpt_layer import LayerSpec
from adptnet.nn.model import ModelSpec
from adptnet.nn.presets import PRESETS
from adptnet.spec import ModuleSpec, Spec

from ..training import Experiment, TrainConfig
from .draft import BLOCKS, Draft, draft_from_experiment
from .flag_fields import Field, field_types, make_group, own_fields
from .layer_names import known_layers, known_networks

__all__ = ["apply_flags", "describe_experiment", "make_experiment", "make_flags", "read_values"]


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
    specs, values = _nested_specs(draft.body), read_values(draft)["model"]
    model: list[Field] = [("preset", str, draft.preset or "as given"), ("layer", str, draft.layer_name or "as given")]
    kinds = {"depth": int} | {name: kind for spec in specs for name, kind in field_types(type(spec)).items()}
    model += [(name, kinds[name], value) for name, value in values.items()]
    layers, networks = ", ".join(known_layers()), ", ".join(known_networks())
    presets = f"Block and training settings by purpose: {', '.join(PRESETS)}. That of the task if not given."
    choices = f"Layer of the blocks: {layers}. Or a spiking network: {networks}."
    return [
        make_group("task", [type(draft.task)], own_fields(draft.task)),
        make_group("model", [*map(type, specs), ModelSpec], model, layer=choices, preset=presets),
        make_group("training", [TrainConfig], own_fields(draft.training)),
    ]


def read_values(draft: Draft) -> dict[str, dict[str, Any]]:
    """Return the values of the flags of a draft by group and name, without those of preset and layer.

    Args:
        draft: The draft.
    """
    specs = _nested_specs(draft.body)
    values = {field.name: getattr(spec, field.name) for spec in specs for field in dataclasses.fields(spec)}
    if "width" in values and values.get("state_size") == specs[0].width:
        values["state_size"] = None  # follows the width
    skipped = {"cell", "layer", "batch_first", "neuron", "input_size", "output_size", "depth"}
    return {
        "task": {field.name: getattr(draft.task, field.name) for field in dataclasses.fields(draft.task)},
        "model": {"depth": draft.depth} | {name: value for name, value in values.items() if name not in skipped},
        "training": {field.name: getattr(draft.training, field.name) for field in dataclasses.fields(TrainConfig)},
    }


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
