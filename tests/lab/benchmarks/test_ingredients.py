"""The study of the phase and of the planes of the whole state."""

import dataclasses

import pytest

from adptnet import Spec
from adptnet_lab.benchmarks.studies import ingredients


@pytest.mark.parametrize("name", ingredients.PROBLEMS)
def test_every_model_can_be_built_and_has_its_name(name):
    problem = ingredients.PROBLEMS[name]()
    assert len({spec.to_json() for spec in problem.models.values()}) == len(problem.models)
    for model, spec in problem.models.items():
        assert Spec.from_json(spec.to_json()) == spec
        cell = spec.build().layer
        cell = getattr(cell, "layer", cell).cell
        assert (cell.phase is not None) == ("phase" in model)
        assert cell.spec.direction.sees_whole_state == ("planes" in model)


def test_a_run_is_appended_once_and_shown_in_the_table(tmp_path, monkeypatch, capsys):
    problem = ingredients.PROBLEMS["s3"]()
    tiny = problem._replace(lengths=(4,), batch_size=4, models={"planes, ε = 0": problem.models["planes, ε = 0"]})
    tiny = tiny._replace(task=dataclasses.replace(tiny.task, length=4))
    monkeypatch.setitem(ingredients.PROBLEMS, "s3", lambda: tiny)
    arguments = [
        "--task",
        "s3",
        "--seed",
        "0",
        "--steps",
        "1",
        "--rows",
        str(tmp_path / "rows"),
        "--runs",
        str(tmp_path),
    ]
    for _ in range(2):
        ingredients.main(arguments)
    assert len((tmp_path / "rows").read_text("utf-8").splitlines()) == 1
    assert "planes, ε = 0 |" in capsys.readouterr().out
