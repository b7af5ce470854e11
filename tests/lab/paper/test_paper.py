"""The reproduction: labels have a place, rows survive a kill, verdicts follow their tests, the page stands alone."""

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from adptnet_lab import cli
from adptnet_lab.paper import compare, report, reproduce, rows, scoring
from adptnet_lab.paper.evidence import paired, rank_correlation, within
from adptnet_lab.paper.recipe import SCALES, Outcome, Point, Row, Rows, Verdict
from adptnet_lab.paper.recipes import low_param, training_dynamics
from adptnet_lab.paper.registry import ReproductionError, find, labels, results
from adptnet_lab.paper.rows import Shelf, key, plain
from adptnet_lab.training import Keeping
from support.small_runs import members_of_group

PROJECT = Path(__file__).parents[3]
CHEAP = (
    "fig:ortho_gd",
    "table:conv_forward_flops",
    "table:error_summary",
    "fig:beta_effect_interactions",
    "fig:tradeoffs",
)


def ran(folder, *names, **options):
    return reproduce.run(reproduce.Reproduce(names, scale="smoke", rows=folder, **options))


# The registry


def test_every_label_belongs_to_a_result_or_says_what_it_sets_up_or_quotes():
    for label in labels().values():
        assert [bool(label.results), bool(label.configuration), bool(label.literature)].count(True) == 1, label
    shown = {name for label in labels().values() for name in label.results}
    assert shown == set(results())
    assert all(name in labels() and name in labels()[name].results for name in results())


def test_the_label_list_covers_every_table_and_figure_of_the_paper():
    if "ADPTNET_PAPER" not in os.environ:
        pytest.skip("the paper is not part of this project; ADPTNET_PAPER=PATH of its .tex compares the list with it")
    text = Path(os.environ["ADPTNET_PAPER"]).read_text()
    wanted = list(dict.fromkeys(re.findall(r"\\label\{((?:fig|table):[^}]*)\}", text)))
    assert [name for name in labels() if not name.startswith("appendix:")] == wanted


@pytest.mark.parametrize("result", results().values(), ids=lambda result: result.name)
def test_a_result_says_what_is_claimed_and_a_recipe_tests_all_of_it(result):
    assert len({claim.id for claim in result.claims}) == len(result.claims)
    assert result.title
    assert result.section
    if "columns" in result.numbers:
        assert all(len(row) == len(result.numbers["columns"]) for row in result.numbers["rows"])
    assert set(result.recipe.checks) == {claim.id for claim in result.claims}
    assert all(check.words.endswith(".") for check in result.recipe.checks.values())
    for scale in SCALES:
        points = result.recipe.points(scale)
        assert len({key(point) for point in points}) == len(points) > 0
        assert scale in result.recipe.cost


def test_the_map_of_the_paper_says_how_every_result_is_run():
    page = (PROJECT / "docs" / "reference" / "paper-map.md").read_text()
    for result in results().values():
        for label in result.labels:
            if len(labels()[label].results) == 1:  # one is used twice in the paper
                line = re.search(rf"^\| {re.escape(label)} \|.*$", page, re.MULTILINE)[0]
                assert "adptnet reproduce" in line, line


def test_an_unknown_label_is_refused_with_the_nearest_one(capsys):
    with pytest.raises(ReproductionError, match=r"Perhaps you meant 'fig:time_ablation'"):
        find(["fig:time_ablatoin"])
    with pytest.raises(ReproductionError, match="sets up other results"):
        find(["table:baseline_untrained_config"])
    with pytest.raises(ReproductionError, match="numbers of others"):
        find(["table:mamba_state_tracking"])
    assert [result.name for result in find(["fig:dt_min_deer"])] == ["fig:eigenvalue_dt_min_max"]
    assert len(find(["table:ADPTNet_sc_results"])) == 4
    assert cli.main(["reproduce"]) == 1
    assert "--all" in capsys.readouterr().err
    assert cli.main(["reproduce", "fig:tradeoffs", "--shard", "3/2"]) == 1
    assert cli.main(["reproduce", "fig:tradeoffs", "--device", "cuba"]) == 1
    assert "--device cuba cannot be used here" in capsys.readouterr().err


