"""Sequential steps against Conv-DEER in blocks: the measurements behind the rule of `solvers.Auto`.

Three settings: with the fused operation; without kernels; and a cell that the fused operation does not cover, whose
scans are compiled nevertheless.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch

from adptnet import directions, solvers
from adptnet.nn import ADPTNet
from adptnet.solvers.auto import BLOCK

from ..benchmark import Benchmark, Case, Size
from ..goals import Goal, Measurements
from ..timing import Side
from .workload import use_reference_backend

__all__ = ["AUTO"]

LOOP_STEPS = 128  # timed steps of the eager loop; times of more steps are extrapolated
SETTINGS = ("fused", "no kernels", "cell without a kernel")
CANDIDATES = ("one after another", "Conv-DEER in blocks")


def _make_case(size: Size, fast: bool) -> Case:
    sides: list[Side] = []
    goals: list[Goal] = []
    numbers: dict[str, float] = {}
    few = min(size.steps, LOOP_STEPS)
    for setting in SETTINGS:
        torch.manual_seed(0)
        layer_norm = setting == "cell without a kernel"
        direction = directions.FromState(heads=2 if layer_norm else 1, layer_norm=layer_norm)
        layer, x = ADPTNet.paper(size.state, direction=direction), torch.randn(size)
        parameters = [p for p in layer.parameters() if p.requires_grad]

        def training(
            solver: solvers.Solver,
            x: torch.Tensor,
            setting: str = setting,
            layer: ADPTNet = layer,
            parameters: list[torch.nn.Parameter] = parameters,
        ) -> Callable[[], None]:
            def run() -> None:
                with use_reference_backend() if setting == "no kernels" else nullcontext():
                    torch.autograd.grad(layer(x, solver=solver)[0].sum(), parameters)

            return run

        steps = size.steps if setting == "fused" else few
        loop = training(solvers.Sequential(), x[:, :steps].contiguous())
        together = training(solvers.BlockWise(solvers.ConvDEER(max_iterations=64), block_length=BLOCK), x)
        sides.append(Side(f"{setting}: {CANDIDATES[0]}", loop, size.steps / steps))
        sides.append(Side(f"{setting}: {CANDIDATES[1]}", together))
        with use_reference_backend() if setting == "no kernels" else nullcontext():
            choice = solvers.Auto().choose(layer.cell, size.batch, size.steps, "cpu").solver
        chosen = 0 if isinstance(choice, solvers.Sequential) else 1
        numbers[f"{setting}: Auto solves together"] = float(chosen)

        def slowdown(measured: Measurements, setting: str = setting, chosen: int = chosen) -> float:
            times = [measured.cpu(f"{setting}: {name}") for name in CANDIDATES]
            return times[chosen] / min(times)

        goals.append(Goal(f"{setting}: chosen by Auto / the faster", slowdown, at_most=1.5))
    return Case(sides, goals, numbers)


AUTO = Benchmark(
    "Training by the sequential loop and by Conv-DEER in blocks of 1024, and the choice of solvers.Auto.",
    tuple(
        Size(*s)
        for s in [
            (1, 2048, 16),
            (1, 2048, 64),
            (4, 2048, 64),
            (16, 1024, 64),
            (1, 2048, 256),
            (8, 512, 256),
            (64, 512, 64),
        ]
    ),
    (Size(1, 256, 16),),
    ("adpt_scan", "adpt_step", "linear_scan", "solvers"),
    _make_case,
    threads=(1,),
)
