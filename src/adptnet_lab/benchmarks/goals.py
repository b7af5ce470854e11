"""What is expected of a measurement, and whether it was met."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .timing import Timed

__all__ = ["Found", "Goal", "NotMeasured", "Verdict", "judged", "largest_doubling", "slope"]

QUIET = 0.1  # cores that others may keep busy on a machine that counts as quiet


class NotMeasured(Exception):
    """A side that a goal is about was left out."""


@dataclass(frozen=True)
class Found:
    """What was measured of one case."""

    times: Mapping[tuple[str, int], Timed] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)  # of another kind: bytes, errors, iterations

    def cpu(self, side: str, threads: int = 1) -> float:
        """The least CPU time of a side, in seconds."""
        return self._timed(side, threads).cpu.least

    def wall(self, side: str, threads: int = 1) -> float:
        """The least time on the wall of a side, in seconds."""
        return self._timed(side, threads).wall.least

    def number(self, name: str) -> float:
        if name not in self.numbers:
            raise NotMeasured(f"{name} was not measured")
        return self.numbers[name]

    def _timed(self, side: str, threads: int) -> Timed:
        if (side, threads) not in self.times:
            raise NotMeasured(f"{side} was not measured with {threads} thread{'s' * (threads > 1)}")
        return self.times[side, threads]


@dataclass(frozen=True)
class Goal:
    """A number that should lie within limits. A claim of the paper is a goal that somebody else has set."""

    name: str
    value: Callable[[Found], float]
    at_most: float = math.inf
    at_least: float = -math.inf
    claim: str | None = None  # where the paper says so
    quiet: bool = False  # of times on the wall, which mean nothing while others are at work

    @property
    def expected(self) -> str:
        low, high = (f"{limit:.4g}" for limit in (self.at_least, self.at_most))
        if self.at_least == -math.inf:
            return f"≤ {high}"
        return f"≥ {low}" if self.at_most == math.inf else f"{low} to {high}"


class Verdict(NamedTuple):
    """What became of a goal."""

    goal: str
    expected: str
    value: float | None
    outcome: str  # met, missed, undecided, not measured; of claims holds, fails, not measured
    claim: str | None = None
    remark: str = ""
    share: float | None = None  # of the limit: 1 or less is met


def judged(goals: Sequence[Goal], found: Found, others: float | None = None) -> list[Verdict]:
    """A verdict on each goal; `others` is how many cores were kept busy by other processes."""
    verdicts = []
    for goal in goals:
        try:
            value = goal.value(found)
        except NotMeasured as why:
            verdicts.append(Verdict(goal.name, goal.expected, None, "not measured", goal.claim, str(why)))
            continue
        if not math.isfinite(value):
            verdicts.append(Verdict(goal.name, goal.expected, None, "not measured", goal.claim, f"it was {value}"))
            continue
        right = goal.at_least <= value <= goal.at_most
        outcome = ("holds" if right else "fails") if goal.claim else ("met" if right else "missed")
        remark = ""
        if goal.quiet and others is not None and others > QUIET:
            remark = f"others kept {others:.1f} cores busy"
            outcome = outcome if right else "undecided"
        verdicts.append(Verdict(goal.name, goal.expected, value, outcome, goal.claim, remark, _share(goal, value)))
    return verdicts


def _share(goal: Goal, value: float) -> float | None:
    """How much of what is allowed was used; the worse of both limits."""
    shares = []
    if math.isfinite(goal.at_most) and goal.at_most > 0:
        shares.append(value / goal.at_most)
    if math.isfinite(goal.at_least) and value > 0:
        shares.append(goal.at_least / value)
    return max(shares, default=None)


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """How time grows with size: the exponent of the power that fits best; 1 where twice as much takes twice as long."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def largest_doubling(seconds: Sequence[float]) -> float:
    """The largest factor between one size and the next, which is twice as large."""
    return max(after / before for before, after in itertools.pairwise(seconds))