def test_the_list_shows_every_label(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    assert cli.main(["reproduce", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in labels())
    assert "not run" in shown


def test_a_part_of_the_points_is_run_and_the_claims_that_need_no_more_are_judged(tmp_path, capsys):
    name, only = "table:mad_results", ("task=selective-copying", "model=ADPTNet,Hawk")
    with pytest.raises(ReproductionError, match=r"Settings are batch, .*, task"):
        ran(tmp_path, name, only=("tsk=compression",))
    with pytest.raises(ReproductionError, match="SETTING=VALUE"):
        ran(tmp_path, name, only=("Hawk",))
    assert ran(tmp_path, name, only=only) == 2
    judged = compare.judge(results()[name], Shelf(tmp_path))
    assert judged.scale is None
    found = {claim.id: verdict for claim, verdict in judged.verdicts}
    assert found["hawk"].outcome == Outcome.NOT_TESTABLE  # a toy
    assert found["hawk"].why.startswith("scale smoke")
    assert {found[id].outcome for id in ("linear", "compression", "memorisation")} == {Outcome.NOT_RUN}
    assert ran(tmp_path, name, only=("rate=0.001",)) > 0  # numbers are numbers


def test_what_only_asks_for_must_be_there(tmp_path, capsys):
    name = "fig:cond_ablation"
    with pytest.raises(
        ReproductionError, match=r"--only beta=0.3: no point at the scale smoke has it. beta is 0.125, 1"
    ):
        ran(tmp_path, name, only=("beta=1,0.3",))
    with pytest.raises(ReproductionError, match="ratio=: no point"):
        ran(tmp_path, name, only=("ratio=",))
    assert ran(tmp_path, name, only=("ratio=10", "beta=1", "beta=0.125")) == 2  # a name made of digits; both β


def test_a_result_whose_data_are_not_here_says_what_it_lacks(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ADPTNET_DATA", str(tmp_path))
    monkeypatch.setenv("ADPTNET_CACHE", str(tmp_path))
    lacks = {name: results()[name].recipe.lacks for name in ("table:ssc_results", "table:linear_scifar_results")}
    assert all(lack("smoke") is None for lack in lacks.values())
    assert "ssc_train.h5, ssc_valid.h5, ssc_test.h5" in lacks["table:ssc_results"]("paper")
    assert "adptnet data fetch cifar10" in lacks["table:linear_scifar_results"]("laptop")
    assert cli.main(["reproduce", "table:ssc_results", "--scale", "paper", "--rows", str(tmp_path)]) == 1
    assert "zenkelab.org" in capsys.readouterr().err
    images = np.zeros((20, 2, 2, 3), np.uint8)
    labels_of = np.arange(20) % 10
    np.savez(tmp_path / "cifar10.npz", x_train=images, y_train=labels_of, x_test=images, y_test=labels_of)
    lack = lacks["table:linear_scifar_results"]
    assert lack("laptop") is None
    assert "45,000 images to train on; those found are 18" in lack("paper")
    everything = reproduce.Reproduce((), all=True, scale="paper", rows=tmp_path)
    jobs = [reproduce._Job(results()[name], None) for name in (*lacks, "fig:ortho_gd")]
    assert [job.result.name for job in reproduce._possible(jobs, everything)] == ["fig:ortho_gd"]
    assert "table:ssc_results is left out" in capsys.readouterr().out


# The tests behind verdicts


def test_the_rank_correlation_is_spearmans():
    assert rank_correlation([1, 2, 3], [10, 20, 90]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert rank_correlation([1, 2, 3, 4], [1, 1, 2, 2]) == pytest.approx(2 / math.sqrt(5))  # ties have mean ranks
    assert math.isnan(rank_correlation([1, 2], [5, 5]))


def test_paired_differences_have_students_interval():
    found = paired([3.0, 5.0, 10.0], [1.0, 1.0, 1.0])  # differences 2, 4, 9
    assert found.mean == pytest.approx(5)
    assert found.high - found.mean == pytest.approx(4.303 * math.sqrt(13) / math.sqrt(3))
    assert paired([1.0], [0.0])[1:3] == (-math.inf, math.inf)


def test_within_is_how_far_the_worst_value_leaves_the_interval():
    assert within([0.2, 0.5], 0, 1) == pytest.approx(-0.2)
    assert within([-0.5, 1.25], 0, 1) == pytest.approx(0.5)


def test_a_nan_is_outside_every_interval_and_correlates_with_nothing():
    assert within([0.5, math.nan], 0, 1) == within([math.nan, 0.5], 0, 1) == math.inf
    assert math.isnan(rank_correlation([1, 2, 3], [1, 2, math.nan]))


# Rows


def a_row(result, point, scale="smoke", **changes):
    where = {"label": result.name, "scale": scale, "settings": plain(point.settings), "seed": point.seed}
    return {**where, "recipe": result.recipe.version, "numbers": {}, "time": {}, **changes}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1, 2]", "line 2: not a row, which is a JSON object"),
        ("5", "line 2: not a row"),
        ('{"recipe": 1}', "no label, scale, settings, seed, numbers, time"),
        ({"numbers": [1]}, "no numbers"),
        ({"seed": "0"}, "no seed"),
        (
            {"label": "fig:ortho_gd"},
            "a row of fig:ortho_gd at the scale smoke, but the file is for fig:dynamical_system",
        ),
        ({"scale": "paper"}, "at the scale paper, but"),
    ],
)
def test_a_foreign_line_among_rows_is_refused_with_its_place(line, said, tmp_path):
    result = results()["fig:dynamical_system"]
    (point,) = result.recipe.points("smoke")
    shelf = Shelf(tmp_path)
    shelf.add(result, "smoke", a_row(result, point, numbers={"a": 1}))
    with shelf.path(result, "smoke").open("a") as file:
        file.write((line if isinstance(line, str) else json.dumps(a_row(result, point, **line))) + "\n")
    with pytest.raises(ReproductionError, match=re.escape(said)):
        compare.run(compare.Compare((result.name,), rows=tmp_path))
    with pytest.raises(ReproductionError, match=re.escape(said)):
        ran(tmp_path, result.name)


def test_garbage_in_a_file_of_rows_is_no_row_and_of_two_rows_the_first_counts(tmp_path):
    result = results()["fig:dynamical_system"]
    (point,) = result.recipe.points("smoke")
    shelf = Shelf(tmp_path)
    shelf.path(result, "smoke").parent.mkdir()
    shelf.path(result, "smoke").write_bytes(b"\xff\x00\xfe garbage\n\n{'a': 1}\n" + b"[" * 100_000 + b"\n")
    for number in (1, 2):
        shelf.add(result, "smoke", a_row(result, point, numbers={"a": number}))
    rows, left = shelf.rows(result, "smoke")
    assert left == 0
    assert rows.numbers("a") == [1]


def test_rows_that_are_written_at_the_same_time_are_whole(tmp_path):
    result = results()["table:error_summary"]
    points = result.recipe.points("smoke")
    long = list(range(20_000))  # more than any buffer
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(lambda p: Shelf(tmp_path).add(result, "smoke", a_row(result, p, numbers={"a": long})), points * 3)
        )
    assert Shelf(tmp_path).rows(result, "smoke")[1] == 0
    lines = Shelf(tmp_path).path(result, "smoke").read_text().splitlines()
    assert [json.loads(line)["numbers"]["a"] for line in lines] == [long] * len(points) * 3


