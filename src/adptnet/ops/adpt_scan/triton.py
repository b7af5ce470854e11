"""The ADPT recurrence in Triton, for GPUs: a program runs all steps of one head of a tile of sequences.

Two pairs of kernels share the arithmetic of a step. In the resident pair the state stays in registers and K and V in
shared memory, so a head has at most 128 state dimensions; with directions that come with the drive there is no product,
and the limit is 2,048. In the streamed pair, for heads of up to 2,048, K and V are read at every step, the state goes
through global memory between barriers, and the rows of the tile are processed a few at a time. A batch tile is the M of
the matrix products, heads are an axis of the grid. `launch.py` chooses. Imported only when it is used. It has never run
on a GPU.

The formulas are those of the README beside this file, with k and w formed as vectors. Letters, as there:

- x: the state before the step; p, q: the projections K x and V x; k, v: the unit key and value;
- c, w, ww: c = k·v, w = v - c k, ww = |w|² (ω in the README); s: the squared angle β² ww;
- linear, quadratic: A(s) and B(s); a, b: β A and β² B;
- y, y1, y2: y = Q'x = x + y1 k + y2 w; z = Λy, plus u with AWARE; m1, m2: Q z = z + m1 k + m2 w;
- kx, wz, klw, ...: the dot products k·x, w·z, k·Λw, ...;
- g: the gradient with respect to the state after the step; h1, h2: Q'g = g + h1 k + h2 w; G = Λ'Q'g;
- gk, gw: gradients with respect to k and w; kgw, ...: dot products with them; kG, wG: k·G, w·G.

Flags (`Launch` and `_make_arguments`): PAIRS, complex pairs; SOURCE, what K and V are applied to (`Source`); GIVEN, the
directions are in the drive; ROW_BETA, β is in the drive; AWARE, the drive is rotated; SLOW, a slow memory; NORM, a
LayerNorm on key and value; RAGGED, lengths; SAVE, the projections are kept for the backward.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .form import Constants, Form, RetractionKind, Source
from .launch import Launch, plan_launch, saved_shape

__all__ = ["backward", "forward", "resident_backward", "resident_forward", "streamed_backward", "streamed_forward"]

# Rows of the buffer of gradients that are summed over the steps of each sequence, then over the batch by torch.
SUMS: tuple[str, ...] = ("real", "imag", "feed_real", "feed_imag", "decay", "charge", "key_gain", "value_gain")
SUMS += ("key_shift", "value_shift", "key_bias", "value_bias", "beta")
_FIRST_ROWS = {"bias": "key_bias", "norm_weight": "key_gain", "norm_bias": "key_shift"}  # of two rows


@triton.jit
def add3(a0, a1, a2, b0, b1, b2):
    """Add triples (for tl.reduce)."""
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def add4(a0, a1, a2, a3, b0, b1, b2, b3):
    """Add quadruples."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def add8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    """Add octuples."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def multiply_by_i(x):
    """Return each pair (a, b) of the columns as (-b, a)."""
    first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return tl.reshape(tl.join(-second, first), (x.shape[0], x.shape[1]))


@triton.jit
def multiply(real, imag, x, PAIRS: tl.constexpr):
    """Return Λ x."""
    result = real * x
    if PAIRS:
        result += imag * multiply_by_i(x)
    return result


@triton.jit
def multiply_transposed(real, imag, x, PAIRS: tl.constexpr):
    """Return Λ' x."""
    result = real * x
    if PAIRS:
        result -= multiply_by_i(imag * x)
    return result


@triton.jit
def unit(x):
    """Return rows scaled to length one, and one over their length; both are zero for a row that counts as zero."""
    largest = tl.max(tl.abs(x), 1)
    is_zero = largest < 1.2037062e-35  # 1024 times the smallest normal number
    shrink = 1.0 / tl.where(is_zero, 1.0, largest)
    x = x * shrink[:, None]
    squared = tl.sum(x * x, 1)
    inverse = tl.where(is_zero, 0.0, 1.0 / tl.sqrt(tl.where(is_zero, 1.0, squared)))
    return x * inverse[:, None], shrink * inverse


@triton.jit
def normalize(p, gain, shift, epsilon, within, SIZE: tl.constexpr):
    """Return the unit vector of a LayerNorm of the unit vector of p, its scale, and what `normalize_backward` needs."""
    y, scale = unit(p)
    centered = tl.where(within, y - (tl.sum(y, 1) / SIZE)[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centered * centered, 1) / SIZE + epsilon)
    standard = centered * inverse[:, None]
    k, k_scale = unit(standard * gain + shift)
    return k, k_scale, y, scale, standard, inverse


