"""JSON files that are written atomically and checked when they are read."""

import json
from pathlib import Path
from typing import Any

from adptnet._io.files import read_regular, write_atomic
from adptnet._io.untrusted import parse_json
from adptnet.errors import CheckpointError

__all__ = ["read_json", "write_json"]

LARGEST = 2**24  # bytes of a JSON file that is read


def write_json(path: Path, content: Any) -> None:
    """Write `content` to `path` atomically, and create the folder.

    Args:
        path: The file to write.
        content: A value that strict JSON can hold: no infinities and no NaN.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Return the content of a file that `write_json` wrote.

    Args:
        path: The file to read.

    Raises:
        CheckpointError: The file cannot be read, or is not JSON.
    """
    try:
        return parse_json(read_regular(path, LARGEST))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not as it was written ({error}). Delete it and resume with --resume."
        ) from None