def test_rows_and_reports_that_cannot_be_written_are_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(reproduce, "_row", lambda *_: pytest.fail("it ran"))
    with pytest.raises(ReproductionError, match="rows cannot be written to"):
        ran(tmp_path / "file", "fig:ortho_gd")
    with pytest.raises(ReproductionError, match="--processes 0: must be at least 1"):
        ran(tmp_path, "fig:ortho_gd", processes=0)
    with pytest.raises(ReproductionError, match="the report cannot be written to"):
        report.run(report.Report(rows=tmp_path, output=tmp_path / "file"))


def test_a_full_disk_is_an_error_that_says_what_is_kept(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Shelf, "add", full)
    with pytest.raises(ReproductionError, match=r"No space left on device. Those before it are kept"):
        ran(tmp_path, "fig:ortho_gd")


def test_a_row_that_found_no_room_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    result = results()["fig:dynamical_system"]
    (point,) = result.recipe.points("smoke")
    shelf = Shelf(tmp_path)
    shelf.add(result, "smoke", a_row(result, point, numbers={"a": 1}))
    before = shelf.path(result, "smoke").read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            shelf.add(result, "smoke", a_row(result, point, numbers={"a": 2}))
    assert shelf.path(result, "smoke").read_bytes() == before
    shelf.path(result, "smoke").unlink()
    os.mkfifo(shelf.path(result, "smoke"))
    with pytest.raises(ReproductionError, match=r"fig-dynamical_system.jsonl cannot be read: not a regular file"):
        shelf.rows(result, "smoke")


def test_a_point_that_fails_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    result = results()["table:error_summary"]
    first, row = result.recipe.points("smoke")[0], reproduce._row

    def fails_at_first(name, point, options):
        if point == first:
            raise ArithmeticError("of this point")
        return row(name, point, options)

    monkeypatch.setattr(reproduce, "_row", fails_at_first)
    with pytest.raises(ReproductionError, match="1 of 10 points failed, the first of them table:error_summary"):
        ran(tmp_path, result.name)
    said = capsys.readouterr()
    assert said.out.count("FAILED") == 1
    assert "ArithmeticError: of this point" in said.err
    assert Shelf(tmp_path).rows(result, "smoke")[1] == 1
    monkeypatch.undo()
    assert ran(tmp_path, result.name) == 1


def test_a_folder_without_rows_is_said_to_be_one(tmp_path, capsys):
    compare.run(compare.Compare(("fig:ortho_gd",), rows=tmp_path))
    assert f"No rows in {tmp_path}/{{smoke,laptop,paper}}" in capsys.readouterr().out
    ran(tmp_path, "fig:tradeoffs")
    capsys.readouterr()
    compare.run(compare.Compare(("fig:ortho_gd",), rows=tmp_path))
    assert "No rows" not in capsys.readouterr().out


def test_rows_hold_infinities_and_a_line_that_was_cut_off_is_run_again(tmp_path):
    result = results()["fig:dynamical_system"]
    point = result.recipe.points("smoke")[0]
    shelf = Shelf(tmp_path)
    row = a_row(result, point)
    path = shelf.path(result, "smoke")
    path.parent.mkdir()
    path.write_text('{"settings": {"growing": [[0.')
    assert shelf.rows(result, "smoke") == (Rows([]), 1) or len(shelf.rows(result, "smoke")[0]) == 0
    shelf.add(result, "smoke", {**row, "numbers": {"a": torch.tensor([1.0, -math.inf]), "b": math.nan}})
    rows, left = shelf.rows(result, "smoke")
    assert left == 0
    assert rows[0].numbers["a"] == [1.0, -math.inf]
    assert math.isnan(rows[0].numbers["b"])
    shelf.add(result, "smoke", {**row, "recipe": 0, "numbers": {}})  # of an older recipe
    assert len(shelf.lines(result, "smoke")) == 1


