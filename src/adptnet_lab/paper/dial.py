"""Data of the β slider (the "dial") on the report page: the stored numbers at each β, as JSON."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .compare import JudgedResult
from .settings.deer_networks import METHODS

__all__ = ["collect_dial_data"]

_BETA_RESULT = "fig:beta_effect_interactions"
_ACCURACY_RESULT = "table:s5_8_results"


def collect_dial_data(judged: Sequence[JudgedResult]) -> dict[str, Any] | None:
    """Return the data of the slider.

    Args:
        judged: All results with their rows.

    Returns:
        Numbers by β; None if fig:beta_effect_interactions has not been run. `accuracy` is None if the word problem,
        table:s5_8_results, has not been run.
    """
    usable = {one.result.name: one for one in judged if one.scale is not None and not one.problem}
    beta_result = usable.get(_BETA_RESULT)
    if beta_result is None:
        return None
    rows = beta_result.rows
    first = rows[0].numbers
    return {
        "betas": rows.values("beta"),
        "key": first["key"],
        "value": first["value"],
        "log_eigenvalues": first["log_eigenvalues"],
        "exponents": [_replace_infinite(row.numbers["exponents"]) for row in rows],
        "certified": [_replace_infinite(row.numbers["certified"]) for row in rows],
        "iterations": {method: [_mean(row.numbers["iterations"][method]) for row in rows] for method in METHODS},
        "accuracy": _collect_accuracies(usable.get(_ACCURACY_RESULT)),
        "scale": beta_result.scale,
        "sizes": {key: rows[0].settings[key] for key in ("steps", "length", "width")},
    }


def _replace_infinite(values: list[float]) -> list[float | None]:
    """Replace infinite values, which JSON cannot hold, by None."""
    return [value if np.isfinite(value) else None for value in values]


def _mean(counts: list[int]) -> float | None:
    """Return the mean count; None if a sample did not converge."""
    return float(np.mean(counts)) if min(counts) > 0 else None


def _collect_accuracies(judged: JudgedResult | None) -> dict[str, Any] | None:
    """Return the mean accuracies at 1, 2 and 4 times the length, by β, for S4D-Real with eigenvalues of both signs."""
    if judged is None or judged.scale == "smoke":
        return None
    rows = judged.rows.where(spectrum="S4D-Real", sparsity=0.0, negative=True)
    means = {b: np.mean(rows.where(beta=b).numbers("accuracy"), axis=0).tolist() for b in rows.values("beta")}
    return {"betas": list(means), "means": list(means.values()), "group": rows[0].settings["group"]}
