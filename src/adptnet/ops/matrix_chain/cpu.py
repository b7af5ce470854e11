"""The CPU kernel of `matrix_chain`: the ctypes structure of a call, and its memory."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _backends, _buffers, _build
from .._structures import read_structure

__all__ = ["has_kernel", "matrix_chain"]

_SCALARS = {torch.float32: "float", torch.float64: "double"}
MIN_WORK_PER_THREAD = 1 << 20  # multiplications


@functools.cache
def _mirror() -> Any:
    """Return the ctypes mirror of `struct Chain` in csrc/kernel.cpp."""
    return read_structure(Path(__file__).parent / "csrc" / "kernel.cpp", "Chain")


def has_kernel(dtype: torch.dtype) -> bool:
    """Return whether there is a kernel for `dtype`. The first call builds it.

    Args:
        dtype: The dtype of the frame.
    """
    return _backends.choose_cpu("matrix_chain", dtype).is_kernel


def matrix_chain(matrices: Tensor, frame: Tensor) -> Tensor:
    """Return A_T … A_2 A_1 F by the kernel, which has no gradients.

    Args:
        matrices, frame: As in `reference.matrix_chain`.
    """
    batch, steps, size = matrices.shape[:3]
    count = frame.shape[-1]
    out = _buffers.empty(batch, size, count, dtype=frame.dtype)
    if not out.numel():
        return out
    library = _declare_functions(_build.load("matrix_chain", _SCALARS[frame.dtype]))
    if matrices.stride()[1:] != (size * size, size, 1):
        matrices = matrices.contiguous()
    frame = frame.contiguous()
    chain = _mirror()(batch=batch, steps=steps, size=size, count=count, matrices_batch=matrices.stride(0))
    threads = max(1, min(torch.get_num_threads(), batch * steps * size * size * count // MIN_WORK_PER_THREAD))
    chain.parts = -(-threads // batch)
    chain.threads = min(threads, batch * chain.parts)
    workspace = _buffers.empty(library.matrix_chain_workspace(ctypes.byref(chain)), dtype=torch.uint8)
    for name, tensor in (("matrices", matrices), ("frame", frame), ("out", out), ("workspace", workspace)):
        setattr(chain, name, tensor.data_ptr())
    library.matrix_chain_run(ctypes.byref(chain))
    return out


@functools.cache
def _declare_functions(library: Any) -> Any:
    for function in (library.matrix_chain_workspace, library.matrix_chain_run):
        function.argtypes = [ctypes.POINTER(_mirror())]
    for function in (library.matrix_chain_workspace, library.matrix_chain_layout):
        function.restype = ctypes.c_int64
    library.matrix_chain_run.restype = None
    assert library.matrix_chain_layout() == ctypes.sizeof(_mirror())
    return library
