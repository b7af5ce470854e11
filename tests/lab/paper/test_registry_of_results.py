"""Labels, results and recipes: every label has a result, every claim a check, every page an entry."""

import os
import re
from pathlib import Path

import pytest

from adptnet_lab import cli
from adptnet_lab.paper.recipe import SCALES, GridPoint, is_in_subset
from adptnet_lab.paper.registry import ReproductionError, find_results, load_labels, load_results
from adptnet_lab.paper.rows import RowStore, point_key

PROJECT = Path(__file__).parents[3]


def test_every_label_belongs_to_a_result_or_to_a_table_of_settings_or_quoted_numbers():
    for label in load_labels().values():
        assert [bool(label.results), bool(label.configuration), bool(label.literature)].count(True) == 1, label
    shown = {name for label in load_labels().values() for name in label.results}
    assert shown == set(load_results())
    assert all(name in load_labels() and name in load_labels()[name].results for name in load_results())


def test_the_label_list_covers_every_table_and_figure_of_the_paper():
    if "ADPTNET_PAPER" not in os.environ:
        pytest.skip("the paper is not part of this project; set ADPTNET_PAPER to the path of its .tex file")
    text = Path(os.environ["ADPTNET_PAPER"]).read_text()
    in_paper = list(dict.fromkeys(re.findall(r"\\label\{((?:fig|table):[^}]*)\}", text)))
    assert [name for name in load_labels() if name.startswith(("fig:", "table:"))] == in_paper
    others = {name for name in load_labels() if not name.startswith(("fig:", "table:"))}
    assert others <= set(re.findall(r"\\label\{([^}]*)\}", text))


@pytest.mark.parametrize("result", load_results().values(), ids=lambda result: result.name)
def test_a_result_states_its_claims_and_its_recipe_tests_all_of_them(result):
    assert len({claim.id for claim in result.claims}) == len(result.claims)
    assert result.title
    assert result.section
    if "columns" in result.numbers:
        assert all(len(row) == len(result.numbers["columns"]) for row in result.numbers["rows"])
    assert set(result.recipe.checks) == {claim.id for claim in result.claims}
    assert all(check.description.endswith(".") for check in result.recipe.checks.values())
    for claim in result.claims:
        assert claim.kind in ("paper", "reading", "ours", "check")
        assert bool(claim.cause) == bool(claim.because)
        assert claim.cause in ("", "paper", "ours", "scale")
    for scale in SCALES:
        points = result.recipe.points(scale)
        assert len({point_key(point) for point in points}) == len(points) > 0
        assert scale in result.recipe.cost


@pytest.mark.parametrize("result", load_results().values(), ids=lambda result: result.name)
def test_every_claim_can_be_judged_on_the_points_it_needs_at_some_scale(result):
    for check in result.recipe.checks.values():
        scales = SCALES[SCALES.index(check.smallest_scale) :]
        assert any(is_in_subset(p.settings, check.subset) for scale in scales for p in result.recipe.points(scale))


def test_a_row_of_an_earlier_recipe_keeps_its_point():
    """Points that have been run, or are being run, keep their settings, or hours of work would be lost."""
    sizes = {"symbols": 16, "vocabulary": 16, "steps": 31400, "batch": 64, "test": 1000, "length": 128, "width": 64}
    settings = {"source": "state", "beta": 0.0125, "rate": 0.001, "decay": 0.1, **sizes, "expansion": 4}
    recipe = load_results()["table:non-linear_selective_results"].recipe
    keys = {point_key(point) for point in recipe.points("paper")}
    assert recipe.version == 1
    assert {point_key(GridPoint(settings, seed)) for seed in range(3)} <= keys
    store = RowStore(PROJECT / "results")
    for result in load_results().values():
        for scale in ("laptop", "paper"):
            points = {point_key(point) for point in result.recipe.points(scale)}
            lines = [row for row in store.read_lines(result, scale).values() if row["label"] == result.name]
            assert {point_key(GridPoint(row["settings"], row["seed"])) for row in lines} <= points, (result.name, scale)


def test_the_paper_map_gives_the_command_of_every_result():
    page = (PROJECT / "docs" / "reference" / "paper-map.md").read_text()
    for result in load_results().values():
        for label in result.labels:
            if len(load_labels()[label].results) == 1:  # the paper uses one label twice
                line = re.search(rf"^\| {re.escape(label)} \|.*$", page, re.MULTILINE)[0]
                assert "adptnet reproduce" in line, line


def test_an_unknown_label_raises_and_the_nearest_one_is_suggested(capsys):
    with pytest.raises(ReproductionError, match=r"Perhaps you meant 'fig:time_ablation'"):
        find_results(["fig:time_ablatoin"])
    with pytest.raises(ReproductionError, match="is a table of settings"):
        find_results(["table:baseline_untrained_config"])
    with pytest.raises(ReproductionError, match="numbers of the literature"):
        find_results(["table:mamba_state_tracking"])
    assert [result.name for result in find_results(["fig:dt_min_deer"])] == ["fig:eigenvalue_dt_min_max"]
    assert len(find_results(["table:ADPTNet_sc_results"])) == 4
    assert cli.main(["reproduce"]) == 1
    assert "--all" in capsys.readouterr().err
    assert cli.main(["reproduce", "fig:tradeoffs", "--shard", "3/2"]) == 1
    assert cli.main(["reproduce", "fig:tradeoffs", "--device", "cuba"]) == 1
    assert "--device cuba cannot be used here" in capsys.readouterr().err


def test_the_list_shows_every_label(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    assert cli.main(["reproduce", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in load_labels())
    assert "not run" in printed


def test_the_list_names_the_committed_rows_if_there_are_no_others(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("adptnet_lab.paper.rows.COMMITTED_FOLDERS", (Path("results"),))
    hint = "Status of runs/paper. For the committed rows: adptnet reproduce --list --rows results\n"

    def is_hinted(*arguments):
        assert cli.main(["reproduce", "--list", *arguments]) == 0
        return capsys.readouterr().out.endswith(hint)

    assert not is_hinted()  # no committed rows either
    for folder in ("results/smoke", "runs/paper/smoke"):
        Path(folder).mkdir(parents=True)
    Path("results/smoke/fig-tradeoffs.jsonl").touch()
    assert is_hinted()
    assert not is_hinted("--rows", "results")
    Path("runs/paper/smoke/fig-tradeoffs.jsonl").touch()
    assert not is_hinted()
