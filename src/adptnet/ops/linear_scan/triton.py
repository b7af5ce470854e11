"""The diagonal recurrence in Triton, for GPUs: one program for some columns of a sequence, which runs all its steps.

Imported only where it is used. Its speed on a GPU has not been measured.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["backward", "backward_kernel", "forward", "forward_kernel"]

COLUMNS = 64  # of a program


@triton.jit(do_not_specialize=["steps"])  # or another length would be another compilation
def forward_kernel(
    transition, offset, initial, reset, states,
    transition_batch, transition_time, steps, size,
    STARTS: tl.constexpr, RESETS: tl.constexpr, REVERSE: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Offsets and states are (batch, time, size), in numbers or, with PAIRS, in pairs of them."""
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < size
    place = column * 2 if PAIRS else column
    width = size * 2 if PAIRS else size
    real = tl.zeros((COLUMNS,), dtype=offset.dtype.element_ty)
    imag = tl.zeros((COLUMNS,), dtype=offset.dtype.element_ty)
    if STARTS:
        real = tl.load(initial + sequence * width + place, mask, 0.0)
        if PAIRS:
            imag = tl.load(initial + sequence * width + place + 1, mask, 0.0)
    for i in range(steps):
        t = sequence * 0 + (steps - 1 - i if REVERSE else i)  # so that no product of it overflows
        row = (sequence * steps + t) * width + place
        factor = transition + sequence * transition_batch + t * transition_time + place
        if RESETS:
            kept = tl.load(reset + sequence * steps + t) == 0
            real = tl.where(kept, real, 0.0)
            imag = tl.where(kept, imag, 0.0)
        a = tl.load(factor, mask, 0.0)
        if RESETS:
            a = tl.where(kept, a, 0.0)
        if PAIRS:
            b = tl.load(factor + 1, mask, 0.0)
            if RESETS:
                b = tl.where(kept, b, 0.0)
            moved = a * real - b * imag
            imag = a * imag + b * real + tl.load(offset + row + 1, mask, 0.0)
            real = moved + tl.load(offset + row, mask, 0.0)
            tl.store(states + row + 1, imag, mask)
        else:
            real = a * real + tl.load(offset + row, mask, 0.0)
        tl.store(states + row, real, mask)


