"""Lyapunov spectra along training on Copy Memory, by β and by the weights of K and V (sec:trained_lyapunov_results).

The network is that of table:baseline_trained_config, in one residual block. Spectra are computed at three epochs, on a
float64 copy of the network, along one test sequence.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adptnet.analysis import plot

from ..evidence import EXPONENT_TOLERANCE, largest_excess, paired_difference
from ..recipe import Check, GridPoint, Recipe, Row, Rows, Scale, Table
from ..settings.copy_memory import BATCH, OPTIONS, SCALAR, measure_spectrum, rank_of_encoding, train_on_copy_memory
from ..verdicts import ClaimVerdict, combine, decide, judge_increase, judge_limit, judge_observation, judge_trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETAS = [0.0125, 0.125, 1.0]
WEIGHTS = ["dense", "orthogonal", "LowParam"]
PAPER_LLE = {  # largest exponents at epochs 5, 25 and 50 in table:LLE_and_bounds
    "dense": (0.00344, 0.00835, 0.0108),
    "orthogonal": (0.00048, 0.01043, 0.0098),
    "LowParam": (0.00779, 0.00723, 0.01026),
}
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"width": 8, "sequences": BATCH, "test": 16, "epochs": [1, 2, 3]},
    "laptop": {"width": 64, "sequences": 4000, "test": 1000, "epochs": [5, 25, 50]},
    "paper": {"width": 128, "sequences": 10_000, "test": 1000, "epochs": [5, 25, 50]},
}


SEEDS = {"smoke": 1, "laptop": 1, "paper": 3}


def _make_points(scale: Scale, varied: list[dict[str, Any]], shared: dict[str, Any]) -> list[GridPoint]:
    """Return the points with scalar input and with embedded tokens; the result uses the former if they are complete."""
    return [
        GridPoint({**each, **shared, **SIZES[scale], **encoding}, seed)
        for encoding in (SCALAR, {})
        for each in varied
        for seed in range(SEEDS[scale])
    ]


def _make_beta_points(scale: Scale) -> list[GridPoint]:
    shared = {"weights": "dense", "rate": 5e-3, "length": 24 if scale == "smoke" else 64}
    return _make_points(scale, [{"beta": beta} for beta in BETAS], shared)


def _make_weight_points(scale: Scale) -> list[GridPoint]:
    shared = {"beta": 0.0125, "rate": 4e-3, "length": 24 if scale == "smoke" else 128}
    return _make_points(scale, [{"weights": name} for name in WEIGHTS], shared)


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


def _by_seed(rows: Rows, epoch: int, number: Callable[[Any], float], **settings: Any) -> dict[int, float]:
    """Return a number of the snapshot at an epoch (an index), by seed."""
    return {row.seed: number(row.numbers["snapshots"][epoch]) for row in rows.where(**settings)}


def _judge_order(rows: Rows, epoch: int, relevant: float) -> ClaimVerdict:
    """Judge whether ln λ̄_min rises with β from each of the three β to the next, paired by seed."""
    lows = [_by_seed(rows, epoch, _smallest_log_eigenvalue, beta=beta) for beta in BETAS]
    parts = []
    for (low, high), (first, second) in zip(pairwise(BETAS), pairwise(lows), strict=True):
        seeds = sorted(first.keys() & second.keys())
        more = paired_difference([second[s] for s in seeds], [first[s] for s in seeds], "Δ")
        parts.append(judge_increase(more, relevant, f"β {low:g} → {high:g}"))
    text = ", ".join(f"β = {b:g}: {np.mean(list(low.values())):.2f}" for b, low in zip(BETAS, lows, strict=True))
    return combine(parts, f"ln λ̄_min by β: {text}")


def _check_spread(rows: Rows) -> ClaimVerdict:
    """At the last epoch ln λ̄_min rises from each β to the next, paired by seed, with an interval above 0. A rise of 1
    matters, half of the smallest rise in the paper."""
    return _judge_order(rows, -1, 1.0)


def _check_early(rows: Rows) -> ClaimVerdict:
    """At the first snapshot ln λ̄_min at β = 0.125 minus that at β = 0.0125, paired by seed, has an interval above 1,
    half of the paper's difference of 2.15."""
    small, large = (_by_seed(rows, 0, _smallest_log_eigenvalue, beta=beta) for beta in (0.0125, 0.125))
    seeds = sorted(small.keys() & large.keys())
    more = paired_difference([large[s] for s in seeds], [small[s] for s in seeds], "Δ")
    text = f"β = 0.0125: {np.mean(list(small.values())):.2f}, β = 0.125: {np.mean(list(large.values())):.2f}"
    return judge_limit(more, above=1.0, why=text)


def _check_learned(rows: Rows) -> ClaimVerdict:
    """Every network has an accuracy of at least 90 % after training."""
    accuracies = rows.numbers("accuracy")
    return judge_trained([value >= 90 for value in accuracies], f"{min(accuracies):.1f} to {max(accuracies):.1f} %")


def _check_contained(rows: Rows) -> ClaimVerdict:
    """At β = 0.0125 and 0.125 no exponent leaves [ln λ̄_min, ln λ̄_max] by more than 1 % of its width, at any epoch."""
    small = [row for row in rows if row.settings["beta"] < 1]
    worst = _worst_by_seed(small, lambda row, s: _relative_excess(s))
    return judge_trained([w <= EXPONENT_TOLERANCE for w in worst], f"largest excess {max(*worst, 0):.2%} of the width")


