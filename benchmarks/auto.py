"""Steps one after another against Conv-DEER in blocks, on this machine: what the rule of `solvers.Auto` rests on.

python benchmarks/auto.py
"""

import time

import torch

import adptnet
from adptnet import solvers

SIZES = [(1, 2048, 16), (1, 2048, 64), (4, 2048, 64), (16, 1024, 64), (1, 2048, 256), (8, 512, 256)]


def cost(layer: adptnet.ADPTNet, x: torch.Tensor, solver: solvers.Solver) -> float:
    start = time.process_time()
    y, _ = layer(x, solver=solver)
    y.sum().backward()
    return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    print("batch  steps  state   a step of the loop   the same by Conv-DEER   ratio   chosen")
    for batch, steps, width in SIZES:
        torch.manual_seed(0)
        layer, x = adptnet.ADPTNet(width), torch.randn(batch, steps, width)
        contenders = (solvers.Sequential(), solvers.BlockWise(solvers.ConvDEER(), block_length=1024))
        costs = [[cost(layer, x, solver) for solver in contenders] for _ in range(3)]
        loop, together = (min(column) / steps * 1e6 for column in zip(*costs, strict=True))
        chosen = solvers.Auto().choose(layer.cell, batch, steps, x.device).solver
        print(f"{batch:5d} {steps:6d} {width:6d} {loop:17.0f} us {together:20.0f} us {together / loop:7.2f}   {chosen}")


if __name__ == "__main__":
    main()
