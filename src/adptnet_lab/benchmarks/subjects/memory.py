"""The most memory that a training step takes beyond its inputs, each kind measured in a process of its own."""

import subprocess
import sys

from ..goals import Goal
from ..subject import Case, Size, Subject
from .peak import KINDS

__all__ = ["MEMORY"]


def _case(size: Size, fast: bool) -> Case:
    trajectory = 4 * size.numbers
    numbers: dict[str, float] = {"MiB of a trajectory": trajectory / 2**20}
    skipped = {}
    for kind in KINDS:
        command = [sys.executable, "-m", f"{__package__}.peak", kind, *map(str, size)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            skipped[kind] = f"its process failed: {made.stderr.strip()[-300:]}"
        else:
            numbers[f"{kind}, trajectories"] = float(made.stdout) / trajectory
    goal = Goal("lean training, extra trajectories", lambda f: f.number("lean, trajectories"), at_most=4.0)
    return Case((), [goal], numbers, skipped)


MEMORY = Subject(
    "Peak memory of a training step beyond drive and upstream gradient, in trajectories of the state.",
    (Size(16, 4096, 64), Size(64, 1024, 128)),
    (Size(4, 512, 64),),
    ("adpt_scan", "adpt_step", "linear_scan"),
    _case,
    threads=(1,),
)
