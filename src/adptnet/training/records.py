"""What a run leaves behind: JSON files, written whole, and the environment they came from."""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..errors import CheckpointError
from ..files import write_whole
from ..untrusted import parse_json

__all__ = ["environment", "read_json", "write_json"]


def write_json(path: Path, content: Any) -> None:
    """Writes `content` to `path`, all of it or nothing; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """What `write_json` wrote; a `CheckpointError` if the file is damaged."""
    try:
        return parse_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not as it was written ({error}). Delete it, and go on with --resume."
        ) from None


def environment() -> dict[str, Any]:
    """Versions and machine, to stand beside every number."""
    return {
        "adptnet": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "git": _revision(Path(__file__).parent),
    }


def _revision(folder: Path) -> str | None:
    """The git revision of this code, with a plus where files differ from it; None outside a repository."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