@triton.jit
def normalize_backward(g, gain, y, scale, standard, inverse, within, SIZE: tl.constexpr):
    """Return the gradient of p from that of the output of the LayerNorm."""
    g = g * gain
    mean, along = tl.sum(g, 1) / SIZE, tl.sum(g * standard, 1) / SIZE
    g = tl.where(within, (g - mean[:, None] - along[:, None] * standard) * inverse[:, None], 0.0)
    return scale[:, None] * (g - tl.sum(g * y, 1)[:, None] * y)


@triton.jit
def coefficients(s, CAYLEY: tl.constexpr):
    """Return A(s) and B(s), the coefficients of S and S², and their derivatives with respect to s; see csrc/plane.h."""
    if CAYLEY:
        linear = 1.0 / (1.0 + s / 4)
        quadratic = linear / 2
        linear_slope = -linear * linear / 4
        quadratic_slope = linear_slope / 2
    else:
        near = s < 4.0
        small = tl.where(near, s, 0.0)
        c3 = 1 / 6.0 - small * (1 / 120.0 - small * (1 / 5040.0 - small * (1 / 362880.0 - small * (
            1 / 39916800.0 - small * (1 / 6227020800.0 - small / 1307674368000.0)))))  # fmt: skip
        c4 = 1 / 24.0 - small * (1 / 720.0 - small * (1 / 40320.0 - small * (1 / 3628800.0 - small * (
            1 / 479001600.0 - small * (1 / 87178291200.0 - small / 20922789888000.0)))))  # fmt: skip
        angle = tl.sqrt(tl.where(near, 4.0, s))
        half = tl.sin(angle / 2) / angle
        linear = tl.where(near, 1.0 - small * c3, tl.sin(angle) / angle)
        quadratic = tl.where(near, 0.5 - small * c4, 2 * half * half)
        safe = tl.where(near, 1.0, s)
        c3 = tl.where(near, c3, (1.0 - linear) / safe)
        c4 = tl.where(near, c4, (0.5 - quadratic) / safe)
        linear_slope = (c3 - quadratic) / 2
        quadratic_slope = c4 - c3 / 2
    return linear, quadratic, linear_slope, quadratic_slope


@triton.jit
def find_plane(p, q):
    """Return the unit vectors k and v of p and q, c = k·v, and one over |p| and |q|; all zero if p or q counts as zero.

    Squares of entries beyond 1e±10 could overflow or underflow. Rows with such p or q are divided by their largest
    entries first.
    """
    pp, qq, pq = tl.reduce((p * p, q * q, p * q), 1, add3)
    p_shrink, q_shrink = tl.full(pp.shape, 1.0, tl.float32), tl.full(pp.shape, 1.0, tl.float32)
    extreme = (tl.minimum(pp, qq) < 1e-20) | (tl.maximum(pp, qq) > 1e20)
    if tl.max(extreme.to(tl.int32), 0) > 0:
        p_largest, q_largest = tl.max(tl.abs(p), 1), tl.max(tl.abs(q), 1)
        is_zero = (p_largest < 1.2037062e-35) | (q_largest < 1.2037062e-35)
        # The other rows of the tile are not changed: their rounding must not depend on this one.
        p_shrink = tl.where(extreme, tl.where(is_zero, 0.0, 1.0 / tl.where(is_zero, 1.0, p_largest)), 1.0)
        q_shrink = tl.where(extreme, tl.where(is_zero, 0.0, 1.0 / tl.where(is_zero, 1.0, q_largest)), 1.0)
        p, q = p * p_shrink[:, None], q * q_shrink[:, None]
        pp, qq, pq = tl.reduce((p * p, q * q, p * q), 1, add3)
    is_zero = (pp == 0) | (qq == 0)
    p_inverse = tl.where(is_zero, 0.0, 1.0 / tl.sqrt(tl.where(is_zero, 1.0, pp)))
    q_inverse = tl.where(is_zero, 0.0, 1.0 / tl.sqrt(tl.where(is_zero, 1.0, qq)))
    c = pq * p_inverse * q_inverse
    return p * p_inverse[:, None], q * q_inverse[:, None], c, p_shrink * p_inverse, q_shrink * q_inverse


