"""Lyapunov spectra along training on Copy Memory, by β and by the weights of K and V (sec:trained_lyapunov_results).

The network is that of table:baseline_trained_config, in one residual block. Spectra are of a copy of the network in
float64, along one test sequence, at three epochs.
"""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from adptnet import analysis
from adptnet.analysis import plot
from adptnet.cells import ADPTCell, ADPTSpec
from adptnet.nn import ADPTNet, LayerSpec
from adptnet.nn.block import BlockSpec
from adptnet.recurrence.drive import EMA, RoPE
from adptnet.recurrence.projections import Dense, LowParam, Orthogonal, ProjectionSpec
from adptnet.recurrence.spectra import Linspace, Negative, SpectrumSpec

from ...tasks import CopyMemory
from ...training import Adam, Cosine, TrainConfig
from ..evidence import rank_correlation, within
from ..recipe import Check, Finding, Point, Recipe, Row, Rows, Scale, Table, Verdict
from ..scoring import scored

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["RECIPES", "spectrum_of", "still", "trained"]

BATCH = 64
BETAS = [0.0125, 0.125, 1.0]
WEIGHTS = ["dense", "orthogonal", "LowParam"]
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"width": 8, "sequences": BATCH, "test": 16, "epochs": [1, 2, 3]},
    "laptop": {"width": 64, "sequences": 4000, "test": 1000, "epochs": [5, 25, 50]},
    "paper": {"width": 128, "sequences": 10_000, "test": 1000, "epochs": [5, 25, 50]},
}
SLACK = 0.01  # of the width of ln λ̄


def _beta_points(scale: Scale) -> list[Point]:
    shared = {"weights": "dense", "rate": 5e-3, "length": 24 if scale == "smoke" else 64, **SIZES[scale]}
    return [Point({"beta": beta, **shared}) for beta in BETAS]


def _weight_points(scale: Scale) -> list[Point]:
    shared = {"beta": 0.0125, "rate": 4e-3, "length": 24 if scale == "smoke" else 128, **SIZES[scale]}
    return [Point({"weights": name, **shared}) for name in WEIGHTS]


