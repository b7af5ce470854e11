"""Tasks and layers of one's own on the command line: module:Name, entry points, and runs trained with them."""

import importlib.metadata
import sys

import pytest

from adptnet.cells import ADPTSpec
from adptnet.errors import InputError
from adptnet.nn import LayerSpec
from adptnet_lab import cli
from adptnet_lab.cli.layer_names import make_layer
from adptnet_lab.tasks import Parity, get_task

MODULE = '''
from adptnet.cells import ADPTSpec, GRU
from adptnet.nn import LayerSpec
from adptnet.spec import spec
from adptnet_lab.tasks import Parity

@spec
class {name}(Parity):
    """Parity under a name of its own."""

def layer(width):
    return LayerSpec(ADPTSpec(width, beta=2.0))

def cell(width):
    return GRU(width)

not_a_task = 3
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module in the current folder; yields its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_things.py").write_text(MODULE.format(name="OwnParity"))
    yield "own_things"
    sys.modules.pop("own_things", None)
    from adptnet import spec

    spec._registry.pop("OwnParity", None)


def test_a_task_and_a_layer_of_a_module_are_trained_and_the_run_is_read_again(own, capsys):
    run = ["train", f"{own}:OwnParity", "--model.layer", f"{own}:layer", "--model.width", "8", "--output", "run"]
    settings = ["--training.steps", "2", "--training.batch-size", "2", "--training.evaluation-size", "2"]
    assert cli.main([*run, *settings]) == 0
    assert "beta=2.0" in capsys.readouterr().out
    sys.modules.pop(own)
    from adptnet import spec

    spec._registry.pop("OwnParity")
    assert cli.main(["evaluate", "run", "--size", "4"]) == 1
    assert "adptnet --import MODULE" in capsys.readouterr().err
    assert cli.main(["--import", own, "evaluate", "run", "--size", "4"]) == 0


def test_cells_and_layers_are_made_for_the_width(own):
    assert make_layer(f"{own}:layer", 8) == LayerSpec(ADPTSpec(8, beta=2.0))
    assert make_layer(f"{own}:cell", 8).cell.width == 8
    assert make_layer("adptnet.cells:ReLURNN", 8).cell.width == 8
    assert make_layer("adptnet_lab.baselines:Mamba", 8).width == 8
    assert issubclass(get_task(f"{own}:OwnParity"), Parity)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda own: get_task("no_such_module:Task"), "'no_such_module' cannot be imported"),
        (lambda own: get_task(f"{own}:Missing"), "has no 'Missing'"),
        (lambda own: get_task(f"{own}:not_a_task"), "is not a task"),
        (lambda own: get_task("parities"), "Perhaps you meant 'parity'.* module:Name"),
        (lambda own: make_layer("mambo", 8), "Perhaps you meant 'mamba'.* module:Name"),
        (lambda own: make_layer(f"{own}:not_a_task", 8), "must be the spec of a cell"),
    ],
)
def test_names_without_an_object_are_explained(own, call, message):
    with pytest.raises(InputError, match=message):
        call(own)


def test_entry_points_name_tasks_and_layers(own, monkeypatch):
    groups = {"adptnet.tasks": ("my-task", f"{own}:OwnParity"), "adptnet.cells": ("my-cell", f"{own}:cell")}

    def find(group, name):
        known, value = groups.get(group, ("", ""))
        return [importlib.metadata.EntryPoint(name, value, group)] if name == known else []

    monkeypatch.setattr(importlib.metadata, "entry_points", find)
    monkeypatch.syspath_prepend(".")
    assert get_task("my-task").__name__ == "OwnParity"
    assert make_layer("my-cell", 8).cell.width == 8
    with pytest.raises(InputError, match="there is no task 'my-cell'"):
        get_task("my-cell")
