"""The fused recurrence against loops over time in torch: as they are, and with the step compiled by torch.compile."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from adptnet.ops import _build
from adptnet.ops.adpt_scan import Constants
from adptnet.ops.adpt_scan.reference import adpt_scan as loop

from ..goals import Goal
from ..subject import SIX, Case, Size, Subject
from ..timing import Side
from .problem import Problem, as_reference

__all__ = ["LOOPS"]

STEPS = 64  # of a loop that are timed; more are in proportion


def _case(size: Size, fast: bool) -> Case:
    problem = Problem(size)
    few = min(size.steps, STEPS)
    scale = size.steps / few
    forward, training = problem.some_steps(_plain_loop, few)
    sides = [
        Side("fused, forward", problem.forward),
        Side("fused, training", problem.training),
        Side("loop, forward", forward, scale),
        Side("loop, training", training, scale),
    ]
    skipped, numbers = {}, {}
    why = _no_compiler(fast)
    if why is None:
        torch._dynamo.reset()  # otherwise it gives up at the eighth shape
        compiled = problem.some_steps(_compiled_loop(), few)
        for kind, run in zip(("forward", "training"), compiled, strict=True):
            begun = time.perf_counter()
            run()
            numbers[f"seconds to compile the step, {kind}"] = time.perf_counter() - begun
            sides.append(Side(f"compiled step, {kind}", run, scale))
    else:
        skipped["compiled step"] = why
    goals = []
    if size == SIX[0]:
        goals.append(
            Goal("training / loop", lambda f: f.cpu("fused, training") / f.cpu("loop, training"), at_most=1 / 500)
        )
    return Case(sides, goals, numbers, skipped)


def _plain_loop(drive: Tensor, state: Tensor, constants: Constants) -> Tensor:
    with as_reference():
        return loop(drive, state, constants)


def _no_compiler(fast: bool) -> str | None:
    if fast:
        return "torch.compile takes a minute a size; left out with --fast"
    return None if _build.find_compiler() else "torch.compile needs a C++ compiler, and there is none"


def _compiled_loop() -> Callable[..., Tensor]:
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


LOOPS = Subject(
    "The fused recurrence and the loop in torch that defines it, as it is and with its step compiled by torch.compile.",
    SIX,
    (Size(1, 256, 64), Size(8, 128, 128)),
    ("adpt_scan",),
    _case,
    threads=(1,),
)
