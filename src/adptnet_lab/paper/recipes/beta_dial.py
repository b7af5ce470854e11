"""What β does: the rotation, the spectrum and the iterations, over a grid of β (fig:beta_effect_interactions).

These rows are also behind the β dial of the report.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from adptnet import analysis, cells, drive, projections, retractions, solvers, spectra
from adptnet.analysis import plot
from adptnet.nn import ADPTNet
from adptnet.recurrence.conjugates import RotatedConjugate

from ..evidence import rank_correlation
from ..recipe import Check, Finding, Point, Recipe, Rows, Scale, Table, Verdict
from .deer_iterations import METHODS, counts, network

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BETAS", "LABEL", "RECIPES"]

LABEL = "fig:beta_effect_interactions"
BETAS = [0.0, 0.0125, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0]
SIZE = 32
SHOWN = (0.125, 1.0, 4.0)  # the β of the images
RETRACTIONS = {"exponential": retractions.Exponential(), "Cayley": retractions.Cayley()}


def _points(scale: Scale) -> list[Point]:
    steps, length, width = {"smoke": (8, 12, 8), "laptop": (2048, 512, 64), "paper": (4096, 1024, 64)}[scale]
    return [
        Point({"beta": beta, "steps": steps, "length": length, "width": width})
        for beta in (BETAS[::3] if scale == "smoke" else BETAS)
    ]


@torch.no_grad()
def _run(point: Point) -> Finding:
    """Every β has the same weights, states and inputs: they are drawn from the seed before β is used."""
    beta = point.settings["beta"]
    # A wide spectrum: were the eigenvalues all alike, M would be a multiple of the identity for every Q.
    cell = cells.ADPTSpec(SIZE, spectrum=spectra.Linspace(dt_min=1e-2, dt_max=4.0)).build()
    assert isinstance(cell, cells.ADPTCell)
    plane = cell.directions[0](torch.randn(SIZE))
    numbers: dict[str, Any] = {"key": plane.key, "value": plane.value, "eigenvalues": cell.spectrum().real}
    numbers["angle"] = beta * float((1 - (plane.key @ plane.value).square()).sqrt())
    for name, retraction in RETRACTIONS.items():
        numbers[name] = float(_off_diagonal_share(retraction(plane.key, plane.value, beta).dense()))
    rotation = RETRACTIONS["exponential"](plane.key, plane.value, beta)
    numbers["M"] = float(_off_diagonal_share(RotatedConjugate([rotation], cell.spectrum()).dense()))
    numbers |= _spectrum(beta, point.settings["steps"]) | {"iterations": _iterations(point)}
    return Finding(numbers, cell.spec)


def _spectrum(beta: float, steps: int) -> dict[str, Any]:
    """Exponents and what is certain of them, with orthogonal K, V and a wide spectrum."""
    torch.manual_seed(1)
    axes: dict[str, Any] = {
        "projection": projections.Orthogonal(),
        "spectrum": spectra.Linspace(dt_min=2e-2, dt_max=1.0),
    }
    layer = ADPTNet(16, beta=beta, gain=drive.LRU(), **axes).requires_grad_(False)
    assert isinstance(layer.cell, cells.ADPTCell)
    x = torch.randn(steps, 16)
    return {
        "exponents": analysis.lyapunov_exponents(layer, x).exponents,
        "log_eigenvalues": layer.cell.spectrum.log_modulus().sort(descending=True).values,
        "certified": list(analysis.certificate(layer).exponents),
    }


def _iterations(point: Point) -> dict[str, list[int]]:
    """Of each method, -1 where it did not converge; in float64, on the networks of the iteration counts."""
    torch.manual_seed(2)
    layer = network(point.settings["width"], point.settings["beta"], 1e-3)
    x = torch.randn(2, point.settings["length"], point.settings["width"])
    found = {}
    for method in METHODS:
        solution = counts(method, layer, x, 100)
        found[method] = torch.where(solution.results == solvers.Result.CONVERGED, solution.iterations, -1).tolist()
    return found


def _off_diagonal_share(matrix: Tensor) -> Tensor:
    """The share of the squared entries that is not on the diagonal."""
    weights = matrix.square()
    return 1 - weights.diagonal(dim1=-2, dim2=-1).sum(-1) / weights.sum((-2, -1))


def _grows(rows: Rows) -> Verdict:
    """Up to a half turn the share of squared entries of Q off its diagonal rises with every β, for both retractions."""
    within = [row for row in rows if row.numbers["angle"] <= math.pi]
    series = [[row.numbers[name] for row in within] for name in RETRACTIONS]
    top = within[-1].settings["beta"]
    holds = all(s == sorted(s) and s[-1] > s[0] for s in series)
    return Verdict.of(holds, f"up to β = {top:g}: " + ", ".join(f"{s[0]:.1%} → {s[-1]:.1%}" for s in series))


def _every_beta(rows: Rows) -> Verdict:
    """The same over the whole grid of β, to 8."""
    found = {name: rank_correlation(rows.values("beta"), rows.numbers(name)) for name in RETRACTIONS}
    holds = all(rows.numbers(name) == sorted(rows.numbers(name)) for name in RETRACTIONS)
    shown = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
    return Verdict.of(holds, f"rank correlations {shown}", "beyond a half turn the exponential turns back")


def _draw_curves(rows: Rows) -> "Figure":
    figure = plot.blank(9.5, 3.4)
    left, right = figure.subplots(1, 2)
    for name, colour in zip((*RETRACTIONS, "M"), plot.COLOURS, strict=False):
        label = {"M": "M, exponential"}.get(name, f"Q, {name}")
        left.plot(
            rows.values("beta"),
            [100 * share for share in rows.numbers(name)],
            "-o",
            markersize=3,
            color=colour,
            label=label,
        )
    first = next(row for row in rows if row.numbers["angle"] > 0)
    left.axvline(math.pi * first.settings["beta"] / first.numbers["angle"], color="black", linewidth=0.8, linestyle=":")
    left.axhline(800 / SIZE, color="black", linewidth=0.8, linestyle="--")
    left.text(8, 800 / SIZE, "8/n: all that one plane can reach", fontsize=8, ha="right", va="bottom")
    left.set(xlabel="β (dotted: half turn)", ylabel="% of squared entries off the diagonal", ylim=(0, 1000 / SIZE))
    for method, colour in zip(METHODS, plot.COLOURS, strict=False):
        means = [
            np.mean(row.numbers["iterations"][method]) if min(row.numbers["iterations"][method]) > 0 else np.nan
            for row in rows
        ]
        right.plot(rows.values("beta"), means, "-o", markersize=3, color=colour, label=method)
    right.set(xlabel="β", ylabel="iterations")
    for axis in (left, right):
        axis.legend(frameon=False, fontsize=8)
        plot.bare(axis)
    return figure


def _draw_matrices(rows: Rows) -> "Figure":
    from matplotlib.colors import PowerNorm

    numbers = rows[0].numbers
    key, value = torch.tensor(numbers["key"], dtype=torch.float64), torch.tensor(numbers["value"], dtype=torch.float64)
    eigen = torch.tensor(numbers["eigenvalues"], dtype=torch.float64)
    figure = plot.blank(8, 5)
    axes = figure.subplots(2, len(SHOWN))
    for column, beta in enumerate(SHOWN):
        rotation = RETRACTIONS["exponential"](key, value, beta).dense()
        for axis, matrix, name in zip(
            axes[:, column], (rotation, rotation * eigen @ rotation.mT), ("|Q|", "|M|"), strict=True
        ):
            shown = axis.imshow(matrix.abs().numpy(), cmap="magma", norm=PowerNorm(0.5, 0, 1), interpolation="none")
            axis.set(xticks=[], yticks=[], title=f"{name}, β = {beta:g}")
    figure.colorbar(shown, ax=axes, ticks=[0, 0.01, 0.05, 0.2, 0.5, 1], shrink=0.9)
    return figure


def _table(rows: Rows) -> Table:
    lines = []
    for row in rows:
        shares = [f"{row.numbers[name]:.2%}" for name in (*RETRACTIONS, "M")]
        each = ["/".join("–" if n < 0 else str(n) for n in row.numbers["iterations"][m]) for m in METHODS]
        lines.append([row.settings["beta"], f"{row.numbers['angle'] / math.pi:.3f} π", *shares, *each])
    return Table(["β", "angle", "Q off the diagonal", "Q, Cayley", "M", *(f"iterations, {m}" for m in METHODS)], lines)


RECIPES = {
    LABEL: Recipe(
        version=1,
        points=_points,
        run=_run,
        checks={"grows": Check(_grows), "every-beta": Check(_every_beta)},
        figures={"Interactions and iterations by β": _draw_curves, "|Q| and |M| at one state": _draw_matrices},
        table=_table,
        cost={"smoke": "4 s", "laptop": "20 s", "paper": "20 s"},
    ),
}
