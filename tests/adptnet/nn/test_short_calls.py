"""Short calls without autograd equal the general path, and see every change of the layer."""

import copy

import pytest
import torch

from adptnet import ADPTNet
from adptnet.nn import short_calls
from support.members import legal_layers


def general(layer, x, state=None):
    with torch.enable_grad():  # a parameter requires a gradient: the general path
        y, after = layer(x, state)
    return y.detach(), after.detach()


@pytest.mark.parametrize("axes", list(legal_layers()), ids=str)
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_a_short_call_equals_the_general_path(axes, batch):
    layer = ADPTNet(**axes, dtype=torch.float64)
    x = torch.randn(batch, 5, axes["width"], dtype=torch.float64)
    expected, end = general(layer, x)
    with torch.no_grad():
        y, state = layer(x[:, :3])
        for t in (3, 4):
            stepped, state = layer.step(x[:, t], state)
            torch.testing.assert_close(stepped, expected[:, t], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(y, expected[:, :3], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(tuple(state), tuple(end), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 64, 97])
def test_the_default_layer_is_prepared_at_odd_sizes(size, dtype):
    layer, x = ADPTNet(size, dtype=dtype), torch.randn(9, 2, size, dtype=dtype)
    assert short_calls.find_prepared(layer) is not None
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[0], general(layer, x)[0])


def test_every_change_of_the_layer_is_seen():
    layer, x = ADPTNet(6, beta=1.0), torch.randn(2, 3, 6)
    with torch.no_grad():
        layer(x)
        for parameter in layer.parameters():
            parameter.data.add_(0.1)  # does not change the version of the parameter
            torch.testing.assert_close(layer(x)[0], general(layer, x)[0])
        copied = copy.deepcopy(layer).to(torch.float32)
        torch.testing.assert_close(copied(x.float())[0], general(copied, x.float())[0])
        seen = []
        handle = layer.cell.drive.register_forward_hook(lambda *_: seen.append(1))
        layer(x)
        assert seen
        handle.remove()
        layer.half().to(x.dtype)
        torch.testing.assert_close(layer(x)[0], general(layer, x)[0])


def test_a_longer_sequence_rounds_as_in_training():
    layer, x = ADPTNet(8), torch.randn(2, short_calls.MAX_STEPS + 1, 8)
    with torch.no_grad():
        assert torch.equal(layer(x)[0], general(layer, x)[0])
