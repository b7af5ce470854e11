"""Times that can be compared: all sides in turn, in one process, again and again."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch

__all__ = ["Side", "Spent", "Timed", "interleaved", "on_threads"]

SHORTEST = 5e-3  # seconds of a sample: shorter runs are repeated within one
MOST = 1000  # runs in a sample
PAUSE = 5e-3  # seconds until threads that wait for more work have stopped turning

Now = Callable[[], tuple[float, float]]


@dataclass(frozen=True)
class Side:
    """One of the things that are compared."""

    name: str
    run: Callable[[], object]
    scale: float = 1.0  # what is meant, over what is run: a slow loop is run for some of its steps
    threads: int | None = None  # the only number of threads it is run with; every one that is asked for if None
    warm: bool = False  # run once more before each sample: sides of other sizes have taken its workspaces


class Spent(NamedTuple):
    """Seconds, one number for each repeat."""

    every: tuple[float, ...]

    @property
    def least(self) -> float:
        return min(self.every)

    @property
    def median(self) -> float:
        return median(self.every)


class Timed(NamedTuple):
    """What a run of one side took: CPU time of the whole process, and time on the wall."""

    cpu: Spent
    wall: Spent
    calls: int  # runs in a sample, whose mean a sample is
    scale: float


def _now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def interleaved(
    sides: Sequence[Side], *, repeats: int, seconds: float = 0.0, threads: Sequence[int] = (1,), now: Now = _now
) -> dict[tuple[str, int], Timed]:
    """Times of each side at each number of threads, by name and threads.

    Every side is run once before anything counts, which builds kernels and maps memory. Then each side is run in turn,
    in every repeat: what disturbs the machine for a while disturbs all of them. There are `repeats` of them, and more
    until `seconds` have passed: a disturbance may last longer than all repeats of something short. Garbage is collected
    before the first repeat and not until the end: it would leave the caches to whatever it looked at.
    """
    plan = [(side, count) for count in threads for side in sides if side.threads in (None, count)]
    calls = {}
    for side, count in plan:
        with on_threads(count):
            calls[side.name, count] = _calls(side, now)
    samples: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in calls}
    with _uncollected():
        begin, done = now()[1], 0
        while samples and (done < repeats or now()[1] - begin < seconds):
            done += 1
            before = None
            for side, count in plan:
                if count != before:
                    time.sleep(PAUSE)
                before = count
                key = side.name, count
                with on_threads(count):
                    if side.warm:
                        side.run()
                    spent = _spent(side, calls[key], now)
                samples[key].append((spent[0] * side.scale / calls[key], spent[1] * side.scale / calls[key]))
    scales = {side.name: side.scale for side in sides}
    times = {}
    for key, found in samples.items():
        cpu, wall = (Spent(clock) for clock in zip(*found, strict=True))
        times[key] = Timed(cpu, wall, calls[key], scales[key[0]])
    return times


def _calls(side: Side, now: Now) -> int:
    """How often a side is run in a sample.

    Runs it once, and again if the first was quick: it may have built things. The least of three counts, so that a
    disturbance does not leave one side with fewer runs, and less in the caches, than those it is compared with.
    """
    spent = max(_spent(side, 1, now))
    if spent > 100 * SHORTEST:
        return 1
    spent = min(max(_spent(side, 1, now)) for _ in range(3))
    return min(MOST, math.ceil(SHORTEST / spent)) if spent > 0 else MOST


def _spent(side: Side, calls: int, now: Now) -> tuple[float, float]:
    run = side.run
    cpu, wall = now()
    for _ in range(calls):
        run()
    cpu_after, wall_after = now()
    return cpu_after - cpu, wall_after - wall


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Torch, and our kernels with it, on so many threads."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)


@contextmanager
def _uncollected() -> Iterator[None]:
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
