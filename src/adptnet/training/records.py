"""What a run leaves behind: JSON files, written whole, and the environment they came from."""

import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

__all__ = ["environment", "write_json"]


def write_json(path: Path, content: Any) -> None:
    """Writes `content` to `path`, all of it or nothing; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1, allow_nan=False)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def environment() -> dict[str, str | int]:
    """Versions and machine, to stand beside every number."""
    from .. import __version__

    return {
        "adptnet": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
    }
