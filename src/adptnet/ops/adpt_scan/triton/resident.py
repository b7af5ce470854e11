"""Resident kernels, for small heads: the state stays in registers, K and V in shared memory."""

import triton
import triton.language as tl

from .arithmetic import apply_source
from .memory import add_changes, complete_backward, complete_forward, load_vectors, store_sums, zero_sums

__all__ = ["resident_backward", "resident_forward"]


@triton.jit(do_not_specialize=["batch", "steps"])  # otherwise every batch size and length is compiled anew
def resident_forward(
    drive, initial, real, imag, weight, bias, beta, feed_real, feed_imag, decay, charge, norm_weight, norm_bias,
    reset, lengths, states, projections, epsilon, threshold, dot, sine, batch, steps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
    BIASED: tl.constexpr, RESETS: tl.constexpr, RAGGED: tl.constexpr, RETRACTION: tl.constexpr, PAIRS: tl.constexpr,
    SOURCE: tl.constexpr, PHASED: tl.constexpr, ROW_BETA: tl.constexpr, AWARE: tl.constexpr, SLOW: tl.constexpr,
    NORM: tl.constexpr, DOT: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Run all steps of one head of ROWS sequences, with the state in registers."""
    numbers = (epsilon, threshold, dot, sine)
    TOTAL: tl.constexpr = HEADS * SIZE
    FEATURES: tl.constexpr = TOTAL * (2 if PHASED else 1) + (1 if ROW_BETA else 0)
    WIDTH: tl.constexpr = TOTAL * (2 if SLOW else 1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, PAD)
    place = head * SIZE + column  # of this head in the state
    valid, within = row < batch, column < SIZE
    mask = valid[:, None] & within[None, :]
    vectors = load_vectors(real, imag, norm_weight, norm_bias, place, within, TOTAL, PAIRS, NORM)
    # States are rows, so p = x K': load K' and V'.
    square = within[:, None] & within[None, :]
    transposed = weight + head * 2 * SIZE * SIZE + column[None, :] * SIZE + column[:, None]
    key_weight = tl.load(transposed, square, 0.0)
    value_weight = tl.load(transposed + SIZE * SIZE, square, 0.0)
    last = row * 0 + steps
    if RAGGED:
        last = tl.load(lengths + row, valid, 0)
    x = tl.load(initial + row[:, None] * WIDTH + place[None, :], mask, 0.0)
    slow = x
    if SLOW:
        slow = tl.load(initial + row[:, None] * WIDTH + TOTAL + place[None, :], mask, 0.0)
    following_u = tl.load(drive + row[:, None] * steps * FEATURES + place[None, :], mask & (last > 0)[:, None], 0.0)
    for t in range(steps):
        u = following_u
        alive = valid & (t < last)
        at = (row[:, None] * steps + t) * FEATURES + place[None, :]
        # The load for the next step is issued before the work of this one.
        following_u = tl.load(drive + at + FEATURES, mask & (t + 1 < last)[:, None], 0.0)
        if RESETS:
            is_reset = (tl.load(reset + row * steps + t, valid, 0) != 0)[:, None]
            x = tl.where(is_reset, 0.0, x)
            slow = tl.where(is_reset, 0.0, slow)
        source = apply_source(x, numbers, SOURCE)
        p = tl.dot(source, key_weight, input_precision=PRECISION)
        q = tl.dot(source, value_weight, input_precision=PRECISION)
        if BIASED:
            p += tl.load(bias + head * 2 * SIZE + column, within, 0.0)[None, :]
            q += tl.load(bias + head * 2 * SIZE + SIZE + column, within, 0.0)[None, :]
        if SAVE:
            saved = projections + (row[:, None] * steps + t) * (2 * TOTAL) + head * 2 * SIZE + column[None, :]
            tl.store(saved, p, mask)
            tl.store(saved + SIZE, q, mask)
        x, slow = complete_forward(
            x, slow, p, q, u, drive, states, vectors, beta, feed_real, feed_imag, decay, charge, numbers, row, t, steps,
            head, column, alive, valid, within, HEADS, SIZE, RETRACTION, PAIRS, False, PHASED, ROW_BETA, AWARE, SLOW,
            NORM, DOT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "steps"])
def resident_backward(
    drive, initial, real, imag, weight, bias, beta, feed_real, feed_imag, decay, charge, norm_weight, norm_bias,
    reset, lengths, states, projections, epsilon, threshold, dot, sine, gradient, to_drive, to_initial, to_projections,
    sources, sums, batch, steps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
    BIASED: tl.constexpr, RESETS: tl.constexpr, RAGGED: tl.constexpr, RETRACTION: tl.constexpr, PAIRS: tl.constexpr,
    SOURCE: tl.constexpr, PHASED: tl.constexpr, ROW_BETA: tl.constexpr, AWARE: tl.constexpr, SLOW: tl.constexpr,
    NORM: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Run the backward pass of all steps of one head of ROWS sequences, with the gradient of the state in registers.

    `to_projections` are the gradients of K x and V x, (batch, steps, HEADS, 2, SIZE), `sources` what K and V are
    applied to, (batch, steps, HEADS * SIZE), and `sums` the other gradients of each sequence, (batch, len(SUMS),
    HEADS * SIZE).
    """
    numbers = (epsilon, threshold, dot, sine)
    TOTAL: tl.constexpr = HEADS * SIZE
    WIDTH: tl.constexpr = TOTAL * (2 if SLOW else 1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, PAD)
    place = head * SIZE + column
    valid, within = row < batch, column < SIZE
    mask = valid[:, None] & within[None, :]
    vectors = load_vectors(real, imag, norm_weight, norm_bias, place, within, TOTAL, PAIRS, NORM)
    square = within[:, None] & within[None, :]
    untransposed = weight + head * 2 * SIZE * SIZE + column[:, None] * SIZE + column[None, :]
    key_weight = tl.load(untransposed, square, 0.0)
    value_weight = tl.load(untransposed + SIZE * SIZE, square, 0.0)
    last = row * 0 + steps
    if RAGGED:
        last = tl.load(lengths + row, valid, 0)
    zero = tl.zeros((ROWS, PAD), dtype=tl.float32)
    carry, slow_carry = zero, zero
    totals = zero_sums(zero, tl.zeros((ROWS,), dtype=tl.float32))
    for i in range(steps):
        g_x, slow_carry, g_p, g_q, slope, is_reset, changes = complete_backward(
            carry, slow_carry, drive, initial, states, gradient, projections, reset, vectors, beta, feed_real,
            feed_imag, decay, charge, numbers, to_drive, to_projections, sources, row, steps - 1 - i, steps,
            last, head, column, valid, within, HEADS, SIZE, RESETS, RAGGED, RETRACTION, PAIRS, SOURCE, False, PHASED,
            ROW_BETA, AWARE, SLOW, NORM, DOT,
        )  # fmt: skip
        # The products are summed apart from the rest, which is larger where memory is long.
        products = tl.dot(g_p, key_weight, input_precision=PRECISION)
        products = tl.dot(g_q, value_weight, products, input_precision=PRECISION)
        carry = g_x + products * slope
        if RESETS:
            carry = tl.where(is_reset[:, None], 0.0, carry)
            slow_carry = tl.where(is_reset[:, None], 0.0, slow_carry)
        totals = add_changes(totals, changes, PAIRS, SLOW, NORM, BIASED)
    tl.store(to_initial + row[:, None] * WIDTH + place[None, :], carry, mask)
    if SLOW:
        tl.store(to_initial + row[:, None] * WIDTH + TOTAL + place[None, :], slow_carry, mask)
    store_sums(sums, totals, row, head, place, mask, valid, False, TOTAL, PAIRS, SLOW, NORM, BIASED)
