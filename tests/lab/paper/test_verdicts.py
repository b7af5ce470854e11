"""Verdicts follow their tests: statistics, rules for incomplete and invalid rows, and the checks of recipes."""

import json
import math

import numpy as np
import pytest
import torch

from adptnet_lab.paper import compare, report
from adptnet_lab.paper.evidence import (
    Estimate,
    count_seeds_to_decide,
    detectable_effect,
    estimate_mean,
    estimate_share,
    estimate_trend,
    has_outlier,
    largest_excess,
    paired_difference,
    prediction_interval,
    rank_correlation,
    student_quantile,
)
from adptnet_lab.paper.markdown import describe_headline, describe_outcome
from adptnet_lab.paper.recipe import GridPoint
from adptnet_lab.paper.recipes import low_param
from adptnet_lab.paper.registry import ReproductionError, load_headlines, load_results
from adptnet_lab.paper.rows import RowStore
from adptnet_lab.paper.verdicts import (
    Outcome,
    combine,
    decide,
    judge_absence,
    judge_equal,
    judge_every,
    judge_increase,
    judge_limit,
    judge_observation,
    judge_share,
    judge_trained,
    not_testable,
)
from support.paper import judge_all, make_laptop_rows, make_row, run_smoke

# Statistics


def test_the_rank_correlation_is_spearmans():
    assert rank_correlation([1, 2, 3], [10, 20, 90]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert rank_correlation([1, 2, 3, 4], [1, 1, 2, 2]) == pytest.approx(2 / math.sqrt(5))  # ties have mean ranks
    assert math.isnan(rank_correlation([1, 2], [5, 5]))


@pytest.mark.parametrize(
    ("probability", "degrees", "value"),
    [
        (0.975, 1, 12.70620474),
        (0.975, 2, 4.30265273),
        (0.8, 2, 1.06066017),
        (0.975, 9, 2.26215716),
        (0.025, 4, -2.77644511),
    ],
)
def test_quantiles_of_students_distribution_agree_with_its_tables(probability, degrees, value):
    assert student_quantile(probability, degrees) == pytest.approx(value, rel=1e-6)


def test_paired_differences_have_students_interval():
    found = paired_difference([3.0, 5.0, 10.0], [1.0, 1.0, 1.0])  # differences 2, 4, 9
    assert found.mean == pytest.approx(5)
    assert found.high - found.mean == pytest.approx(4.302653 * math.sqrt(13) / math.sqrt(3))
    assert paired_difference([1.0], [0.0])[1:3] == (-math.inf, math.inf)


def test_intervals_cover_the_true_value_as_often_as_they_say():
    generator = np.random.default_rng(0)
    draws = generator.normal(1.0, 2.0, (2000, 4))
    inside = [found.low <= 1.0 <= found.high for found in map(estimate_mean, draws)]
    assert 0.935 < np.mean(inside) < 0.965
    ahead = [
        low <= new <= high
        for (low, high), new in zip(map(prediction_interval, draws), generator.normal(1, 2, 2000), strict=True)
    ]
    assert 0.935 < np.mean(ahead) < 0.965


def test_shares_have_the_exact_interval():
    assert estimate_share(7, 7)[1:3] == pytest.approx((0.5903836, 1.0))
    assert estimate_share(2, 7)[1:3] == pytest.approx((0.0366926, 0.7095791), abs=1e-6)
    assert estimate_share(0, 3)[1:3] == pytest.approx((0.0, 0.7075982), abs=1e-6)


def test_a_trend_of_few_runs_has_a_wide_interval():
    assert estimate_trend([1, 2, 3], [1, 2, 3])[:3] == (pytest.approx(1), -1.0, 1.0)
    assert estimate_trend([1, 2, 3, 4], [1, 2, 3, 4]).low < 0 < estimate_trend(range(12), range(12)).low
    assert estimate_trend([1, 1, 1, 1], [1, 2, 3, 4])[:3] == (0.0, -1.0, 1.0)


def test_the_stated_number_of_seeds_detects_the_stated_effect_four_times_in_five():
    generator, deviation, effect = np.random.default_rng(1), 3.0, 2.4
    count = count_seeds_to_decide(deviation, effect)
    assert detectable_effect(deviation, count) <= effect < detectable_effect(deviation, count - 1)
    found = [estimate_mean(row).low > 0 for row in generator.normal(effect, deviation, (1500, count))]
    assert 0.75 < np.mean(found) < 0.87
    assert count_seeds_to_decide(math.nan, 1.0) is None
    assert count_seeds_to_decide(1.0, 1e-6) is None
    assert detectable_effect(1.0, 1) == math.inf


def test_the_largest_excess_is_that_of_the_value_farthest_outside():
    assert largest_excess([0.2, 0.5], 0, 1) == pytest.approx(-0.2)
    assert largest_excess([-0.5, 1.25], 0, 1) == pytest.approx(0.5)


def test_a_nan_is_outside_every_interval_and_correlates_with_nothing():
    assert largest_excess([0.5, math.nan], 0, 1) == largest_excess([math.nan, 0.5], 0, 1) == math.inf
    assert math.isnan(rank_correlation([1, 2, 3], [1, 2, math.nan]))


def test_an_outlier_is_above_twice_the_median():
    assert not has_outlier([124, 120, 149])
    assert has_outlier([3, 3, 7])


# From an estimate to a verdict


def plant(effect, seeds, *, deviation=1.0, draws=400, seed=0):
    """Return differences of paired runs with a planted effect: one row per repetition of the experiment."""
    return np.random.default_rng(seed).normal(effect, deviation, (draws, seeds))


def test_a_planted_effect_holds_its_absence_fails_and_noise_is_undecided():
    def shares(effect, seeds, deviation=1.0):
        outcomes = [
            judge_increase(estimate_mean(row), 2.0).outcome for row in plant(effect, seeds, deviation=deviation)
        ]
        return {outcome: outcomes.count(outcome) / len(outcomes) for outcome in set(outcomes)}

    assert shares(4.0, 5)[Outcome.HOLDS] > 0.99  # an effect of four deviations, five seeds
    assert shares(0.0, 10)[Outcome.FAILS] > 0.95  # none, ten seeds: two deviations, which matter, are excluded
    assert shares(0.0, 10).get(Outcome.HOLDS, 0) < 0.05
    assert shares(1.0, 3, deviation=4.0)[Outcome.UNDECIDED] > 0.85  # three noisy seeds
    assert shares(4.0, 1) == {Outcome.UNDECIDED: 1.0}  # one seed


def test_an_undecided_verdict_says_what_would_decide():
    verdict = judge_increase(estimate_mean([3.0, -2.0, 1.0], "points"), 1.2)
    assert verdict.outcome == Outcome.UNDECIDED
    assert verdict.needs == (
        "3 seeds could have detected 7.8 points (with 80 % probability); 37 seeds would detect 1.2 points"
    )
    assert "3 are the least that can decide" in judge_increase(estimate_mean([3.0]), 1.2).needs
    assert judge_increase(estimate_mean([3.0, 3.1, 2.9]), 1.2).needs == ""


def test_absence_equality_and_limits_are_judged_by_the_whole_interval():
    tight, wide, large = Estimate(0.1, -0.3, 0.5, 5), Estimate(0.1, -3, 3.2, 3), Estimate(4.0, 3.0, 5.0, 5)
    assert [judge_absence(found, 1).outcome for found in (tight, wide, large)] == ["holds", "undecided", "fails"]
    assert [judge_equal(found, 1).outcome for found in (tight, wide, large)] == ["holds", "undecided", "fails"]
    assert [judge_limit(found, below=1).outcome for found in (tight, wide, large)] == ["holds", "undecided", "fails"]
    assert [judge_limit(found, above=1).outcome for found in (tight, wide, large)] == ["fails", "undecided", "holds"]
    assert judge_limit(Estimate(100, 100, 100, 3), above=99).outcome == Outcome.HOLDS


def test_a_statement_about_every_run_fails_with_one_exception_and_needs_three_runs():
    assert judge_every([True] * 3, "").outcome == Outcome.HOLDS
    assert judge_every([True] * 2, "").outcome == Outcome.UNDECIDED
    assert judge_every([True, True, False], "").outcome == judge_every([False], "").outcome == Outcome.FAILS
    assert judge_trained([False], "").outcome == Outcome.UNDECIDED  # a network that the paper trained once
    assert judge_trained([True, True, False], "").outcome == Outcome.FAILS
    assert judge_share(6, 8, 0.75, "").outcome == Outcome.UNDECIDED
    assert judge_share(40, 40, 0.75, "").outcome == Outcome.HOLDS
    assert judge_share(1, 40, 0.75, "").outcome == Outcome.FAILS


def test_a_number_of_one_network_is_compared_with_the_range_of_ours():
    assert judge_observation([1.0, 1.2, 0.9, 1.1], 1.3).outcome == Outcome.HOLDS
    assert judge_observation([1.0, 1.2, 0.9, 1.1], 3.0).outcome == Outcome.FAILS
    assert judge_observation([1.0], 3.0).outcome == Outcome.UNDECIDED


def test_a_claim_of_several_parts_is_as_weak_as_its_weakest():
    holds, fails = decide(True, "a", runs=9), decide(False, "b", runs=5)
    undecided = judge_increase(estimate_mean([1.0]), 1)
    assert combine([holds, holds]).outcome == Outcome.HOLDS
    assert combine([holds, undecided]).outcome == Outcome.UNDECIDED
    assert combine([undecided, fails, holds])[:2] == (Outcome.FAILS, f"{undecided.why}; b; a")
    assert combine([holds, not_testable("c")]).outcome == Outcome.NOT_TESTABLE
    assert combine([holds, fails]).runs == 5


# Rules for all results


def test_an_incomplete_result_counts_as_not_run(tmp_path):
    run_smoke(tmp_path, "table:error_summary", shard="1/2")
    judged = compare.judge(load_results()["table:error_summary"], RowStore(tmp_path))
    assert judged.scale is None
    assert {verdict.outcome for _, verdict in judged.verdicts} == {Outcome.NOT_RUN}
    assert "5 of 10 points left" in judged.verdicts[0][1].why


def store_rows(folder, name, scale, accuracy, **only):
    """Store rows of a result whose accuracy is a function of the point; only points with the given settings."""
    store, result = RowStore(folder), load_results()[name]
    for point in result.recipe.points(scale):
        settings = {**point.settings, "seed": point.seed}
        if all(settings.get(key) in values for key, values in only.items()):
            store.add(result, scale, make_row(result, point, scale, numbers=accuracy(point)))
    return {claim.id: verdict for claim, verdict in compare.judge(result, store).verdicts}


def test_a_claim_is_judged_on_the_points_it_needs_at_the_largest_scale_that_has_them(tmp_path):
    name, level = "table:non-linear_selective_results", {0.0: 40.0, 0.0125: 85.0, 0.125: 30.0}

    def accuracy(point):
        return {"accuracy": level.get(point.settings["beta"], 50.0) + 0.1 * point.seed, "parameters": 9}

    found = store_rows(tmp_path, name, "laptop", lambda point: {"accuracy": 50.0 + point.seed % 2, "parameters": 9})
    assert (found["beta"].outcome, found["beta"].scale) == (Outcome.UNDECIDED, "laptop")
    only = {"beta": [0.0, 0.0125], "rate": [0.001], "decay": [0.1], "model": [None]}
    found = store_rows(tmp_path, name, "paper", accuracy, **only, seed=[0])
    assert (found["beta"].outcome, found["beta"].scale, found["beta"].runs) == (Outcome.UNDECIDED, "paper", 1)
    found = store_rows(tmp_path, name, "paper", accuracy, **only, seed=[1, 2])
    assert (found["beta"].outcome, found["beta"].scale, found["beta"].runs) == (Outcome.HOLDS, "paper", 3)
    assert found["doubles"].outcome == Outcome.HOLDS
    assert found["hawk"].outcome == Outcome.NOT_TESTABLE  # only smaller scales are complete, and they have no Hawk


def test_no_accuracy_is_the_double_of_one_above_half(tmp_path):
    found = store_rows(
        tmp_path,
        "table:non-linear_selective_results",
        "paper",
        lambda point: {"accuracy": 80.0 + point.seed, "parameters": 9},
        beta=[0.0],
        rate=[0.001],
        decay=[0.1],
    )
    assert found["doubles"].outcome == Outcome.FAILS
    assert found["doubles"].cause == "ours"


def test_at_a_reduced_scale_a_small_effect_does_not_refute_the_papers(tmp_path):
    accuracy = lambda point: {"accuracy": [50 + point.settings["beta"] * (point.seed - 1), 20, 17]}  # noqa: E731
    found = store_rows(tmp_path, "table:s5_8_results", "laptop", accuracy)
    assert found["linear"].outcome == Outcome.UNDECIDED
    assert "which is that of another size" in found["linear"].needs


def test_rows_of_one_table_count_for_the_other_where_the_settings_are_the_same(tmp_path):
    accuracy = lambda point: {"accuracy": [30 + 0.1 * point.seed, 1, 1]}  # noqa: E731
    only = {"spectrum": ["S4D-Real"], "sparsity": [0.0], "negative": [True], "beta": [0.0]}
    store_rows(tmp_path, "table:s5_8_results", "paper", accuracy, **only)
    baselines = load_results()["table:baselines_state_tracking"]
    found = {claim.id: verdict for claim, verdict in compare.judge(baselines, RowStore(tmp_path)).verdicts}
    assert (found["linear"].outcome, found["linear"].scale, found["linear"].runs) == (Outcome.HOLDS, "paper", 3)


def test_runs_with_scalar_input_count_before_those_with_tokens(tmp_path):
    def snapshots(point):
        low = -5.0 if point.settings.get("encoding") else -2.0
        last = {"log_eigenvalues": [-0.01, low], "exponents": [-0.02, low], "certified": [-9, 9]}
        return {"snapshots": [last] * 3, "accuracy": 99.0}

    name = "fig:beta_trained_ablation"
    found = store_rows(tmp_path, name, "paper", snapshots, encoding=[None])
    assert "-2.00" in found["spread"].why
    found = store_rows(tmp_path, name, "paper", snapshots, encoding=["scalar"], beta=[1.0])
    assert "-2.00" in found["spread"].why  # not yet complete
    found = store_rows(tmp_path, name, "paper", snapshots, encoding=["scalar"], beta=[0.0125, 0.125])
    assert "-5.00" in found["spread"].why
    assert found["learned"].outcome == Outcome.HOLDS


def test_every_claim_is_untestable_on_rows_with_nan_and_no_figure_is_made_from_them(tmp_path, capsys):
    result = load_results()["fig:copy_memory"]
    run_smoke(tmp_path, result.name)
    path = RowStore(tmp_path).path(result, "smoke")
    row = json.loads(path.read_text())
    row["numbers"]["loss"] = "nan"
    path.write_text(json.dumps(row) + "\n")
    judged = compare.judge(result, RowStore(tmp_path))
    why = "the rows are invalid: NaN in 1 of 1 runs, the first with symbols 8, spread False, seed 0"
    assert [(v.outcome, v.why) for _, v in judged.verdicts] == [(Outcome.NOT_TESTABLE, why)]
    report.run(report.Report(rows=tmp_path, output=tmp_path / "report"))
    assert not list((tmp_path / "report" / "figures").iterdir())
    del row["numbers"]["loss"], row["numbers"]["targets"]
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ReproductionError, match=r"lack what the test of 'length' needs \(KeyError: 'targets'\)"):
        compare.judge(result, RowStore(tmp_path))


