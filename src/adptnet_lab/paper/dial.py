"""The data of the β dial: what the rows say at each β, as JSON for the page."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .compare import Judged
from .recipes import beta_dial, deer_iterations, state_tracking

__all__ = ["dial"]


def dial(judged: Sequence[Judged]) -> dict[str, Any] | None:
    """None if the rows of fig:beta_effect_interactions are not there; accuracies only if the word problem was run."""
    found = {one.result.name: one for one in judged if one.scale is not None and not one.spoilt}
    turned = found.get(beta_dial.LABEL)
    if turned is None:
        return None
    rows = turned.rows
    first = rows[0].numbers
    return {
        "betas": rows.values("beta"),
        "key": first["key"],
        "value": first["value"],
        "log_eigenvalues": first["log_eigenvalues"],
        "exponents": [_finite(row.numbers["exponents"]) for row in rows],
        "certified": [_finite(row.numbers["certified"]) for row in rows],
        "iterations": {
            method: [_mean(row.numbers["iterations"][method]) for row in rows] for method in deer_iterations.METHODS
        },
        "accuracy": _accuracy(found.get(state_tracking.LABEL)),
        "scale": turned.scale,
        "sizes": {key: rows[0].settings[key] for key in ("steps", "length", "width")},
    }


def _finite(values: list[float]) -> list[float | None]:
    """None where it is infinite, which JSON cannot hold."""
    return [value if np.isfinite(value) else None for value in values]


def _mean(counts: list[int]) -> float | None:
    """None if a sample did not converge."""
    return float(np.mean(counts)) if min(counts) > 0 else None


def _accuracy(judged: Judged | None) -> dict[str, Any] | None:
    """Mean accuracy at 1, 2 and 4 times the length, by β, with S4D-Real and both signs."""
    if judged is None or judged.scale == "smoke":
        return None
    rows = judged.rows.where(spectrum="S4D-Real", sparsity=0.0, negative=True)
    means = {b: np.mean(rows.where(beta=b).numbers("accuracy"), axis=0).tolist() for b in rows.values("beta")}
    return {"betas": list(means), "means": list(means.values()), "group": rows[0].settings["group"]}
