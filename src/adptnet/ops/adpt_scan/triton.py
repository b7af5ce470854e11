"""The ADPT recurrence in Triton, for GPUs: one program for a tile of sequences, which runs all their steps.

Covers float32, one head, a real spectrum, key and value of the state itself, the exponential and Cayley, where the
state fits (`launch.py`). The formulas are those of the README beside this file, with k and w formed as vectors.
Imported only where it is used. It has never run on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .form import Constants, Form, Retracted
from .launch import STAGES, Launch, launch_of

__all__ = ["backward", "backward_kernel", "forward", "forward_kernel"]

ROWS = 16  # sequences of a program: the least that a matrix product takes


@triton.jit
def unit(x):
    """Rows at length one, and one over their length; both zero for a row that counts as zero."""
    largest = tl.max(tl.abs(x), 1)
    silent = largest < 1.2037062e-35  # 1024 times the smallest normal number
    shrink = 1.0 / tl.where(silent, 1.0, largest)
    x = x * shrink[:, None]
    squared = tl.sum(x * x, 1)
    inverse = tl.where(silent, 0.0, 1.0 / tl.sqrt(tl.where(silent, 1.0, squared)))
    return x * inverse[:, None], shrink * inverse


@triton.jit
def coefficients(s, CAYLEY: tl.constexpr):
    """Of S and S², and their derivatives with respect to the squared angle; see kernel.cpp."""
    if CAYLEY:
        linear = 1.0 / (1.0 + s / 4)
        quadratic = linear / 2
        linear_slope = -linear * linear / 4
        quadratic_slope = linear_slope / 2
    else:
        near = s < 4.0
        small = tl.where(near, s, 0.0)
        third = 1 / 6.0 - small * (1 / 120.0 - small * (1 / 5040.0 - small * (1 / 362880.0 - small * (
            1 / 39916800.0 - small * (1 / 6227020800.0 - small / 1307674368000.0)))))  # fmt: skip
        fourth = 1 / 24.0 - small * (1 / 720.0 - small * (1 / 40320.0 - small * (1 / 3628800.0 - small * (
            1 / 479001600.0 - small * (1 / 87178291200.0 - small / 20922789888000.0)))))  # fmt: skip
        angle = tl.sqrt(tl.where(near, 4.0, s))
        half = tl.sin(angle / 2) / angle
        linear = tl.where(near, 1.0 - small * third, tl.sin(angle) / angle)
        quadratic = tl.where(near, 0.5 - small * fourth, 2 * half * half)
        safe = tl.where(near, 1.0, s)
        third = tl.where(near, third, (1.0 - linear) / safe)
        fourth = tl.where(near, fourth, (0.5 - quadratic) / safe)
        linear_slope = (third - quadratic) / 2
        quadratic_slope = fourth - third / 2
    return linear, quadratic, linear_slope, quadratic_slope


@triton.jit(do_not_specialize=["batch", "steps"])  # or another batch or length would be another compilation
def forward_kernel(
    drive, initial, real, weight, bias, beta, reset, lengths, states, batch, steps, size,
    BIASED: tl.constexpr, RESETS: tl.constexpr, RAGGED: tl.constexpr, CAYLEY: tl.constexpr, ROWS: tl.constexpr,
    PAD: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """`weight` is (2, size, size); PAD is the size, up to a power of two. With HELD, K and V are loaded once."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, PAD)
    there, within = row < batch, column < size
    mask = there[:, None] & within[None, :]
    eigen = tl.load(real + column, within, 0.0)[None, :]
    # K' and V', so that rows of states are multiplied from the left
    corner = column[None, :] * size + column[:, None]
    square = within[:, None] & within[None, :]
    if HELD:
        key_weight = tl.load(weight + corner, square, 0.0)
        value_weight = tl.load(weight + size * size + corner, square, 0.0)
    step = tl.load(beta)
    last = steps
    if RAGGED:
        last = tl.load(lengths + row, there, 0)
    x = tl.load(initial + row[:, None] * size + column[None, :], mask, 0.0)
    for t in range(steps):
        if RESETS:
            fresh = tl.load(reset + row * steps + t, there, 0) != 0
            x = tl.where(fresh[:, None], 0.0, x)
        if not HELD:
            key_weight = tl.load(weight + corner, square, 0.0)
        p = tl.dot(x, key_weight, input_precision="ieee")
        if BIASED:
            p += tl.load(bias + column, within, 0.0)[None, :]
        if not HELD:
            value_weight = tl.load(weight + size * size + corner, square, 0.0)
        q = tl.dot(x, value_weight, input_precision="ieee")
        if BIASED:
            q += tl.load(bias + size + column, within, 0.0)[None, :]
        k, key_scale = unit(p)
        v, value_scale = unit(q)
        turns = (key_scale > 0) & (value_scale > 0)
        w = v - tl.sum(k * v, 1)[:, None] * k
        ww = tl.sum(w * w, 1)
        linear, quadratic, _, _ = coefficients(step * step * ww, CAYLEY)
        a = tl.where(turns, step * linear, 0.0)
        b = tl.where(turns, step * step * quadratic, 0.0)
        kx, wx = tl.sum(k * x, 1), tl.sum(w * x, 1)
        y1, y2 = -a * wx - b * ww * kx, a * kx - b * wx
        z = eigen * (x + y1[:, None] * k + y2[:, None] * w)
        kz, wz = tl.sum(k * z, 1), tl.sum(w * z, 1)
        m1, m2 = a * wz - b * ww * kz, -a * kz - b * wz
        place = (row[:, None] * steps + t) * size + column[None, :]
        following = z + m1[:, None] * k + m2[:, None] * w + tl.load(drive + place, mask, 0.0)
        if RAGGED:
            alive = (t < last)[:, None]
            x = tl.where(alive, following, x)
            tl.store(states + place, tl.where(alive, following, 0.0), mask)
        else:
            x = following
            tl.store(states + place, x, mask)


