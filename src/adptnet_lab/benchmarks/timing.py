"""Comparable times: all sides are run in turn, in one process, many times."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch

__all__ = ["Samples", "Side", "Timing", "time_interleaved", "use_threads"]

SHORTEST = 5e-3  # seconds of a sample; shorter runs are repeated within one
MOST = 1000  # runs in a sample
PAUSE = 5e-3  # seconds until threads that wait for more work stop spinning

Clocks = Callable[[], tuple[float, float]]  # CPU and wall time, in seconds


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a function to time, such as the kernel, the eager loop or `torch.mm`.

    Attributes:
        name: Its name in the results, such as "fused, forward".
        run: The function. It takes no arguments, and its result is discarded.
        scale: Factor on the measured times: the work that is reported over the work that is run. It is above 1 for a
            slow loop of which only the first steps are run.
        threads: The only number of threads to run it with; None for every requested number.
        warm: Whether to run it once more before each sample, because sides of other sizes have taken its workspaces.
    """

    name: str
    run: Callable[[], object]
    scale: float = 1.0
    threads: int | None = None
    warm: bool = False


class Samples(NamedTuple):
    """Seconds per run, one number for each repeat."""

    values: tuple[float, ...]

    @property
    def least(self) -> float:
        """The smallest sample."""
        return min(self.values)

    @property
    def median(self) -> float:
        """The median of the samples."""
        return median(self.values)


class Timing(NamedTuple):
    """Times of one side at one number of threads."""

    cpu: Samples  # user and system time of the whole process
    wall: Samples
    calls: int  # runs in a sample, which is their mean
    scale: float  # of the side


def _read_clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def time_interleaved(
    sides: Sequence[Side],
    *,
    repeats: int,
    seconds: float = 0.0,
    threads: Sequence[int] = (1,),
    clocks: Clocks = _read_clocks,
) -> dict[tuple[str, int], Timing]:
    """Time each side at each number of threads.

    Every side is run once before anything is counted, which compiles kernels and maps memory. In each repeat all sides
    are then run in turn, so that a temporary disturbance of the machine affects all of them. Garbage is collected
    before the first repeat and not until the end, because the collector would evict the caches.

    Args:
        sides: The functions to time.
        repeats: The least number of repeats.
        seconds: Repeat until this much time has passed; a disturbance may last longer than a few short repeats.
        threads: The numbers of threads.
        clocks: Returns CPU and wall time.

    Returns:
        The times, by the name of the side and the number of threads.
    """
    plan = [(side, count) for count in threads for side in sides if side.threads in (None, count)]
    calls = {}
    for side, count in plan:
        with use_threads(count):
            calls[side.name, count] = _choose_calls(side, clocks)
    samples: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in calls}
    with _without_garbage_collection():
        start, done = clocks()[1], 0
        while samples and (done < repeats or clocks()[1] - start < seconds):
            done += 1
            before = None
            for side, count in plan:
                if count != before:
                    time.sleep(PAUSE)
                before = count
                key = side.name, count
                with use_threads(count):
                    if side.warm:
                        side.run()
                    cpu, wall = _time_calls(side, calls[key], clocks)
                samples[key].append((cpu * side.scale / calls[key], wall * side.scale / calls[key]))
    scales = {side.name: side.scale for side in sides}
    times = {}
    for key, values in samples.items():
        cpu_samples, wall_samples = (Samples(clock) for clock in zip(*values, strict=True))
        times[key] = Timing(cpu_samples, wall_samples, calls[key], scales[key[0]])
    return times


def _choose_calls(side: Side, clocks: Clocks) -> int:
    """Return how often a side is run in a sample.

    It is run once, and three times more if that was quick, because the first run may have compiled kernels. The least
    of the three counts: a disturbance must not leave one side with fewer runs, and colder caches, than the others.
    """
    spent = max(_time_calls(side, 1, clocks))
    if spent > 100 * SHORTEST:
        return 1
    spent = min(max(_time_calls(side, 1, clocks)) for _ in range(3))
    return min(MOST, math.ceil(SHORTEST / spent)) if spent > 0 else MOST


def _time_calls(side: Side, calls: int, clocks: Clocks) -> tuple[float, float]:
    run = side.run
    cpu, wall = clocks()
    for _ in range(calls):
        run()
    cpu_after, wall_after = clocks()
    return cpu_after - cpu, wall_after - wall


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Run torch, and with it the kernels of adptnet, on `count` threads inside the block.

    Args:
        count: The number of threads.
    """
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
