"""The kernel of `linear_scan`: its arguments as the C++ program takes them."""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from .. import _buffers, _build

__all__ = ["NAMES", "backward", "forward", "ready"]

NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.complex64: "float",
    torch.complex128: "double",
}
LINE = 64  # bytes: tasks share none
PAGE = 4096  # bytes a processor foresees
CACHED = 1 << 24  # bytes of states below which they are found in the caches
LEAST = 1 << 18  # bytes of states that are worth a thread

_NUMBERS = "batch steps size pairs tile threads tasks_of_row columns transition_batch transition_time"
_NUMBERS += " offset_batch offset_time states_batch states_time reset_batch reset_time"
_POINTERS = "transition offset initial reset states state_gradients offset_gradients initial_gradients"
_POINTERS += " transition_gradients transition_sums"


class _Scan(ctypes.Structure):
    """`struct Scan` of kernel.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS.split(" ")),
        *((name, ctypes.c_void_p) for name in _POINTERS.split(" ")),
    )


def ready(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for `dtype`; builds it at the first question."""
    return dtype in NAMES and _build.wanted() and _build.load("linear_scan", NAMES[dtype]) is not None


def forward(
    transition: Tensor,
    offset: Tensor,
    initial: Tensor | None,
    reset: Tensor | None,
    reverse: bool,
    *,
    over: bool = False,
) -> Tensor:
    """The states, in new memory or over the offset."""
    call = _Call(transition, offset, reset, reverse, piece=PAGE)
    states = call.offset if over else _buffers.empty(*call.offset.shape, dtype=call.offset.dtype)
    call.set(initial=_numbers(initial))
    call.set_rows("offset", call.offset)
    call.set_rows("states", states)
    call.run("linear_scan_forward")
    if not over:
        return _as(states, offset)
    if call.copied:
        offset.copy_(_as(states, offset))
    return offset


