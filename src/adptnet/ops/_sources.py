"""The C++ kernels before they are compiled: operations, scalar types, source files and flags.

This file imports nothing of the package, so that `.ci/wheels.py` can use it without torch.
"""

import hashlib
from pathlib import Path

__all__ = [
    "LINK_FLAGS",
    "OPERATIONS",
    "SCALAR_TYPES",
    "SOURCES",
    "compile_flags",
    "find_source",
    "hash_sources",
    "read_sources",
]

SOURCES = Path(__file__).parent  # <operation>/csrc, and csrc with the headers that operations share
OPERATIONS = ["adpt_layer", "adpt_scan", "adpt_step", "linear_scan", "matrix_chain", "plane_rotation"]
SCALAR_TYPES = ["float", "double"]
# No -ffast-math: GCC would link start-up code that flushes denormals to zero in the whole process.
_COMPILE_FLAGS = ["-std=c++17", "-O2", "-pthread", "-fno-math-errno", "-fno-trapping-math"]
_COMPILE_FLAGS += ["-ffp-contract=fast", "-fopenmp-simd", "-falign-loops=64"]
LINK_FLAGS = ["-shared", "-pthread"]
# A compiler may fuse a product and a sum in one loop and not in another (clang does). Which loop of the diagonal scan
# has a column depends on the number of threads, so its results would too. Memory limits its speed either way.
_FLAGS_OF_OPERATION = {"linear_scan": ["-ffp-contract=off"]}


def compile_flags(operation: str) -> list[str]:
    """Return the flags that compile an operation, without those of the platform.

    Args:
        operation: One of `OPERATIONS`.
    """
    return [*_COMPILE_FLAGS, *_FLAGS_OF_OPERATION.get(operation, [])]


def find_source(operation: str) -> Path:
    """Return the C++ file of an operation, which includes all others.

    Args:
        operation: One of `OPERATIONS`.
    """
    return SOURCES / operation / "csrc" / "kernel.cpp"


def read_sources(operation: str) -> bytes:
    """Return the text that the library of an operation depends on: its C++ file and all headers.

    Args:
        operation: One of `OPERATIONS`.
    """
    return b"".join(path.read_bytes() for path in [*sorted(SOURCES.rglob("*.h")), find_source(operation)])


def hash_sources(operation: str) -> str:
    """Return the SHA-256 of `read_sources`, in hexadecimal.

    Args:
        operation: One of `OPERATIONS`.
    """
    return hashlib.sha256(read_sources(operation)).hexdigest()
