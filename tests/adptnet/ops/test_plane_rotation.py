"""Plane rotations against dense definitions: values, gradients and all edge cases."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from adptnet.ops import _build
from adptnet.ops.plane_rotation import apply, cpu, reference, rotate, skew
from adptnet.recurrence.retractions import Cayley, Exponential
from support.kernels import use_threads
from support.members import all_retractions

BETAS = [0.0, 1e-3, 0.0125, 0.125, 1.0, 4.0, 30.0, 1000.0]
EDGE_CASES = ["generic", "near", "near opposite", "equal", "opposite"]


def key_value(size: int, edge: str = "generic", seed: int = 0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, size, generator=generator).to(dtype)
    key, value = key / key.norm(), value / value.norm()
    if edge != "generic":
        sign = -1.0 if "opposite" in edge else 1.0
        value = sign * key + (1e-6 * value if "near" in edge else 0 * value)
        value = value / value.norm() if "near" in edge else value
    return key, value


def dense(retraction, key, value, beta):
    return retraction.reference_matrix(beta * skew(key, value))


@pytest.mark.parametrize("retraction", all_retractions, ids=repr)
@pytest.mark.parametrize("size", [2, 3, 13, 61, 97])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("edge", EDGE_CASES)
def test_a_rotation_equals_its_dense_definition(retraction, size, beta, edge):
    key, value = key_value(size, edge)
    found = retraction(key, value, beta).dense()
    assert_close(found, dense(retraction, key, value, beta), atol=1e-12 * (1 + beta / 100), rtol=0)


@pytest.mark.parametrize("retraction", all_retractions, ids=repr)
@pytest.mark.parametrize("size", [2, 3, 13, 61, 97])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("edge", EDGE_CASES)
def test_single_precision_is_accurate_near_parallel_vectors(retraction, size, beta, edge):
    for seed in range(5):
        key, value = key_value(size, edge, seed, torch.float32)
        found = retraction(key, value, beta).dense()
        expected = dense(retraction, key.double(), value.double(), beta)
        assert_close(found.double(), expected, atol=3e-7 + 1e-7 * beta, rtol=0)


@pytest.mark.parametrize("retraction", all_retractions, ids=repr)
@pytest.mark.parametrize("size", [2, 13])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("edge", [*EDGE_CASES, "zero key", "zero value", "not unit"])
def test_gradients_equal_those_of_the_dense_definition(retraction, size, beta, edge):
    key, value = key_value(size, edge if edge in EDGE_CASES else "generic")
    key = key * {"zero key": 0.0, "not unit": 1.7}.get(edge, 1.0)
    value = value * {"zero value": 0.0, "not unit": 0.4}.get(edge, 1.0)
    step = torch.tensor(beta)
    weights = torch.randn(size, size)
    leaves = [t.clone().requires_grad_() for t in (key, value, step)]
    found = torch.autograd.grad((retraction(*leaves).dense() * weights).sum(), leaves)
    expected = torch.autograd.grad((dense(retraction, *leaves) * weights).sum(), leaves)
    for f, e in zip(found, expected, strict=True):
        assert_close(f, e, atol=1e-10 * (1 + beta), rtol=1e-9)


@pytest.mark.parametrize("retraction", all_retractions, ids=repr)
@pytest.mark.parametrize("size", [2, 3, 61])
@pytest.mark.parametrize("beta", BETAS)
def test_a_retraction_is_a_rotation(retraction, size, beta):
    q = retraction(*key_value(size), beta).dense()
    assert_close(q @ q.mT, torch.eye(size), atol=1e-12, rtol=0)
    assert torch.linalg.det(q) > 0


@pytest.mark.parametrize("retraction", all_retractions, ids=repr)
def test_apply_and_its_transpose_are_inverse(retraction):
    rotation = retraction(*key_value(13), 2.0)
    x = torch.randn(13)
    assert_close(rotation.apply(x), rotation.dense() @ x)
    assert_close(rotation.apply_transposed(x), rotation.dense().mT @ x)
    assert_close(rotation.apply_transposed(rotation.apply(x)), x)


@pytest.mark.parametrize("retraction", all_retractions, ids=repr)
def test_a_batch_of_rotations_equals_single_rotations(retraction):
    pairs = [key_value(7, seed=s) for s in range(6)]
    key = torch.stack([k for k, _ in pairs]).reshape(2, 3, 7)
    value = torch.stack([v for _, v in pairs]).reshape(2, 3, 7)
    batch = retraction(key, value, 1.5).dense().reshape(6, 7, 7)
    assert_close(batch, torch.stack([retraction(k, v, 1.5).dense() for k, v in pairs]))


def test_the_two_retractions_agree_to_second_order():
    key, value = key_value(13)
    betas = torch.tensor([0.1, 0.05, 0.025])
    errors = [
        (Exponential()(key, value, float(b)).dense() - Cayley()(key, value, float(b)).dense()).norm() for b in betas
    ]
    slope = (errors[0] / errors[2]).log() / (betas[0] / betas[2]).log()
    assert 2.9 < slope < 3.1


@pytest.mark.parametrize("retraction", all_retractions, ids=repr)
def test_second_derivatives_are_correct_across_the_change_of_formula(retraction):
    for angle_squared in (0.0, 1e-8, 0.3, 0.999999, 1.0, 1.000001, 7.0):
        s = torch.tensor([angle_squared], requires_grad=True)
        assert torch.autograd.gradcheck(lambda s: retraction.coefficients(s), (s + 0,))
        first = torch.autograd.grad(retraction.coefficients(s)[0].sum(), s, create_graph=True)[0]
        second = torch.autograd.grad(first.sum(), s)[0]
        assert second.isfinite().all()
    around = [torch.tensor([s], requires_grad=True) for s in (1 - 1e-9, 1 + 1e-9)]
    jumps = [torch.autograd.grad(sum(retraction.coefficients(s)).sum(), s)[0] for s in around]
    assert_close(jumps[0], jumps[1], atol=1e-8, rtol=0)


def make_inputs(*lead, size=13, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = [(*lead, size)] * 3 + [(*lead, 1)] * 3
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def run_with_gradients(run, inputs):
    y = run(*inputs)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y.detach(), *torch.autograd.grad(y, inputs, weights)]


@pytest.fixture
def kernel_calls(monkeypatch):
    """Use the kernel for small tensors too, and return a list of its calls."""
    if not cpu.has_kernel(torch.float64):
        pytest.skip("there is no compiled kernel")
    calls, forward = [], cpu.forward
    monkeypatch.setattr(apply, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(cpu, "forward", lambda *inputs: calls.append(1) or forward(*inputs))
    return calls


@pytest.mark.parametrize("size", [1, 2, 3, 8, 13, 64, 97])
@pytest.mark.parametrize("lead", [(), (1,), (5,), (3, 7)])
def test_the_kernel_equals_the_reference(size, lead, kernel_calls):
    inputs = make_inputs(*lead, size=size)
    for found, expected in zip(*(run_with_gradients(run, inputs) for run in (rotate, reference.rotate)), strict=True):
        assert_close(found, expected, atol=1e-12 * max(1.0, float(expected.abs().max())), rtol=0)
    assert kernel_calls


def test_in_single_precision_the_kernel_is_as_accurate_as_rounding_allows(kernel_calls):
    exact = run_with_gradients(reference.rotate, make_inputs(9, size=97))
    narrow = [t.detach().float().requires_grad_() for t in make_inputs(9, size=97)]
    for found, right in zip(run_with_gradients(rotate, narrow), exact, strict=True):
        assert float((found - right).abs().max()) <= 97 * torch.finfo(torch.float32).eps * float(right.abs().max())


def test_a_key_computed_from_the_vector_is_differentiated_once(kernel_calls):
    def run(run_rotation, **options):
        x, *others = make_inputs(5)
        made = x * 1
        return torch.autograd.grad(run_rotation(made, made * 2, *others[1:]).sum(), x, **options)[0]

    assert_close(run(rotate, create_graph=True), run(reference.rotate))
    assert kernel_calls


def test_results_do_not_depend_on_the_number_of_threads(kernel_calls, monkeypatch):
    monkeypatch.setattr(cpu, "MIN_WORK_PER_THREAD", 1)
    inputs, each = make_inputs(37, size=61), []
    for threads in (1, 2, 3):
        with use_threads(threads):
            each.append(run_with_gradients(rotate, inputs))
    assert all(torch.equal(a, b) for other in each[1:] for a, b in zip(each[0], other, strict=True))


def test_non_contiguous_rows(kernel_calls):
    inputs = [t.detach().transpose(0, 1) for t in make_inputs(4, 6)]
    assert_close(rotate(*inputs), reference.rotate(*inputs), atol=1e-12, rtol=0)
    strided = [t.detach().repeat_interleave(2, -1)[..., ::2] for t in make_inputs(4, 6)]
    assert_close(rotate(*strided), reference.rotate(*strided), atol=1e-12, rtol=0)


def test_double_backward(kernel_calls):
    inputs = make_inputs(2, size=3)
    assert torch.autograd.gradgradcheck(rotate, inputs)


def test_transforms_forward_mode_and_flop_counters_see_single_operations(kernel_calls):
    inputs = [t.detach() for t in make_inputs(4, size=5)]
    alone = torch.func.vmap(rotate)(*inputs)
    torch.func.jvp(lambda x: rotate(x, *inputs[1:]), (inputs[0],), (inputs[0],))
    with FlopCounterMode(display=False):
        rotate(*inputs)
    assert not kernel_calls
    assert_close(alone, rotate(*inputs), atol=1e-12, rtol=0)
    assert len(kernel_calls) == 1


def test_unsupported_inputs_run_the_reference(kernel_calls, monkeypatch):
    x, key, offset, *columns = (t.detach() for t in make_inputs(4, size=5))
    wide = x.unsqueeze(1).expand(4, 3, 5)
    rotate(wide, key.unsqueeze(1), offset.unsqueeze(1), *(c.unsqueeze(1) for c in columns))  # broadcast
    rotate(*(t.bfloat16() for t in (x, key, offset, *columns)))
    assert rotate(*(t[:0] for t in (x, key, offset, *columns))).shape == (0, 5)
    assert not kernel_calls
    monkeypatch.setenv("ADPTNET_BACKEND", "reference")
    rotate(x, key, offset, *columns)
    assert not kernel_calls


def test_the_operation_passes_opcheck(kernel_calls):
    inputs = [t.detach() for t in make_inputs(4, size=5)]
    torch.library.opcheck(apply._rotate, tuple(t.requires_grad_() for t in inputs))


def test_small_tensors_run_the_reference():
    assert apply.MIN_ELEMENTS > 4 * 64
    assert "plane_rotation" in _build.OPERATIONS