@triton.jit
def find_rotation(
    x, u, k, w, rotates, beta, real, imag, PAIRS: tl.constexpr, CAYLEY: tl.constexpr, AWARE: tl.constexpr
):
    """Return the scalars of a step, and Λx, Λk, Λw."""
    lx, lk, lw = multiply(real, imag, x, PAIRS), multiply(real, imag, k, PAIRS), multiply(real, imag, w, PAIRS)
    ww, kx, wx, klx, wlx, klk, klw, wlw = tl.reduce(
        (w * w, k * x, w * x, k * lx, w * lx, k * lk, k * lw, w * lw), 1, add8
    )
    wlk = klw
    if PAIRS:
        wlk = tl.sum(w * lk, 1)
    linear, quadratic, linear_slope, quadratic_slope = coefficients(beta * beta * ww, CAYLEY)
    a, b = tl.where(rotates, beta * linear, 0.0), tl.where(rotates, beta * beta * quadratic, 0.0)
    y1, y2 = -a * wx - b * ww * kx, a * kx - b * wx
    kz, wz = klx + y1 * klk + y2 * klw, wlx + y1 * wlk + y2 * wlw
    if AWARE:
        kz += tl.sum(k * u, 1)
        wz += tl.sum(w * u, 1)
    m1, m2 = a * wz - b * ww * kz, -a * kz - b * wz
    scalars = (ww, kx, wx, klk, klw, wlk, wlw, kz, wz, a, b, linear, quadratic, linear_slope, quadratic_slope)
    return y1, y2, m1, m2, lx, lk, lw, scalars


