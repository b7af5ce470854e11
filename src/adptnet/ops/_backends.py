"""The program that runs an operation and the reason for it: chosen, logged if it is a reference, and recorded."""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from ..errors import BackendWarning
from . import _build

__all__ = [
    "CPU",
    "DOUBLE_BACKWARD",
    "REFERENCE",
    "TRANSFORMED",
    "Backend",
    "Run",
    "backends",
    "choose_cpu",
    "log_fallback",
    "note_run",
    "record_runs",
]

REFERENCE = "reference"
# The C++ type of each dtype that the CPU kernels support
SCALARS: Mapping[torch.dtype | None, str] = {torch.float32: "float", torch.float64: "double"}
_log = logging.getLogger("adptnet")
_logged: set[str] = set()  # reasons, each of which is logged once


class Backend(NamedTuple):
    """The program that runs an operation, the reason for choosing it, and what would make it faster."""

    name: str  # "cpu" (C++), "triton", "linear_scan", "meta" (only shapes), "torch", or REFERENCE
    reason: str  # a sentence
    advice: str = ""  # a sentence; empty if nothing is known to be faster
    is_announced: bool = False  # whether the user knows why: by a setting of their own, or by a `BackendWarning`

    @property
    def is_kernel(self) -> bool:
        """Whether one operation does the work, rather than the reference in eager PyTorch."""
        return self.name != REFERENCE


CPU = Backend("cpu", "the compiled C++ kernel supports this cell and call.")
DISABLED = Backend(REFERENCE, "ADPTNET_BACKEND=reference.", "Unset ADPTNET_BACKEND.", is_announced=True)
TRANSFORMED = Backend(
    REFERENCE,
    "the kernel does not support torch.func transforms and forward-mode derivatives.",
    "Call the layer outside of torch.func, or differentiate by backward().",
)
DOUBLE_BACKWARD = Backend(
    REFERENCE,
    "the kernel does not support double backward (second-order gradients).",
    "Drop create_graph=True if the gradient itself is not differentiated.",
)


def choose_cpu(
    operation: str, dtype: torch.dtype | None, scalars: Mapping[torch.dtype | None, str] = SCALARS
) -> Backend:
    """Choose the program of an operation on a CPU. The first call builds the kernel.

    Args:
        operation: One of `_build.OPERATIONS`.
        dtype: The dtype of its tensors; None if unknown.
        scalars: The C++ type of each dtype that the kernel supports.
    """
    if not _build.kernels_enabled():
        return DISABLED
    if dtype not in scalars:
        return Backend(REFERENCE, f"there is no kernel for {dtype}.", "Use float32 or float64.")
    kernel = _build.load_kernel(operation, scalars[dtype])
    return CPU if kernel.library is not None else Backend(REFERENCE, kernel.reason, is_announced=True)


class Run(NamedTuple):
    """One program that ran, as `record_runs` lists them."""

    phase: str  # "solver", "forward", "backward", "iteration" or "jacobian"
    backend: Backend


_records: list[list[Run]] = []  # those of the active `record_runs`, of which the innermost records


@contextlib.contextmanager
def record_runs() -> Iterator[list[Run]]:
    """Record which programs run in this context, in all threads. Of nested contexts the inner one records."""
    runs: list[Run] = []
    _records.append(runs)
    try:
        yield runs
    finally:
        _records[:] = [other for other in _records if other is not runs]


def note_run(phase: str, backend: Backend, *, log: bool = True) -> None:
    """Record a program that is about to run, and log once why it is a reference.

    Args:
        phase: See `Run`.
        backend: The program.
        log: Whether to log. Nothing is logged that the user knows, or where kernels are disabled.
    """
    if torch.compiler.is_compiling() or (backend.is_kernel and not _records):
        return
    if _records:
        _records[-1].append(Run(phase, backend))
    if log and not (backend.is_kernel or backend.is_announced) and _build.kernels_enabled():
        log_fallback(backend.reason)


def backends() -> dict[str, str]:
    """Return the backend of each operation on this machine, and the reason; `gpu` is for tensors on a GPU."""
    from . import _gpu

    if not _build.kernels_enabled():
        return dict.fromkeys([*_build.OPERATIONS, "gpu"], "reference: ADPTNET_BACKEND=reference")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BackendWarning)
        kernels = {name: _build.load_kernel(name) for name in _build.OPERATIONS}
    cpu = {name: f"{'cpu' if kernel.library else 'reference'}: {kernel.reason}" for name, kernel in kernels.items()}
    return {**cpu, "gpu": _gpu.describe_backend()}


def log_fallback(reason: str) -> None:
    """Log once why an operation runs as its reference. Nothing is logged while torch compiles a program.

    Args:
        reason: A sentence.
    """
    if not torch.compiler.is_compiling() and reason not in _logged:
        _logged.add(reason)
        _log.warning("adptnet falls back to the slow PyTorch reference loop: %s", reason)
