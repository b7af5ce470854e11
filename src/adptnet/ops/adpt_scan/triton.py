"""The ADPT recurrence in Triton, for GPUs: each program runs all steps of a tile of sequences.

Supports float32, one head, a real spectrum, key and value computed from the state itself, the exponential and the
Cayley map, for states that fit into shared memory (`launch.py`). Imported only when it is used. It has never run on a
GPU.

The formulas are those of the README beside this file, with k and w formed as vectors. Letters, as there:

- x: the state before the step; p, q: the projections K x and V x; k, v: the unit key and value;
- c, w, ww: c = k·v, w = v - c k, ww = |w|² (ω in the README); s: the squared angle β² ww;
- linear, quadratic: A(s) and B(s); a, b: β A and β² B;
- y, y1, y2: y = Q'x = x + y1 k + y2 w; z = Λy; m1, m2: Q z = z + m1 k + m2 w;
- kx, wz, ...: the dot products k·x, w·z, ...;
- g: the gradient with respect to the state after the step; g_y, g_kx, ...: those with respect to y, kx, ...
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .form import Constants, Form, RetractionKind
from .launch import STAGES, Launch, plan_launch

__all__ = ["backward", "backward_kernel", "forward", "forward_kernel"]

ROWS = 16  # sequences per program: the minimum of a matrix product


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


@triton.jit(do_not_specialize=["batch", "steps"])  # otherwise every batch size and length is compiled anew
def forward_kernel(
    drive, initial, real, weight, bias, beta, reset, lengths, states, batch, steps, size,
    BIASED: tl.constexpr, RESETS: tl.constexpr, RAGGED: tl.constexpr, CAYLEY: tl.constexpr, ROWS: tl.constexpr,
    PAD: tl.constexpr, RESIDENT: tl.constexpr,
):  # fmt: skip
    """Run all steps of ROWS sequences.

    `weight` is (2, size, size). PAD is `size` rounded up to a power of two. With RESIDENT, K and V are loaded once.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, PAD)
    valid, within = row < batch, column < size
    mask = valid[:, None] & within[None, :]
    spectrum = tl.load(real + column, within, 0.0)[None, :]
    # States are rows, so p = x K': load K' and V'.
    transposed = column[None, :] * size + column[:, None]
    square = within[:, None] & within[None, :]
    if RESIDENT:
        key_weight = tl.load(weight + transposed, square, 0.0)
        value_weight = tl.load(weight + size * size + transposed, square, 0.0)
    beta_value = tl.load(beta)
    last = steps
    if RAGGED:
        last = tl.load(lengths + row, valid, 0)
    x = tl.load(initial + row[:, None] * size + column[None, :], mask, 0.0)
    for t in range(steps):
        if RESETS:
            is_reset = tl.load(reset + row * steps + t, valid, 0) != 0
            x = tl.where(is_reset[:, None], 0.0, x)
        if not RESIDENT:
            key_weight = tl.load(weight + transposed, square, 0.0)
        p = tl.dot(x, key_weight, input_precision="ieee")
        if BIASED:
            p += tl.load(bias + column, within, 0.0)[None, :]
        if not RESIDENT:
            value_weight = tl.load(weight + size * size + transposed, square, 0.0)
        q = tl.dot(x, value_weight, input_precision="ieee")
        if BIASED:
            q += tl.load(bias + size + column, within, 0.0)[None, :]
        k, key_scale = unit(p)
        v, value_scale = unit(q)
        rotates = (key_scale > 0) & (value_scale > 0)
        w = v - tl.sum(k * v, 1)[:, None] * k
        ww = tl.sum(w * w, 1)
        linear, quadratic, _, _ = coefficients(beta_value * beta_value * ww, CAYLEY)
        a = tl.where(rotates, beta_value * linear, 0.0)
        b = tl.where(rotates, beta_value * beta_value * quadratic, 0.0)
        kx, wx = tl.sum(k * x, 1), tl.sum(w * x, 1)
        y1, y2 = -a * wx - b * ww * kx, a * kx - b * wx
        z = spectrum * (x + y1[:, None] * k + y2[:, None] * w)
        kz, wz = tl.sum(k * z, 1), tl.sum(w * z, 1)
        m1, m2 = a * wz - b * ww * kz, -a * kz - b * wz
        position = (row[:, None] * steps + t) * size + column[None, :]
        following = z + m1[:, None] * k + m2[:, None] * w + tl.load(drive + position, mask, 0.0)
        if RAGGED:
            alive = (t < last)[:, None]
            x = tl.where(alive, following, x)
            tl.store(states + position, tl.where(alive, following, 0.0), mask)
        else:
            x = following
            tl.store(states + position, x, mask)