def test_statements_of_the_abstract_are_decided_at_the_papers_scale_only(tmp_path):
    accuracy = lambda point: {"accuracy": [50 + 10 * (point.settings["beta"] or 0) + point.seed, 20, 17]}  # noqa: E731
    store_rows(tmp_path, "table:s5_8_results", "laptop", accuracy)
    result = load_results()["table:s5_8_results"]

    def judge_tracking():
        judged = compare.judge_headlines([compare.judge(result, RowStore(tmp_path))])
        return next(one.verdict for one in judged if one.headline.id == "tracking")

    assert judge_tracking().outcome == Outcome.UNDECIDED
    main = {"spectrum": ["S4D-Real", None], "sparsity": [0.0, None], "negative": [True, None], "beta": [0.0, 4.0, None]}
    store_rows(tmp_path, "table:s5_8_results", "paper", accuracy, **main)
    assert judge_tracking().outcome == Outcome.HOLDS
    assert {(r, c) for h in load_headlines() for r, c in h.claims} <= {
        (name, claim.id) for name, result in load_results().items() for claim in result.claims
    }


def test_rows_of_the_scale_paper_that_are_smaller_count_as_reduced(tmp_path):
    def history(point):
        low = -6.0 if point.settings["negative"] == 0 else -0.1
        spectrum = {"log_eigenvalues": [-0.01, low], "exponents": [-0.02, low], "certified": [-9, 9], "spread": 1.0}
        counts = {"Quasi": 5, "Forward": 5, "Conv": 5}
        numbers = {"shift mean": 0.0, "shift deviation": 1.0, "shift counts": [1], "in blocks": counts}
        return {"snapshots": [{**spectrum, **numbers, "iterations": {"1": counts}}] * 8, "accuracy": 99.0}

    name = "fig:trained_pos_vs_neg_eig"
    short = store_rows(tmp_path, name, "paper", history, encoding=["scalar"], length=[64])["aligned"]
    assert (short.scale, short.reduction, short.is_at_size) == ("paper", "64 of 1024 steps", False)
    assert compare.describe_scale(short) == "scale paper with 64 of 1024 steps, 3 runs"
    tally = compare.tally_verdicts([compare.judge(load_results()[name], RowStore(tmp_path))])
    assert tally[compare.AT_SIZE].total() == 0
    assert tally[compare.REDUCED].total() == 5
    full = store_rows(tmp_path, name, "paper", history, encoding=["scalar"], length=[1024])["aligned"]
    assert full.is_at_size


