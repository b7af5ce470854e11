"""The names of layers and spiking networks on the command line."""

import dataclasses
import functools
import re
import typing
from collections.abc import Callable
from typing import Any

from adptnet.cells import ADPTSpec, CellSpec, SlowMemory
from adptnet.cells.spiking import NeuronSpec
from adptnet.errors import InputError
from adptnet.nn import GatedSpec, SpikingModelSpec, spiking_adpt_for_speech
from adptnet.nn.adpt_layer import LayerSpec
from adptnet.nn.block import BlockSpec
from adptnet.nn.presets import PRESETS
from adptnet.nn.spiking_layer import spiking_adpt
from adptnet.recurrence.conjugates import Taylor
from adptnet.recurrence.directions import FromInput
from adptnet.spec import known_specs, suggest_name

from .. import baselines  # noqa: F401 - makes their specs known
from .._own_objects import find_own

__all__ = ["known_layers", "known_networks", "make_layer"]


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
