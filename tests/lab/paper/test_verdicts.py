"""Verdicts follow their tests: statistics, rules for incomplete and invalid rows, and the checks of recipes."""

import json
import math

import pytest
import torch

from adptnet_lab.paper import compare, report
from adptnet_lab.paper.evidence import largest_excess, paired_difference, rank_correlation
from adptnet_lab.paper.recipe import GridPoint, Outcome, decide
from adptnet_lab.paper.recipes import low_param
from adptnet_lab.paper.registry import ReproductionError, load_results
from adptnet_lab.paper.rows import RowStore, point_key
from support.paper import judge_all, make_laptop_rows, run_smoke

# Statistics


def test_the_rank_correlation_is_spearmans():
    assert rank_correlation([1, 2, 3], [10, 20, 90]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert rank_correlation([1, 2, 3, 4], [1, 1, 2, 2]) == pytest.approx(2 / math.sqrt(5))  # ties have mean ranks
    assert math.isnan(rank_correlation([1, 2], [5, 5]))


def test_paired_differences_have_students_interval():
    found = paired_difference([3.0, 5.0, 10.0], [1.0, 1.0, 1.0])  # differences 2, 4, 9
    assert found.mean == pytest.approx(5)
    assert found.high - found.mean == pytest.approx(4.303 * math.sqrt(13) / math.sqrt(3))
    assert paired_difference([1.0], [0.0])[1:3] == (-math.inf, math.inf)


def test_the_largest_excess_is_that_of_the_value_farthest_outside():
    assert largest_excess([0.2, 0.5], 0, 1) == pytest.approx(-0.2)
    assert largest_excess([-0.5, 1.25], 0, 1) == pytest.approx(0.5)


def test_a_nan_is_outside_every_interval_and_correlates_with_nothing():
    assert largest_excess([0.5, math.nan], 0, 1) == largest_excess([math.nan, 0.5], 0, 1) == math.inf
    assert math.isnan(rank_correlation([1, 2, 3], [1, 2, math.nan]))


# Rules for all results


def test_an_incomplete_result_counts_as_not_run(tmp_path):
    run_smoke(tmp_path, "table:error_summary", shard="1/2")
    judged = compare.judge(load_results()["table:error_summary"], RowStore(tmp_path))
    assert judged.scale is None
    assert {verdict.outcome for _, verdict in judged.verdicts} == {Outcome.NOT_RUN}
    assert "5 of 10 points left" in judged.verdicts[0][1].why


def test_every_claim_fails_on_rows_with_nan_and_no_figure_is_made_from_them(tmp_path, capsys):
    result = load_results()["fig:copy_memory"]
    run_smoke(tmp_path, result.name)
    path = RowStore(tmp_path).path(result, "smoke")
    row = json.loads(path.read_text())
    row["numbers"]["loss"] = "nan"
    path.write_text(json.dumps(row) + "\n")
    judged = compare.judge(result, RowStore(tmp_path))
    assert [(v.outcome, v.why) for _, v in judged.verdicts] == [
        (Outcome.FAILS, "NaN in 1 of 1 runs, the first with symbols 8, spread False, seed 0")
    ]
    report.run(report.Report(rows=tmp_path, output=tmp_path / "report"))
    assert not list((tmp_path / "report" / "figures").iterdir())
    del row["numbers"]["loss"], row["numbers"]["targets"]
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ReproductionError, match=r"lack what the test of 'length' needs \(KeyError: 'targets'\)"):
        compare.judge(result, RowStore(tmp_path))


def test_a_reason_is_given_only_for_claims_that_fail():
    assert decide(False, "up to 1", "it is broken") == (Outcome.FAILS, "up to 1: it is broken")
    assert decide(True, "up to 1", "it is broken") == (Outcome.HOLDS, "up to 1")


# Checks of recipes


