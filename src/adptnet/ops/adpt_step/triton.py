"""Newton passes over time in Triton, for GPUs: four launches per pass, five with the test of convergence.

A pass is s ← s + scan(A, f(s) - s). `evaluate_kernel` computes f(s) - s in tiles of steps, with the arithmetic of
`adpt_scan`. The scan runs in chunks of `LENGTH` steps: `summarize_kernel` computes what each chunk ends with from zero,
`carry_kernel` what enters each chunk, and `apply_kernel` the next iterate with its residuals and changes. The recent
scale of each channel, a maximum that decays over time, is scanned with the corrections. `converge_kernel` tests the
convergence of each sequence as `solvers.fixed_point` and `solvers.convergence_test` do, so that the host need not read
anything between iterations. Programs of sequences that have finished return at once.

Imported only when it is used. No kernel has run on a GPU.

Letters: s, the iterate; c = f(s) - s, the correction; a, the transition A, with imaginary part b for PAIRS; x, the
state of the scan; peak, the recent scale; decay, its factor per step. DIAGONAL: A is diag M, (batch, time, n), and not
Λ̄.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _gpu
from ..adpt_scan.form import Constants, Form
from ..adpt_scan.launch import check_constants
from ..adpt_scan.triton.arithmetic import advance, apply_source, differentiate_source, find_diagonal, multiply, retreat
from ..adpt_scan.triton.memory import load_beta, load_vectors
from ..tolerance import HALF_LIFE, Tolerance
from .device import Outcome, Rules
from .reference import Pass

__all__ = [
    "apply_kernel",
    "carry_kernel",
    "converge_kernel",
    "count_at_once",
    "evaluate_kernel",
    "find_apply_options",
    "find_options",
    "iterate",
    "newton_pass",
    "pull_back",
    "pull_back_kernel",
    "summarize_kernel",
]

LENGTH = 64  # steps per chunk
COLUMNS = 64  # columns per program of the scan
ROWS = 16  # steps per tile: the minimum of a matrix product on tensor cores
IN_REGISTERS = 256  # the largest padded head for which K x and V x of a tile stay in registers
BLOCK = 1024  # steps that the test reads at a time
FIRST_CHECK = 8  # iterations before the host first reads whether all sequences have finished
STUCK = 8  # iterations with all steps within the tolerance of their largest channel, after which the host takes over

# Columns of the integers and of the floats that the test keeps for each sequence.
STOPPED, DONE, RISING, FOREIGN, ITERATIONS, REACHED, RISES, WHOLE = range(8)
_DONE, _RISING, _FOREIGN = tl.constexpr(DONE), tl.constexpr(RISING), tl.constexpr(FOREIGN)
_ITERATIONS, _REACHED = tl.constexpr(ITERATIONS), tl.constexpr(REACHED)
_RISES, _WHOLE = tl.constexpr(RISES), tl.constexpr(WHOLE)
_STUCK = tl.constexpr(STUCK)


@triton.jit
def largest(x):
    """Return the largest absolute entry of each row; NaN if there is one."""
    bad = tl.max((x != x).to(tl.int32), 1)
    return tl.where(bad > 0, float("nan"), tl.max(tl.abs(x), 1))


@triton.jit
def find_entering(t, row, steps, reset, RESETS: tl.constexpr):
    """Return which steps the state before them enters, which the initial state, and which the reset state."""
    valid = t < steps
    is_reset = valid & (t < 0)
    if RESETS:
        is_reset = tl.load(reset + row, valid, 0) != 0
    return valid & (t > 0) & ~is_reset, valid & (t == 0) & ~is_reset, is_reset


@triton.jit
def load_entering(states, initial, reset_state, row, sequence, entering, place, within, TOTAL: tl.constexpr):
    """Return the states that enter steps, in these columns; `entering` is the result of `find_entering`."""
    later, is_first, is_reset = entering
    of, both = place[None, :], within[None, :]
    start = sequence * TOTAL + of + row[:, None] * 0
    x = tl.load(states + (row[:, None] - 1) * TOTAL + of, later[:, None] & both, 0.0)
    x += tl.load(initial + start, is_first[:, None] & both, 0.0)
    x += tl.load(reset_state + start, is_reset[:, None] & both, 0.0)
    return x


@triton.jit
def project(
    states, initial, reset_state, row, sequence, entering, weight, bias, numbers, head, into,
    SIZE: tl.constexpr, TOTAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    PRECISION: tl.constexpr, BIASED: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """Return columns `into` of K x and V x, (ROWS, COLUMNS), x the states that enter; INNER columns of x at a time."""
    corner = weight + head * 2 * SIZE * SIZE
    p = tl.zeros((ROWS, COLUMNS), tl.float32)
    q = tl.zeros((ROWS, COLUMNS), tl.float32)
    for part in range(0, SIZE, INNER):
        among = part + tl.arange(0, INNER)
        x = load_entering(
            states, initial, reset_state, row, sequence, entering, head * SIZE + among, among < SIZE, TOTAL
        )
        source = apply_source(x, numbers, SOURCE)
        square = (among < SIZE)[:, None] & (into < SIZE)[None, :]
        transposed = corner + into[None, :] * SIZE + among[:, None]
        p = tl.dot(source, tl.load(transposed, square, 0.0), p, input_precision=PRECISION)
        q = tl.dot(source, tl.load(transposed + SIZE * SIZE, square, 0.0), q, input_precision=PRECISION)
    if BIASED:
        p += tl.load(bias + head * 2 * SIZE + into, into < SIZE, 0.0)[None, :]
        q += tl.load(bias + head * 2 * SIZE + SIZE + into, into < SIZE, 0.0)[None, :]
    return p, q


@triton.jit
def store_projections(
    projections, states, initial, reset_state, row, sequence, entering, valid, weight, bias, numbers, head,
    SIZE: tl.constexpr, TOTAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr,
    PRECISION: tl.constexpr, BIASED: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """Write K x and V x of a tile to scratch memory, (count, HEADS, 2, SIZE), BLOCK columns at a time."""
    for start in range(0, SIZE, BLOCK):
        into = start + tl.arange(0, BLOCK)
        p, q = project(
            states, initial, reset_state, row, sequence, entering, weight, bias, numbers, head, into,
            SIZE, TOTAL, ROWS, BLOCK, INNER, PRECISION, BIASED, SOURCE,
        )  # fmt: skip
        at = projections + row[:, None] * (2 * TOTAL) + head * 2 * SIZE + into[None, :]
        mask = valid[:, None] & (into < SIZE)[None, :]
        tl.store(at, p, mask)
        tl.store(at + SIZE, q, mask)
    tl.debug_barrier()  # all projections are written


@triton.jit(do_not_specialize=["steps"])  # otherwise every length is compiled anew
def evaluate_kernel(
    states, drive, initial, reset_state, reset, stopped, real, imag, weight, bias, beta, norm_weight, norm_bias,
    epsilon, threshold, dot, sine, correction, diagonal, projections, steps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, SOME: tl.constexpr,
    BLOCK: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr, BIASED: tl.constexpr, RESETS: tl.constexpr,
    RETRACTION: tl.constexpr, PAIRS: tl.constexpr, SOURCE: tl.constexpr, GIVEN: tl.constexpr, STORED: tl.constexpr,
    ROW_BETA: tl.constexpr, AWARE: tl.constexpr, NORM: tl.constexpr, DOT: tl.constexpr, DIAGONAL: tl.constexpr,
    STATUS: tl.constexpr,
):  # fmt: skip
    """Write f(s) - s of ROWS steps of one head of a sequence, and diag M with DIAGONAL.

    With STORED, for large heads, K x and V x go through the scratch memory `projections`, (batch, steps, HEADS, 2,
    SIZE), and the rest is computed for SOME steps at a time. If they stay in registers, SOME is ROWS.
    """
    tiles = tl.cdiv(steps, ROWS)
    program = tl.program_id(0).to(tl.int64)
    sequence = program // tiles
    if tl.load(stopped + sequence * STATUS) != 0:
        return
    TOTAL: tl.constexpr = HEADS * SIZE
    FEATURES: tl.constexpr = TOTAL * (3 if GIVEN else 1) + (1 if ROW_BETA else 0)
    numbers = (epsilon, threshold, dot, sine)
    first = (program % tiles) * ROWS
    head = tl.program_id(1)
    column = tl.arange(0, PAD)
    place, within = head * SIZE + column, column < SIZE
    if STORED:
        tile = first + tl.arange(0, ROWS)
        tile_row = sequence * steps + tile
        tile_entering = find_entering(tile, tile_row, steps, reset, RESETS)
        store_projections(
            projections, states, initial, reset_state, tile_row, sequence, tile_entering, tile < steps, weight, bias,
            numbers, head, SIZE, TOTAL, ROWS, BLOCK, INNER, PRECISION, BIASED, SOURCE,
        )  # fmt: skip
    for some in range(0, ROWS, SOME):
        t = first + some + tl.arange(0, SOME)
        valid = t < steps
        row = sequence * steps + t
        mask = valid[:, None] & within[None, :]
        entering = find_entering(t, row, steps, reset, RESETS)
        x = load_entering(states, initial, reset_state, row, sequence, entering, place, within, TOTAL)
        at = row[:, None] * FEATURES + place[None, :]
        saved = row[:, None] * (2 * TOTAL) + head * 2 * SIZE + column[None, :]
        if GIVEN:
            p, q = tl.load(drive + at + TOTAL, mask, 0.0), tl.load(drive + at + 2 * TOTAL, mask, 0.0)
        elif STORED:
            p, q = tl.load(projections + saved, mask, 0.0), tl.load(projections + saved + SIZE, mask, 0.0)
        else:
            p, q = project(
                states, initial, reset_state, row, sequence, entering, weight, bias, numbers, head, column,
                SIZE, TOTAL, SOME, PAD, INNER, PRECISION, BIASED, SOURCE,
            )  # fmt: skip
        u = tl.load(drive + at, mask, 0.0)
        vectors = load_vectors(real, imag, norm_weight, norm_bias, place, within, TOTAL, PAIRS, NORM)
        beta_value = load_beta(drive, beta, row, head, valid, ROW_BETA, FEATURES)
        into = row[:, None] * TOTAL + place[None, :]
        value = advance(
            x, p, q, u, vectors, beta_value, numbers, within[None, :], PAIRS, RETRACTION, AWARE, NORM, DOT, SIZE
        )
        tl.store(correction + into, value - tl.load(states + into, mask, 0.0), mask)
        if DIAGONAL:
            found = find_diagonal(x, p, q, vectors, beta_value, numbers, within[None, :], RETRACTION, NORM, DOT, SIZE)
            tl.store(diagonal + into, found, mask)


@triton.jit(do_not_specialize=["count"])
def pull_back_kernel(
    entering, drive, gradient, real, imag, weight, bias, beta, norm_weight, norm_bias, epsilon, threshold, dot, sine,
    projections, pulled, count,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, SOME: tl.constexpr,
    BLOCK: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr, BIASED: tl.constexpr, RETRACTION: tl.constexpr,
    PAIRS: tl.constexpr, SOURCE: tl.constexpr, GIVEN: tl.constexpr, ROW_BETA: tl.constexpr, AWARE: tl.constexpr,
    NORM: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Write J'g of ROWS steps of one head, J the Jacobian of the step; all but the products for SOME steps at a time.

    `projections`, (count, HEADS, 2, SIZE), is scratch memory: p and q, then their gradients.
    """
    TOTAL: tl.constexpr = HEADS * SIZE
    FEATURES: tl.constexpr = TOTAL * (3 if GIVEN else 1) + (1 if ROW_BETA else 0)
    numbers = (epsilon, threshold, dot, sine)
    first = tl.program_id(0).to(tl.int64) * ROWS
    tile = first + tl.arange(0, ROWS)
    head = tl.program_id(1)
    column = tl.arange(0, PAD)
    place, within, in_tile = head * SIZE + column, column < SIZE, tile < count
    if not GIVEN:
        # `entering` holds what enters a step in the row of the step, not in the row before.
        no = tile < 0
        store_projections(
            projections, entering + TOTAL, entering, entering, tile, 0, (in_tile, no, no), in_tile, weight, bias,
            numbers, head, SIZE, TOTAL, ROWS, BLOCK, INNER, PRECISION, BIASED, SOURCE,
        )  # fmt: skip
    vectors = load_vectors(real, imag, norm_weight, norm_bias, place, within, TOTAL, PAIRS, NORM)
    for some in range(0, ROWS, SOME):
        row = first + some + tl.arange(0, SOME)
        valid = row < count
        mask = valid[:, None] & within[None, :]
        at = row[:, None] * TOTAL + place[None, :]
        given = drive + row[:, None] * FEATURES + place[None, :]
        saved = projections + row[:, None] * (2 * TOTAL) + head * 2 * SIZE + column[None, :]
        if GIVEN:
            p = tl.load(given + TOTAL, mask, 0.0)
            q = tl.load(given + 2 * TOTAL, mask, 0.0)
        else:
            p = tl.load(saved, mask, 0.0)
            q = tl.load(saved + SIZE, mask, 0.0)
        x = tl.load(entering + at, mask, 0.0)
        u = tl.load(given, mask, 0.0)
        g = tl.load(gradient + at, mask, 0.0)
        beta_value = load_beta(drive, beta, row, head, valid, ROW_BETA, FEATURES)
        g_x, g_p, g_q, _, _, _, _, _, _, _, _ = retreat(
            x, p, q, u, g, vectors, beta_value, numbers, within[None, :], PAIRS, RETRACTION, AWARE, NORM, DOT, SIZE
        )
        tl.store(pulled + at, g_x, mask)
        if not GIVEN:
            tl.store(saved, g_p, mask)
            tl.store(saved + SIZE, g_q, mask)
    if not GIVEN:
        tl.debug_barrier()  # all gradients are written
        scratch = projections + tile[:, None] * (2 * TOTAL) + head * 2 * SIZE
        for start in range(0, SIZE, BLOCK):
            into = start + tl.arange(0, BLOCK)
            products = tl.zeros((ROWS, BLOCK), tl.float32)
            for part in range(0, SIZE, INNER):
                among = part + tl.arange(0, INNER)
                known = in_tile[:, None] & (among < SIZE)[None, :]
                square = (among < SIZE)[:, None] & (into < SIZE)[None, :]
                untransposed = weight + head * 2 * SIZE * SIZE + among[:, None] * SIZE + into[None, :]
                key_weight = tl.load(untransposed, square, 0.0)
                value_weight = tl.load(untransposed + SIZE * SIZE, square, 0.0)
                g_key = tl.load(scratch + among[None, :], known, 0.0)
                g_value = tl.load(scratch + SIZE + among[None, :], known, 0.0)
                products = tl.dot(g_key, key_weight, products, input_precision=PRECISION)
                products = tl.dot(g_value, value_weight, products, input_precision=PRECISION)
            some_columns = in_tile[:, None] & (into < SIZE)[None, :]
            of = tile[:, None] * TOTAL + head * SIZE + into[None, :]
            slope = differentiate_source(tl.load(entering + of, some_columns, 0.0), numbers, SOURCE)
            before = tl.load(pulled + of, some_columns, 0.0)
            tl.store(pulled + of, before + products * slope, some_columns)


