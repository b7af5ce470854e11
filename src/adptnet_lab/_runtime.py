"""The running process: the environment that is recorded beside every number, and signals that ask it to stop."""

import os
import platform
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from adptnet._version import __version__
from adptnet.errors import AdptnetError

__all__ = ["STOP_SIGNALS", "Interrupted", "StopRequest", "catch_stop_signals", "describe_environment"]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def describe_environment() -> dict[str, Any]:
    """Return the versions, the machine and the git revision, to be recorded beside every number."""
    return {
        "adptnet": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "git": _find_revision(Path(__file__).parent),
    }


def _find_revision(folder: Path) -> str | None:
    """Return the git revision of this code, with a plus if files differ from it; None outside a repository."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


class Interrupted(AdptnetError, RuntimeError):
    """A run stopped at a signal, after it saved a checkpoint.

    Attributes:
        signum: The number of the signal.
    """

    def __init__(self, message: str, signum: int):
        super().__init__(message)
        self.signum = signum


class StopRequest:
    """The signal that asked the run to stop; None if there was none."""

    signum: int | None = None


@contextmanager
def catch_stop_signals(signals: Sequence[int] = STOP_SIGNALS, *, interrupt: bool = False) -> Iterator[StopRequest]:
    """Record signals in a `StopRequest` instead of ending the process.

    A second signal of the same kind has its usual effect. Each kind counts by itself, because Ctrl-C reaches the runs
    of a sweep as well as the sweep, which then sends them SIGTERM: that must not end them before they have saved.
    Outside the main thread, where Python does not allow signal handlers, nothing is caught.

    Args:
        signals: The signals to catch.
        interrupt: Also raise `KeyboardInterrupt` when a signal arrives.

    Yields:
        The request, which is filled in when a signal arrives.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in signals}

    def handle(signum: int, frame: FrameType | None) -> None:
        request.signum = signum
        signal.signal(signum, before[signum])
        if interrupt:
            raise KeyboardInterrupt

    for number in before:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