def test_a_finished_point_is_skipped_and_shares_make_a_whole(tmp_path, capsys):
    names = ("table:error_summary", "fig:ortho_gd")
    total = sum(len(results()[name].recipe.points("smoke")) for name in names)
    counts = [ran(tmp_path, *names, shard=f"{i}/3") for i in (1, 2, 3)]
    assert sum(counts) == total
    assert max(counts) - min(counts) <= 1
    shelf = Shelf(tmp_path)
    assert all(shelf.rows(results()[name], "smoke")[1] == 0 for name in names)
    assert ran(tmp_path, *names) == 0
    shown = results()["fig:trained_damping"]  # another side of fig:trained_pos_vs_neg_eig
    assert [result.name for result in reproduce._sources([shown])] == [shown.recipe.source]
    assert len(list((tmp_path / "smoke").glob("table-error_summary.*-of-3.jsonl"))) == 3


def test_where_one_length_is_enough_the_longest_that_is_complete_counts(tmp_path):
    result, shelf = results()["fig:trained_pos_vs_neg_eig"], Shelf(tmp_path)

    def lengths():
        rows, left = shelf.rows(result, "paper")
        return [row.settings["length"] for row in rows], left

    points = {(p.settings["length"], p.settings["negative"]): p for p in result.recipe.points("paper")}
    assert sorted({length for length, _ in points}) == [256, 512, 1024]
    assert lengths() == ([], 2)
    for added, found in (
        ((1024, 0.0), ([1024], 1)),
        ((256, 0.0), ([1024], 1)),
        ((256, 0.25), ([256, 256], 0)),
        ((512, 0.25), ([256, 256], 0)),
        ((512, 0.0), ([512, 512], 0)),
    ):
        shelf.add(result, "paper", {**a_row(result, points[added]), "scale": "paper"})
        assert lengths() == found


def stripped(folder):
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
    ran(tmp_path / "first", *names)
    torch.manual_seed(99)  # what ran before does not matter, nor does the order
    ran(tmp_path / "second", *reversed(names))
    assert stripped(tmp_path / "first") == stripped(tmp_path / "second")


def test_a_long_point_goes_on_from_its_checkpoint_to_the_same_row(tmp_path, monkeypatch):
    name = "fig:trained_pos_vs_neg_eig"
    result = results()[name]
    point = result.recipe.points("smoke")[0]
    options = reproduce.Reproduce((name,), scale="paper", rows=tmp_path)
    whole = reproduce._row(name, point, dataclasses.replace(options, scale="smoke"))
    taken, snapshot = [], training_dynamics._snapshot

    def interrupted(layer, x):
        taken.append(len(taken))
        if len(taken) == 3:
            raise RuntimeError("the power is cut")
        return snapshot(layer, x)

    monkeypatch.setattr(scoring, "Keeping", lambda: Keeping(steps=1))
    monkeypatch.setattr(training_dynamics, "_snapshot", interrupted)
    with pytest.raises(RuntimeError, match="the power is cut"):
        reproduce._row(name, point, options)
    shelf = Shelf(tmp_path)
    assert list((shelf.unfinished(result, "paper", point) / "checkpoints").iterdir())
    assert shelf.rows(result, "paper")[1] == 2
    row = reproduce._row(name, point, options)
    assert len(taken) == 4  # the third again, and no other
    assert plain(row["numbers"]) == plain(whole["numbers"])
    shelf.forget(result, "paper", point)
    assert not (tmp_path / "paper" / "unfinished").exists()


def test_a_killed_reproduction_loses_at_most_the_point_in_progress(tmp_path):
    command = [sys.executable, "-m", "adptnet", "reproduce", "table:error_summary", "--scale", "smoke"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT / "src")}
    process = subprocess.Popen([*command, "--rows", str(tmp_path)], stdout=subprocess.PIPE, text=True, env=alone)
    printed = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    result = results()["table:error_summary"]
    done, left = Shelf(tmp_path).rows(result, "smoke")
    assert all(line.startswith(f"{n}/10") for n, line in enumerate(printed, 1))
    assert 3 <= len(done) < 10
    assert left == 10 - len(done)
    before = stripped(tmp_path)
    assert ran(tmp_path, result.name) == left
    assert stripped(tmp_path)[: len(before)] == before
    assert Shelf(tmp_path).rows(result, "smoke")[1] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_reproduction_that_began_them(number, tmp_path):
    command = [sys.executable, "-m", "adptnet", "reproduce", "fig:orthogonal_rnn_lyapunov", "--scale", "paper"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT / "src")}
    heard = tmp_path / "heard"
    with heard.open("w") as file:
        process = subprocess.Popen(
            [*command, "--processes", "2", "--rows", str(tmp_path)], stderr=file, env=alone, start_new_session=True
        )
    wait_until(lambda: members_of_group(process.pid) >= 3)  # itself, what tracks its semaphores, and a worker at least
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # what Ctrl-C does
    else:
        process.send_signal(number)
    wait_until(lambda: members_of_group(process.pid) == 0)
    assert process.wait() == (-number if number == signal.SIGKILL else 130)
    if number != signal.SIGKILL:  # of which a worker that is just beginning hears as a broken pipe
        assert heard.read_text() == "stopped.\n"


def wait_until(happened, seconds=60.0):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


# Verdicts


