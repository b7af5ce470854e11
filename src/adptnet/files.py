"""Files that are written whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["drafted", "write_whole"]


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
