"""Time of the fused recurrence at lengths and at batch sizes that double up to a given size."""

import itertools
from collections.abc import Callable
from functools import partial

from adptnet.errors import InputError

from ..benchmark import Benchmark, Case, Size
from ..goals import Goal, Measurements, fit_slope, largest_doubling
from ..timing import Side
from .workload import RecurrenceWorkload

__all__ = ["GROWTH_BATCH", "GROWTH_TIME"]

DOUBLINGS = 6  # doublings of the length, or fewer if it is below 2**6
Times = Callable[[Measurements], list[float]]
EVERY = "forward", "backward", "weights"  # the matrix products of a training step


def _make_case(axis: str, largest: Size, doublings: int) -> Case:
    top = getattr(largest, axis)
    values = [top >> k for k in range(doublings, -1, -1) if top >> k]
    if len(values) < 2 or any(after != 2 * before for before, after in itertools.pairwise(values)):
        allowed = "a power of two from 2" + (f", or a multiple of {2**DOUBLINGS}" if axis == "steps" else "")
        nearest = largest._replace(**{axis: max(2, 1 << (top.bit_length() - 1))})
        raise InputError(
            f"--sizes {_format_size(largest)}: {axis} {top} is not reached by doublings. It must be {allowed}. "
            f"Pass --sizes {_format_size(nearest)}"
        )
    sides, goals = [], []
    for value in values:
        workload = RecurrenceWorkload(largest._replace(**{axis: value}))
        sides += [
            Side(f"forward, {value}", workload.forward, warm=True),
            Side(f"training, {value}", workload.training, warm=True),
            Side(f"products of the forward, {value}", partial(workload.products, "forward"), warm=True),
            Side(f"products of the training, {value}", partial(workload.products, *EVERY), warm=True),
        ]
    for kind in ("forward", "training"):

        def times(measured: Measurements, kind: str = kind) -> list[float]:
            return [measured.cpu(f"{kind}, {value}") for value in values]

        def slope(measured: Measurements, times: Times = times) -> float:
            return fit_slope(values, times(measured))

        def relative_slope(measured: Measurements, kind: str = kind, times: Times = times) -> float:
            products = [measured.cpu(f"products of the {kind}, {value}") for value in values]
            return fit_slope(values, times(measured)) / fit_slope(values, products)

        def doubling(measured: Measurements, times: Times = times) -> float:
            return largest_doubling(times(measured))

        goals += [
            Goal(f"{kind}, log-log slope", slope, at_least=0.95, at_most=1.08),
            Goal(f"{kind}, log-log slope / that of its products", relative_slope, at_least=0.95, at_most=1.08),
            Goal(f"{kind}, largest doubling", doubling, at_most=2.3),
        ]
    return Case(sides, goals)


def _format_size(size: Size) -> str:
    return ",".join(map(str, size))


GROWTH_TIME = Benchmark(
    "The fused recurrence at seven lengths, each twice the one before (1k to 64k steps at the default sizes).",
    (Size(1, 65536, 64), Size(8, 65536, 64)),
    (Size(1, 4096, 64),),
    ("adpt_scan",),
    lambda size, fast: _make_case("steps", size, DOUBLINGS),
    threads=(1,),
)
GROWTH_BATCH = Benchmark(
    "The fused recurrence at batch sizes from one sequence up, each twice the one before.",
    (Size(512, 4096, 64), Size(512, 128, 128)),
    (Size(32, 64, 64),),
    ("adpt_scan",),
    lambda size, fast: _make_case("batch", size, size.batch.bit_length() - 1),
    threads=(1,),
)