@triton.jit
def load_transition(real, imag, diagonal, row, column, within, TOTAL: tl.constexpr, PAIRS: tl.constexpr,
                    DIAGONAL: tl.constexpr):  # fmt: skip
    """Return the transition of a step, (1, columns): real and imaginary part."""
    if DIAGONAL:
        a = tl.load(diagonal + row * TOTAL + column, within, 0.0)[None, :]
    else:
        a = tl.load(real + column, within, 0.0)[None, :]
    b = a
    if PAIRS:
        b = tl.load(imag + column, within, 0.0)[None, :]
    return a, b


@triton.jit(do_not_specialize=["steps", "chunks"])
def summarize_kernel(
    states, correction, diagonal, real, imag, reset, stopped, ends, products, peaks, cuts, decay, steps, chunks,
    TOTAL: tl.constexpr, COLUMNS: tl.constexpr, LENGTH: tl.constexpr, RESETS: tl.constexpr, PAIRS: tl.constexpr,
    DIAGONAL: tl.constexpr, STATUS: tl.constexpr,
):  # fmt: skip
    """Write for each chunk the scan from zero, the product of its transitions, its peak, and if a reset cuts it."""
    program = tl.program_id(0).to(tl.int64)
    sequence, chunk = program // chunks, program % chunks
    if tl.load(stopped + sequence * STATUS) != 0:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = column < TOTAL
    x = tl.zeros((1, COLUMNS), tl.float32)
    product = x + 1.0
    peak = x
    cut = (sequence * 0).to(tl.int32)
    for i in tl.range(0, tl.minimum(LENGTH, steps - chunk * LENGTH), num_stages=4):
        row = sequence * steps + chunk * LENGTH + i
        c = tl.load(correction + row * TOTAL + column, within, 0.0)[None, :]
        s = tl.load(states + row * TOTAL + column, within, 0.0)[None, :]
        a, b = load_transition(real, imag, diagonal, row, column, within, TOTAL, PAIRS, DIAGONAL)
        x = multiply(a, b, x, PAIRS)
        peak = decay * peak
        if RESETS:
            is_reset = tl.load(reset + row) != 0
            x = tl.where(is_reset, 0.0, x)
            peak = tl.where(is_reset, 0.0, peak)
            cut += is_reset.to(tl.int32)
        x += c
        peak = tl.maximum(peak, tl.abs(s + c))
        if DIAGONAL:
            product = a * product
    into = program * TOTAL + column
    tl.store(ends + into, tl.reshape(x, (COLUMNS,)), within)
    tl.store(peaks + into, tl.reshape(peak, (COLUMNS,)), within)
    if DIAGONAL:
        tl.store(products + into, tl.reshape(product, (COLUMNS,)), within)
    if RESETS:
        tl.store(cuts + program, cut)


