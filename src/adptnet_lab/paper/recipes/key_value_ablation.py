"""ReLU, LayerNorm and a fixed dot product of key and value on a word problem of length 32 (table:s5_32_results)."""

from typing import Any

import torch

from ..recipe import Check, Outcome, Point, Recipe, Rows, Scale, Table, Verdict
from ..scoring import CEILING, mean_accuracy
from .state_tracking import SIZES, run

# LayerNorm, ReLU, k·v held at one half: the rows of the table
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "LN": {"layer_norm": True},
    "ReLU": {"relu": True},
    "dot": {"dot": 0.5},
    "LN + ReLU": {"layer_norm": True, "relu": True},
    "ReLU + dot": {"relu": True, "dot": 0.5},
}


def _points(scale: Scale) -> list[Point]:
    shared: dict[str, Any] = {"beta": 4.0, "spectrum": "Linspace", "sparsity": 0.75, "negative": True}
    shared |= SIZES[scale] | {"length": 4 if scale == "smoke" else 32}
    if scale == "laptop":
        shared["steps"] = 2000
    seeds = 1 if scale == "smoke" else 3
    return [
        Point({"variant": name, **change, **shared}, seed) for name, change in VARIANTS.items() for seed in range(seeds)
    ]


def _at(rows: Rows, variant: str, place: int = 0) -> float:
    return mean_accuracy(rows.where(variant=variant), place)


def _shown(rows: Rows, *variants: str) -> str:
    each = (f"{name} " + "/".join(f"{_at(rows, name, place):.1f}" for place in range(3)) for name in variants)
    return "; ".join(each) + " % at 1, 2, 4 times the length"


def _relu(rows: Rows) -> Verdict:
    """With ReLU the mean accuracy is at least 99 % at the training length and 90 % at twice that."""
    return Verdict.of(_at(rows, "ReLU") >= 99 and _at(rows, "ReLU", 1) >= 90, _shown(rows, "plain", "ReLU"))


def _dot(rows: Rows) -> Verdict:
    """Without ReLU, a fixed dot product lowers the mean accuracy at the training length, by less than half.

    Not testable where both are above 99 %.
    """
    plain, held = _at(rows, "plain"), _at(rows, "dot")
    if min(plain, held) > CEILING:
        return Verdict(Outcome.NOT_TESTABLE, "there is nothing to lose: " + _shown(rows, "plain", "dot"))
    return Verdict.of(plain / 2 < held < plain, _shown(rows, "plain", "dot"))


def _layer_norm(rows: Rows) -> Verdict:
    """Without ReLU, LayerNorm lowers the mean accuracy at the training length to less than half."""
    return Verdict.of(_at(rows, "LN") < _at(rows, "plain") / 2, _shown(rows, "plain", "LN"))


def _mitigates(rows: Rows) -> Verdict:
    """With ReLU both stay at 99 % or above at the training length.

    Not testable where both are above that without ReLU.
    """
    if min(_at(rows, "LN"), _at(rows, "dot")) > CEILING:
        return Verdict(Outcome.NOT_TESTABLE, "there is nothing to mitigate: " + _shown(rows, "LN", "dot"))
    holds = min(_at(rows, "LN + ReLU"), _at(rows, "ReLU + dot")) >= 99
    return Verdict.of(holds, _shown(rows, "LN", "LN + ReLU", "dot", "ReLU + dot"))


def _table(rows: Rows) -> Table:
    lines = []
    for name, change in VARIANTS.items():
        marks = ["✓" if key in change else "×" for key in ("layer_norm", "relu", "dot")]
        best = max(row.numbers["accuracy"][2] for row in rows.where(variant=name))
        lines.append([*marks, *(f"{_at(rows, name, place):.1f}" for place in range(3)), f"{best:.1f}"])
    return Table(["LN", "ReLU", "<k, v>", "1×", "2×", "4×", "best 4×"], lines)


RECIPES = {
    "table:s5_32_results": Recipe(
        version=1,
        points=_points,
        run=run,
        checks={
            "relu": Check(_relu, "laptop"),
            "dot": Check(_dot, "laptop"),
            "layer-norm": Check(_layer_norm, "laptop"),
            "mitigates": Check(_mitigates, "laptop"),
        },
        table=_table,
        cost={"smoke": "1 s", "laptop": "45 min", "paper": "a GPU for a day"},
        dtype=torch.float32,
    ),
}