def test_the_verdicts_on_state_tracking_follow_the_accuracies():
    def increasing(point):
        level = {0.0: 60, 0.0125: 61, 0.125: 65, 1.0: 90, 4.0: 99}[point.settings["beta"]]
        level += point.settings["negative"] - point.settings["sparsity"] + 0.01 * point.seed
        return {"accuracy": [level, level - 20, 40.0]}

    name = "table:s5_8_results"
    found = judge_all(name, make_laptop_rows(name, increasing))
    assert found.pop("exclusive") == Outcome.NOT_TESTABLE  # all are at the ceiling
    assert found.pop("sparsity") == found.pop("furthest") == Outcome.FAILS
    assert set(found.values()) == {Outcome.HOLDS}

    def exclusive(point):
        settings = point.settings
        alone = bool(settings["sparsity"]) != settings["negative"] and settings["beta"] == 4
        level = 50 + 30 * alone + settings["beta"] + 5 * bool(settings["sparsity"])
        return {"accuracy": [level, 20 + 60 * (settings["spectrum"] == "Linspace"), 30]}

    found = judge_all(name, make_laptop_rows(name, exclusive))
    assert found["exclusive"] == found["sparsity"] == found["furthest"] == Outcome.HOLDS

    def constant(point):
        return {"accuracy": [60 + 0.1 * hash(point_key(point)) % 1, 20, 17.0]}

    flat = judge_all(name, make_laptop_rows(name, constant))
    assert flat["linear"] == flat["extrapolates"] == flat["beta"] == flat["furthest"] == Outcome.FAILS
    saturated = judge_all(name, make_laptop_rows(name, lambda point: {"accuracy": [100, 100, 99.5]}))
    assert saturated["furthest"] == Outcome.NOT_TESTABLE


def test_the_verdicts_on_lengths_follow_the_counts():
    name = "fig:deer_seq_len"
    few = [[2, 2], [3, 3], [4, 4]]
    found = judge_all(name, make_laptop_rows(name, lambda point: {"Quasi": few, "Forward": few, "Conv": few}))
    assert found["grows"] == found["same-mean"] == found["magnitude"] == Outcome.HOLDS
    assert found["outliers"] == Outcome.FAILS
    many = [[30, 30], [31, 31], [40, 44]]
    found = judge_all(name, make_laptop_rows(name, lambda point: {"Quasi": few, "Forward": few, "Conv": many}))
    assert found["same-mean"] == found["magnitude"] == Outcome.FAILS


def test_a_run_without_convergence_is_an_outlier_and_has_no_part_in_the_mean():
    name = "fig:deer_seq_len"
    converged, diverged = [[2, 2], [3, 3], [4, 4]], [[2, 2], [3, -1], [-1, -1]]
    rows = make_laptop_rows(name, lambda point: {"Quasi": converged, "Forward": converged, "Conv": diverged})
    verdicts = {id: check.test(rows) for id, check in load_results()[name].recipe.checks.items()}
    assert {verdict.outcome for verdict in verdicts.values()} == {Outcome.FAILS}
    assert verdicts["magnitude"].why == "largest ratio 50.33"
    assert load_results()[name].recipe.table(rows).rows[-1] == [4096, "nan", "nan", "nan", "4", "4", ">150"]
    name = "fig:eigenvalue_dt_min_max"
    rows = make_laptop_rows(name, lambda point: {"Quasi": [2, 2], "Forward": [2, 2], "Conv": [-1, -1]})
    found = judge_all(name, rows)
    assert found.pop("outliers") == Outcome.HOLDS
    assert set(found.values()) == {Outcome.FAILS}


def make_damping_rows(accuracy, whole, damped, blocks):
    """Return rows of fig:trained_damping from the counts over epochs without damping, with damping, and in blocks."""

    def numbers(point):
        lowest = -0.04 if point.settings["negative"] else -7.0
        snapshots = [
            {
                "iterations": {"1": {**a, "Quasi": 3}, "0.99": {**b, "Quasi": 3}, "0.9": {**b, "Quasi": 3}},
                "in blocks": {**c, "Quasi": 2},
                "spread": float(place),
                "log_eigenvalues": [-0.01, lowest],
                "exponents": [-0.01, lowest],
            }
            for place, (a, b, c) in enumerate(zip(whole, damped, blocks, strict=True))
        ]
        return {"accuracy": accuracy, "snapshots": snapshots}

    return make_laptop_rows("fig:trained_damping", numbers)


def same_counts(*counts):
    """Return the same counts for Conv- and Forward-DEER."""
    return [{"Conv": n, "Forward": n} for n in counts]


