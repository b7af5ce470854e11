"""Lyapunov exponents of one layer: `torch.func.jacrev` with QR at every step, against `analysis.lyapunov_exponents`.

python benchmarks/lyapunov.py
"""

import os
import time
from collections.abc import Callable

import torch

import adptnet
from adptnet import analysis
from adptnet.analysis.lyapunov import random_frame

SIZE, STEPS, BETA = 128, 4096, 0.125
TRIED, REPEATS = 64, 4  # steps of the slow side that are timed, the rest being in proportion; interleaved repeats


def by_automatic_differentiation(layer: adptnet.ADPTNet, x: torch.Tensor, transient: int) -> torch.Tensor:
    steps, size = x.shape
    step = layer.cell.stepper()
    drive = layer.cell.prepare(x.unsqueeze(0), torch.arange(steps).unsqueeze(0))[0]
    state, total = torch.zeros(size), torch.zeros(size)
    frame = random_frame(size, size).to(state)  # the same for both: what they align to takes longer than this
    for t in range(steps):
        matrix = torch.func.jacrev(step)(state, drive[t])
        state = step(state, drive[t])
        frame, upper = torch.linalg.qr(matrix @ frame)
        if t >= transient:
            total += upper.diagonal().abs().log()
    return (total / (steps - transient)).sort(descending=True).values


@torch.no_grad()
def compared(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    layer, x = adptnet.ADPTNet(SIZE, beta=BETA), torch.randn(STEPS, SIZE)
    frame = matrix = torch.randn(1, SIZE, SIZE)
    least: dict[str, float] = {}

    def timed(name: str, run: Callable[[], object], share: float = 1.0) -> None:
        start = time.process_time()
        run()
        least[name] = min(least.get(name, float("inf")), (time.process_time() - start) / share)

    for _ in range(REPEATS):
        timed("jacrev", lambda: by_automatic_differentiation(layer, x[:TRIED], TRIED // 2), TRIED / STEPS)
        timed("ours", lambda: analysis.lyapunov_exponents(layer, x))
        timed("products", lambda: [matrix @ frame for _ in range(TRIED)], TRIED / STEPS)
    shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in least.items())
    print(f"n = {SIZE}, T = {STEPS}, {dtype}, CPU seconds: {shown}; {least['jacrev'] / least['ours']:.0f} times")


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"{os.cpu_count()} cores, load {load:.1f}, torch {torch.__version__}, {adptnet.backends()['adpt_step']}")
    for dtype in (torch.float32, torch.float64):
        compared(dtype)
    layer, x = adptnet.ADPTNet(SIZE, beta=BETA), torch.randn(512, SIZE)
    exact = analysis.lyapunov_exponents(layer, x)
    expected = by_automatic_differentiation(layer, x, exact.window[0])
    found = analysis.lyapunov_exponents(layer.float(), x.float())
    for name, exponents in (("float64", exact.exponents), ("float32", found.exponents.double())):
        print(f"largest difference over 512 steps, {name}: {float((exponents - expected).abs().max()):.1e}")


if __name__ == "__main__":
    main()
