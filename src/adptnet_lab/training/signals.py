"""Being asked to stop: by Ctrl-C, or by the system."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from adptnet.errors import AdptnetError

__all__ = ["STOPPING", "Interrupted", "Request", "stoppable"]

STOPPING = (signal.SIGTERM, signal.SIGINT)


class Interrupted(AdptnetError, RuntimeError):
    """The run was asked to stop, and has saved where it was."""

    def __init__(self, message: str, signum: int):
        super().__init__(message)
        self.signum = signum


class Request:
    """Whether the run was asked to stop, and by which signal."""

    signum: int | None = None


@contextmanager
def stoppable(signals: Sequence[int] = STOPPING, *, at_once: bool = False) -> Iterator[Request]:
    """Inside, `signals` only leave a request, or raise KeyboardInterrupt if `at_once`.

    A second one of the same kind acts as usual: Ctrl-C reaches the runs of a sweep, and so does the SIGTERM by which
    the sweep then ends them, which must not keep them from saving.
    """
    request = Request()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in signals}

    def ask(signum: int, frame: FrameType | None) -> None:
        request.signum = signum
        signal.signal(signum, before[signum])
        if at_once:
            raise KeyboardInterrupt

    for number in before:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
