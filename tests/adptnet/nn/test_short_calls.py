"""Short calls without autograd equal the general path, and see every change of the layer."""

import copy

import pytest
import torch

from adptnet import ADPTNet, TrainableBeta, conjugates, directions, drive, projections, solvers, spectra
from adptnet.errors import InputError
from adptnet.nn import short_calls
from adptnet.ops.adpt_layer import TrainingCall
from support.members import legal_layers


def is_prepared(layer):
    return isinstance(short_calls.find_prepared(layer), short_calls.PreparedLayer)


def general(layer, x, state=None):
    y, after = layer(x, state, solver=solvers.Sequential())  # a solver of the call: the general path
    return y.detach(), after.detach()


@pytest.mark.parametrize("axes", list(legal_layers()), ids=str)
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_a_short_call_equals_the_general_path(axes, batch):
    layer = ADPTNet.paper(**axes, dtype=torch.float64)
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
    layer, x = ADPTNet.paper(size, dtype=dtype), torch.randn(9, 2, size, dtype=dtype)
    assert is_prepared(layer)
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[0], general(layer, x)[0])


GATED = [
    {},
    {"gate": drive.SoftplusGate(rank=9), "gain": drive.EMA()},
    {"spectrum": spectra.S4DInv(), "state_size": 10},
    {"input_projection": projections.Dense(bias=True), "gain": drive.ZOH()},
    {"beta": 0.0},
    {"input_projection": projections.Identity()},
]


@pytest.mark.parametrize("axes", GATED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("batch", "steps"), [(1, 1), (3, 5), (11, 7)])
def test_an_input_gate_runs_in_the_short_call(axes, dtype, batch, steps):
    layer = ADPTNet(7, **{"gate": drive.SoftplusGate(), "gain": drive.LRU(), **axes}, dtype=dtype)
    torch.nn.init.normal_(layer.cell.drive.gate.up)
    layer.cell.drive.gate.bias.data.copy_(torch.linspace(-120, 60, layer.state_size))  # beyond both ends of softplus
    x = torch.randn(batch, steps, 7, dtype=dtype)
    assert is_prepared(layer)
    with torch.no_grad():
        y, state = layer(x)
    expected, end = general(layer, x)
    tight = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(y, expected, rtol=tight, atol=tight * float(expected.abs().max()))
    torch.testing.assert_close(state.position, end.position)
    for bad in (torch.nan, torch.inf, -torch.inf):
        with torch.no_grad():
            layer.cell.drive.gate.bias[2] = bad
            torch.testing.assert_close(layer(x)[0].isfinite(), general(layer, x)[0].isfinite())


@pytest.mark.parametrize("axes", GATED, ids=str)
def test_a_training_call_with_an_input_gate_has_the_gradients_of_the_general_path(axes):
    layer = ADPTNet(7, **{"gate": drive.SoftplusGate(), "gain": drive.LRU(), **axes}, dtype=torch.float64)
    torch.nn.init.normal_(layer.cell.drive.gate.up, std=3.0)
    x, state = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True), layer.initial_state(3)
    state = state._replace(state=torch.randn_like(state.state).requires_grad_())
    weights = torch.randn_like(x), torch.randn_like(state.state)
    y, _, found = gradients(layer, x, state, weights)
    expected_y, _, expected = gradients(layer, x, state, weights, solver=solvers.Sequential())
    torch.testing.assert_close(y, expected_y, rtol=1e-12, atol=1e-12)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_eigenvalues_of_one_have_finite_gradients_with_the_lru_gain():
    layer, x = ADPTNet(4, gain=drive.LRU(), dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    layer.cell.spectrum.log_decay.data[1] = -800.0  # λ̄ = 1 and a gain of zero
    layer(x)[0].sum().backward()
    found = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    layer(x, solver=solvers.Sequential())[0].sum().backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-9, atol=1e-12)
        assert p.grad.isfinite().all()


@pytest.mark.parametrize(
    ("axes", "word"),
    [
        ({"rope": drive.RoPE()}, "rope="),
        ({"start": True}, "start="),
        ({"direction": directions.FromInput()}, "FromInput"),
        ({"projection": projections.LowParam(factors=(3, 2), rank=1)}, "dense projections"),
        ({"conjugate": conjugates.Product(2)}, "Product"),
    ],
    ids=str,
)
def test_the_reason_is_given_where_a_short_call_is_not_prepared(axes, word):
    assert word in short_calls.find_prepared(ADPTNet(6, **axes))


def test_every_change_of_the_layer_is_seen():
    layer, x = ADPTNet(6, beta=1.0, gate=drive.SoftplusGate()), torch.randn(2, 3, 6)
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
    layer, x = ADPTNet.paper(8), torch.randn(2, short_calls.MAX_STEPS + 1, 8)
    with torch.no_grad():
        assert torch.equal(layer(x)[0], general(layer, x)[0])


def gradients(layer, x, state, weights, **run):
    """Return outputs, state and all gradients of a weighted sum of outputs and final state."""
    leaves = [x, state.state, *layer.parameters()]
    y, after = layer(x, state, **run)
    total = (weights[0] * y).sum() + (weights[1] * after.state).sum()
    return y, after, torch.autograd.grad(total, leaves, allow_unused=True)