def test_a_result_that_is_not_complete_counts_as_not_run(tmp_path):
    ran(tmp_path, "table:error_summary", shard="1/2")
    judged = compare.judge(results()["table:error_summary"], Shelf(tmp_path))
    assert judged.scale is None
    assert {verdict.outcome for _, verdict in judged.verdicts} == {Outcome.NOT_RUN}
    assert "5 of 10 points left" in judged.verdicts[0][1].why


def test_no_claim_holds_on_rows_with_nan_and_nothing_is_drawn_from_them(tmp_path, capsys):
    result = results()["fig:copy_memory"]
    ran(tmp_path, result.name)
    path = Shelf(tmp_path).path(result, "smoke")
    row = json.loads(path.read_text())
    row["numbers"]["loss"] = "nan"
    path.write_text(json.dumps(row) + "\n")
    judged = compare.judge(result, Shelf(tmp_path))
    assert [(v.outcome, v.why) for _, v in judged.verdicts] == [
        (Outcome.FAILS, "NaN in 1 of 1 runs, the first with symbols 8, spread False, seed 0")
    ]
    report.run(report.Report(rows=tmp_path, output=tmp_path / "report"))
    assert not list((tmp_path / "report" / "figures").iterdir())
    del row["numbers"]["loss"], row["numbers"]["targets"]
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ReproductionError, match=r"lack what the test of 'length' needs \(KeyError: 'targets'\)"):
        compare.judge(result, Shelf(tmp_path))


def made(name, numbers):
    """Rows of the scale laptop with numbers that a function of the point gives."""
    points = results()[name].recipe.points("laptop")
    return Rows([Row(p.settings, p.seed, numbers(p), {}, "laptop") for p in points])


def verdicts(name, rows):
    return {id: check.test(rows).outcome for id, check in results()[name].recipe.checks.items()}


def test_the_verdicts_on_state_tracking_follow_the_accuracies():
    def rising(point):
        level = {0.0: 60, 0.0125: 61, 0.125: 65, 1.0: 90, 4.0: 99}[point.settings["beta"]]
        level += point.settings["negative"] - point.settings["sparsity"] + 0.01 * point.seed
        return {"accuracy": [level, level - 20, 40.0]}

    name = "table:s5_8_results"
    found = verdicts(name, made(name, rising))
    assert found.pop("exclusive") == Outcome.NOT_TESTABLE  # all are at the ceiling
    assert found.pop("sparsity") == found.pop("furthest") == Outcome.FAILS
    assert set(found.values()) == {Outcome.HOLDS}

    def apart(point):
        given = point.settings
        alone = bool(given["sparsity"]) != given["negative"] and given["beta"] == 4
        level = 50 + 30 * alone + given["beta"] + 5 * bool(given["sparsity"])
        return {"accuracy": [level, 20 + 60 * (given["spectrum"] == "Linspace"), 30]}

    found = verdicts(name, made(name, apart))
    assert found["exclusive"] == found["sparsity"] == found["furthest"] == Outcome.HOLDS
    flat = verdicts(name, made(name, lambda point: {"accuracy": [60 + 0.1 * hash(key(point)) % 1, 20, 17.0]}))
    assert flat["linear"] == flat["extrapolates"] == flat["beta"] == flat["furthest"] == Outcome.FAILS
    full = verdicts(name, made(name, lambda point: {"accuracy": [100, 100, 99.5]}))
    assert full["furthest"] == Outcome.NOT_TESTABLE


def test_the_verdicts_on_lengths_follow_the_counts():
    name = "fig:deer_seq_len"
    grown = [[2, 2], [3, 3], [4, 4]]
    found = verdicts(name, made(name, lambda point: {"Quasi": grown, "Forward": grown, "Conv": grown}))
    assert found["grows"] == found["same-mean"] == found["magnitude"] == Outcome.HOLDS
    assert found["outliers"] == Outcome.FAILS
    many = [[30, 30], [31, 31], [40, 44]]
    found = verdicts(name, made(name, lambda point: {"Quasi": grown, "Forward": grown, "Conv": many}))
    assert found["same-mean"] == found["magnitude"] == Outcome.FAILS


def test_a_run_that_was_given_up_is_an_outlier_and_none_that_converged_is_no_mean():
    name = "fig:deer_seq_len"
    calm, lost = [[2, 2], [3, 3], [4, 4]], [[2, 2], [3, -1], [-1, -1]]
    rows = made(name, lambda point: {"Quasi": calm, "Forward": calm, "Conv": lost})
    found = {id: check.test(rows) for id, check in results()[name].recipe.checks.items()}
    assert {verdict.outcome for verdict in found.values()} == {Outcome.FAILS}
    assert found["magnitude"].why == "largest ratio 50.33"
    assert results()[name].recipe.table(rows).rows[-1] == [4096, "nan", "nan", "nan", "4", "4", ">150"]
    name = "fig:eigenvalue_dt_min_max"
    rows = made(name, lambda point: {"Quasi": [2, 2], "Forward": [2, 2], "Conv": [-1, -1]})
    found = verdicts(name, rows)
    assert found.pop("outliers") == Outcome.HOLDS
    assert set(found.values()) == {Outcome.FAILS}


