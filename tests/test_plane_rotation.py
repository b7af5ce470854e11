"""Rotations against dense definitions: values, gradients and every edge."""

import pytest
import torch
from torch.testing import assert_close

from adptnet.ops.plane_rotation import skew
from adptnet.retractions import Cayley, Exponential
from members import all_retractions

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
