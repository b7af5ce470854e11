"""Launch configuration of the Triton kernels: which recurrences they support on a device. Needs no Triton.

A kernel whose blocks need more shared memory than a device has cannot be launched. The requirements in this table are
those that the compiler reports; they are compared with the device before a kernel is chosen.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _gpu
from .form import DEFAULT_FORM, Constants, Form, RetractionKind, Source

__all__ = [
    "MAX_HEAD_SIZE",
    "RESIDENT",
    "STREAMED",
    "Launch",
    "check_constants",
    "explain_unsupported",
    "explain_unsupported_pass",
    "find_unknown",
    "plan_launch",
    "saved_shape",
]

# The fields of `Form` and of `Constants` that the kernels know. Any other field must have its default value.
_FORM = {
    "heads",
    "rotates",
    "directions_in_drive",
    "beta_in_drive",
    "source",
    "spike_threshold",
    "retraction",
    "dot",
    "rotation_aware",
    "norm_epsilon",
    "linear",
    "phased",
}
_UNKNOWN = {"planes": " (Product of several planes)", "whole_state": " (FromWholeState)"}
_CONSTANTS = (
    "real",
    "imag",
    "weight",
    "bias",
    "beta",
    "feed_real",
    "feed_imag",
    "decay",
    "charge",
    "norm_weight",
    "norm_bias",
)
_SOURCES = {Source.STATE, Source.RELU, Source.SPIKES}
_RETRACTIONS = {
    RetractionKind.EXPONENTIAL,
    RetractionKind.CAYLEY,
    RetractionKind.TAYLOR_ONE,
    RetractionKind.TAYLOR_TWO,
}


class Launch(NamedTuple):
    """Launch configuration of both kernels of a pair."""

    kind: str  # "resident", "streamed" or "given": the module of `triton` with the kernels
    pad: int  # the size of a head rounded up to a power of two, at least 16
    rows: int  # sequences per program
    warps: int
    precision: str  # of the products, as in tl.dot
    stages: int = 1  # Triton multiplies the buffers of loads inside a loop by the number of pipeline stages
    some: int = 0  # of a streamed kernel: sequences whose vectors are in registers at a time
    block: int = 0  # columns of a product at a time
    inner: int = 0  # rows of K and V at a time


MAX_HEAD_SIZE = 2048
# Bytes of shared memory per block, at most, as reported by Triton 3.9.0 for every option of the kernels. Those of the
# resident kernels are by `pad` and precision; with directions in the drive they need less than any GPU has. On gfx942
# a resident head of 64 would spill 600 bytes per thread, and a streamed one spills none.
STREAMED = 24576
RESIDENT = {
    16: {"tf32x3": 6144, "tf32": 3072, "ieee": 3072},
    32: {"tf32x3": 20480, "tf32": 10240, "ieee": 10240},
    64: {"tf32x3": 73728, "tf32": 36864, "ieee": 36864},
}
TILE = 16  # sequences per program with products: the minimum of a matrix product on tensor cores


def plan_launch(form: Form, size: int, device: torch.device) -> Launch | None:
    """Return the launch configuration for a recurrence on a device; None if a head is too large.

    Args:
        form: The form of the recurrence.
        size: The state dimension.
        device: The device.
    """
    head = size // form.heads
    pad = max(16, 1 << (head - 1).bit_length())
    precision = _gpu.matmul_precision(str(device))
    if pad > MAX_HEAD_SIZE:
        return None
    if form.directions_in_drive:  # no products, so a program needs no minimum of sequences
        rows = max(1, min(16, 512 // pad))
        return Launch("given", pad, rows, max(1, min(16, rows * pad // 128)), precision)
    if pad <= (32 if _gpu.is_amd() else 64) and _fits(RESIDENT[pad][precision], device):
        return Launch("resident", pad, TILE, 4 if pad <= 32 else 8, precision)
    return Launch("streamed", pad, TILE, 8, precision, 2, some=max(1, min(TILE, 1024 // pad)), block=64, inner=32)


def _fits(needed: int, device: torch.device) -> bool:
    return needed * 9 // 8 <= _gpu.shared_memory(str(device))  # Triton 3.4.0 needs up to a ninth more


def saved_shape(drive: Tensor, constants: Constants, form: Form, save: bool) -> tuple[int, ...]:
    """Return the shape of what the forward saves on a GPU: K x and V x of every step.

    Args:
        drive, constants, form: As in `adpt_scan`.
        save: Whether anything is saved.
    """
    if not save or form.directions_in_drive:
        return (0,)
    return *drive.shape[:2], form.heads, 2, constants.real.shape[0] // form.heads


def find_unknown(form: Form) -> str | None:
    """Return the first field of a form, with its value, that the kernels do not know; None if they know all.

    Args:
        form: The form of the recurrence.
    """
    for name, value in form._asdict().items():
        if name not in _FORM and value != getattr(DEFAULT_FORM, name):
            return f"{name}={value}{_UNKNOWN.get(name, '')}"
    if form.source not in _SOURCES:
        return f"source={form.source}"
    return None if form.retraction in _RETRACTIONS else f"retraction={form.retraction}"


def explain_unsupported_pass(
    form: Form, size: int, *, paired: bool, slow: bool, diagonal: bool, dtype: torch.dtype, device: str
) -> str | None:
    """Return why there is no Newton pass for a recurrence on a GPU; None if there is.

    Args:
        form, size, paired, slow, dtype, device: As in `explain_unsupported`.
        diagonal: Whether the transition is diag(M), as in Forward-DEER, instead of Λ̄.
    """
    reason = explain_unsupported(form, size, paired=paired, slow=slow, dtype=dtype, device=device)
    if reason is not None:
        return reason
    if slow:
        return "the Newton pass on GPUs does not support a slow memory."
    if form.phased:
        return "the Newton pass on GPUs does not support a phase, with which the transition varies: use Sequential()."
    if form.linear:
        return "the Newton pass on GPUs does not support a β fixed at zero, with which one linear scan is exact."
    if diagonal and (paired or form.retraction not in (RetractionKind.EXPONENTIAL, RetractionKind.CAYLEY)):
        return "Forward-DEER has a Newton pass on GPUs for real spectra and rotations only: try solvers.ConvDEER()."
    return None


def check_constants(constants: Constants) -> list[Tensor | None]:
    """Return the constants in the order of the arguments of the kernels.

    Args:
        constants: As in `adpt_scan`.

    Raises:
        NotImplementedError: There is a constant that the kernels do not know.
    """
    unknown = [name for name, value in constants._asdict().items() if value is not None and name not in _CONSTANTS]
    if unknown:
        raise NotImplementedError(f"the Triton kernel does not support the constants {unknown}.")
    return [getattr(constants, name) for name in _CONSTANTS]


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
    if dtype != torch.float32:
        return f"the Triton kernel supports float32, not {dtype}."
    if not form.rotates:
        return "the Triton kernel does not support a slow memory or a phase without a rotation."
    unknown = find_unknown(form)
    if unknown is not None:
        return f"the Triton kernel does not support {unknown}."
    if plan_launch(form, size, torch.device(device)) is None:
        head = size // form.heads
        return f"the Triton kernel supports heads of up to {MAX_HEAD_SIZE} state dimensions; these are {head}."
    return None
