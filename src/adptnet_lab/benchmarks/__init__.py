"""Benchmarks that can be trusted: `adptnet bench`, its subjects, and what they are held to."""

from .command import Bench, run
from .goals import Found, Goal, Verdict, judged, slope
from .subject import Case, Size, Subject
from .timing import Side, Timed, interleaved

__all__ = [
    "Bench",
    "Case",
    "Found",
    "Goal",
    "Side",
    "Size",
    "Subject",
    "Timed",
    "Verdict",
    "interleaved",
    "judged",
    "run",
    "slope",
]
