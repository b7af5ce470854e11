"""The fused recurrence against its own matrix products, a lower bound on its time, and against a diagonal scan."""

from dataclasses import replace

import torch
from torch import Tensor

from adptnet.ops.linear_scan import linear_scan

from ..benchmark import STANDARD_SIZES, Benchmark, Case, Size
from ..goals import Goal, Measurements
from ..timing import Side
from .workload import RecurrenceWorkload

__all__ = ["RECURRENCE"]

ROWS = 16384  # rows of the timed product for the gradient of the weights; times of more rows are extrapolated
STEPS = 256  # timed steps of sequential `torch.mm`; times of more steps are extrapolated


def _make_case(size: Size, fast: bool) -> Case:
    workload = RecurrenceWorkload(size)
    batch, steps, n = size
    rows, few = min(batch * steps, ROWS), min(steps, STEPS)
    both = workload.weight.reshape(2 * n, n)
    there, back = both.mT.contiguous(), both.contiguous()
    x, gradient = torch.randn(batch, n), torch.randn(batch, 2 * n)
    out, out_back = torch.empty(batch, 2 * n), torch.empty(batch, n)
    gradients, states = torch.randn(rows, 2 * n), torch.randn(rows, n)
    drive = workload.drive.detach()
    real = workload.constants.real.detach().requires_grad_()

    def products(a: Tensor, b: Tensor, into: Tensor) -> None:
        for _ in range(few):
            torch.mm(a, b, out=into)

    def diagonal() -> None:
        torch.autograd.grad(linear_scan(real, workload.drive), [real, workload.drive], workload.upstream)

    sides = [
        Side("forward", workload.forward),
        Side("training", workload.training),
        Side("training, lean", lambda: workload.training(lean=True)),
        Side("products of the forward, our tiles", lambda: workload.products("forward"), threads=1),
        Side("products of the backward, our tiles", lambda: workload.products("backward"), threads=1),
        Side("products of the weights, our tiles", lambda: workload.products("weights"), threads=1),
        Side("products of the forward, torch.mm", lambda: products(x, there, out), steps / few, threads=1),
        Side("products of the backward, torch.mm", lambda: products(gradient, back, out_back), steps / few, threads=1),
        Side("products of the weights, torch.mm", lambda: gradients.mT @ states, batch * steps / rows, threads=1),
        Side("diagonal scan, forward", lambda: linear_scan(real.detach(), drive)),
        Side("diagonal scan, training", diagonal),
    ]
    sides = [replace(side, warm=True) for side in sides]
    alone = batch == 1
    goals = [
        Goal("forward / products", lambda f: f.cpu("forward") / _forward_products(f), at_most=1.25 if alone else 1.15),
        Goal("training / products", lambda f: f.cpu("training") / _training_products(f), at_most=1.6 if alone else 1.2),
        Goal("lean / saving training", lambda f: f.cpu("training, lean") / f.cpu("training"), at_most=1.4),
    ]
    if batch >= 8:
        least = 1.5 if batch >= 16 else 1.4
        goals += [
            Goal(
                f"{name}, one thread / two",
                lambda f, name=name: f.wall(name) / f.wall(name, 2),  # type: ignore[misc]
                at_least=least,
                quiet=True,
            )
            for name in ("forward", "training")
        ]
    return Case(sides, goals)


def _faster_products(measured: Measurements, which: str) -> float:
    return min(measured.cpu(f"products of the {which}, {by}") for by in ("our tiles", "torch.mm"))


def _forward_products(measured: Measurements) -> float:
    return _faster_products(measured, "forward")


def _training_products(measured: Measurements) -> float:
    return _forward_products(measured) + _faster_products(measured, "backward") + _faster_products(measured, "weights")


RECURRENCE = Benchmark(
    "The fused recurrence, forward and training, against the faster of our tiles and torch.mm on the same products.",
    STANDARD_SIZES,
    (Size(1, 2048, 64), Size(8, 128, 128)),
    ("adpt_scan", "linear_scan"),
    _make_case,
)
