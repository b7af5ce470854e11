"""Presets on the command line."""

import pytest

from adptnet import presets
from adptnet.cells import GRU, ADPTSpec
from adptnet.errors import InputError
from adptnet.nn import BlockSpec, LayerSpec, SwiGLUBlockSpec
from adptnet_lab.cli.draft import TRAINING, read_draft
from adptnet_lab.cli.spec_flags import apply_flags, describe_experiment
from adptnet_lab.tasks import TASKS, get_preset
from adptnet_lab.training import TrainConfig


def experiment(*arguments):
    return apply_flags(read_draft(arguments)[1], arguments[1:])


def test_every_task_has_a_preset():
    assert {get_preset(kind()) for kind in TASKS.values()} <= set(presets.PRESETS)


@pytest.mark.parametrize("width", [16, 30, 64])
@pytest.mark.parametrize("task", ["copy-memory", "word-problem", "selective-copy", "forecast", "parity"])
def test_a_task_is_trained_with_its_preset_at_every_width(task, width):
    made = experiment(task, "--model.width", str(width))
    assert made.block == presets.PRESETS[get_preset(TASKS[task]())](width)
    assert made.training == TRAINING
    assert read_draft([task])[1].preset == get_preset(TASKS[task]())


def test_flags_change_a_preset_and_the_width_inside_follows_the_width_outside():
    made = experiment("copy-memory", "--model.width", "24", "--model.taps", "0", "--model.beta", "0.5")
    assert (made.block.layer.taps, made.block.layer.layer.cell.beta, made.block.layer.layer.width) == (0, 0.5, 24)
    made = experiment("copy-memory", "--model.preset", "text", "--model.width", "24", "--training.steps", "3")
    assert made.block == presets.text(24)
    assert (made.block.layer.layer.cell.size, made.training.steps) == (48, 3)
    assert "heads=4" in describe_experiment(made)


def test_the_settings_of_the_paper_and_of_a_baseline():
    made = experiment("word-problem", "--model.preset", "paper", "--model.beta", "2")
    assert made.block == BlockSpec(LayerSpec(ADPTSpec(64, beta=2)))
    assert made.training == TrainConfig()
    made = experiment("word-problem", "--model.layer", "gru", "--model.width", "20")
    assert made.block == SwiGLUBlockSpec(LayerSpec(GRU(20)), expansion=2)
    with pytest.raises(InputError, match="tracking"):
        experiment("word-problem", "--model.preset", "trackin")
