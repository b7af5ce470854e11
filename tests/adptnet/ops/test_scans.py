"""Scans, filters and the convolution against their references, and the references against dense matrices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from adptnet import errors
from adptnet.ops._linalg import SAFE, solve
from adptnet.ops.kalman_filter import diagonal_filter, matrix_filter
from adptnet.ops.kalman_filter import reference as filter_reference
from adptnet.ops.linear_scan import linear_scan
from adptnet.ops.linear_scan import reference as linear_reference
from adptnet.ops.lti_convolution import lti_convolution
from adptnet.ops.matrix_scan import matrix_scan
from adptnet.ops.matrix_scan import reference as matrix_reference

LENGTHS = [0, 1, 2, 15, 16, 17, 50, 101]
BATCH, SIZE = (2, 3), 5
real_or_complex = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
either_way = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
properties = settings(deadline=None, derandomize=True, max_examples=60)

# What the transition broadcasts from: one for all steps, one for each sequence, one for each step, one for everything.
shapes_of_transition = {
    "constant": lambda batch, steps, n: (n,),
    "constant row": lambda batch, steps, n: (1, n),
    "of the sequence": lambda batch, steps, n: (*batch, 1, n),
    "of the step": lambda batch, steps, n: (steps, n),
    "of both": lambda batch, steps, n: (*batch, steps, n),
}
shapes_of_matrices = {
    "constant": lambda batch, steps, n: (1, n, n),
    "of the sequence": lambda batch, steps, n: (*batch, 1, n, n),
    "of the step": lambda batch, steps, n: (steps, n, n),
    "of both": lambda batch, steps, n: (*batch, steps, n, n),
}


def numbers(*shape, dtype=torch.float64, generator=None):
    return torch.randn(*shape, dtype=dtype, generator=generator)


def within_the_circle(*shape, dtype=torch.float64, generator=None):
    """Factors of modulus up to 1.1, some of them zero, negative ones among the real."""
    drawn = numbers(*shape, dtype=dtype, generator=generator)
    size = 1.1 * torch.rand(*shape, generator=generator, dtype=torch.float64)
    return drawn / drawn.abs() * torch.where(size < 0.1, 0.0, size)


def matrices_of(*shape, dtype=torch.float64, generator=None):
    return numbers(*shape, dtype=dtype, generator=generator) / shape[-1] ** 0.5


def gradients(function, tensors):
    """What the function gives, and the gradient of a fixed combination of it."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    values = function(*leaves)
    weights = numbers(*values.shape, dtype=values.dtype, generator=torch.Generator().manual_seed(9))
    total = (values * weights).sum()
    found = torch.autograd.grad(total.real, leaves, materialize_grads=True)
    return values, found


def assert_same(found, expected, tolerance=1e-12):
    for a, b in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        scale = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
        assert_close(a, b, atol=tolerance * scale, rtol=0)


def dense_system(matrices, offset, initial, reverse):
    """x of x_t = A_t x_{t-1} + b_t as one linear system of all steps, for one sequence."""
    steps, n = offset.shape
    if reverse:
        return dense_system(matrices.flip(0), offset.flip(0), initial, False).flip(0)
    whole = torch.eye(steps * n, dtype=offset.dtype)
    right = offset.flatten().clone()
    right[:n] += matrices[0] @ initial
    for t in range(1, steps):
        whole[t * n : (t + 1) * n, (t - 1) * n : t * n] = -matrices[t]
    return torch.linalg.solve(whole, right).reshape(steps, n)


