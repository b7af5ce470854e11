"""Gradient flossing: train the Lyapunov exponents of a tanh RNN, and prescribe those of an ADPTNet.

At initialization a tanh RNN forgets within a few steps. Flossing moves its leading exponents to targets by gradient
descent through a QR decomposition (Engelken, 2023). An ADPTNet has the targets as its spectrum, without training.
Takes less than a minute on one core and needs matplotlib:

    python examples/gradient_flossing.py
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from adptnet import ADPTNet, Recurrent, cells, drive, projections, spectra
from adptnet.analysis import certificate, gradient_flossing_loss, lyapunov_exponents, plot

TARGETS = (-0.02, -0.04, -0.06, -0.08)


def main(output: Path, size: int = 16, updates: int = 150) -> tuple[Tensor, Tensor]:
    """Floss an RNN, draw its exponents in `output`, and return the final exponents of the RNN and of the ADPTNet."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    rnn = Recurrent(cells.TanhRNN(size))
    optimizer = torch.optim.Adam(rnn.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    history = [leading_exponents(rnn, size)]
    for update in range(1, updates + 1):
        optimizer.zero_grad()
        gradient_flossing_loss(rnn, torch.randn(4, 60, size), TARGETS).backward()
        optimizer.step()
        schedule.step()
        if update % 5 == 0:
            history.append(leading_exponents(rnn, size))

    others = torch.linspace(-0.5, -1.5, size - len(TARGETS)).tolist()
    spectrum = spectra.FromExponents((*TARGETS, *others))
    layer = ADPTNet.paper(size, beta=0.01, spectrum=spectrum, projection=projections.Orthogonal(), gain=drive.LRU())
    prescribed = leading_exponents(layer, size)
    rows = {"targets": torch.tensor(TARGETS), "tanh RNN": history[0], "flossed": history[-1], "ADPTNet": prescribed}
    for name, exponents in rows.items():
        print(f"{name:<10}" + "".join(f"{value:9.4f}" for value in exponents.tolist()))
    limit = certificate(layer).exponents[1]
    print(f"The ADPTNet's largest exponent is certified to be at most {limit:.4f} for every input; the RNN's is not.")
    plot.save(draw(torch.stack(history), prescribed), output / "gradient_flossing")
    print(f"Figure: {output / 'gradient_flossing.png'}")
    return history[-1], prescribed


@torch.no_grad()
def leading_exponents(layer: Recurrent | ADPTNet, size: int) -> Tensor:
    """Return the leading exponents on new inputs, longer than those of the training."""
    inputs = torch.randn(4, 300, size, generator=torch.Generator().manual_seed(1))
    return lyapunov_exponents(layer, inputs, count=len(TARGETS)).exponents.mean(0)


def draw(history: Tensor, prescribed: Tensor) -> Figure:
    """Draw the exponents of the RNN over the updates, the targets (dotted) and those of the ADPTNet (diamonds)."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axis = figure.subplots()
    updates = 5 * torch.arange(len(history))
    for i, target in enumerate(TARGETS):
        (line,) = axis.plot(updates, history[:, i], label=f"α{'₁₂₃₄'[i]} of the tanh RNN")
        axis.axhline(target, color=line.get_color(), linewidth=0.8, linestyle=":")
        axis.plot(1.04 * updates[-1], prescribed[i], "D", color=line.get_color(), markersize=5, clip_on=False)
    axis.set_yscale("symlog", linthresh=0.1, linscale=2)
    axis.set(xlabel="updates (diamonds: ADPTNet, not trained)", ylabel="Lyapunov exponent per step")
    axis.set_title("Flossing moves the leading exponents to their targets (dotted)", fontsize=10)
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path("runs/examples"))
