"""A stream has the outputs of the whole sequence, keeps its state, and sees every change of the parameters."""

import copy

import pytest
import torch
from torch import nn

import adptnet as adpt
from adptnet import cells, drive, errors, solvers
from adptnet.nn import BlockSpec, Recurrent, SequenceModel, SpikingModelSpec, Stack, SwiGLUBlockSpec
from support.members import legal_layers

LAYER = adpt.ADPTNet(6, beta=1.0, gate=drive.SoftplusGate()).spec
MODULES = {
    "layer": lambda: adpt.ADPTNet(6, beta=1.0),
    "gated": LAYER.build,
    "gru": lambda: Recurrent(cells.GRU(6)),
    "function": lambda: Recurrent(cells.from_function(lambda s, x: (s + x).tanh(), state_size=6, input_size=6)),
    "block": BlockSpec(LAYER, dropout=0.5).build,
    "swiglu": SwiGLUBlockSpec(LAYER).build,
    "stack": lambda: Stack(LAYER, 3, dropout=0.5),
    "model": lambda: SequenceModel(LAYER, depth=2, input_size=6, output_size=6, dropout=0.2),
}


def make(name, dtype=torch.float64):
    return MODULES[name]().to(dtype).eval()


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_a_stream_has_the_outputs_of_the_whole_sequence(name, batch):
    module, x = make(name), torch.randn(batch, 7, 6, dtype=torch.float64)
    whole, end = module(x)
    stream = module.streaming(batch)
    found = torch.stack([stream(x[:, t]) for t in range(7)], 1)
    assert not found.requires_grad
    torch.testing.assert_close(found, whole.detach(), rtol=1e-10, atol=1e-12)
    for one, other in zip(
        torch.utils._pytree.tree_leaves(stream.state), torch.utils._pytree.tree_leaves(end), strict=True
    ):
        torch.testing.assert_close(one, other.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("axes", list(legal_layers()), ids=str)
def test_a_stream_of_every_layer_equals_its_step(axes):
    layer, x = adpt.ADPTNet(**axes), torch.randn(2, 3, axes["width"])
    stream, state = layer.streaming(2), None
    for t in range(3):
        with torch.no_grad():
            y, state = layer.step(x[:, t], state)
        assert torch.equal(stream(x[:, t]), y)


def test_tokens_and_spikes_stream_too():
    model = SequenceModel(LAYER, depth=2, vocabulary=9).eval()
    tokens = torch.randint(9, (2, 5))
    stream = model.streaming(2)
    found = torch.stack([stream(tokens[:, t]) for t in range(5)], 1)
    torch.testing.assert_close(found, model(tokens)[0].detach(), rtol=1e-10, atol=1e-12)
    spiking = SpikingModelSpec(cells.LIF(8), input_size=4, output_size=3).build().eval()
    frames, stream, state = torch.rand(2, 4, 4).round(), spiking.streaming(2), None
    for t in range(4):
        with torch.no_grad():
            y, state = spiking.step(frames[:, t], state)
        assert torch.equal(stream(frames[:, t]), y)


@pytest.mark.parametrize("name", MODULES)
def test_parameters_that_change_take_effect_at_the_next_step(name):
    module, x = make(name), torch.randn(2, 6, dtype=torch.float64)
    stream = module.streaming(2)
    stream(x)
    changes = [
        lambda p: p.data.add_(0.05),  # leaves the version of the parameter as it is
        lambda p: p.detach().mul_(1.1),
        lambda p: setattr(p, "data", p.data + 0.05),  # moves it to other memory
    ]
    for change in changes:
        for parameter in module.parameters():
            change(parameter)
            before = copy.deepcopy(stream.state)
            with torch.no_grad():
                expected, _ = copy.deepcopy(module).step(x, before)
            torch.testing.assert_close(stream(x), expected, rtol=1e-10, atol=1e-12)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1) if list(module.parameters()) else None
    if optimizer is not None:
        module(x.unsqueeze(1))[0].square().sum().backward()
        optimizer.step()
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    with torch.no_grad():
        expected, _ = copy.deepcopy(module).step(x, stream.state)
    torch.testing.assert_close(stream(x), expected, rtol=1e-10, atol=1e-12)


def test_a_hook_or_another_module_is_seen():
    layer, x, seen = make("layer"), torch.randn(1, 6, dtype=torch.float64), []
    stream = layer.streaming()
    stream(x)
    handle = layer.cell.drive.register_forward_hook(lambda *_: seen.append(1))
    stream(x)
    handle.remove()
    assert seen
    stream.reset()
    layer.readout = nn.Linear(6, 6, dtype=torch.float64)
    torch.testing.assert_close(stream(x), layer(x.unsqueeze(1), solver=solvers.Sequential())[0][:, 0].detach())


def test_the_state_can_be_kept_set_selected_and_reset():
    model, x = make("model"), torch.randn(3, 6, dtype=torch.float64)
    stream = model.streaming(3)
    assert stream.state is None
    first = stream(x)
    kept = stream.state
    second = stream(x)
    stream.state = kept
    assert torch.equal(stream(x), second)
    stream.reset()
    assert torch.equal(stream(x), first)
    stream.select([2, 0, 0, 1])
    assert stream.batch == 4
    torch.testing.assert_close(stream(x[[2, 0, 0, 1]]), second[[2, 0, 0, 1]])
    stream.select(torch.tensor([False, True, False, True]))
    assert stream.batch == 2
    stream.reset()
    stream.select(slice(1))
    torch.testing.assert_close(stream(x[:1]), first[:1])
    assert repr(stream) == "Streaming(SequenceModel, batch=1)"


def test_a_prompt_and_a_stream_follow_each_other():
    layer, x = make("gated"), torch.randn(2, 9, 6, dtype=torch.float64)
    stream = layer.streaming(2)
    with torch.no_grad():
        whole, _ = layer(x)
        _, stream.state = layer(x[:, :8])
    torch.testing.assert_close(stream(x[:, 8]), whole[:, 8], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("batch", [-1, True, 2.0, "2", None])
def test_a_batch_is_a_number(batch):
    with pytest.raises(errors.InputError, match="integer >= 0"):
        adpt.ADPTNet(4).streaming(batch)


def test_wrong_inputs_get_a_clear_error():
    layer = adpt.ADPTNet(6, dtype=torch.float32)
    stream, x = layer.streaming(2), torch.randn(2, 6, dtype=torch.float32)
    for bad in (torch.randn(3, 6), torch.tensor(1.0), [1.0]):
        with pytest.raises(errors.InputError, match=r"one step of 2 sequences, \(2, …\)"):
            stream(bad)
    with pytest.raises(errors.InputError, match="one time step"):
        stream(x[:, :5])
    with pytest.raises(errors.InputError, match="float64"):
        stream(x.double())
    with pytest.raises(errors.InputError, match="x is on meta, the parameters are on cpu"):
        stream(x.to("meta"))
    for state in (layer.initial_state(3), 5, "state", ()):
        with pytest.raises(errors.InputError, match="returned for 2 sequences"):
            stream.state = state
    with pytest.raises(errors.InputError, match="one dimension"):
        stream.select([[0]])
    stream(x)
    layer.double()
    with pytest.raises(errors.InputError, match="float"):
        stream(x.double())
    stream.state = stream.state.to(torch.float64)
    assert stream(x.double()).dtype == torch.float64
