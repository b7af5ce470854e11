"""Scans, filters and the convolution against their references, and the references against dense linear systems."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from adptnet import errors
from adptnet.ops._linalg import MAX_BATCHED_ROWS, solve_linear
from adptnet.ops.kalman_filter import diagonal_filter, matrix_filter
from adptnet.ops.kalman_filter import reference as filter_reference
from adptnet.ops.linear_scan import linear_scan
from adptnet.ops.linear_scan import reference as linear_reference
from adptnet.ops.lti_convolution import lti_convolution
from adptnet.ops.matrix_scan import matrix_scan
from adptnet.ops.matrix_scan import reference as matrix_reference
from support.kernels import use_threads
from support.scans import either_way, randn, random_eigenvalues, real_or_complex, run_with_gradients, transition_shapes

LENGTHS = [0, 1, 2, 15, 16, 17, 50, 101]
BATCH, SIZE = (2, 3), 5
properties = settings(deadline=None, derandomize=True, max_examples=60)

matrix_shapes = {
    "constant": lambda batch, steps, n: (1, n, n),
    "per sequence": lambda batch, steps, n: (*batch, 1, n, n),
    "per step": lambda batch, steps, n: (steps, n, n),
    "per sequence and step": lambda batch, steps, n: (*batch, steps, n, n),
}


def random_matrices(*shape, dtype=torch.float64, generator=None):
    return randn(*shape, dtype=dtype, generator=generator) / shape[-1] ** 0.5


def assert_results_close(found, expected, tolerance=1e-12):
    for a, b in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        scale = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
        assert_close(a, b, atol=tolerance * scale, rtol=0)


def solve_dense_system(matrices, offset, initial, reverse):
    """Solve x_t = A_t x_{t-1} + b_t as one linear system of all steps, for one sequence."""
    steps, n = offset.shape
    if reverse:
        return solve_dense_system(matrices.flip(0), offset.flip(0), initial, False).flip(0)
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
    factors, matrices = random_eigenvalues(steps, n, dtype=dtype), random_matrices(steps, n, n, dtype=dtype)
    offset, initial = randn(steps, n, dtype=dtype), randn(n, dtype=dtype)
    reset = torch.tensor([False, False, True, False, False, True, False])
    for resets in (None, reset):
        kept = torch.ones(steps) if resets is None else (~resets).to(torch.float64)
        diagonal = torch.diag_embed(factors) * kept[:, None, None]
        found = linear_reference.linear_scan(factors, offset, initial, reset=resets, reverse=reverse)
        assert_close(found, solve_dense_system(diagonal, offset, initial, reverse), atol=1e-12, rtol=0)
        found = matrix_reference.matrix_scan(matrices, offset, initial, reset=resets, reverse=reverse)
        expected = solve_dense_system(matrices * kept[:, None, None], offset, initial, reverse)
        assert_close(found, expected, atol=1e-12, rtol=0)


def filter_by_least_squares(matrices, offset, observed, strength, initial):
    """Return the last filtered mean: the minimizer of the sum of squared noises with weights 1 and `strength`."""
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


def test_the_reference_filters_solve_the_least_squares_problem():
    steps, n, strength = 6, 3, 0.7
    matrices, factors = random_matrices(steps, n, n), random_eigenvalues(steps, n)
    offset, observed, initial = randn(steps, n), randn(steps, n), randn(n)
    weight = torch.tensor([strength])
    for t in range(1, steps + 1):
        arguments = (offset[:t], observed[:t], strength, initial)
        found = filter_reference.matrix_filter(matrices, offset, observed, weight, initial)[t - 1]
        assert_close(found, filter_by_least_squares(matrices[:t], *arguments), atol=1e-12, rtol=0)
        found = filter_reference.diagonal_filter(factors, offset, observed, weight, initial)[t - 1]
        assert_close(found, filter_by_least_squares(torch.diag_embed(factors[:t]), *arguments), atol=1e-12, rtol=0)


def test_a_complex_filter_is_the_real_one_on_pairs():
    steps, n = 9, 2
    factors = random_eigenvalues(steps, n, dtype=torch.complex128)
    offset, observed = (randn(steps, n, dtype=torch.complex128) for _ in range(2))
    initial, weight = randn(n, dtype=torch.complex128), torch.tensor([0.4])
    blocks = torch.zeros(steps, 2 * n, 2 * n)
    for i in range(n):
        a, b = factors[:, i].real, factors[:, i].imag
        pair = torch.stack((torch.stack((a, -b), -1), torch.stack((b, a), -1)), -2)
        blocks[:, 2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = pair

    def paired(x):
        return torch.view_as_real(x).flatten(-2)

    found = filter_reference.diagonal_filter(factors, offset, observed, weight, initial)
    expected = filter_reference.matrix_filter(blocks, paired(offset), paired(observed), weight, paired(initial))
    assert_close(paired(found), expected, atol=1e-12, rtol=0)


@real_or_complex
@either_way
@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("shape", transition_shapes)
def test_the_linear_scan_equals_its_reference(shape, steps, dtype, reverse):
    transition = random_eigenvalues(*transition_shapes[shape](BATCH, steps, SIZE), dtype=dtype)
    offset, initial = randn(*BATCH, steps, SIZE, dtype=dtype), randn(*BATCH, SIZE, dtype=dtype)
    for reset in (None, torch.rand(*BATCH, steps) < 0.2):
        for start in ([], [initial]):

            def run(op, reset=reset):
                return lambda *arguments: op(*arguments, reset=reset, reverse=reverse)

            found = run_with_gradients(run(linear_scan), [transition, offset, *start])
            expected = run_with_gradients(run(linear_reference.linear_scan), [transition, offset, *start])
            assert_results_close(found, expected)
            with torch.no_grad():
                room = offset.clone()
                over = linear_scan(transition, room, *start, reset=reset, reverse=reverse, overwrite=True)
                assert_close(over, expected[0].detach(), atol=1e-12, rtol=1e-12)
                kept = linear_scan(transition, offset, *start, reset=reset, reverse=reverse)
                assert_close(kept, expected[0].detach(), atol=1e-12, rtol=1e-12)


def test_a_scan_without_overwrite_does_not_modify_its_inputs():
    transition, offset, initial = random_eigenvalues(50, SIZE), randn(2, 50, SIZE), randn(2, SIZE)
    matrices = random_matrices(50, SIZE, SIZE)
    before = [tensor.clone() for tensor in (transition, offset, initial, matrices)]
    with torch.no_grad():
        linear_scan(transition, offset, initial)
        matrix_scan(matrices, offset, initial)
        lti_convolution(transition[0], offset, initial)
    for tensor, copy in zip((transition, offset, initial, matrices), before, strict=True):
        assert torch.equal(tensor, copy)


def test_overwriting_a_slice_does_not_modify_the_rest():
    whole = randn(2, 60, SIZE)
    before = whole.clone()
    factor = random_eigenvalues(SIZE)
    with torch.no_grad():
        found = linear_scan(factor, whole[:, 5:55], randn(2, SIZE), overwrite=True)
    assert found.shape == (2, 50, SIZE)
    assert torch.equal(whole[:, :5], before[:, :5])
    assert torch.equal(whole[:, 55:], before[:, 55:])


@real_or_complex
@either_way
@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("shape", matrix_shapes)
def test_the_matrix_scan_equals_its_reference(shape, steps, dtype, reverse):
    transition = random_matrices(*matrix_shapes[shape](BATCH, steps, 3), dtype=dtype)
    offset, initial = randn(*BATCH, steps, 3, dtype=dtype), randn(*BATCH, 3, dtype=dtype)
    for reset in (None, torch.rand(*BATCH, steps) < 0.2):
        for start in ([], [initial]):

            def run(op, reset=reset):
                return lambda *arguments: op(*arguments, reset=reset, reverse=reverse)

            found = run_with_gradients(run(matrix_scan), [transition, offset, *start])
            assert_results_close(
                found, run_with_gradients(run(matrix_reference.matrix_scan), [transition, offset, *start])
            )


@real_or_complex
@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("shape", transition_shapes)
def test_the_diagonal_filter_equals_its_reference(shape, steps, dtype):
    transition = random_eigenvalues(*transition_shapes[shape](BATCH, steps, SIZE), dtype=dtype)
    arguments = [randn(*BATCH, steps, SIZE, dtype=dtype) for _ in range(2)]
    strength = torch.tensor([0.0, 1e-3, 0.1, 1.0, 30.0, 1e6]).reshape(*BATCH, 1)
    tensors = [transition, *arguments, strength, randn(*BATCH, SIZE, dtype=dtype)]
    for reset in (None, torch.rand(*BATCH, steps) < 0.2):
        found = run_with_gradients(lambda *t, reset=reset: diagonal_filter(*t, reset=reset), tensors)
        assert_results_close(
            found,
            run_with_gradients(lambda *t, reset=reset: filter_reference.diagonal_filter(*t, reset=reset), tensors),
        )


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("shape", matrix_shapes)
def test_the_matrix_filter_equals_its_reference(shape, steps):
    transition = random_matrices(*matrix_shapes[shape](BATCH, steps, 3))
    strength = torch.tensor([0.0, 1e-3, 0.1, 1.0, 3.0, 30.0]).reshape(*BATCH, 1)
    tensors = [transition, randn(*BATCH, steps, 3), randn(*BATCH, steps, 3), strength, randn(*BATCH, 3)]
    for reset in (None, torch.rand(*BATCH, steps) < 0.2):
        found = run_with_gradients(lambda *t, reset=reset: matrix_filter(*t, reset=reset), tensors)
        expected = run_with_gradients(lambda *t, reset=reset: filter_reference.matrix_filter(*t, reset=reset), tensors)
        assert_results_close(found, expected, 1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
def test_a_filter_of_zero_strength_is_the_scan_and_of_large_strength_follows_the_observations(dtype):
    factors, initial = random_eigenvalues(2, 50, SIZE, dtype=dtype), randn(2, SIZE, dtype=dtype)
    offset, observed = (randn(2, 50, SIZE, dtype=dtype) for _ in range(2))
    plain = diagonal_filter(factors, offset, observed, torch.zeros(2, 1), initial)
    assert_close(plain, linear_scan(factors, offset, initial), atol=1e-12, rtol=0)
    held = diagonal_filter(factors, offset, observed, torch.full((2, 1), 1e14), initial)
    assert_close(held, observed, atol=1e-12, rtol=0)


@real_or_complex
@either_way
@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("shape", ["constant", "constant row", "per sequence"])
def test_the_convolution_equals_the_scan(shape, steps, dtype, reverse):
    transition = random_eigenvalues(*transition_shapes[shape](BATCH, steps, SIZE), dtype=dtype) / 1.1
    offset, initial = randn(*BATCH, steps, SIZE, dtype=dtype), randn(*BATCH, SIZE, dtype=dtype)
    for start in ([], [initial]):
        found = lti_convolution(transition, offset, *start, reverse=reverse)
        expected = linear_reference.linear_scan(transition, offset, *start, reverse=reverse)
        assert_close(found, expected, atol=1e-12, rtol=1e-12)


@either_way
@pytest.mark.parametrize("steps", [1, 2, 17, 50])
@real_or_complex
def test_the_gradients_of_the_convolution_equal_those_of_the_scan(steps, dtype, reverse):
    # Zero is excluded: the modulus of a complex number is not differentiable there.
    transition = random_eigenvalues(SIZE, dtype=dtype) / 1.1 + 0.05
    tensors = [transition, randn(*BATCH, steps, SIZE, dtype=dtype), randn(*BATCH, SIZE, dtype=dtype)]
    found = run_with_gradients(lambda *t: lti_convolution(*t, reverse=reverse), tensors)
    expected = run_with_gradients(lambda *t: linear_reference.linear_scan(*t, reverse=reverse), tensors)
    assert_results_close(found, expected, 1e-11)


@pytest.mark.parametrize("arguments", [{"transition": torch.ones(7, 3)}, {"reset": torch.ones(7, dtype=torch.bool)}])
def test_the_convolution_rejects_a_varying_transition(arguments):
    with pytest.raises(errors.IncompatibleError, match=r"one transition for all steps.*Use the scan"):
        lti_convolution(arguments.get("transition", torch.ones(3)), torch.ones(7, 3), reset=arguments.get("reset"))


sizes = {
    "seed": st.integers(0, 2**31),
    "batch": st.lists(st.integers(0, 3), max_size=2).map(tuple),
    "steps": st.integers(0, 70),
    "size": st.integers(1, 6),
    "dtype": st.sampled_from([torch.float32, torch.float64, torch.complex64, torch.complex128]),
    "reverse": st.booleans(),
    "resets": st.booleans(),
    "starts": st.booleans(),
    "shape": st.sampled_from(sorted(set(transition_shapes) & set(matrix_shapes))),
}


@given(**sizes)
@properties
def test_any_scan_equals_its_reference(seed, batch, steps, size, dtype, reverse, resets, starts, shape):
    generator = torch.Generator().manual_seed(seed)
    more = {"dtype": dtype, "generator": generator}
    factors = random_eigenvalues(*transition_shapes[shape](batch, steps, size), **more).to(dtype)
    matrices = random_matrices(*matrix_shapes[shape](batch, steps, size), **more)
    offset, initial = randn(*batch, steps, size, **more), randn(*batch, size, **more) if starts else None
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


@given(**{name: sizes[name] for name in ("seed", "batch", "steps", "size", "resets", "shape")}, power=st.floats(-6, 3))
@properties
def test_any_filter_equals_its_reference(seed, batch, steps, size, resets, shape, power):
    generator = torch.Generator().manual_seed(seed)
    factors = random_eigenvalues(*transition_shapes[shape](batch, steps, size), generator=generator)
    matrices = random_matrices(*matrix_shapes[shape](batch, steps, size), generator=generator)
    offset, observed = (randn(*batch, steps, size, generator=generator) for _ in range(2))
    initial, strength = randn(*batch, size, generator=generator), torch.full((*batch, 1), 10.0**power)
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
def test_large_systems_are_solved_sequentially_on_several_threads(batch, right):
    """On several threads torch solves large batches with routines that are not thread-safe."""
    n = MAX_BATCHED_ROWS + 32
    matrices = torch.eye(n, dtype=torch.float64) + torch.randn(*batch, n, n, dtype=torch.float64) / n
    columns = torch.randn(*right, n, 2, dtype=torch.float64)
    with use_threads(2):
        found = solve_linear(matrices, columns)
    assert found.shape == (*torch.broadcast_shapes(batch, right), n, 2)
    assert_close(matrices @ found, columns.expand_as(found))


def test_small_systems_are_solved_in_one_batch_with_gradients():
    matrices = torch.eye(4, dtype=torch.float64) + torch.randn(3, 4, 4, dtype=torch.float64) / 4
    columns = torch.randn(3, 4, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(solve_linear, (matrices.requires_grad_(), columns.requires_grad_()))


@pytest.mark.parametrize(("growth", "strength"), [(4.0, 0.1), (8.0, 0.1), (4.0, 1e-3)])
def test_the_parallel_filter_stays_accurate_for_expanding_transitions(growth, strength):
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
