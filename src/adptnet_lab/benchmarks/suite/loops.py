"""The fused recurrence against eager loops over time: as they are, and with the step compiled by torch.compile."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from adptnet.ops import _build
from adptnet.ops.adpt_scan import Constants
from adptnet.ops.adpt_scan.reference import adpt_scan as loop

from ..benchmark import STANDARD_SIZES, Benchmark, Case, Size
from ..goals import Goal
from ..timing import Side
from .workload import RecurrenceWorkload, use_reference_backend

__all__ = ["LOOPS"]

STEPS = 64  # timed steps of a loop; times of more steps are extrapolated


def _make_case(size: Size, fast: bool) -> Case:
    workload = RecurrenceWorkload(size)
    few = min(size.steps, STEPS)
    scale = size.steps / few
    forward, training = workload.first_steps(_run_loop, few)
    sides = [
        Side("fused, forward", workload.forward),
        Side("fused, training", workload.training),
        Side("loop, forward", forward, scale),
        Side("loop, training", training, scale),
    ]
    skipped, numbers = {}, {}
    obstacle = _find_obstacle(fast)
    if obstacle is None:
        torch._dynamo.reset()  # otherwise it stops compiling at the eighth shape
        compiled = workload.first_steps(_compile_loop(), few)
        for kind, run in zip(("forward", "training"), compiled, strict=True):
            start = time.perf_counter()
            run()
            numbers[f"seconds to compile the step, {kind}"] = time.perf_counter() - start
            sides.append(Side(f"compiled step, {kind}", run, scale))
    else:
        skipped["compiled step"] = obstacle
    goals = []
    if size == STANDARD_SIZES[0]:
        goals.append(
            Goal("training / loop", lambda f: f.cpu("fused, training") / f.cpu("loop, training"), at_most=1 / 500)
        )
    return Case(sides, goals, numbers, skipped)


def _run_loop(drive: Tensor, state: Tensor, constants: Constants) -> Tensor:
    with use_reference_backend():
        return loop(drive, state, constants)


def _find_obstacle(fast: bool) -> str | None:
    """Return why torch.compile is not run; None if it is."""
    if fast:
        return "torch.compile takes a minute per size; left out with --fast"
    return None if _build.find_compiler() else "torch.compile needs a C++ compiler, and there is none"


def _compile_loop() -> Callable[..., Tensor]:
    @torch.compile(dynamic=False)
    def step(state: Tensor, drive: Tensor, constants: Constants) -> Tensor:
        return loop(drive.unsqueeze(1), state, constants)[:, 0]

    def run(drive: Tensor, state: Tensor, constants: Constants) -> Tensor:
        states = []
        for u in drive.unbind(1):
            state = step(state, u, constants)
            states.append(state)
        return torch.stack(states, 1)

    return run


LOOPS = Benchmark(
    "The fused recurrence against the eager loop that defines it, with and without torch.compile of its step.",
    STANDARD_SIZES,
    (Size(1, 256, 64), Size(8, 128, 128)),
    ("adpt_scan",),
    _make_case,
    threads=(1,),
)
