"""Files that are written whole or not at all, and reads that end."""

import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["append_lines", "drafted", "read_regular", "write_whole"]


@contextmanager
def drafted(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name beside `path` to write under; it takes the place of `path` at the end, or is gone. A link is followed."""
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        yield draft
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes `content` beside `path` and puts it in its place at once. A link is followed, not replaced."""
    with drafted(path) as draft, open(draft, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def append_lines(file: io.FileIO, lines: bytes) -> bytes:
    """Append whole lines to an unbuffered file that is also readable, and wait for the disk.

    If that fails the file is cut back. A line that was left unfinished before is ended first. Returns what was written.
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

    Raises:
        OSError: Also for a device, a pipe or a folder, which is not read, and for a file that is too large.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe must not wait for its writer
    try:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        content = b""
        if limit is None or found.st_size <= limit:
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(-1 if limit is None else limit + 1)
        if limit is not None and max(found.st_size, len(content)) > limit:
            raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes", path)
        return content
    finally:
        os.close(descriptor)
