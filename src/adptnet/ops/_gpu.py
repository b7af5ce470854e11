"""Kernels for GPUs: Triton programs, compiled by Triton itself when they are first called."""

import functools
import importlib.util

import torch

from . import _build
from ._torch_state import constant_when_compiled

__all__ = ["LEAST", "describe", "ready", "shared_memory", "why_not"]

# Bytes of shared memory that a block may have on the smallest of the cards the kernels are compiled for.
LEAST = 65536


def ready(device: str) -> bool:
    """Whether Triton kernels may be used on such a device."""
    return why_not(device) is None


@constant_when_compiled
def why_not(device: str) -> str | None:
    """Why there is no kernel for a device; None if there is."""
    if device != "cuda":  # which is what torch calls those of AMD as well
        return f"there is no kernel for {device}."
    if not _build.wanted():
        return "ADPTNET_BACKEND=reference."
    return None if _installed() else "triton is not installed: pip install 'adptnet[triton]'."


@constant_when_compiled
def shared_memory(device: str) -> int:
    """Return the bytes of shared memory that a block may have; the least of any card if this one is not here to ask."""
    if not torch.cuda.is_available():
        return LEAST
    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    return _shared_memory(index) if index < torch.cuda.device_count() else LEAST


@functools.cache
def _shared_memory(index: int) -> int:
    card = torch.cuda.get_device_properties(index)
    found: int | None = getattr(card, "shared_memory_per_block_optin", None)  # of NVIDIA's only
    return getattr(card, "shared_memory_per_block", LEAST) if found is None else found


def describe() -> str:
    """Return what runs for tensors on a GPU here, and why."""
    from .adpt_scan import launch

    if not torch.cuda.is_available():
        return "none: torch sees no GPU"
    reason = why_not("cuda")
    if reason is not None:
        return f"reference: {reason}"
    index = torch.cuda.current_device()
    largest = max((size for size in launch.SHARED if launch.launch_of(size, f"cuda:{index}") is not None), default=0)
    return f"triton: linear_scan, adpt_scan of states up to {largest}, on {torch.cuda.get_device_name(index)}"


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
