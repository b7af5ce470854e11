"""Matrices with few parameters: fitted to a picture, and the outputs of a fresh layer (sec:low_param_linear)."""

import base64
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from adptnet.analysis import plot
from adptnet.recurrence.projections import Dense, Kronecker, LowParam, LowRank, ProjectionSpec

from ..recipe import Check, Finding, Point, Recipe, Row, Rows, Scale, Table, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = 128
RATIOS = [(64, 2), (16, 8), (8, 16), (2, 64)]
BINS, END = 50, 2.5  # of the histograms, from -END to END; the outermost bins hold the tails as well


def picture() -> Tensor:
    """Rings, stripes and lines of something like text on a slope of grey, in [0, 1]."""
    axis = torch.linspace(0, 1, SIZE)
    y, x = axis.unsqueeze(1), axis.unsqueeze(0)
    image = 0.3 + 0.25 * (x + y)
    radius = ((x - 0.33).square() + (y - 0.32).square()).sqrt()
    image = torch.where(radius < 0.28, 0.5 + 0.5 * torch.cos(70 * radius), image)
    stripes = (x - 0.76).square() + (y - 0.46).square() < 0.19**2
    image = torch.where(stripes, (torch.sin(90 * (x + 0.6 * y)) > 0).to(image.dtype), image)
    dots = torch.rand(3, 5, 44, generator=torch.Generator().manual_seed(0), dtype=torch.float32) < 0.55
    dots[..., ::4] = False  # between letters
    for line, ink in enumerate(dots.repeat_interleave(2, 1).repeat_interleave(2, 2)):
        image[84 + 14 * line : 94 + 14 * line, 8:96][ink] = 0.05
    return image


def matrices() -> dict[str, ProjectionSpec]:
    """What is fitted, by the name in the figure."""
    named: dict[str, ProjectionSpec] = {f"LowRank {rank}": LowRank(rank=rank) for rank in (2, 4, 16)}
    named |= {f"Kronecker {a}×{b}": Kronecker(factors=(a, b)) for a, b in RATIOS}
    return named | {f"LowParam {a}×{b} + 2": LowParam(factors=(a, b), rank=2) for a, b in RATIOS}


def _picture_points(scale: Scale) -> list[Point]:
    steps = {"smoke": 60, "laptop": 1500, "paper": 3000}[scale]
    return [Point({"matrix": name, "steps": steps}) for name in matrices()]


def _run_picture(point: Point) -> Finding:
    target, spec = picture(), matrices()[point.settings["matrix"]]
    projection = spec.build(SIZE, SIZE)
    optimiser = torch.optim.Adam(projection.parameters(), lr=0.05)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, point.settings["steps"])
    for _ in range(point.settings["steps"]):
        optimiser.zero_grad()
        (projection.dense() - target).square().mean().backward()
        optimiser.step()
        rate.step()
    image = projection.dense().detach()
    numbers = {
        "parameters": projection.parameter_count,
        "error": float((image - target).square().mean()),
        "variance": float(target.var()),
        "image": _packed(image),
    }
    return Finding(numbers, spec)


def _packed(image: Tensor) -> str:
    """256 greys, as text."""
    return base64.b64encode((image.clamp(0, 1) * 255).round().to(torch.uint8).numpy().tobytes()).decode()


