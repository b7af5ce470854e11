"""Which recurrences the Triton kernels run on a device, and how they are launched. Needs no Triton.

A kernel whose blocks need more shared memory than a device has cannot be launched. What each needs is written down here
as the compiler reports it, and compared with the device before a kernel is chosen.
"""

from typing import NamedTuple

import torch

from .. import _gpu
from .form import Form, is_plain

__all__ = ["LARGEST", "SHARED", "Launch", "Shared", "launch_of", "why_not"]


class Shared(NamedTuple):
    """Bytes of shared memory of a block."""

    held: int  # forward, with K and V kept there for all steps
    streamed: int  # forward, with K and V read from global memory at each step
    backward: int


class Launch(NamedTuple):
    """How the kernels of a state are launched."""

    pad: int  # the state size up to a power of two, at least 16
    warps: int
    held: bool  # whether the forward keeps K and V in shared memory


# By `pad`, from Triton 3.9.0 for cuda 75 to 120, with any of the kernels' options; hip gfx942 needs no more.
SHARED = {
    16: Shared(3072, 2048, 2048),
    32: Shared(10240, 6144, 6144),
    64: Shared(36864, 20480, 20480),
    128: Shared(139264, 73728, 73728),
}
LARGEST = max(SHARED)
# Fewer warps spill registers: at 128, with 4 warps, 15 kB a thread on cuda 80.
WARPS = {16: 8, 32: 8, 64: 8, 128: 16}
# Triton multiplies the buffers of loads inside a loop by the stages it pipelines them in, 3 unless told otherwise.
STAGES = 1


def launch_of(size: int, device: str) -> Launch | None:
    """Return how a state of `size` is launched on a device; None if it does not fit."""
    pad = max(16, 1 << (size - 1).bit_length())
    if pad not in SHARED:
        return None
    needed, there = SHARED[pad], _gpu.shared_memory(device)
    if not (_fits(needed.streamed, there) and _fits(needed.backward, there)):
        return None  # a forward without its backward would be of no use in training
    return Launch(pad, WARPS[pad], held=_fits(needed.held, there))


def _fits(needed: int, there: int) -> bool:
    return needed * 9 // 8 <= there  # Triton 3.4.0 needs up to a ninth more


def why_not(form: Form, size: int, *, paired: bool, slow: bool, dtype: torch.dtype, device: str) -> str | None:
    """Return why the Triton kernels do not run such a recurrence on a device; None if they do.

    Args:
        form: The kind of recurrence.
        size: Of the state.
        paired: Whether eigenvalues come in complex pairs.
        slow: Whether there is a slow memory.
        dtype, device: Of the drive.
    """
    missing = _gpu.why_not(torch.device(device).type)
    if missing is not None:
        return missing
    if dtype != torch.float32 or not is_plain(form, paired=paired, slow=slow):
        return "the Triton kernel is for float32, one head, a real spectrum, K and V of the state."
    if size > LARGEST:
        return f"the Triton kernel is for states of up to {LARGEST}; this one has {size}."
    if launch_of(size, device) is None:
        return (
            f"the Triton kernel for a state of {size} needs more shared memory than the "
            f"{_gpu.shared_memory(device):,} bytes a block has on {device}."
        )
    return None
