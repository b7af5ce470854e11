"""State dimensions that are not multiples of 16, against the next multiple."""

from ..benchmark import Benchmark, Case, Size
from ..goals import Goal
from ..timing import Side
from .workload import RecurrenceWorkload

__all__ = ["WIDTHS"]

ROUND = 16


def _make_case(size: Size, fast: bool) -> Case:
    rounded = size._replace(state=-(-size.state // ROUND) * ROUND)
    sides, goals = [], []
    for each in (size, rounded):
        workload = RecurrenceWorkload(each)
        sides += [Side(f"forward, {each.state}", workload.forward), Side(f"training, {each.state}", workload.training)]
    for kind in ("forward", "training"):
        goals.append(
            Goal(
                f"{kind}, {size.state} / {rounded.state}",
                lambda f, kind=kind: f.cpu(f"{kind}, {size.state}") / f.cpu(f"{kind}, {rounded.state}"),  # type: ignore[misc]
                at_most=1.3,
            )
        )
    return Case(sides, goals)


WIDTHS = Benchmark(
    "The fused recurrence at widths that are not multiples of 16, against the next multiple.",
    tuple(Size(batch, steps, n) for batch, steps in ((1, 4096), (16, 512)) for n in (50, 97, 200)),
    tuple(Size(16, 64, n) for n in (50, 97, 200)),
    ("adpt_scan",),
    _make_case,
    threads=(1,),
)
