"""What β does to the interactions between the numbers of the state (fig:beta_effect_interactions).

Draws |Q| and |M| = |Q Λ̄ Q'| at one random state for three values of β, and the share of Q that lies off its diagonal
against β for both retractions. The share grows until the rotation is a half turn. Beyond it the exponential turns
back towards the identity, while the Cayley map only comes closer to a half turn (docs/deviations.md, point 5).
Seconds on one core; needs matplotlib:

    python examples/beta_effect.py
"""

import math
from pathlib import Path

import torch
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from adptnet import cells, conjugates, retractions, spectra
from adptnet.directions import KeyValue

SHOWN = (0.125, 1.0, 4.0)  # the β of the images
COLOURS = {"Exponential": "#0072b2", "Cayley": "#d55e00"}


@torch.no_grad()
def main(output: Path, size: int = 32, points: int = 401) -> dict[str, Tensor]:
    """Draws the figure into `output` and returns its curves.

    Returns:
        "angle", the β√(1 − (k·v)²) of the exponential, and "Exponential" and "Cayley", the shares, over β from 0 to 10.
    """
    torch.manual_seed(0)
    # A wide spectrum: were the eigenvalues all alike, M would be a multiple of the identity for every Q.
    cell = cells.ADPTSpec(size, spectrum=spectra.Linspace(dt_min=1e-2, dt_max=4.0)).build()
    plane = cell.directions[0](torch.randn(size))
    sine = (1 - (plane.key @ plane.value).square()).sqrt().item()
    betas = torch.linspace(0, 10, points)
    curves = {"angle": betas * sine}
    for retraction in (retractions.Exponential(), retractions.Cayley()):
        planes = (part.expand(points, size) for part in plane)  # one for each β, and so all β at once
        rotations = retraction(*planes, betas.unsqueeze(-1)).dense()
        curves[type(retraction).__name__] = off_diagonal_share(rotations)

    pairs = [matrices(beta, plane, cell) for beta in SHOWN]
    print(f"Off the diagonal at size {size}, exponential: of the squared entries (of their absolute values)")
    for beta, pair in zip(SHOWN, pairs, strict=True):
        shares = [f"{off_diagonal_share(m):5.1%} ({off_diagonal_share(m.abs().sqrt()):5.1%})" for m in pair]
        print(f"  β = {beta:<5g}  angle {beta * sine / math.pi:.2f} π   Q {shares[0]}   M {shares[1]}")
    top = betas[torch.where(curves["angle"] < 2 * math.pi, curves["Exponential"], 0).argmax()].item()
    rises = "rises all the way" if curves["Cayley"].diff().min() > 0 else "does NOT rise all the way"
    print(
        f"The exponential first peaks at β = {top:.2f} (half turn at {math.pi / sine:.2f}); Cayley {rises} to β = 10."
    )
    print(f"Only one plane turns, so for no β has Q more than 8/n = {8 / size:.0%} of its squares off the diagonal.")
    path = output / "beta_effect.png"
    draw(pairs, betas, curves, math.pi / sine, path)
    print(f"Figure: {path}")
    return curves


def matrices(beta: float, plane: KeyValue, cell: cells.ADPTCell) -> tuple[Tensor, Tensor]:
    """Q and M = Q Λ̄ Q', with the exponential."""
    rotation = retractions.Exponential()(*plane, beta)
    return rotation.dense(), conjugates.RotatedConjugate([rotation], cell.eigenvalues()).dense()


def off_diagonal_share(matrix: Tensor) -> Tensor:
    """The share of the squared entries that is not on the diagonal."""
    weights = matrix.square()
    return 1 - weights.diagonal(dim1=-2, dim2=-1).sum(-1) / weights.sum((-2, -1))


def draw(
    pairs: list[tuple[Tensor, Tensor]], betas: Tensor, curves: dict[str, Tensor], half_turn: float, path: Path
) -> None:
    figure = Figure(figsize=(11.5, 4.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(6, 5))
    images = left.subplots(2, len(pairs))
    scale = PowerNorm(0.5, 0, 1)  # shows a hundredth beside one
    for column, (beta, pair) in enumerate(zip(SHOWN, pairs, strict=True)):
        for axis, matrix, name in zip(images[:, column], pair, ("|Q|", "|M|"), strict=True):
            shown = axis.imshow(matrix.abs().numpy(), cmap="magma", norm=scale)
            axis.set(xticks=[], yticks=[], title=f"{name},  β = {beta:g}")
    left.colorbar(shown, ax=images, ticks=[0, 0.01, 0.05, 0.2, 0.5, 1], shrink=0.9)

    axis = right.subplots()
    for name, colour in COLOURS.items():
        axis.plot(betas.numpy(), 100 * curves[name].numpy(), color=colour, linewidth=2, label=name)
    axis.axvline(half_turn, ymax=0.8, color="black", linewidth=0.8, linestyle=":")
    axis.text(half_turn + 0.12, 0.5, "half turn of\nthe exponential", fontsize=8)
    ceiling = 800 / pairs[0][0].shape[-1]
    axis.axhline(ceiling, color="black", linewidth=0.8, linestyle="--")
    axis.text(10, 1.01 * ceiling, "8/n: all that one plane can reach", fontsize=8, ha="right", va="bottom")
    for beta in SHOWN:
        share = 100 * curves["Exponential"][(betas - beta).abs().argmin()].item()
        axis.plot(beta, share, "o", color=COLOURS["Exponential"])
    axis.set(xlabel="β", ylabel="off the diagonal (% of squared entries of Q)", title="Interactions in Q against β")
    axis.set_ylim(0, 1.25 * ceiling)
    axis.legend(frameon=False, loc="upper left", ncols=2)
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path("runs/examples"))