def _unpacked(text: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(SIZE, SIZE)


def _errors(rows: Rows, kind: str) -> list[float]:
    return [row.numbers["error"] for row in rows if row.settings["matrix"].startswith(kind)]


def _fit(rows: Rows, name: str) -> Row:
    row: Row = rows.where(matrix=name)[0]
    return row


def _smooth(rows: Rows) -> Verdict:
    """Ranks 2 and 4 leave more than 30 % of the variance of the picture unexplained."""
    left = [_fit(rows, f"LowRank {rank}").numbers["error"] / rows[0].numbers["variance"] for rank in (2, 4)]
    return Verdict.of(min(left) > 0.3, ", ".join(f"{share:.0%}" for share in left))


def _ratio(rows: Rows) -> Verdict:
    """The worst Kronecker product has at least twice the error of the best."""
    errors = _errors(rows, "Kronecker")
    return Verdict.of(max(errors) > 2 * min(errors), f"errors {min(errors):.4f} to {max(errors):.4f}")


def _mitigates(rows: Rows) -> Verdict:
    """Worst minus best over the four ratios is smaller with the low-rank part than without."""
    alone, both = _errors(rows, "Kronecker"), _errors(rows, "LowParam")
    gaps = max(alone) - min(alone), max(both) - min(both)
    return Verdict.of(gaps[1] < gaps[0], f"{gaps[0]:.4f} without, {gaps[1]:.4f} with")


def _cheaper(rows: Rows) -> Verdict:
    """Of every low-rank fit there is a Kronecker product of a smaller error with at most 1 % more parameters."""
    kronecker = [row for row in rows if row.settings["matrix"].startswith("Kronecker")]
    beaten = {}
    for rank in (2, 4, 16):
        low = _fit(rows, f"LowRank {rank}").numbers
        beaten[rank] = any(
            k.numbers["parameters"] <= 1.01 * low["parameters"] and k.numbers["error"] < low["error"] for k in kronecker
        )
    return Verdict.of(all(beaten.values()), ", ".join(f"rank {r}: {'yes' if b else 'no'}" for r, b in beaten.items()))


def _draw_pictures(rows: Rows) -> "Figure":
    figure = plot.blank(9, 7.6)
    shown = [("the picture", _packed(picture()), f"{SIZE**2:,} numbers")]
    for row in rows:
        numbers = row.numbers
        shown.append(
            (row.settings["matrix"], numbers["image"], f"{numbers['parameters']:,} numbers, MSE {numbers['error']:.4f}")
        )
    for axis, (name, image, below) in zip(figure.subplots(3, 4).flat, shown, strict=True):
        axis.imshow(_unpacked(image), cmap="gray", vmin=0, vmax=255, interpolation="none")
        axis.set_title(f"{name}\n{below}", fontsize=9)
        axis.set_axis_off()
    return figure


def _picture_table(rows: Rows) -> Table:
    return Table(
        ["matrix", "parameters", "MSE"],
        [[r.settings["matrix"], r.numbers["parameters"], f"{r.numbers['error']:.4f}"] for r in rows],
    )


# fig:pre_activation_distribution

DENSE = {"default": 1.0, "printed": 3**0.5}  # times weights in ±1/√n


def _output_points(scale: Scale) -> list[Point]:
    return [Point({"size": 1024}, seed) for seed in range({"smoke": 1, "laptop": 5, "paper": 20}[scale])]


def _run_outputs(point: Point) -> Finding:
    size = point.settings["size"]
    inputs = torch.randn(size, size)
    dense = Dense().build(size, size)(inputs).detach()
    low = LowParam(factors=(size // 8, 8), rank=16).build(size, size)(inputs).detach()
    shares = {"LowParam": _shares(low)} | {name: _shares(dense * factor) for name, factor in DENSE.items()}
    numbers: dict[str, Any] = {"shares": shares, "different outputs": len(low[0].unique())}
    numbers["divergence"] = {name: divergence(shares["LowParam"], shares[name]) for name in DENSE}
    return Finding(numbers)


def _shares(outputs: Tensor) -> Tensor:
    counts = torch.histc(outputs.clamp(-END, END), BINS, -END, END)
    return counts / counts.sum()


def divergence(p: Tensor, q: Tensor) -> float:
    """Kullback and Leibler's, of p from q in nats."""
    return float(torch.where(p > 0, p * (p / q).log(), 0.0).sum())


def _near(rows: Rows, name: str) -> Verdict:
    found = [row.numbers["divergence"][name] for row in rows]
    return Verdict.of(0.002 < np.mean(found) < 0.05, f"mean {np.mean(found):.3f}, {min(found):.3f} to {max(found):.3f}")


def _printed(rows: Rows) -> Verdict:
    """The mean divergence from weights in ±√(3/n) is between 0.002 and 0.05."""
    return _near(rows, "printed")


def _default(rows: Rows) -> Verdict:
    """The mean divergence from weights in ±1/√n is between 0.002 and 0.05."""
    return _near(rows, "default")


def _draw_outputs(rows: Rows) -> "Figure":
    figure = plot.blank(7, 3.8)
    axis = figure.subplots()
    edges = np.linspace(-END, END, BINS + 1)
    labels = {"LowParam": "LowParam 128×8 + 16", "default": "dense, ±1/√n", "printed": "dense, ±√(3/n)"}
    for (name, share), colour in zip(rows[0].numbers["shares"].items(), ("#d55e00", "#0072b2", "#999999"), strict=True):
        label = labels[name] + (
            f": KL {np.mean([r.numbers['divergence'][name] for r in rows]):.3f}" if name in DENSE else ""
        )
        axis.stairs(np.asarray(share) / (2 * END / BINS), edges, color=colour, linewidth=1.8, label=label)
    axis.set(xlabel="output", ylabel="density", xlim=(-0.94 * END, 0.94 * END))  # without the bins of the tails
    axis.set_ylim(0, 1.35 * axis.get_ylim()[1])
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    plot.bare(axis)
    return figure


RECIPES = {
    "fig:low-param_priors": Recipe(
        version=1,
        points=_picture_points,
        run=_run_picture,
        checks={
            "smooth": Check(_smooth, "laptop"),
            "ratio": Check(_ratio, "laptop"),
            "mitigates": Check(_mitigates, "laptop"),
            "cheaper": Check(_cheaper, "laptop"),
        },
        figures={"A picture by few numbers": _draw_pictures},
        table=_picture_table,
        cost={"smoke": "2 s", "laptop": "30 s", "paper": "1 min"},
        dtype=torch.float32,
    ),
    "fig:pre_activation_distribution": Recipe(
        version=1,
        points=_output_points,
        run=_run_outputs,
        checks={"printed": Check(_printed), "default": Check(_default)},
        figures={"Outputs at the start (KL: mean over seeds)": _draw_outputs},
        cost={"smoke": "1 s", "laptop": "2 s", "paper": "8 s"},
        dtype=torch.float32,
    ),
}
