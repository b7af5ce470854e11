"""Stored rows: complete lines only, safe under concurrent writes, plain or compressed."""

import gzip
import json
import math
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from adptnet_lab.paper import compare, report, reproduce
from adptnet_lab.paper.registry import ReproductionError, load_results
from adptnet_lab.paper.rows import RowStore, RowWarning
from support.paper import make_row, run_smoke


@pytest.mark.parametrize(
    ("line", "message"),
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
def test_a_foreign_line_among_rows_raises_with_its_position(line, message, tmp_path):
    result = load_results()["fig:dynamical_system"]
    (point,) = result.recipe.points("smoke")
    store = RowStore(tmp_path)
    store.add(result, "smoke", make_row(result, point, numbers={"a": 1}))
    with store.path(result, "smoke").open("a") as file:
        file.write((line if isinstance(line, str) else json.dumps(make_row(result, point, **line))) + "\n")
    with pytest.raises(ReproductionError, match=re.escape(message)):
        compare.run(compare.Compare((result.name,), rows=tmp_path))
    with pytest.raises(ReproductionError, match=re.escape(message)):
        run_smoke(tmp_path, result.name)


def test_garbage_is_skipped_with_a_warning_and_of_two_rows_the_first_counts(tmp_path):
    result = load_results()["fig:dynamical_system"]
    (point,) = result.recipe.points("smoke")
    store = RowStore(tmp_path)
    store.path(result, "smoke").parent.mkdir()
    store.path(result, "smoke").write_bytes(b"\xff\x00\xfe garbage\n\n{'a': 1}\n" + b"[" * 100_000 + b"\n")
    for number in (1, 2):
        store.add(result, "smoke", make_row(result, point, numbers={"a": number}))
    with pytest.warns(RowWarning, match=r"3 lines are not JSON and are skipped \(number 1, 3, 4\)"):
        rows, left, _ = store.read_rows(result, "smoke")
    assert left == 0
    assert rows.numbers("a") == [1]


def test_a_last_line_that_is_still_being_written_is_skipped_without_a_warning(tmp_path):
    result = load_results()["fig:dynamical_system"]
    (point,) = result.recipe.points("smoke")
    store = RowStore(tmp_path)
    store.add(result, "smoke", make_row(result, point, numbers={"a": 1}))
    path = store.path(result, "smoke")
    path.write_bytes(path.read_bytes() + b'{"label": "fig')
    assert store.read_rows(result, "smoke")[0].numbers("a") == [1]


def test_compressed_rows_are_read_together_with_rows_that_are_added_later(tmp_path):
    result, store = load_results()["table:error_summary"], RowStore(tmp_path)
    first, *others = result.recipe.points("smoke")
    store.add(result, "smoke", make_row(result, first, numbers={"a": 1}))
    path = store.path(result, "smoke")
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert not store.is_empty
    assert store.read_rows(result, "smoke")[0].numbers("a") == [1]
    store.add(result, "smoke", make_row(result, others[0], numbers={"a": 2}))
    assert store.read_rows(result, "smoke")[0].numbers("a") == [1, 2]
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(ReproductionError, match=r"table-error_summary.jsonl.gz cannot be read"):
        store.read_rows(result, "smoke")
    packed.write_bytes(b"not compressed")
    with pytest.raises(ReproductionError, match=r"table-error_summary.jsonl.gz cannot be read"):
        store.read_rows(result, "smoke")


def test_rows_that_are_written_concurrently_are_complete(tmp_path):
    result = load_results()["table:error_summary"]
    points = result.recipe.points("smoke")
    long = list(range(20_000))  # more than any buffer

    def add(point):
        RowStore(tmp_path).add(result, "smoke", make_row(result, point, numbers={"a": long}))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, points * 3))
    assert RowStore(tmp_path).read_rows(result, "smoke")[1] == 0
    lines = RowStore(tmp_path).path(result, "smoke").read_text().splitlines()
    assert [json.loads(line)["numbers"]["a"] for line in lines] == [long] * len(points) * 3


