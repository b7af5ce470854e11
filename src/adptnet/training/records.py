"""What a run leaves behind: JSON files, written whole, and the environment they came from."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..files import write_whole

__all__ = ["environment", "write_json"]


def write_json(path: Path, content: Any) -> None:
    """Writes `content` to `path`, all of it or nothing; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def environment() -> dict[str, str | int]:
    """Versions and machine, to stand beside every number."""
    return {
        "adptnet": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
    }