@triton.jit(do_not_specialize=["batch", "steps"])
def backward_kernel(
    gradient, states, initial, real, weight, bias, beta, reset, lengths,
    to_drive, to_initial, to_key, to_value, to_real, to_beta, batch, steps, size,
    BIASED: tl.constexpr, RESETS: tl.constexpr, RAGGED: tl.constexpr, CAYLEY: tl.constexpr, ROWS: tl.constexpr,
    PAD: tl.constexpr,
):  # fmt: skip
    """`to_key`, `to_value`, of K x and V x, are (batch, steps, size), `to_real` (batch, size), `to_beta` (batch,)."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, PAD)
    there, within = row < batch, column < size
    mask = there[:, None] & within[None, :]
    eigen = tl.load(real + column, within, 0.0)[None, :]
    square = within[:, None] & within[None, :]
    corner = column[None, :] * size + column[:, None]
    turned = column[:, None] * size + column[None, :]
    step = tl.load(beta)
    last = steps
    if RAGGED:
        last = tl.load(lengths + row, there, 0)
    carry = tl.zeros((ROWS, PAD), dtype=tl.float32)
    eigen_sum = tl.zeros((ROWS, PAD), dtype=tl.float32)
    beta_sum = tl.zeros((ROWS,), dtype=tl.float32)
    for i in range(steps):
        t = steps - 1 - i
        place = (row[:, None] * steps + t) * size + column[None, :]
        inside = mask & (column * 0 + t > 0)[None, :]
        x = tl.load(states + place - size, inside, 0.0)
        x += tl.load(initial + row[:, None] * size + column[None, :], mask & ~inside, 0.0)
        if RESETS:
            fresh = tl.load(reset + row * steps + t, there, 0) != 0
            x = tl.where(fresh[:, None], 0.0, x)
        g = carry + tl.load(gradient + place, mask, 0.0)
        if RAGGED:
            alive = t < last
            g = tl.where(alive[:, None], g, 0.0)
            x = tl.where(alive[:, None], x, 0.0)  # what lies behind the end is no state
        tl.store(to_drive + place, g, mask)
        p = tl.dot(x, tl.load(weight + corner, square, 0.0), input_precision="ieee")
        if BIASED:
            p += tl.load(bias + column, within, 0.0)[None, :]
        q = tl.dot(x, tl.load(weight + size * size + corner, square, 0.0), input_precision="ieee")
        if BIASED:
            q += tl.load(bias + size + column, within, 0.0)[None, :]
        k, key_scale = unit(p)
        v, value_scale = unit(q)
        turns = (key_scale > 0) & (value_scale > 0)
        c = tl.sum(k * v, 1)
        w = v - c[:, None] * k
        ww = tl.sum(w * w, 1)
        linear, quadratic, linear_slope, quadratic_slope = coefficients(step * step * ww, CAYLEY)
        a = tl.where(turns, step * linear, 0.0)
        b = tl.where(turns, step * step * quadratic, 0.0)
        kx, wx = tl.sum(k * x, 1), tl.sum(w * x, 1)
        y1, y2 = -a * wx - b * ww * kx, a * kx - b * wx
        y = x + y1[:, None] * k + y2[:, None] * w
        z = eigen * y
        kz, wz = tl.sum(k * z, 1), tl.sum(w * z, 1)
        m1, m2 = a * wz - b * ww * kz, -a * kz - b * wz
        # From here on backwards through the lines of the forward.
        on_m1, on_m2 = tl.sum(k * g, 1), tl.sum(w * g, 1)
        on_a, on_b = wz * on_m1 - kz * on_m2, -ww * kz * on_m1 - wz * on_m2
        on_ww = -b * kz * on_m1
        on_kz, on_wz = -b * ww * on_m1 - a * on_m2, a * on_m1 - b * on_m2
        on_z = g + on_kz[:, None] * k + on_wz[:, None] * w
        eigen_sum += on_z * y
        on_y = eigen * on_z
        on_y1, on_y2 = tl.sum(k * on_y, 1), tl.sum(w * on_y, 1)
        on_a += kx * on_y2 - wx * on_y1
        on_b += -ww * kx * on_y1 - wx * on_y2
        on_ww += -b * kx * on_y1
        on_kx, on_wx = a * on_y2 - b * ww * on_y1, -a * on_y1 - b * on_y2
        on_s = step * (on_a * linear_slope + on_b * step * quadratic_slope)
        on_beta = on_a * linear + 2 * step * (on_b * quadratic + on_s * ww)
        beta_sum += tl.where(turns, on_beta, 0.0)
        on_ww += on_s * step * step
        on_k = m1[:, None] * g + on_kz[:, None] * z + y1[:, None] * on_y + on_kx[:, None] * x
        on_w = m2[:, None] * g + on_wz[:, None] * z + y2[:, None] * on_y + on_wx[:, None] * x + 2 * on_ww[:, None] * w
        on_c = -tl.sum(k * on_w, 1)
        on_k += on_c[:, None] * v - c[:, None] * on_w
        on_v = on_w + on_c[:, None] * k
        on_p = key_scale[:, None] * (on_k - tl.sum(k * on_k, 1)[:, None] * k)
        on_q = value_scale[:, None] * (on_v - tl.sum(v * on_v, 1)[:, None] * v)
        on_p, on_q = tl.where(turns[:, None], on_p, 0.0), tl.where(turns[:, None], on_q, 0.0)
        tl.store(to_key + place, on_p, mask)
        tl.store(to_value + place, on_q, mask)
        carry = on_y + on_kx[:, None] * k + on_wx[:, None] * w
        carry += tl.dot(on_p, tl.load(weight + turned, square, 0.0), input_precision="ieee")
        carry += tl.dot(on_q, tl.load(weight + size * size + turned, square, 0.0), input_precision="ieee")
        if RESETS:
            carry = tl.where(fresh[:, None], 0.0, carry)
    tl.store(to_initial + row[:, None] * size + column[None, :], carry, mask)
    tl.store(to_real + row[:, None] * size + column[None, :], eigen_sum, mask)
    tl.store(to_beta + row, beta_sum, there)


def forward(
    drive: Tensor, state: Tensor, constants: Constants, form: Form, reset: Tensor | None, lengths: Tensor | None
) -> Tensor:
    """All states, (batch, time, n)."""
    batch, steps, size = drive.shape
    states = torch.empty(drive.shape, dtype=drive.dtype, device=drive.device)
    if states.numel():
        launch = _launch(drive)
        given, options = _given(constants, form, reset, lengths, states, launch)
        with torch.cuda.device_of(drive):  # Triton launches on the current device
            forward_kernel[(triton.cdiv(batch, ROWS),)](
                drive.contiguous(), state.contiguous(), *given, states, batch, steps, size, HELD=launch.held, **options
            )
    return states


def backward(
    gradient: Tensor,
    states: Tensor,
    state: Tensor,
    constants: Constants,
    form: Form,
    reset: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Constants]:
    """Derivatives with respect to the drive, the initial state and each of the constants."""
    batch, steps, size = gradient.shape
    new = gradient.new_empty if gradient.numel() else gradient.new_zeros  # the kernel writes every entry
    to_drive, to_initial, to_projections = new(gradient.shape), new(state.shape), new(2, batch, steps, size)
    to_real, to_beta = new(batch, size), new(batch)
    if gradient.numel():
        given, options = _given(constants, form, reset, lengths, states, _launch(gradient))
        with torch.cuda.device_of(gradient):
            backward_kernel[(triton.cdiv(batch, ROWS),)](
                gradient.contiguous(), states, state.contiguous(), *given,
                to_drive, to_initial, *to_projections.unbind(0), to_real, to_beta, batch, steps, size, **options,
            )  # fmt: skip
    before = torch.cat((state.unsqueeze(1), states[:, :-1]), 1)
    if reset is not None:
        before = before.masked_fill(reset.unsqueeze(-1), 0.0)
    weight = torch.einsum("kbti,btj->kij", to_projections, before).unsqueeze(0)
    bias = None if constants.bias is None else to_projections.sum((1, 2)).unsqueeze(0)
    return to_drive, to_initial, Constants(to_real.sum(0), weight=weight, bias=bias, beta=to_beta.sum(0, keepdim=True))


def _launch(values: Tensor) -> Launch:
    found = launch_of(values.shape[-1], str(values.device))
    assert found is not None, "asked of `launch.why_not` before"
    return found


def _given(
    constants: Constants, form: Form, reset: Tensor | None, lengths: Tensor | None, states: Tensor, launch: Launch
) -> tuple[list[Tensor], dict[str, object]]:
    """What both kernels take; in the place of what is not given, something that is not read."""
    assert constants.weight is not None
    assert constants.beta is not None
    bias = constants.bias
    given = [
        constants.real.contiguous(),
        constants.weight.contiguous(),
        states if bias is None else bias.contiguous(),
        constants.beta.contiguous(),
        states if reset is None else reset.contiguous().view(torch.uint8),
        states if lengths is None else lengths.contiguous(),
    ]
    options: dict[str, object] = {
        "BIASED": bias is not None,
        "RESETS": reset is not None,
        "RAGGED": lengths is not None,
        "CAYLEY": form.retracted == Retracted.CAYLEY,
        "ROWS": ROWS,
        "PAD": launch.pad,
        "num_warps": launch.warps,
        "num_stages": STAGES,
    }
    return given, options
