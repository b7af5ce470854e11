"""S5 word problem of length 32: ReLU, LayerNorm and a fixed dot product of key and value (table:s5_32_results)."""

from typing import Any

import torch

from ..evidence import Estimate, paired_difference
from ..recipe import Check, GridPoint, Recipe, Rows, Scale, Table
from ..scoring import CEILING, estimate_accuracy, format_estimate, mean_accuracy
from ..settings.s5_word_problem import OPTIONS, SIZES, train_on_word_problem
from ..verdicts import ClaimVerdict, combine, judge_increase, judge_limit, not_testable

# the rows of the table: LayerNorm, ReLU, k·v fixed at one half
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "LN": {"layer_norm": True},
    "ReLU": {"relu": True},
    "dot": {"dot": 0.5},
    "LN + ReLU": {"layer_norm": True, "relu": True},
    "ReLU + dot": {"relu": True, "dot": 0.5},
}


def _make_points(scale: Scale) -> list[GridPoint]:
    shared: dict[str, Any] = {"beta": 4.0, "spectrum": "Linspace", "sparsity": 0.75, "negative": True}
    shared |= SIZES[scale] | {"length": 4 if scale == "smoke" else 32}
    if scale == "laptop":
        shared["steps"] = 2000
    if scale == "paper":
        shared["stop"] = True  # when the accuracy at twice the training length is perfect, as in the paper
    seeds = 1 if scale == "smoke" else 3
    return [
        GridPoint({"variant": name, **change, **shared}, seed)
        for name, change in VARIANTS.items()
        for seed in range(seeds)
    ]


def _mean_accuracy(rows: Rows, variant: str, place: int = 0) -> float:
    return mean_accuracy(rows.where(variant=variant), place)


def _format_accuracies(rows: Rows, *variants: str) -> str:
    each = (
        f"{name} " + "/".join(f"{_mean_accuracy(rows, name, place):.1f}" for place in range(3)) for name in variants
    )
    return "; ".join(each) + " % at 1, 2, 4 times the length"


def _check_relu(rows: Rows) -> ClaimVerdict:
    """With ReLU the mean accuracy has an interval above 99 % at the training length and above 90 % at twice that."""
    parts = [judge_limit(estimate_accuracy(rows, place), above=least) for place, least in ((0, 99.0), (1, 90.0))]
    return combine(parts, _format_accuracies(rows, "ReLU"))


def _difference(rows: Rows, first: str, second: str) -> Estimate:
    """Return the accuracy at the training length of one variant minus that of another, paired by seed."""
    values = [{r.seed: r.numbers["accuracy"][0] for r in rows.where(variant=name)} for name in (first, second)]
    seeds = sorted(values[0].keys() & values[1].keys())
    return paired_difference([values[0][s] for s in seeds], [values[1][s] for s in seeds], "points")


def _check_doubles(rows: Rows) -> ClaimVerdict:
    """The accuracy with ReLU minus that without, paired by seed, has an interval above 25 points, half of the paper's
    difference of 50.8."""
    return judge_limit(_difference(rows, "ReLU", "plain"), above=25, why=_format_accuracies(rows, "plain", "ReLU"))


def _check_dot(rows: Rows) -> ClaimVerdict:
    """Without ReLU, the accuracy at the training length minus that with a fixed dot product, paired by seed, has an
    interval above 0. Three points matter, half of the paper's loss.

    Not testable if both are above 99 %.
    """
    text = _format_accuracies(rows, "plain", "dot")
    if min(_mean_accuracy(rows, "plain"), _mean_accuracy(rows, "dot")) > CEILING:
        return not_testable(f"accuracies are saturated: {text}")
    return judge_increase(_difference(rows, "plain", "dot"), 3, text)


def _check_layer_norm(rows: Rows) -> ClaimVerdict:
    """Without ReLU, the accuracy at the training length minus that with LayerNorm, paired by seed, has an interval
    above 22 points, half of the paper's loss.

    Not testable if both are above 99 %.
    """
    text = _format_accuracies(rows, "plain", "LN")
    if min(_mean_accuracy(rows, "plain"), _mean_accuracy(rows, "LN")) > CEILING:
        return not_testable(f"accuracies are saturated: {text}")
    return judge_limit(_difference(rows, "plain", "LN"), above=22, why=text)


def _check_mitigates(rows: Rows) -> ClaimVerdict:
    """With ReLU, the mean accuracies with LayerNorm and with a fixed dot product have intervals above 99 % at the
    training length.

    Not testable if both are above 99 % without ReLU.
    """
    if min(_mean_accuracy(rows, "LN"), _mean_accuracy(rows, "dot")) > CEILING:
        return not_testable(f"there is no loss to mitigate: {_format_accuracies(rows, 'LN', 'dot')}")
    parts = [judge_limit(estimate_accuracy(rows.where(variant=n)), above=99) for n in ("LN + ReLU", "ReLU + dot")]
    return combine(parts, _format_accuracies(rows, "LN", "LN + ReLU", "dot", "ReLU + dot"))


def _make_table(rows: Rows) -> Table:
    lines = []
    for (name,), some in rows.groups("variant").items():
        marks = ["✓" if key in VARIANTS[name] else "×" for key in ("layer_norm", "relu", "dot")]
        best = max(row.numbers["accuracy"][2] for row in some)
        means = (format_estimate(estimate_accuracy(some, place)) for place in range(3))
        lines.append([*marks, *means, f"{best:.1f}", len(some)])
    lengths = [f"L={factor * rows[0].settings['length']}" for factor in (1, 2, 4)]
    return Table(["LN", "ReLU", "<k, v>", *lengths, f"best {lengths[-1]}", "seeds"], lines)


_CEILING = "S3 is at the ceiling of 100 % in every variant"


def _make_check(test: Any, *variants: str) -> Check:
    return Check(test, "paper", {"variant": variants}, _CEILING)


RECIPES = {
    "table:s5_32_results": Recipe(
        version=1,
        points=_make_points,
        run=train_on_word_problem,
        checks={
            "relu": _make_check(_check_relu, "ReLU"),
            "doubles": _make_check(_check_doubles, "plain", "ReLU"),
            "dot": _make_check(_check_dot, "plain", "dot"),
            "layer-norm": _make_check(_check_layer_norm, "plain", "LN"),
            "mitigates": _make_check(_check_mitigates, "LN", "dot", "LN + ReLU", "ReLU + dot"),
        },
        table=_make_table,
        cost={"smoke": "1 s", "laptop": "45 min", "paper": "165 h; 9.2 h a network"},
        dtype=torch.float32,
        options=OPTIONS,
    ),
}
