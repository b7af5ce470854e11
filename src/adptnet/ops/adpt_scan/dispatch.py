"""Choose the program that runs an ADPT recurrence, with the reason: all steps in sequence, or one step at known states.

Everything here follows from the form of the recurrence, from dtype and device, and from the environment. `choose` is
called on every call of a layer. `adptnet.cells.dispatch` asks first if the recurrence of a cell has such a form.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _build, _gpu
from .._backends import REFERENCE, SCALARS, TRANSFORMED, Backend, choose_cpu, log_fallback
from .._torch_state import constant_when_compiled, has_dispatch_mode, is_transformed
from . import launch
from .diagonal import is_diagonal
from .form import Constants, Form, is_basic_form

__all__ = ["TRITON", "choose", "choose_step", "explain_unsupported_gpu", "select_gpu_kernel"]

_META = Backend("meta", "on the device meta only shapes are computed.")
TRITON = Backend("triton", "the Triton kernel supports this cell and call.")
_DIAGONAL = Backend("linear_scan", "M is diagonal, so a linear scan runs all steps.")
_RECORDED = Backend(REFERENCE, "autograd records the step, and its kernel has no gradient.", is_announced=True)
_TRACED = Backend(REFERENCE, "a compiler or a dispatch mode observes every operation.", is_announced=True)
_NO_GPU_STEP = Backend(REFERENCE, "Jacobians have a kernel for CPUs only.", is_announced=True)
_NOT_BASIC = Backend(
    REFERENCE,
    "the kernel for Jacobians and Newton passes supports one head, one plane, a real spectrum, and K and V of x.",
    "Use a cell with heads=1, Exact(), a real spectrum, FromState() without options, and no memory, start or phase.",
)


def choose(
    form: Form, size: int, *, paired: bool, slow: bool, dtype: torch.dtype | None, device: torch.device
) -> Backend:
    """Choose the program that runs all steps of a recurrence, forward and backward.

    Args:
        form: The form of the recurrence.
        size: The state dimension.
        paired: Whether eigenvalues come in complex pairs.
        slow: Whether there is a slow memory.
        dtype: The dtype of the drive; None if unknown.
        device: The device of the drive, which need not be present.
    """
    if _gpu.is_cpu(device):
        return _choose_cpu(dtype)
    if dtype is None or dtype not in SCALARS:
        return Backend(REFERENCE, f"there is no kernel for {dtype}.", "Use float32.")
    if device.type == "meta":
        return _META
    reason = explain_unsupported_gpu(form, size, paired=paired, slow=slow, dtype=dtype, device=str(device))
    if reason is not None:
        return Backend(REFERENCE, reason, "Run it on a CPU, or solve in parallel over time: solver=solvers.Auto().")
    return _DIAGONAL if is_diagonal(form, slow=slow) else TRITON


@constant_when_compiled
def _choose_cpu(dtype: torch.dtype | None) -> Backend:
    return choose_cpu("adpt_scan", dtype)


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
    if _gpu.is_gpu(torch.device(device)) and _kernels_enabled() and is_diagonal(form, slow=slow):
        return None
    return launch.explain_unsupported(form, size, paired=paired, slow=slow, dtype=dtype, device=device)


def choose_step(
    form: Form, size: int, tensors: Sequence[Tensor], *, paired: bool, slow: bool, diagonal: bool | None
) -> Backend:
    """Choose the program for the step at known states: Jacobians and Newton passes, which have no gradients.

    Args:
        form: The form of the recurrence.
        size: The state dimension.
        tensors: Everything that the step is computed from, the states first.
        paired: Whether eigenvalues come in complex pairs.
        slow: Whether there is a slow memory.
        diagonal: None for Jacobians; for a Newton pass, whether its transition is diag(M) instead of Λ̄.
    """
    states = tensors[0]
    if not _gpu.is_cpu(states.device) and diagonal is None:
        return _NO_GPU_STEP
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _RECORDED
    if has_dispatch_mode():
        return _TRACED
    if is_transformed(*tensors):
        return TRANSFORMED
    if not _gpu.is_cpu(states.device):
        reason = launch.explain_unsupported_pass(
            form, size, paired=paired, slow=slow, diagonal=bool(diagonal), dtype=states.dtype, device=str(states.device)
        )
        return TRITON if reason is None else Backend(REFERENCE, reason)
    if not is_basic_form(form, paired=paired, slow=slow):
        return _NOT_BASIC
    return choose_cpu("adpt_step", states.dtype)


def select_gpu_kernel(drive: Tensor, constants: Constants, form: Form) -> Any:
    """Return the module whose `forward` and `backward` run a recurrence on a GPU; None for any other program.

    Args:
        drive, constants, form: As in `adpt_scan`.
    """
    if _gpu.is_cpu(drive.device):
        return None
    size, paired, slow = constants.real.shape[0], constants.imag is not None, constants.decay is not None
    backend = choose(form, size, paired=paired, slow=slow, dtype=drive.dtype, device=drive.device)
    if backend == _DIAGONAL:
        from . import diagonal

        return diagonal
    if backend != TRITON:
        if _kernels_enabled():
            log_fallback(backend.reason)
        return None
    from . import triton

    return triton
