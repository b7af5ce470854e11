"""Peak memory of a training step beyond its inputs, each kind measured in a process of its own."""

import subprocess
import sys

from ..benchmark import Benchmark, Case, Size
from ..goals import Goal
from .peak_memory import KINDS

__all__ = ["MEMORY"]


def _make_case(size: Size, fast: bool) -> Case:
    trajectory = 4 * size.elements
    numbers: dict[str, float] = {"MiB of a trajectory": trajectory / 2**20}
    skipped = {}
    for kind in KINDS:
        command = [sys.executable, "-m", f"{__package__}.peak_memory", kind, *map(str, size)]
        finished = subprocess.run(command, capture_output=True, text=True)
        if finished.returncode:
            skipped[kind] = f"its process failed: {finished.stderr.strip()[-300:]}"
        else:
            numbers[f"{kind}, trajectories"] = float(finished.stdout) / trajectory
    goal = Goal("lean training, extra trajectories", lambda f: f.number("lean, trajectories"), at_most=4.0)
    return Case((), [goal], numbers, skipped)


MEMORY = Benchmark(
    "Peak memory of a training step beyond drive and upstream gradient, in trajectories of the state.",
    (Size(16, 4096, 64), Size(64, 1024, 128)),
    (Size(4, 512, 64),),
    ("adpt_scan", "adpt_step", "linear_scan"),
    _make_case,
    threads=(1,),
)
