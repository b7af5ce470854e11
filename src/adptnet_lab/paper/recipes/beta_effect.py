"""Effect of β on the rotation, the spectrum and the iterations, over a grid of β (fig:beta_effect_interactions).

The β slider of the HTML report shows the same rows.
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
from ..recipe import Check, GridPoint, Recipe, Rows, RunOutput, Scale, Table
from ..settings.deer_networks import METHODS, build_network, solve
from ..verdicts import ClaimVerdict, decide

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETAS = [0.0, 0.0125, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0]
SIZE = 32
IMAGE_BETAS = (0.125, 1.0, 4.0)
RETRACTIONS = {"exponential": retractions.Exponential(), "Cayley": retractions.Cayley()}


def _make_points(scale: Scale) -> list[GridPoint]:
    steps, length, width = {"smoke": (8, 12, 8), "laptop": (2048, 512, 64), "paper": (4096, 1024, 64)}[scale]
    return [
        GridPoint({"beta": beta, "steps": steps, "length": length, "width": width})
        for beta in (BETAS[::3] if scale == "smoke" else BETAS)
    ]


@torch.no_grad()
def _run(point: GridPoint) -> RunOutput:
    """Measure one β. All β share weights, states and inputs, which are drawn from the seed before β is used."""
    beta = point.settings["beta"]
    # The spectrum is wide, since with equal eigenvalues M is a multiple of the identity for every Q.
    cell = cells.ADPTSpec(SIZE, spectrum=spectra.Linspace(dt_min=1e-2, dt_max=4.0)).build()
    assert isinstance(cell, cells.ADPTCell)
    plane = cell.directions[0](torch.randn(SIZE))
    numbers: dict[str, Any] = {"key": plane.key, "value": plane.value, "eigenvalues": cell.spectrum().real}
    numbers["angle"] = beta * float((1 - (plane.key @ plane.value).square()).sqrt())
    for name, retraction in RETRACTIONS.items():
        numbers[name] = float(_off_diagonal_share(retraction(plane.key, plane.value, beta).dense()))
    rotation = RETRACTIONS["exponential"](plane.key, plane.value, beta)
    numbers["M"] = float(_off_diagonal_share(RotatedConjugate([rotation], cell.spectrum()).dense()))
    numbers |= _measure_spectrum(beta, point.settings["steps"]) | {"iterations": _count_iterations(point)}
    return RunOutput(numbers, cell.spec)


def _measure_spectrum(beta: float, steps: int) -> dict[str, Any]:
    """Return exponents and the certified interval, for orthogonal K and V and a wide spectrum."""
    torch.manual_seed(1)
    axes: dict[str, Any] = {
        "projection": projections.Orthogonal(),
        "spectrum": spectra.Linspace(dt_min=2e-2, dt_max=1.0),
    }
    layer = ADPTNet.paper(16, beta=beta, gain=drive.LRU(), **axes).requires_grad_(False)
    assert isinstance(layer.cell, cells.ADPTCell)
    x = torch.randn(steps, 16)
    return {
        "exponents": analysis.lyapunov_exponents(layer, x).exponents,
        "log_eigenvalues": layer.cell.spectrum.log_modulus().sort(descending=True).values,
        "certified": list(analysis.certificate(layer).exponents),
    }


def _count_iterations(point: GridPoint) -> dict[str, list[int]]:
    """Return the iterations of each method in float64; -1 if it did not converge."""
    torch.manual_seed(2)
    layer = build_network(point.settings["width"], point.settings["beta"], 1e-3)
    x = torch.randn(2, point.settings["length"], point.settings["width"])
    counts = {}
    for method in METHODS:
        solution = solve(method, layer, x, 100)
        counts[method] = torch.where(solution.results == solvers.Result.CONVERGED, solution.iterations, -1).tolist()
    return counts


def _off_diagonal_share(matrix: Tensor) -> Tensor:
    """Return the sum of squared off-diagonal entries divided by the sum of all squared entries."""
    weights = matrix.square()
    return 1 - weights.diagonal(dim1=-2, dim2=-1).sum(-1) / weights.sum((-2, -1))


def _check_grows(rows: Rows) -> ClaimVerdict:
    """Up to a rotation by π, the share of squared entries of Q off its diagonal never decreases with β and ends larger
    than it starts, for both retractions."""
    up_to_half_turn = [row for row in rows if row.numbers["angle"] <= math.pi]
    series = [[row.numbers[name] for row in up_to_half_turn] for name in RETRACTIONS]
    top = up_to_half_turn[-1].settings["beta"]
    holds = all(s == sorted(s) and s[-1] > s[0] for s in series)
    return decide(holds, f"up to β = {top:g}: " + ", ".join(f"{s[0]:.1%} → {s[-1]:.1%}" for s in series))


def _check_every_beta(rows: Rows) -> ClaimVerdict:
    """The same, over the whole grid of β up to 8."""
    found = {name: rank_correlation(rows.values("beta"), rows.numbers(name)) for name in RETRACTIONS}
    holds = all(rows.numbers(name) == sorted(rows.numbers(name)) for name in RETRACTIONS)
    text = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
    return decide(holds, f"rank correlations {text}")


def _draw_curves(rows: Rows) -> "Figure":
    figure = plot.new_figure(9.5, 3.4)
    left, right = figure.subplots(1, 2)
    for name, colour in zip((*RETRACTIONS, "M"), plot.COLORS, strict=False):
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
    left.text(8, 800 / SIZE, "8/n: the most that one plane can reach", fontsize=8, ha="right", va="bottom")
    left.set(xlabel="β (dotted: rotation by π)", ylabel="% of squared entries off the diagonal", ylim=(0, 1000 / SIZE))
    for method, colour in zip(METHODS, plot.COLORS, strict=False):
        means = [
            np.mean(row.numbers["iterations"][method]) if min(row.numbers["iterations"][method]) > 0 else np.nan
            for row in rows
        ]
        right.plot(rows.values("beta"), means, "-o", markersize=3, color=colour, label=method)
    right.set(xlabel="β", ylabel="iterations")
    for axis in (left, right):
        axis.legend(frameon=False, fontsize=8)
        plot.strip_axes(axis)
    return figure


def _draw_matrices(rows: Rows) -> "Figure":
    from matplotlib.colors import PowerNorm

    numbers = rows[0].numbers
    key, value = torch.tensor(numbers["key"], dtype=torch.float64), torch.tensor(numbers["value"], dtype=torch.float64)
    eigen = torch.tensor(numbers["eigenvalues"], dtype=torch.float64)
    figure = plot.new_figure(8, 5)
    axes = figure.subplots(2, len(IMAGE_BETAS))
    for column, beta in enumerate(IMAGE_BETAS):
        rotation = RETRACTIONS["exponential"](key, value, beta).dense()
        for axis, matrix, name in zip(
            axes[:, column], (rotation, rotation * eigen @ rotation.mT), ("|Q|", "|M|"), strict=True
        ):
            image = axis.imshow(matrix.abs().numpy(), cmap="magma", norm=PowerNorm(0.5, 0, 1), interpolation="none")
            axis.set(xticks=[], yticks=[], title=f"{name}, β = {beta:g}")
    figure.colorbar(image, ax=axes, ticks=[0, 0.01, 0.05, 0.2, 0.5, 1], shrink=0.9)
    return figure


def _make_table(rows: Rows) -> Table:
    lines = []
    for row in rows:
        shares = [f"{row.numbers[name]:.2%}" for name in (*RETRACTIONS, "M")]
        each = ["/".join("–" if n < 0 else str(n) for n in row.numbers["iterations"][m]) for m in METHODS]
        lines.append([row.settings["beta"], f"{row.numbers['angle'] / math.pi:.3f} π", *shares, *each])
    return Table(["β", "angle", "Q off the diagonal", "Q, Cayley", "M", *(f"iterations, {m}" for m in METHODS)], lines)


RECIPES = {
    "fig:beta_effect_interactions": Recipe(
        version=1,
        points=_make_points,
        run=_run,
        checks={"grows": Check(_check_grows), "every-beta": Check(_check_every_beta)},
        figures={"Interactions and iterations by β": _draw_curves, "|Q| and |M| at one state": _draw_matrices},
        table=_make_table,
        cost={"smoke": "4 s", "laptop": "20 s", "paper": "20 s"},
    ),
}
