"""The trained networks in `checkpoints/` load; their cards state their results, which are measured again."""

import re
from pathlib import Path

import pytest

import adptnet
from adptnet_lab.training import evaluate, read_experiment, read_result

FOLDER = Path(__file__).parents[2] / "checkpoints"
NAMES = ["s3-word-problem", "selective-copy", "spoken-digits", "tiny-shakespeare"]


def test_every_checkpoint_is_tested_and_small():
    assert sorted(path.name for path in FOLDER.iterdir()) == NAMES
    sizes = [file.stat().st_size for file in FOLDER.glob("*/*")]
    assert len(sizes) == 4 * len(NAMES)
    assert sum(sizes) < 1.5e6


@pytest.mark.parametrize("name", NAMES)
def test_a_card_states_the_result_of_its_checkpoint(name):
    folder, card = FOLDER / name, (FOLDER / name / "README.md").read_text()
    model, result = adptnet.load(folder), read_result(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == result["parameters"]
    assert f"{parameters:,} parameters" in card
    assert str(model.spec) in card
    header, _, *rows = re.findall(r"^\| (.*) \|$", card, re.MULTILINE)
    names = header.split(" | ")[1:]
    assert [row.split(" | ") for row in rows] == [
        [length, *(f"{scores[name]:.4f}" for name in names)] for length, scores in result["test"].items()
    ]
    assert result["metric"] in names
    for file in folder.iterdir():
        assert not re.search(rb"/(home|root|tmp|work|Users|mnt)/", file.read_bytes()), file.name


@pytest.mark.parametrize("name", ["s3-word-problem", "selective-copy"])
def test_the_scores_of_a_generated_task_are_measured_again(name):
    experiment, result = read_experiment(FOLDER / name), read_result(FOLDER / name)
    settings = experiment.training
    scores = evaluate(
        adptnet.load(FOLDER / name),
        experiment.task,
        settings.lengths or (None,),
        size=settings.evaluation_size,
        batch_size=settings.evaluation_batch,
    )
    assert {str(length) for length in scores} == result["test"].keys()
    for length, each in scores.items():  # other instruction sets round otherwise, which may flip close decisions
        assert each["accuracy"] == pytest.approx(result["test"][str(length)]["accuracy"], abs=2e-3)
