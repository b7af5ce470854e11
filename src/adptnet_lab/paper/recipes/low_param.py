"""Matrices with few parameters: fits to an image, and the outputs of an untrained layer (sec:low_param_linear)."""

import base64
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from adptnet.analysis import plot
from adptnet.recurrence.projections import Dense, Kronecker, LowParam, LowRank, ProjectionSpec

from ..evidence import estimate_mean
from ..recipe import Check, GridPoint, Recipe, Row, Rows, RunOutput, Scale, Table
from ..verdicts import ClaimVerdict, decide, judge_equal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = 128
RATIOS = [(64, 2), (16, 8), (8, 16), (2, 64)]
BINS, END = 50, 2.5  # bins of the histograms, which range from -END to END; the outermost bins include the tails


def make_target() -> Tensor:
    """Return an image in [0, 1] of rings, stripes and text-like lines on a grey gradient, (SIZE, SIZE)."""
    axis = torch.linspace(0, 1, SIZE)
    y, x = axis.unsqueeze(1), axis.unsqueeze(0)
    image = 0.3 + 0.25 * (x + y)
    radius = ((x - 0.33).square() + (y - 0.32).square()).sqrt()
    image = torch.where(radius < 0.28, 0.5 + 0.5 * torch.cos(70 * radius), image)
    stripes = (x - 0.76).square() + (y - 0.46).square() < 0.19**2
    image = torch.where(stripes, (torch.sin(90 * (x + 0.6 * y)) > 0).to(image.dtype), image)
    dots = torch.rand(3, 5, 44, generator=torch.Generator().manual_seed(0), dtype=torch.float32) < 0.55
    dots[..., ::4] = False  # gaps between letters
    for line, ink in enumerate(dots.repeat_interleave(2, 1).repeat_interleave(2, 2)):
        image[84 + 14 * line : 94 + 14 * line, 8:96][ink] = 0.05
    return image


def list_matrices() -> dict[str, ProjectionSpec]:
    """Return the parametrisations to fit, by their name in the figure."""
    specs: dict[str, ProjectionSpec] = {f"LowRank {rank}": LowRank(rank=rank) for rank in (2, 4, 16)}
    specs |= {f"Kronecker {a}×{b}": Kronecker(factors=(a, b)) for a, b in RATIOS}
    return specs | {f"LowParam {a}×{b} + 2": LowParam(factors=(a, b), rank=2) for a, b in RATIOS}


def _make_fit_points(scale: Scale) -> list[GridPoint]:
    steps = {"smoke": 60, "laptop": 1500, "paper": 3000}[scale]
    return [GridPoint({"matrix": name, "steps": steps}) for name in list_matrices()]


def fit_matrix(point: GridPoint) -> RunOutput:
    """Fit a matrix to the image by gradient descent.

    Args:
        point: Settings `matrix` (its name) and `steps`.
    """
    target, spec = make_target(), list_matrices()[point.settings["matrix"]]
    projection = spec.build(SIZE, SIZE)
    optimizer = torch.optim.Adam(projection.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, point.settings["steps"])
    for _ in range(point.settings["steps"]):
        optimizer.zero_grad()
        (projection.dense() - target).square().mean().backward()
        optimizer.step()
        schedule.step()
    image = projection.dense().detach()
    numbers = {
        "parameters": projection.parameter_count,
        "error": float((image - target).square().mean()),
        "variance": float(target.var()),
        "image": _encode_image(image),
    }
    return RunOutput(numbers, spec)


def _encode_image(image: Tensor) -> str:
    """Encode an image in [0, 1] as base64 text with 8 bits per pixel."""
    return base64.b64encode((image.clamp(0, 1) * 255).round().to(torch.uint8).numpy().tobytes()).decode()


