"""Draw the figure of the README: measured against prescribed timescales, and accuracy on a state-tracking task by β.

    python examples/prescribed_timescales.py                    # two minutes on one core
    python examples/prescribed_timescales.py --steps 100 --window 1000 --output runs/figure.png

Left: -1 / Lyapunov exponent for each state dimension, measured with the QR method on white-noise input, against the
prescribed timescale.
Right: accuracy on the S3 word problem, trained at length 8, for a range of β. β = 0 is a diagonal state-space model.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from adptnet import ADPTNet, SequenceModel, analysis, cells, drive, spectra
from adptnet.nn import BlockSpec
from adptnet_lab.tasks import WordProblem
from adptnet_lab.training import TrainConfig, evaluate, train

PRESCRIBED = torch.logspace(0, 2.5, 16)  # timescales of 1 to 316 steps
MEASURED_BETAS = (0.0, 0.125, 1.0)
TRAINED_BETAS = (0.0, 0.125, 0.5, 1.0, 2.0, 4.0)


def measure_timescales(window: int) -> dict[str, torch.Tensor]:
    """Return the measured timescales of ADPTNets with the prescribed spectrum, and of a GRU of the same size."""
    torch.manual_seed(0)
    size = len(PRESCRIBED)
    inputs = torch.randn(1, window, size)
    spectrum = spectra.FromExponents(tuple((-1 / PRESCRIBED).tolist()))
    networks = {f"ADPTNet, β = {beta:g}": ADPTNet.paper(size, beta=beta, spectrum=spectrum) for beta in MEASURED_BETAS}
    networks["GRU"] = cells.from_torch(nn.GRUCell(size, size))
    with torch.no_grad():
        exponents = {name: analysis.lyapunov_exponents(net, inputs).exponents for name, net in networks.items()}
    return {name: (-1 / values.flatten()).sort().values for name, values in exponents.items()}


def train_and_evaluate(beta: float, steps: int) -> dict[int, float]:
    """Train a one-layer model with this β and return its accuracy in percent at 1 and 2 times the trained length."""
    task = WordProblem("S3", length=8)
    torch.manual_seed(0)
    spectrum = spectra.Negative(spectra.S4DReal(), 0.5)
    layer = ADPTNet.paper(64, beta=beta, spectrum=spectrum, gain=drive.LRU(), gate=drive.SoftplusGate())
    model = SequenceModel(BlockSpec(layer.spec, norm="batch", dropout=0.05), vocabulary=task.vocabulary)
    train(model, task, TrainConfig(steps=steps))
    return {length: 100 * scores["accuracy"] for length, scores in evaluate(model, task, [8, 16]).items()}


def draw(timescales: dict[str, torch.Tensor], accuracies: dict[float, dict[int, float]], path: Path) -> None:
    """Draw both panels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.9), layout="constrained")
    colors, markers = ("#999999", "#56b4e9", "#0072b2", "#d55e00"), "os^x"
    left.plot(PRESCRIBED, PRESCRIBED, color="black", linewidth=0.8)
    for (name, values), color, marker in zip(timescales.items(), colors, markers, strict=True):
        left.scatter(PRESCRIBED, values, s=26, color=color, marker=marker, label=name, zorder=2)
    left.text(200, 3.2, "a GRU's timescales\ncannot be prescribed", color=colors[3], fontsize=8, ha="center")
    left.set(xscale="log", yscale="log", xlabel="timescale prescribed (steps)", ylabel="timescale measured (steps)")
    left.set_title("Measured timescales follow the prescribed ones")
    left.legend(frameon=False, fontsize=8, loc="upper left")
    places = range(len(accuracies))
    for length, color, label in ((8, "#0072b2", "trained length"), (16, "#56b4e9", "twice the trained length")):
        right.plot(places, [row[length] for row in accuracies.values()], "o-", color=color, label=label)
    right.axhline(100 / 6, color="black", linewidth=0.8, linestyle="--")
    right.text(len(accuracies) - 1, 19, "chance", fontsize=8, ha="right")
    right.annotate("diagonal\nlinear SSM", (0, accuracies[0.0][16]), (0.15, 42), fontsize=8)
    right.set_xticks(places, [f"{beta:g}" for beta in accuracies])
    right.set(xlabel="β", ylabel="accuracy (%)", ylim=(0, 104), title="β > 0 enables state tracking (S3 word problem)")
    right.legend(frameon=False, fontsize=8, loc="center right")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="training steps of each model")
    parser.add_argument("--window", type=int, default=20_000, help="steps over which exponents are measured")
    parser.add_argument("--output", type=Path, default=Path("docs/images/prescribed_timescales.png"))
    options = parser.parse_args()
    timescales = measure_timescales(options.window)
    for name, values in timescales.items():
        errors = (values - PRESCRIBED).abs() / PRESCRIBED
        print(f"{name}: relative error of the timescales: median {errors.median():.3f}, largest {errors.max():.3f}")
    accuracies = {beta: train_and_evaluate(beta, options.steps) for beta in TRAINED_BETAS}
    for beta, row in accuracies.items():
        print(f"β = {beta:g}: accuracy {row[8]:.1f} % at the trained length, {row[16]:.1f} % at twice that length")
    draw(timescales, accuracies, options.output)


if __name__ == "__main__":
    main()
