"""Parallel-in-time solvers against the sequential loop, forward and in training."""

from collections.abc import Callable

import torch

from adptnet import solvers
from adptnet.nn import ADPTNet

from ..benchmark import Benchmark, Case, Size
from ..goals import Goal
from ..timing import Side
from .workload import use_reference_backend

__all__ = ["SOLVERS"]

CANDIDATES: dict[str, Callable[[], solvers.Solver]] = {
    "Sequential": solvers.Sequential,
    "Conv": solvers.ConvDEER,
    "Conv, tiles": lambda: solvers.ConvDEER(tiles=8),
    "Forward": solvers.ForwardDEER,
    "Quasi": solvers.QuasiDEER,
    "Koopman": solvers.KoopmanDEER,
    "Auto": solvers.Auto,
}
ITERATIONS = 3  # iterations of Conv- and of Forward-DEER in the comparison of the time per iteration
LOOP_STEPS = 64


def _make_case(size: Size, fast: bool) -> Case:
    torch.manual_seed(0)
    layer = ADPTNet.paper(size.state)
    x = torch.randn(size)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    sides, numbers = [], {}

    def forward(solver: solvers.Solver, x: torch.Tensor = x) -> Callable[[], solvers.Solution]:
        def run() -> solvers.Solution:
            with torch.no_grad():
                return solver(layer.cell, x)

        return run

    def training(solver: solvers.Solver) -> Callable[[], object]:
        return lambda: torch.autograd.grad(layer(x, solver=solver)[0].sum(), parameters)

    exact = forward(solvers.Sequential())().states
    for name, make in CANDIDATES.items():
        solver = make()
        found = forward(solver)()
        numbers[f"iterations of {name}"] = float(found.iterations.max())
        numbers[f"distance of {name}"] = float((found.states - exact).abs().max() / exact.abs().max())
        sides.append(Side(f"{name}, forward", forward(solver)))
        if name in ("Sequential", "Conv", "Forward", "Auto"):
            sides.append(Side(f"{name}, training", training(solver)))
    few = min(size.steps, LOOP_STEPS)
    some = forward(solvers.Sequential(), x[:, :few].contiguous())
    sides.append(Side("loop in torch, forward", lambda: _run_reference(some), size.steps / few, threads=1))
    for name in ("Conv", "Forward"):
        kind = {"Conv": solvers.ConvDEER, "Forward": solvers.ForwardDEER}[name]
        fixed = forward(kind(fixed_iterations=ITERATIONS, on_failure=solvers.Return()))
        sides.append(Side(f"{name}, {ITERATIONS} iterations", fixed, threads=1))
        sides.append(
            Side(f"{name}, {ITERATIONS} iterations in torch", lambda fixed=fixed: _run_reference(fixed), threads=1)  # type: ignore[misc]
        )
    least = [f"{name}, forward" for name in CANDIDATES if name != "Auto"]
    goals = [
        Goal(
            "Auto / the fastest, forward",
            lambda f: f.cpu("Auto, forward") / min(f.cpu(name) for name in least),
            at_most=1.25,
        ),
        Goal(
            "Auto / the fastest on two threads, forward",
            lambda f: f.wall("Auto, forward", 2) / min(f.wall(name, 2) for name in least),
            at_most=1.25,
            quiet=True,
        ),
    ]
    for how in ("", " in torch"):
        sides_of = [f"{name}, {ITERATIONS} iterations{how}" for name in ("Conv", "Forward")]
        goals.append(
            Goal(
                f"Conv-DEER takes over 25 % less time than Forward-DEER{how}: an iteration over its",
                lambda f, of=tuple(sides_of): f.cpu(of[0]) / f.cpu(of[1]),  # type: ignore[misc]
                at_most=0.75,
                claim="fig:pareto_blocks",
            )
        )
    return Case(sides, goals, numbers)


def _run_reference(run: Callable[[], object]) -> None:
    with use_reference_backend():
        run()


SOLVERS = Benchmark(
    "Parallel solvers against the fused sequential loop, at the default initialisation.",
    tuple(Size(*s) for s in [(1, 1024, 64), (8, 1024, 64), (1, 1024, 256), (1, 512, 512)]),
    (Size(1, 128, 32),),
    ("adpt_scan", "adpt_step", "linear_scan", "solvers"),
    _make_case,
)