def trained_rows(accuracy, whole, damped, blocks):
    """Of fig:trained_damping: counts over the epochs without damping, with, and in blocks."""

    def numbers(point):
        lowest = -0.04 if point.settings["negative"] else -7.0
        shots = [
            {
                "iterations": {"1": {**a, "Quasi": 3}, "0.99": {**b, "Quasi": 3}, "0.9": {**b, "Quasi": 3}},
                "in blocks": {**c, "Quasi": 2},
                "spread": float(place),
                "log_eigenvalues": [-0.01, lowest],
                "exponents": [-0.01, lowest],
            }
            for place, (a, b, c) in enumerate(zip(whole, damped, blocks, strict=True))
        ]
        return {"accuracy": accuracy, "snapshots": shots}

    return made("fig:trained_damping", numbers)


def of_both(*counts):
    return [{"Conv": n, "Forward": n} for n in counts]


def test_what_removes_outliers_is_judged_where_there_are_outliers():
    name, calm, few = "fig:trained_damping", of_both(*[3] * 7), of_both(*[2] * 7)
    found = verdicts(name, trained_rows(95.0, calm, of_both(*[30] * 7), few))
    assert found["collapse"] == Outcome.FAILS
    assert found["damped-forward"] == found["damped-conv"] == found["blocks"] == Outcome.NOT_TESTABLE
    assert found["blocks-alike"] == Outcome.HOLDS
    wild = of_both(3, 3, 3, 3, 3, 256, 3)
    found = verdicts(name, trained_rows(95.0, wild, of_both(*[30] * 7), few))
    assert found["collapse"] == found["damped-forward"] == found["blocks"] == Outcome.HOLDS
    assert found["damped-conv"] == Outcome.FAILS
    found = verdicts(name, trained_rows(95.0, wild, wild, wild))
    assert found["damped-forward"] == found["blocks"] == found["blocks-alike"] == Outcome.FAILS
    assert found["damped-conv"] == Outcome.HOLDS
    assert verdicts(name, trained_rows(60.0, calm, calm, few))["collapse"] == Outcome.NOT_TESTABLE
    signs = results()["fig:trained_pos_vs_neg_eig"].recipe.checks["minimum"].test
    assert signs(trained_rows(95.0, calm, calm, few)).outcome == Outcome.HOLDS
    assert signs(trained_rows(60.0, calm, calm, few)).outcome == Outcome.NOT_TESTABLE


def test_what_costs_accuracy_is_judged_where_there_is_accuracy_to_lose():
    name = "table:s5_32_results"

    def at(**levels):
        return verdicts(
            name, made(name, lambda point: {"accuracy": [levels.get(point.settings["variant"], 100.0)] * 3})
        )

    assert at()["dot"] == at()["mitigates"] == Outcome.NOT_TESTABLE
    assert at(dot=80.0)["dot"] == at(dot=80.0)["mitigates"] == Outcome.HOLDS
    assert at(plain=70.0, dot=80.0)["dot"] == Outcome.FAILS
    assert at(**{"LN": 20.0, "LN + ReLU": 50.0})["mitigates"] == Outcome.FAILS


def test_the_verdicts_on_twin_runs_are_no_coins():
    def of_copy(more, gain):
        """So many iterations more than Selective Copy takes, and so much accuracy that a trainable β gains."""

        def numbers(point):
            copy, free = point.settings["task"] == "Copy Memory", point.settings["beta"] == "trainable"
            jitter = 0.1 * (point.seed - 1) * (1 if copy else -1)
            layer = {"iterations": [3 + more * copy + jitter], "log_eigenvalues": [0.0, -0.1 if copy else -0.2]}
            return {"after": [layer, layer], "accuracy": 90 + gain * free + point.seed * (1 - 2 * free)}

        steps = results()["fig:sel_copy_deer"].recipe.checks["selective"].test(made("fig:sel_copy_deer", numbers))
        trained = (
            results()["table:trainable_beta_sc"]
            .recipe.checks["not-copy"]
            .test(made("table:trainable_beta_sc", numbers))
        )
        return steps.outcome, trained.outcome

    assert of_copy(0.01, 0.1) == (Outcome.FAILS, Outcome.HOLDS)
    assert of_copy(1.0, 20.0) == (Outcome.HOLDS, Outcome.FAILS)


def test_a_reason_is_given_for_claims_that_fail_alone():
    assert Verdict.of(False, "up to 1", "it is broken") == (Outcome.FAILS, "up to 1: it is broken")
    assert Verdict.of(True, "up to 1", "it is broken") == (Outcome.HOLDS, "up to 1")


# Recipes whose numbers have another definition


def test_the_fits_to_the_picture_are_as_good_as_such_matrices_can_be():
    torch.set_default_dtype(torch.float32)
    try:
        picture = low_param.picture()
        points = {p.settings["matrix"]: p for p in low_param.RECIPES["fig:low-param_priors"].points("smoke")}

        def error(name):
            torch.manual_seed(0)
            return low_param._run_picture(Point({"matrix": name, "steps": 300})).numbers["error"]

        def least(matrix, rank):  # Eckart and Young
            return torch.linalg.svdvals(matrix)[rank:].square().sum().item() / picture.numel()

        assert set(points) == set(low_param.matrices())
        assert 0.999 < error("LowRank 4") / least(picture, 4) < 1.05
        blocks = picture.reshape(16, 8, 16, 8).transpose(1, 2).reshape(256, 64)  # Van Loan and Pitsianis
        assert 0.999 < error("Kronecker 16×8") / least(blocks, 1) < 1.05
    finally:
        torch.set_default_dtype(torch.float64)
    assert 0 <= picture.min() <= picture.max() <= 1


