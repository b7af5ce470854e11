"""`adptnet reproduce`: selection of points, resume after a kill, isolation of runs, worker processes."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import adptnet
from adptnet_lab import cli
from adptnet_lab.paper import compare, reproduce, scoring
from adptnet_lab.paper.forecast import Forecast, TrainingProgress, describe_rest, format_duration
from adptnet_lab.paper.recipe import GridPoint
from adptnet_lab.paper.recipes import deer_blocks, training_dynamics
from adptnet_lab.paper.registry import ReproductionError, load_results
from adptnet_lab.paper.rows import RowStore, to_row_value
from adptnet_lab.paper.verdicts import Outcome
from adptnet_lab.training import SaveOptions
from support.paper import make_row, record_runs, run_smoke
from support.small_runs import count_group_members

PROJECT = Path(__file__).parents[3]


def test_a_subset_of_the_points_is_run_and_claims_that_need_no_more_are_judged(tmp_path, capsys):
    name, only = "table:mad_results", ("task=selective-copying", "model=ADPTNet,Hawk")
    with pytest.raises(ReproductionError, match=r"Settings are batch, .*, task"):
        run_smoke(tmp_path, name, only=("tsk=compression",))
    with pytest.raises(ReproductionError, match="SETTING=VALUE"):
        run_smoke(tmp_path, name, only=("Hawk",))
    assert run_smoke(tmp_path, name, only=only) == 2
    judged = compare.judge(load_results()[name], RowStore(tmp_path))
    assert judged.scale is None
    verdicts = {claim.id: verdict for claim, verdict in judged.verdicts}
    assert verdicts["hawk"].outcome == Outcome.NOT_TESTABLE  # at the scale smoke
    assert verdicts["hawk"].scale == "smoke"
    assert {verdicts[id].outcome for id in ("linear", "compression", "memorisation")} == {Outcome.NOT_RUN}
    assert run_smoke(tmp_path, name, only=("rate=0.001",)) > 0  # numbers are compared as numbers


def test_settings_of_only_must_exist(tmp_path, capsys):
    name = "fig:cond_ablation"
    with pytest.raises(
        ReproductionError, match=r"--only beta=0.3: no point at the scale smoke has it. beta is 0.125, 1"
    ):
        run_smoke(tmp_path, name, only=("beta=1,0.3",))
    with pytest.raises(ReproductionError, match="ratio=: no point"):
        run_smoke(tmp_path, name, only=("ratio=",))
    assert run_smoke(tmp_path, name, only=("ratio=10", "beta=1", "beta=0.125")) == 2  # a name made of digits; both β


def test_one_seed_is_run_and_a_dry_run_runs_nothing(tmp_path, capsys):
    name = "sec:efficient_exp"
    assert run_smoke(tmp_path, name, only=("seed=1", "size=8"), dry_run=True) == 0
    assert "  unknown  sec:efficient_exp  size 8, beta 1.0, seed 1\n1 points" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.jsonl"))
    assert run_smoke(tmp_path, name, only=("seed=1", "size=8")) == 1
    with pytest.raises(ReproductionError, match=r"--only seed=7: no point at the scale smoke has it. seed is 0, 1."):
        run_smoke(tmp_path, name, only=("seed=7",))
    capsys.readouterr()
    run_smoke(tmp_path, name, dry_run=True)
    printed = capsys.readouterr().out
    assert "3 points, about" in printed
    assert "unknown" not in printed  # told from the row that is there
    assert printed.endswith("Nothing was run.\n")


def test_the_time_of_a_point_is_told_from_the_most_similar_row(tmp_path, monkeypatch):
    monkeypatch.setattr("adptnet_lab.paper.forecast.COMMITTED_FOLDERS", ())
    result = load_results()["table:error_summary"]
    points = result.recipe.points("laptop")
    wide = next(p for p in points if p.settings["spread"] == "wide" and p.settings["beta"] == 1.0)
    other = next(p for p in points if p.settings["spread"] == "narrow" and p.settings["beta"] == 0.5)
    store = RowStore(tmp_path)
    assert Forecast(store, "laptop").seconds(result, wide) is None
    for point, seconds in ((wide, 4.0), (other, 1.0)):
        store.add(result, "laptop", make_row(result, point, "laptop", time={"seconds": seconds}))
    forecast = Forecast(store, "laptop")
    assert forecast.seconds(result, GridPoint(wide.settings, 9)) == 4.0
    assert forecast.seconds(result, GridPoint({**wide.settings, "steps": 2 * wide.settings["steps"]}, 0)) == 8.0
    assert [format_duration(s) for s in (None, 3.2, 600, 7920)] == ["unknown", "3 s", "10 min", "2.2 h"]
    third = next(p for p in points if p.settings not in (wide.settings, other.settings))
    store.add(result, "laptop", make_row(result, third, "laptop", time={"seconds": 99.0, "processor": 2.0}))
    forecast = Forecast(store, "laptop")
    assert forecast.seconds(result, third) == 2.0
    expected = sum(forecast.seconds(result, point) for point in points)
    assert forecast.cost(result) == format_duration(expected)
    assert Forecast(RowStore(tmp_path / "none"), "laptop").cost(result) == result.recipe.cost["laptop"]
    assert describe_rest([60.0, None, 60.0], 2) == ", about 60 s left"
    assert describe_rest([], 1) == ""


def test_a_long_training_reports_its_progress(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("adptnet_lab.paper.forecast.time.monotonic", lambda: now[0])
    progress = TrainingProgress(1000)
    for step in range(1, 101):
        now[0] += 1.5
        progress.show(step, 0.25)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["step 40/1000, loss 0.25, 24 min left", "step 80/1000, loss 0.25, 23 min left"]


def test_a_changed_setting_has_rows_of_its_own(tmp_path, capsys):
    name, only = "table:mad_results", ("task=selective-copying", "model=ADPTNet,β = 0")
    assert run_smoke(tmp_path, name, only=only) == 2
    assert run_smoke(tmp_path, name, only=only, set=("beta=0.125",)) == 2
    assert run_smoke(tmp_path, name, only=only, set=("beta=0.125",)) == 0
    rows = [json.loads(line) for line in (tmp_path / "smoke" / "table-mad_results.jsonl").read_text().splitlines()]
    assert [row["settings"].get("beta") for row in rows] == [None, None, 0.125, 0.125]
    betas = [float(re.search(r'"beta": ([\d.e-]+)', json.dumps(row["spec"]))[1]) for row in rows]
    assert betas == [0.00125, 0.0, 0.125, 0.125]
    store = RowStore(tmp_path, changes={"beta": 0.125})
    assert len(store.read_rows(load_results()[name], "smoke").rows) == 2
    for wrong, message in (("colour=red", "has no setting colour"), ("beta", "must be SETTING=VALUE")):
        with pytest.raises(ReproductionError, match=message):
            run_smoke(tmp_path, name, set=(wrong,))
    assert cli.main(["compare", name, "--rows", str(tmp_path), "--set", "beta=0.125"]) == 0


@pytest.mark.parametrize("change", ["select=all", "stop=true"])
def test_the_selection_of_weights_on_the_word_problem_is_an_option(change, tmp_path, capsys):
    run_smoke(tmp_path, "table:s5_8_results", only=("beta=0.0", "negative=true"), set=(change, "evaluate=1"))
    row = json.loads((tmp_path / "smoke" / "table-s5_8_results.jsonl").read_text())
    training = json.loads(row["numbers"]["training"])["spec"]
    expected = {"select=all": ([8, 16, 32], "loss", "mean"), "stop=true": ([16, 8, 32], "accuracy", "first")}[change]
    assert (training["lengths"], training["select_by"], training["select_at"]) == expected


@pytest.mark.parametrize(
    ("name", "only", "change", "expected"),
    [
        ("fig:beta_trained_ablation", ("beta=1.0",), "rope=tied", '"trainable": true, "tied": true}'),
        ("table:non-linear_selective_results", ("beta=0.0125",), "readout=channel", '"readout": {"type": "Expand"'),
        ("table:non-linear_selective_results", ("beta=0.0125",), "gain=LRU", '"gain": {"type": "LRU"'),
    ],
)
def test_choices_that_the_paper_leaves_open_are_options(name, only, change, expected, tmp_path, capsys):
    run_smoke(tmp_path, name, only=only)
    run_smoke(tmp_path, name, only=only, set=(change,))
    rows = (tmp_path / "smoke" / f"{name.replace(':', '-')}.jsonl").read_text().splitlines()
    before, after = (json.dumps(json.loads(line)["spec"]) for line in (rows[0], rows[-1]))
    assert expected not in before
    assert expected in after


def test_products_in_bfloat16_are_an_option_of_the_word_problem(tmp_path, capsys):
    only = ("beta=4.0", "negative=true")
    run_smoke(tmp_path, "table:s5_8_results", only=only)
    run_smoke(tmp_path, "table:s5_8_results", only=only, set=("precision=bf16-all",))
    rows = [json.loads(t) for t in (tmp_path / "smoke" / "table-s5_8_results.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert rows[0]["numbers"]["loss"] != rows[1]["numbers"]["loss"]
    assert rows[0]["numbers"]["loss"] == pytest.approx(rows[1]["numbers"]["loss"], rel=0.05)


def test_a_trained_network_is_kept_on_request_and_can_be_loaded(tmp_path, capsys):
    only = ("beta=1.0", "encoding=scalar")
    run_smoke(tmp_path, "fig:beta_trained_ablation", only=only, keep_networks=True)
    (row,) = (json.loads(t) for t in (tmp_path / "smoke" / "fig-beta_trained_ablation.jsonl").read_text().splitlines())
    network = adptnet.load(tmp_path / "smoke" / "networks" / row["network"])
    assert sum(p.numel() for p in network.parameters()) == row["numbers"]["parameters"]
    blocks = next(m for m in network.modules() if isinstance(m, adptnet.ADPTNet))
    logs = blocks.cell.spectrum.log_modulus().sort(descending=True).values
    assert logs.tolist() == pytest.approx(row["numbers"]["snapshots"][-1]["log_eigenvalues"], rel=1e-5)
    run_smoke(tmp_path, "fig:beta_trained_ablation", only=("beta=0.125", "encoding=scalar"))
    rows = (tmp_path / "smoke" / "fig-beta_trained_ablation.jsonl").read_text().splitlines()
    assert "network" not in json.loads(rows[1])
    assert len(list((tmp_path / "smoke" / "networks").iterdir())) == 1


def test_beta_zero_needs_no_directions_from_the_input(tmp_path, capsys):
    """At β = 0 the recipe uses the directions of the state, which are not computed; the numbers are the same."""
    from adptnet_lab.paper.recipes import selective_copy

    name = "table:linear_ADPTNet_selective_results"
    point = next(p for p in load_results()[name].recipe.points("smoke") if p.settings["beta"] == 0)
    torch.manual_seed(0)
    fast = selective_copy._run(point).numbers
    torch.manual_seed(0)
    slow = selective_copy._run(GridPoint({**point.settings, "beta": 1e-300}, point.seed)).numbers
    assert fast["accuracy"] == slow["accuracy"]
    assert fast["loss"] == pytest.approx(slow["loss"], rel=1e-12)


def test_the_torch_program_is_used_only_within_its_points(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("ADPTNET_BACKEND", raising=False)
    seen = []
    monkeypatch.setattr(deer_blocks, "_measure", lambda point: seen.append(os.environ.get("ADPTNET_BACKEND")))
    for settings in ({}, {"program": "reference"}, {}):
        deer_blocks._run(GridPoint(settings))
    assert seen == [None, "reference", None]


def test_a_result_without_its_data_names_the_missing_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ADPTNET_DATA", str(tmp_path))
    monkeypatch.setenv("ADPTNET_CACHE", str(tmp_path))
    names = ("table:ssc_results", "table:linear_scifar_results")
    find_missing = {name: load_results()[name].recipe.find_missing_data for name in names}
    assert all(find("smoke") is None for find in find_missing.values())
    assert "ssc_train.h5, ssc_valid.h5, ssc_test.h5" in find_missing["table:ssc_results"]("paper")
    assert "adptnet data fetch cifar10" in find_missing["table:linear_scifar_results"]("laptop")
    assert cli.main(["reproduce", "table:ssc_results", "--scale", "paper", "--rows", str(tmp_path)]) == 1
    assert "zenkelab.org" in capsys.readouterr().err
    images = np.zeros((20, 2, 2, 3), np.uint8)
    labels = np.arange(20) % 10
    np.savez(tmp_path / "cifar10.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    find = find_missing["table:linear_scifar_results"]
    assert find("laptop") is None
    assert "45,000 training images, but only 18 were found" in find("paper")


def test_all_leaves_out_results_without_data_and_runs_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ADPTNET_DATA", str(tmp_path))
    monkeypatch.setenv("ADPTNET_CACHE", str(tmp_path))
    runs = record_runs(monkeypatch)
    options = {"all": True, "scale": "paper", "rows": tmp_path}
    reproduce.run(reproduce.Reproduce((), only=("model=SiLIF",), **options))
    assert runs == []
    assert "table:ssc_results is left out" in capsys.readouterr().out
    reproduce.run(reproduce.Reproduce((), only=("beta=0.0125", "steps=1024,4096,15700"), **options))
    assert "table:error_summary" in runs
    reproduce.run(reproduce.Reproduce((), only=("data=cifar10",), **options))
    assert not any("scifar" in name for name in runs)


def test_a_point_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    result = load_results()["table:error_summary"]
    first, run_point = result.recipe.points("smoke")[0], reproduce._run_point

    def fail_at_first(name, point, options):
        if point == first:
            raise ArithmeticError("of this point")
        return run_point(name, point, options)

    monkeypatch.setattr(reproduce, "_run_point", fail_at_first)
    with pytest.raises(ReproductionError, match="1 of 10 points failed, the first of them table:error_summary"):
        run_smoke(tmp_path, result.name)
    printed = capsys.readouterr()
    assert printed.out.count("FAILED") == 1
    assert "ArithmeticError: of this point" in printed.err
    assert RowStore(tmp_path).read_rows(result, "smoke")[1] == 1
    monkeypatch.undo()
    assert run_smoke(tmp_path, result.name) == 1


def test_finished_points_are_skipped_and_shards_cover_all_points(tmp_path, capsys):
    names = ("table:error_summary", "fig:ortho_gd")
    total = sum(len(load_results()[name].recipe.points("smoke")) for name in names)
    counts = [run_smoke(tmp_path, *names, shard=f"{i}/3") for i in (1, 2, 3)]
    assert sum(counts) == total
    assert max(counts) - min(counts) <= 1
    store = RowStore(tmp_path)
    assert all(store.read_rows(load_results()[name], "smoke")[1] == 0 for name in names)
    assert run_smoke(tmp_path, *names) == 0
    assert len(list((tmp_path / "smoke").glob("table-error_summary.*-of-3.jsonl"))) == 3


def test_a_result_that_shares_rows_runs_the_points_of_its_source(tmp_path, monkeypatch, capsys):
    result = load_results()["fig:trained_damping"]  # shows the runs of fig:trained_pos_vs_neg_eig
    runs = record_runs(monkeypatch)
    run_smoke(tmp_path, result.name)
    assert set(runs) == {result.recipe.source}


def read_reproducible_parts(folder):
    """Return the stored rows without the fields that differ between runs."""
    rows = [json.loads(line) for path in sorted(folder.rglob("*.jsonl")) for line in path.read_text().splitlines()]
    assert all({"spec", "seed", "versions", "machine", "scale", "label", "time"} <= set(row) for row in rows)
    return [{key: value for key, value in row.items() if key not in ("time", "machine")} for row in rows]


def test_two_runs_with_the_same_seed_give_the_same_rows(tmp_path, capsys):
    names = (
        "fig:block_savings",
        "fig:pareto_blocks",
        "table:baselines_state_tracking",
        "fig:pre_activation_distribution",
        "table:ssc_results",
    )
    run_smoke(tmp_path / "first", *names)
    torch.manual_seed(99)  # neither earlier random draws nor the order of runs matter
    run_smoke(tmp_path / "second", *reversed(names))
    assert read_reproducible_parts(tmp_path / "first") == read_reproducible_parts(tmp_path / "second")


def test_a_long_point_resumes_from_its_checkpoint_and_gives_the_same_row(tmp_path, monkeypatch):
    name = "fig:trained_pos_vs_neg_eig"
    result = load_results()[name]
    point = result.recipe.points("smoke")[0]
    options = reproduce.Reproduce((name,), scale="paper", rows=tmp_path)
    whole = reproduce._run_point(name, point, dataclasses.replace(options, scale="smoke"))
    taken, take_snapshot = [], training_dynamics._take_snapshot

    def interrupt(layer, x):
        taken.append(len(taken))
        if len(taken) == 3:
            raise RuntimeError("power failure")
        return take_snapshot(layer, x)

    monkeypatch.setattr(scoring, "SaveOptions", lambda: SaveOptions(steps=1))
    monkeypatch.setattr(training_dynamics, "_take_snapshot", interrupt)
    with pytest.raises(RuntimeError, match="power failure"):
        reproduce._run_point(name, point, options)
    store = RowStore(tmp_path)
    assert list((store.checkpoint_folder(result, "paper", point) / "checkpoints").iterdir())
    assert store.read_rows(result, "paper").gaps == 2
    row = reproduce._run_point(name, point, options)
    assert len(taken) == 4  # only the third snapshot is taken again
    assert to_row_value(row["numbers"]) == to_row_value(whole["numbers"])
    store.delete_checkpoints(result, "paper", point)
    assert not (tmp_path / "paper" / "unfinished").exists()


def test_a_killed_reproduction_loses_at_most_the_point_in_progress(tmp_path):
    command = [sys.executable, "-m", "adptnet", "reproduce", "table:error_summary", "--scale", "smoke"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT / "src")}
    process = subprocess.Popen([*command, "--rows", str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment)
    printed = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    result = load_results()["table:error_summary"]
    done, left, _ = RowStore(tmp_path).read_rows(result, "smoke")
    assert all(line.startswith(f"{n}/10") for n, line in enumerate(printed, 1))
    assert 3 <= len(done) < 10
    assert left == 10 - len(done)
    before = read_reproducible_parts(tmp_path)
    assert run_smoke(tmp_path, result.name) == left
    assert read_reproducible_parts(tmp_path)[: len(before)] == before
    assert RowStore(tmp_path).read_rows(result, "smoke")[1] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_reproduction_that_started_them(number, tmp_path):
    command = [sys.executable, "-m", "adptnet", "reproduce", "fig:orthogonal_rnn_lyapunov", "--scale", "paper"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT / "src")}
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        process = subprocess.Popen(
            [*command, "--processes", "2", "--rows", str(tmp_path)],
            stderr=file,
            env=environment,
            start_new_session=True,
        )
    wait_until(lambda: count_group_members(process.pid) >= 3)  # itself, the resource tracker, and at least one worker
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as Ctrl-C does
    else:
        process.send_signal(number)
    wait_until(lambda: count_group_members(process.pid) == 0)
    assert process.wait() == (-number if number == signal.SIGKILL else 130)
    if number != signal.SIGKILL:  # after which a worker that is just starting prints a broken pipe
        assert errors.read_text() == "stopped.\n"


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)