@triton.jit
def advance(
    x, p, q, u, vectors, beta, epsilon, within,
    PAIRS: tl.constexpr, CAYLEY: tl.constexpr, AWARE: tl.constexpr, NORM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return the state after a step."""
    real, imag, key_gain, value_gain, key_shift, value_shift = vectors
    if NORM:
        k, k_scale, _, _, _, _ = normalize(p, key_gain, key_shift, epsilon, within, SIZE)
        v, v_scale, _, _, _, _ = normalize(q, value_gain, value_shift, epsilon, within, SIZE)
        c = tl.sum(k * v, 1)
    else:
        k, v, c, k_scale, v_scale = find_plane(p, q)
    w = v - c[:, None] * k
    rotates = (k_scale != 0) & (v_scale != 0)
    y1, y2, m1, m2, lx, lk, lw, _ = find_rotation(x, u, k, w, rotates, beta, real, imag, PAIRS, CAYLEY, AWARE)
    return lx + y1[:, None] * lk + y2[:, None] * lw + m1[:, None] * k + m2[:, None] * w + u


@triton.jit
def retreat(
    x, p, q, u, g, vectors, beta, epsilon, within,
    PAIRS: tl.constexpr, CAYLEY: tl.constexpr, AWARE: tl.constexpr, NORM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return the gradients of x (without the path through K and V), p, q, u, Λ̄, β, and of the LayerNorm.

    Those of Λ̄ and of the LayerNorm are contributions, to be summed over steps and sequences.
    """
    real, imag, key_gain, value_gain, key_shift, value_shift = vectors
    if NORM:
        k, k_scale, key_unit, key_scale, key_standard, key_inverse = normalize(
            p, key_gain, key_shift, epsilon, within, SIZE
        )
        v, v_scale, value_unit, value_scale, value_standard, value_inverse = normalize(
            q, value_gain, value_shift, epsilon, within, SIZE
        )
        c = tl.sum(k * v, 1)
        rotates = (k_scale != 0) & (v_scale != 0)
        k_scale, v_scale = tl.where(rotates, k_scale, 0.0), tl.where(rotates, v_scale, 0.0)
    else:
        k, v, c, k_scale, v_scale = find_plane(p, q)
        rotates = (k_scale != 0) & (v_scale != 0)
    w = v - c[:, None] * k
    y1, y2, m1, m2, lx, lk, lw, scalars = find_rotation(x, u, k, w, rotates, beta, real, imag, PAIRS, CAYLEY, AWARE)
    ww, kx, wx, klk, klw, wlk, wlw, kz, wz, a, b, linear, quadratic, linear_slope, quadratic_slope = scalars
    y = x + y1[:, None] * k + y2[:, None] * w
    z = lx + y1[:, None] * lk + y2[:, None] * lw
    if AWARE:
        z += u
    lg = multiply_transposed(real, imag, g, PAIRS)
    kg, wg, klg, wlg = tl.reduce((k * g, w * g, k * lg, w * lg), 1, add4)
    h1, h2 = -a * wg - b * ww * kg, a * kg - b * wg
    kG, wG = klg + h1 * klk + h2 * wlk, wlg + h1 * klw + h2 * wlw
    rotated = g + h1[:, None] * k + h2[:, None] * w
    G = multiply_transposed(real, imag, rotated, PAIRS)
    g_real = rotated * y
    g_imag = g_real
    if PAIRS:
        g_imag = rotated * multiply_by_i(y)
    g_kx, g_wx = a * wG - b * ww * kG, -a * kG - b * wG
    g_a = wz * kg - kz * wg + kx * wG - wx * kG
    g_b = -ww * kz * kg - wz * wg - ww * kx * kG - wx * wG
    g_s = beta * (g_a * linear_slope + g_b * beta * quadratic_slope)
    g_beta = tl.where(rotates, g_a * linear + 2 * beta * (g_b * quadratic + g_s * ww), 0.0)
    g_ww = 2 * (g_s * beta * beta - b * kz * kg - b * kx * kG)
    gk = y1[:, None] * G + h1[:, None] * z + m1[:, None] * g + g_kx[:, None] * x
    gw = y2[:, None] * G + h2[:, None] * z + m2[:, None] * g + g_wx[:, None] * x + g_ww[:, None] * w
    kgk = y1 * kG + h1 * kz + m1 * kg + g_kx * kx
    kgw = y2 * kG + h2 * kz + m2 * kg + g_wx * kx
    wgw = y2 * wG + h2 * wz + m2 * wg + g_wx * wx + g_ww * ww
    gw -= kgw[:, None] * k
    g_p = k_scale[:, None] * (gk - kgk[:, None] * k - c[:, None] * gw - kgw[:, None] * w)
    g_q = v_scale[:, None] * (gw - wgw[:, None] * v)
    g_x = G + g_kx[:, None] * k + g_wx[:, None] * w
    g_key_shift, g_value_shift = g_p, g_q
    g_key_gain, g_value_gain = g_p, g_q
    if NORM:
        g_key_gain, g_value_gain = g_p * key_standard, g_q * value_standard
        g_p = normalize_backward(g_p, key_gain, key_unit, key_scale, key_standard, key_inverse, within, SIZE)
        g_q = normalize_backward(g_q, value_gain, value_unit, value_scale, value_standard, value_inverse, within, SIZE)
    g_u = rotated if AWARE else g
    return g_x, g_p, g_q, g_u, g_real, g_imag, g_beta, g_key_gain, g_value_gain, g_key_shift, g_value_shift


@triton.jit
def apply_source(x, threshold, SOURCE: tl.constexpr):
    """Return what K and V are applied to."""
    if SOURCE == 1:
        x = tl.where(x > 0, x, x * 0.0)  # keeps a NaN
    if SOURCE == 2:
        x = tl.where(x >= threshold, 1.0, x * 0.0)
    return x


@triton.jit
def differentiate_source(x, threshold, SOURCE: tl.constexpr):
    """Return the derivative of `apply_source`, for spikes the surrogate of `ops/_unit_vectors.py`."""
    slope = tl.full(x.shape, 1.0, tl.float32)
    if SOURCE == 1:
        slope = tl.where(x > 0, 1.0, 0.0)
    if SOURCE == 2:
        slope = tl.where(tl.abs(x - threshold) <= 0.5, 1.0, 0.0)
    return slope


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
    x, slow, p, q, u, vectors, beta, feed_real, feed_imag, decay, charge, states, epsilon, alive, into, place, mask,
    within, PAIRS: tl.constexpr, CAYLEY: tl.constexpr, AWARE: tl.constexpr, NORM: tl.constexpr, SLOW: tl.constexpr,
    SIZE: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """Store the state after a step, of which the product is done, and return its two parts; zero past the end."""
    if SLOW:
        feed, feed_i = load_feed(feed_real, feed_imag, place, within, PAIRS)
        u += multiply(feed, feed_i, slow, PAIRS)
    following = advance(x, p, q, u, vectors, beta, epsilon, within[None, :], PAIRS, CAYLEY, AWARE, NORM, SIZE)
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
    charge, epsilon, threshold, to_drive, to_projections, sources, row, t, steps, last, head, column, valid, within,
    HEADS: tl.constexpr, SIZE: tl.constexpr,
    RESETS: tl.constexpr, RAGGED: tl.constexpr, CAYLEY: tl.constexpr, PAIRS: tl.constexpr,
    SOURCE: tl.constexpr, GIVEN: tl.constexpr, ROW_BETA: tl.constexpr, AWARE: tl.constexpr, SLOW: tl.constexpr,
    NORM: tl.constexpr,
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
        x, p, q, u, g, vectors, beta_value, epsilon, within[None, :], PAIRS, CAYLEY, AWARE, NORM, SIZE
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
        source = apply_source(x, threshold, SOURCE)
        tl.store(sources + (row[:, None] * steps + t) * TOTAL + place[None, :], source, mask)
    g_feed, g_feed_imag = slow_g, slow_g
    if SLOW:
        g_feed = g_u * slow
        if PAIRS:
            g_feed_imag = g_u * multiply_by_i(slow)
        slow_g = tl.load(decay + place, within, 0.0)[None, :] * slow_g
        slow_g += multiply_transposed(feed, feed_i, g_u, PAIRS)
    slope = differentiate_source(x, threshold, SOURCE)
    changes = (
        g_real, g_imag, g_feed, g_feed_imag, g_decay, g_charge, g_key_gain, g_value_gain, g_key_shift, g_value_shift,
        g_p, g_q, g_beta,
    )  # fmt: skip
    return g_x, slow_g, g_p, g_q, slope, is_reset, changes


@triton.jit(do_not_specialize=["batch", "steps"])  # otherwise every batch size and length is compiled anew
def resident_forward(
    drive, initial, real, imag, weight, bias, beta, feed_real, feed_imag, decay, charge, norm_weight, norm_bias,
    reset, lengths, states, projections, epsilon, threshold, batch, steps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
    BIASED: tl.constexpr, RESETS: tl.constexpr, RAGGED: tl.constexpr, CAYLEY: tl.constexpr, PAIRS: tl.constexpr,
    SOURCE: tl.constexpr, GIVEN: tl.constexpr, ROW_BETA: tl.constexpr, AWARE: tl.constexpr, SLOW: tl.constexpr,
    NORM: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Run all steps of one head of ROWS sequences, with the state in registers."""
    TOTAL: tl.constexpr = HEADS * SIZE
    FEATURES: tl.constexpr = TOTAL * (3 if GIVEN else 1) + (1 if ROW_BETA else 0)
    WIDTH: tl.constexpr = TOTAL * (2 if SLOW else 1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, PAD)
    place = head * SIZE + column  # of this head in the state
    valid, within = row < batch, column < SIZE
    mask = valid[:, None] & within[None, :]
    vectors = load_vectors(real, imag, norm_weight, norm_bias, place, within, TOTAL, PAIRS, NORM)
    if not GIVEN:  # states are rows, so p = x K': load K' and V'
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
        if GIVEN:
            p = tl.load(drive + at + TOTAL, mask & alive[:, None], 0.0)
            q = tl.load(drive + at + 2 * TOTAL, mask & alive[:, None], 0.0)
        else:
            source = apply_source(x, threshold, SOURCE)
            p = tl.dot(source, key_weight, input_precision=PRECISION)
            q = tl.dot(source, value_weight, input_precision=PRECISION)
            if BIASED:
                p += tl.load(bias + head * 2 * SIZE + column, within, 0.0)[None, :]
                q += tl.load(bias + head * 2 * SIZE + SIZE + column, within, 0.0)[None, :]
            if SAVE:
                saved = projections + (row[:, None] * steps + t) * (2 * TOTAL) + head * 2 * SIZE + column[None, :]
                tl.store(saved, p, mask)
                tl.store(saved + SIZE, q, mask)
        beta_value = load_beta(drive, beta, row, t, steps, head, alive, ROW_BETA, FEATURES)
        into = (row[:, None] * steps + t) * WIDTH + place[None, :]
        x, slow = complete_forward(
            x, slow, p, q, u, vectors, beta_value, feed_real, feed_imag, decay, charge, states, epsilon, alive, into,
            place, mask, within, PAIRS, CAYLEY, AWARE, NORM, SLOW, SIZE, TOTAL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "steps"])
def resident_backward(
    drive, initial, real, imag, weight, bias, beta, feed_real, feed_imag, decay, charge, norm_weight, norm_bias,
    reset, lengths, states, projections, epsilon, threshold, gradient, to_drive, to_initial, to_projections, sources,
    sums, batch, steps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
    BIASED: tl.constexpr, RESETS: tl.constexpr, RAGGED: tl.constexpr, CAYLEY: tl.constexpr, PAIRS: tl.constexpr,
    SOURCE: tl.constexpr, GIVEN: tl.constexpr, ROW_BETA: tl.constexpr, AWARE: tl.constexpr, SLOW: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Run the backward pass of all steps of one head of ROWS sequences, with the gradient of the state in registers.

    `to_projections` are the gradients of K x and V x, (batch, steps, HEADS, 2, SIZE), `sources` what K and V are
    applied to, (batch, steps, HEADS * SIZE), and `sums` the other gradients of each sequence, (batch, len(SUMS),
    HEADS * SIZE).
    """
    TOTAL: tl.constexpr = HEADS * SIZE
    WIDTH: tl.constexpr = TOTAL * (2 if SLOW else 1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, PAD)
    place = head * SIZE + column
    valid, within = row < batch, column < SIZE
    mask = valid[:, None] & within[None, :]
    vectors = load_vectors(real, imag, norm_weight, norm_bias, place, within, TOTAL, PAIRS, NORM)
    if not GIVEN:
        square = within[:, None] & within[None, :]
        untransposed = weight + head * 2 * SIZE * SIZE + column[:, None] * SIZE + column[None, :]
        key_weight = tl.load(untransposed, square, 0.0)
        value_weight = tl.load(untransposed + SIZE * SIZE, square, 0.0)
    last = row * 0 + steps
    if RAGGED:
        last = tl.load(lengths + row, valid, 0)
    zero = tl.zeros((ROWS, PAD), dtype=tl.float32)
    carry, slow_carry = zero, zero
    g_real, g_imag, g_feed, g_feed_imag, g_decay, g_charge = zero, zero, zero, zero, zero, zero
    g_key_gain, g_value_gain, g_key_shift, g_value_shift, g_key_bias, g_value_bias = zero, zero, zero, zero, zero, zero
    g_beta = tl.zeros((ROWS,), dtype=tl.float32)
    for i in range(steps):
        g_x, slow_carry, g_p, g_q, slope, is_reset, changes = complete_backward(
            carry, slow_carry, drive, initial, states, gradient, projections, reset, vectors, beta, feed_real,
            feed_imag, decay, charge, epsilon, threshold, to_drive, to_projections, sources, row, steps - 1 - i, steps,
            last, head, column, valid, within, HEADS, SIZE, RESETS, RAGGED, CAYLEY, PAIRS, SOURCE, GIVEN, ROW_BETA,
            AWARE, SLOW, NORM,
        )  # fmt: skip
        carry = g_x
        if not GIVEN:
            # The products are summed apart from the rest, which is larger where memory is long.
            products = tl.dot(g_p, key_weight, input_precision=PRECISION)
            products = tl.dot(g_q, value_weight, products, input_precision=PRECISION)
            carry += products * slope
        if RESETS:
            carry = tl.where(is_reset[:, None], 0.0, carry)
            slow_carry = tl.where(is_reset[:, None], 0.0, slow_carry)
        g_real += changes[0]
        if PAIRS:
            g_imag += changes[1]
        if SLOW:
            g_feed += changes[2]
            g_decay += changes[4]
            g_charge += changes[5]
            if PAIRS:
                g_feed_imag += changes[3]
        if NORM:
            g_key_gain += changes[6]
            g_value_gain += changes[7]
            g_key_shift += changes[8]
            g_value_shift += changes[9]
        if BIASED:
            g_key_bias += changes[10]
            g_value_bias += changes[11]
        g_beta += changes[12]
    tl.store(to_initial + row[:, None] * WIDTH + place[None, :], carry, mask)
    total = sums + row[:, None] * (13 * TOTAL) + place[None, :]
    tl.store(total, g_real, mask)
    if PAIRS:
        tl.store(total + TOTAL, g_imag, mask)
    if SLOW:
        tl.store(to_initial + row[:, None] * WIDTH + TOTAL + place[None, :], slow_carry, mask)
        tl.store(total + 2 * TOTAL, g_feed, mask)
        tl.store(total + 3 * TOTAL, g_feed_imag, mask)
        tl.store(total + 4 * TOTAL, g_decay, mask)
        tl.store(total + 5 * TOTAL, g_charge, mask)
    if NORM:
        tl.store(total + 6 * TOTAL, g_key_gain, mask)
        tl.store(total + 7 * TOTAL, g_value_gain, mask)
        tl.store(total + 8 * TOTAL, g_key_shift, mask)
        tl.store(total + 9 * TOTAL, g_value_shift, mask)
    if BIASED:
        tl.store(total + 10 * TOTAL, g_key_bias, mask)
        tl.store(total + 11 * TOTAL, g_value_bias, mask)
    tl.store(sums + row * (13 * TOTAL) + 12 * TOTAL + head, g_beta, valid)


@triton.jit(do_not_specialize=["batch", "steps"])
def streamed_forward(
    drive, initial, real, imag, weight, bias, beta, feed_real, feed_imag, decay, charge, norm_weight, norm_bias,
    reset, lengths, states, projections, epsilon, threshold, batch, steps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
    BIASED: tl.constexpr, RESETS: tl.constexpr, RAGGED: tl.constexpr, CAYLEY: tl.constexpr, PAIRS: tl.constexpr,
    SOURCE: tl.constexpr, GIVEN: tl.constexpr, ROW_BETA: tl.constexpr, AWARE: tl.constexpr, SLOW: tl.constexpr,
    NORM: tl.constexpr, SAVE: tl.constexpr, SOME: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Run all steps of one head of ROWS sequences, with state and projections in global memory.

    The products are computed in blocks of BLOCK columns, over INNER rows of K' and V' at a time, and the rest of a step
    for SOME sequences at a time. Without SAVE, `projections` holds one step.
    """
    TOTAL: tl.constexpr = HEADS * SIZE
    FEATURES: tl.constexpr = TOTAL + (1 if ROW_BETA else 0)
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
                source = apply_source(x, threshold, SOURCE)
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
            mask = valid[:, None] & within[None, :]
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
            beta_value = load_beta(drive, beta, row, t, steps, head, alive, ROW_BETA, FEATURES)
            complete_forward(
                x, slow, p, q, u, vectors, beta_value, feed_real, feed_imag, decay, charge, states, epsilon, alive, at,
                place, mask, within, PAIRS, CAYLEY, AWARE, NORM, SLOW, SIZE, TOTAL,
            )  # fmt: skip
        tl.debug_barrier()  # all states are written


@triton.jit
def add_to(pointer, value, mask):
    """Add to memory that only this program writes."""
    tl.store(pointer, tl.load(pointer, mask, 0.0) + value, mask)


@triton.jit(do_not_specialize=["batch", "steps"])
def streamed_backward(
    drive, initial, real, imag, weight, bias, beta, feed_real, feed_imag, decay, charge, norm_weight, norm_bias,
    reset, lengths, states, projections, epsilon, threshold, gradient, to_drive, to_initial, to_projections, sources,
    sums, batch, steps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
    BIASED: tl.constexpr, RESETS: tl.constexpr, RAGGED: tl.constexpr, CAYLEY: tl.constexpr, PAIRS: tl.constexpr,
    SOURCE: tl.constexpr, GIVEN: tl.constexpr, ROW_BETA: tl.constexpr, AWARE: tl.constexpr, SLOW: tl.constexpr,
    NORM: tl.constexpr, SOME: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Run the backward pass of all steps of one head of ROWS sequences, with the gradient of the state in `to_initial`.

    Arguments as in `resident_backward`; BLOCK, INNER and SOME as in `streamed_forward`.
    """
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
                feed_imag, decay, charge, epsilon, threshold, to_drive, to_projections, sources, row, t, steps, last,
                head, column, valid, within, HEADS, SIZE, RESETS, RAGGED, CAYLEY, PAIRS, SOURCE, GIVEN, ROW_BETA, AWARE,
                SLOW, NORM,
            )  # fmt: skip
            tl.store(begin, tl.where(is_reset[:, None], 0.0, g_x), mask)
            total = sums + row[:, None] * (13 * TOTAL) + place[None, :]
            add_to(total, changes[0], mask)
            if PAIRS:
                add_to(total + TOTAL, changes[1], mask)
            if SLOW:
                tl.store(begin + TOTAL, tl.where(is_reset[:, None], 0.0, slow_carry), mask)
                add_to(total + 2 * TOTAL, changes[2], mask)
                add_to(total + 4 * TOTAL, changes[4], mask)
                add_to(total + 5 * TOTAL, changes[5], mask)
                if PAIRS:
                    add_to(total + 3 * TOTAL, changes[3], mask)
            if NORM:
                add_to(total + 6 * TOTAL, changes[6], mask)
                add_to(total + 7 * TOTAL, changes[7], mask)
                add_to(total + 8 * TOTAL, changes[8], mask)
                add_to(total + 9 * TOTAL, changes[9], mask)
            if BIASED:
                add_to(total + 10 * TOTAL, changes[10], mask)
                add_to(total + 11 * TOTAL, changes[11], mask)
            add_to(sums + row * (13 * TOTAL) + 12 * TOTAL + head, changes[12], valid)
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
            add_to(to_initial + begin, products * differentiate_source(x, threshold, SOURCE), kept)
        tl.debug_barrier()  # the gradient of the state is written


def forward(
    drive: Tensor,
    state: Tensor,
    constants: Constants,
    form: Form,
    reset: Tensor | None,
    lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Return all states, (batch, time, width), and the projections K x and V x, (batch, time, heads, 2, m), if saved.

    Args:
        drive, state, constants, form, reset, lengths: As in `adpt_scan`.
        save: Whether to save the projections; they are empty if not, or if there are none.
    """
    batch, steps = drive.shape[:2]
    states = drive.new_empty(batch, steps, state.shape[-1])
    projections = drive.new_empty(saved_shape(drive, constants, form, save))
    if states.numel():
        launch = _plan_launch(drive, constants, form)
        kernel, scratch = resident_forward, projections
        if launch.streamed:
            kernel = streamed_forward
            scratch = projections if save else drive.new_empty(batch, 2 * constants.real.shape[0])
        arguments, options = _make_arguments(drive, state, constants, form, reset, lengths, states, scratch, launch)
        with torch.cuda.device_of(drive):  # Triton launches on the current device
            kernel[(triton.cdiv(batch, launch.rows), form.heads)](
                *arguments, batch, steps, SAVE=projections.numel() > 0, **options
            )
    return states, projections


def backward(
    gradient: Tensor,
    states: Tensor,
    projections: Tensor,
    drive: Tensor,
    state: Tensor,
    constants: Constants,
    form: Form,
    reset: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Constants]:
    """Return the gradients of the drive, the initial state and each of the constants.

    Args:
        gradient: With respect to the states.
        states, projections: The results of `forward`; projections that were not saved are computed by one product.
        drive, state, constants, form, reset, lengths: As in `adpt_scan`.
    """
    (batch, steps), size, heads = gradient.shape[:2], constants.real.shape[0], form.heads
    launch = _plan_launch(drive, constants, form)
    new = gradient.new_empty if gradient.numel() else gradient.new_zeros  # the kernels write every entry
    to_drive, to_state, sums = new(drive.shape), new(state.shape), new(batch, len(SUMS), size)
    to_projections, sources = gradient, gradient  # not used
    if not form.directions_in_drive:
        to_projections, sources = new(batch, steps, heads, 2 * (size // heads)), new(batch, steps, heads, size // heads)
        if not projections.numel():
            projections = _project(states, state, constants, form, reset)
    if gradient.numel():
        kernel = streamed_backward if launch.streamed else resident_backward
        arguments, options = _make_arguments(drive, state, constants, form, reset, lengths, states, projections, launch)
        with torch.cuda.device_of(gradient):
            kernel[(triton.cdiv(batch, launch.rows), heads)](
                *arguments, gradient.contiguous(), to_drive, to_state, to_projections, sources, sums, batch, steps,
                **options,
            )  # fmt: skip
    weight = None
    if not form.directions_in_drive:
        left, right = to_projections.flatten(0, 1), sources.flatten(0, 1)
        weight = torch.bmm(left.permute(1, 2, 0), right.transpose(0, 1)).unflatten(1, (2, -1))
    return to_drive, to_state, _collect(sums, weight, constants, form)


def _collect(sums: Tensor, weight: Tensor | None, constants: Constants, form: Form) -> Constants:
    """Return the gradients of the constants, None for those that are None. No two may share memory."""
    unused = {"weight", "bias"} if form.directions_in_drive else set()
    if form.beta_in_drive:
        unused.add("beta")
    found: dict[str, Any] = {"weight": weight}
    for name, constant in constants._asdict().items():
        rows = sums[:, SUMS.index(_FIRST_ROWS.get(name, name)) :] if name != "weight" else sums
        if constant is None:
            found[name] = None
        elif name in unused:
            found[name] = torch.zeros_like(constant)
        elif name == "bias":
            found[name] = rows[:, :2].unflatten(-1, (form.heads, -1)).transpose(1, 2).sum(0)
        elif name != "weight":
            found[name] = rows[:, :2].sum(0) if name in _FIRST_ROWS else rows[:, 0, : constant.shape[0]].sum(0)
    return Constants(**found)


def _project(states: Tensor, state: Tensor, constants: Constants, form: Form, reset: Tensor | None) -> Tensor:
    """Return K x and V x of every step, (batch, time, heads, 2, m)."""
    assert constants.weight is not None
    size = constants.real.shape[0]
    before = torch.cat((state.unsqueeze(1), states[:, :-1]), 1)[:, : states.shape[1], :size]
    if reset is not None:
        before = before.masked_fill(reset.unsqueeze(-1), 0.0)
    if form.source != Source.STATE:
        before = before.relu() if form.source == Source.RELU else (before >= form.spike_threshold).to(before.dtype)
    projected = torch.einsum("bthi,hpji->bthpj", before.unflatten(-1, (form.heads, -1)), constants.weight)
    return (projected if constants.bias is None else projected + constants.bias).contiguous()


def _plan_launch(drive: Tensor, constants: Constants, form: Form) -> Launch:
    launch = plan_launch(form, constants.real.shape[0], drive.device)
    assert launch is not None, "checked before by `launch.explain_unsupported`"
    return launch


def _make_arguments(
    drive: Tensor,
    state: Tensor,
    constants: Constants,
    form: Form,
    reset: Tensor | None,
    lengths: Tensor | None,
    states: Tensor,
    projections: Tensor,
    launch: Launch,
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that all kernels share, and their options; absent tensors are replaced by one not read."""
    fields = (*constants, None if reset is None else reset.view(torch.uint8), lengths)
    tensors = [drive, state, *(states if t is None else t for t in fields), states, projections]
    numbers = [0.0 if form.norm_epsilon is None else form.norm_epsilon, form.spike_threshold]
    options: dict[str, Any] = {
        "HEADS": form.heads,
        "SIZE": constants.real.shape[0] // form.heads,
        "PAD": launch.pad,
        "ROWS": launch.rows,
        "PRECISION": launch.precision,
        "BIASED": constants.bias is not None and not form.directions_in_drive,
        "RESETS": reset is not None,
        "RAGGED": lengths is not None,
        "CAYLEY": form.retraction == RetractionKind.CAYLEY,
        "PAIRS": constants.imag is not None,
        "SOURCE": form.source,
        "GIVEN": form.directions_in_drive,
        "ROW_BETA": form.beta_in_drive,
        "AWARE": form.rotation_aware,
        "SLOW": constants.decay is not None,
        "NORM": form.norm_epsilon is not None,
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }
    if launch.streamed:
        options |= {"SOME": launch.some, "BLOCK": launch.block, "INNER": launch.inner}
    return [*(t.contiguous() for t in tensors), *numbers], options
