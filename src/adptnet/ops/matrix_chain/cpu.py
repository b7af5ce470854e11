"""The kernel of `matrix_chain`: its arguments as the C++ program takes them, and the memory it works in."""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from .. import _buffers, _build

__all__ = ["matrix_chain", "ready"]

_NAMES = {torch.float32: "float", torch.float64: "double"}
LEAST = 1 << 20  # products that are worth a thread

_NUMBERS = "batch steps size count parts threads matrices_batch"
_POINTERS = "matrices frame out workspace"


class _Chain(ctypes.Structure):
    """`struct Chain` of kernel.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS.split(" ")),
        *((name, ctypes.c_void_p) for name in _POINTERS.split(" ")),
    )


def ready(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for `dtype`; builds it at the first question."""
    return dtype in _NAMES and _build.wanted() and _build.load("matrix_chain", _NAMES[dtype]) is not None


def matrix_chain(matrices: Tensor, frame: Tensor) -> Tensor:
    """As `reference.matrix_chain`, without derivatives."""
    batch, steps, size = matrices.shape[:3]
    count = frame.shape[-1]
    out = _buffers.empty(batch, size, count, dtype=frame.dtype)
    if not out.numel():
        return out
    library = _declared(_build.load("matrix_chain", _NAMES[frame.dtype]))
    if matrices.stride()[1:] != (size * size, size, 1):
        matrices = matrices.contiguous()
    frame = frame.contiguous()
    chain = _Chain(batch=batch, steps=steps, size=size, count=count, matrices_batch=matrices.stride(0))
    threads = max(1, min(torch.get_num_threads(), batch * steps * size * size * count // LEAST))
    chain.parts = -(-threads // batch)
    chain.threads = min(threads, batch * chain.parts)
    workspace = _buffers.empty(library.matrix_chain_workspace(ctypes.byref(chain)), dtype=torch.uint8)
    for name, tensor in (("matrices", matrices), ("frame", frame), ("out", out), ("workspace", workspace)):
        setattr(chain, name, tensor.data_ptr())
    library.matrix_chain_run(ctypes.byref(chain))
    return out


@functools.cache
def _declared(library: Any) -> Any:
    for function in (library.matrix_chain_workspace, library.matrix_chain_run):
        function.argtypes = [ctypes.POINTER(_Chain)]
    for function in (library.matrix_chain_workspace, library.matrix_chain_layout):
        function.restype = ctypes.c_int64
    library.matrix_chain_run.restype = None
    assert library.matrix_chain_layout() == ctypes.sizeof(_Chain)
    return library
