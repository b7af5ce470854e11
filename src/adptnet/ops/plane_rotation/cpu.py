"""The CPU kernel of `plane_rotation`: the ctypes structure of a call."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _backends, _buffers, _build
from .._structures import read_structure

__all__ = ["backward", "forward", "has_kernel"]

_SCALARS = {torch.float32: "float", torch.float64: "double"}
MIN_WORK_PER_THREAD = 1 << 16  # elements of x

_INPUTS = "x key offset skew_coefficient key_coefficient offset_coefficient"


@functools.cache
def _mirror() -> Any:
    """Return the ctypes mirror of `struct Rotation` in csrc/kernel.cpp."""
    return read_structure(Path(__file__).parent / "csrc" / "kernel.cpp", "Rotation")


def has_kernel(dtype: torch.dtype) -> bool:
    """Return whether there is a kernel for `dtype`. The first call builds it.

    Args:
        dtype: The dtype of the vectors.
    """
    return _backends.choose_cpu("plane_rotation", dtype).is_kernel


def forward(*inputs: Tensor) -> Tensor:
    """Run the forward kernel and return the rotated vectors.

    Args:
        inputs: The arguments of `reference.rotate`, not broadcast.
    """
    rotated = _buffers.empty(*inputs[0].shape, dtype=inputs[0].dtype)
    _run("plane_rotation_forward", inputs, rotated=rotated)
    return rotated


def backward(gradient: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Run the backward kernel and return the gradient of each input.

    Args:
        gradient: With respect to the rotated vectors.
        inputs: The arguments of `reference.rotate`, not broadcast.
    """
    gradients = [_buffers.empty(*t.shape, dtype=t.dtype) for t in inputs]
    named = {f"{name}_gradients": t for name, t in zip(_INPUTS.split(" "), gradients, strict=True)}
    _run("plane_rotation_backward", inputs, gradients=gradient.contiguous(), **named)
    return gradients


def _run(function: str, inputs: tuple[Tensor, ...], **outputs: Tensor) -> None:
    x = inputs[0]
    size = x.shape[-1]
    call = _mirror()(rows=x.numel() // size, size=size)
    call.threads = max(1, min(torch.get_num_threads(), call.rows, x.numel() // MIN_WORK_PER_THREAD))
    tensors = {name: t.contiguous() for name, t in zip(_INPUTS.split(" "), inputs, strict=True)} | outputs
    for name, tensor in tensors.items():
        setattr(call, name, tensor.data_ptr())
    getattr(_declare_functions(_build.load("plane_rotation", _SCALARS[x.dtype])), function)(ctypes.byref(call))


@functools.cache
def _declare_functions(library: Any) -> Any:
    library.plane_rotation_layout.restype = ctypes.c_int64
    for function in (library.plane_rotation_forward, library.plane_rotation_backward):
        function.argtypes = [ctypes.POINTER(_mirror())]
        function.restype = None
    assert library.plane_rotation_layout() == ctypes.sizeof(_mirror())
    return library
