"""Find the kernels that a wheel for one platform contains, for the instruction sets of this processor.

Such a wheel has a folder `prebuilt` with the libraries and a manifest: the platform, the compiler, the SHA-256 of the
sources of each operation, and the SHA-256 of each library (`.ci/wheels.py` writes it). A pure wheel and the repository
have no such folder.
"""

import functools
import json
import platform
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import _trusted_files
from ._sources import SOURCES, hash_sources

__all__ = ["Prebuilt", "find_prebuilt", "library_suffix", "supported_instruction_sets"]

FOLDER = SOURCES / "prebuilt"
MANIFEST = "manifest.json"


class Prebuilt(NamedTuple):
    """A library of the wheel that may be loaded, or the reason why there is none."""

    path: Path | None
    description: str  # the instruction set and the compiler; the fault if there is no path, empty for a pure wheel


def find_prebuilt(operation: str, scalar: str) -> Prebuilt:
    """Return the library of the wheel for the best instruction set that this processor has.

    Args:
        operation: One of `OPERATIONS`.
        scalar: One of `SCALAR_TYPES`.
    """
    try:
        manifest = _read_manifest(FOLDER / MANIFEST)
    except FileNotFoundError:
        return Prebuilt(None, "")
    except (OSError, ValueError) as error:
        return Prebuilt(None, f"{FOLDER / MANIFEST} cannot be read ({error})")
    try:
        built_for = manifest["platform"]
        if built_for != current_platform():
            return Prebuilt(None, f"the kernels of the wheel are for {built_for}, and this is {current_platform()}")
        if manifest["sources"][operation] != hash_sources(operation):
            return Prebuilt(None, f"the kernels of the wheel were built from other sources of {operation}")
        for name in supported_instruction_sets():
            path = FOLDER / f"{operation}-{scalar}-{name}{library_suffix()}"
            if path.name in manifest["libraries"]:
                fault = _find_fault(path, manifest["libraries"][path.name])
                return Prebuilt(None, fault) if fault else Prebuilt(path, f"prebuilt, {name}, {manifest['compiler']}")
    except (KeyError, TypeError):
        return Prebuilt(None, f"{FOLDER / MANIFEST} is damaged")
    return Prebuilt(None, f"the wheel has no kernel of {operation} for this processor")


def current_platform() -> str:
    """Return the platform as a manifest names it, such as `linux-x86_64`, `darwin-arm64` or `win32-amd64`."""
    return f"{sys.platform}-{platform.machine().lower()}"


def supported_instruction_sets() -> list[str]:
    """Return the names of the instruction sets that this processor has, best first."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return ["neon"]
    known = {"AVX512": ["avx512", "avx2"], "AVX2": ["avx2"]}
    return [*known.get(torch.backends.cpu.get_cpu_capability(), []), "baseline"]


def library_suffix() -> str:
    """Return the end of the name of a library."""
    return ".dll" if sys.platform == "win32" else ".so"


@functools.cache
def _read_manifest(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _find_fault(path: Path, sha256: str) -> str | None:
    """Return why the library at `path` must not be loaded; None if it may be.

    Whoever can write the Python files of the package controls this process anyway, so where those files are exposed
    (a group-writable environment, for instance) the owner and mode of the library are not checked.
    """
    if _trusted_files.find_exposure(Path(__file__)) is None:
        return _trusted_files.find_fault(path, sha256)
    return _trusted_files.find_damage(path, sha256)