@real_or_complex
@either_way
def test_the_reference_scans_solve_the_dense_system(dtype, reverse):
    steps, n = 7, 3
    factors, matrices = within_the_circle(steps, n, dtype=dtype), matrices_of(steps, n, n, dtype=dtype)
    offset, initial = numbers(steps, n, dtype=dtype), numbers(n, dtype=dtype)
    reset = torch.tensor([False, False, True, False, False, True, False])
    for resets in (None, reset):
        kept = torch.ones(steps) if resets is None else (~resets).to(torch.float64)
        diagonal = torch.diag_embed(factors) * kept[:, None, None]
        found = linear_reference.linear_scan(factors, offset, initial, reset=resets, reverse=reverse)
        assert_close(found, dense_system(diagonal, offset, initial, reverse), atol=1e-12, rtol=0)
        found = matrix_reference.matrix_scan(matrices, offset, initial, reset=resets, reverse=reverse)
        expected = dense_system(matrices * kept[:, None, None], offset, initial, reverse)
        assert_close(found, expected, atol=1e-12, rtol=0)


def filtered_by_least_squares(matrices, offset, observed, strength, initial):
    """The last filtered mean: the minimum of the sum of squared noises, whose weights are 1 and `strength`."""
    steps, n = offset.shape
    eye = torch.eye(n)
    rows, right = [], []
    for t in range(steps):
        row = torch.zeros(n, steps * n)
        row[:, t * n : (t + 1) * n] = eye
        if t:
            row[:, (t - 1) * n : t * n] = -matrices[t]
        seen = torch.zeros(n, steps * n)
        seen[:, t * n : (t + 1) * n] = strength**0.5 * eye
        rows += [row, seen]
        right += [offset[t] + (0 if t else matrices[0] @ initial), strength**0.5 * observed[t]]
    solution = torch.linalg.lstsq(torch.cat(rows), torch.cat(right).unsqueeze(-1)).solution
    return solution.reshape(steps, n)[-1]


def test_the_reference_filters_weigh_by_least_squares():
    steps, n, strength = 6, 3, 0.7
    matrices, factors = matrices_of(steps, n, n), within_the_circle(steps, n)
    offset, observed, initial = numbers(steps, n), numbers(steps, n), numbers(n)
    pull = torch.tensor([strength])
    for t in range(1, steps + 1):
        given_ = (offset[:t], observed[:t], strength, initial)
        found = filter_reference.matrix_filter(matrices, offset, observed, pull, initial)[t - 1]
        assert_close(found, filtered_by_least_squares(matrices[:t], *given_), atol=1e-12, rtol=0)
        found = filter_reference.diagonal_filter(factors, offset, observed, pull, initial)[t - 1]
        assert_close(found, filtered_by_least_squares(torch.diag_embed(factors[:t]), *given_), atol=1e-12, rtol=0)