def test_the_first_screen_shows_numbers_scales_and_causes(tmp_path):
    accuracy = lambda point: {"accuracy": 95.0 + 0.1 * point.seed}  # noqa: E731
    name = "table:non-linear_selective_results"
    store_rows(tmp_path, name, "paper", accuracy, beta=[0.0], rate=[0.001], decay=[0.1])
    judged = compare.judge_headlines([compare.judge(load_results()[name], RowStore(tmp_path))])
    copy = next(one for one in judged if one.headline.id == "selective-copy")
    assert "twice the accuracy of β = 0: 190 [190, 191] %" in copy.ours
    assert copy.ours.startswith("β = 0.0125 over β = 0: not run;")
    assert copy.scales == "paper, 3 runs; 1 of 2 claims not tested"
    assert describe_outcome(copy.verdict) == "fails (our set-up differs)"
    text = describe_headline(copy)
    assert "What came out.* β = 0.0125 minus β = 0: not run." in text
    assert "*Verdict.* Fails (our set-up differs): our β = 0 reaches" in text


def test_an_estimate_of_one_run_has_no_interval():
    assert str(estimate_mean([2.0], "points")) == "+2 points (no interval)"
    assert str(estimate_mean([2.0, 2.5], "points")) == "+2.25 [-0.927, +5.43] points"


