"""The lock on the folder of a run: one run at a time."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from adptnet.errors import AdptnetError, InputError

__all__ = ["FolderInUse", "FolderLock", "lock_folder"]

_LOCKED_ELSEWHERE = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)
_descriptors: set[int] = set()  # of the folders that this process has locked


class FolderInUse(AdptnetError, RuntimeError):
    """Another process trains in this folder."""


class FolderLock:
    """The right of this process to train in a folder, as two locks of the operating system.

    One is on the file `lock`, which every system supports. The other is on the folder itself, where the file system
    supports that; removing a file does not release it. Both are released when the process ends.

    Args:
        folder: An existing folder.

    Raises:
        FolderInUse: Another process has locked it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._descriptor = _lock_directory(folder)
        self._identity = _identify(folder)
        try:
            self._lock_file()
        except BaseException:
            self._unlock_directory()
            raise

    def _lock_file(self) -> None:
        from filelock import FileLock, Timeout

        self._lock = FileLock(self.folder / "lock", timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise _in_use(self.folder) from None
        self._lock_identity = _identify(self.folder / "lock")

    def check(self) -> None:
        """Raise `FolderInUse` if the folder may belong to another run by now; recreate a lock file that was removed."""
        if _identify(self.folder) != self._identity:
            raise FolderInUse(
                f"{self.folder} was moved or removed while a run trained in it. The run has stopped; its files are "
                "where the folder is now."
            )
        if _identify(self.folder / "lock") != self._lock_identity:
            self._lock.release(force=True)
            with suppress(OSError):  # on a full disk no other process can create it either
                self._lock_file()

    def release(self) -> None:
        """Release both locks."""
        self._lock.release(force=True)
        self._unlock_directory()

    def _unlock_directory(self) -> None:
        if self._descriptor in _descriptors:  # otherwise it was closed in a forked child
            _descriptors.remove(self._descriptor)
            os.close(self._descriptor)


@contextmanager
def lock_folder(folder: Path) -> Iterator[FolderLock]:
    """Create `folder` and lock it for this process.

    Args:
        folder: The folder of a run.

    Raises:
        FolderInUse: Another process has locked it.
        InputError: It cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
    except OSError as error:
        raise InputError(f"{folder} cannot be written to ({error.strerror}). Pass another --output.") from None
    try:
        yield lock
    finally:
        lock.release()


def _lock_directory(folder: Path) -> int | None:
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
        if error.errno in _LOCKED_ELSEWHERE:
            raise _in_use(folder) from None
        return None  # a file system that locks files only
    _descriptors.add(descriptor)
    return descriptor


def _identify(path: Path) -> tuple[int, int] | None:
    """Return device and inode, which distinguish `path` from a later file of the same name; None if it is missing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _in_use(folder: Path) -> FolderInUse:
    return FolderInUse(f"another process trains in {folder}. Wait for it, or pass another --output.")


def _close_descriptors() -> None:
    """Close the descriptors in a forked child, which might outlive the run and keep its folder locked."""
    for descriptor in _descriptors:
        with suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_descriptors)
