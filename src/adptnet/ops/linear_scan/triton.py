"""The diagonal recurrence in Triton, for GPUs, parallel over sequences, columns and time.

Steps are divided into chunks of `LENGTH`. One launch computes for every chunk the state that it ends with if it starts
from zero, and the product of its transitions. These are the offsets and transitions of a scan over the chunks, which
is solved in the same way, and gives the state that enters each chunk. A last launch runs all chunks from those. So no
program loops over more than `LENGTH` steps; a sequence of T steps takes 1 launch up to 64 steps, 3 up to 4,096 and 5
up to 262,144.

Imported only when it is used. Its speed on a GPU has not been measured.

Letters, as in the README beside this file: x_t = a_t x_{t-1} + b_t.

- real, imag: x in the forward pass; in the backward pass the gradient g, which follows g <- conj(a) (g + incoming);
- a, b: real and imaginary part of the transition; x, y: those of the state before the step;
- PAIRS: complex numbers, stored as (real, imaginary) next to each other.

Steps and chunks are counted in the order of the scan: step i is time i, or with REVERSE time steps - 1 - i.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["apply_backward_kernel", "apply_kernel", "backward", "count_launches", "forward", "summarize_kernel"]

LENGTH = 64  # steps per chunk
COLUMNS = 64  # columns per program
OPTIONS = {"num_warps": 2, "num_stages": 1}  # one thread per column


@triton.jit(do_not_specialize=["steps", "chunks"])  # otherwise every length is compiled anew
def summarize_kernel(
    transition, values, reset, ends, products, cuts,
    transition_batch, transition_time, steps, chunks, size,
    RESETS: tl.constexpr, REVERSE: tl.constexpr, PAIRS: tl.constexpr, VARIES: tl.constexpr, SHARED: tl.constexpr,
    ADJOINT: tl.constexpr, LENGTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write for each of the first `chunks` chunks its end from zero, its product, and whether a reset cuts it.

    With ADJOINT a step is x <- conj(a) (x + value) instead of a x + value. The product is written once per sequence
    unless VARIES, and for the first sequence only if it is SHARED by all.
    """
    program = tl.program_id(0).to(tl.int64)
    sequence, chunk = program // chunks, program % chunks
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < size
    position = column * 2 if PAIRS else column
    width = size * 2 if PAIRS else size
    real = tl.zeros((COLUMNS,), dtype=values.dtype.element_ty)
    imag = tl.zeros((COLUMNS,), dtype=values.dtype.element_ty)
    product_real = real + 1.0
    product_imag = imag
    cut = (sequence * 0).to(tl.int32)
    for i in tl.range(0, LENGTH, num_stages=4):
        at = chunk * LENGTH + i
        t = steps - 1 - at if REVERSE else at
        row = (sequence * steps + t) * width + position
        factor = transition + sequence * transition_batch + t * transition_time + position
        a = tl.load(factor, mask, 0.0)
        value_real = tl.load(values + row, mask, 0.0)
        if RESETS:
            is_reset = tl.load(reset + sequence * steps + t) != 0
            cut += is_reset.to(tl.int32)
        if PAIRS:
            b = tl.load(factor + 1, mask, 0.0)
            value_imag = tl.load(values + row + 1, mask, 0.0)
            if ADJOINT:
                b = -b
                real += value_real
                imag += value_imag
            next_real = a * real - b * imag
            imag = a * imag + b * real
            real = next_real
            next_real = a * product_real - b * product_imag
            product_imag = a * product_imag + b * product_real
            product_real = next_real
        else:
            if ADJOINT:
                real += value_real
            real = a * real
            product_real = a * product_real
        if RESETS:  # a product with zero would keep a NaN
            real = tl.where(is_reset, 0.0, real)
            imag = tl.where(is_reset, 0.0, imag)
        if not ADJOINT:
            real += value_real
            if PAIRS:
                imag += value_imag
    tl.store(ends + program * width + position, real, mask)
    if PAIRS:
        tl.store(ends + program * width + position + 1, imag, mask)
    if RESETS:
        tl.store(cuts + program, (cut > 0).to(tl.uint8))
    row = sequence * 0
    if not SHARED:
        row = sequence
    written = mask
    if SHARED:
        written = written & (column * 0 + sequence == 0)
    if VARIES:
        row = row * chunks + chunk
    else:
        written = written & (column * 0 + chunk == 0)
    tl.store(products + row * width + position, product_real, written)
    if PAIRS:
        tl.store(products + row * width + position + 1, product_imag, written)


