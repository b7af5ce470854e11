"""Growth of time with the length and with the number of sequences, in doublings up to a given size."""

from collections.abc import Callable
from functools import partial

from ..goals import Goal, Measurements, fit_slope, largest_doubling
from ..subject import Case, Size, Subject
from ..timing import Side
from .workload import RecurrenceWorkload

__all__ = ["GROWTH_BATCH", "GROWTH_TIME"]

DOUBLINGS = 6  # of the length
Times = Callable[[Measurements], list[float]]
EVERY = "forward", "backward", "weights"  # the matrix products of a training step


def _make_case(axis: str, largest: Size, doublings: int) -> Case:
    top = getattr(largest, axis)
    values = [top >> k for k in range(doublings, -1, -1) if top >> k]
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


GROWTH_TIME = Subject(
    "The fused recurrence at lengths that double, from 1k to 64k steps.",
    (Size(1, 65536, 64), Size(8, 65536, 64)),
    (Size(1, 4096, 64),),
    ("adpt_scan",),
    lambda size, fast: _make_case("steps", size, DOUBLINGS),
    threads=(1,),
)
GROWTH_BATCH = Subject(
    "The fused recurrence at batches that double, from one sequence on.",
    (Size(512, 4096, 64), Size(512, 128, 128)),
    (Size(32, 64, 64),),
    ("adpt_scan",),
    lambda size, fast: _make_case("batch", size, size.batch.bit_length() - 1),
    threads=(1,),
)