# Checks of recipes


def test_the_verdicts_on_state_tracking_follow_the_accuracies():
    name = "table:s5_8_results"

    def judge_subset(numbers, id):
        """Judge one claim on the points it needs, with three seeds each."""
        check = load_results()[name].recipe.checks[id]
        rows = make_laptop_rows(name, numbers, seeds=3)
        return check.test(
            type(rows)([r for r in rows if all(r.settings.get(k) in v for k, v in check.subset.items())])
        ).outcome

    def increasing(point):
        level = {0.0: 60, 0.0125: 61, 0.125: 65, 1.0: 90, 4.0: 99}[point.settings["beta"]]
        level += 5 * point.settings["negative"] - point.settings["sparsity"] + 0.01 * point.seed
        return {"accuracy": [level, level - 20, 40.0]}

    held = [judge_subset(increasing, id) for id in ("beta", "linear", "negative")]
    assert held == [Outcome.HOLDS] * 3
    assert judge_subset(increasing, "sparsity") == Outcome.FAILS
    assert judge_subset(increasing, "exclusive") == Outcome.NOT_TESTABLE  # at the ceiling
    assert judge_subset(increasing, "extrapolates") == Outcome.UNDECIDED  # eight spectra of eight

    def exclusive(point):
        settings = point.settings
        alone = bool(settings["sparsity"]) != settings["negative"] and settings["beta"] == 4
        level = 50 + 30 * alone + settings["beta"] + 8 * bool(settings["sparsity"]) + 0.1 * point.seed
        return {"accuracy": [level, 20 + 60 * (settings["spectrum"] == "Linspace") + 0.1 * point.seed, 30]}

    assert [judge_subset(exclusive, id) for id in ("exclusive", "sparsity", "furthest")] == [Outcome.HOLDS] * 3

    def noisy(point):
        return {"accuracy": [60 + 20 * ((37 * point.seed + 11 * round(10 * point.settings["beta"])) % 7), 20, 17.0]}

    assert judge_subset(noisy, "linear") == Outcome.UNDECIDED
    saturated = judge_subset(lambda point: {"accuracy": [100, 100, 99.5]}, "furthest")
    assert saturated == Outcome.NOT_TESTABLE


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
    assert Outcome.HOLDS not in {verdict.outcome for verdict in verdicts.values()}
    assert verdicts["magnitude"].why == "largest ratio 50.33"
    assert load_results()[name].recipe.table(rows).rows[-1] == [4096, "nan", "nan", "nan", "4", "4", ">150"]
    name = "fig:eigenvalue_dt_min_max"
    rows = make_laptop_rows(name, lambda point: {"Quasi": [2, 2], "Forward": [2, 2], "Conv": [-1, -1]})
    found = judge_all(name, rows)
    assert found.pop("outliers") == Outcome.HOLDS
    assert Outcome.HOLDS not in found.values()


