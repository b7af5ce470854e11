"""Kernels for GPUs: Triton programs, compiled by Triton itself when they are first called."""

import functools
import importlib.util

from . import native

__all__ = ["ready", "why_not"]


def ready(device: str) -> bool:
    """Whether Triton kernels may be used on such a device."""
    return why_not(device) is None


def why_not(device: str) -> str | None:
    """Why there is no kernel for a device; None if there is."""
    if device != "cuda":  # which is what torch calls those of AMD as well
        return f"there is no kernel for {device}."
    if not native.wanted():
        return "ADPTNET_BACKEND=reference."
    return None if _installed() else "triton is not installed: pip install 'adptnet[triton]'."


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
