"""Launch configuration of the Triton kernels: which recurrences they support on a device. Needs no Triton.

A kernel whose blocks need more shared memory than a device has cannot be launched. The requirements in this table are
those that the compiler reports; they are compared with the device before a kernel is chosen.
"""

from typing import NamedTuple

import torch

from .. import _gpu
from .form import Form, is_basic_form

__all__ = ["MAX_STATE_SIZE", "SHARED_MEMORY", "Launch", "SharedMemory", "explain_unsupported", "plan_launch"]


class SharedMemory(NamedTuple):
    """Shared memory per block, in bytes."""

    resident: int  # forward, with K and V kept in shared memory for all steps
    streamed: int  # forward, with K and V read from global memory at each step
    backward: int


class Launch(NamedTuple):
    """Launch configuration for a state dimension."""

    pad: int  # the state dimension rounded up to a power of two, at least 16
    warps: int
    resident: bool  # whether the forward keeps K and V in shared memory


# By `pad`, as reported by Triton 3.9.0 for cuda 75 to 120, with any options of the kernels; hip gfx942 needs no more.
SHARED_MEMORY = {
    16: SharedMemory(3072, 2048, 2048),
    32: SharedMemory(10240, 6144, 6144),
    64: SharedMemory(36864, 20480, 20480),
    128: SharedMemory(139264, 73728, 73728),
}
MAX_STATE_SIZE = max(SHARED_MEMORY)
# Fewer warps spill registers: at 128, with 4 warps, 15 kB per thread on cuda 80.
WARPS = {16: 8, 32: 8, 64: 8, 128: 16}
# Triton multiplies the buffers of loads inside a loop by the number of pipeline stages, 3 by default.
STAGES = 1


def plan_launch(size: int, device: str) -> Launch | None:
    """Return the launch configuration for a state dimension on a device; None if it does not fit.

    Args:
        size: The state dimension.
        device: The device, as a string.
    """
    pad = max(16, 1 << (size - 1).bit_length())
    if pad not in SHARED_MEMORY:
        return None
    needed, available = SHARED_MEMORY[pad], _gpu.shared_memory(device)
    if not (_fits(needed.streamed, available) and _fits(needed.backward, available)):
        return None  # a forward without its backward is of no use in training
    return Launch(pad, WARPS[pad], resident=_fits(needed.resident, available))


def _fits(needed: int, available: int) -> bool:
    return needed * 9 // 8 <= available  # Triton 3.4.0 needs up to a ninth more


def explain_unsupported(
    form: Form, size: int, *, paired: bool, slow: bool, dtype: torch.dtype, device: str
) -> str | None:
    """Return why the Triton kernels do not support a recurrence on a device; None if they do.

    Args:
        form: The form of the recurrence.
        size: The state dimension.
        paired: Whether eigenvalues come in complex pairs.
        slow: Whether there is a slow memory.
        dtype, device: Those of the drive.
    """
    missing = _gpu.explain_unavailable(torch.device(device).type)
    if missing is not None:
        return missing
    if dtype != torch.float32 or not is_basic_form(form, paired=paired, slow=slow):
        return (
            "the Triton kernel supports float32, one head, a real spectrum, and key and value computed from the state "
            "itself."
        )
    if size > MAX_STATE_SIZE:
        return f"the Triton kernel supports state dimensions up to {MAX_STATE_SIZE}; this one is {size}."
    if plan_launch(size, device) is None:
        return (
            f"the Triton kernel for a state dimension of {size} needs more shared memory than the "
            f"{_gpu.shared_memory(device):,} bytes per block on {device}."
        )
    return None
