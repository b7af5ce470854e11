"""Files that are written whole or not at all."""

import os
import secrets
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes `content` beside `path` and puts it in its place at once. A link is followed, not replaced."""
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with open(draft, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
