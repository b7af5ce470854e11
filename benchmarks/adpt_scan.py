"""The fused recurrence against its own matrix products, the loop in torch, and torch's recurrent layers.

Single thread, CPU time, the smallest of interleaved repeats, all sides in one process:

    python benchmarks/adpt_scan.py [--repeats 7] [--sizes 0,1] [--fast]
"""

import argparse
import os
import platform
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import adptnet
from adptnet import adjoints
from adptnet.ops.adpt_scan import Constants, Form, adpt_scan, cpu

SIZES = [(1, 16384, 64), (8, 1024, 128), (64, 1024, 128), (64, 128, 256), (512, 8, 512), (16, 4096, 256)]
LOOP_STEPS = 32  # steps of the loop in torch that are timed; the rest is in proportion

Side = Callable[[], object]


def operation(batch: int, steps: int, size: int) -> tuple[dict[str, tuple[Side, float]], dict[str, str]]:
    """Sides by name, each with what to multiply its time by; and ratios to show, as expressions in those names."""
    form = Form()
    lambda_bar = torch.exp(-0.5 * torch.exp(torch.linspace(-7, -2.3, size)))
    drive, state = torch.randn(batch, steps, size) * (1 - lambda_bar), torch.zeros(batch, size)
    weight = (torch.rand(1, 2, size, size) * 2 - 1) / size**0.5
    leaves = [t.clone().requires_grad_() for t in (drive, lambda_bar, weight, torch.tensor([0.125]))]
    upstream = torch.randn(batch, steps, size)
    constants = Constants(lambda_bar, weight=weight, beta=leaves[3].detach())

    def train(lean: bool) -> None:
        moving, real, matrices, beta = leaves
        states = adpt_scan(moving, state, Constants(real, weight=matrices, beta=beta), form, lean=lean)
        torch.autograd.grad(states, leaves, upstream)

    @torch.no_grad()
    def forward() -> Tensor:
        return adpt_scan(drive, state, constants, form)

    rows = min(batch * steps, 16384)
    few = min(steps, 256)
    x, back = torch.randn(batch, size), torch.randn(batch, 2 * size)
    both = weight.reshape(2 * size, size)
    there, gradients, states = both.mT.contiguous(), torch.randn(rows, 2 * size), torch.randn(rows, size)
    out, out_back = torch.empty(batch, 2 * size), torch.empty(batch, size)

    def products(a: Tensor, b: Tensor, into: Tensor) -> Side:
        return lambda: [torch.mm(a, b, out=into) for _ in range(few)]

    sides: dict[str, tuple[Side, float]] = {
        "forward": (forward, 1),
        "train": (lambda: train(False), 1),
        "lean": (lambda: train(True), 1),
        "tile_forward": (lambda: cpu.products(drive, state, constants, form, transposed=False), 1),
        "tile_backward": (lambda: cpu.products(drive, state, constants, form, transposed=True), 1),
        "mm_forward": (products(x, there, out), steps / few),
        "mm_backward": (products(back, both.contiguous(), out_back), steps / few),
        "mm_weights": (lambda: gradients.mT @ states, batch * steps / rows),
    }
    ratios = {
        "forward / products": "forward / min(tile_forward, mm_forward)",
        "training / products": "train / (min(tile_forward, mm_forward) + min(tile_backward, mm_backward) + mm_weights)",
        "lean / saving": "lean / train",
    }
    return sides, ratios


def layers(batch: int, steps: int, size: int) -> tuple[dict[str, tuple[Side, float]], dict[str, str]]:
    """The whole layer, with its input projection, against torch's: forward and backward."""
    x, upstream = torch.randn(batch, steps, size), torch.randn(batch, steps, size)
    models: dict[str, nn.Module] = {
        "ours": adptnet.ADPTNet(size),
        "gru": nn.GRU(size, size, batch_first=True),
        "lstm": nn.LSTM(size, size, batch_first=True),
        "rnn": nn.RNN(size, size, batch_first=True, nonlinearity="relu"),
    }

    def train(model: nn.Module) -> Side:
        parameters = [p for p in model.parameters() if p.requires_grad]
        return lambda: torch.autograd.grad(model(x)[0], parameters, upstream)

    def loop() -> None:
        model, few = models["ours"], min(steps, LOOP_STEPS)
        os.environ["ADPTNET_BACKEND"] = "reference"
        try:
            y = model(x[:, :few], adjoint=adjoints.Unrolled())[0]
            torch.autograd.grad(y, [p for p in model.parameters() if p.requires_grad], upstream[:, :few])
        finally:
            del os.environ["ADPTNET_BACKEND"]

    sides: dict[str, tuple[Side, float]] = {name: (train(model), 1) for name, model in models.items()}
    sides["loop"] = (loop, steps / min(steps, LOOP_STEPS))
    return sides, {f"layer / {name}": f"ours / {name}" for name in ("gru", "lstm", "rnn", "loop")}


def measured(sides: dict[str, tuple[Side, float]], repeats: int) -> dict[str, float]:
    """The smallest CPU time of each side, in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats + 1):  # the first warms up
        for name, (side, scale) in sides.items():
            start = time.process_time()
            side()
            times[name].append((time.process_time() - start) * scale * 1e3)
    return {name: min(each[1:]) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sizes", default=",".join(map(str, range(len(SIZES)))))
    parser.add_argument("--fast", action="store_true", help="the operation only, without layers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"{platform.machine()}, {platform.processor() or platform.system()}, {os.cpu_count()} cores, load {load:.1f}")
    print(f"torch {torch.__version__}, adptnet {adptnet.__version__}, {adptnet.backends()['adpt_scan']}")
    for index in map(int, options.sizes.split(",")):
        print(f"batch {SIZES[index][0]}, steps {SIZES[index][1]}, size {SIZES[index][2]}")
        for kind in (operation,) if options.fast else (operation, layers):
            torch.manual_seed(0)
            sides, ratios = kind(*SIZES[index])
            times = measured(sides, options.repeats)
            print("  ms    " + "  ".join(f"{name} {value:.2f}" for name, value in times.items()))
            print("  ratio " + "  ".join(f"{name} {eval(r, {'min': min}, times):.3g}" for name, r in ratios.items()))


if __name__ == "__main__":
    main()