def backward(
    gradient: Tensor,
    states: Tensor,
    transition: Tensor,
    initial: Tensor | None,
    reset: Tensor | None,
    reverse: bool,
    *,
    to_transition: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives with respect to the transition (empty if not wanted), the offset and what enters."""
    call = _Call(transition, gradient, reset, reverse, piece=LINE)
    batch, steps, size = call.offset.shape
    dtype = call.offset.dtype
    to_offset, to_initial = _buffers.empty(batch, steps, size, dtype=dtype), call.offset.new_zeros(batch, size)
    call.set(initial=_numbers(initial), initial_gradients=to_initial)
    call.set_rows("states", _numbers(states).reshape(batch, steps, size).contiguous())
    call.set_rows("state_gradients", call.offset.contiguous())
    call.set_rows("offset_gradients", to_offset)
    found: Tensor | None = None
    if to_transition and call.scan.transition_time:
        found = _buffers.empty(batch, steps, size, dtype=dtype)
        call.set_rows("transition_gradients", found)
    elif to_transition:
        found = call.offset.new_zeros(batch, 1, size, dtype=torch.float64)
        call.set(transition_sums=found)
        call.scan.tile = 16  # of whose steps the sum is made in the working precision
    call.run("linear_scan_backward")
    to_start = _as(to_initial, gradient[..., 0, :])
    if found is None:
        return transition.new_empty(0), _as(to_offset, gradient), to_start
    every = _as(found.to(dtype), gradient[..., : found.shape[1], :])
    return every.sum_to_size(transition.shape).contiguous(), _as(to_offset, gradient), to_start


def _numbers(values: Any) -> Any:
    """Real numbers, two for a complex one, as they lie in memory."""
    if values is None:
        return None
    values = values.resolve_conj().resolve_neg()
    return torch.view_as_real(values).flatten(-2) if values.is_complex() else values


def _as(values: Tensor, like: Tensor) -> Tensor:
    """(batch, time, numbers), or (batch, numbers), in the shape and kind of `like`."""
    if like.is_complex():
        values = torch.view_as_complex(values.unflatten(-1, (-1, 2)))
    return values.reshape(like.shape)


class _Call:
    """A `struct Scan` and the tensors it points to."""

    def __init__(self, transition: Tensor, rows: Tensor, reset: Tensor | None, reverse: bool, *, piece: int):
        self.library = _declared(_build.load("linear_scan", NAMES[rows.dtype]))
        lead, (steps, width) = rows.shape[:-2], rows.shape[-2:]
        whole = _numbers(rows)
        # (batch, time, numbers) without a copy, if it lies so
        self.offset = whole.reshape(-1, *whole.shape[-2:])
        if self.offset.stride(-1) != 1:
            self.offset = self.offset.contiguous()
        self.copied = self.offset.data_ptr() != rows.data_ptr()
        batch, _, size = self.offset.shape
        self.reverse, self.steps = reverse, steps
        self.held: dict[str, Tensor] = {}
        self.scan = _Scan(batch=batch, steps=steps, size=size, pairs=rows.is_complex())
        factors = transition.reshape((1,) * (rows.dim() - transition.dim()) + tuple(transition.shape))
        factors = factors.expand(*factors.shape[:-1], width)
        alone = all(count == 1 for count in factors.shape[:-2])
        factors = _numbers(factors).contiguous()
        if not alone:
            factors = factors.expand(*lead, *factors.shape[-2:])
        factors = factors.reshape(1 if alone else batch, *factors.shape[-2:])
        self.set_rows("transition", factors)
        if reset is not None:
            self.set_rows("reset", reset.reshape(batch, steps, 1).contiguous())
        self._share(batch, size, self.offset.itemsize, piece)

    def _share(self, batch: int, size: int, itemsize: int, piece: int) -> None:
        """How many threads, and how many tasks a row is cut into: each has so many bytes of it, or more.

        A forward reads and writes one row after another and does next to nothing with it: two threads with a part of
        every page each would read most of it twice.
        """
        threads = max(1, min(torch.get_num_threads(), batch * self.steps * size * itemsize // LEAST))
        line = LINE // itemsize
        lines = -(-size // line)
        pieces = max(1, min(size * itemsize // piece, -(-threads // batch)))
        self.scan.columns = -(-lines // pieces) * line
        self.scan.tasks_of_row = -(-size // self.scan.columns)
        self.scan.threads = max(1, min(threads, batch * self.scan.tasks_of_row))
        # Several steps of some columns keep these in registers; from memory, rows should come whole and in order.
        cached = batch * self.steps * size * itemsize < CACHED
        self.scan.tile = max(1, min(32, (PAGE if cached else PAGE // 16) // (size * itemsize)))

    def set(self, **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            if tensor is not None and tensor.numel():
                self.held[name] = tensor.contiguous()
                setattr(self.scan, name, self.held[name].data_ptr())

    def set_rows(self, name: str, rows: Tensor) -> None:
        """(batch or 1, time or 1, numbers), at the step that comes first."""
        batch, time = (rows.stride(i) if rows.shape[i] > 1 else 0 for i in (0, 1))
        self.held[name] = rows
        last = (self.steps - 1) * time * rows.itemsize if self.reverse else 0
        setattr(self.scan, name, rows.data_ptr() + last)
        if hasattr(self.scan, f"{name}_time"):
            setattr(self.scan, f"{name}_batch", batch)
            setattr(self.scan, f"{name}_time", -time if self.reverse else time)

    def run(self, function: str) -> None:
        getattr(self.library, function)(ctypes.byref(self.scan))


@functools.cache
def _declared(library: Any) -> Any:
    library.linear_scan_layout.restype = ctypes.c_int64
    for function in (library.linear_scan_forward, library.linear_scan_backward):
        function.argtypes = [ctypes.POINTER(_Scan)]
        function.restype = None
    assert library.linear_scan_layout() == ctypes.sizeof(_Scan)
    return library