def _decode_image(text: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(SIZE, SIZE)


def _errors(rows: Rows, kind: str) -> list[float]:
    return [row.numbers["error"] for row in rows if row.settings["matrix"].startswith(kind)]


def _row_of(rows: Rows, name: str) -> Row:
    row: Row = rows.where(matrix=name)[0]
    return row


def _check_smooth(rows: Rows) -> ClaimVerdict:
    """Ranks 2 and 4 leave more than 30 % of the variance of the image unexplained."""
    shares = [_row_of(rows, f"LowRank {rank}").numbers["error"] / rows[0].numbers["variance"] for rank in (2, 4)]
    return decide(min(shares) > 0.3, ", ".join(f"{share:.0%}" for share in shares))


def _check_ratio(rows: Rows) -> ClaimVerdict:
    """The worst Kronecker product has at least twice the error of the best."""
    errors = _errors(rows, "Kronecker")
    return decide(max(errors) > 2 * min(errors), f"errors {min(errors):.4f} to {max(errors):.4f}")


def _check_mitigates(rows: Rows) -> ClaimVerdict:
    """Worst minus best over the four ratios is smaller with the low-rank part than without."""
    alone, both = _errors(rows, "Kronecker"), _errors(rows, "LowParam")
    gaps = max(alone) - min(alone), max(both) - min(both)
    return decide(gaps[1] < gaps[0], f"{gaps[0]:.4f} without, {gaps[1]:.4f} with")


def _check_cheaper(rows: Rows) -> ClaimVerdict:
    """At the smallest budget of a Kronecker product (320 parameters, at which the best low-rank matrix has rank 1) it
    has a smaller error than any matrix of rank 1."""
    kronecker = [row.numbers for row in rows if row.settings["matrix"].startswith("Kronecker")]
    budget = min(numbers["parameters"] for numbers in kronecker)
    error = min(numbers["error"] for numbers in kronecker if numbers["parameters"] == budget)
    rank = budget // (2 * SIZE)
    low_rank = float(torch.linalg.svdvals(make_target())[rank:].square().sum() / SIZE**2)  # Eckart and Young
    return decide(error < low_rank, f"{budget} parameters: Kronecker {error:.4f}, rank {rank} {low_rank:.4f}")


def _draw_fits(rows: Rows) -> "Figure":
    figure = plot.new_figure(9, 7.6)
    panels = [("target image", _encode_image(make_target()), f"{SIZE**2:,} entries")]
    for row in rows:
        parameters, error = row.numbers["parameters"], row.numbers["error"]
        panels.append((row.settings["matrix"], row.numbers["image"], f"{parameters:,} parameters, MSE {error:.4f}"))
    for axis, (name, image, subtitle) in zip(figure.subplots(3, 4).flat, panels, strict=True):
        greys = _decode_image(image) // 8  # 32 levels, which keeps the file small
        axis.imshow(greys, cmap="gray", vmin=0, vmax=31, interpolation="none")
        axis.set_title(f"{name}\n{subtitle}", fontsize=9)
        axis.set_axis_off()
    return figure


def _make_fit_table(rows: Rows) -> Table:
    return Table(
        ["matrix", "parameters", "MSE"],
        [[r.settings["matrix"], r.numbers["parameters"], f"{r.numbers['error']:.4f}"] for r in rows],
    )


# fig:pre_activation_distribution

DENSE = {"default": 1.0, "printed": 3**0.5}  # scale of weights in ±1/√n


def _make_output_points(scale: Scale) -> list[GridPoint]:
    return [GridPoint({"size": 1024}, seed) for seed in range({"smoke": 1, "laptop": 5, "paper": 20}[scale])]


def _run_outputs(point: GridPoint) -> RunOutput:
    size = point.settings["size"]
    inputs = torch.randn(size, size)
    dense = Dense().build(size, size)(inputs).detach()
    low = LowParam(factors=(size // 8, 8), rank=16).build(size, size)(inputs).detach()
    shares = {"LowParam": _shares(low)} | {name: _shares(dense * factor) for name, factor in DENSE.items()}
    numbers: dict[str, Any] = {"shares": shares, "different outputs": len(low[0].unique())}
    numbers["divergence"] = {name: kl_divergence(shares["LowParam"], shares[name]) for name in DENSE}
    return RunOutput(numbers)


def _shares(outputs: Tensor) -> Tensor:
    counts = torch.histc(outputs.clamp(-END, END), BINS, -END, END)
    return counts / counts.sum()


def kl_divergence(p: Tensor, q: Tensor) -> float:
    """Return the Kullback-Leibler divergence of p from q, in nats.

    Args:
        p: Probabilities.
        q: Probabilities, positive wherever `p` is.
    """
    return float(torch.where(p > 0, p * (p / q).log(), 0.0).sum())


def _judge_divergence(rows: Rows, name: str) -> ClaimVerdict:
    found = [row.numbers["divergence"][name] for row in rows]
    factor = estimate_mean([math.log(value / 0.01) for value in found], "(ln of the ratio to 0.01)")
    return judge_equal(factor, math.log(5), f"mean {np.mean(found):.3f}, {min(found):.3f} to {max(found):.3f}")


def _check_printed(rows: Rows) -> ClaimVerdict:
    """The mean divergence from weights in ±√(3/n), on a logarithmic scale, is within a factor of 5 of 0.01."""
    return _judge_divergence(rows, "printed")


def _check_default(rows: Rows) -> ClaimVerdict:
    """The mean divergence from weights in ±1/√n, on a logarithmic scale, is within a factor of 5 of 0.01."""
    return _judge_divergence(rows, "default")


def _draw_outputs(rows: Rows) -> "Figure":
    figure = plot.new_figure(7, 3.8)
    axis = figure.subplots()
    edges = np.linspace(-END, END, BINS + 1)
    labels = {"LowParam": "LowParam 128×8 + 16", "default": "dense, ±1/√n", "printed": "dense, ±√(3/n)"}
    for (name, share), colour in zip(rows[0].numbers["shares"].items(), ("#d55e00", "#0072b2", "#999999"), strict=True):
        label = labels[name] + (
            f": KL {np.mean([r.numbers['divergence'][name] for r in rows]):.3f}" if name in DENSE else ""
        )
        axis.stairs(np.asarray(share) / (2 * END / BINS), edges, color=colour, linewidth=1.8, label=label)
    axis.set(xlabel="output", ylabel="density", xlim=(-0.94 * END, 0.94 * END))  # without the outermost bins
    axis.set_ylim(0, 1.35 * axis.get_ylim()[1])
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    plot.strip_axes(axis)
    return figure


RECIPES = {
    "fig:low-param_priors": Recipe(
        version=1,
        points=_make_fit_points,
        run=fit_matrix,
        checks={
            "smooth": Check(_check_smooth, "laptop"),
            "ratio": Check(_check_ratio, "laptop"),
            "mitigates": Check(_check_mitigates, "laptop"),
            "cheaper": Check(_check_cheaper, "laptop"),
        },
        figures={"An image fitted with few parameters": _draw_fits},
        table=_make_fit_table,
        cost={"smoke": "2 s", "laptop": "30 s", "paper": "1 min"},
        dtype=torch.float32,
    ),
    "fig:pre_activation_distribution": Recipe(
        version=1,
        points=_make_output_points,
        run=_run_outputs,
        checks={"printed": Check(_check_printed), "default": Check(_check_default)},
        figures={"Outputs at initialisation (KL: mean over seeds)": _draw_outputs},
        cost={"smoke": "1 s", "laptop": "2 s", "paper": "8 s"},
        dtype=torch.float32,
    ),
}
