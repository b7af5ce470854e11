"""The arithmetic of one step, forward and backward, for a tile of rows in registers.

The formulas are those of the README of `adpt_scan`, with k and w formed as vectors. Letters, as there:

- x: the state before the step; p, q: the projections K x and V x; k, v: the unit key and value;
- c, w, ww: c = k·v, w = v - c k, ww = |w|² (ω in the README); s: the squared angle β² ww;
- linear, quadratic: A(s) and B(s); a, b: β A and β² B, for Taylor β and ½β² or 0;
- y, y1, y2: y = Q'x = x + y1 k + y2 w; z = Λy, plus u with AWARE; m1, m2: Q z = z + m1 k + m2 w;
- kx, wz, klw, ...: the dot products k·x, w·z, k·Λw, ...;
- g: the gradient with respect to the state after the step; h1, h2: Q'g = g + h1 k + h2 w; G = Λ'Q'g;
- gk, gw: gradients with respect to k and w; kgw, ...: dot products with them; kG, wG: k·G, w·G.

Flags: PAIRS, complex pairs; SOURCE, what K and V are applied to (`Source`); RETRACTION (`RetractionKind`); AWARE, the
drive is rotated; NORM, a LayerNorm on key and value; DOT, a fixed dot product of key and value. `vectors` is (real,
imag, key gain, value gain, key shift, value shift), and `numbers` (ε of the LayerNorm, threshold of the spikes, the
fixed dot product d, √(1 - d²)).
"""

import triton
import triton.language as tl

from ..form import RetractionKind

__all__ = [
    "advance",
    "apply_source",
    "differentiate_phase",
    "differentiate_source",
    "find_diagonal",
    "multiply",
    "multiply_by_i",
    "multiply_transposed",
    "retreat",
]

CAYLEY = tl.constexpr(RetractionKind.CAYLEY.value)
TAYLOR_ONE = tl.constexpr(RetractionKind.TAYLOR_ONE.value)
TAYLOR_TWO = tl.constexpr(RetractionKind.TAYLOR_TWO.value)


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
    mean = tl.sum(y, 1) / SIZE
    centered = tl.where(within, y - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centered * centered, 1) / SIZE + epsilon)
    standard = centered * inverse[:, None]
    k, k_scale = unit(standard * gain + shift)
    return k, k_scale, standard, (scale, mean, inverse)


@triton.jit
def normalize_backward(g, gain, standard, scalars, within, SIZE: tl.constexpr):
    """Return the gradient of p from that of the output of the LayerNorm."""
    scale, mean, inverse = scalars
    y = standard / inverse[:, None] + mean[:, None]  # computed again: registers are scarce between the two functions
    g = g * gain
    g_mean, along = tl.sum(g, 1) / SIZE, tl.sum(g * standard, 1) / SIZE
    g = tl.where(within, (g - g_mean[:, None] - along[:, None] * standard) * inverse[:, None], 0.0)
    return scale[:, None] * (g - tl.sum(g * y, 1)[:, None] * y)


@triton.jit
def coefficients(s, RETRACTION: tl.constexpr):
    """Return A(s) and B(s), the coefficients of S and S², and their derivatives with respect to s; see csrc/plane.h."""
    if RETRACTION == CAYLEY:
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
def fix_dot(key, v, numbers):
    """Return the unit vector in the plane of key and v whose dot product with v is fixed, and what its backward needs.

    If key is nearly parallel to v, the remainder is mostly rounding error, so it is orthogonalized twice.
    """
    _, _, dot, sine = numbers
    along = tl.sum(key * v, 1)
    e, scale = unit(key - along[:, None] * v)
    e, _ = unit(e - tl.sum(e * v, 1)[:, None] * v)
    return sine * e + dot * v, e, scale, along


@triton.jit
def fix_dot_backward(g, g_v, key, v, e, scale, along, numbers):
    """Return the gradients of key and v from those of the result of `fix_dot` and of v."""
    _, _, dot, sine = numbers
    g_e = (sine * scale)[:, None] * (g - tl.sum(e * g, 1)[:, None] * e)
    turned = tl.sum(v * g_e, 1)
    g_v += dot * g - along[:, None] * g_e - turned[:, None] * key
    g_key = g_e - turned[:, None] * v
    return g_key - tl.sum(key * g_key, 1)[:, None] * key, g_v - tl.sum(v * g_v, 1)[:, None] * v


