"""What stands beside every number: the machine, versions, and who else was at work."""

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from adptnet.ops import _build

from ..training import environment

__all__ = ["Neighbours", "facts", "last_cache", "processor", "watched"]


def facts() -> dict[str, Any]:
    """Versions and machine; the same dictionary as long as numbers may stand side by side."""
    found = environment()
    del found["threads"]  # sides have their own
    folder = re.compile(r"\S*" + re.escape(os.sep))  # of a kernel: wherever it was built, it is the same
    backends = _build.backends()
    kernels = {name: folder.sub("", backends[name]) for name in _build.OPERATIONS}
    return {
        **found,
        "numpy": numpy.__version__,
        "blas": "MKL" if torch.backends.mkl.is_available() else "not MKL",
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "last_cache": last_cache(),
        "kernels": kernels,
    }


def processor() -> str:
    """The name of the processor."""
    try:
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        named = None
    return named[1].strip() if named else platform.processor() or platform.machine()


def last_cache() -> int | None:
    """Bytes of the largest cache, where the system tells."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        told = re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())
        if told:
            sizes.append(int(told[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[told[2]])
    return max(sizes, default=None)


@dataclass
class Neighbours:
    """Who else was at work while something was measured."""

    load_before: float | None = None  # average over a minute, this process included
    load_after: float | None = None
    others: float | None = None  # cores that other processes kept busy, on average; None where the system does not tell


@contextmanager
def watched() -> Iterator[Neighbours]:
    """Filled in when the measurement is over."""
    found = Neighbours(load_before=_load())
    busy, mine = _busy()
    yield found
    busy_after, mine_after = _busy()
    found.load_after = _load()
    if busy is not None and busy_after is not None and busy_after[1] > busy[1]:
        total = busy_after[0] - busy[0] - (mine_after - mine)
        cores = os.cpu_count() or 1
        found.others = round(max(0.0, total / ((busy_after[1] - busy[1]) / cores)), 3)


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _busy() -> tuple[tuple[float, float] | None, float]:
    """Seconds that all cores were busy, and that they were there; and CPU time of this process and its children."""
    spent = os.times()
    mine = spent.user + spent.system + spent.children_user + spent.children_system
    try:
        ticks = [int(number) for number in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None, mine
    second = os.sysconf("SC_CLK_TCK")
    return ((sum(ticks) - ticks[3] - ticks[4]) / second, sum(ticks) / second), mine