@triton.jit(do_not_specialize=["steps", "chunks"])
def apply_kernel(
    transition, offset, initial, entering, reset, states,
    transition_batch, transition_time, steps, chunks, size,
    STARTS: tl.constexpr, RESETS: tl.constexpr, REVERSE: tl.constexpr, PAIRS: tl.constexpr, LENGTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Run each chunk from the state that enters it. Offsets and states are (batch, time, size) and may be the same."""
    program = tl.program_id(0).to(tl.int64)
    sequence, chunk = program // chunks, program % chunks
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < size
    position = column * 2 if PAIRS else column
    width = size * 2 if PAIRS else size
    later = mask & (column * 0 + chunk > 0)
    before = entering + (sequence * (chunks - 1) + chunk - 1) * width + position
    real = tl.load(before, later, 0.0)
    imag = tl.zeros_like(real)
    if PAIRS:
        imag = tl.load(before + 1, later, 0.0)
    if STARTS:
        first = mask & (column * 0 + chunk == 0)
        real += tl.load(initial + sequence * width + position, first, 0.0)
        if PAIRS:
            imag += tl.load(initial + sequence * width + position + 1, first, 0.0)
    for i in tl.range(0, tl.minimum(LENGTH, steps - chunk * LENGTH), num_stages=4):
        at = chunk * LENGTH + i
        t = steps - 1 - at if REVERSE else at
        row = (sequence * steps + t) * width + position
        factor = transition + sequence * transition_batch + t * transition_time + position
        a = tl.load(factor, mask, 0.0)
        offset_real = tl.load(offset + row, mask, 0.0)
        if PAIRS:
            b = tl.load(factor + 1, mask, 0.0)
            offset_imag = tl.load(offset + row + 1, mask, 0.0)
            next_real = a * real - b * imag
            imag = a * imag + b * real
            real = next_real
        else:
            real = a * real
        if RESETS:  # a product with zero would keep a NaN
            is_reset = tl.load(reset + sequence * steps + t) != 0
            real = tl.where(is_reset, 0.0, real)
            imag = tl.where(is_reset, 0.0, imag)
        real += offset_real
        tl.store(states + row, real, mask)
        if PAIRS:
            imag += offset_imag
            tl.store(states + row + 1, imag, mask)


@triton.jit(do_not_specialize=["steps", "chunks"])
def apply_backward_kernel(
    gradient, states, transition, initial, entering, reset,
    offset_gradient, initial_gradient, transition_gradient,
    transition_batch, transition_time, steps, chunks, size,
    STARTS: tl.constexpr, RESETS: tl.constexpr, REVERSE: tl.constexpr, PAIRS: tl.constexpr, VARIES: tl.constexpr,
    NEEDED: tl.constexpr, LENGTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Run the backward pass of each chunk; REVERSE is the direction of this pass, opposite to that of the states.

    The gradient of the transition, if NEEDED, is (batch, time, size) with VARIES, else summed over each chunk.
    """
    program = tl.program_id(0).to(tl.int64)
    sequence, chunk = program // chunks, program % chunks
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < size
    position = column * 2 if PAIRS else column
    width = size * 2 if PAIRS else size
    later = mask & (column * 0 + chunk > 0)
    before = entering + (sequence * (chunks - 1) + chunk - 1) * width + position
    real = tl.load(before, later, 0.0)
    imag = tl.zeros_like(real)
    if PAIRS:
        imag = tl.load(before + 1, later, 0.0)
    real_sum = tl.zeros_like(real)
    imag_sum = tl.zeros_like(real)
    for i in tl.range(0, tl.minimum(LENGTH, steps - chunk * LENGTH), num_stages=4):
        at = chunk * LENGTH + i
        t = steps - 1 - at if REVERSE else at
        row = (sequence * steps + t) * width + position
        factor = transition + sequence * transition_batch + t * transition_time + position
        a = tl.load(factor, mask, 0.0)
        real += tl.load(gradient + row, mask, 0.0)
        tl.store(offset_gradient + row, real, mask)
        if PAIRS:
            b = tl.load(factor + 1, mask, 0.0)
            imag += tl.load(gradient + row + 1, mask, 0.0)
            tl.store(offset_gradient + row + 1, imag, mask)
        if RESETS:
            is_reset = tl.load(reset + sequence * steps + t) != 0
        if NEEDED:
            previous = row - width if REVERSE else row + width
            inside = mask & (column * 0 + at < steps - 1)  # whether the state before this step is in `states`
            x = tl.load(states + previous, inside, 0.0)
            if STARTS:
                x += tl.load(initial + sequence * width + position, mask & ~inside, 0.0)
            if RESETS:
                x = tl.where(is_reset, 0.0, x)
            change = x * real
            if PAIRS:
                y = tl.load(states + previous + 1, inside, 0.0)
                if STARTS:
                    y += tl.load(initial + sequence * width + position + 1, mask & ~inside, 0.0)
                if RESETS:
                    y = tl.where(is_reset, 0.0, y)
                change += y * imag  # times the conjugate of the state before
                change_imag = x * imag - y * real
                imag_sum += change_imag
                if VARIES:
                    tl.store(transition_gradient + row + 1, change_imag, mask)
            real_sum += change
            if VARIES:
                tl.store(transition_gradient + row, change, mask)
        if PAIRS:
            next_real = a * real + b * imag
            imag = a * imag - b * real
            real = next_real
        else:
            real = a * real
        if RESETS:  # a product with zero would keep a NaN
            real = tl.where(is_reset, 0.0, real)
            imag = tl.where(is_reset, 0.0, imag)
    last = mask & (column * 0 + chunk == chunks - 1)
    tl.store(initial_gradient + sequence * width + position, real, last)
    if PAIRS:
        tl.store(initial_gradient + sequence * width + position + 1, imag, last)
    if NEEDED and not VARIES:
        tl.store(transition_gradient + program * width + position, real_sum, mask)
        if PAIRS:
            tl.store(transition_gradient + program * width + position + 1, imag_sum, mask)


class _Transition(NamedTuple):
    """The transition as real numbers, with its strides along batch and time: 0 where it is broadcast."""

    numbers: Tensor
    batch_stride: int
    time_stride: int


def count_launches(steps: int) -> int:
    """Return the number of kernels that `forward` launches; `backward` launches as many.

    Args:
        steps: The length of the sequences.
    """
    return 1 if steps <= LENGTH else 2 + count_launches(triton.cdiv(steps, LENGTH) - 1)


def forward(
    transition: Tensor,
    offset: Tensor,
    initial: Tensor | None,
    reset: Tensor | None,
    reverse: bool,
    *,
    overwrite: bool = False,
) -> Tensor:
    """Run the forward kernels; arguments as in `cpu.forward`."""
    rows = _rows(offset)
    states = rows if overwrite else torch.empty_like(rows)
    start = None if initial is None else _as_real(initial)
    with torch.cuda.device_of(offset):  # Triton launches on the current device
        _scan(
            _make_transition(transition, offset),
            rows,
            start,
            _as_bytes(reset),
            states,
            reverse=reverse,
            pairs=offset.is_complex(),
        )
    if not overwrite:
        return _as_like(states, offset)
    if rows.data_ptr() != offset.data_ptr():  # the offset was not contiguous
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
    """Run the backward kernels; arguments as in `cpu.backward`."""
    rows, marks, factors = _rows(gradient), _as_bytes(reset), _make_transition(transition, gradient)
    batch, steps, width = rows.shape
    pairs, varies = gradient.is_complex(), factors.time_stride != 0
    size, chunks = gradient.shape[-1], triton.cdiv(steps, LENGTH)
    grad_offset, grad_initial = torch.empty_like(rows), rows.new_empty(batch, width)
    grad_transition = rows.new_empty(batch, steps if varies else chunks, width) if needs_transition_grad else rows
    with torch.cuda.device_of(gradient):
        entering = _find_entering(factors, rows, marks, None, reverse=not reverse, pairs=pairs, adjoint=True)
        apply_backward_kernel[(batch * chunks, triton.cdiv(size, COLUMNS))](
            rows, _rows(states), factors.numbers, rows if initial is None else _as_real(initial), entering,
            rows if marks is None else marks, grad_offset, grad_initial, grad_transition,
            factors.batch_stride, factors.time_stride, steps, chunks, size,
            STARTS=initial is not None, RESETS=reset is not None, REVERSE=not reverse, PAIRS=pairs, VARIES=varies,
            NEEDED=needs_transition_grad, LENGTH=LENGTH, COLUMNS=COLUMNS, **OPTIONS,
        )  # fmt: skip
    grad_initial = _as_like(grad_initial, gradient[..., 0, :])
    if not needs_transition_grad:
        return transition.new_empty(0), _as_like(grad_offset, gradient), grad_initial
    if not varies:
        grad_transition = grad_transition.sum(1, keepdim=True)
    grad_transition = _as_like(grad_transition, gradient[..., : grad_transition.shape[1], :])
    return grad_transition.sum_to_size(transition.shape).contiguous(), _as_like(grad_offset, gradient), grad_initial


def _scan(
    transition: _Transition,
    rows: Tensor,
    initial: Tensor | None,
    reset: Tensor | None,
    states: Tensor,
    *,
    reverse: bool,
    pairs: bool,
) -> None:
    """Write the states of a scan over (batch, time, width) real numbers."""
    batch, steps, width = rows.shape
    size, chunks = width // 2 if pairs else width, triton.cdiv(steps, LENGTH)
    entering = _find_entering(transition, rows, reset, initial, reverse=reverse, pairs=pairs, adjoint=False)
    apply_kernel[(batch * chunks, triton.cdiv(size, COLUMNS))](
        transition.numbers, rows, rows if initial is None else initial, entering, rows if reset is None else reset,
        states, transition.batch_stride, transition.time_stride, steps, chunks, size,
        STARTS=initial is not None, RESETS=reset is not None, REVERSE=reverse, PAIRS=pairs, LENGTH=LENGTH,
        COLUMNS=COLUMNS, **OPTIONS,
    )  # fmt: skip


def _find_entering(
    transition: _Transition,
    rows: Tensor,
    reset: Tensor | None,
    initial: Tensor | None,
    *,
    reverse: bool,
    pairs: bool,
    adjoint: bool,
) -> Tensor:
    """Return the states that enter the second and all later chunks, (batch, chunks - 1, width); one is never read."""
    batch, steps, width = rows.shape
    size, chunks = width // 2 if pairs else width, triton.cdiv(steps, LENGTH) - 1  # the end of the last is not needed
    if chunks == 0:
        return rows
    shared, varies = transition.batch_stride == 0, transition.time_stride != 0
    ends = rows.new_empty(batch, chunks, width)
    products = rows.new_empty(1 if shared else batch, chunks if varies else 1, width)
    cuts = None if reset is None else reset.new_empty(batch, chunks)
    summarize_kernel[(batch * chunks, triton.cdiv(size, COLUMNS))](
        transition.numbers, rows, rows if reset is None else reset, ends, products, rows if cuts is None else cuts,
        transition.batch_stride, transition.time_stride, steps, chunks, size,
        RESETS=reset is not None, REVERSE=reverse, PAIRS=pairs, VARIES=varies, SHARED=shared, ADJOINT=adjoint,
        LENGTH=LENGTH, COLUMNS=COLUMNS, **OPTIONS,
    )  # fmt: skip
    across = _Transition(products, 0 if shared else products.stride(0), products.stride(1) if varies else 0)
    _scan(across, ends, initial, cuts, ends, reverse=False, pairs=pairs)
    return ends


def _as_bytes(reset: Tensor | None) -> Tensor | None:
    return None if reset is None else reset.contiguous().view(torch.uint8)


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


def _make_transition(transition: Tensor, offset: Tensor) -> _Transition:
    steps, size = offset.shape[-2:]
    whole = transition.reshape((1,) * (offset.dim() - transition.dim()) + tuple(transition.shape))
    shared = all(count == 1 for count in whole.shape[:-2])
    whole = whole.expand(*(whole.shape[:-2] if shared else offset.shape[:-2]), whole.shape[-2], size)
    rows = _rows(whole)
    varies = rows.shape[1] == steps > 1
    return _Transition(rows, 0 if shared else rows.stride(0), rows.stride(1) if varies else 0)
