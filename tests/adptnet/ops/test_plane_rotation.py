"""Rotations against dense definitions: values, gradients and every edge."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from adptnet.ops import _build
from adptnet.ops.plane_rotation import cpu, reference, skew, turn, turned
from adptnet.recurrence.retractions import Cayley, Exponential
from support.members import all_retractions

BETAS = [0.0, 1e-3, 0.0125, 0.125, 1.0, 4.0, 30.0, 1000.0]
EDGES = ["generic", "near", "near opposite", "equal", "opposite"]


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
    return retraction.define(beta * skew(key, value))


@pytest.mark.parametrize("retraction", all_retractions, ids=repr)
@pytest.mark.parametrize("size", [2, 3, 13, 61, 97])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("edge", EDGES)
def test_a_rotation_is_its_dense_definition(retraction, size, beta, edge):
    key, value = key_value(size, edge)
    found = retraction(key, value, beta).dense()
    assert_close(found, dense(retraction, key, value, beta), atol=1e-12 * (1 + beta / 100), rtol=0)


@pytest.mark.parametrize("retraction", all_retractions, ids=repr)
@pytest.mark.parametrize("size", [2, 3, 13, 61, 97])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("edge", EDGES)
def test_single_precision_loses_nothing_near_parallel_vectors(retraction, size, beta, edge):
    for seed in range(5):
        key, value = key_value(size, edge, seed, torch.float32)
        found = retraction(key, value, beta).dense()
        expected = dense(retraction, key.double(), value.double(), beta)
        assert_close(found.double(), expected, atol=3e-7 + 1e-7 * beta, rtol=0)


@pytest.mark.parametrize("retraction", all_retractions, ids=repr)
@pytest.mark.parametrize("size", [2, 13])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("edge", [*EDGES, "zero key", "zero value", "not unit"])
def test_gradients_are_those_of_the_dense_definition(retraction, size, beta, edge):
    key, value = key_value(size, edge if edge in EDGES else "generic")
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
def test_apply_and_its_transpose_undo_each_other(retraction):
    rotation = retraction(*key_value(13), 2.0)
    x = torch.randn(13)
    assert_close(rotation.apply(x), rotation.dense() @ x)
    assert_close(rotation.apply_transposed(x), rotation.dense().mT @ x)
    assert_close(rotation.apply_transposed(rotation.apply(x)), x)


@pytest.mark.parametrize("retraction", all_retractions, ids=repr)
def test_a_batch_of_rotations_is_each_alone(retraction):
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
def test_second_derivatives_are_right_across_the_change_of_formula(retraction):
    for angle_squared in (0.0, 1e-8, 0.3, 0.999999, 1.0, 1.000001, 7.0):
        s = torch.tensor([angle_squared], requires_grad=True)
        assert torch.autograd.gradcheck(lambda s: retraction.coefficients(s), (s + 0,))
        first = torch.autograd.grad(retraction.coefficients(s)[0].sum(), s, create_graph=True)[0]
        second = torch.autograd.grad(first.sum(), s)[0]
        assert second.isfinite().all()
    around = [torch.tensor([s], requires_grad=True) for s in (1 - 1e-9, 1 + 1e-9)]
    jumps = [torch.autograd.grad(sum(retraction.coefficients(s)).sum(), s)[0] for s in around]
    assert_close(jumps[0], jumps[1], atol=1e-8, rtol=0)


def turning(*lead, size=13, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = [(*lead, size)] * 3 + [(*lead, 1)] * 3
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def with_gradients(run, inputs):
    y = run(*inputs)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y.detach(), *torch.autograd.grad(y, inputs, weights)]


@pytest.fixture
def always(monkeypatch):
    """The kernel also for few numbers; its calls are counted."""
    if not cpu.ready(torch.float64):
        pytest.skip("there is no compiled kernel")
    calls, forward = [], cpu.forward
    monkeypatch.setattr(turn, "LEAST", 0)
    monkeypatch.setattr(cpu, "forward", lambda *inputs: calls.append(1) or forward(*inputs))
    return calls


@pytest.mark.parametrize("size", [1, 2, 3, 8, 13, 64, 97])
@pytest.mark.parametrize("lead", [(), (1,), (5,), (3, 7)])
def test_many_are_turned_as_by_the_reference(size, lead, always):
    inputs = turning(*lead, size=size)
    for found, expected in zip(*(with_gradients(run, inputs) for run in (turned, reference.turned)), strict=True):
        assert_close(found, expected, atol=1e-12 * max(1.0, float(expected.abs().max())), rtol=0)
    assert always


def test_turning_in_single_precision_rounds_as_the_reference_does(always):
    exact = with_gradients(reference.turned, turning(9, size=97))
    narrow = [t.detach().float().requires_grad_() for t in turning(9, size=97)]
    for found, right in zip(with_gradients(turned, narrow), exact, strict=True):
        assert float((found - right).abs().max()) <= 97 * torch.finfo(torch.float32).eps * float(right.abs().max())


def test_a_key_that_is_made_from_the_vector_is_counted_once(always):
    def run(turn_by, **options):
        x, *others = turning(5)
        made = x * 1
        return torch.autograd.grad(turn_by(made, made * 2, *others[1:]).sum(), x, **options)[0]

    assert_close(run(turned, create_graph=True), run(reference.turned))
    assert always


def test_turning_does_not_depend_on_threads(always, monkeypatch):
    monkeypatch.setattr(cpu, "LEAST", 1)
    inputs, before = turning(37, size=61), torch.get_num_threads()
    try:
        each = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            each.append(with_gradients(turned, inputs))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in each[1:] for a, b in zip(each[0], other, strict=True))


def test_rows_that_do_not_lie_one_after_another(always):
    inputs = [t.detach().transpose(0, 1) for t in turning(4, 6)]
    assert_close(turned(*inputs), reference.turned(*inputs), atol=1e-12, rtol=0)
    strided = [t.detach().repeat_interleave(2, -1)[..., ::2] for t in turning(4, 6)]
    assert_close(turned(*strided), reference.turned(*strided), atol=1e-12, rtol=0)


def test_second_derivatives_of_turning(always):
    inputs = turning(2, size=3)
    assert torch.autograd.gradgradcheck(turned, inputs)


def test_transforms_forward_mode_and_counting_see_every_operation(always):
    inputs = [t.detach() for t in turning(4, size=5)]
    alone = torch.func.vmap(turned)(*inputs)
    torch.func.jvp(lambda x: turned(x, *inputs[1:]), (inputs[0],), (inputs[0],))
    with FlopCounterMode(display=False):
        turned(*inputs)
    assert not always
    assert_close(alone, turned(*inputs), atol=1e-12, rtol=0)
    assert len(always) == 1


def test_what_the_kernel_does_not_take_is_turned_by_torch(always, monkeypatch):
    x, key, offset, *columns = (t.detach() for t in turning(4, size=5))
    wide = x.unsqueeze(1).expand(4, 3, 5)
    turned(wide, key.unsqueeze(1), offset.unsqueeze(1), *(c.unsqueeze(1) for c in columns))  # broadcast
    turned(*(t.bfloat16() for t in (x, key, offset, *columns)))
    assert turned(*(t[:0] for t in (x, key, offset, *columns))).shape == (0, 5)
    assert not always
    monkeypatch.setenv("ADPTNET_BACKEND", "reference")
    turned(x, key, offset, *columns)
    assert not always


def test_the_compiler_of_torch_and_the_operation_agree(always):
    inputs = [t.detach() for t in turning(4, size=5)]
    torch.library.opcheck(turn._turned, tuple(t.requires_grad_() for t in inputs))


def test_few_numbers_are_left_to_torch():
    assert turn.LEAST > 4 * 64
    assert "plane_rotation" in _build.OPERATIONS
