"""Python binding (ctypes) of the CPU kernel of `linear_scan`: its arguments, and the division of work among threads."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _backends, _buffers, _build
from .._structures import read_structure

__all__ = ["SCALARS", "backward", "forward", "has_kernel"]

SCALARS: dict[torch.dtype | None, str] = {
    torch.float32: "float",
    torch.float64: "double",
    torch.complex64: "float",
    torch.complex128: "double",
}
CACHE_LINE = 64  # bytes; no two tasks write to the same cache line (false sharing)
PAGE = 4096  # bytes; the hardware prefetcher does not cross a page
MAX_CACHED_BYTES = 1 << 24  # states up to this size are assumed to fit into the caches
MIN_WORK_PER_THREAD = 1 << 18  # bytes of states


@functools.cache
def _mirror() -> Any:
    """Return the ctypes mirror of `struct Scan` in csrc/kernel.cpp."""
    return read_structure(Path(__file__).parent / "csrc" / "kernel.cpp", "Scan")


def has_kernel(dtype: torch.dtype) -> bool:
    """Return whether there is a kernel for `dtype`. The first call builds it.

    Args:
        dtype: The dtype of the offset.
    """
    return _backends.choose_cpu("linear_scan", dtype, SCALARS).is_kernel


def forward(
    transition: Tensor,
    offset: Tensor,
    initial: Tensor | None,
    reset: Tensor | None,
    reverse: bool,
    *,
    overwrite: bool = False,
) -> Tensor:
    """Run the forward kernel and return the states.

    Args:
        transition, offset, initial, reset, reverse: As in `reference.linear_scan`.
        overwrite: Write the states to `offset`, and return it.
    """
    call = _Call(transition, offset, reset, reverse, min_bytes=PAGE)
    states = call.rows if overwrite else _buffers.empty(*call.rows.shape, dtype=call.rows.dtype)
    call.set(initial=_as_real(initial))
    call.set_rows("offset", call.rows)
    call.set_rows("states", states)
    call.run("linear_scan_forward")
    if not overwrite:
        return _as_like(states, offset)
    if call.copied:
        offset.copy_(_as_like(states, offset))
    return offset


def backward(
    gradient: Tensor,
    states: Tensor,
    transition: Tensor,
    initial: Tensor | None,
    reset: Tensor | None,
    reverse: bool,
    *,
    needs_transition_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward kernel and return the gradients with respect to transition, offset and initial state.

    Args:
        gradient: The gradient with respect to the states.
        states: The result of `forward`.
        transition, initial, reset, reverse: As in `reference.linear_scan`.
        needs_transition_grad: Whether to compute the gradient with respect to the transition; if not, an empty tensor
            is returned for it.
    """
    call = _Call(transition, gradient, reset, reverse, min_bytes=CACHE_LINE)
    batch, steps, size = call.rows.shape
    dtype = call.rows.dtype
    grad_offset, grad_initial = _buffers.empty(batch, steps, size, dtype=dtype), call.rows.new_zeros(batch, size)
    call.set(initial=_as_real(initial), initial_gradients=grad_initial)
    call.set_rows("states", _as_real(states).reshape(batch, steps, size).contiguous())
    call.set_rows("state_gradients", call.rows.contiguous())
    call.set_rows("offset_gradients", grad_offset)
    grad_transition: Tensor | None = None
    if needs_transition_grad and call.scan.transition_time:
        grad_transition = _buffers.empty(batch, steps, size, dtype=dtype)
        call.set_rows("transition_gradients", grad_transition)
    elif needs_transition_grad:
        grad_transition = call.rows.new_zeros(batch, 1, size, dtype=torch.float64)
        call.set(transition_sums=grad_transition)
        call.scan.tile = 16  # number of steps summed in the working precision before they are added to a float64 sum
    call.run("linear_scan_backward")
    grad_initial = _as_like(grad_initial, gradient[..., 0, :])
    if grad_transition is None:
        return transition.new_empty(0), _as_like(grad_offset, gradient), grad_initial
    grad_transition = _as_like(grad_transition.to(dtype), gradient[..., : grad_transition.shape[1], :])
    return grad_transition.sum_to_size(transition.shape).contiguous(), _as_like(grad_offset, gradient), grad_initial


def _as_real(values: Any) -> Any:
    """View a complex tensor as real, with (re, im) interleaved in the last dimension; return a real one as it is."""
    if values is None:
        return None
    values = values.resolve_conj().resolve_neg()
    return torch.view_as_real(values).flatten(-2) if values.is_complex() else values


def _as_like(values: Tensor, like: Tensor) -> Tensor:
    """Reshape real (batch, time, size) or (batch, size) values to `like`, as complex numbers if `like` is complex."""
    if like.is_complex():
        values = torch.view_as_complex(values.unflatten(-1, (-1, 2)))
    return values.reshape(like.shape)


