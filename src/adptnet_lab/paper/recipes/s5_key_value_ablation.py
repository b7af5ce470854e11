"""S5 word problem of length 32: ReLU, LayerNorm and a fixed dot product of key and value (table:s5_32_results)."""

from typing import Any

import torch

from ..recipe import Check, ClaimVerdict, GridPoint, Outcome, Recipe, Rows, Scale, Table, decide
from ..scoring import CEILING, mean_accuracy
from ..settings.s5_word_problem import SIZES, train_on_word_problem

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
    """With ReLU the mean accuracy is at least 99 % at the training length and 90 % at twice that."""
    holds = _mean_accuracy(rows, "ReLU") >= 99 and _mean_accuracy(rows, "ReLU", 1) >= 90
    return decide(holds, _format_accuracies(rows, "plain", "ReLU"))


def _check_dot(rows: Rows) -> ClaimVerdict:
    """Without ReLU, a fixed dot product lowers the mean accuracy at the training length, by less than half.

    Not testable if both are above 99 %.
    """
    plain, fixed = _mean_accuracy(rows, "plain"), _mean_accuracy(rows, "dot")
    text = _format_accuracies(rows, "plain", "dot")
    if min(plain, fixed) > CEILING:
        return ClaimVerdict(Outcome.NOT_TESTABLE, f"accuracies are saturated: {text}")
    return decide(plain / 2 < fixed < plain, text)


def _check_layer_norm(rows: Rows) -> ClaimVerdict:
    """Without ReLU, LayerNorm lowers the mean accuracy at the training length to less than half."""
    holds = _mean_accuracy(rows, "LN") < _mean_accuracy(rows, "plain") / 2
    return decide(holds, _format_accuracies(rows, "plain", "LN"))


def _check_mitigates(rows: Rows) -> ClaimVerdict:
    """With ReLU, the networks with LayerNorm and with a fixed dot product stay at 99 % or above at the training length.

    Not testable if both are above 99 % without ReLU.
    """
    if min(_mean_accuracy(rows, "LN"), _mean_accuracy(rows, "dot")) > CEILING:
        text = _format_accuracies(rows, "LN", "dot")
        return ClaimVerdict(Outcome.NOT_TESTABLE, f"there is no loss to mitigate: {text}")
    holds = min(_mean_accuracy(rows, "LN + ReLU"), _mean_accuracy(rows, "ReLU + dot")) >= 99
    return decide(holds, _format_accuracies(rows, "LN", "LN + ReLU", "dot", "ReLU + dot"))


def _make_table(rows: Rows) -> Table:
    lines = []
    for name, change in VARIANTS.items():
        marks = ["✓" if key in change else "×" for key in ("layer_norm", "relu", "dot")]
        best = max(row.numbers["accuracy"][2] for row in rows.where(variant=name))
        means = (f"{_mean_accuracy(rows, name, place):.1f}" for place in range(3))
        lines.append([*marks, *means, f"{best:.1f}"])
    return Table(["LN", "ReLU", "<k, v>", "1×", "2×", "4×", "best 4×"], lines)


RECIPES = {
    "table:s5_32_results": Recipe(
        version=1,
        points=_make_points,
        run=train_on_word_problem,
        checks={
            "relu": Check(_check_relu, "laptop"),
            "dot": Check(_check_dot, "laptop"),
            "layer-norm": Check(_check_layer_norm, "laptop"),
            "mitigates": Check(_check_mitigates, "laptop"),
        },
        table=_make_table,
        cost={"smoke": "1 s", "laptop": "45 min", "paper": "a GPU for a day"},
        dtype=torch.float32,
    ),
}
