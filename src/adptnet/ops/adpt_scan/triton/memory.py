"""One step with its loads and stores, except for the products with K and V.

Flags beyond those of `arithmetic.py`: GIVEN, the directions are in the drive; PHASED, a phase P is; ROW_BETA, β is;
SLOW, a slow memory; RESETS, RAGGED, whether there are resets and lengths. HEADS is the number of heads, SIZE the size
of one.
"""

import triton
import triton.language as tl

from .arithmetic import (
    advance,
    apply_source,
    differentiate_phase,
    differentiate_source,
    multiply,
    multiply_by_i,
    multiply_transposed,
    retreat,
)

__all__ = [
    "add_changes",
    "complete_backward",
    "complete_forward",
    "load_before",
    "load_beta",
    "load_vectors",
    "store_sums",
    "zero_sums",
]


@triton.jit
def load_before(states, initial, at, state_start, t, mask, WIDTH: tl.constexpr):
    """Return the state before step t: the initial state, or an entry of `states`."""
    later = mask & (at * 0 + t > 0)
    return tl.load(states + at - WIDTH, later, 0.0) + tl.load(initial + state_start, mask & ~later, 0.0)


@triton.jit
def load_vectors(
    real, imag, norm_weight, norm_bias, place, within, TOTAL: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr
):
    """Return Λ̄ and the LayerNorm of one head: (real, imag, key gain, value gain, key shift, value shift)."""
    spectrum = tl.load(real + place, within, 0.0)[None, :]
    spectrum_imag, key_gain, value_gain, key_shift, value_shift = spectrum, spectrum, spectrum, spectrum, spectrum
    if PAIRS:
        spectrum_imag = tl.load(imag + place, within, 0.0)[None, :]
    if NORM:
        key_gain = tl.load(norm_weight + place, within, 0.0)[None, :]
        value_gain = tl.load(norm_weight + TOTAL + place, within, 0.0)[None, :]
        key_shift = tl.load(norm_bias + place, within, 0.0)[None, :]
        value_shift = tl.load(norm_bias + TOTAL + place, within, 0.0)[None, :]
    return spectrum, spectrum_imag, key_gain, value_gain, key_shift, value_shift


@triton.jit
def load_feed(feed_real, feed_imag, place, within, PAIRS: tl.constexpr):
    """Return the real and imaginary part of the feed of the slow memory."""
    feed = tl.load(feed_real + place, within, 0.0)[None, :]
    feed_i = feed
    if PAIRS:
        feed_i = tl.load(feed_imag + place, within, 0.0)[None, :]
    return feed, feed_i


@triton.jit
def load_slow(states, initial, at, begin, t, here, is_reset, TOTAL: tl.constexpr, WIDTH: tl.constexpr,
              RESETS: tl.constexpr):  # fmt: skip
    """Return the slow memory before step t."""
    slow = load_before(states, initial, at + TOTAL, begin + TOTAL, t, here, WIDTH)
    if RESETS:
        slow = tl.where(is_reset[:, None], 0.0, slow)
    return slow


@triton.jit
def load_beta(drive, beta, row, head, valid, ROW_BETA: tl.constexpr, FEATURES: tl.constexpr):
    """Return β of each row of the drive."""
    if ROW_BETA:
        value = tl.load(drive + row * FEATURES + FEATURES - 1, valid, 0.0)
    else:
        value = tl.zeros(row.shape, tl.float32) + tl.load(beta + head)
    return value


@triton.jit
def find_phase(row, place, TOTAL: tl.constexpr, FEATURES: tl.constexpr, GIVEN: tl.constexpr):
    """Return where the drive, or its gradient, holds cos φ and sin φ of each pair."""
    return row[:, None] * FEATURES + TOTAL * (3 if GIVEN else 1) + place[None, :]


@triton.jit
def load_phase(drive, row, place, mask, TOTAL: tl.constexpr, FEATURES: tl.constexpr, GIVEN: tl.constexpr):
    """Return cos φ and sin φ, each twice for a pair, as the real and imaginary part of P."""
    at = find_phase(row, place - place % 2, TOTAL, FEATURES, GIVEN)
    return tl.load(drive + at, mask, 0.0), tl.load(drive + at + 1, mask, 0.0)


