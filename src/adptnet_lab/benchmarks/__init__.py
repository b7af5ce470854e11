"""Benchmarks: `adptnet bench`, its subjects, and the goals that they are measured against.

A subject is one benchmark: programs that are compared at several sizes. A side is one of these programs.
"""

from .command import Bench, run
from .goals import Goal, GoalVerdict, Measurements, fit_slope, judge_goals
from .subject import Case, Size, Subject
from .timing import Side, Timing, time_interleaved

__all__ = [
    "Bench",
    "Case",
    "Goal",
    "GoalVerdict",
    "Measurements",
    "Side",
    "Size",
    "Subject",
    "Timing",
    "fit_slope",
    "judge_goals",
    "run",
    "time_interleaved",
]
