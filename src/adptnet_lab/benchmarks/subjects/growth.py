"""How time grows with the length of sequences and with their number: each in doublings up to the size that is given."""

from collections.abc import Callable
from functools import partial

from ..goals import Found, Goal, largest_doubling, slope
from ..subject import Case, Size, Subject
from ..timing import Side
from .problem import Problem

__all__ = ["GROWTH_BATCH", "GROWTH_TIME"]

DOUBLINGS = 6  # of the length
EVERY = "forward", "backward", "weights"  # products of a step of training


def _growth(axis: str, largest: Size, doublings: int) -> Case:
    top = getattr(largest, axis)
    values = [top >> k for k in range(doublings, -1, -1) if top >> k]
    sides, goals = [], []
    for value in values:
        problem = Problem(largest._replace(**{axis: value}))
        sides += [
            Side(f"forward, {value}", problem.forward, warm=True),
            Side(f"training, {value}", problem.training, warm=True),
            Side(f"products of the forward, {value}", partial(problem.products, "forward"), warm=True),
            Side(f"products of the training, {value}", partial(problem.products, *EVERY), warm=True),
        ]
    for kind in ("forward", "training"):

        def times(found: Found, kind: str = kind) -> list[float]:
            return [found.cpu(f"{kind}, {value}") for value in values]

        def grows(found: Found, times: Callable[[Found], list[float]] = times) -> float:
            return slope(values, times(found))

        def grows_more(found: Found, kind: str = kind, times: Callable[[Found], list[float]] = times) -> float:
            products = [found.cpu(f"products of the {kind}, {value}") for value in values]
            return slope(values, times(found)) / slope(values, products)

        def jumps(found: Found, times: Callable[[Found], list[float]] = times) -> float:
            return largest_doubling(times(found))

        goals += [
            Goal(f"{kind}, log-log slope", grows, at_least=0.95, at_most=1.08),
            Goal(f"{kind}, log-log slope / that of its products", grows_more, at_least=0.95, at_most=1.08),
            Goal(f"{kind}, largest doubling", jumps, at_most=2.3),
        ]
    return Case(sides, goals)


GROWTH_TIME = Subject(
    "The fused recurrence at lengths that double, from 1k to 64k steps.",
    (Size(1, 65536, 64), Size(8, 65536, 64)),
    (Size(1, 4096, 64),),
    ("adpt_scan",),
    lambda size, fast: _growth("steps", size, DOUBLINGS),
    threads=(1,),
)
GROWTH_BATCH = Subject(
    "The fused recurrence at batches that double, from one sequence on.",
    (Size(512, 4096, 64), Size(512, 128, 128)),
    (Size(32, 64, 64),),
    ("adpt_scan",),
    lambda size, fast: _growth("batch", size, size.batch.bit_length() - 1),
    threads=(1,),
)
