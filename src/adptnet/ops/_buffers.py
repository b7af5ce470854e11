"""A pool of large buffers (mapping a fresh page takes longer than the arithmetic on it), and settings of malloc."""

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

__all__ = ["Block", "acquire", "clear", "empty", "keep_freed", "release"]

MIN_POOLED_BYTES = 1 << 18  # smaller allocations are reused by malloc itself
MAX_FREE_BLOCKS = 8
CACHE_LINE = 64  # bytes
_NUMPY = {torch.float32: numpy.float32, torch.float64: numpy.float64, torch.uint8: numpy.uint8}


class Block:
    """A block of memory, aligned to a cache line.

    Args:
        size: In bytes.
    """

    __slots__ = ("address", "memory", "size")

    def __init__(self, size: int):
        raw = numpy.empty(size + CACHE_LINE, numpy.uint8)
        start = -raw.ctypes.data % CACHE_LINE
        self.size, self.memory, self.address = size, raw[start : start + size], raw.ctypes.data + start


# Free blocks, oldest first. Deque operations are atomic, and no lock is taken: a block may be released in the middle of
# any allocation, whenever the last tensor that uses it is collected.
_free: collections.deque[Block] = collections.deque(maxlen=MAX_FREE_BLOCKS)
_leased: dict[int, tuple["weakref.ref[Any]", Block]] = {}


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor whose memory returns to the pool with the last tensor that uses it.

    Args:
        shape: The shape.
        dtype: float32, float64 or uint8.
    """
    needed = math.prod(shape) * dtype.itemsize
    if needed < MIN_POOLED_BYTES:
        return torch.empty(shape, dtype=dtype, device="cpu")
    block = acquire(needed)
    lease = numpy.ndarray(shape, _NUMPY[dtype], block.memory)
    watch = weakref.ref(lease, _release_lease)
    _leased[id(watch)] = watch, block
    return torch.from_numpy(lease)  # not a view of another tensor, so that it may be modified in place


def _release_lease(watch: "weakref.ref[Any]") -> None:
    release(_leased.pop(id(watch))[1])


def acquire(needed: int) -> Block:
    """Return a block: the smallest free one that fits, unless it is more than twice as large as needed; else a new one.

    Among blocks of equal size it is the one released last, which may still be in the cache.

    Args:
        needed: The size in bytes.
    """
    found = None
    try:
        for block in _free:
            if needed <= block.size <= 2 * needed and (found is None or block.size <= found.size):
                found = block
        if found is not None:
            _free.remove(found)
            return found
    except (RuntimeError, ValueError):  # another thread changed the pool meanwhile
        pass
    return Block(needed)


def release(block: Block) -> None:
    """Return a block to the pool.

    Args:
        block: The block, which must not be used any more.
    """
    _free.append(block)


def keep_freed() -> None:
    """Make malloc keep freed memory instead of returning it to the system, in this process and those it starts.

    Torch frees the tensors of a training step and allocates the same sizes again in the next; glibc maps and unmaps
    large allocations each time. Because the setting is global, only the training commands call this function, not the
    library. Without glibc it has no effect.
    """
    # Names of mallopt's settings, their numbers in malloc.h, and values: no separate mappings, no trimming.
    for name, number, value in (("MMAP_MAX", -4, 0), ("TRIM_THRESHOLD", -1, -1), ("TOP_PAD", -2, 1 << 26)):
        if f"MALLOC_{name}_" in os.environ or sys.platform != "linux":
            continue
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(number, value)
        os.environ[f"MALLOC_{name}_"] = str(value if value >= 0 else 1 << 62)


def clear() -> None:
    """Return the memory of all free blocks to the system."""
    _free.clear()
