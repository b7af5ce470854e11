"""What a run leaves behind: JSON files, written whole, and the environment they came from."""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from adptnet._io.files import read_regular, write_whole
from adptnet._io.untrusted import parse_json
from adptnet._version import __version__
from adptnet.errors import CheckpointError
from adptnet.ops import _build

__all__ = ["Difference", "differences", "environment", "list_changes", "read_json", "start_record", "write_json"]

LARGEST = 2**24  # bytes of a JSON file that is read


def write_json(path: Path, content: Any) -> None:
    """Writes `content` to `path`, all of it or nothing; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read what `write_json` wrote; raise a `CheckpointError` if the file is damaged."""
    try:
        return parse_json(read_regular(path, LARGEST))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not as it was written ({error}). Delete it and resume with --resume."
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


def start_record(device: torch.device) -> dict[str, Any]:
    """Return all of the environment that the last digits of a run on `device` depend on."""
    return {
        **environment(),
        "numpy": numpy.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "dtype": str(torch.get_default_dtype()),
        "backend": {operation: _backend(operation) for operation in _build.OPERATIONS},
    }


def _backend(operation: str) -> str:
    """Return what executes an operation on the CPU: the reference, or a compiled kernel and its sum."""
    number = "double" if torch.get_default_dtype() is torch.float64 else "float"
    library = _build.load(operation, number) if _build.wanted() else None
    if library is None:
        return "reference"
    file = Path(library._name)
    try:
        return f"compiled kernel {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    except OSError:  # taken from the cache since it was loaded
        return f"compiled kernel {file.name}"


class Difference(NamedTuple):
    """A value that two records do not share."""

    name: str
    before: Any
    after: Any


def differences(before: Any, after: Any, name: str = "") -> Iterator[Difference]:
    """Compare two JSON values part by part. Names that only one of them has are new fields, and are left out."""
    if isinstance(before, dict) and isinstance(after, dict):
        shared = [key for key in before if key in after] if before.get("type") == after.get("type") else ["type"]
        for key in shared:
            yield from differences(before.get(key), after.get(key), f"{name}.{key}".lstrip("."))
    elif before != after:
        yield Difference(name, before, after)


def list_changes(changed: Iterable[Difference]) -> str:
    """Return the differences as text, for an error."""
    return "; ".join(f"{name} was {before!r} and is {after!r}" for name, before, after in changed)


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
