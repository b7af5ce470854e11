"""Use one layer: run, stream and pad sequences, train a model of it, save and load that model.

The toy task is to predict the sine of the running sum of the inputs. It takes a few seconds on one core:

    python examples/layer.py
"""

from pathlib import Path

import torch
from torch import Tensor

import adptnet as adpt
from adptnet import drive, spectra
from adptnet.optim import param_groups


def main(output: Path, width: int = 32, steps: int = 100) -> list[float]:
    """Run all parts, save the trained model in `output`, and return the training losses."""
    torch.manual_seed(0)
    layer = adpt.ADPTNet.paper(width, beta=1.0, spectrum=spectra.Linspace(dt_min=1e-3, dt_max=1.0), gain=drive.LRU())
    run(layer)
    model = adpt.SequenceModel(
        adpt.nn.BlockSpec(layer.spec), input_size=1, output_size=1
    )  # new weights, the same configuration
    losses = train(model, steps)
    save_and_load(model, output / "layer.safetensors")
    return losses


def run(layer: adpt.ADPTNet) -> None:
    """Run the layer on whole sequences, step by step, and on padded sequences of different lengths."""
    x = torch.randn(3, 20, layer.width)  # (batch, time, width)
    y, state = layer(x)  # outputs, and the hidden state after the last step
    print(f"forward: inputs {tuple(x.shape)}, outputs {tuple(y.shape)}, hidden state {tuple(state.state.shape)}")
    streamed, state = [], None  # no state: the sequence begins
    for x_t in x.unbind(1):
        y_t, state = layer.step(x_t, state)
        streamed.append(y_t)
    print(f"step: agrees with forward, to {(torch.stack(streamed, 1) - y).abs().max():.0e}")
    padded, _ = layer(x, lengths=torch.tensor([20, 7, 1]))  # right-padded; the padding is ignored
    alone, _ = layer(x[1, :7])  # the second sequence by itself
    print(f"lengths: agrees with each sequence alone, to {(padded[1, :7] - alone).abs().max():.0e}")


def train(model: adpt.SequenceModel, steps: int) -> list[float]:
    """Fit the toy task with a plain PyTorch loop and return the losses."""
    optimizer, generator, losses = torch.optim.Adam(param_groups(model, lr=1e-2)), torch.Generator().manual_seed(1), []
    for step in range(1, steps + 1):
        inputs, targets = draw_batch(generator)
        loss = (model(inputs)[0] - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 1 or step % max(1, steps // 4) == 0:
            print(f"training step {step:3d}: mean squared error {losses[-1]:.3f}")
    return losses


def draw_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(64, 12, 1, generator=generator) / 2
    return inputs, inputs.cumsum(1).sin()


@torch.no_grad()
def save_and_load(model: adpt.SequenceModel, path: Path) -> None:
    """Write weights and configuration to one file, and build an equal model from it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    adpt.save(model, path)
    inputs, _ = draw_batch(torch.Generator().manual_seed(2))
    equal = torch.equal(model(inputs)[0], adpt.load(path)(inputs)[0])
    print(f"{path}: outputs {'are identical' if equal else 'DIFFER'} after loading")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path("runs/examples"))
