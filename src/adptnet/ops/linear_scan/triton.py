"""The diagonal recurrence in Triton, for GPUs: each program runs all steps of a range of columns of one sequence.

Imported only when it is used. Its speed on a GPU has not been measured.

Letters, as in the README beside this file: x_t = a_t x_{t-1} + b_t.

- real, imag: x in the forward pass; in the backward pass the gradient with respect to x, which is also that of b;
- a, b: real and imaginary part of the transition; x, y: those of the state before the step;
- PAIRS: complex numbers, stored as (real, imaginary) next to each other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["backward", "backward_kernel", "forward", "forward_kernel"]

COLUMNS = 64  # columns per program


@triton.jit(do_not_specialize=["steps"])  # otherwise every length is compiled anew
def forward_kernel(
    transition, offset, initial, reset, states,
    transition_batch, transition_time, steps, size,
    STARTS: tl.constexpr, RESETS: tl.constexpr, REVERSE: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Run all steps. Offsets and states are (batch, time, size), of real numbers or, with PAIRS, of complex ones."""
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < size
    position = column * 2 if PAIRS else column
    width = size * 2 if PAIRS else size
    real = tl.zeros((COLUMNS,), dtype=offset.dtype.element_ty)
    imag = tl.zeros((COLUMNS,), dtype=offset.dtype.element_ty)
    if STARTS:
        real = tl.load(initial + sequence * width + position, mask, 0.0)
        if PAIRS:
            imag = tl.load(initial + sequence * width + position + 1, mask, 0.0)
    for i in range(steps):
        t = sequence * 0 + (steps - 1 - i if REVERSE else i)  # 64 bits, so that no product overflows
        row = (sequence * steps + t) * width + position
        factor = transition + sequence * transition_batch + t * transition_time + position
        if RESETS:
            no_reset = tl.load(reset + sequence * steps + t) == 0
            real = tl.where(no_reset, real, 0.0)
            imag = tl.where(no_reset, imag, 0.0)
        a = tl.load(factor, mask, 0.0)
        if RESETS:
            a = tl.where(no_reset, a, 0.0)
        if PAIRS:
            b = tl.load(factor + 1, mask, 0.0)
            if RESETS:
                b = tl.where(no_reset, b, 0.0)
            next_real = a * real - b * imag
            imag = a * imag + b * real + tl.load(offset + row + 1, mask, 0.0)
            real = next_real + tl.load(offset + row, mask, 0.0)
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
    """Run the backward pass. The gradient of the transition is per step with VARIES, else summed over the steps."""
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < size
    position = column * 2 if PAIRS else column
    width = size * 2 if PAIRS else size
    real = tl.zeros((COLUMNS,), dtype=gradient.dtype.element_ty)
    imag = tl.zeros((COLUMNS,), dtype=gradient.dtype.element_ty)
    real_sum = tl.zeros((COLUMNS,), dtype=gradient.dtype.element_ty)
    imag_sum = tl.zeros((COLUMNS,), dtype=gradient.dtype.element_ty)
    for i in range(steps):
        t = sequence * 0 + (i if REVERSE else steps - 1 - i)
        row = (sequence * steps + t) * width + position
        factor = transition + sequence * transition_batch + t * transition_time + position
        real += tl.load(gradient + row, mask, 0.0)
        tl.store(offset_gradient + row, real, mask)
        before = row + width if REVERSE else row - width
        inside = column * 0 + i < steps - 1  # whether the state before this step is in `states`
        x = tl.load(states + before, mask & inside, 0.0)
        if STARTS:
            x += tl.load(initial + sequence * width + position, mask & ~inside, 0.0)
        if RESETS:
            no_reset = tl.load(reset + sequence * steps + t) == 0
            x = tl.where(no_reset, x, 0.0)
        a = tl.load(factor, mask, 0.0)
        if PAIRS:
            imag += tl.load(gradient + row + 1, mask, 0.0)
            tl.store(offset_gradient + row + 1, imag, mask)
            y = tl.load(states + before + 1, mask & inside, 0.0)
            if STARTS:
                y += tl.load(initial + sequence * width + position + 1, mask & ~inside, 0.0)
            if RESETS:
                y = tl.where(no_reset, y, 0.0)
            b = tl.load(factor + 1, mask, 0.0)
            change, change_imag = x * real + y * imag, x * imag - y * real  # times the conjugate of the state before
            if VARIES:
                tl.store(transition_gradient + row + 1, change_imag, mask)
            imag_sum += change_imag
            next_real = a * real + b * imag
            imag = a * imag - b * real
            real = next_real
        else:
            change = x * real
            real = a * real
        if RESETS:  # a product with zero would keep a NaN
            real = tl.where(no_reset, real, 0.0)
            imag = tl.where(no_reset, imag, 0.0)
        if VARIES:
            tl.store(transition_gradient + row, change, mask)
        real_sum += change
    tl.store(initial_gradient + sequence * width + position, real, mask)
    if not VARIES:
        tl.store(transition_gradient + sequence * width + position, real_sum, mask)
    if PAIRS:
        tl.store(initial_gradient + sequence * width + position + 1, imag, mask)
        if not VARIES:
            tl.store(transition_gradient + sequence * width + position + 1, imag_sum, mask)


