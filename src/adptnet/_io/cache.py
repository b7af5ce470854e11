"""The cache folder, where compiled kernels and downloaded data are kept between runs."""

import atexit
import contextlib
import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path

__all__ = ["cache_folder", "make_private_folder", "preferred_cache_folder", "process_folder"]


def cache_folder() -> Path:
    """Return a writable cache folder: the preferred one, or a temporary folder if it cannot be written.

    A folder that ADPTNET_CACHE names is returned in any case.
    """
    folder = preferred_cache_folder()
    with contextlib.suppress(OSError):
        make_private_folder(folder)
    return folder if os.environ.get("ADPTNET_CACHE") or os.access(folder, os.W_OK) else _temporary_folder()


def preferred_cache_folder() -> Path:
    """Return ADPTNET_CACHE, or `adptnet` in the user's cache folder, as an absolute path."""
    chosen = os.environ.get("ADPTNET_CACHE")
    if chosen:
        return Path(chosen).absolute()
    try:
        home = Path.home()
    except RuntimeError:  # a user without a home
        home = process_folder(os.getpid())
    usual = {"darwin": home / "Library" / "Caches", "win32": home / "AppData" / "Local"}.get(
        sys.platform, home / ".cache"
    )
    return Path(os.environ.get("XDG_CACHE_HOME") or usual).absolute() / "adptnet"


def make_private_folder(folder: Path) -> None:
    """Make `folder` and its missing parents, each for this user alone (mode 0700). Existing folders are not changed.

    Args:
        folder: The folder.
    """
    if not folder.is_dir():
        if folder.parent != folder:  # a drive that does not exist
            make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


@functools.cache
def _temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="adptnet-"))


@functools.cache
def process_folder(process: int) -> Path:
    """Return a temporary folder of a process, which is removed at its exit.

    Args:
        process: The process id; a forked child has a folder of its own.
    """
    folder = tempfile.mkdtemp(prefix="adptnet-")

    def remove() -> None:
        if os.getpid() == process:  # not in a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)