@triton.jit(do_not_specialize=["batch", "steps"])
def backward_kernel(
    gradient, states, initial, real, weight, bias, beta, reset, lengths,
    to_drive, to_initial, to_key, to_value, to_real, to_beta, batch, steps, size,
    BIASED: tl.constexpr, RESETS: tl.constexpr, RAGGED: tl.constexpr, CAYLEY: tl.constexpr, ROWS: tl.constexpr,
    PAD: tl.constexpr,
):  # fmt: skip
    """Run the backward pass of all steps of ROWS sequences.

    `to_key` and `to_value`, the gradients of K x and V x, are (batch, steps, size); `to_real` is (batch, size) and
    `to_beta` (batch,), summed over the steps.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, PAD)
    valid, within = row < batch, column < size
    mask = valid[:, None] & within[None, :]
    spectrum = tl.load(real + column, within, 0.0)[None, :]
    square = within[:, None] & within[None, :]
    transposed = column[None, :] * size + column[:, None]
    untransposed = column[:, None] * size + column[None, :]
    beta_value = tl.load(beta)
    last = steps
    if RAGGED:
        last = tl.load(lengths + row, valid, 0)
    carry = tl.zeros((ROWS, PAD), dtype=tl.float32)
    spectrum_sum = tl.zeros((ROWS, PAD), dtype=tl.float32)
    beta_sum = tl.zeros((ROWS,), dtype=tl.float32)
    for i in range(steps):
        t = steps - 1 - i
        position = (row[:, None] * steps + t) * size + column[None, :]
        inside = mask & (column * 0 + t > 0)[None, :]
        x = tl.load(states + position - size, inside, 0.0)
        x += tl.load(initial + row[:, None] * size + column[None, :], mask & ~inside, 0.0)
        if RESETS:
            is_reset = tl.load(reset + row * steps + t, valid, 0) != 0
            x = tl.where(is_reset[:, None], 0.0, x)
        g = carry + tl.load(gradient + position, mask, 0.0)
        if RAGGED:
            alive = t < last
            g = tl.where(alive[:, None], g, 0.0)
            x = tl.where(alive[:, None], x, 0.0)  # past the end there is no state
        tl.store(to_drive + position, g, mask)
        p = tl.dot(x, tl.load(weight + transposed, square, 0.0), input_precision="ieee")
        if BIASED:
            p += tl.load(bias + column, within, 0.0)[None, :]
        q = tl.dot(x, tl.load(weight + size * size + transposed, square, 0.0), input_precision="ieee")
        if BIASED:
            q += tl.load(bias + size + column, within, 0.0)[None, :]
        k, key_scale = unit(p)
        v, value_scale = unit(q)
        rotates = (key_scale > 0) & (value_scale > 0)
        c = tl.sum(k * v, 1)
        w = v - c[:, None] * k
        ww = tl.sum(w * w, 1)
        linear, quadratic, linear_slope, quadratic_slope = coefficients(beta_value * beta_value * ww, CAYLEY)
        a = tl.where(rotates, beta_value * linear, 0.0)
        b = tl.where(rotates, beta_value * beta_value * quadratic, 0.0)
        kx, wx = tl.sum(k * x, 1), tl.sum(w * x, 1)
        y1, y2 = -a * wx - b * ww * kx, a * kx - b * wx
        y = x + y1[:, None] * k + y2[:, None] * w
        z = spectrum * y
        kz, wz = tl.sum(k * z, 1), tl.sum(w * z, 1)
        m1, m2 = a * wz - b * ww * kz, -a * kz - b * wz
        # The gradients of the lines of the forward pass, in reverse order.
        g_m1, g_m2 = tl.sum(k * g, 1), tl.sum(w * g, 1)
        g_a, g_b = wz * g_m1 - kz * g_m2, -ww * kz * g_m1 - wz * g_m2
        g_ww = -b * kz * g_m1
        g_kz, g_wz = -b * ww * g_m1 - a * g_m2, a * g_m1 - b * g_m2
        g_z = g + g_kz[:, None] * k + g_wz[:, None] * w
        spectrum_sum += g_z * y
        g_y = spectrum * g_z
        g_y1, g_y2 = tl.sum(k * g_y, 1), tl.sum(w * g_y, 1)
        g_a += kx * g_y2 - wx * g_y1
        g_b += -ww * kx * g_y1 - wx * g_y2
        g_ww += -b * kx * g_y1
        g_kx, g_wx = a * g_y2 - b * ww * g_y1, -a * g_y1 - b * g_y2
        g_s = beta_value * (g_a * linear_slope + g_b * beta_value * quadratic_slope)
        g_beta = g_a * linear + 2 * beta_value * (g_b * quadratic + g_s * ww)
        beta_sum += tl.where(rotates, g_beta, 0.0)
        g_ww += g_s * beta_value * beta_value
        g_k = m1[:, None] * g + g_kz[:, None] * z + y1[:, None] * g_y + g_kx[:, None] * x
        g_w = m2[:, None] * g + g_wz[:, None] * z + y2[:, None] * g_y + g_wx[:, None] * x + 2 * g_ww[:, None] * w
        g_c = -tl.sum(k * g_w, 1)
        g_k += g_c[:, None] * v - c[:, None] * g_w
        g_v = g_w + g_c[:, None] * k
        g_p = key_scale[:, None] * (g_k - tl.sum(k * g_k, 1)[:, None] * k)
        g_q = value_scale[:, None] * (g_v - tl.sum(v * g_v, 1)[:, None] * v)
        g_p, g_q = tl.where(rotates[:, None], g_p, 0.0), tl.where(rotates[:, None], g_q, 0.0)
        tl.store(to_key + position, g_p, mask)
        tl.store(to_value + position, g_q, mask)
        carry = g_y + g_kx[:, None] * k + g_wx[:, None] * w
        carry += tl.dot(g_p, tl.load(weight + untransposed, square, 0.0), input_precision="ieee")
        carry += tl.dot(g_q, tl.load(weight + size * size + untransposed, square, 0.0), input_precision="ieee")
        if RESETS:
            carry = tl.where(is_reset[:, None], 0.0, carry)
    tl.store(to_initial + row[:, None] * size + column[None, :], carry, mask)
    tl.store(to_real + row[:, None] * size + column[None, :], spectrum_sum, mask)
    tl.store(to_beta + row, beta_sum, valid)


def forward(
    drive: Tensor, state: Tensor, constants: Constants, form: Form, reset: Tensor | None, lengths: Tensor | None
) -> Tensor:
    """Return all states, (batch, time, n).

    Args:
        drive, state, constants, form, reset, lengths: As in `adpt_scan`.
    """
    batch, steps, size = drive.shape
    states = torch.empty(drive.shape, dtype=drive.dtype, device=drive.device)
    if states.numel():
        launch = _plan_launch(drive)
        tensors, options = _make_arguments(constants, form, reset, lengths, states, launch)
        with torch.cuda.device_of(drive):  # Triton launches on the current device
            forward_kernel[(triton.cdiv(batch, ROWS),)](
                drive.contiguous(),
                state.contiguous(),
                *tensors,
                states,
                batch,
                steps,
                size,
                RESIDENT=launch.resident,
                **options,
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
    """Return the gradients of the drive, the initial state and each of the constants.

    Args:
        gradient: With respect to the states.
        states: The result of `forward`.
        state, constants, form, reset, lengths: As in `adpt_scan`.
    """
    batch, steps, size = gradient.shape
    new = gradient.new_empty if gradient.numel() else gradient.new_zeros  # the kernel writes every entry
    to_drive, to_initial, to_projections = new(gradient.shape), new(state.shape), new(2, batch, steps, size)
    to_real, to_beta = new(batch, size), new(batch)
    if gradient.numel():
        tensors, options = _make_arguments(constants, form, reset, lengths, states, _plan_launch(gradient))
        with torch.cuda.device_of(gradient):
            backward_kernel[(triton.cdiv(batch, ROWS),)](
                gradient.contiguous(), states, state.contiguous(), *tensors,
                to_drive, to_initial, *to_projections.unbind(0), to_real, to_beta, batch, steps, size, **options,
            )  # fmt: skip
    before = torch.cat((state.unsqueeze(1), states[:, :-1]), 1)
    if reset is not None:
        before = before.masked_fill(reset.unsqueeze(-1), 0.0)
    weight = torch.einsum("kbti,btj->kij", to_projections, before).unsqueeze(0)
    bias = None if constants.bias is None else to_projections.sum((1, 2)).unsqueeze(0)
    return to_drive, to_initial, Constants(to_real.sum(0), weight=weight, bias=bias, beta=to_beta.sum(0, keepdim=True))


def _plan_launch(values: Tensor) -> Launch:
    launch = plan_launch(values.shape[-1], str(values.device))
    assert launch is not None, "checked before by `launch.explain_unsupported`"
    return launch


def _make_arguments(
    constants: Constants, form: Form, reset: Tensor | None, lengths: Tensor | None, states: Tensor, launch: Launch
) -> tuple[list[Tensor], dict[str, object]]:
    """Return the tensors and options that both kernels take; absent tensors are replaced by one that is not read."""
    assert constants.weight is not None
    assert constants.beta is not None
    bias = constants.bias
    tensors = [
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
        "CAYLEY": form.retraction == RetractionKind.CAYLEY,
        "ROWS": ROWS,
        "PAD": launch.pad,
        "num_warps": launch.warps,
        "num_stages": STAGES,
    }
    return tensors, options
