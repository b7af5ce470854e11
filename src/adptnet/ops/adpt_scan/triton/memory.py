"""One step with its loads and stores, except for the products with K and V.

Flags beyond those of `arithmetic.py`: GIVEN, the directions are in the drive; ROW_BETA, β is in the drive; SLOW, a slow
memory; RESETS, RAGGED, whether there are resets and lengths. HEADS is the number of heads, SIZE the size of one.
"""

import triton
import triton.language as tl

from .arithmetic import (
    advance,
    apply_source,
    differentiate_source,
    multiply,
    multiply_by_i,
    multiply_transposed,
    retreat,
)

__all__ = ["complete_backward", "complete_forward", "load_before", "load_beta", "load_feed", "load_vectors"]


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
def load_beta(drive, beta, row, t, steps, head, alive, ROW_BETA: tl.constexpr, FEATURES: tl.constexpr):
    """Return β of each row."""
    if ROW_BETA:
        value = tl.load(drive + (row * steps + t) * FEATURES + FEATURES - 1, alive, 0.0)
    else:
        value = tl.zeros(row.shape, tl.float32) + tl.load(beta + head)
    return value


@triton.jit
def complete_forward(
    x, slow, p, q, u, vectors, beta, feed_real, feed_imag, decay, charge, states, numbers, alive, into, place, mask,
    within, PAIRS: tl.constexpr, RETRACTION: tl.constexpr, AWARE: tl.constexpr, NORM: tl.constexpr, DOT: tl.constexpr,
    SLOW: tl.constexpr, SIZE: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """Store the state after a step, of which the product is done, and return its two parts; zero past the end."""
    if SLOW:
        feed, feed_i = load_feed(feed_real, feed_imag, place, within, PAIRS)
        u += multiply(feed, feed_i, slow, PAIRS)
    following = advance(x, p, q, u, vectors, beta, numbers, within[None, :], PAIRS, RETRACTION, AWARE, NORM, DOT, SIZE)
    following = tl.where(alive[:, None], following, 0.0)
    tl.store(states + into, following, mask)
    if SLOW:
        slow = tl.load(decay + place, within, 0.0)[None, :] * slow
        slow += tl.load(charge + place, within, 0.0)[None, :] * following
        slow = tl.where(alive[:, None], slow, 0.0)
        tl.store(states + into + TOTAL, slow, mask)
    return following, slow


@triton.jit
def complete_backward(
    carry, slow_carry, drive, initial, states, gradient, projections, reset, vectors, beta, feed_real, feed_imag, decay,
    charge, numbers, to_drive, to_projections, sources, row, t, steps, last, head, column, valid, within,
    HEADS: tl.constexpr, SIZE: tl.constexpr,
    RESETS: tl.constexpr, RAGGED: tl.constexpr, RETRACTION: tl.constexpr, PAIRS: tl.constexpr,
    SOURCE: tl.constexpr, GIVEN: tl.constexpr, ROW_BETA: tl.constexpr, AWARE: tl.constexpr, SLOW: tl.constexpr,
    NORM: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Run the backward of a step except for the product with K and V.

    Returns the gradients of x (without the path through K and V) and of the slow memory, those of p and q, the
    derivative of the source, whether the step is after a reset, and the contributions to the sums over the steps.
    """
    TOTAL: tl.constexpr = HEADS * SIZE
    FEATURES: tl.constexpr = TOTAL * (3 if GIVEN else 1) + (1 if ROW_BETA else 0)
    WIDTH: tl.constexpr = TOTAL * (2 if SLOW else 1)
    place = head * SIZE + column
    mask = valid[:, None] & within[None, :]
    alive = valid & (t < last)
    here = alive[:, None] & within[None, :]
    at = (row[:, None] * steps + t) * WIDTH + place[None, :]
    begin = row[:, None] * WIDTH + place[None, :]
    drive_at = (row[:, None] * steps + t) * FEATURES + place[None, :]
    saved = (row[:, None] * steps + t) * (2 * TOTAL) + head * 2 * SIZE + column[None, :]
    x = load_before(states, initial, at, begin, t, here, WIDTH)
    g = tl.where(alive[:, None], carry + tl.load(gradient + at, here, 0.0), 0.0)
    is_reset = alive & False
    if RESETS:
        is_reset = tl.load(reset + row * steps + t, valid, 0) != 0
        x = tl.where(is_reset[:, None], 0.0, x)
    if GIVEN:
        p = tl.load(drive + drive_at + TOTAL, here, 0.0)
        q = tl.load(drive + drive_at + 2 * TOTAL, here, 0.0)
    else:
        p = tl.load(projections + saved, here, 0.0)
        q = tl.load(projections + saved + SIZE, here, 0.0)
    u = tl.zeros_like(x)
    if AWARE:
        u = tl.load(drive + drive_at, here, 0.0)
    slow, slow_g, g_charge, g_decay = u, u, u, u
    if SLOW:
        feed, feed_i = load_feed(feed_real, feed_imag, place, within, PAIRS)
        slow = load_before(states, initial, at + TOTAL, begin + TOTAL, t, here, WIDTH)
        if RESETS:
            slow = tl.where(is_reset[:, None], 0.0, slow)
        slow_g = tl.where(alive[:, None], slow_carry + tl.load(gradient + at + TOTAL, here, 0.0), 0.0)
        g += tl.load(charge + place, within, 0.0)[None, :] * slow_g
        g_charge = slow_g * tl.load(states + at, here, 0.0)
        g_decay = slow_g * slow
        u += multiply(feed, feed_i, slow, PAIRS)
    beta_value = load_beta(drive, beta, row, t, steps, head, alive, ROW_BETA, FEATURES)
    g_x, g_p, g_q, g_u, g_real, g_imag, g_beta, g_key_gain, g_value_gain, g_key_shift, g_value_shift = retreat(
        x, p, q, u, g, vectors, beta_value, numbers, within[None, :], PAIRS, RETRACTION, AWARE, NORM, DOT, SIZE
    )
    tl.store(to_drive + drive_at, g_u, mask)
    if ROW_BETA:
        tl.store(to_drive + (row * steps + t) * FEATURES + FEATURES - 1, g_beta, valid)
    if GIVEN:
        tl.store(to_drive + drive_at + TOTAL, g_p, mask)
        tl.store(to_drive + drive_at + 2 * TOTAL, g_q, mask)
    else:
        tl.store(to_projections + saved, g_p, mask)
        tl.store(to_projections + saved + SIZE, g_q, mask)
        source = apply_source(x, numbers, SOURCE)
        tl.store(sources + (row[:, None] * steps + t) * TOTAL + place[None, :], source, mask)
    g_feed, g_feed_imag = slow_g, slow_g
    if SLOW:
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
