"""Products in bfloat16: off by default; inside the context K, V, B and read-out are rounded, and nothing else."""

import pytest
import torch

from adptnet.cells import ADPTSpec
from adptnet.errors import InputError
from adptnet.nn import LayerSpec
from adptnet.ops._backends import record_runs
from adptnet.ops.products import bfloat16_products, has_bfloat16_products, multiply
from adptnet.recurrence.directions import FromInput, FromState
from adptnet.recurrence.drive import LRU, SoftplusGate
from adptnet.recurrence.projections import Dense, LowRank


@pytest.fixture(autouse=True)
def _use_float32():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


def round_to_bfloat16(x):
    return x.bfloat16().float()


def test_a_product_rounds_its_arguments_and_its_result():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 7), torch.randn(7, 3)
    with bfloat16_products():
        rounded = multiply(x, weight)
    assert rounded.dtype == torch.float32
    exact = round_to_bfloat16(x).double() @ round_to_bfloat16(weight).double()
    torch.testing.assert_close(rounded.double(), exact, rtol=2**-8, atol=2**-8)
    assert not torch.equal(rounded, x @ weight)
    assert torch.equal(multiply(x, weight), x @ weight)


def test_the_context_ends_with_an_exception_and_can_be_nested():
    with pytest.raises(InputError), bfloat16_products():
        raise InputError("")
    assert not has_bfloat16_products()
    with bfloat16_products():
        with bfloat16_products(enabled=False):
            assert not has_bfloat16_products()
        assert has_bfloat16_products()


def test_products_in_float64_are_unchanged():
    layer = LayerSpec(ADPTSpec(6)).build(dtype=torch.float64)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    expected = layer(x)[0]
    with bfloat16_products():
        torch.testing.assert_close(layer(x)[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("direction", [FromState(), FromState(relu=True), FromState(heads=3), FromInput()])
@pytest.mark.parametrize("projection", [Dense(), Dense(bias=True), LowRank(rank=2)])
def test_a_layer_in_bfloat16_is_that_of_rounded_products_with_its_gradients(direction, projection):
    torch.manual_seed(0)
    spec = ADPTSpec(12, beta=1.0, direction=direction, projection=projection, gain=LRU(), gate=SoftplusGate())
    layer = LayerSpec(spec, readout=Dense()).build()
    x = torch.randn(4, 6, 12)
    expected = layer(x)[0]
    expected.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    with bfloat16_products():
        rounded = layer(x)[0]
    rounded.square().sum().backward()
    assert rounded.dtype == torch.float32
    error = (rounded - expected).norm() / expected.norm()
    assert 0 < error < 0.05
    for name, parameter in layer.named_parameters():
        if name in gradients and gradients[name].norm() > 0:
            assert (parameter.grad - gradients[name]).norm() < 0.15 * gradients[name].norm(), name
    assert torch.equal(layer(x)[0], expected)  # the layer itself is unchanged


def test_the_state_is_not_rounded():
    """At β = 0 and without B the state is a sum of the inputs, exactly as in float32."""
    layer = LayerSpec(ADPTSpec(8, beta=0.0)).build()
    drive = torch.randn(3, 9, 8)
    expected = layer.cell.scan(drive, torch.zeros(3, 8))
    with bfloat16_products():
        assert torch.equal(layer.cell.scan(drive, torch.zeros(3, 8)), expected)


def test_the_reason_for_the_loop_is_recorded():
    layer = LayerSpec(ADPTSpec(8)).build()
    with bfloat16_products(), record_runs() as runs:
        layer(torch.randn(70, 3, 8))
    assert "bfloat16" in next(run.backend.reason for run in runs if run.phase == "forward")


def test_one_step_and_a_sequence_agree_in_bfloat16():
    layer = LayerSpec(ADPTSpec(8, beta=1.0)).build()
    x = torch.randn(2, 4, 8)
    with bfloat16_products():
        whole, state = layer(x)[0], None
        for t in range(4):
            out, state = layer.step(x[:, t], state)
            torch.testing.assert_close(out, whole[:, t], rtol=2e-2, atol=2e-2)