@triton.jit(do_not_specialize=["chunks"])
def carry_kernel(
    ends, products, peaks, cuts, real, imag, recent, stopped, decay, chunks,
    TOTAL: tl.constexpr, COLUMNS: tl.constexpr, DOUBLINGS: tl.constexpr, RESETS: tl.constexpr, PAIRS: tl.constexpr,
    DIAGONAL: tl.constexpr, RECENT: tl.constexpr, STATUS: tl.constexpr,
):  # fmt: skip
    """Replace what each chunk ends with by what enters it, for `ends` and `peaks`. A chunk has 2^DOUBLINGS steps."""
    sequence = tl.program_id(0).to(tl.int64)
    if tl.load(stopped + sequence * STATUS) != 0:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = column < TOTAL
    a, b = load_transition(real, imag, real, 0, column, within, TOTAL, PAIRS, False)
    power = decay
    for _ in tl.static_range(DOUBLINGS):  # a, b and the decay of all steps of a chunk
        if PAIRS:
            a, b = a * a - b * b, 2 * a * b
        else:
            a = a * a
        power = power * power
    x = tl.zeros((1, COLUMNS), tl.float32)
    peak = x
    if RECENT:
        peak = tl.load(recent + sequence * TOTAL + column, within, 0.0)[None, :]
    for chunk in range(chunks):
        at = (sequence * chunks + chunk) * TOTAL + column
        end = tl.load(ends + at, within, 0.0)[None, :]
        top = tl.load(peaks + at, within, 0.0)[None, :]
        tl.store(ends + at, tl.reshape(x, (COLUMNS,)), within)
        tl.store(peaks + at, tl.reshape(peak, (COLUMNS,)), within)
        product, product_imag = a, b
        if DIAGONAL:
            product = tl.load(products + at, within, 0.0)[None, :]
        x = multiply(product, product_imag, x, PAIRS)
        peak = power * peak
        if RESETS:  # a product with zero would keep a NaN
            is_cut = tl.load(cuts + sequence * chunks + chunk) != 0
            x = tl.where(is_cut, 0.0, x)
            peak = tl.where(is_cut, 0.0, peak)
        x += end
        peak = tl.maximum(peak, top)