def test_rows_are_written_where_there_are_no_locks(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    result = load_results()["fig:dynamical_system"]
    (point,) = result.recipe.points("smoke")
    store = RowStore(tmp_path)
    store.add(result, "smoke", make_row(result, point, numbers={"a": 1}))
    assert len(store.path(result, "smoke").read_text().splitlines()) == 1


def test_folders_that_cannot_be_written_to_raise_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(reproduce, "_run_point", lambda *_: pytest.fail("a point was run"))
    with pytest.raises(ReproductionError, match="rows cannot be written to"):
        run_smoke(tmp_path / "file", "fig:ortho_gd")
    with pytest.raises(ReproductionError, match="--processes 0: must be at least 1"):
        run_smoke(tmp_path, "fig:ortho_gd", processes=0)
    with pytest.raises(ReproductionError, match="the report cannot be written to"):
        report.run(report.Report(rows=tmp_path, output=tmp_path / "file"))


def test_a_full_disk_raises_and_the_message_says_what_is_kept(tmp_path, monkeypatch):
    def disk_full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RowStore, "add", disk_full)
    with pytest.raises(ReproductionError, match=r"No space left on device. Earlier rows are kept"):
        run_smoke(tmp_path, "fig:ortho_gd")


def test_a_row_that_does_not_fit_on_the_disk_leaves_the_file_unchanged(tmp_path, monkeypatch):
    result = load_results()["fig:dynamical_system"]
    (point,) = result.recipe.points("smoke")
    store = RowStore(tmp_path)
    store.add(result, "smoke", make_row(result, point, numbers={"a": 1}))
    before = store.path(result, "smoke").read_bytes()

    def disk_full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk_full)
        with pytest.raises(OSError, match="No space left"):
            store.add(result, "smoke", make_row(result, point, numbers={"a": 2}))
    assert store.path(result, "smoke").read_bytes() == before
    store.path(result, "smoke").unlink()
    os.mkfifo(store.path(result, "smoke"))
    with pytest.raises(ReproductionError, match=r"fig-dynamical_system.jsonl cannot be read: not a regular file"):
        store.read_rows(result, "smoke")


def test_an_empty_folder_is_reported(tmp_path, capsys):
    compare.run(compare.Compare(("fig:ortho_gd",), rows=tmp_path))
    assert f"No rows in {tmp_path}/{{smoke,laptop,paper}}" in capsys.readouterr().out
    run_smoke(tmp_path, "fig:tradeoffs")
    capsys.readouterr()
    compare.run(compare.Compare(("fig:ortho_gd",), rows=tmp_path))
    assert "No rows" not in capsys.readouterr().out


def test_rows_can_hold_infinities_and_an_incomplete_line_is_skipped(tmp_path):
    result = load_results()["fig:dynamical_system"]
    point = result.recipe.points("smoke")[0]
    store = RowStore(tmp_path)
    row = make_row(result, point)
    path = store.path(result, "smoke")
    path.parent.mkdir()
    path.write_text('{"settings": {"growing": [[0.')
    assert len(store.read_rows(result, "smoke").rows) == 0
    store.add(result, "smoke", {**row, "numbers": {"a": torch.tensor([1.0, -math.inf]), "b": math.nan}})
    with pytest.warns(RowWarning, match="number 1"):  # of the line that was incomplete and has a successor now
        rows, left, _ = store.read_rows(result, "smoke")
    assert left == 0
    assert rows[0].numbers["a"] == [1.0, -math.inf]
    assert math.isnan(rows[0].numbers["b"])
    store.add(result, "smoke", {**row, "recipe": 0, "numbers": {}})  # of an older recipe version
    with pytest.warns(RowWarning):
        assert len(store.read_lines(result, "smoke")) == 1


def test_if_one_length_is_enough_the_longest_complete_one_counts(tmp_path):
    result, store = load_results()["fig:trained_pos_vs_neg_eig"], RowStore(tmp_path)

    def read_lengths():
        rows, _, gaps = store.read_rows(result, "paper")
        return [row.settings["length"] for row in rows], gaps

    points = {(p.settings["length"], p.settings["negative"]): p for p in result.recipe.points("paper")}
    assert {256, 512, 1024} <= {length for length, _ in points}
    assert read_lengths() == ([], 2)
    for added, expected in (
        ((1024, 0.0), ([1024], 1)),
        ((256, 0.0), ([1024], 1)),
        ((256, 0.25), ([256, 256], 0)),
        ((512, 0.25), ([256, 256], 0)),
        ((512, 0.0), ([512, 512], 0)),
    ):
        store.add(result, "paper", {**make_row(result, points[added]), "scale": "paper"})
        assert read_lengths() == expected
