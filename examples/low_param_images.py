"""What matrices with few parameters can hold: the paper's two experiments on LowParam (sec:low_param_linear).

1. A picture as a matrix (fig:low-param_priors): low-rank, Kronecker and LowParam matrices are fitted to it by Adam.
   Does the low-rank part of LowParam narrow the spread of the error over the ratios of the Kronecker factors?
2. The outputs of a fresh LowParam layer against those of a dense one (fig:pre_activation_distribution), with the
   weights of `nn.Linear` and with the wider ones the paper prints (docs/deviations.md, point 9).

Under a minute on one core; needs matplotlib:

    python examples/low_param_images.py
"""

from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from adptnet.projections import Dense, Kronecker, LowParam, LowRank, ProjectionSpec

SIZE = 128
RATIOS = [(64, 2), (16, 8), (8, 16), (2, 64)]
BINS, END = 50, 2.5  # of the histograms, from -END to END; the outermost bins hold the tails as well


class Fit(NamedTuple):
    name: str
    parameters: int
    error: float  # mean squared
    image: Tensor


def main(output: Path, steps: int = 1500, seeds: int = 5) -> tuple[list[Fit], dict[str, float]]:
    """Runs both experiments, draws into `output`, and returns the fits and the mean divergences of LowParam."""
    output.mkdir(parents=True, exist_ok=True)
    fits = fit_all(steps)
    report(fits)
    draw_fits(fits, output / "low_param_images.png")

    shares = pre_activations(seeds)
    low = shares["LowParam"]
    divergences = {name: divergence(low, other) for name, other in shares.items() if name != "LowParam"}
    print(f"Divergence of LowParam's outputs from those of a dense layer, mean of {seeds} seeds (the paper has 0.01):")
    for name, value in divergences.items():
        print(f"  {value:.3f} for {name}")
    print("LowParam's histogram is rough because only 8 of its 1024 outputs differ: C is all ones at the start.")
    draw_histograms(shares, divergences, output / "low_param_preactivations.png")
    print(f"Figures: {output / 'low_param_images.png'}, {output / 'low_param_preactivations.png'}")
    return fits, divergences


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


def fit_all(steps: int) -> list[Fit]:
    """The picture itself, then each matrix fitted to it."""
    target = picture()
    specs: dict[str, ProjectionSpec] = {f"LowRank {rank}": LowRank(rank=rank) for rank in (2, 4, 16)}
    specs |= {f"Kronecker {a}×{b}": Kronecker(factors=(a, b)) for a, b in RATIOS}
    specs |= {f"LowParam {a}×{b} + 2": LowParam(factors=(a, b), rank=2) for a, b in RATIOS}
    return [Fit("the picture", SIZE**2, 0.0, target), *(fit(name, spec, target, steps) for name, spec in specs.items())]


def fit(name: str, spec: ProjectionSpec, target: Tensor, steps: int) -> Fit:
    torch.manual_seed(0)
    projection = spec.build(SIZE, SIZE)
    optimiser = torch.optim.Adam(projection.parameters(), lr=0.05)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        (projection.dense() - target).square().mean().backward()
        optimiser.step()
        rate.step()
    image = projection.dense().detach()
    return Fit(name, projection.parameter_count, (image - target).square().mean().item(), image)


def report(fits: list[Fit]) -> None:
    print(f"{'matrix':<20} {'parameters':>10} {'MSE':>8}   (the mean grey alone: {fits[0].image.var():.4f})")
    for row in fits[1:]:
        print(f"{row.name:<20} {row.parameters:>10,} {row.error:>8.4f}")
    alone, both = ([row.error for row in fits if row.name.startswith(kind)] for kind in ("Kronecker", "LowParam"))
    verdict = "mitigates" if max(both) - min(both) < max(alone) - min(alone) else "does not mitigate"
    print(
        f"The low-rank part {verdict} the spread over the four ratios: worst - best is "
        f"{max(alone) - min(alone):.4f} without it and {max(both) - min(both):.4f} with it, worst / best "
        f"{max(alone) / min(alone):.1f} and {max(both) / min(both):.1f}."
    )
    rank_16 = next(row.error for row in fits if row.name == "LowRank 16")
    print(f"From about 4,100 numbers the better Kronecker product comes to {min(alone):.4f}, rank 16 to {rank_16:.4f}.")


def pre_activations(seeds: int, size: int = 1024) -> dict[str, Tensor]:
    """The share of outputs in each bin, (seeds, bins), for as many Gaussian inputs as features."""
    shares: dict[str, list[Tensor]] = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        inputs = torch.randn(size, size)
        dense = Dense().build(size, size)(inputs).detach()
        low = LowParam(factors=(size // 8, 8), rank=16).build(size, size)(inputs).detach()
        named = {"LowParam": low, "weights in ±1/√n (nn.Linear)": dense, "weights in ±√(3/n) (printed)": dense * 3**0.5}
        for name, outputs in named.items():
            counts = torch.histc(outputs.clamp(-END, END), BINS, -END, END)
            shares.setdefault(name, []).append(counts / counts.sum())
    return {name: torch.stack(rows) for name, rows in shares.items()}


def divergence(p: Tensor, q: Tensor) -> float:
    """Kullback and Leibler's, of p from q in nats: the mean over seeds."""
    return torch.where(p > 0, p * (p / q).log(), 0.0).sum(-1).mean().item()


def draw_fits(fits: list[Fit], path: Path) -> None:
    figure = Figure(figsize=(9, 7.6), layout="constrained")
    for axis, row in zip(figure.subplots(3, 4).flat, fits, strict=True):
        axis.imshow(row.image.numpy(), cmap="gray", vmin=0, vmax=1)
        numbers = f"{row.parameters:,} numbers" + (f", MSE {row.error:.4f}" if row.error else "")
        axis.set_title(f"{row.name}\n{numbers}", fontsize=9)
        axis.set_axis_off()
    figure.savefig(path, dpi=130)


def draw_histograms(shares: dict[str, Tensor], divergences: dict[str, float], path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    edges, seeds = torch.linspace(-END, END, BINS + 1).numpy(), len(shares["LowParam"])
    for (name, share), colour in zip(shares.items(), ("#d55e00", "#0072b2", "#999999"), strict=True):
        label = f"{name}: KL {divergences[name]:.3f}" if name in divergences else f"{name} 128×8 + 16"
        axis.stairs(share[0].numpy() / (2 * END / BINS), edges, color=colour, linewidth=1.8, label=label)
    axis.set(xlabel="output", ylabel="density", title=f"Outputs at the start (seed 0; KL: mean of {seeds} seeds)")
    axis.set_xlim(-0.94 * END, 0.94 * END)  # without the bins of the tails
    axis.set_ylim(0, 1.35 * axis.get_ylim()[1])
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path("runs/examples"))
