"""One run at a time in a folder."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from adptnet.errors import AdptnetError, InputError

__all__ = ["FolderInUse", "Hold", "hold_folder"]

_HELD_ELSEWHERE = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)
_descriptors: set[int] = set()  # of folders that this process holds


class FolderInUse(AdptnetError, RuntimeError):
    """Another process trains in this folder."""


class Hold:
    """A folder that this process alone trains in.

    Two locks of the operating system, which are released when the process ends: one on the file `lock`, which every
    system has, and one on the folder itself, where the file system has it, which no removed file undoes.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._descriptor = _lock_folder(folder)
        self._identity = _identity(folder)
        try:
            self._take_lock()
        except BaseException:
            self._unlock_folder()
            raise

    def _take_lock(self) -> None:
        from filelock import FileLock, Timeout

        self._lock = FileLock(self.folder / "lock", timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise _in_use(self.folder) from None
        self._lock_identity = _identity(self.folder / "lock")

    def check(self) -> None:
        """Raise `FolderInUse` if the folder may be another run's by now. A lock file that is gone is made again."""
        if _identity(self.folder) != self._identity:
            raise FolderInUse(
                f"{self.folder} was moved or removed while a run trained in it. The run has stopped; its files are "
                "where the folder is now."
            )
        if _identity(self.folder / "lock") != self._lock_identity:
            self._lock.release(force=True)
            with suppress(OSError):  # on a disk without room for it nobody else can make it either
                self._take_lock()

    def release(self) -> None:
        self._lock.release(force=True)
        self._unlock_folder()

    def _unlock_folder(self) -> None:
        if self._descriptor in _descriptors:  # else it was closed by a fork
            _descriptors.remove(self._descriptor)
            os.close(self._descriptor)


@contextmanager
def hold_folder(folder: Path) -> Iterator[Hold]:
    """Make `folder` and hold it for this process.

    Raises:
        FolderInUse: Another process holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        hold = Hold(folder)
    except OSError as error:
        raise InputError(f"{folder} cannot be written to ({error.strerror}). Pass another --output.") from None
    try:
        yield hold
    finally:
        hold.release()


def _lock_folder(folder: Path) -> int | None:
    """Lock the folder itself and return the descriptor that holds the lock; None where there is no such lock."""
    try:
        import fcntl
    except ImportError:  # Windows, where a file that is open cannot be removed either
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in _HELD_ELSEWHERE:
            raise _in_use(folder) from None
        return None  # a file system that locks files only
    _descriptors.add(descriptor)
    return descriptor


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells the file or folder at `path` from one that takes its name later; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _in_use(folder: Path) -> FolderInUse:
    return FolderInUse(f"another process trains in {folder}. Wait for it, or pass another --output.")


def _forget_folders() -> None:
    """Close the descriptors in a forked child, which might outlive the run and keep its folder locked."""
    for descriptor in _descriptors:
        with suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_folders)
