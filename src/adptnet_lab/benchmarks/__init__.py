"""Benchmarks: `adptnet bench`, the suite that it runs, and the goals that the times are compared with.

A `Benchmark`, such as `recurrence`, is one entry of the suite. At each of its sizes it makes a `Case`: the functions to
time (`Side`), and the goals on their times.
"""

from .benchmark import Benchmark, Case, Size
from .command import Bench, run
from .goals import Goal, GoalVerdict, Measurements, fit_slope, judge_goals
from .timing import Side, Timing, time_interleaved

__all__ = [
    "Bench",
    "Benchmark",
    "Case",
    "Goal",
    "GoalVerdict",
    "Measurements",
    "Side",
    "Size",
    "Timing",
    "fit_slope",
    "judge_goals",
    "run",
    "time_interleaved",
]
