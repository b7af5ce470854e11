"""Availability of the GPU kernels, which are Triton programs that Triton compiles when they are first called."""

import functools
import importlib.util

import torch
from torch import Tensor

from . import _build
from ._torch_state import constant_when_compiled

__all__ = [
    "MIN_SHARED_MEMORY",
    "describe_backend",
    "explain_unavailable",
    "is_amd",
    "is_available",
    "is_cpu",
    "is_gpu",
    "matmul_precision",
    "read",
    "shared_memory",
]

# Bytes of shared memory per block on the smallest of the GPUs for which the kernels are compiled.
MIN_SHARED_MEMORY = 65536
# Whether tensors on the CPU take every branch of tensors on a GPU. Set by tests, which run the kernels in Triton's
# interpreter; nothing else decides by the type of a device itself.
_emulated = False


def is_gpu(device: torch.device) -> bool:
    """Return whether the GPU kernels are for this device. Torch uses the type "cuda" for AMD devices too.

    Args:
        device: The device, which need not be present.
    """
    return device.type == "cuda" or (_emulated and device.type == "cpu")


def is_cpu(device: torch.device) -> bool:
    """Return whether the CPU kernels are for this device.

    Args:
        device: The device.
    """
    return device.type == "cpu" and not _emulated


def is_available(device: str) -> bool:
    """Return whether Triton kernels may be used on a type of device.

    Args:
        device: The type, e.g. "cuda".
    """
    return explain_unavailable(device) is None


@constant_when_compiled
def explain_unavailable(device: str) -> str | None:
    """Return why Triton kernels may not be used on a type of device; None if they may.

    Args:
        device: The type, e.g. "cuda".
    """
    if not is_gpu(torch.device(device)):
        return f"there is no kernel for {device}."
    if not _build.kernels_enabled():
        return "ADPTNET_BACKEND=reference."
    return None if _has_triton() else "triton is not installed: pip install 'adptnet[triton]'."


@constant_when_compiled
def shared_memory(device: str) -> int:
    """Return the bytes of shared memory per block on a device; `MIN_SHARED_MEMORY` if the device is not present.

    Args:
        device: The device, as a string.
    """
    index = _find_index(device)
    return MIN_SHARED_MEMORY if index is None else _shared_memory(index)


@constant_when_compiled
def matmul_precision(device: str) -> str:
    """Return the precision of float32 matrix products in kernels, as tl.dot names it.

    By default, products on tensor cores are sums of three TF32 products, as exact as float32; with
    `torch.backends.cuda.matmul.fp32_precision = "tf32"` or `torch.set_float32_matmul_precision("high")`, single ones.
    GPUs without TF32 units compute in float32: NVIDIA before compute capability 8.0, and AMD, whose matrix units
    support it.

    Args:
        device: The device, as a string; one that is not present is assumed to have TF32 units.
    """
    index = _find_index(device)
    if is_amd() or (index is not None and torch.cuda.get_device_capability(index)[0] < 8):
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


@constant_when_compiled
def is_amd() -> bool:
    """Return whether the installed torch is for AMD GPUs."""
    return torch.version.hip is not None


def read(values: Tensor) -> list[list[int]]:
    """Return the integers of a matrix. The host waits for the GPU: once per solve.

    Args:
        values: (rows, columns).
    """
    found: list[list[int]] = values.tolist()
    return found


def _find_index(device: str) -> int | None:
    """Return the index of a GPU; None if it is not present."""
    if not torch.cuda.is_available():
        return None
    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    return index if index < torch.cuda.device_count() else None


@functools.cache
def _shared_memory(index: int) -> int:
    properties = torch.cuda.get_device_properties(index)
    opt_in: int | None = getattr(properties, "shared_memory_per_block_optin", None)  # NVIDIA only
    return getattr(properties, "shared_memory_per_block", MIN_SHARED_MEMORY) if opt_in is None else opt_in


def describe_backend() -> str:
    """Return the backend for tensors on a GPU of this machine, and the reason."""
    from .adpt_scan import launch

    if not torch.cuda.is_available():
        return "none: torch sees no GPU"
    reason = explain_unavailable("cuda")
    if reason is not None:
        return f"reference: {reason}"
    name = torch.cuda.get_device_name(torch.cuda.current_device())
    return f"triton: linear_scan, adpt_scan for heads of up to {launch.MAX_HEAD_SIZE} state dimensions, on {name}"


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
