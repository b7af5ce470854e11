"""Expected time of a reproduction: of points, from the rows of earlier runs, and of a training run in progress."""

import math
import sys
import time
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from .recipe import GridPoint, Scale
from .registry import PaperResult
from .rows import COMMITTED_FOLDERS, RowStore

__all__ = ["Forecast", "TrainingProgress", "describe_rest", "format_duration"]

_SECONDS_BETWEEN_REPORTS = 60.0
# settings that a point's time is nearly proportional to, if nothing else differs
_PROPORTIONAL = ("steps", "length", "sequences", "epochs", "trials", "training_sequences", "images")


class Forecast:
    """Expected times of points, from the rows of this store and from the committed ones.

    Args:
        store: Rows of earlier runs.
        scale: Scale of the points.
    """

    def __init__(self, store: RowStore, scale: Scale):
        folders = dict.fromkeys([store.folder, *COMMITTED_FOLDERS])
        self._stores = [RowStore(folder) for folder in folders]
        self._scale = scale
        self._known: dict[str, list[tuple[Mapping[str, Any], int, float]]] = {}

    def seconds(self, result: PaperResult, point: GridPoint) -> float | None:
        """Return the expected time of a point; None if no row is like it.

        The times of rows with the same settings count if there are any, otherwise those of rows at the same scale that
        differ in the fewest settings, scaled with the number of steps.

        Args:
            result: The result.
            point: The point.
        """
        rows = self._read(result)
        if not rows:
            return None
        distances = [
            (_count_differences(settings, point.settings), seconds * _ratio(point.settings, settings))
            for settings, _, seconds in rows
        ]
        least = min(distance for distance, _ in distances)
        return median(seconds for distance, seconds in distances if distance == least)

    def cost(self, result: PaperResult) -> str:
        """Return the expected time of all points of a result, in words; that of its recipe if no row is like them.

        Args:
            result: The result.
        """
        if result.recipe.source is not None:
            return result.recipe.cost[self._scale]
        seconds = [self.seconds(result, point) for point in result.recipe.points(self._scale)]
        known = [value for value in seconds if value is not None]
        return format_duration(sum(known)) if len(known) == len(seconds) else result.recipe.cost[self._scale]

    def _read(self, result: PaperResult) -> list[tuple[Mapping[str, Any], int, float]]:
        if result.name not in self._known:
            found = []
            for store in self._stores:
                for row in store.read_lines(result, self._scale).values():
                    # processor time, if the row has it: other programs on the machine do not lengthen it
                    seconds = row["time"].get("processor", row["time"].get("seconds"))
                    if isinstance(seconds, int | float):
                        found.append((row["settings"], row["seed"], float(seconds)))
            self._known[result.name] = found
        return self._known[result.name]


def _count_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> int:
    keys = (first.keys() | second.keys()) - set(_PROPORTIONAL)
    return sum(first.get(key) != second.get(key) for key in keys)


def _ratio(wanted: Mapping[str, Any], known: Mapping[str, Any]) -> float:
    """Return how much more there is to compute for some settings than for others."""
    return math.prod(
        _amount(wanted[key]) / _amount(known[key]) for key in _PROPORTIONAL if wanted.get(key) and known.get(key)
    )


def _amount(value: Any) -> float:
    """Return a number of steps; a list of epochs counts by its last."""
    return float(value[-1] if isinstance(value, list) else value)


def format_duration(seconds: float | None) -> str:
    """Return a time in words, such as "3 s", "12 min" or "2.2 h".

    Args:
        seconds: The time; None if it is unknown.
    """
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def describe_rest(expected: Iterable[float | None], processes: int) -> str:
    """Return how long the points that are left will take; empty if there are none or the time is unknown.

    Args:
        expected: Expected time of each.
        processes: Number of points that run in parallel.
    """
    known = [seconds for seconds in expected if seconds is not None]
    return f", about {format_duration(sum(known) / processes)} left" if known else ""


class TrainingProgress:
    """Prints the progress of a training run to stderr once a minute, so that a run of hours is not silent.

    Args:
        steps: Number of steps of the run.
    """

    def __init__(self, steps: int):
        self._steps = steps
        self._first: tuple[int, float] | None = None
        self._reported = time.monotonic()

    def show(self, step: int, loss: float) -> None:
        """Print a line if a minute has passed since the last one.

        Args:
            step: Number of finished steps.
            loss: Loss of the last step.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        elif now - self._reported >= _SECONDS_BETWEEN_REPORTS and step > self._first[0]:
            each = (now - self._first[1]) / (step - self._first[0])
            rest = format_duration(each * (self._steps - step))
            print(f"step {step}/{self._steps}, loss {loss:.4g}, {rest} left", file=sys.stderr, flush=True)
            self._reported = now
