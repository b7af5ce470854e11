"""Lyapunov spectra along training on Copy Memory, by β and by the weights of K and V (sec:trained_lyapunov_results).

The network is that of table:baseline_trained_config, in one residual block. Spectra are computed at three epochs, on a
float64 copy of the network, along one test sequence.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adptnet.analysis import plot

from ..evidence import EXPONENT_TOLERANCE, largest_excess, rank_correlation
from ..recipe import Check, ClaimVerdict, GridPoint, Recipe, Row, Rows, Scale, Table, decide
from ..settings.copy_memory import BATCH, measure_spectrum, train_on_copy_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETAS = [0.0125, 0.125, 1.0]
WEIGHTS = ["dense", "orthogonal", "LowParam"]
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"width": 8, "sequences": BATCH, "test": 16, "epochs": [1, 2, 3]},
    "laptop": {"width": 64, "sequences": 4000, "test": 1000, "epochs": [5, 25, 50]},
    "paper": {"width": 128, "sequences": 10_000, "test": 1000, "epochs": [5, 25, 50]},
}


def _make_beta_points(scale: Scale) -> list[GridPoint]:
    shared = {"weights": "dense", "rate": 5e-3, "length": 24 if scale == "smoke" else 64, **SIZES[scale]}
    return [GridPoint({"beta": beta, **shared}) for beta in BETAS]


def _make_weight_points(scale: Scale) -> list[GridPoint]:
    shared = {"beta": 0.0125, "rate": 4e-3, "length": 24 if scale == "smoke" else 128, **SIZES[scale]}
    return [GridPoint({"weights": name, **shared}) for name in WEIGHTS]


def _smallest_log_eigenvalue(snapshot: Any) -> float:
    return float(min(snapshot["log_eigenvalues"]))


def _largest_exponent(snapshot: Any) -> float:
    return float(max(snapshot["exponents"]))


def _paper_bound(row: Row, snapshot: Any) -> float:
    """Return ln(λ̄_max + 8βλ̄_max)."""
    return float(max(snapshot["log_eigenvalues"]) + np.log1p(8 * row.settings["beta"]))


def _relative_excess(snapshot: Any) -> float:
    """Return by how much the exponents leave [ln λ̄_min, ln λ̄_max], relative to its width; negative inside."""
    prescribed = snapshot["log_eigenvalues"]
    low, high = min(prescribed), max(prescribed)
    return float(largest_excess(snapshot["exponents"], low, high) / (high - low))


def _check_spread(rows: Rows) -> ClaimVerdict:
    """At the last epoch ln λ̄_min increases with β."""
    lows = [_smallest_log_eigenvalue(row.numbers["snapshots"][-1]) for row in rows]
    by_beta = ", ".join(f"β = {row.settings['beta']:g}: {low:.2f}" for row, low in zip(rows, lows, strict=True))
    return decide(rank_correlation(BETAS, lows) > 0.99, by_beta)


def _check_contained(rows: Rows) -> ClaimVerdict:
    """At β = 0.0125 and 0.125 no exponent leaves [ln λ̄_min, ln λ̄_max] by more than 1 % of its width, at any epoch."""
    worst = max(_relative_excess(s) for row in rows if row.settings["beta"] < 1 for s in row.numbers["snapshots"])
    return decide(worst <= EXPONENT_TOLERANCE, f"largest excess {max(worst, 0):.2%} of the width")


def _check_chaos(rows: Rows) -> ClaimVerdict:
    """At β = 1 the largest exponent at the last epoch is between 0 and 0.5, and below ln(λ̄_max + 8βλ̄_max)."""
    row = rows.where(beta=1.0)[0]
    last = row.numbers["snapshots"][-1]
    top, bound = _largest_exponent(last), _paper_bound(row, last)
    return decide(0 < top < min(0.5, bound), f"{top:.4f}, bound {bound:.2f}")


def _check_above(rows: Rows) -> ClaimVerdict:
    """The smallest exponent is at most 1 % of the width of ln λ̄ below ln λ̄_min, at every epoch and for all three."""
    worst = max(
        (_smallest_log_eigenvalue(s) - min(s["exponents"])) / (max(s["log_eigenvalues"]) - _smallest_log_eigenvalue(s))
        for row in rows
        for s in row.numbers["snapshots"]
    )
    return decide(worst <= EXPONENT_TOLERANCE, f"at most {max(worst, 0):.2%} of the width below")


def _check_overshoot(rows: Rows) -> ClaimVerdict:
    """The largest exponent is less than 0.05 above ln λ̄_max, at every epoch and for all three."""
    worst = max(_largest_exponent(s) - max(s["log_eigenvalues"]) for row in rows for s in row.numbers["snapshots"])
    return decide(worst < 0.05, f"at most {worst:+.4f}")


def _check_bounds(rows: Rows) -> ClaimVerdict:
    """The largest exponent is below ln(λ̄_max + 8βλ̄_max), at every epoch and for all three."""
    margin = min(_paper_bound(row, s) - _largest_exponent(s) for row in rows for s in row.numbers["snapshots"])
    return decide(margin > 0, f"at least {margin:.3f} below")


def _make_table_by(key: str) -> Any:
    def make_table(rows: Rows) -> Table:
        lines = []
        for row in rows:
            for epoch, s in zip(row.settings["epochs"], row.numbers["snapshots"], strict=True):
                lines.append(
                    [
                        row.settings[key],
                        epoch,
                        f"{_largest_exponent(s):.5f}",
                        f"{_paper_bound(row, s):.4f}",
                        f"{_smallest_log_eigenvalue(s):.3f}",
                        f"{min(s['exponents']):.3f}",
                        f"{row.numbers['accuracy']:.1f}",
                    ]
                )
        columns = ["Epoch", "LLE", "paper's bound", "ln λ̄_min", "smallest exponent", "final accuracy (%)"]
        return Table([key, *columns], lines)

    return make_table


def _draw_by(key: str) -> Any:
    def draw(rows: Rows) -> "Figure":
        panels = {
            f"{key} = {row.settings[key]}, epoch {epoch}": snapshot
            for row in rows
            for epoch, snapshot in zip(row.settings["epochs"], row.numbers["snapshots"], strict=True)
        }
        return plot.spectra(
            {name: torch.tensor(s["exponents"]) for name, s in panels.items()},
            {name: torch.tensor(s["log_eigenvalues"]) for name, s in panels.items()},
            {name: tuple(s["certified"]) for name, s in panels.items()},
        )

    return draw


RECIPES = {
    "fig:beta_trained_ablation": Recipe(
        version=1,
        points=_make_beta_points,
        run=lambda point: train_on_copy_memory(point, measure_spectrum),
        checks={
            "spread": Check(_check_spread, "laptop"),
            "contained": Check(_check_contained, "laptop"),
            "chaos": Check(_check_chaos, "laptop"),
        },
        figures={"Exponents and ln λ̄ by β, along training": _draw_by("beta")},
        table=_make_table_by("beta"),
        cost={"smoke": "2 s", "laptop": "4 min", "paper": "20 min"},
        dtype=torch.float32,
    ),
    "fig:kv_trained_ablation": Recipe(
        version=1,
        points=_make_weight_points,
        run=lambda point: train_on_copy_memory(point, measure_spectrum),
        checks={
            "above": Check(_check_above, "laptop"),
            "overshoot": Check(_check_overshoot, "laptop"),
            "bounds": Check(_check_bounds, "laptop"),
        },
        figures={"Exponents and ln λ̄ by K and V, along training": _draw_by("weights")},
        table=_make_table_by("weights"),
        cost={"smoke": "2 s", "laptop": "7 min", "paper": "45 min"},
        dtype=torch.float32,
    ),
}
