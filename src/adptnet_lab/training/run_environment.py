"""environment.json of a run: what affects its rounding errors, at every start, and what has changed since."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from adptnet.ops import _build

from .._runtime import describe_environment

__all__ = ["Difference", "describe_start", "find_differences", "format_differences"]


def describe_start(device: torch.device) -> dict[str, Any]:
    """Return everything in the environment that affects the rounding errors of a run on `device`.

    Args:
        device: The device of the run.
    """
    return {
        **describe_environment(),
        "numpy": numpy.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "matmul precision": _describe_matmul_precision(),
        "dtype": str(torch.get_default_dtype()),
        "backend": {operation: _describe_backend(operation) for operation in _build.OPERATIONS},
    }


def _describe_matmul_precision() -> str:
    """Return the precision of float32 matrix products: one word, or that of each backend if they were set apart."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        mkldnn: Any = torch.backends.mkldnn
        return f"cuda {torch.backends.cuda.matmul.fp32_precision}, mkldnn {mkldnn.matmul.fp32_precision}"


def _describe_backend(operation: str) -> str:
    """Return what executes an operation on the CPU: the reference, or a compiled kernel and its SHA-256."""
    number = "double" if torch.get_default_dtype() is torch.float64 else "float"
    library = _build.load(operation, number) if _build.kernels_enabled() else None
    if library is None:
        return "reference"
    file = Path(library._name)
    try:
        return f"compiled kernel {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    except OSError:  # removed from the cache since it was loaded
        return f"compiled kernel {file.name}"


class Difference(NamedTuple):
    """A value that differs between two JSON documents."""

    name: str
    before: Any
    after: Any


def find_differences(before: Any, after: Any, name: str = "") -> Iterator[Difference]:
    """Compare two JSON documents field by field.

    Fields that only one of them has are ignored: they were added by another version of adptnet.

    Args:
        before: The older document.
        after: The newer document.
        name: The path of both inside a larger document.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        shared = [key for key in before if key in after] if before.get("type") == after.get("type") else ["type"]
        for key in shared:
            yield from find_differences(before.get(key), after.get(key), f"{name}.{key}".lstrip("."))
    elif before != after:
        yield Difference(name, before, after)


def format_differences(differences: Iterable[Difference]) -> str:
    """Return the differences as text for an error message.

    Args:
        differences: The differences.
    """
    return "; ".join(f"{name} was {before!r} and is {after!r}" for name, before, after in differences)