def test_the_divergence_is_that_of_its_definition():
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.5, 0.25])
    assert low_param.divergence(p, q) == pytest.approx(0.5 * math.log(2))
    assert low_param.divergence(q, q) == 0


# The report


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.urls, self.scripts = Counter(), [], [], []
        self.open = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        found = dict(attributes)
        self.ids.append(found.get("id"))
        self.urls += [value for name, value in attributes if name in ("src", "href", "xlink:href", "action", "data")]
        self.open = (tag, found.get("type"))

    def handle_data(self, data):
        if self.open and self.open[0] == "script":
            self.scripts.append((self.open[1], data))
            self.open = None


def test_from_rows_to_verdicts_to_the_page(tmp_path, capsys):
    assert ran(tmp_path, *CHEAP) > 0
    assert ran(tmp_path, *CHEAP) == 0  # finished points are skipped
    verdicts_are_shown(tmp_path)
    assert cli.main(["report", "--rows", str(tmp_path), "--output", str(tmp_path / "report")]) == 0
    page_stands_alone(tmp_path / "report")
    dial_has_data(tmp_path / "report")
    twin_has_everything(tmp_path / "report")


def verdicts_are_shown(folder):
    counts = compare.run(compare.Compare(rows=folder))
    assert sum(counts.values()) == sum(len(result.claims) for result in results().values())
    assert counts[Outcome.NOT_RUN] > counts[Outcome.HOLDS] > counts[Outcome.FAILS] > 0
    found = {
        (name, claim.id): verdict.outcome
        for name in CHEAP
        for claim, verdict in compare.judge(results()[name], Shelf(folder)).verdicts
    }
    assert found["table:conv_forward_flops", "forward"] == Outcome.HOLDS
    assert found["table:error_summary", "derivative"] == Outcome.HOLDS
    assert found["fig:beta_effect_interactions", "grows"] == Outcome.HOLDS
    assert (
        found["fig:beta_effect_interactions", "every-beta"] == Outcome.FAILS
    )  # docs/explanation/deviations.md, point 5
    assert found["table:error_summary", "derivative-acts"] == Outcome.FAILS  # point 15
    assert found["fig:ortho_gd", "printed"] == Outcome.FAILS  # point 1


def page_stands_alone(report):
    text = (report / "index.html").read_text()
    page = Page(text)
    assert all(url.startswith(("#", "data:")) for url in page.urls)
    assert not re.search(r"@import|url\((?!['\"]?(#|data:))", text)
    figures = list((report / "figures").glob("*.svg"))
    assert len(figures) == 5
    assert page.tags["svg"] == len(figures) + 3  # and the dial's
    ids = [name for name in page.ids if name]
    assert {url[1:] for url in page.urls if url.startswith("#")} <= set(ids)
    assert len(set(ids)) == len(ids)
    assert all(name.replace(":", "-") in ids for name in results())
    assert "default-src 'none'" in text  # the browser, too, sees to it
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def dial_has_data(report):
    kinds = dict(Page((report / "index.html").read_text()).scripts)
    data = json.loads(kinds["application/json"])
    assert len(data["exponents"]) == len(data["betas"]) == len(data["certified"]) == len(data["iterations"]["Conv"])
    assert data["betas"][0] == 0
    assert data["accuracy"] is None  # the word problem was not run
    assert all(f'"dial-{name}"' in kinds[None] for name in ("rotation", "spectrum", "iterations", "accuracy"))


def test_what_is_in_the_rows_cannot_become_part_of_the_page(tmp_path, capsys):
    name = "fig:beta_effect_interactions"
    ran(tmp_path, name)
    path = Shelf(tmp_path).path(results()[name], "smoke")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["numbers"]["iterations"]["<img src=x onerror=alert(1)>"] = [1, 1]
        row["numbers"]["exponents"][-1] = "-inf"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report.run(report.Report(rows=tmp_path, output=tmp_path / "report"))
    text = (tmp_path / "report" / "index.html").read_text()
    assert "onerror" not in text
    data = json.loads(dict(Page(text).scripts)["application/json"])
    assert [exponents[-1] for exponents in data["exponents"]] == [None] * len(rows)


def twin_has_everything(report):
    text = (report / "index.md").read_text()
    for result in results().values():
        assert f"## {result.name}: " in text
        assert all(claim.says in text for claim in result.claims)
    images = re.findall(r"\]\((figures/[^)]+)\)", text)
    assert len(images) == 5
    assert all((report / image).is_file() for image in images)


def test_a_report_without_matplotlib_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ran(tmp_path, "fig:tradeoffs")
    assert cli.main(["report", "--rows", str(tmp_path), "--output", str(tmp_path)]) == 1
    assert "pip install 'adptnet[plots]'" in capsys.readouterr().err


