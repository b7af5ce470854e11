"""Report which implementation runs each operation, and log why a reference runs instead of a kernel."""

import logging
import warnings

import torch

from ..errors import BackendWarning
from . import _build

__all__ = ["backends", "log_fallback"]

_log = logging.getLogger("adptnet")
_logged: set[str] = set()  # reasons, each of which is logged once


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
