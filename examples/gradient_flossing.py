"""Gradient flossing: training the Lyapunov exponents of a tanh RNN, beside a layer that has them prescribed.

A tanh RNN forgets within a few steps as it is initialised. Flossing moves its leading exponents to targets by gradient
descent through the QR decomposition (Engelken, 2023). An ADPTNet is given the same targets as its spectrum and needs no
training for it. Under a minute on one core; needs matplotlib:

    python examples/gradient_flossing.py
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from adptnet import ADPTNet, Recurrent, cells, drive, projections, spectra
from adptnet.analysis import certificate, gradient_flossing_loss, lyapunov_exponents, plot

TARGETS = (-0.02, -0.04, -0.06, -0.08)
COLOURS = ["#0072b2", "#009e73", "#d55e00", "#cc79a7"]


def main(output: Path, size: int = 16, updates: int = 150) -> tuple[Tensor, Tensor]:
    """Draws the exponents against the updates into `output`; returns those of the RNN and of the ADPTNet at the end."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    rnn = Recurrent(cells.TanhRNN(size))
    optimiser = torch.optim.Adam(rnn.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, updates)
    history = []
    for update in range(updates):
        if update % 5 == 0:
            history.append(leading(rnn, size))
        optimiser.zero_grad()
        gradient_flossing_loss(rnn, torch.randn(4, 60, size), TARGETS).backward()
        optimiser.step()
        schedule.step()
    history.append(leading(rnn, size))
    flossed = history[-1]

    others = torch.linspace(-0.5, -1.5, size - len(TARGETS)).tolist()
    spectrum = spectra.FromExponents((*TARGETS, *others))
    prescribed = ADPTNet(size, beta=0.01, spectrum=spectrum, projection=projections.Orthogonal(), gain=drive.LRU())
    given = leading(prescribed, size)
    for name, found in {
        "targets": torch.tensor(TARGETS),
        "tanh RNN": history[0],
        "flossed": flossed,
        "ADPTNet": given,
    }.items():
        print(f"{name:<10}" + "".join(f"{value:9.4f}" for value in found.tolist()))
    limit = certificate(prescribed).exponents[1]
    print(f"The ADPTNet's largest exponent is certified to be at most {limit:.4f} for every input; the RNN's is not.")
    plot.save(drawn(torch.stack(history), given, updates), output / "gradient_flossing")
    print(f"Figure: {output / 'gradient_flossing.png'}")
    return flossed, given


@torch.no_grad()
def leading(layer: Recurrent | ADPTNet, size: int) -> Tensor:
    """The leading exponents on fresh inputs, longer than those of the training."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 300, size, generator=generator)
    return lyapunov_exponents(layer, inputs, count=len(TARGETS)).exponents.mean(0)


def drawn(history: Tensor, given: Tensor, updates: int) -> Figure:
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axis = figure.subplots()
    places = torch.linspace(0, updates, len(history))
    for i, colour in enumerate(COLOURS):
        axis.plot(places, history[:, i], color=colour, linewidth=1.8, label=f"α{'₁₂₃₄'[i]} of the tanh RNN")
        axis.axhline(TARGETS[i], color=colour, linewidth=0.8, linestyle=":")
        axis.plot(1.04 * updates, given[i], "D", color=colour, markersize=5, clip_on=False)
    axis.set_yscale("symlog", linthresh=0.1, linscale=2)
    ticks = [-1, -0.5, -0.2, -0.1, -0.08, -0.06, -0.04, -0.02, 0]
    axis.set_yticks(ticks, [f"{tick:g}".replace("-", "−") for tick in ticks], minor=False)
    axis.set_yticks([], minor=True)
    axis.set(
        xlabel="updates (diamonds: ADPTNet, no training)", ylabel="Lyapunov exponent a step", xlim=(0, 1.06 * updates)
    )
    axis.set_title("Flossing moves the leading exponents to their targets (dotted)", fontsize=10)
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path("runs/examples"))