@triton.jit(do_not_specialize=["steps", "chunks"])
def apply_kernel(
    states, correction, diagonal, real, imag, initial, reset_state, reset, stopped, entering, peaks, following,
    residual, excess, scale, move, decay, relative, floor, steps, chunks,
    TOTAL: tl.constexpr, PAD: tl.constexpr, LENGTH: tl.constexpr, STAGES: tl.constexpr, RESETS: tl.constexpr,
    PAIRS: tl.constexpr, DIAGONAL: tl.constexpr, STATUS: tl.constexpr,
):  # fmt: skip
    """Write the next iterate of each chunk, and the fields of `Pass`."""
    program = tl.program_id(0).to(tl.int64)
    sequence, chunk = program // chunks, program % chunks
    if tl.load(stopped + sequence * STATUS) != 0:
        return
    column = tl.arange(0, PAD)
    within = column < TOTAL
    x = tl.load(entering + program * TOTAL + column, within, 0.0)[None, :]
    peak = tl.load(peaks + program * TOTAL + column, within, 0.0)[None, :]
    first = sequence * steps + chunk * LENGTH
    before = tl.load(states + (first - 1) * TOTAL + column, within & (column * 0 + chunk > 0), 0.0)
    before += tl.load(initial + sequence * TOTAL + column, within & (column * 0 + chunk == 0), 0.0)
    before = before[None, :]
    for i in tl.range(0, tl.minimum(LENGTH, steps - chunk * LENGTH), num_stages=STAGES):
        row = first + i
        c = tl.load(correction + row * TOTAL + column, within, 0.0)[None, :]
        s = tl.load(states + row * TOTAL + column, within, 0.0)[None, :]
        a, b = load_transition(real, imag, diagonal, row, column, within, TOTAL, PAIRS, DIAGONAL)
        x = multiply(a, b, x, PAIRS)
        peak = decay * peak
        if RESETS:
            is_reset = tl.load(reset + row) != 0
            x = tl.where(is_reset, 0.0, x)
            peak = tl.where(is_reset, 0.0, peak)
            restart = tl.load(reset_state + sequence * TOTAL + column, within, 0.0)[None, :]
            before = tl.where(is_reset, restart, before)
        x += c
        f = s + c
        peak = tl.maximum(peak, tl.abs(f))
        top = largest(f)
        allowed = tl.minimum(peak, top[:, None]) * relative + floor
        tl.store(following + row * TOTAL + column, tl.reshape(s + x, (PAD,)), within)
        one = tl.arange(0, 1)
        tl.store(residual + row + one, largest(c))
        tl.store(excess + row + one, largest(c / allowed))
        tl.store(scale + row + one, tl.maximum(largest(before), top))
        tl.store(move + row + one, largest(x / allowed))
        before = s


