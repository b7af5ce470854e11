"""Goals: what is expected of a measurement, and whether it was met."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .timing import Timing

__all__ = ["Goal", "GoalVerdict", "Measurements", "NotMeasured", "fit_slope", "judge_goals", "largest_doubling"]

QUIET = 0.1  # cores that other processes may keep busy on a machine that counts as quiet


class NotMeasured(Exception):
    """A goal needs a side or a number that was not measured."""


@dataclass(frozen=True)
class Measurements:
    """Everything that was measured in one case, of every side: one of the programs that a benchmark compares.

    Attributes:
        times: The times of each side, by its name and the number of threads.
        numbers: Numbers other than times: bytes, errors, iterations.
    """

    times: Mapping[tuple[str, int], Timing] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)

    def cpu(self, side: str, threads: int = 1) -> float:
        """Return the least CPU time of a side, in seconds.

        Args:
            side: The name of the side.
            threads: The number of threads.
        """
        return self._timing(side, threads).cpu.least

    def wall(self, side: str, threads: int = 1) -> float:
        """Return the least wall time of a side, in seconds.

        Args:
            side: The name of the side.
            threads: The number of threads.
        """
        return self._timing(side, threads).wall.least

    def number(self, name: str) -> float:
        """Return a number other than a time.

        Args:
            name: The name of the number.
        """
        if name not in self.numbers:
            raise NotMeasured(f"{name} was not measured")
        return self.numbers[name]

    def _timing(self, side: str, threads: int) -> Timing:
        if (side, threads) not in self.times:
            raise NotMeasured(f"{side} was not measured with {threads} thread{'s' * (threads > 1)}")
        return self.times[side, threads]


@dataclass(frozen=True)
class Goal:
    """Limits on a measured number. A claim of the paper is checked as a goal, too.

    Attributes:
        name: Its name in the results.
        value: Computes the number.
        at_most: The upper limit.
        at_least: The lower limit.
        claim: The place in the paper, if it is a claim of the paper.
        quiet: Whether the number is a wall time, which is unreliable while other processes are busy.
    """

    name: str
    value: Callable[[Measurements], float]
    at_most: float = math.inf
    at_least: float = -math.inf
    claim: str | None = None
    quiet: bool = False

    @property
    def expected(self) -> str:
        """The limits as text."""
        low, high = (f"{limit:.4g}" for limit in (self.at_least, self.at_most))
        if self.at_least == -math.inf:
            return f"≤ {high}"
        return f"≥ {low}" if self.at_most == math.inf else f"{low} to {high}"


class GoalVerdict(NamedTuple):
    """The verdict on a goal."""

    goal: str
    expected: str
    value: float | None
    outcome: str  # met, missed, undecided or not measured; for a claim holds, fails or not measured
    claim: str | None = None
    remark: str = ""
    share: float | None = None  # value over limit: 1 or less is met


def judge_goals(goals: Sequence[Goal], measurements: Measurements, others: float | None = None) -> list[GoalVerdict]:
    """Return a verdict on each goal.

    Args:
        goals: The goals.
        measurements: What was measured.
        others: The number of cores that other processes kept busy; None if it is not known.
    """
    verdicts = []
    for goal in goals:
        try:
            value = goal.value(measurements)
        except NotMeasured as reason:
            verdicts.append(GoalVerdict(goal.name, goal.expected, None, "not measured", goal.claim, str(reason)))
            continue
        if not math.isfinite(value):
            remark = f"it was {value}"
            verdicts.append(GoalVerdict(goal.name, goal.expected, None, "not measured", goal.claim, remark))
            continue
        is_met = goal.at_least <= value <= goal.at_most
        outcome = ("holds" if is_met else "fails") if goal.claim else ("met" if is_met else "missed")
        remark = ""
        if goal.quiet and others is not None and others > QUIET:
            remark = f"others kept {others:.1f} cores busy"
            outcome = outcome if is_met else "undecided"
        share = _share_of_limit(goal, value)
        verdicts.append(GoalVerdict(goal.name, goal.expected, value, outcome, goal.claim, remark, share))
    return verdicts


def _share_of_limit(goal: Goal, value: float) -> float | None:
    """Return the value over its limit, for the limit that is closer."""
    shares = []
    if math.isfinite(goal.at_most) and goal.at_most > 0:
        shares.append(value / goal.at_most)
    if math.isfinite(goal.at_least) and value > 0:
        shares.append(goal.at_least / value)
    return max(shares, default=None)


def fit_slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the log-log slope of time over size, by least squares; 1 if time is proportional to size.

    Args:
        sizes: The sizes.
        seconds: The time at each size.
    """
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def largest_doubling(seconds: Sequence[float]) -> float:
    """Return the largest ratio of consecutive times, where each size is twice the one before.

    Args:
        seconds: The times, by increasing size.
    """
    return max(after / before for before, after in itertools.pairwise(seconds))
