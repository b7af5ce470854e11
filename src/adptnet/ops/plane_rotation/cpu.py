"""The kernel of `plane_rotation`: its arguments as the C++ program takes them."""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from .. import _buffers, _build

__all__ = ["backward", "forward", "ready"]

_NAMES = {torch.float32: "float", torch.float64: "double"}
LEAST = 1 << 16  # numbers that are worth a thread

_INPUTS = "x key offset turn shrink_key shrink_offset"
_POINTERS = f"{_INPUTS} turned gradients {' '.join(f'{name}_gradients' for name in _INPUTS.split(' '))}"


class _Turn(ctypes.Structure):
    """`struct Turn` of kernel.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "size", "threads")),
        *((name, ctypes.c_void_p) for name in _POINTERS.split(" ")),
    )


def ready(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for `dtype`; builds it at the first question."""
    return dtype in _NAMES and _build.wanted() and _build.load("plane_rotation", _NAMES[dtype]) is not None


def forward(*inputs: Tensor) -> Tensor:
    """What is turned; of x, key, offset, turn, shrink_key and shrink_offset."""
    turned = _buffers.empty(*inputs[0].shape, dtype=inputs[0].dtype)
    _run("plane_rotation_forward", inputs, turned=turned)
    return turned


def backward(gradient: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Derivatives with respect to each input."""
    found = [_buffers.empty(*t.shape, dtype=t.dtype) for t in inputs]
    named = {f"{name}_gradients": t for name, t in zip(_INPUTS.split(" "), found, strict=True)}
    _run("plane_rotation_backward", inputs, gradients=gradient.contiguous(), **named)
    return found


def _run(function: str, inputs: tuple[Tensor, ...], **others: Tensor) -> None:
    x = inputs[0]
    size = x.shape[-1]
    turn = _Turn(rows=x.numel() // size, size=size)
    turn.threads = max(1, min(torch.get_num_threads(), turn.rows, x.numel() // LEAST))
    held = {name: t.contiguous() for name, t in zip(_INPUTS.split(" "), inputs, strict=True)} | others
    for name, tensor in held.items():
        setattr(turn, name, tensor.data_ptr())
    getattr(_declared(_build.load("plane_rotation", _NAMES[x.dtype])), function)(ctypes.byref(turn))


@functools.cache
def _declared(library: Any) -> Any:
    library.plane_rotation_layout.restype = ctypes.c_int64
    for function in (library.plane_rotation_forward, library.plane_rotation_backward):
        function.argtypes = [ctypes.POINTER(_Turn)]
        function.restype = None
    assert library.plane_rotation_layout() == ctypes.sizeof(_Turn)
    return library
