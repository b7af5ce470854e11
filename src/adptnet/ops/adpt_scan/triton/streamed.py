"""Streamed kernels, for large heads: K and V are read at every step, the state goes through global memory.

All threads of a program wait at a barrier where one part of a step needs what others have written. The products are for
all sequences of the tile, in blocks of columns, the rest of a step is for a few sequences at a time.
"""

import triton
import triton.language as tl

from .arithmetic import apply_source, differentiate_source
from .memory import complete_backward, complete_forward, load_before, load_vectors, store_sum, store_sums

__all__ = ["streamed_backward", "streamed_forward"]


@triton.jit(do_not_specialize=["batch", "steps"])
def streamed_forward(
    drive, initial, real, imag, weight, bias, beta, feed_real, feed_imag, decay, charge, norm_weight, norm_bias,
    reset, lengths, states, projections, epsilon, threshold, dot, sine, batch, steps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
    BIASED: tl.constexpr, RESETS: tl.constexpr, RAGGED: tl.constexpr, RETRACTION: tl.constexpr, PAIRS: tl.constexpr,
    SOURCE: tl.constexpr, PHASED: tl.constexpr, ROW_BETA: tl.constexpr, AWARE: tl.constexpr, SLOW: tl.constexpr,
    NORM: tl.constexpr, DOT: tl.constexpr, SAVE: tl.constexpr, SOME: tl.constexpr, BLOCK: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """Run all steps of one head of ROWS sequences, with state and projections in global memory.

    The products are computed in blocks of BLOCK columns, over INNER rows of K' and V' at a time, and the rest of a step
    for SOME sequences at a time. Without SAVE, `projections` holds one step.
    """
    numbers = (epsilon, threshold, dot, sine)
    TOTAL: tl.constexpr = HEADS * SIZE
    FEATURES: tl.constexpr = TOTAL * (2 if PHASED else 1) + (1 if ROW_BETA else 0)
    WIDTH: tl.constexpr = TOTAL * (2 if SLOW else 1)
    first = (tl.program_id(0) * ROWS).to(tl.int64)
    head = tl.program_id(1)
    tile = first + tl.arange(0, ROWS)
    tile_valid = tile < batch
    inner, block, column = tl.arange(0, INNER), tl.arange(0, BLOCK), tl.arange(0, PAD)
    place, within = head * SIZE + column, column < SIZE
    for t in range(steps):
        tile_kept = tile_valid
        if RESETS:
            tile_kept = tile_valid & (tl.load(reset + tile * steps + t, tile_valid, 0) == 0)
        for start in range(0, SIZE, BLOCK):
            into = start + block
            p = tl.zeros((ROWS, BLOCK), tl.float32)
            q = tl.zeros((ROWS, BLOCK), tl.float32)
            for part in range(0, SIZE, INNER):
                among = part + inner
                of = head * SIZE + among
                known = tile_kept[:, None] & (among < SIZE)[None, :]
                at = (tile[:, None] * steps + t) * WIDTH + of[None, :]
                x = load_before(states, initial, at, tile[:, None] * WIDTH + of[None, :], t, known, WIDTH)
                source = apply_source(x, numbers, SOURCE)
                square = (among < SIZE)[:, None] & (into < SIZE)[None, :]
                transposed = weight + head * 2 * SIZE * SIZE + into[None, :] * SIZE + among[:, None]
                p = tl.dot(source, tl.load(transposed, square, 0.0), p, input_precision=PRECISION)
                q = tl.dot(source, tl.load(transposed + SIZE * SIZE, square, 0.0), q, input_precision=PRECISION)
            if BIASED:
                p += tl.load(bias + head * 2 * SIZE + into, into < SIZE, 0.0)[None, :]
                q += tl.load(bias + head * 2 * SIZE + SIZE + into, into < SIZE, 0.0)[None, :]
            step_row = tile * steps + t if SAVE else tile
            saved = projections + step_row[:, None] * (2 * TOTAL) + head * 2 * SIZE + into[None, :]
            tl.store(saved, p, tile_valid[:, None] & (into < SIZE)[None, :])
            tl.store(saved + SIZE, q, tile_valid[:, None] & (into < SIZE)[None, :])
        tl.debug_barrier()  # all projections are written
        for some in range(0, ROWS, SOME):
            row = first + some + tl.arange(0, SOME)
            valid = row < batch
            last = row * 0 + steps
            if RAGGED:
                last = tl.load(lengths + row, valid, 0)
            alive = valid & (t < last)
            here = alive[:, None] & within[None, :]
            at = (row[:, None] * steps + t) * WIDTH + place[None, :]
            begin = row[:, None] * WIDTH + place[None, :]
            x = load_before(states, initial, at, begin, t, here, WIDTH)
            slow = x
            if SLOW:
                slow = load_before(states, initial, at + TOTAL, begin + TOTAL, t, here, WIDTH)
            if RESETS:
                is_reset = (tl.load(reset + row * steps + t, valid, 0) != 0)[:, None]
                x = tl.where(is_reset, 0.0, x)
                slow = tl.where(is_reset, 0.0, slow)
            step_row = row * steps + t if SAVE else row
            saved = projections + step_row[:, None] * (2 * TOTAL) + head * 2 * SIZE + column[None, :]
            p, q = tl.load(saved, here, 0.0), tl.load(saved + SIZE, here, 0.0)
            u = tl.load(drive + (row[:, None] * steps + t) * FEATURES + place[None, :], here, 0.0)
            vectors = load_vectors(real, imag, norm_weight, norm_bias, place, within, TOTAL, PAIRS, NORM)
            complete_forward(
                x, slow, p, q, u, drive, states, vectors, beta, feed_real, feed_imag, decay, charge, numbers, row, t,
                steps, head, column, alive, valid, within, HEADS, SIZE, RETRACTION, PAIRS, False, PHASED, ROW_BETA,
                AWARE, SLOW, NORM, DOT,
            )  # fmt: skip
        tl.debug_barrier()  # all states are written


@triton.jit(do_not_specialize=["batch", "steps"])
def streamed_backward(
    drive, initial, real, imag, weight, bias, beta, feed_real, feed_imag, decay, charge, norm_weight, norm_bias,
    reset, lengths, states, projections, epsilon, threshold, dot, sine, gradient, to_drive, to_initial, to_projections,
    sources, sums, batch, steps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
    BIASED: tl.constexpr, RESETS: tl.constexpr, RAGGED: tl.constexpr, RETRACTION: tl.constexpr, PAIRS: tl.constexpr,
    SOURCE: tl.constexpr, PHASED: tl.constexpr, ROW_BETA: tl.constexpr, AWARE: tl.constexpr, SLOW: tl.constexpr,
    NORM: tl.constexpr, DOT: tl.constexpr, SOME: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Run the backward pass of all steps of one head of ROWS sequences, with the gradient of the state in `to_initial`.

    Arguments as in `resident_backward`; BLOCK, INNER and SOME as in `streamed_forward`.
    """
    numbers = (epsilon, threshold, dot, sine)
    TOTAL: tl.constexpr = HEADS * SIZE
    WIDTH: tl.constexpr = TOTAL * (2 if SLOW else 1)
    first = (tl.program_id(0) * ROWS).to(tl.int64)
    head = tl.program_id(1)
    tile = first + tl.arange(0, ROWS)
    tile_valid = tile < batch
    inner, block, column = tl.arange(0, INNER), tl.arange(0, BLOCK), tl.arange(0, PAD)
    place, within = head * SIZE + column, column < SIZE
    for some in range(0, ROWS, SOME):  # zero what is added to
        row = first + some + tl.arange(0, SOME)
        valid = row < batch
        mask = valid[:, None] & within[None, :]
        zero = tl.zeros((SOME, PAD), tl.float32)
        tl.store(to_initial + row[:, None] * WIDTH + place[None, :], zero, mask)
        if SLOW:
            tl.store(to_initial + row[:, None] * WIDTH + TOTAL + place[None, :], zero, mask)
        for kind in range(12):
            tl.store(sums + row[:, None] * (13 * TOTAL) + kind * TOTAL + place[None, :], zero, mask)
        tl.store(sums + row * (13 * TOTAL) + 12 * TOTAL + head, tl.zeros((SOME,), tl.float32), valid)
    tl.debug_barrier()
    for i in range(steps):
        t = steps - 1 - i
        for some in range(0, ROWS, SOME):
            row = first + some + tl.arange(0, SOME)
            valid = row < batch
            mask = valid[:, None] & within[None, :]
            last = row * 0 + steps
            if RAGGED:
                last = tl.load(lengths + row, valid, 0)
            begin = to_initial + row[:, None] * WIDTH + place[None, :]
            carry = tl.load(begin, mask, 0.0)
            slow_carry = carry
            if SLOW:
                slow_carry = tl.load(begin + TOTAL, mask, 0.0)
            vectors = load_vectors(real, imag, norm_weight, norm_bias, place, within, TOTAL, PAIRS, NORM)
            g_x, slow_carry, _, _, _, is_reset, changes = complete_backward(
                carry, slow_carry, drive, initial, states, gradient, projections, reset, vectors, beta, feed_real,
                feed_imag, decay, charge, numbers, to_drive, to_projections, sources, row, t, steps, last,
                head, column, valid, within, HEADS, SIZE, RESETS, RAGGED, RETRACTION, PAIRS, SOURCE, False, PHASED,
                ROW_BETA, AWARE, SLOW, NORM, DOT,
            )  # fmt: skip
            tl.store(begin, tl.where(is_reset[:, None], 0.0, g_x), mask)
            if SLOW:
                tl.store(begin + TOTAL, tl.where(is_reset[:, None], 0.0, slow_carry), mask)
            store_sums(sums, changes, row, head, place, mask, valid, True, TOTAL, PAIRS, SLOW, NORM, BIASED)
        tl.debug_barrier()  # gradients of p and q, and the rest of that of x, are written
        tile_kept = tile_valid
        if RESETS:
            tile_kept = tile_valid & (tl.load(reset + tile * steps + t, tile_valid, 0) == 0)
        for start in range(0, SIZE, BLOCK):
            into = start + block
            products = tl.zeros((ROWS, BLOCK), tl.float32)
            for part in range(0, SIZE, INNER):
                among = part + inner
                known = tile_valid[:, None] & (among < SIZE)[None, :]
                of = to_projections + (tile[:, None] * steps + t) * (2 * TOTAL) + head * 2 * SIZE + among[None, :]
                square = (among < SIZE)[:, None] & (into < SIZE)[None, :]
                untransposed = weight + head * 2 * SIZE * SIZE + among[:, None] * SIZE + into[None, :]
                key_weight = tl.load(untransposed, square, 0.0)
                value_weight = tl.load(untransposed + SIZE * SIZE, square, 0.0)
                products = tl.dot(tl.load(of, known, 0.0), key_weight, products, input_precision=PRECISION)
                products = tl.dot(tl.load(of + SIZE, known, 0.0), value_weight, products, input_precision=PRECISION)
            kept = tile_kept[:, None] & (into < SIZE)[None, :]
            of = head * SIZE + into
            at = (tile[:, None] * steps + t) * WIDTH + of[None, :]
            begin = tile[:, None] * WIDTH + of[None, :]
            x = load_before(states, initial, at, begin, t, kept, WIDTH)
            store_sum(to_initial + begin, products * differentiate_source(x, numbers, SOURCE), kept, True)
        tl.debug_barrier()  # the gradient of the state is written
