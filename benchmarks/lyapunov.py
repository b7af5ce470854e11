"""Lyapunov exponents of one layer: `torch.func.jacrev` with QR at every step, against `analysis.lyapunov_exponents`.

python benchmarks/lyapunov.py
"""

import time

import torch

import adptnet
from adptnet import analysis, solvers

SIZE, STEPS, BETA = 128, 4096, 0.125


def by_automatic_differentiation(layer: adptnet.ADPTNet, x: torch.Tensor, transient: int) -> torch.Tensor:
    steps, size = x.shape
    step = layer.cell.stepper()
    drive = layer.cell.prepare(x.unsqueeze(0), torch.arange(steps).unsqueeze(0))[0]
    state, total = torch.zeros(size), torch.zeros(size)
    frame = torch.linalg.qr(torch.randn(size, size)).Q
    for t in range(steps):
        matrix = torch.func.jacrev(step)(state, drive[t])
        state = step(state, drive[t])
        frame, upper = torch.linalg.qr(matrix @ frame)
        if t >= transient:
            total += upper.diagonal().abs().log()
    return (total / (steps - transient)).sort(descending=True).values


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    layer, x = adptnet.ADPTNet(SIZE, beta=BETA), torch.randn(STEPS, SIZE)
    analysis.lyapunov_exponents(layer, x[:100], solver=solvers.ConvDEER())
    torch.func.jacrev(layer.cell.stepper())(x[0], x[0])  # what is loaded at the first call is not counted
    start = time.process_time()
    found = analysis.lyapunov_exponents(layer, x, solver=solvers.ConvDEER())
    ours = time.process_time() - start
    start = time.process_time()
    expected = by_automatic_differentiation(layer, x, found.window[0])
    theirs = time.process_time() - start
    difference = float((found.exponents - expected).abs().max())
    print(f"n = {SIZE}, T = {STEPS}, float64, one thread, CPU seconds")
    print(
        f"jacrev and QR {theirs:.1f}, ours {ours:.2f}: {theirs / ours:.1f} times; largest difference {difference:.1e}"
    )


if __name__ == "__main__":
    main()