def make_damping_rows(accuracy, whole, damped, blocks, seeds=3):
    """Return rows of fig:trained_damping from the counts over epochs without damping, with damping, and in blocks."""

    def numbers(point):
        lowest = -0.04 if point.settings["negative"] else -7.0 + 0.1 * point.seed
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

    return make_laptop_rows("fig:trained_damping", numbers, seeds=seeds)


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


def test_trained_figures_with_one_seed_are_undecided():
    counts = same_counts(3, 3, 3, 3, 3, 256, 3), same_counts(*[30] * 7), same_counts(*[2] * 7)
    rows = make_damping_rows(95.0, *counts, seeds=1)
    assert set(judge_all("fig:trained_damping", rows).values()) == {Outcome.UNDECIDED}
    found = load_results()["fig:trained_pos_vs_neg_eig"].recipe.checks
    assert {found[id].test(rows).outcome for id in ("aligned", "learned", "minimum", "spread")} == {Outcome.UNDECIDED}


def test_a_loss_of_accuracy_is_judged_only_below_the_ceiling():
    name = "table:s5_32_results"

    def judge_levels(**levels):
        numbers = lambda point: {"accuracy": [levels.get(point.settings["variant"], 100.0) - 0.01 * point.seed] * 3}  # noqa: E731
        return judge_all(name, make_laptop_rows(name, numbers))

    assert judge_levels()["dot"] == judge_levels()["mitigates"] == judge_levels()["layer-norm"] == Outcome.NOT_TESTABLE
    assert judge_levels(dot=80.0)["dot"] == judge_levels(dot=80.0)["mitigates"] == Outcome.HOLDS
    assert judge_levels(plain=70.0, dot=80.0)["dot"] == Outcome.FAILS
    assert judge_levels(**{"LN": 20.0, "LN + ReLU": 50.0})["mitigates"] == Outcome.FAILS
    assert judge_levels(plain=49.0)["doubles"] == Outcome.HOLDS


