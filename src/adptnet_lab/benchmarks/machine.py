"""The machine, the versions and the load, which are recorded with every measurement."""

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

from adptnet.ops import _backends, _build

from .._runtime import describe_environment

__all__ = ["MachineLoad", "describe_machine", "find_processor", "last_cache_size", "watch_load"]


def describe_machine() -> dict[str, Any]:
    """Return the versions and the machine. Measurements are comparable only if these are equal."""
    description = describe_environment()
    del description["threads"]  # recorded with each side instead
    folder = re.compile(r"\S*" + re.escape(os.sep))  # the folder of a compiled kernel, which does not matter
    backends = _backends.backends()
    kernels = {name: folder.sub("", backends[name]) for name in _build.OPERATIONS}
    return {
        **description,
        "numpy": numpy.__version__,
        "blas": "MKL" if torch.backends.mkl.is_available() else "not MKL",
        "processor": find_processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "last_cache": last_cache_size(),
        "kernels": kernels,
    }


def find_processor() -> str:
    """Return the name of the processor."""
    try:
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        named = None
    return named[1].strip() if named else platform.processor() or platform.machine()


def last_cache_size() -> int | None:
    """Return the size of the last-level cache in bytes; None where the system does not report it."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        size = re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())
        if size:
            sizes.append(int(size[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[size[2]])
    return max(sizes, default=None)


@dataclass
class MachineLoad:
    """The load of the machine during a measurement.

    Attributes:
        load_before: Load average of the minute before the measurement, this process included.
        load_after: Load average of the last minute at its end.
        others: Average number of cores in use by anything but this process and its children, including time stolen by
            the hypervisor; None where the system does not report it.
    """

    load_before: float | None = None
    load_after: float | None = None
    others: float | None = None


@contextmanager
def watch_load() -> Iterator[MachineLoad]:
    """Measure the load during the block. The yielded object is complete once the block has ended."""
    load = MachineLoad(load_before=_load_average())
    busy, own = _read_busy_seconds()
    yield load
    busy_after, own_after = _read_busy_seconds()
    load.load_after = _load_average()
    if busy is not None and busy_after is not None and busy_after[1] > busy[1]:
        seconds = busy_after[0] - busy[0] - (own_after - own)  # of other processes, and stolen by the hypervisor
        cores = os.cpu_count() or 1
        load.others = round(max(0.0, seconds / ((busy_after[1] - busy[1]) / cores)), 3)


def _load_average() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _read_busy_seconds() -> tuple[tuple[float, float] | None, float]:
    """Return two measurements of CPU time.

    Returns:
        (busy CPU seconds, total CPU seconds) summed over all cores since boot, None where the system does not report
        them; and the CPU seconds of this process and of its finished child processes.
    """
    spent = os.times()
    own = spent.user + spent.system + spent.children_user + spent.children_system
    try:
        ticks = [int(number) for number in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None, own
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    busy = sum(ticks) - ticks[3] - ticks[4]  # all but idle and waiting for input and output
    return (busy / ticks_per_second, sum(ticks) / ticks_per_second), own