@triton.jit
def find_rotation(
    x, u, k, w, rotates, beta, real, imag, PAIRS: tl.constexpr, RETRACTION: tl.constexpr, AWARE: tl.constexpr
):
    """Return the scalars of a step, and Λx, Λk, Λw. For Taylor, z is x: kz is k·Λx and wz is w·Λx."""
    lx, lk, lw = multiply(real, imag, x, PAIRS), multiply(real, imag, k, PAIRS), multiply(real, imag, w, PAIRS)
    ww, kx, wx, klx, wlx, klk, klw, wlw = tl.reduce(
        (w * w, k * x, w * x, k * lx, w * lx, k * lk, k * lw, w * lw), 1, add8
    )
    wlk = klw
    if PAIRS:
        wlk = tl.sum(w * lk, 1)
    kz, wz = klx, wlx
    if RETRACTION >= TAYLOR_ONE:
        half = 0.5 if RETRACTION == TAYLOR_TWO else 0.0
        linear, quadratic = tl.full(ww.shape, 1.0, tl.float32), tl.full(ww.shape, half, tl.float32)
        linear_slope, quadratic_slope = linear * 0.0, linear * 0.0
        a, b = tl.where(rotates, beta, 0.0), tl.where(rotates, beta * beta * half, 0.0)
        y1, y2 = -a * wx - b * ww * kx, a * kx - b * wx
        m1 = a * wlx - b * ww * klx - 2 * b * (wx * wlk - kx * wlw)
        m2 = -a * klx - b * wlx + 2 * b * (wx * klk - kx * klw)
    else:
        linear, quadratic, linear_slope, quadratic_slope = coefficients(beta * beta * ww, RETRACTION)
        a, b = tl.where(rotates, beta * linear, 0.0), tl.where(rotates, beta * beta * quadratic, 0.0)
        y1, y2 = -a * wx - b * ww * kx, a * kx - b * wx
        kz += y1 * klk + y2 * klw
        wz += y1 * wlk + y2 * wlw
        if AWARE:
            kz += tl.sum(k * u, 1)
            wz += tl.sum(w * u, 1)
        m1, m2 = a * wz - b * ww * kz, -a * kz - b * wz
    scalars = (ww, kx, wx, klk, klw, wlk, wlw, kz, wz, a, b, linear, quadratic, linear_slope, quadratic_slope)
    return y1, y2, m1, m2, lx, lk, lw, scalars


@triton.jit
def find_directions(p, q, vectors, numbers, within, NORM: tl.constexpr, DOT: tl.constexpr, SIZE: tl.constexpr):
    """Return k and w, and whether there is a rotation."""
    _, _, key_gain, value_gain, key_shift, value_shift = vectors
    if NORM:
        k, k_scale, _, _ = normalize(p, key_gain, key_shift, numbers[0], within, SIZE)
        v, v_scale, _, _ = normalize(q, value_gain, value_shift, numbers[0], within, SIZE)
        c = tl.sum(k * v, 1)
    else:
        k, v, c, k_scale, v_scale = find_plane(p, q)
    rotates = (k_scale != 0) & (v_scale != 0) & (SIZE > 1)  # one dimension has no plane
    if DOT:
        k, _, e_scale, _ = fix_dot(k, v, numbers)
        c = tl.sum(k * v, 1)
        rotates = rotates & (e_scale != 0)
    return k, v - c[:, None] * k, rotates