LOOK = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
addEventListener("load", () => {
  const shown = ["dial-share", "dial-interval", "dial-counts"].map((id) => document.getElementById(id));
  const words = () => shown.map((part) => part.textContent);
  const before = words(), dial = document.getElementById("beta");
  dial.value = "1";
  dial.dispatchEvent(new Event("input"));
  const figures = [...document.querySelectorAll("figure svg, figure canvas")];
  const seen = figures.map((figure) => figure.getBoundingClientRect());
  const style = getComputedStyle(document.body);
  const found = JSON.stringify({
    errors,
    moved: words().map((text, i) => text !== before[i]),
    figures: seen.length,
    smallest: Math.min(...seen.map((box) => Math.min(box.width, box.height))),
    overflow: document.documentElement.scrollWidth - innerWidth,
    width: innerWidth,
    colours: [style.color, style.backgroundColor],
  });
  if (parent === window) document.title = found;
  else parent.postMessage(found, "*");
});
</script>"""
# A window is never narrower than 500 pixels; a frame in it may be.
PHONE = """<!doctype html><title></title><iframe src="index.html" width="390" height="844" style="border: 0"></iframe>
<script>addEventListener("message", (event) => { document.title = event.data; });</script>"""


def looked_at(page, *options):
    """What a browser says of the page."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium here; what the page is made of is checked by another test")
    always = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--virtual-time-budget=5000",
        "--dump-dom",
    ]
    shown = subprocess.run(
        [browser, *always, *options, page.as_uri()], capture_output=True, text=True, check=True, timeout=100
    )
    assert "CONSOLE" not in shown.stderr
    return json.loads(unescape(re.search(r"<title>(.*?)</title>", shown.stdout)[1]))


@pytest.fixture(scope="module")
def page_to_look_at(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    ran(folder, *CHEAP)
    assert cli.main(["report", "--rows", str(folder), "--output", str(folder)]) == 0
    page = folder / "index.html"
    page.write_text(page.read_text().replace("<head>", "<head>" + LOOK))
    (folder / "phone.html").write_text(PHONE)
    return folder


def lightness(colour):
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 765


@pytest.mark.parametrize(
    ("name", "options", "width"),
    [
        ("index.html", [], 1200),
        ("index.html", ["--blink-settings=preferredColorScheme=0"], 1200),
        ("phone.html", [], 390),
    ],
    ids=["light", "dark", "phone"],
)
def test_in_a_browser_every_figure_is_seen_and_the_dial_moves(page_to_look_at, name, options, width):
    seen = looked_at(page_to_look_at / name, "--window-size=1200,900", *options)
    assert seen["errors"] == []
    assert seen["moved"] == [True, True, True]
    assert seen["figures"] == 5 + 4  # and those of the dial
    assert seen["smallest"] > 100
    assert seen["width"] == width
    assert seen["overflow"] <= 0  # wide figures and tables scroll in themselves
    text, ground = map(lightness, seen["colours"])
    assert (text > 0.8 and ground < 0.2) if options else (text < 0.2 and ground > 0.8)


@pytest.mark.slow
def test_everything_runs_at_the_scale_smoke_in_two_minutes(tmp_path):
    begun = time.monotonic()
    ran(tmp_path, all=True)
    assert time.monotonic() - begun < 120
    assert cli.main(["report", "--rows", str(tmp_path), "--output", str(tmp_path / "report")]) == 0
    counts = compare.run(compare.Compare(rows=tmp_path))
    assert counts[Outcome.HOLDS] > 20


def test_the_front_page_and_the_report_have_the_verdicts_that_the_rows_give(capsys):
    counts = compare.run(compare.Compare(rows=PROJECT / "results"))
    holds, fails, untestable = (counts[outcome] for outcome in (Outcome.HOLDS, Outcome.FAILS, Outcome.NOT_TESTABLE))
    total = counts.total()
    assert holds + fails + untestable == total
    front = " ".join((PROJECT / "README.md").read_text().split())
    assert f"of {total} claims {holds} hold, {fails} fail and {untestable} cannot be tested" in front
    report_line = (
        f"{total} claims: ✓ holds {holds}, ✗ fails {fails}, – not testable at this scale {untestable}, · not run 0."
    )
    assert report_line in (PROJECT / "docs" / "report" / "index.md").read_text()


def test_a_fresh_clone_shows_the_rows_it_comes_with_until_there_are_others(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("adptnet_lab.paper.rows.SHIPPED", (Path("results"),))
    options = compare.Compare(("fig:ortho_gd",))
    compare.run(options)
    assert "No rows in runs/paper/{smoke,laptop,paper}" in capsys.readouterr().out
    Path("results").symlink_to(PROJECT / "results")
    counts = compare.run(options)
    assert counts[Outcome.NOT_RUN] == 0
    assert capsys.readouterr().out.startswith("Rows of results.\n")
    reproduce.run(reproduce.Reproduce(("fig:ortho_gd",), scale="smoke"))
    assert list(Path("runs/paper/smoke").glob("*.jsonl"))
    capsys.readouterr()
    compare.run(options)
    assert capsys.readouterr().out.startswith(
        "Rows of runs/paper. Those that the repository comes with: --rows results."
    )
    compare.run(compare.Compare(("fig:ortho_gd",), rows=Path("results")))
    assert capsys.readouterr().out.startswith("Rows of results.\n")


def test_a_clone_finds_its_rows_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = rows.SHIPPED[-1]
    if not shipped.is_dir():
        pytest.skip("installed without the repository")
    assert rows.choose_shelf(None).folder == shipped
