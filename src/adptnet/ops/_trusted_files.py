"""Decide which files may be executed: those that only this user and root can write, with the recorded SHA-256.

On POSIX systems every folder on the path to a file is checked, as OpenSSH does for its keys. Windows has no such owners
and modes: there only the SHA-256 is checked, and the files are protected by the access control lists of the user's
profile.
"""

import errno
import hashlib
import os
import shlex
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

__all__ = [
    "find_damage",
    "find_exposure",
    "find_fault",
    "find_program",
    "find_recorded_fault",
    "record_path",
    "trusted_search_path",
    "write_record",
]

MAX_LINKS = 40  # symbolic links followed in one path, as in Linux


def find_exposure(path: Path) -> str | None:
    """Return how another user could change the file or folder at `path`; None if only this user and root can.

    The path is walked from the root folder, and symbolic links are followed one at a time. Every entry on the way must
    belong to this user or root and must not be writable by group or others. A folder above the last entry may be, if it
    has the sticky bit (as `/tmp` has): nobody can replace another user's entry there. Write access through an access
    control list shows in the group bits.

    There is no race between this check and a later use of the path: an entry is checked only after the folder that
    holds it, so no other user can change an entry that has been checked.

    Args:
        path: A file or a folder.

    Returns:
        A clause that names the first unsafe entry, or None. Always None on Windows.
    """
    if not hasattr(os, "geteuid"):
        return None
    # The owner of the root folder controls every path: root, or the id that root maps to in a user namespace.
    trusted = {0, os.geteuid(), os.stat("/").st_uid}
    current, links, names = "/", 0, _names(str(path.absolute()))
    while True:
        try:
            status = os.lstat(current)
            target = os.readlink(current) if stat.S_ISLNK(status.st_mode) else None
        except OSError as error:
            return f"{current} cannot be examined ({error.strerror})"
        if status.st_uid not in trusted:
            return f"{current} belongs to another user (uid {status.st_uid})"
        if target is not None:
            links += 1
            if links > MAX_LINKS:
                return f"{path} leads through more than {MAX_LINKS} symbolic links"
            names += _names(target)
            current = "/" if os.path.isabs(target) else os.path.dirname(current)
            continue
        if status.st_mode & 0o022 and not (status.st_mode & stat.S_ISVTX and names):
            mode = f"{stat.S_IMODE(status.st_mode):04o}"
            return f"{current} can be written by other users (mode {mode}; run chmod go-w {shlex.quote(current)})"
        if not names:
            return None
        name = names.pop()
        current = os.path.dirname(current) if name == ".." else os.path.join(current, name)


def _names(path: str) -> list[str]:
    """Return the entries of a path, last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def find_fault(path: Path, sha256: str) -> str | None:
    """Return why the library at `path` must not be loaded; None if it may be.

    No other user can change the file after this check (see `find_exposure`), so the library loaded from this path has
    the bytes that were hashed, or bytes that a process of this user wrote.

    Args:
        path: The library: built on this machine, or shipped with the package.
        sha256: The recorded SHA-256 of its bytes, in hexadecimal.

    Returns:
        A clause that describes the fault, or None. On Windows only the SHA-256 is checked.
    """
    return find_exposure(path) or find_damage(path, sha256)


def find_damage(path: Path, sha256: str) -> str | None:
    """Return how the file at `path` differs from the recorded one; None if its bytes have this SHA-256.

    Args:
        path: The file.
        sha256: The recorded SHA-256, in hexadecimal.
    """
    try:
        found = _sha256(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return None if found == sha256 else f"{path} has the SHA-256 {found}, and {sha256 or 'none'} was recorded"


def find_recorded_fault(path: Path) -> str | None:
    """Return `find_fault` for the SHA-256 recorded in the file beside the library, which must be as protected.

    Args:
        path: The library.
    """
    record = record_path(path)
    exposure = find_exposure(record)
    if exposure is not None:
        return exposure
    try:
        with _open_regular(record) as file:
            sha256 = file.read(64).decode("ascii", "replace")
    except OSError as error:
        return f"{record} cannot be read ({error.strerror})"
    return find_fault(path, sha256)


def record_path(path: Path) -> Path:
    """Return the path of the file with the SHA-256 of a library, in the format of `sha256sum`.

    Args:
        path: The library.
    """
    return path.with_name(f"{path.name}.sha256")


def write_record(path: Path) -> Path:
    """Write the SHA-256 of a library to the file beside it, and return the path of that file.

    Args:
        path: The library.
    """
    record = record_path(path)
    record.write_text(f"{_sha256(path)}  {path.name}\n")
    record.chmod(0o600)
    return record


def _sha256(path: Path) -> str:
    with _open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _open_regular(path: Path) -> Iterator[BufferedReader]:
    """Open a file to read; raise `OSError`, without blocking, if it is a pipe, a device or a folder."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        yield file


def trusted_search_path() -> list[str]:
    """Return the folders of PATH from which programs may be run.

    Relative entries, empty entries (the current folder) and folders that another user can write are left out.
    """
    return [folder for folder in os.get_exec_path() if os.path.isabs(folder) and find_exposure(Path(folder)) is None]


def find_program(name: str) -> str | None:
    """Return the absolute path of a program in `trusted_search_path()`; None if there is none that may be run.

    Args:
        name: The name of the program.
    """
    for folder in trusted_search_path():
        path = os.path.join(folder, name + (".exe" if sys.platform == "win32" else ""))
        if os.path.isfile(path) and os.access(path, os.X_OK) and find_exposure(Path(path)) is None:
            return path
    return None