@pytest.mark.parametrize("axes", list(legal_layers()), ids=str)
@pytest.mark.parametrize(("batch", "steps"), [(1, 1), (3, 5), (13, 16)])
def test_a_short_call_in_training_equals_the_general_path(axes, batch, steps):
    layer = ADPTNet.paper(**axes, dtype=torch.float64)
    x = torch.randn(batch, steps, axes["width"], dtype=torch.float64, requires_grad=True)
    state = layer.initial_state(batch)
    state = state._replace(state=torch.randn_like(state.state).mul_(0.3).requires_grad_())
    weights = torch.randn_like(x), torch.randn_like(state.state)
    y, after, found = gradients(layer, x, state, weights)
    expected_y, expected_after, expected = gradients(layer, x, state, weights, solver=solvers.Sequential())
    assert torch.equal(y, expected_y)
    assert torch.equal(after.state, expected_after.state)
    assert torch.equal(after.position, expected_after.position)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"beta": 0.0},
        {"beta": TrainableBeta(1.0), "state_size": 9},
        {"input_projection": projections.Identity()},
        {"input_projection": projections.Identity(), "gate": drive.SoftplusGate()},
    ],
    ids=str,
)
def test_a_training_call_is_one_function(axes, monkeypatch):
    calls, run = [], TrainingCall.run
    monkeypatch.setattr(TrainingCall, "run", lambda *a, **k: calls.append(1) or run(*a, **k))
    layer, x = ADPTNet.paper(6, **axes), torch.randn(2, 3, 6)
    layer(x)[0].sum().backward()
    assert calls
    found = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(x, solver=solvers.Sequential())[0].sum().backward()
    assert len(calls) == 1
    for one, p in zip(found, layer.parameters(), strict=True):
        torch.testing.assert_close(one, p.grad)


@pytest.mark.parametrize(("batch", "steps"), [(1, 1), (70, 1), (41, 16)])  # rows: one, over one and over two blocks
@pytest.mark.parametrize(
    "axes", [{}, {"gate": None}, {"gate": None, "input_projection": projections.Dense(bias=True)}], ids=str
)
@pytest.mark.parametrize("width", [1, 3, 18, 33])
def test_gradients_of_the_drive_over_blocks_of_rows(batch, steps, axes, width):
    layer = ADPTNet(width, state_size=19, **axes, dtype=torch.float64)
    x = torch.randn(batch, steps, width, dtype=torch.float64, requires_grad=True)
    if layer.cell.drive.gate is not None:
        torch.nn.init.normal_(layer.cell.drive.gate.up)
    weights, state = (torch.randn_like(x), torch.randn(batch, 19, dtype=torch.float64)), layer.initial_state(batch)
    state = state._replace(state=state.state.requires_grad_())
    _, _, found = gradients(layer, x, state, weights)
    _, _, expected = gradients(layer, x, state, weights, solver=solvers.Sequential())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("convert", [torch.Tensor.float, lambda t: t[..., :-1]], ids=["dtype", "shape"])
def test_saved_tensors_that_a_hook_changed_are_rejected(convert):
    layer, x = ADPTNet(6, dtype=torch.float64), torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    changed = (2, 3, 6)  # the inputs and the drive
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: convert(t) if t.shape == changed else t):
        y = layer(x)[0]
        with pytest.raises(InputError, match="saved-tensor hooks"):
            y.sum().backward()


def test_frozen_parameters_and_partial_gradients():
    layer, x = ADPTNet.paper(5, beta=1.0, dtype=torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)
    whole = dict(layer.named_parameters())
    layer(x)[1].state.square().sum().backward()  # the final state only
    expected = {name: p.grad.clone() for name, p in whole.items()}
    for name, p in whole.items():
        layer.requires_grad_(False)
        layer.zero_grad()
        p.requires_grad_(True)
        layer(x)[1].state.square().sum().backward()
        torch.testing.assert_close(p.grad, expected[name])
        assert all(other.grad is None for key, other in whole.items() if key != name)


def test_second_order_gradients_of_a_short_call():
    layer = ADPTNet.paper(3, beta=1.0, dtype=torch.float64)
    x = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    parameters = list(layer.parameters())
    assert torch.autograd.gradgradcheck(lambda x, *_: layer(x)[0], (x, *parameters))
    found = torch.autograd.gradcheck(
        lambda x, *_: (layer(x)[0], layer(x)[1].state), (x, *parameters), check_batched_grad=True
    )
    assert found


def test_training_sees_every_change_of_the_parameters():
    layer, x = ADPTNet.paper(6, beta=1.0), torch.randn(2, 3, 6)
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    for _ in range(3):
        assert torch.equal(layer(x)[0], general(layer, x)[0])
        layer(x)[0].square().sum().backward()
        optimizer.step()
        for parameter in layer.parameters():
            parameter.data.add_(0.01)  # does not change the version of the parameter


def test_autocast_does_not_change_a_short_call():
    layer, x = ADPTNet.paper(6), torch.randn(2, 3, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x)[0], general(layer, x)[0])