def _weights(name: str, width: int) -> ProjectionSpec:
    """LowParam as in the paper: rank 32 and factors 32 and 4 at width 128."""
    low = LowParam(factors=(width // 4, 4), rank=width // 4)
    return {"dense": Dense(), "orthogonal": Orthogonal(), "LowParam": low}[name]


def trained(point: Point, snapshot: Callable[[ADPTNet, Tensor], dict[str, Any]]) -> Finding:
    """Trains one network and takes a snapshot after each of its epochs that are asked for, with one test sequence."""
    settings = point.settings
    spectrum: SpectrumSpec = Linspace(dt_min=1e-3, dt_max=1e-1, decay=0.5)
    if settings.get("negative"):
        spectrum = Negative(spectrum, settings["negative"])
    task = CopyMemory(settings["length"], training_sequences=settings["sequences"], test_sequences=settings["test"])
    cell = ADPTSpec(
        settings["width"],
        beta=settings["beta"],
        spectrum=spectrum,
        projection=_weights(settings["weights"], settings["width"]),
        gain=EMA(),
        rope=RoPE(),
    )
    spec = task.model(BlockSpec(LayerSpec(cell)))
    epoch = -(-settings["sequences"] // BATCH)
    config = TrainConfig(
        steps=settings["epochs"][-1] * epoch,
        batch_size=BATCH,
        learning_rate=settings["rate"],
        optimiser=Adam(),
        schedule=Cosine(),
        clip=None,
        seed=point.seed,
    )
    sample = next(task.evaluation("test", 1, 1)).inputs

    def watch(model: nn.Module) -> Callable[[int], Any]:
        def look(step: int) -> dict[str, Any] | None:
            if step % epoch or step // epoch not in settings["epochs"]:
                return None
            ((layer, x),) = still(model, sample)
            return snapshot(layer, x)

        return look

    found = scored(spec, task, config, sequences=settings["test"], watch=watch)
    return Finding({"snapshots": found.seen, **found.numbers}, spec)


def still(model: nn.Module, sample: Tensor) -> list[tuple[ADPTNet, Tensor]]:
    """Each layer of a copy of the model in float64, and what enters it when the model is given `sample`."""
    met = analysis.captured(copy.deepcopy(model).cpu().double(), sample).values()
    return [(layer.requires_grad_(False), x) for layer, x in met if isinstance(layer, ADPTNet)]


@torch.no_grad()
def spectrum_of(layer: ADPTNet, x: Tensor) -> dict[str, Any]:
    """Exponents along the first of the sequences, ln |λ̄| and what is certain."""
    assert isinstance(layer.cell, ADPTCell)
    return {
        "exponents": analysis.lyapunov_exponents(layer, x[0]).exponents,
        "log_eigenvalues": layer.cell.spectrum.log_modulus().sort(descending=True).values,
        "certified": list(analysis.certificate(layer).exponents),
    }


def _lowest(snapshot: Any) -> float:
    return float(min(snapshot["log_eigenvalues"]))


def _top(snapshot: Any) -> float:
    return float(max(snapshot["exponents"]))


def _paper_bound(row: Row, snapshot: Any) -> float:
    """ln(λ̄_max + 8βλ̄_max)."""
    return float(max(snapshot["log_eigenvalues"]) + np.log1p(8 * row.settings["beta"]))


def _excess(snapshot: Any) -> float:
    wanted = snapshot["log_eigenvalues"]
    return float(within(snapshot["exponents"], min(wanted), max(wanted)) / (max(wanted) - min(wanted)))


def _spread(rows: Rows) -> Verdict:
    """At the last epoch ln λ̄_min rises with β."""
    lows = [_lowest(row.numbers["snapshots"][-1]) for row in rows]
    shown = ", ".join(f"β = {row.settings['beta']:g}: {low:.2f}" for row, low in zip(rows, lows, strict=True))
    return Verdict.of(rank_correlation(BETAS, lows) > 0.99, shown)


def _contained(rows: Rows) -> Verdict:
    """At β = 0.0125 and 0.125 no exponent leaves [ln λ̄_min, ln λ̄_max] by more than 1 % of its width, at any epoch."""
    worst = max(_excess(s) for row in rows if row.settings["beta"] < 1 for s in row.numbers["snapshots"])
    return Verdict.of(worst <= SLACK, f"largest excess {max(worst, 0):.2%} of the width")


def _chaos(rows: Rows) -> Verdict:
    """At β = 1 the largest exponent at the last epoch is between 0 and 0.5, and below ln(λ̄_max + 8βλ̄_max)."""
    row = rows.where(beta=1.0)[0]
    last = row.numbers["snapshots"][-1]
    holds = 0 < _top(last) < min(0.5, _paper_bound(row, last))
    return Verdict.of(holds, f"{_top(last):.4f}, bound {_paper_bound(row, last):.2f}")


def _above(rows: Rows) -> Verdict:
    """The smallest exponent is at most 1 % of the width below ln λ̄_min, at every epoch and for all three."""
    worst = max(
        (_lowest(s) - min(s["exponents"])) / (max(s["log_eigenvalues"]) - _lowest(s))
        for row in rows
        for s in row.numbers["snapshots"]
    )
    return Verdict.of(worst <= SLACK, f"at most {max(worst, 0):.2%} of the width below")


def _overshoot(rows: Rows) -> Verdict:
    """The largest exponent is less than 0.05 above ln λ̄_max, at every epoch and for all three."""
    worst = max(_top(s) - max(s["log_eigenvalues"]) for row in rows for s in row.numbers["snapshots"])
    return Verdict.of(worst < 0.05, f"at most {worst:+.4f}")


def _bounds(rows: Rows) -> Verdict:
    """The largest exponent is below ln(λ̄_max + 8βλ̄_max), at every epoch and for all three."""
    room = min(_paper_bound(row, s) - _top(s) for row in rows for s in row.numbers["snapshots"])
    return Verdict.of(room > 0, f"at least {room:.3f} below")


def _table(key: str) -> Any:
    def table(rows: Rows) -> Table:
        lines = []
        for row in rows:
            for epoch, s in zip(row.settings["epochs"], row.numbers["snapshots"], strict=True):
                lines.append(
                    [
                        row.settings[key],
                        epoch,
                        f"{_top(s):.5f}",
                        f"{_paper_bound(row, s):.4f}",
                        f"{_lowest(s):.3f}",
                        f"{min(s['exponents']):.3f}",
                        f"{row.numbers['accuracy']:.1f}",
                    ]
                )
        columns = ["Epoch", "LLE", "paper's bound", "ln λ̄_min", "smallest exponent", "final accuracy (%)"]
        return Table([key, *columns], lines)

    return table


def _draw(key: str) -> Any:
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
        points=_beta_points,
        run=lambda point: trained(point, spectrum_of),
        checks={
            "spread": Check(_spread, "laptop"),
            "contained": Check(_contained, "laptop"),
            "chaos": Check(_chaos, "laptop"),
        },
        figures={"Exponents and ln λ̄ by β, along training": _draw("beta")},
        table=_table("beta"),
        cost={"smoke": "2 s", "laptop": "4 min", "paper": "20 min"},
        dtype=torch.float32,
    ),
    "fig:kv_trained_ablation": Recipe(
        version=1,
        points=_weight_points,
        run=lambda point: trained(point, spectrum_of),
        checks={
            "above": Check(_above, "laptop"),
            "overshoot": Check(_overshoot, "laptop"),
            "bounds": Check(_bounds, "laptop"),
        },
        figures={"Exponents and ln λ̄ by K and V, along training": _draw("weights")},
        table=_table("weights"),
        cost={"smoke": "2 s", "laptop": "7 min", "paper": "45 min"},
        dtype=torch.float32,
    ),
}