def test_a_complex_filter_is_the_real_one_on_pairs():
    steps, n = 9, 2
    factors = within_the_circle(steps, n, dtype=torch.complex128)
    offset, observed = (numbers(steps, n, dtype=torch.complex128) for _ in range(2))
    initial, pull = numbers(n, dtype=torch.complex128), torch.tensor([0.4])
    blocks = torch.zeros(steps, 2 * n, 2 * n)
    for i in range(n):
        a, b = factors[:, i].real, factors[:, i].imag
        pair = torch.stack((torch.stack((a, -b), -1), torch.stack((b, a), -1)), -2)
        blocks[:, 2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = pair

    def paired(x):
        return torch.view_as_real(x).flatten(-2)

    found = filter_reference.diagonal_filter(factors, offset, observed, pull, initial)
    expected = filter_reference.matrix_filter(blocks, paired(offset), paired(observed), pull, paired(initial))
    assert_close(paired(found), expected, atol=1e-12, rtol=0)


@real_or_complex
@either_way
@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("kind", shapes_of_transition)
def test_the_linear_scan_is_its_reference(kind, steps, dtype, reverse):
    transition = within_the_circle(*shapes_of_transition[kind](BATCH, steps, SIZE), dtype=dtype)
    offset, initial = numbers(*BATCH, steps, SIZE, dtype=dtype), numbers(*BATCH, SIZE, dtype=dtype)
    for reset in (None, torch.rand(*BATCH, steps) < 0.2):
        for start in ([], [initial]):

            def run(op, reset=reset):
                return lambda *given_: op(*given_, reset=reset, reverse=reverse)

            found = gradients(run(linear_scan), [transition, offset, *start])
            expected = gradients(run(linear_reference.linear_scan), [transition, offset, *start])
            assert_same(found, expected)
            with torch.no_grad():
                room = offset.clone()
                over = linear_scan(transition, room, *start, reset=reset, reverse=reverse, overwrite=True)
                assert_close(over, expected[0].detach(), atol=1e-12, rtol=1e-12)
                kept = linear_scan(transition, offset, *start, reset=reset, reverse=reverse)
                assert_close(kept, expected[0].detach(), atol=1e-12, rtol=1e-12)


def test_a_scan_without_overwrite_leaves_its_inputs_alone():
    transition, offset, initial = within_the_circle(50, SIZE), numbers(2, 50, SIZE), numbers(2, SIZE)
    matrices = matrices_of(50, SIZE, SIZE)
    before = [tensor.clone() for tensor in (transition, offset, initial, matrices)]
    with torch.no_grad():
        linear_scan(transition, offset, initial)
        matrix_scan(matrices, offset, initial)
        lti_convolution(transition[0], offset, initial)
    for tensor, copy in zip((transition, offset, initial, matrices), before, strict=True):
        assert torch.equal(tensor, copy)


def test_overwriting_a_part_of_a_tensor_leaves_the_rest_alone():
    whole = numbers(2, 60, SIZE)
    before = whole.clone()
    factor = within_the_circle(SIZE)
    with torch.no_grad():
        found = linear_scan(factor, whole[:, 5:55], numbers(2, SIZE), overwrite=True)
    assert found.shape == (2, 50, SIZE)
    assert torch.equal(whole[:, :5], before[:, :5])
    assert torch.equal(whole[:, 55:], before[:, 55:])


@real_or_complex
@either_way
@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("kind", shapes_of_matrices)
def test_the_matrix_scan_is_its_reference(kind, steps, dtype, reverse):
    transition = matrices_of(*shapes_of_matrices[kind](BATCH, steps, 3), dtype=dtype)
    offset, initial = numbers(*BATCH, steps, 3, dtype=dtype), numbers(*BATCH, 3, dtype=dtype)
    for reset in (None, torch.rand(*BATCH, steps) < 0.2):
        for start in ([], [initial]):

            def run(op, reset=reset):
                return lambda *given_: op(*given_, reset=reset, reverse=reverse)

            found = gradients(run(matrix_scan), [transition, offset, *start])
            assert_same(found, gradients(run(matrix_reference.matrix_scan), [transition, offset, *start]))


@real_or_complex
@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("kind", shapes_of_transition)
def test_the_diagonal_filter_is_its_reference(kind, steps, dtype):
    transition = within_the_circle(*shapes_of_transition[kind](BATCH, steps, SIZE), dtype=dtype)
    given_ = [numbers(*BATCH, steps, SIZE, dtype=dtype) for _ in range(2)]
    strength = torch.tensor([0.0, 1e-3, 0.1, 1.0, 30.0, 1e6]).reshape(*BATCH, 1)
    tensors = [transition, *given_, strength, numbers(*BATCH, SIZE, dtype=dtype)]
    for reset in (None, torch.rand(*BATCH, steps) < 0.2):
        found = gradients(lambda *t, reset=reset: diagonal_filter(*t, reset=reset), tensors)
        assert_same(
            found, gradients(lambda *t, reset=reset: filter_reference.diagonal_filter(*t, reset=reset), tensors)
        )


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("kind", shapes_of_matrices)
def test_the_matrix_filter_is_its_reference(kind, steps):
    transition = matrices_of(*shapes_of_matrices[kind](BATCH, steps, 3))
    strength = torch.tensor([0.0, 1e-3, 0.1, 1.0, 3.0, 30.0]).reshape(*BATCH, 1)
    tensors = [transition, numbers(*BATCH, steps, 3), numbers(*BATCH, steps, 3), strength, numbers(*BATCH, 3)]
    for reset in (None, torch.rand(*BATCH, steps) < 0.2):
        found = gradients(lambda *t, reset=reset: matrix_filter(*t, reset=reset), tensors)
        expected = gradients(lambda *t, reset=reset: filter_reference.matrix_filter(*t, reset=reset), tensors)
        assert_same(found, expected, 1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
def test_a_filter_of_no_strength_is_the_scan_and_of_a_large_one_stays_at_what_is_observed(dtype):
    factors, initial = within_the_circle(2, 50, SIZE, dtype=dtype), numbers(2, SIZE, dtype=dtype)
    offset, observed = (numbers(2, 50, SIZE, dtype=dtype) for _ in range(2))
    plain = diagonal_filter(factors, offset, observed, torch.zeros(2, 1), initial)
    assert_close(plain, linear_scan(factors, offset, initial), atol=1e-12, rtol=0)
    held = diagonal_filter(factors, offset, observed, torch.full((2, 1), 1e14), initial)
    assert_close(held, observed, atol=1e-12, rtol=0)


@real_or_complex
@either_way
@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("kind", ["constant", "constant row", "of the sequence"])
def test_the_convolution_is_the_scan(kind, steps, dtype, reverse):
    transition = within_the_circle(*shapes_of_transition[kind](BATCH, steps, SIZE), dtype=dtype) / 1.1
    offset, initial = numbers(*BATCH, steps, SIZE, dtype=dtype), numbers(*BATCH, SIZE, dtype=dtype)
    for start in ([], [initial]):
        found = lti_convolution(transition, offset, *start, reverse=reverse)
        expected = linear_reference.linear_scan(transition, offset, *start, reverse=reverse)
        assert_close(found, expected, atol=1e-12, rtol=1e-12)


@either_way
@pytest.mark.parametrize("steps", [1, 2, 17, 50])
@real_or_complex
def test_the_gradients_of_the_convolution_are_those_of_the_scan(steps, dtype, reverse):
    # Zero is left out: the modulus of a complex number has no derivative there.
    transition = within_the_circle(SIZE, dtype=dtype) / 1.1 + 0.05
    tensors = [transition, numbers(*BATCH, steps, SIZE, dtype=dtype), numbers(*BATCH, SIZE, dtype=dtype)]
    found = gradients(lambda *t: lti_convolution(*t, reverse=reverse), tensors)
    expected = gradients(lambda *t: linear_reference.linear_scan(*t, reverse=reverse), tensors)
    assert_same(found, expected, 1e-11)


@pytest.mark.parametrize("given_", [{"transition": torch.ones(7, 3)}, {"reset": torch.ones(7, dtype=torch.bool)}])
def test_the_convolution_refuses_what_is_not_the_same_at_every_step(given_):
    with pytest.raises(errors.IncompatibleError, match=r"one transition for all steps.*Use the scan"):
        lti_convolution(given_.get("transition", torch.ones(3)), torch.ones(7, 3), reset=given_.get("reset"))


sizes = {
    "seed": st.integers(0, 2**31),
    "batch": st.lists(st.integers(0, 3), max_size=2).map(tuple),
    "steps": st.integers(0, 70),
    "size": st.integers(1, 6),
    "dtype": st.sampled_from([torch.float32, torch.float64, torch.complex64, torch.complex128]),
    "reverse": st.booleans(),
    "resets": st.booleans(),
    "starts": st.booleans(),
    "kind": st.sampled_from(sorted(set(shapes_of_transition) & set(shapes_of_matrices))),
}


@given(**sizes)
@properties
def test_any_scan_is_its_reference(seed, batch, steps, size, dtype, reverse, resets, starts, kind):
    generator = torch.Generator().manual_seed(seed)
    more = {"dtype": dtype, "generator": generator}
    factors = within_the_circle(*shapes_of_transition[kind](batch, steps, size), **more).to(dtype)
    matrices = matrices_of(*shapes_of_matrices[kind](batch, steps, size), **more)
    offset, initial = numbers(*batch, steps, size, **more), numbers(*batch, size, **more) if starts else None
    reset = torch.rand(*batch, steps, generator=generator) < 0.2 if resets else None
    eps = torch.finfo(dtype).eps
    for op, reference, transition in (
        (linear_scan, linear_reference.linear_scan, factors),
        (matrix_scan, matrix_reference.matrix_scan, matrices),
    ):
        found = op(transition, offset, initial, reset=reset, reverse=reverse)
        expected = reference(transition, offset, initial, reset=reset, reverse=reverse)
        largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        assert found.dtype == dtype
        assert_close(found, expected, atol=(steps + 10) * size * eps * largest, rtol=0)


@given(**{name: sizes[name] for name in ("seed", "batch", "steps", "size", "resets", "kind")}, power=st.floats(-6, 3))
@properties
def test_any_filter_is_its_reference(seed, batch, steps, size, resets, kind, power):
    generator = torch.Generator().manual_seed(seed)
    factors = within_the_circle(*shapes_of_transition[kind](batch, steps, size), generator=generator)
    matrices = matrices_of(*shapes_of_matrices[kind](batch, steps, size), generator=generator)
    offset, observed = (numbers(*batch, steps, size, generator=generator) for _ in range(2))
    initial, strength = numbers(*batch, size, generator=generator), torch.full((*batch, 1), 10.0**power)
    reset = torch.rand(*batch, steps, generator=generator) < 0.2 if resets else None
    for op, reference, transition in (
        (diagonal_filter, filter_reference.diagonal_filter, factors),
        (matrix_filter, filter_reference.matrix_filter, matrices),
    ):
        found = op(transition, offset, observed, strength, initial, reset=reset)
        expected = reference(transition, offset, observed, strength, initial, reset=reset)
        largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        assert_close(found, expected, atol=1e-11 * largest, rtol=0)


@pytest.mark.parametrize(("batch", "right"), [((2,), (2,)), ((), (3,)), ((3,), ()), ((2, 3), (1, 3)), ((0,), (0,))])
def test_large_equations_are_solved_one_by_one_on_several_threads(batch, right):
    """Torch solves many at once on several threads by routines that do not allow it."""
    n = SAFE + 32
    matrices = torch.eye(n, dtype=torch.float64) + torch.randn(*batch, n, n, dtype=torch.float64) / n
    columns = torch.randn(*right, n, 2, dtype=torch.float64)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = solve(matrices, columns)
    finally:
        torch.set_num_threads(before)
    assert found.shape == (*torch.broadcast_shapes(batch, right), n, 2)
    assert_close(matrices @ found, columns.expand_as(found))


def test_small_equations_have_derivatives_and_are_solved_together():
    matrices = torch.eye(4, dtype=torch.float64) + torch.randn(3, 4, 4, dtype=torch.float64) / 4
    columns = torch.randn(3, 4, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(solve, (matrices.requires_grad_(), columns.requires_grad_()))


@pytest.mark.parametrize(("growth", "strength"), [(4.0, 0.1), (8.0, 0.1), (4.0, 1e-3)])
def test_the_parallel_filter_keeps_its_digits_where_transitions_grow(growth, strength):
    steps, n = 400, 32
    tensors = (
        torch.randn(1, steps, n, n) * growth / n**0.5,
        torch.randn(1, steps, n),
        torch.randn(1, steps, n),
        torch.full((1, 1), strength),
        torch.randn(1, n),
    )
    expected = filter_reference.matrix_filter(*(t.double() for t in tensors))
    found = matrix_filter(*(t.float() for t in tensors)).double()
    assert (found - expected).abs().amax() < 1e-4 * expected.abs().amax()