def _worst_by_seed(rows: Iterable[Row], number: Callable[[Row, Any], float]) -> list[float]:
    """Return the largest value of a number over epochs and networks of each seed."""
    worst: dict[int, float] = {}
    for row in rows:
        for snapshot in row.numbers["snapshots"]:
            worst[row.seed] = max(worst.get(row.seed, -np.inf), number(row, snapshot))
    return list(worst.values())


def _check_chaos(rows: Rows) -> ClaimVerdict:
    """At β = 1 the largest exponent at the last epoch is between 0 and 0.5, and below ln(λ̄_max + 8βλ̄_max), in every
    network."""
    inside, texts = [], []
    for row in rows.where(beta=1.0):
        last = row.numbers["snapshots"][-1]
        top, bound = _largest_exponent(last), _paper_bound(row, last)
        inside.append(0 < top < min(0.5, bound))
        texts.append(f"{top:.4f}, bound {bound:.2f}")
    return judge_trained(inside, "; ".join(texts))


def _check_above(rows: Rows) -> ClaimVerdict:
    """The smallest exponent is at most 1 % of the width of ln λ̄ below ln λ̄_min, at every epoch and for all three."""

    def below(row: Row, s: Any) -> float:
        width = max(s["log_eigenvalues"]) - _smallest_log_eigenvalue(s)
        return float((_smallest_log_eigenvalue(s) - min(s["exponents"])) / width)

    worst = _worst_by_seed(rows, below)
    text = f"at most {max(*worst, 0):.2%} of the width below"
    return judge_trained([value <= EXPONENT_TOLERANCE for value in worst], text)


def _check_overshoot(rows: Rows) -> ClaimVerdict:
    """The largest exponent is less than 0.05 above ln λ̄_max, at every epoch and for all three."""
    worst = _worst_by_seed(rows, lambda row, s: _largest_exponent(s) - max(s["log_eigenvalues"]))
    return judge_trained([value < 0.05 for value in worst], f"at most {max(worst):+.4f}")


def _check_bounds(rows: Rows) -> ClaimVerdict:
    """The largest exponent is below ln(λ̄_max + 8βλ̄_max), at every epoch and for all three."""
    worst = _worst_by_seed(rows, lambda row, s: _largest_exponent(s) - _paper_bound(row, s))
    return decide(max(worst) < 0, f"at least {-max(worst):.3f} below", runs=len(worst))


def _match_paper(rows: Rows) -> list[tuple[str, int, float, list[float]]]:
    """Return weights, epoch, the paper's largest exponent and ours, for each entry of table:LLE_and_bounds."""
    found = []
    for name, reported in PAPER_LLE.items():
        for place, value in enumerate(reported):
            ours = [_largest_exponent(row.numbers["snapshots"][place]) for row in rows.where(weights=name)]
            found.append((name, rows[0].settings["epochs"][place], value, ours))
    return found


def _check_exponents(rows: Rows) -> ClaimVerdict:
    """At the last epoch the paper's largest exponent, of one network, lies where 95 % of ours lie, for all three."""
    last = [entry for entry in _match_paper(rows) if entry[1] == rows[0].settings["epochs"][-1]]
    return combine([judge_observation(ours, value, name) for name, _, value, ours in last])


def _make_table_by(key: str) -> Any:
    def make_table(rows: Rows) -> Table:
        lines = []
        for row in rows:
            for epoch, s in zip(row.settings["epochs"], row.numbers["snapshots"], strict=True):
                lines.append(
                    [
                        row.settings[key],
                        row.seed,
                        epoch,
                        f"{_largest_exponent(s):.5f}",
                        f"{_paper_bound(row, s):.4f}",
                        f"{_smallest_log_eigenvalue(s):.3f}",
                        f"{min(s['exponents']):.3f}",
                        f"{row.numbers['accuracy']:.1f}",
                    ]
                )
        columns = ["Epoch", "LLE", "paper's bound", "ln λ̄_min", "smallest exponent", "final accuracy (%)"]
        return Table([key, "seed", *columns], lines)

    return make_table


def _draw_by(key: str) -> Any:
    def draw(rows: Rows) -> "Figure":
        panels = {
            f"{key} = {row.settings[key]}, epoch {epoch}": snapshot
            for row in rows
            if row.seed == rows[0].seed
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
            "early": Check(_check_early, "laptop", {"beta": BETAS[:2]}),
            "learned": Check(_check_learned, "laptop"),
            "contained": Check(_check_contained, "laptop", {"beta": BETAS[:2]}),
            "chaos": Check(_check_chaos, "laptop", {"beta": BETAS[2:]}),
        },
        figures={"Exponents and ln λ̄ by β, along training": _draw_by("beta")},
        table=_make_table_by("beta"),
        cost={"smoke": "4 s", "laptop": "9 min", "paper": "3 h; 9 min a network"},
        dtype=torch.float32,
        rank=rank_of_encoding,
        options=OPTIONS,
    ),
    "fig:kv_trained_ablation": Recipe(
        version=1,
        points=_make_weight_points,
        run=lambda point: train_on_copy_memory(point, measure_spectrum),
        checks={
            "above": Check(_check_above, "laptop"),
            "overshoot": Check(_check_overshoot, "laptop"),
            "exponents": Check(_check_exponents, "paper", reason="the paper's numbers are those of width 128"),
            "bounds": Check(_check_bounds, "laptop"),
        },
        figures={"Exponents and ln λ̄ by K and V, along training": _draw_by("weights")},
        table=_make_table_by("weights"),
        cost={"smoke": "4 s", "laptop": "18 min", "paper": "8 h; 27 min a network"},
        dtype=torch.float32,
        rank=rank_of_encoding,
        options=OPTIONS,
    ),
}
