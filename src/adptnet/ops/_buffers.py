"""Large buffers that are used again: a freshly mapped page costs more than the arithmetic done on it."""

import collections
import contextlib
import ctypes
import math
import os
import sys
import weakref
from typing import Any

import numpy
import torch
from torch import Tensor

__all__ = ["Block", "clear", "empty", "give", "keep_freed", "take"]

SMALLEST = 1 << 18  # below this the allocator of the process reuses memory itself
KEPT = 8  # free blocks
LINE = 64  # bytes of a cache line
_NUMPY = {torch.float32: numpy.float32, torch.float64: numpy.float64, torch.uint8: numpy.uint8}


class Block:
    """Memory that begins with a cache line."""

    __slots__ = ("address", "memory", "size")

    def __init__(self, size: int):
        raw = numpy.empty(size + LINE, numpy.uint8)
        start = -raw.ctypes.data % LINE
        self.size, self.memory, self.address = size, raw[start : start + size], raw.ctypes.data + start


# Blocks that nobody uses, oldest first. Deque operations are atomic, and no lock is taken: a block may come back in the
# middle of any allocation, whenever the last tensor on it is collected.
_free: collections.deque[Block] = collections.deque(maxlen=KEPT)
_leased: dict[int, tuple["weakref.ref[Any]", Block]] = {}


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Like `torch.empty` on the CPU; the memory goes back to the pool with the last tensor that shares it."""
    needed = math.prod(shape) * dtype.itemsize
    if needed < SMALLEST:
        return torch.empty(shape, dtype=dtype, device="cpu")
    block = take(needed)
    lease = numpy.ndarray(shape, _NUMPY[dtype], block.memory)
    watch = weakref.ref(lease, _give_back)
    _leased[id(watch)] = watch, block
    return torch.from_numpy(lease)  # no view of another tensor, so that it may be changed in place


def _give_back(watch: "weakref.ref[Any]") -> None:
    give(_leased.pop(id(watch))[1])


def take(needed: int) -> Block:
    """Memory until it is given back: the smallest free block that fits, unless it is far too large; else a new one.

    Of equal ones it is the last that was in use, which may still be in the cache.
    """
    found = None
    try:
        for block in _free:
            if needed <= block.size <= 2 * needed and (found is None or block.size <= found.size):
                found = block
        if found is not None:
            _free.remove(found)
            return found
    except (RuntimeError, ValueError):  # another thread takes or gives meanwhile
        pass
    return Block(needed)


def give(block: Block) -> None:
    """Back to those that nobody uses."""
    _free.append(block)


def keep_freed() -> None:
    """This process, and those that it starts, keep the memory that they free instead of giving it back to the system.

    Torch frees what a step of training made and asks for the same again in the next; glibc maps and unmaps large pieces
    each time. It is for a program to decide, not for a library: the commands that train do. Elsewhere than with glibc
    nothing happens.
    """
    # Names of mallopt's settings, their numbers in malloc.h, and values: nothing is mapped on its own, nothing trimmed.
    for name, number, value in (("MMAP_MAX", -4, 0), ("TRIM_THRESHOLD", -1, -1), ("TOP_PAD", -2, 1 << 26)):
        if f"MALLOC_{name}_" in os.environ or sys.platform != "linux":
            continue
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(number, value)
        os.environ[f"MALLOC_{name}_"] = str(value if value >= 0 else 1 << 62)


def clear() -> None:
    """Gives the memory that nobody uses back to the system."""
    _free.clear()