@triton.jit
def complete_forward(
    x, slow, p, q, u, drive, states, vectors, beta, feed_real, feed_imag, decay, charge, numbers, row, t, steps, head,
    column, alive, valid, within,
    HEADS: tl.constexpr, SIZE: tl.constexpr, RETRACTION: tl.constexpr, PAIRS: tl.constexpr, GIVEN: tl.constexpr,
    PHASED: tl.constexpr, ROW_BETA: tl.constexpr, AWARE: tl.constexpr, SLOW: tl.constexpr, NORM: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Store the state after a step, of which the product is done, and return its two parts; zero past the end."""
    TOTAL: tl.constexpr = HEADS * SIZE
    FEATURES: tl.constexpr = TOTAL * ((3 if GIVEN else 1) + (1 if PHASED else 0)) + (1 if ROW_BETA else 0)
    WIDTH: tl.constexpr = TOTAL * (2 if SLOW else 1)
    place = head * SIZE + column
    mask = valid[:, None] & within[None, :]
    here = alive[:, None] & within[None, :]
    of = row * steps + t
    into = states + of[:, None] * WIDTH + place[None, :]
    if SLOW:
        feed, feed_i = load_feed(feed_real, feed_imag, place, within, PAIRS)
        u += multiply(feed, feed_i, slow, PAIRS)
    added = u
    if PHASED and not AWARE:
        added = tl.zeros_like(u)
    beta_value = load_beta(drive, beta, of, head, alive, ROW_BETA, FEATURES)
    following = advance(
        x, p, q, added, vectors, beta_value, numbers, within[None, :], PAIRS, RETRACTION, AWARE, NORM, DOT, SIZE
    )
    if PHASED:
        cos, sin = load_phase(drive, of, place, here, TOTAL, FEATURES, GIVEN)
        following = multiply(cos, sin, following, True)
        if not AWARE:
            following += u
    following = tl.where(alive[:, None], following, 0.0)
    tl.store(into, following, mask)
    if SLOW:
        slow = tl.load(decay + place, within, 0.0)[None, :] * slow
        slow += tl.load(charge + place, within, 0.0)[None, :] * following
        slow = tl.where(alive[:, None], slow, 0.0)
        tl.store(into + TOTAL, slow, mask)
    return following, slow


@triton.jit
def complete_backward(
    carry, slow_carry, drive, initial, states, gradient, projections, reset, vectors, beta, feed_real, feed_imag, decay,
    charge, numbers, to_drive, to_projections, sources, row, t, steps, last, head, column, valid, within,
    HEADS: tl.constexpr, SIZE: tl.constexpr,
    RESETS: tl.constexpr, RAGGED: tl.constexpr, RETRACTION: tl.constexpr, PAIRS: tl.constexpr,
    SOURCE: tl.constexpr, GIVEN: tl.constexpr, PHASED: tl.constexpr, ROW_BETA: tl.constexpr, AWARE: tl.constexpr,
    SLOW: tl.constexpr, NORM: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Run the backward of a step except for the product with K and V.

    Returns the gradients of x (without the path through K and V) and of the slow memory, those of p and q, the
    derivative of the source, whether the step is after a reset, and the contributions to the sums over the steps.
    """
    TOTAL: tl.constexpr = HEADS * SIZE
    FEATURES: tl.constexpr = TOTAL * ((3 if GIVEN else 1) + (1 if PHASED else 0)) + (1 if ROW_BETA else 0)
    WIDTH: tl.constexpr = TOTAL * (2 if SLOW else 1)
    place = head * SIZE + column
    mask = valid[:, None] & within[None, :]
    alive = valid & (t < last)
    here = alive[:, None] & within[None, :]
    of = row * steps + t
    at = of[:, None] * WIDTH + place[None, :]
    begin = row[:, None] * WIDTH + place[None, :]
    drive_at = of[:, None] * FEATURES + place[None, :]
    saved = of[:, None] * (2 * TOTAL) + head * 2 * SIZE + column[None, :]
    x = load_before(states, initial, at, begin, t, here, WIDTH)
    g = tl.where(alive[:, None], carry + tl.load(gradient + at, here, 0.0), 0.0)
    is_reset = alive & False
    if RESETS:
        is_reset = tl.load(reset + of, valid, 0) != 0
        x = tl.where(is_reset[:, None], 0.0, x)
    if GIVEN:
        p = tl.load(drive + drive_at + TOTAL, here, 0.0)
        q = tl.load(drive + drive_at + 2 * TOTAL, here, 0.0)
    else:
        p = tl.load(projections + saved, here, 0.0)
        q = tl.load(projections + saved + SIZE, here, 0.0)
    u = tl.zeros_like(x)
    if AWARE or PHASED:
        u = tl.load(drive + drive_at, here, 0.0)
    slow_g = u
    if SLOW:
        slow_g = tl.where(alive[:, None], slow_carry + tl.load(gradient + at + TOTAL, here, 0.0), 0.0)
        g += tl.load(charge + place, within, 0.0)[None, :] * slow_g
        if AWARE or PHASED:
            feed, feed_i = load_feed(feed_real, feed_imag, place, within, PAIRS)
            slow = load_slow(states, initial, at, begin, t, here, is_reset, TOTAL, WIDTH, RESETS)
            u += multiply(feed, feed_i, slow, PAIRS)
    g_conjugate = g  # with respect to the result of M, before the phase
    if PHASED:
        cos, sin = load_phase(drive, of, place, here, TOTAL, FEATURES, GIVEN)
        turned = tl.load(states + at, here, 0.0)
        if not AWARE:
            turned -= u
        g_phase = differentiate_phase(g, multiply_transposed(cos, sin, turned, True))
        tl.store(to_drive + find_phase(of, place, TOTAL, FEATURES, GIVEN), g_phase, mask)
        g_conjugate = multiply_transposed(cos, sin, g, True)
    beta_value = load_beta(drive, beta, of, head, alive, ROW_BETA, FEATURES)
    g_x, g_p, g_q, g_u, g_real, g_imag, g_beta, g_key_gain, g_value_gain, g_key_shift, g_value_shift = retreat(
        x, p, q, u, g_conjugate, vectors, beta_value, numbers, within[None, :], PAIRS, RETRACTION, AWARE, NORM, DOT,
        SIZE,
    )  # fmt: skip
    if PHASED and not AWARE:
        g_u = g
    tl.store(to_drive + drive_at, g_u, mask)
    if ROW_BETA:
        tl.store(to_drive + of * FEATURES + FEATURES - 1, g_beta, valid)
    if GIVEN:
        tl.store(to_drive + drive_at + TOTAL, g_p, mask)
        tl.store(to_drive + drive_at + 2 * TOTAL, g_q, mask)
    else:
        tl.store(to_projections + saved, g_p, mask)
        tl.store(to_projections + saved + SIZE, g_q, mask)
        source = apply_source(x, numbers, SOURCE)
        tl.store(sources + of[:, None] * TOTAL + place[None, :], source, mask)
    g_feed, g_feed_imag, g_decay, g_charge = slow_g, slow_g, slow_g, slow_g
    if SLOW:  # loaded only now, because `retreat` needs the registers
        feed, feed_i = load_feed(feed_real, feed_imag, place, within, PAIRS)
        slow = load_slow(states, initial, at, begin, t, here, is_reset, TOTAL, WIDTH, RESETS)
        g_charge = slow_g * tl.load(states + at, here, 0.0)
        g_decay = slow_g * slow
        g_feed = g_u * slow
        if PAIRS:
            g_feed_imag = g_u * multiply_by_i(slow)
        slow_g = tl.load(decay + place, within, 0.0)[None, :] * slow_g
        slow_g += multiply_transposed(feed, feed_i, g_u, PAIRS)
    slope = differentiate_source(x, numbers, SOURCE)
    changes = (
        g_real, g_imag, g_feed, g_feed_imag, g_decay, g_charge, g_key_gain, g_value_gain, g_key_shift, g_value_shift,
        g_p, g_q, g_beta,
    )  # fmt: skip
    return g_x, slow_g, g_p, g_q, slope, is_reset, changes


@triton.jit
def zero_sums(zero, zero_row):
    """Return zeros for the sums over the steps, in the order of `SUMS`: 12 per channel, and that of β."""
    return zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero_row


@triton.jit
def add_changes(totals, changes, PAIRS: tl.constexpr, SLOW: tl.constexpr, NORM: tl.constexpr, BIASED: tl.constexpr):
    """Add the contributions of a step to the sums; those that are not needed stay zero."""
    real, imag, feed, feed_imag, decay, charge, key_gain, value_gain, key_shift, value_shift, key, value, beta = totals
    real += changes[0]
    if PAIRS:
        imag += changes[1]
    if SLOW:
        feed += changes[2]
        decay += changes[4]
        charge += changes[5]
        if PAIRS:
            feed_imag += changes[3]
    if NORM:
        key_gain += changes[6]
        value_gain += changes[7]
        key_shift += changes[8]
        value_shift += changes[9]
    if BIASED:
        key += changes[10]
        value += changes[11]
    beta += changes[12]
    return real, imag, feed, feed_imag, decay, charge, key_gain, value_gain, key_shift, value_shift, key, value, beta


@triton.jit
def store_sum(pointer, value, mask, ADD: tl.constexpr):
    """Store a value, or add it to memory that only this program writes."""
    if ADD:
        value = tl.load(pointer, mask, 0.0) + value
    tl.store(pointer, value, mask)


@triton.jit
def store_sums(
    sums, totals, row, head, place, mask, valid, ADD: tl.constexpr, TOTAL: tl.constexpr, PAIRS: tl.constexpr,
    SLOW: tl.constexpr, NORM: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Store sums, or add to them, in (batch, 13, TOTAL); those that are not needed are not written."""
    into = sums + row[:, None] * (13 * TOTAL) + place[None, :]
    store_sum(into, totals[0], mask, ADD)
    if PAIRS:
        store_sum(into + TOTAL, totals[1], mask, ADD)
    if SLOW:
        store_sum(into + 2 * TOTAL, totals[2], mask, ADD)
        store_sum(into + 4 * TOTAL, totals[4], mask, ADD)
        store_sum(into + 5 * TOTAL, totals[5], mask, ADD)
        if PAIRS:
            store_sum(into + 3 * TOTAL, totals[3], mask, ADD)
    if NORM:
        store_sum(into + 6 * TOTAL, totals[6], mask, ADD)
        store_sum(into + 7 * TOTAL, totals[7], mask, ADD)
        store_sum(into + 8 * TOTAL, totals[8], mask, ADD)
        store_sum(into + 9 * TOTAL, totals[9], mask, ADD)
    if BIASED:
        store_sum(into + 10 * TOTAL, totals[10], mask, ADD)
        store_sum(into + 11 * TOTAL, totals[11], mask, ADD)
    store_sum(sums + row * (13 * TOTAL) + 12 * TOTAL + head, totals[12], valid, ADD)
