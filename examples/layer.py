"""The layer in use: whole sequences, single steps, ragged batches, a short training run, saving and loading.

The toy task is to say the sine of the sum of all inputs so far, from the inputs one at a time. Prints what it does;
a few seconds on one core:

    python examples/layer.py
"""

from pathlib import Path

import torch
from torch import Tensor

import adptnet as adpt
from adptnet import drive, spectra
from adptnet.optim import param_groups


def main(output: Path, width: int = 32, steps: int = 100) -> list[float]:
    """Runs all of it, writes the trained model into `output` and returns the loss at every training step."""
    torch.manual_seed(0)
    layer = adpt.ADPTNet(width, beta=1.0, spectrum=spectra.Linspace(dt_min=1e-3, dt_max=1.0), gain=drive.LRU())
    eigenvalues = layer.cell.eigenvalues().real
    print(f"A layer of width {width}, β = 1, eigenvalues from {eigenvalues.min():.3f} to {eigenvalues.max():.3f}.")
    use(layer)
    model, losses = train(layer, steps)
    round_trip(model, output / "layer.safetensors")
    return losses


def use(layer: adpt.ADPTNet) -> None:
    """Three ways to run it. They give the same numbers."""
    x = torch.randn(3, 20, layer.width)  # (batch, time, width)
    y, state = layer(x)  # outputs, and the state after the last step
    print(f"forward: {tuple(x.shape)} in, {tuple(y.shape)} out, state {tuple(state.state.shape)}.")

    streamed, memory = [], None  # no state yet: the sequence begins
    for x_t in x.unbind(1):
        y_t, memory = layer.step(x_t, memory)
        streamed.append(y_t)
    print(f"step: the same outputs one at a time, to {largest_difference(torch.stack(streamed, 1), y):.0e}.")

    lengths = torch.tensor([20, 7, 1])
    ragged, ends = layer(x, lengths=lengths)  # right-padded; what is in the padding does not matter
    alone, end = layer(x[1, :7])  # the second sequence without its padding or its neighbours
    apart = max(largest_difference(ragged[1, :7], alone), largest_difference(ends.state[1], end.state))
    print(f"lengths={lengths.tolist()}: as each sequence by itself, to {apart:.0e}; zeros past the end.")


def train(layer: adpt.ADPTNet, steps: int) -> tuple[adpt.SequenceModel, list[float]]:
    """Fits a model of one such layer to the toy task with plain torch."""
    model = adpt.SequenceModel(layer.spec, input_size=1, output_size=1)  # fresh weights, the same description
    optimiser = torch.optim.Adam(param_groups(model, lr=1e-2))
    data = torch.Generator().manual_seed(1)
    losses = []
    for step in range(1, steps + 1):
        inputs, targets = running_sine(data)
        predictions, _ = model(inputs)
        loss = (predictions - targets).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if step == 1 or step % max(1, steps // 4) == 0:
            print(f"training step {step:3d}: mean squared error {losses[-1]:.3f}")
    return model, losses


def running_sine(data: torch.Generator, batch: int = 64, length: int = 12) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(batch, length, 1, generator=data) / 2
    return inputs, inputs.cumsum(1).sin()


def round_trip(model: adpt.SequenceModel, path: Path) -> None:
    """One file holds the weights and the description; loading needs nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    adpt.save(model, path)
    loaded = adpt.load(path)
    inputs, _ = running_sine(torch.Generator().manual_seed(2))
    with torch.no_grad():
        same = torch.equal(model(inputs)[0], loaded(inputs)[0])
    print(f"save and load: outputs {'are identical' if same else 'DIFFER'}, {path} has {path.stat().st_size:,} bytes.")


def largest_difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path("runs/examples"))
