"""Kernels for directions that come with the drive: a step has no matrix product, so the state is all that stays."""

import triton
import triton.language as tl

from .memory import add_changes, complete_backward, complete_forward, load_vectors, store_sums, zero_sums

__all__ = ["given_backward", "given_forward"]


@triton.jit(do_not_specialize=["batch", "steps"])  # otherwise every batch size and length is compiled anew
def given_forward(
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
    FEATURES: tl.constexpr = TOTAL * (4 if PHASED else 3) + (1 if ROW_BETA else 0)
    WIDTH: tl.constexpr = TOTAL * (2 if SLOW else 1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, PAD)
    place = head * SIZE + column  # of this head in the state
    valid, within = row < batch, column < SIZE
    mask = valid[:, None] & within[None, :]
    vectors = load_vectors(real, imag, norm_weight, norm_bias, place, within, TOTAL, PAIRS, False)
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
        p = tl.load(drive + at + TOTAL, mask & alive[:, None], 0.0)
        q = tl.load(drive + at + 2 * TOTAL, mask & alive[:, None], 0.0)
        x, slow = complete_forward(
            x, slow, p, q, u, drive, states, vectors, beta, feed_real, feed_imag, decay, charge, numbers, row, t, steps,
            head, column, alive, valid, within, HEADS, SIZE, RETRACTION, PAIRS, True, PHASED, ROW_BETA, AWARE, SLOW,
            False, DOT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "steps"])
def given_backward(
    drive, initial, real, imag, weight, bias, beta, feed_real, feed_imag, decay, charge, norm_weight, norm_bias,
    reset, lengths, states, projections, epsilon, threshold, dot, sine, gradient, to_drive, to_initial, to_projections,
    sources, sums, batch, steps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
    BIASED: tl.constexpr, RESETS: tl.constexpr, RAGGED: tl.constexpr, RETRACTION: tl.constexpr, PAIRS: tl.constexpr,
    SOURCE: tl.constexpr, PHASED: tl.constexpr, ROW_BETA: tl.constexpr, AWARE: tl.constexpr, SLOW: tl.constexpr,
    NORM: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Run the backward pass of all steps of one head of ROWS sequences; arguments as in `resident_backward`."""
    numbers = (epsilon, threshold, dot, sine)
    TOTAL: tl.constexpr = HEADS * SIZE
    WIDTH: tl.constexpr = TOTAL * (2 if SLOW else 1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, PAD)
    place = head * SIZE + column
    valid, within = row < batch, column < SIZE
    mask = valid[:, None] & within[None, :]
    vectors = load_vectors(real, imag, norm_weight, norm_bias, place, within, TOTAL, PAIRS, False)
    last = row * 0 + steps
    if RAGGED:
        last = tl.load(lengths + row, valid, 0)
    zero = tl.zeros((ROWS, PAD), dtype=tl.float32)
    carry, slow_carry = zero, zero
    totals = zero_sums(zero, tl.zeros((ROWS,), dtype=tl.float32))
    for i in range(steps):
        carry, slow_carry, _, _, _, is_reset, changes = complete_backward(
            carry, slow_carry, drive, initial, states, gradient, projections, reset, vectors, beta, feed_real,
            feed_imag, decay, charge, numbers, to_drive, to_projections, sources, row, steps - 1 - i, steps,
            last, head, column, valid, within, HEADS, SIZE, RESETS, RAGGED, RETRACTION, PAIRS, 0, True, PHASED,
            ROW_BETA, AWARE, SLOW, False, DOT,
        )  # fmt: skip
        if RESETS:
            carry = tl.where(is_reset[:, None], 0.0, carry)
            slow_carry = tl.where(is_reset[:, None], 0.0, slow_carry)
        totals = add_changes(totals, changes, PAIRS, SLOW, False, False)
    tl.store(to_initial + row[:, None] * WIDTH + place[None, :], carry, mask)
    if SLOW:
        tl.store(to_initial + row[:, None] * WIDTH + TOTAL + place[None, :], slow_carry, mask)
    store_sums(sums, totals, row, head, place, mask, valid, False, TOTAL, PAIRS, SLOW, False, False)