def test_the_comparison_of_copy_tasks_needs_differences_above_the_noise():
    def judge_copy_memory(more, gain):
        """Judge runs where Copy Memory takes `more` iterations than Selective Copy and a trainable β adds `gain`."""

        def numbers(point):
            copy, trainable = point.settings["task"] == "Copy Memory", point.settings["beta"] == "trainable"
            jitter = 0.1 * (point.seed - 1) * (1 if copy else -1)
            layer = {"iterations": [3 + more * copy + jitter], "log_eigenvalues": [0.0, -0.1 if copy else -0.2]}
            return {"after": [layer, layer], "accuracy": 90 + gain * trainable + 0.1 * point.seed * (1 - 2 * trainable)}

        outcomes = []
        for name, claim in (("fig:sel_copy_deer", "selective"), ("table:trainable_beta_sc", "not-copy")):
            check = load_results()[name].recipe.checks[claim]
            outcomes.append(check.test(make_laptop_rows(name, numbers)).outcome)
        return tuple(outcomes)

    assert judge_copy_memory(0.01, 0.1) == (Outcome.UNDECIDED, Outcome.HOLDS)
    assert judge_copy_memory(1.0, 20.0) == (Outcome.HOLDS, Outcome.FAILS)


def test_a_bound_that_is_broken_is_reported_as_such():
    numbers = {"gap": 0.5, "shift": 0.5, "largest": 1.0, "spread": 0.9, "condition": 2.0, "attained": 0.0}
    rows = make_laptop_rows("lemma:J_singular_vals", lambda point: numbers)
    checks = load_results()["lemma:J_singular_vals"].recipe.checks
    assert checks["singular"].test(rows).outcome == Outcome.FAILS  # 0.5 > 8 · 0.01
    assert checks["sharp"].test(rows).outcome == Outcome.FAILS
    small = make_laptop_rows("lemma:J_singular_vals", lambda point: {**numbers, "gap": 0.01, "shift": 0.01})
    assert checks["singular"].test(small).outcome == checks["general"].test(small).outcome == Outcome.HOLDS


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