@triton.jit
def maximum(a, b):
    """Return the larger number."""
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["patience", "steps", "iteration", "record", "least", "most", "batch"])
def converge_kernel(
    residual, excess, scale, move, now, rate, sure, integers, floats, residuals, prefixes,
    relative, floor, slack, rounding, rate_limit, patience, steps, iteration, record, least, most, batch,
    STATUS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Test the convergence of one sequence, as `_NewtonLoop.test` does, and record it.

    `now`, `rate` and `sure` are those of `Contraction`. With FIRST the pass was that of the initial guess.
    """
    sequence = tl.program_id(0).to(tl.int64)
    of = integers + sequence * STATUS
    into = record * batch + sequence
    if tl.load(of) != 0:
        tl.store(residuals + into, tl.load(floats + sequence * 2))
        tl.store(prefixes + into, tl.load(of + _REACHED).to(tl.int64))
        return
    running = float("-inf")
    worst = 0.0
    bad, outside = 0, 0
    reached = steps * 1
    for start in range(0, steps, BLOCK):
        t = start + tl.arange(0, BLOCK)
        mask = t < steps
        at = sequence * steps + t
        size = tl.load(residual + at, mask, 0.0)
        over = tl.load(excess + at, mask, 0.0)
        whole = size <= relative * tl.load(scale + at, mask, 0.0) + floor
        bad = tl.maximum(bad, tl.max((mask & ~(size < float("inf"))).to(tl.int32), 0))
        worst = tl.maximum(worst, tl.max(tl.where(size == size, size, float("inf")), 0))
        outside = tl.maximum(outside, tl.max((mask & ~whole).to(tl.int32), 0))
        clean = tl.where(over == over, over, float("inf"))
        following = tl.maximum(tl.associative_scan(tl.where(mask, clean, float("-inf")), 0, maximum), running)
        running = tl.maximum(running, tl.max(tl.where(mask, clean, float("-inf")), 0))
        ok = over <= 1
        if not FIRST:
            last_now = tl.load(now + at, mask, 0.0)
            old = tl.load(rate + at, mask, 0.0)
            is_sure = tl.load(sure + at, mask, 0) != 0
            above = last_now > 1
            last = tl.where(last_now < float("inf"), tl.minimum(following / tl.maximum(last_now, 1e-38), 1.0), 1.0)
            mean = tl.exp2(0.9375 * tl.log2(tl.maximum(old, 1e-38)) + 0.0625 * tl.log2(tl.maximum(last, 1e-38)))
            mean = tl.where(old > 0, tl.where(last > 0, mean, 0.0), last)
            new = tl.where(above | (~is_sure & (last_now > rounding)), mean, old)
            is_sure = is_sure | above
            forget = ~above & (following > last_now) & (~is_sure | (new < 0.9))
            new = tl.where(forget, 0.0, new)
            tl.store(rate + at, new, mask)
            tl.store(sure + at, is_sure.to(tl.uint8), mask)
            limited = tl.minimum(new, rate_limit)
            error = tl.load(move + at, mask, 0.0) * tl.maximum(limited / (1 - limited), 1.0)
            ok = ok & (error <= slack)
        else:
            tl.store(rate + at, tl.zeros_like(following), mask)
            tl.store(sure + at, tl.zeros((BLOCK,), tl.uint8), mask)
        tl.store(now + at, following, mask)
        reached = tl.minimum(reached, tl.min(tl.where(mask & ~ok, t, steps), 0))
    value = tl.where(bad > 0, float("nan"), worst)
    tl.store(of + _REACHED, reached)
    if FIRST:
        tl.store(floats + sequence * 2 + 1, value)
        tl.store(of + _RISES, 0)
        tl.store(of + _WHOLE, 0)
        tl.store(of + _ITERATIONS, 0)
    else:
        rises = tl.where(value > tl.load(floats + sequence * 2), tl.load(of + _RISES) + 1, 0)
        is_rising = (rises >= patience) & (value > tl.load(floats + sequence * 2 + 1))
        done = reached == steps
        held = tl.where((outside == 0) & ~done, tl.load(of + _WHOLE) + 1, 0)
        # The host handles iterates that are not finite, and tolerances below the rounding errors of a channel.
        foreign = (bad > 0) | (held >= _STUCK) | ((held > 0) & (iteration == most))
        stop = ((done | is_rising) & (iteration >= least)) | foreign | (iteration == most)
        tl.store(of + _RISES, rises)
        tl.store(of + _WHOLE, held)
        tl.store(of + _ITERATIONS, iteration)
        tl.store(of + _DONE, done.to(tl.int32))
        tl.store(of + _RISING, is_rising.to(tl.int32))
        tl.store(of + _FOREIGN, foreign.to(tl.int32))
        tl.store(of, stop.to(tl.int32))
    tl.store(floats + sequence * 2, value)
    tl.store(residuals + into, value)
    tl.store(prefixes + into, reached.to(tl.int64))


def find_options(form: Form, size: int, device: torch.device) -> dict[str, Any]:
    """Return the launch options of `evaluate_kernel`.

    Args:
        form: The form of the recurrence.
        size: The state dimension.
        device: The device.
    """
    head = size // form.heads
    pad = max(16, triton.next_power_of_2(head))
    return {
        "HEADS": form.heads,
        "SIZE": head,
        "PAD": pad,
        "ROWS": ROWS,
        "SOME": ROWS if pad <= IN_REGISTERS else count_at_once(pad),
        "BLOCK": min(pad, 64),
        "INNER": min(pad, 32),
        "PRECISION": _gpu.matmul_precision(str(device)),
        "RETRACTION": int(form.retraction),
        "SOURCE": int(form.source),
        "GIVEN": form.directions_in_drive,
        "STORED": pad > IN_REGISTERS and not form.directions_in_drive,
        "ROW_BETA": form.beta_in_drive,
        "AWARE": form.rotation_aware,
        "NORM": form.norm_epsilon is not None,
        "DOT": form.dot is not None,
        "num_warps": 4 if pad <= 64 else 8,
        "num_stages": 1,
    }


def find_apply_options(size: int) -> dict[str, Any]:
    """Return the launch options of `apply_kernel`, which handles all heads of a step.

    Args:
        size: The state dimension.
    """
    pad = max(16, triton.next_power_of_2(size))
    # Each stage of the pipeline of loads needs 12 bytes of shared memory per state dimension.
    stages = max(1, min(4, 2048 // pad))
    return {"TOTAL": size, "PAD": pad, "STAGES": stages, "num_warps": max(1, min(16, pad // 128)), "num_stages": 1}


def count_at_once(pad: int) -> int:
    """Return the number of steps of a tile whose vectors are in registers together.

    Args:
        pad: The padded size of a head.
    """
    return max(1, min(ROWS, 512 // pad))


class _Arguments(NamedTuple):
    """The parameters of a recurrence as the kernels take them; absent tensors are replaced by one not read."""

    tensors: tuple[Tensor, ...]  # real, imag, weight, bias, beta, norm_weight, norm_bias
    numbers: tuple[float, ...]  # epsilon, threshold, dot, sine
    options: dict[str, Any]


def _make_arguments(constants: Constants, form: Form, unread: Tensor) -> _Arguments:
    ordered = [unread if t is None else t.contiguous() for t in check_constants(constants)]
    real, imag, weight, bias, beta, *_, norm_weight, norm_bias = ordered
    dot = 0.0 if form.dot is None else form.dot
    numbers = (form.norm_epsilon or 0.0, form.spike_threshold, dot, (1 - dot**2) ** 0.5)
    options = find_options(form, constants.real.shape[0], unread.device) | {
        "BIASED": constants.bias is not None and not form.directions_in_drive,
        "PAIRS": constants.imag is not None,
    }
    return _Arguments((real, imag, weight, bias, beta, norm_weight, norm_bias), numbers, options)


def pull_back(entering: Tensor, drive: Tensor, gradient: Tensor, constants: Constants, form: Form) -> Tensor:
    """Return J'g for every step, (batch, time, n), J the Jacobian of the step: one launch.

    Args:
        entering: (batch, time, n), the states that enter the steps.
        drive: (batch, time, features).
        gradient: (batch, time, n), g.
        constants, form: As in `adpt_scan`.
    """
    entering, drive, gradient = (t.contiguous() for t in (entering, drive, gradient))
    pulled = torch.empty_like(entering)
    if not pulled.numel():
        return pulled
    batch, steps, size = entering.shape
    tensors, numbers, options = _make_arguments(constants, form, drive)
    del options["STORED"]
    options["SOME"] = count_at_once(options["PAD"])
    projections = drive if form.directions_in_drive else drive.new_empty(batch, steps, 2 * size)
    with torch.cuda.device_of(entering):
        pull_back_kernel[(triton.cdiv(batch * steps, ROWS), form.heads)](
            entering, drive, gradient, *tensors, *numbers, projections, pulled, batch * steps, **options
        )
    return pulled


class _Passes:
    """The kernels of a pass with their arguments and workspace, for one system of equations."""

    def __init__(
        self,
        shape: torch.Size,
        drive: Tensor,
        initial: Tensor,
        reset_state: Tensor,
        reset: Tensor | None,
        constants: Constants,
        form: Form,
        *,
        diagonal: bool,
        tolerance: Tolerance,
        recent: Tensor | None,
    ):
        self.batch, self.steps, self.size = shape
        self.chunks = triton.cdiv(self.steps, LENGTH)
        new = drive.new_empty
        self.drive, self.initial, self.reset_state = (t.contiguous() for t in (drive, initial, reset_state))
        self.reset = self.drive if reset is None else reset.contiguous().view(torch.uint8)
        self.recent = self.drive if recent is None else recent.contiguous()
        self.constants, self.numbers, options = _make_arguments(constants, form, self.drive)
        self.real, self.imag = self.constants[:2]
        self.decay = 0.5 ** (1 / HALF_LIFE)
        self.relative, self.floor = tolerance.relative, tolerance.floor(drive.dtype)
        self.correction = new(shape)
        self.diagonal = new(shape) if diagonal else self.drive
        self.projections = new(*shape[:2], 2 * self.size) if options["STORED"] else self.drive
        self.ends, self.peaks = new(self.batch, self.chunks, self.size), new(self.batch, self.chunks, self.size)
        self.products = torch.empty_like(self.ends) if diagonal else self.drive
        self.cuts = new(self.batch, self.chunks, dtype=torch.int32) if reset is not None else self.drive
        self.measures = [new(self.batch, self.steps) for _ in range(4)]  # residual, excess, scale, move
        self.integers = drive.new_zeros(self.batch, 8, dtype=torch.int32)
        self.flags = {
            "RESETS": reset is not None,
            "PAIRS": constants.imag is not None,
            "DIAGONAL": diagonal,
            "STATUS": 8,
        }
        self.options = options | self.flags
        self.has_recent = recent is not None

    def run(self, states: Tensor, following: Tensor) -> None:
        """Write the next iterate, the measures of this one, and the workspace: four launches."""
        shared, size, chunks = self.flags, self.size, self.chunks
        evaluate_kernel[(self.batch * triton.cdiv(self.steps, ROWS), self.options["HEADS"])](
            states, self.drive, self.initial, self.reset_state, self.reset, self.integers, *self.constants,
            *self.numbers, self.correction, self.diagonal, self.projections, self.steps, **self.options,
        )  # fmt: skip
        scan = {**shared, "TOTAL": size, "COLUMNS": COLUMNS, "num_warps": 2, "num_stages": 1}
        columns = triton.cdiv(size, COLUMNS)
        summarize_kernel[(self.batch * chunks, columns)](
            states, self.correction, self.diagonal, self.real, self.imag, self.reset, self.integers, self.ends,
            self.products, self.peaks, self.cuts, self.decay, self.steps, chunks, LENGTH=LENGTH, **scan,
        )  # fmt: skip
        carry_kernel[(self.batch, columns)](
            self.ends, self.products, self.peaks, self.cuts, self.real, self.imag, self.recent, self.integers,
            self.decay, chunks, DOUBLINGS=LENGTH.bit_length() - 1, RECENT=self.has_recent, **scan,
        )  # fmt: skip
        apply_kernel[(self.batch * chunks,)](
            states, self.correction, self.diagonal, self.real, self.imag, self.initial, self.reset_state, self.reset,
            self.integers, self.ends, self.peaks, following, *self.measures, self.decay, self.relative, self.floor,
            self.steps, chunks, LENGTH=LENGTH, **find_apply_options(size), **shared,
        )  # fmt: skip


def newton_pass(
    states: Tensor,
    drive: Tensor,
    initial: Tensor,
    reset_state: Tensor,
    reset: Tensor | None,
    constants: Constants,
    form: Form,
    *,
    diagonal: bool,
    tolerance: Tolerance,
    recent: Tensor | None = None,
    tiles: int | None = None,
) -> Pass:
    """Run `reference.newton_pass`; arguments as in `cpu.newton_pass`, without tiles."""
    assert tiles is None, "a sweep over tiles is for CPUs"
    states = states.contiguous()
    following = torch.empty_like(states)
    if not states.numel():
        return Pass(following, *(states.new_zeros(states.shape[:2]) for _ in range(4)))
    with torch.cuda.device_of(states):  # Triton launches on the current device
        passes = _Passes(
            states.shape, drive, initial, reset_state, reset, constants, form,
            diagonal=diagonal, tolerance=tolerance, recent=recent,
        )  # fmt: skip
        passes.run(states, following)
    return Pass(following, *passes.measures)


def iterate(
    guess: Tensor,
    drive: Tensor,
    initial: Tensor,
    reset_state: Tensor,
    reset: Tensor | None,
    constants: Constants,
    form: Form,
    *,
    diagonal: bool,
    tolerance: Tolerance,
    recent: Tensor | None,
    rules: Rules,
) -> Outcome | None:
    """Iterate until every sequence has finished, with five launches per iteration.

    The host reads the integers of all sequences after `FIRST_CHECK` iterations, and then after twice as many each time.

    Args:
        guess: (batch, time, n), not empty, the states to start from.
        drive, initial, reset_state, reset, constants, form, diagonal, tolerance, recent: As in `newton_pass`.
        rules: When to stop, after at least one iteration.

    Returns:
        None if a sequence needs the host: an iterate is not finite, or does not converge although all steps are within
        the tolerance of their largest channel, as where rounding errors exceed the tolerance of a small channel.
    """
    (batch, steps, _), patience = guess.shape, 2**31 - 1 if rules.patience is None else rules.patience
    with torch.cuda.device_of(guess):
        passes = _Passes(
            guess.shape, drive, initial, reset_state, reset, constants, form,
            diagonal=diagonal, tolerance=tolerance, recent=recent,
        )  # fmt: skip
        now, rate = guess.new_empty(batch, steps), guess.new_empty(batch, steps)
        sure, floats = guess.new_empty(batch, steps, dtype=torch.uint8), guess.new_empty(batch, 2)
        numbers = (passes.relative, passes.floor, rules.slack, rules.rounding, 1 - 1 / max(2, rules.total), patience)
        states, buffers = guess.contiguous(), [torch.empty_like(passes.correction) for _ in range(2)]
        history: list[tuple[Tensor, Tensor]] = []
        iteration, check = 0, FIRST_CHECK
        while True:
            count = min(check, rules.most) - iteration + 1
            residuals, prefixes = guess.new_empty(count, batch), guess.new_empty(count, batch, dtype=torch.int64)
            for record in range(count):
                following = buffers[(iteration + 1) % 2]
                passes.run(states, following)
                converge_kernel[(batch,)](
                    *passes.measures, now, rate, sure, passes.integers, floats, residuals, prefixes, *numbers, steps,
                    iteration, record, rules.least, rules.most, batch,
                    STATUS=8, BLOCK=min(BLOCK, triton.next_power_of_2(steps)), FIRST=iteration == 0, num_warps=4,
                )  # fmt: skip
                states, iteration = following, iteration + 1
            history.append((residuals, prefixes))
            rows = _gpu.read(passes.integers)
            if any(row[FOREIGN] for row in rows):
                return None
            if all(row[STOPPED] for row in rows):
                break
            check *= 2
    last = max(row[ITERATIONS] for row in rows)
    residuals, prefixes = (torch.cat(parts)[: last + 1] for parts in zip(*history, strict=True))
    # A converged sequence has taken one more update, whose size the test has bounded.
    places = {(row[ITERATIONS] + row[DONE]) % 2 for row in rows}
    found = buffers[places.pop()]
    if places:
        counts = passes.integers[:, ITERATIONS] + passes.integers[:, DONE]
        found = torch.where((counts % 2 == 0)[:, None, None], buffers[0], buffers[1])
    return Outcome(
        states=found,
        converged=passes.integers[:, DONE] != 0,
        rising=passes.integers[:, RISING] != 0,
        iterations=passes.integers[:, ITERATIONS].long(),
        residual=floats[:, 0],
        converged_steps=passes.integers[:, REACHED].long(),
        residuals=residuals,
        prefixes=prefixes,
        all_converged=all(row[DONE] for row in rows),
    )