def forward(
    transition: Tensor,
    offset: Tensor,
    initial: Tensor | None,
    reset: Tensor | None,
    reverse: bool,
    *,
    overwrite: bool = False,
) -> Tensor:
    """Run the forward kernel; arguments as in `cpu.forward`."""
    rows = _rows(offset)
    states = torch.empty_like(rows)
    factors, batch_stride, time_stride = _make_factors(transition, offset)
    start = rows if initial is None else _as_real(initial)
    reset_bytes = rows if reset is None else reset.contiguous().view(torch.uint8)
    size = offset.shape[-1]
    grid = (rows.shape[0], triton.cdiv(size, COLUMNS))
    with torch.cuda.device_of(offset):  # Triton launches on the current device
        forward_kernel[grid](
            factors, rows, start, reset_bytes, states, batch_stride, time_stride, offset.shape[-2], size,
            STARTS=initial is not None, RESETS=reset is not None, REVERSE=reverse, PAIRS=offset.is_complex(),
            COLUMNS=COLUMNS,
        )  # fmt: skip
    result = _as_like(states, offset)
    return offset.copy_(result) if overwrite else result


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
    """Run the backward kernel; arguments as in `cpu.backward`."""
    rows = _rows(gradient)
    batch, steps, width = rows.shape
    factors, batch_stride, time_stride = _make_factors(transition, gradient)
    start = rows if initial is None else _as_real(initial)
    reset_bytes = rows if reset is None else reset.contiguous().view(torch.uint8)
    grad_offset, grad_initial = torch.empty_like(rows), rows.new_empty(batch, width)
    varies = time_stride != 0
    grad_transition = rows.new_empty(batch, steps if varies else 1, width)
    size = gradient.shape[-1]
    with torch.cuda.device_of(gradient):
        backward_kernel[(batch, triton.cdiv(size, COLUMNS))](
            rows, _rows(states), factors, start, reset_bytes, grad_offset, grad_initial, grad_transition,
            batch_stride, time_stride, steps, size,
            STARTS=initial is not None, RESETS=reset is not None, REVERSE=reverse, PAIRS=gradient.is_complex(),
            VARIES=varies, COLUMNS=COLUMNS,
        )  # fmt: skip
    grad_initial = _as_like(grad_initial, gradient[..., 0, :])
    if not needs_transition_grad:
        return transition.new_empty(0), _as_like(grad_offset, gradient), grad_initial
    grad_transition = _as_like(grad_transition, gradient[..., : grad_transition.shape[1], :])
    return grad_transition.sum_to_size(transition.shape).contiguous(), _as_like(grad_offset, gradient), grad_initial


def _as_real(values: Tensor) -> Tensor:
    """View a complex tensor as real, with (re, im) interleaved in the last dimension; return a real one as it is."""
    values = values.resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(values).flatten(-2) if values.is_complex() else values


def _rows(values: Tensor) -> Tensor:
    numbers = _as_real(values)
    return numbers.reshape(-1, *numbers.shape[-2:])


def _as_like(values: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        values = torch.view_as_complex(values.unflatten(-1, (-1, 2)))
    return values.reshape(like.shape)


def _make_factors(transition: Tensor, offset: Tensor) -> tuple[Tensor, int, int]:
    """Return the transition as real numbers, and its strides along batch and time: 0 where it is broadcast."""
    steps, size = offset.shape[-2:]
    whole = transition.reshape((1,) * (offset.dim() - transition.dim()) + tuple(transition.shape))
    shared = all(count == 1 for count in whole.shape[:-2])
    whole = whole.expand(*(whole.shape[:-2] if shared else offset.shape[:-2]), whole.shape[-2], size)
    rows = _rows(whole)
    varies = rows.shape[1] == steps > 1
    return rows, 0 if shared else rows.stride(0), rows.stride(1) if varies else 0
