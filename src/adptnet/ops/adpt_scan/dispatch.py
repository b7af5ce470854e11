"""Select the GPU kernel of `adpt_scan`, and say if there is a CPU kernel; `adpt_scan` in `__init__.py` uses both."""

from typing import Any

import torch
from torch import Tensor

from .. import _backends, _build
from .._torch_state import constant_when_compiled
from . import cpu, diagonal, launch
from .form import Constants, Form

__all__ = ["explain_unsupported_gpu", "has_cpu_kernel", "select_gpu_kernel"]


@constant_when_compiled
def has_cpu_kernel(dtype: torch.dtype, device: str = "cpu") -> bool:
    """Return whether there is a CPU kernel; on meta, where only shapes are computed, the operation needs none.

    Args:
        dtype: The dtype of the drive.
        device: "cpu" or "meta".
    """
    return dtype in (torch.float32, torch.float64) if device == "meta" else cpu.has_kernel(dtype)


@constant_when_compiled
def _kernels_enabled() -> bool:
    return _build.kernels_enabled()


def explain_unsupported_gpu(
    form: Form, size: int, *, paired: bool, slow: bool, dtype: torch.dtype, device: str
) -> str | None:
    """Return why a GPU runs a recurrence step by step; None if it runs it as one operation.

    Args:
        form, size, paired, slow, dtype, device: As in `launch.explain_unsupported`.
    """
    if torch.device(device).type == "cuda" and _kernels_enabled() and diagonal.is_diagonal(form, slow=slow):
        return None
    return launch.explain_unsupported(form, size, paired=paired, slow=slow, dtype=dtype, device=device)


def select_gpu_kernel(drive: Tensor, constants: Constants, form: Form) -> Any:
    """Return the module whose `forward` and `backward` run a recurrence on a GPU; None for the reference.

    Args:
        drive, constants, form: As in `adpt_scan`.
    """
    if drive.device.type == "cpu":
        return None
    slow = constants.decay is not None
    reason = explain_unsupported_gpu(
        form,
        constants.real.shape[0],
        paired=constants.imag is not None,
        slow=slow,
        dtype=drive.dtype,
        device=str(drive.device),
    )
    if reason is not None:
        if _kernels_enabled():
            _backends.log_fallback(reason)
        return None
    if diagonal.is_diagonal(form, slow=slow):
        return diagonal
    from . import triton

    return triton
