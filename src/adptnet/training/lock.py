"""One run at a time in a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import AdptnetError, InputError

__all__ = ["FolderInUse", "held"]


class FolderInUse(AdptnetError, RuntimeError):
    """Another process trains in this folder."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Makes the folder and holds it by a lock of the operating system, which goes when the process does."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / "lock", timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise FolderInUse(f"another process trains in {folder}. Wait for it, or pass another --output.") from None
    except OSError as error:
        raise InputError(f"{folder} cannot be written to ({error.strerror}). Pass another --output.") from None
    try:
        yield
    finally:
        lock.release()