class _Call:
    """A `struct Scan` and the tensors that it points to, which it keeps alive.

    Args:
        transition, reset, reverse: As in `reference.linear_scan`.
        rows: The offset in a forward call, the gradient with respect to the states in a backward call; kept as
            `offset`, real numbers (batch, time, size).
        min_bytes: The smallest part of a row that a task gets.
    """

    def __init__(self, transition: Tensor, rows: Tensor, reset: Tensor | None, reverse: bool, *, min_bytes: int):
        self.library = _declare_functions(_build.load("linear_scan", SCALARS[rows.dtype]))
        lead, (steps, width) = rows.shape[:-2], rows.shape[-2:]
        real_rows = _as_real(rows)
        # (batch, time, size), without a copy if the strides allow it
        self.rows = real_rows.reshape(-1, *real_rows.shape[-2:])
        if self.rows.stride(-1) != 1:
            self.rows = self.rows.contiguous()
        self.copied = self.rows.data_ptr() != rows.data_ptr()
        batch, _, size = self.rows.shape
        self.reverse, self.steps = reverse, steps
        self.tensors: dict[str, Tensor] = {}
        self.scan = _mirror()(batch=batch, steps=steps, size=size, pairs=rows.is_complex())
        transition = transition.reshape((1,) * (rows.dim() - transition.dim()) + tuple(transition.shape))
        transition = transition.expand(*transition.shape[:-1], width)
        shared = all(count == 1 for count in transition.shape[:-2])
        transition = _as_real(transition).contiguous()
        if not shared:
            transition = transition.expand(*lead, *transition.shape[-2:])
        transition = transition.reshape(1 if shared else batch, *transition.shape[-2:])
        self.set_rows("transition", transition)
        if reset is not None:
            self.set_rows("reset", reset.reshape(batch, steps, 1).contiguous())
        self._plan_threads(batch, size, self.rows.itemsize, min_bytes)

    def _plan_threads(self, batch: int, size: int, itemsize: int, min_bytes: int) -> None:
        """Choose the number of threads, and of tasks per sequence; a task gets at least `min_bytes` of each row.

        The forward pass is bound by memory bandwidth. If two threads processed parts of the same page, the hardware
        prefetcher would load most of that page twice.
        """
        threads = max(1, min(torch.get_num_threads(), batch * self.steps * size * itemsize // MIN_WORK_PER_THREAD))
        line = CACHE_LINE // itemsize
        lines = -(-size // line)
        pieces = max(1, min(size * itemsize // min_bytes, -(-threads // batch)))
        self.scan.columns = -(-lines // pieces) * line
        self.scan.tasks_per_sequence = -(-size // self.scan.columns)
        self.scan.threads = max(1, min(threads, batch * self.scan.tasks_per_sequence))
        # `tile` is the number of steps that are run on one range of columns before the next range. If the states fit
        # into the caches, several steps per range keep its columns in registers. Otherwise whole rows in the order of
        # memory are faster.
        cached = batch * self.steps * size * itemsize < MAX_CACHED_BYTES
        self.scan.tile = max(1, min(32, (PAGE if cached else PAGE // 16) // (size * itemsize)))

    def set(self, **tensors: Tensor | None) -> None:
        """Set pointers to contiguous tensors; those of None and of empty tensors stay null."""
        for name, tensor in tensors.items():
            if tensor is not None and tensor.numel():
                self.tensors[name] = tensor.contiguous()
                setattr(self.scan, name, self.tensors[name].data_ptr())

    def set_rows(self, name: str, rows: Tensor) -> None:
        """Set the pointer to the first step that the scan visits, and the strides.

        Args:
            name: A field of `struct Scan`.
            rows: (batch or 1, time or 1, size).
        """
        batch, time = (rows.stride(i) if rows.shape[i] > 1 else 0 for i in (0, 1))
        self.tensors[name] = rows
        last = (self.steps - 1) * time * rows.itemsize if self.reverse else 0
        setattr(self.scan, name, rows.data_ptr() + last)
        if hasattr(self.scan, f"{name}_time"):
            setattr(self.scan, f"{name}_batch", batch)
            setattr(self.scan, f"{name}_time", -time if self.reverse else time)

    def run(self, function: str) -> None:
        getattr(self.library, function)(ctypes.byref(self.scan))


@functools.cache
def _declare_functions(library: Any) -> Any:
    library.linear_scan_layout.restype = ctypes.c_int64
    for function in (library.linear_scan_forward, library.linear_scan_backward):
        function.argtypes = [ctypes.POINTER(_mirror())]
        function.restype = None
    assert library.linear_scan_layout() == ctypes.sizeof(_mirror())
    return library
