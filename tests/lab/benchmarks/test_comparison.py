"""The study that compares presets with baselines: its models, its points, and a run at smoke size."""

import argparse
import json

import pytest

from adptnet.cells import ADPTSpec
from adptnet.errors import InputError
from adptnet.nn import SwiGLUBlockSpec
from adptnet_lab.baselines import count_parameters
from adptnet_lab.benchmarks.studies import comparison
from adptnet_lab.tasks import Parity


def choose(**chosen):
    return argparse.Namespace(**{"task": None, "model": None, "rate": None, "seed": None, **chosen})


def row(rate, seed, validation, lower=False, test=0.5):
    return {
        "task": "parity", "model": "gru", "rate": rate, "seed": seed, "validation": validation, "test": {"40": test},
        "lower_is_better": lower, "metric": "accuracy", "parameters": 10, "step_ms": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("model", comparison.MODELS)
def test_every_model_stands_in_one_block_at_equal_parameters(model):
    experiment = comparison.make_experiment(comparison.Point("parity", model, 1e-3, 0))
    target = comparison.PROBLEMS["parity"].parameters
    assert isinstance(experiment.block, SwiGLUBlockSpec)
    assert (experiment.block.norm, experiment.block.expansion) == ("rms", 2)
    assert abs(count_parameters(experiment.model) - target) <= 0.03 * target


def test_the_linear_twin_of_a_preset_differs_in_beta_alone():
    for preset in ("text", "tracking", "recall"):
        block = comparison.MODELS["preset, β = 0"](8, preset)
        text = block.to_json().replace('"beta": 0.0', '"beta": B')
        own = comparison.MODELS["preset"](8, preset).to_json()
        beta = next(part for part in own.split('"beta": ')[1:]).split(",")[0]
        assert text == own.replace(f'"beta": {beta}', '"beta": B')
        assert ADPTSpec(8, beta=float(beta)).beta > 0


def test_the_best_rate_on_validation_is_run_with_the_other_seeds():
    chosen = choose(task=["parity"], model=["gru"])
    first = list(comparison.list_points([], chosen))
    assert [(p.rate, p.seed) for p in first] == [(rate, 0) for rate in comparison.RATES]
    rows = [row(rate, 0, score) for rate, score in zip(comparison.RATES, (0.5, 0.9, float("nan")), strict=True)]
    later = list(comparison.list_points(rows, chosen))[len(first) :]
    assert [(p.rate, p.seed) for p in later] == [(comparison.RATES[1], seed) for seed in comparison.SEEDS[1:]]
    assert comparison.choose_rate([row(1e-3, 0, 0.2, True), row(1e-2, 0, 0.3, True)]) == 1e-3
    one = list(comparison.list_points([], choose(task=["s3"], model=["gru"], rate=[3e-3], seed=[2])))
    assert one == [comparison.Point("s3", "gru", 3e-3, 2)]


def test_a_run_appends_rows_skips_those_it_has_and_prints_a_table(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"task": "pari')  # a line that was cut off
    where = ["--smoke", "--task", "parity", "--model", "preset", "--rows", str(rows), "--runs", str(tmp_path / "runs")]
    comparison.main([*where, "--rate", "0.003", "--seed", "0"])
    assert "| preset |" in capsys.readouterr().out
    found = comparison.read_rows(rows)
    assert [(r["task"], r["model"], r["rate"], r["seed"]) for r in found] == [("parity", "preset", 0.003, 0)]
    assert found[0]["step_ms"] > 0
    assert set(found[0]["test"]) == {"40", "80"}
    before = rows.read_bytes()
    comparison.main([*where, "--rate", "0.003", "--seed", "0"])
    assert rows.read_bytes() == before
    capsys.readouterr()
    comparison.main([*where, "--list"])
    assert capsys.readouterr().out.count("open") == 2
    json.dumps(found)


def test_a_task_without_its_file_is_skipped(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ADPTNET_DATA", str(tmp_path))
    where = ["--rows", str(tmp_path / "rows.jsonl"), "--runs", str(tmp_path / "runs")]
    comparison.main(["--smoke", "--task", "spoken-digits", "--model", "gru", "--rate", "1e-3", "--seed", "0", *where])
    assert "audiomnist_cochlea_frames.npz is not in" in capsys.readouterr().out


def test_intervals_and_a_count_that_no_width_has():
    assert comparison.format_interval([0.5]) == "0.5000"
    assert comparison.format_interval([0.4, 0.5, 0.6], 100) == "50.0 ± 24.8"  # 4.30 * 10 / sqrt(3)
    with pytest.raises(InputError, match="Choose another count"):
        comparison.match_width(lambda width: Parity().model(comparison.MODELS["gru"](width, "tracking")), 200)