@triton.jit(do_not_specialize=["steps"])
def backward_kernel(
    gradient, states, transition, initial, reset,
    offset_gradient, initial_gradient, transition_gradient,
    transition_batch, transition_time, steps, size,
    STARTS: tl.constexpr, RESETS: tl.constexpr, REVERSE: tl.constexpr, PAIRS: tl.constexpr, VARIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """With VARIES the gradient of the transition is that of each step, otherwise the sum over the steps."""
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < size
    place = column * 2 if PAIRS else column
    width = size * 2 if PAIRS else size
    real = tl.zeros((COLUMNS,), dtype=gradient.dtype.element_ty)
    imag = tl.zeros((COLUMNS,), dtype=gradient.dtype.element_ty)
    real_sum = tl.zeros((COLUMNS,), dtype=gradient.dtype.element_ty)
    imag_sum = tl.zeros((COLUMNS,), dtype=gradient.dtype.element_ty)
    for i in range(steps):
        t = sequence * 0 + (i if REVERSE else steps - 1 - i)
        row = (sequence * steps + t) * width + place
        factor = transition + sequence * transition_batch + t * transition_time + place
        real += tl.load(gradient + row, mask, 0.0)
        tl.store(offset_gradient + row, real, mask)
        before = row + width if REVERSE else row - width
        inside = column * 0 + i < steps - 1  # whether there is a state before this one
        x = tl.load(states + before, mask & inside, 0.0)
        if STARTS:
            x += tl.load(initial + sequence * width + place, mask & ~inside, 0.0)
        if RESETS:
            kept = tl.load(reset + sequence * steps + t) == 0
            x = tl.where(kept, x, 0.0)
        a = tl.load(factor, mask, 0.0)
        if PAIRS:
            imag += tl.load(gradient + row + 1, mask, 0.0)
            tl.store(offset_gradient + row + 1, imag, mask)
            y = tl.load(states + before + 1, mask & inside, 0.0)
            if STARTS:
                y += tl.load(initial + sequence * width + place + 1, mask & ~inside, 0.0)
            if RESETS:
                y = tl.where(kept, y, 0.0)
            b = tl.load(factor + 1, mask, 0.0)
            change, turned = x * real + y * imag, x * imag - y * real  # times the conjugate of the state before
            if VARIES:
                tl.store(transition_gradient + row + 1, turned, mask)
            imag_sum += turned
            moved = a * real + b * imag
            imag = a * imag - b * real
            real = moved
        else:
            change = x * real
            real = a * real
        if RESETS:  # not by a product, which would keep a NaN
            real = tl.where(kept, real, 0.0)
            imag = tl.where(kept, imag, 0.0)
        if VARIES:
            tl.store(transition_gradient + row, change, mask)
        real_sum += change
    tl.store(initial_gradient + sequence * width + place, real, mask)
    if not VARIES:
        tl.store(transition_gradient + sequence * width + place, real_sum, mask)
    if PAIRS:
        tl.store(initial_gradient + sequence * width + place + 1, imag, mask)
        if not VARIES:
            tl.store(transition_gradient + sequence * width + place + 1, imag_sum, mask)


def forward(
    transition: Tensor,
    offset: Tensor,
    initial: Tensor | None,
    reset: Tensor | None,
    reverse: bool,
    *,
    over: bool = False,
) -> Tensor:
    """As `cpu.forward`."""
    rows = _rows(offset)
    states = torch.empty_like(rows)
    factors, batch_stride, time_stride = _factors(transition, offset)
    start = rows if initial is None else _numbers(initial)
    marks = rows if reset is None else reset.contiguous().view(torch.uint8)
    size = offset.shape[-1]
    grid = (rows.shape[0], triton.cdiv(size, COLUMNS))
    with torch.cuda.device_of(offset):  # Triton launches on the current device
        forward_kernel[grid](
            factors, rows, start, marks, states, batch_stride, time_stride, offset.shape[-2], size,
            STARTS=initial is not None, RESETS=reset is not None, REVERSE=reverse, PAIRS=offset.is_complex(),
            COLUMNS=COLUMNS,
        )  # fmt: skip
    found = _as(states, offset)
    return offset.copy_(found) if over else found


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
    """As `cpu.backward`."""
    rows = _rows(gradient)
    batch, steps, width = rows.shape
    factors, batch_stride, time_stride = _factors(transition, gradient)
    start = rows if initial is None else _numbers(initial)
    marks = rows if reset is None else reset.contiguous().view(torch.uint8)
    to_offset, to_initial = torch.empty_like(rows), rows.new_empty(batch, width)
    varies = time_stride != 0
    found = rows.new_empty(batch, steps if varies else 1, width)
    size = gradient.shape[-1]
    with torch.cuda.device_of(gradient):
        backward_kernel[(batch, triton.cdiv(size, COLUMNS))](
            rows, _rows(states), factors, start, marks, to_offset, to_initial, found,
            batch_stride, time_stride, steps, size,
            STARTS=initial is not None, RESETS=reset is not None, REVERSE=reverse, PAIRS=gradient.is_complex(),
            VARIES=varies, COLUMNS=COLUMNS,
        )  # fmt: skip
    to_start = _as(to_initial, gradient[..., 0, :])
    if not to_transition:
        return transition.new_empty(0), _as(to_offset, gradient), to_start
    every = _as(found, gradient[..., : found.shape[1], :])
    return every.sum_to_size(transition.shape).contiguous(), _as(to_offset, gradient), to_start


def _numbers(values: Tensor) -> Tensor:
    """Real numbers, two for a complex one, as they lie in memory."""
    values = values.resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(values).flatten(-2) if values.is_complex() else values


def _rows(values: Tensor) -> Tensor:
    numbers = _numbers(values)
    return numbers.reshape(-1, *numbers.shape[-2:])


def _as(values: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        values = torch.view_as_complex(values.unflatten(-1, (-1, 2)))
    return values.reshape(like.shape)


def _factors(transition: Tensor, offset: Tensor) -> tuple[Tensor, int, int]:
    """The transition in memory, and its strides along sequences and steps: 0 where it is the same for all."""
    steps, size = offset.shape[-2:]
    whole = transition.reshape((1,) * (offset.dim() - transition.dim()) + tuple(transition.shape))
    alone = all(count == 1 for count in whole.shape[:-2])
    whole = whole.expand(*(whole.shape[:-2] if alone else offset.shape[:-2]), whole.shape[-2], size)
    rows = _rows(whole)
    varies = rows.shape[1] == steps > 1
    return rows, 0 if alone else rows.stride(0), rows.stride(1) if varies else 0