@triton.jit
def advance(
    x, p, q, u, vectors, beta, numbers, within,
    PAIRS: tl.constexpr, RETRACTION: tl.constexpr, AWARE: tl.constexpr, NORM: tl.constexpr, DOT: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Return the state after a step without a phase."""
    k, w, rotates = find_directions(p, q, vectors, numbers, within, NORM, DOT, SIZE)
    y1, y2, m1, m2, lx, lk, lw, _ = find_rotation(
        x, u, k, w, rotates, beta, vectors[0], vectors[1], PAIRS, RETRACTION, AWARE
    )
    return lx + y1[:, None] * lk + y2[:, None] * lw + m1[:, None] * k + m2[:, None] * w + u


@triton.jit
def find_diagonal(x, p, q, vectors, beta, numbers, within, RETRACTION: tl.constexpr, NORM: tl.constexpr,
                  DOT: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Return the diagonal of M = Q Λ̄ Q' for a real spectrum (eq:diag_M); see the README of `adpt_step`."""
    k, w, rotates = find_directions(p, q, vectors, numbers, within, NORM, DOT, SIZE)
    real = vectors[0]
    _, _, _, _, _, _, _, scalars = find_rotation(x, x, k, w, rotates, beta, real, real, False, RETRACTION, False)
    ww, _, _, klk, klw, _, wlw, _, _, a, b, _, _, _, _ = scalars
    on_k = a[:, None] * w - (b * ww)[:, None] * k
    on_w = -a[:, None] * k - b[:, None] * w
    kk = a * a * wlw - 2 * a * b * ww * klw + b * b * ww * ww * klk
    kw = -(a * a * klw + a * b * wlw - a * b * ww * klk - b * b * ww * klw)
    both = a * a * klk + 2 * a * b * klw + b * b * wlw
    quadratic = kk[:, None] * k * k + 2 * kw[:, None] * k * w + both[:, None] * w * w
    return real + 2 * real * (k * on_k + w * on_w) + quadratic


@triton.jit
def differentiate_rotation(
    x, u, g, k, v, w, c, rotates, beta, real, imag, PAIRS: tl.constexpr, RETRACTION: tl.constexpr, AWARE: tl.constexpr
):
    """Return the gradients of x, of the unit vectors k and v, of u, Λ̄ and β, for Q Λ̄ Q'."""
    y1, y2, m1, m2, lx, lk, lw, scalars = find_rotation(x, u, k, w, rotates, beta, real, imag, PAIRS, RETRACTION, AWARE)
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
    g_k = gk - kgk[:, None] * k - c[:, None] * gw - kgw[:, None] * w
    g_v = gw - wgw[:, None] * v
    g_x = G + g_kx[:, None] * k + g_wx[:, None] * w
    g_u = rotated if AWARE else g
    return g_x, g_k, g_v, g_u, g_real, g_imag, g_beta


@triton.jit
def differentiate_taylor(x, u, g, k, v, w, c, rotates, beta, real, imag, PAIRS: tl.constexpr, RETRACTION: tl.constexpr):
    """Return the gradients of x, of the unit vectors k and v, of u, Λ̄ and β, for a Taylor approximation.

    Reverse mode through the scalars of `find_rotation`; g_kx, ... are the gradients of kx, ....
    """
    y1, y2, m1, m2, lx, lk, lw, scalars = find_rotation(x, u, k, w, rotates, beta, real, imag, PAIRS, RETRACTION, False)
    ww, kx, wx, klk, klw, wlk, wlw, klx, wlx, a, b, _, _, _, _ = scalars
    lg = multiply_transposed(real, imag, g, PAIRS)
    kg, wg, klg, wlg = tl.reduce((k * g, w * g, k * lg, w * lg), 1, add4)
    g_kx = -b * ww * klg + a * wlg + 2 * b * (wlw * kg - klw * wg)
    g_wx = -a * klg - b * wlg + 2 * b * (klk * wg - wlk * kg)
    g_klx, g_wlx = -b * ww * kg - a * wg, a * kg - b * wg
    g_ww = -b * (kx * klg + klx * kg)
    g_klk, g_klw, g_wlk, g_wlw = 2 * b * wx * wg, -2 * b * kx * wg, -2 * b * wx * kg, 2 * b * kx * kg
    g_a = kx * wlg - wx * klg + wlx * kg - klx * wg
    g_b = -ww * kx * klg - wx * wlg - ww * klx * kg - wlx * wg
    g_b += 2 * (kx * (wlw * kg - klw * wg) + wx * (klk * wg - wlk * kg))
    g_beta = g_a
    if RETRACTION == TAYLOR_TWO:
        g_beta += beta * g_b
    g_beta = tl.where(rotates, g_beta, 0.0)
    g_lx = g + g_klx[:, None] * k + g_wlx[:, None] * w
    g_lk = y1[:, None] * g + g_klk[:, None] * k + g_wlk[:, None] * w
    g_lw = y2[:, None] * g + g_klw[:, None] * k + g_wlw[:, None] * w
    g_real = g_lx * x + g_lk * k + g_lw * w
    g_imag = g_real
    if PAIRS:
        g_imag = g_lx * multiply_by_i(x) + g_lk * multiply_by_i(k) + g_lw * multiply_by_i(w)
    g_x = multiply_transposed(real, imag, g_lx, PAIRS) + g_kx[:, None] * k + g_wx[:, None] * w
    gk = multiply_transposed(real, imag, g_lk, PAIRS) + m1[:, None] * g + g_kx[:, None] * x + g_klx[:, None] * lx
    gk += g_klk[:, None] * lk + g_klw[:, None] * lw
    gw = multiply_transposed(real, imag, g_lw, PAIRS) + m2[:, None] * g + g_wx[:, None] * x + g_wlx[:, None] * lx
    gw += g_wlw[:, None] * lw + g_wlk[:, None] * lk + 2 * g_ww[:, None] * w
    kgw = tl.sum(k * gw, 1)
    gw -= kgw[:, None] * k
    g_k = gk - c[:, None] * gw - kgw[:, None] * w
    g_k -= tl.sum(k * g_k, 1)[:, None] * k
    g_v = gw - tl.sum(v * gw, 1)[:, None] * v
    return g_x, g_k, g_v, g, g_real, g_imag, g_beta


@triton.jit
def retreat(
    x, p, q, u, g, vectors, beta, numbers, within,
    PAIRS: tl.constexpr, RETRACTION: tl.constexpr, AWARE: tl.constexpr, NORM: tl.constexpr, DOT: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Return the gradients of x (without the path through K and V), p, q, u, Λ̄, β, and of the LayerNorm.

    Those of Λ̄ and of the LayerNorm are contributions, to be summed over steps and sequences.
    """
    real, imag, key_gain, value_gain, key_shift, value_shift = vectors
    if NORM:
        k, k_scale, key_standard, key_scalars = normalize(p, key_gain, key_shift, numbers[0], within, SIZE)
        v, v_scale, value_standard, value_scalars = normalize(q, value_gain, value_shift, numbers[0], within, SIZE)
        c = tl.sum(k * v, 1)
    else:
        k, v, c, k_scale, v_scale = find_plane(p, q)
    rotates = (k_scale != 0) & (v_scale != 0) & (SIZE > 1)  # one dimension has no plane
    if DOT:
        key = k
        k, e, e_scale, along = fix_dot(key, v, numbers)
        c = tl.sum(k * v, 1)
        rotates = rotates & (e_scale != 0)
    w = v - c[:, None] * k
    if RETRACTION >= TAYLOR_ONE:
        g_x, g_k, g_v, g_u, g_real, g_imag, g_beta = differentiate_taylor(
            x, u, g, k, v, w, c, rotates, beta, real, imag, PAIRS, RETRACTION
        )
    else:
        g_x, g_k, g_v, g_u, g_real, g_imag, g_beta = differentiate_rotation(
            x, u, g, k, v, w, c, rotates, beta, real, imag, PAIRS, RETRACTION, AWARE
        )
    if DOT:
        g_k, g_v = fix_dot_backward(g_k, g_v, key, v, e, e_scale, along, numbers)
    g_p = tl.where(rotates, k_scale, 0.0)[:, None] * g_k
    g_q = tl.where(rotates, v_scale, 0.0)[:, None] * g_v
    g_key_shift, g_value_shift = g_p, g_q
    g_key_gain, g_value_gain = g_p, g_q
    if NORM:
        g_key_gain, g_value_gain = g_p * key_standard, g_q * value_standard
        g_p = normalize_backward(g_p, key_gain, key_standard, key_scalars, within, SIZE)
        g_q = normalize_backward(g_q, value_gain, value_standard, value_scalars, within, SIZE)
    return g_x, g_p, g_q, g_u, g_real, g_imag, g_beta, g_key_gain, g_value_gain, g_key_shift, g_value_shift


@triton.jit
def differentiate_phase(g, y):
    """Return the gradient of cos φ and sin φ of each pair, next to each other, of P y; g is that of P y."""
    g1, g2 = tl.split(tl.reshape(g, (g.shape[0], g.shape[1] // 2, 2)))
    y1, y2 = tl.split(tl.reshape(y, (y.shape[0], y.shape[1] // 2, 2)))
    return tl.reshape(tl.join(g1 * y1 + g2 * y2, g2 * y1 - g1 * y2), (g.shape[0], g.shape[1]))


@triton.jit
def apply_source(x, numbers, SOURCE: tl.constexpr):
    """Return what K and V are applied to."""
    if SOURCE == 1:
        x = tl.where(x > 0, x, x * 0.0)  # keeps a NaN
    if SOURCE == 2:
        x = tl.where(x >= numbers[1], 1.0, x * 0.0)
    return x


@triton.jit
def differentiate_source(x, numbers, SOURCE: tl.constexpr):
    """Return the derivative of `apply_source`, for spikes the surrogate of `ops/_unit_vectors.py`."""
    slope = tl.full(x.shape, 1.0, tl.float32)
    if SOURCE == 1:
        slope = tl.where(x > 0, 1.0, 0.0)
    if SOURCE == 2:
        slope = tl.where(tl.abs(x - numbers[1]) <= 0.5, 1.0, 0.0)
    return slope