def test_the_removal_of_outliers_is_judged_only_if_there_are_outliers():
    name, stable, few = "fig:trained_damping", same_counts(*[3] * 7), same_counts(*[2] * 7)
    found = judge_all(name, make_damping_rows(95.0, stable, same_counts(*[30] * 7), few))
    assert found["collapse"] == Outcome.FAILS
    assert found["damped-forward"] == found["damped-conv"] == found["blocks"] == Outcome.NOT_TESTABLE
    assert found["blocks-alike"] == Outcome.HOLDS
    outlier = same_counts(3, 3, 3, 3, 3, 256, 3)
    found = judge_all(name, make_damping_rows(95.0, outlier, same_counts(*[30] * 7), few))
    assert found["collapse"] == found["damped-forward"] == found["blocks"] == Outcome.HOLDS
    assert found["damped-conv"] == Outcome.FAILS
    found = judge_all(name, make_damping_rows(95.0, outlier, outlier, outlier))
    assert found["damped-forward"] == found["blocks"] == found["blocks-alike"] == Outcome.FAILS
    assert found["damped-conv"] == Outcome.HOLDS
    assert judge_all(name, make_damping_rows(60.0, stable, stable, few))["collapse"] == Outcome.NOT_TESTABLE
    test_minimum = load_results()["fig:trained_pos_vs_neg_eig"].recipe.checks["minimum"].test
    assert test_minimum(make_damping_rows(95.0, stable, stable, few)).outcome == Outcome.HOLDS
    assert test_minimum(make_damping_rows(60.0, stable, stable, few)).outcome == Outcome.NOT_TESTABLE


def test_a_loss_of_accuracy_is_judged_only_below_the_ceiling():
    name = "table:s5_32_results"

    def judge_levels(**levels):
        numbers = lambda point: {"accuracy": [levels.get(point.settings["variant"], 100.0)] * 3}  # noqa: E731
        return judge_all(name, make_laptop_rows(name, numbers))

    assert judge_levels()["dot"] == judge_levels()["mitigates"] == Outcome.NOT_TESTABLE
    assert judge_levels(dot=80.0)["dot"] == judge_levels(dot=80.0)["mitigates"] == Outcome.HOLDS
    assert judge_levels(plain=70.0, dot=80.0)["dot"] == Outcome.FAILS
    assert judge_levels(**{"LN": 20.0, "LN + ReLU": 50.0})["mitigates"] == Outcome.FAILS


def test_the_comparison_of_copy_tasks_needs_differences_above_the_noise():
    def judge_copy_memory(more, gain):
        """Judge runs where Copy Memory takes `more` iterations than Selective Copy and a trainable β adds `gain`."""

        def numbers(point):
            copy, trainable = point.settings["task"] == "Copy Memory", point.settings["beta"] == "trainable"
            jitter = 0.1 * (point.seed - 1) * (1 if copy else -1)
            layer = {"iterations": [3 + more * copy + jitter], "log_eigenvalues": [0.0, -0.1 if copy else -0.2]}
            return {"after": [layer, layer], "accuracy": 90 + gain * trainable + point.seed * (1 - 2 * trainable)}

        outcomes = []
        for name, claim in (("fig:sel_copy_deer", "selective"), ("table:trainable_beta_sc", "not-copy")):
            check = load_results()[name].recipe.checks[claim]
            outcomes.append(check.test(make_laptop_rows(name, numbers)).outcome)
        return tuple(outcomes)

    assert judge_copy_memory(0.01, 0.1) == (Outcome.FAILS, Outcome.HOLDS)
    assert judge_copy_memory(1.0, 20.0) == (Outcome.HOLDS, Outcome.FAILS)


# Numbers of recipes against an independent definition


def test_the_fits_to_the_image_are_as_good_as_such_matrices_can_be():
    torch.set_default_dtype(torch.float32)
    try:
        target = low_param.make_target()
        points = {p.settings["matrix"]: p for p in low_param.RECIPES["fig:low-param_priors"].points("smoke")}

        def error(name):
            torch.manual_seed(0)
            return low_param.fit_matrix(GridPoint({"matrix": name, "steps": 300})).numbers["error"]

        def least(matrix, rank):  # Eckart and Young
            return torch.linalg.svdvals(matrix)[rank:].square().sum().item() / target.numel()

        assert set(points) == set(low_param.list_matrices())
        assert 0.999 < error("LowRank 4") / least(target, 4) < 1.05
        blocks = target.reshape(16, 8, 16, 8).transpose(1, 2).reshape(256, 64)  # Van Loan and Pitsianis
        assert 0.999 < error("Kronecker 16×8") / least(blocks, 1) < 1.05
    finally:
        torch.set_default_dtype(torch.float64)
    assert 0 <= target.min() <= target.max() <= 1


def test_the_divergence_agrees_with_its_definition():
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.5, 0.25])
    assert low_param.kl_divergence(p, q) == pytest.approx(0.5 * math.log(2))
    assert low_param.kl_divergence(q, q) == 0
