"""Atomic writes, and bounded reads of regular files."""

import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["append_lines", "read_regular", "replace_file", "write_atomic"]


@contextmanager
def replace_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which replaces it at the end of the `with` block.

    A file that is replaced keeps its permissions. After an exception the temporary file is removed and `path` is
    unchanged. A symbolic link is followed.

    Args:
        path: The file to replace.
    """
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    mode = _find_mode(target)
    try:
        yield draft
        if mode is not None:
            with suppress(PermissionError):  # on a file system without permissions
                draft.chmod(mode)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def write_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` to `path` atomically. A symbolic link is followed, not replaced.

    Args:
        path: The file.
        content: Its new content.
    """
    exists = _find_mode(Path(path)) is not None

    def create(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600 if exists else 0o666)  # the old file may be private

    with replace_file(path) as draft, open(draft, "xb", opener=create) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _find_mode(path: Path) -> int | None:
    """Return the permissions of a file; None if it does not exist."""
    try:
        return path.stat().st_mode & 0o777
    except FileNotFoundError:
        return None


def append_lines(file: io.FileIO, lines: bytes) -> bytes:
    """Append whole lines to an unbuffered, readable file and sync it to disk.

    An incomplete last line is terminated first. If writing fails, the file is truncated to its previous size.

    Args:
        file: The open file.
        lines: The lines, with their newlines.

    Returns:
        The bytes that were written.
    """
    end = file.seek(0, os.SEEK_END)
    if end:
        file.seek(-1, os.SEEK_END)
        lines = lines if file.read(1) == b"\n" else b"\n" + lines
    try:
        rest = memoryview(lines)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise
    return lines


def read_regular(path: str | os.PathLike[str], limit: int | None = None) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Args:
        path: The file.
        limit: Largest size in bytes; unlimited by default.

    Raises:
        OSError: The file cannot be read, is a device, a pipe or a folder, or is too large.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # do not block on a pipe without a writer
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        content = b""
        if limit is None or status.st_size <= limit:
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(-1 if limit is None else limit + 1)
        if limit is not None and max(status.st_size, len(content)) > limit:
            raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes", path)
        return content
    finally:
        os.close(descriptor)
