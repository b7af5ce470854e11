"""Stacks, blocks and models around the layer."""

import pytest
import torch
from torch.testing import assert_close

from adptnet import ADPTNet, Bidirectional, SequenceModel, Stack, cells, nn

LAYER = ADPTNet.paper(6, beta=1.0, state_size=8).spec


def model(**options):
    return SequenceModel(LAYER, **{"vocabulary": 7, "depth": 2, **options})


def test_a_stack_is_its_layers_one_after_the_other():
    stack = Stack(LAYER, 3)
    x = torch.randn(2, 9, 6)
    y, states = stack(x)
    expected, ends = x, []
    for layer in stack.layers:
        expected, end = layer(expected)
        ends.append(end)
    assert_close(y, expected)
    assert_close(states, tuple(ends))
    first, middle = stack(x[:, :4])
    second, _ = stack(x[:, 4:], middle)
    assert_close(torch.cat((first, second), 1), y)
    stepped, _ = stack.step(x[:, 0])
    assert_close(stepped, y[:, 0])


def test_a_stack_drops_out_between_layers_only():
    stack = Stack(LAYER, 2, dropout=0.5)
    x = torch.randn(2, 9, 6)
    assert not torch.equal(stack(x)[0], stack(x)[0])
    stack.eval()
    assert torch.equal(stack(x)[0], stack(x)[0])
    single = Stack(LAYER, 1, dropout=0.5)
    assert torch.equal(single(x)[0], single.layers[0](x)[0])


@pytest.mark.parametrize("ragged", [False, True])
def test_backward_in_time_is_forward_on_the_reversed_sequence(ragged):
    both = Bidirectional(LAYER)
    x = torch.randn(3, 8, 6)
    lengths = torch.tensor([8, 5, 1]) if ragged else None
    y, state = both(x, lengths=lengths)
    for i, n in enumerate([8, 5, 1] if ragged else [8] * 3):
        ahead, _ = both.ahead(x[i, :n])
        back, end = both.back(x[i, :n].flip(0))
        assert_close(y[i, :n], both.merge(torch.cat((ahead, back.flip(0)), -1)))
        assert not y[i, n:].any()
        assert_close(state.back.state[i], end.state)


def test_a_reset_divides_both_directions():
    both = Bidirectional(LAYER)
    x = torch.randn(1, 8, 6)
    reset = torch.zeros(1, 8, dtype=torch.bool)
    reset[0, 3] = True
    y, _ = both(x, reset=reset)
    assert_close(y, torch.cat((both(x[:, :3])[0], both(x[:, 3:])[0]), 1))


@pytest.mark.parametrize("norm", ["batch", "layer", "rms"])
@pytest.mark.parametrize("prenorm", [True, False])
@pytest.mark.parametrize("glu", [True, False])
def test_a_block_is_its_formula(norm, prenorm, glu):
    block = nn.BlockSpec(LAYER, norm=norm, prenorm=prenorm, glu=glu).build().eval()
    x = torch.randn(2, 9, 6)
    plain = {"batch": torch.nn.BatchNorm1d, "layer": torch.nn.LayerNorm, "rms": torch.nn.RMSNorm}[norm](6).eval()
    normed = lambda z: plain(z.transpose(1, 2)).transpose(1, 2) if norm == "batch" else plain(z)  # noqa: E731
    mixed = torch.nn.functional.gelu(block.layer(normed(x) if prenorm else x)[0])
    out = block.output(mixed)
    out = out[..., :6] * out[..., 6:].sigmoid() if glu else out
    expected = x + out if prenorm else normed(x + out)
    y, _ = block(x)
    assert_close(y, expected)
    stepped, _ = block.step(x[:, 0])
    assert_close(stepped, y[:, 0])


def test_batch_statistics_exclude_padding():
    norm = nn.block.Norm("batch", 3)
    x = 2 + 3 * torch.randn(4, 10, 3)
    lengths = torch.tensor([10, 3, 7, 1])
    keep = torch.arange(10) < lengths[:, None]
    x[~keep] = 1e6
    y = norm(x, keep)
    assert_close(y[keep].mean(0), torch.zeros(3), atol=1e-12, rtol=0)
    assert_close(norm.norm.running_mean, 0.1 * x[keep].mean(0))
    assert not y[~keep].any()


@pytest.mark.parametrize("head", ["token", "last", "mean"])
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_a_ragged_batch_through_a_model_is_each_sequence_alone(head, norm):
    net = model(head=head, norm=norm, output_size=5).eval()
    tokens = torch.randint(7, (3, 9))
    lengths = torch.tensor([9, 4, 1])
    logits, _ = net(tokens, lengths=lengths)
    for i, n in enumerate(lengths.tolist()):
        alone, _ = net(tokens[i : i + 1, :n])
        assert_close(logits[i, :n] if head == "token" else logits[i], alone[0])


def test_a_model_in_chunks_and_steps_is_the_whole():
    net = model(norm="batch").eval()
    tokens = torch.randint(7, (2, 9))
    whole, _ = net(tokens)
    first, state = net(tokens[:, :4])
    second, _ = net(tokens[:, 4:], state)
    assert_close(torch.cat((first, second), 1), whole)
    state, steps = None, []
    for t in range(9):
        logits, state = net.step(tokens[:, t], state)
        steps.append(logits)
    assert_close(torch.stack(steps, 1), whole)


def test_real_valued_input_and_a_bidirectional_model():
    net = SequenceModel(Bidirectional(LAYER).spec, input_size=3, output_size=2, head="mean")
    assert net(torch.randn(4, 9, 3))[0].shape == (4, 2)
    with pytest.raises(ValueError, match="needs the whole sequence"):
        net.step(torch.randn(4, 3))


def test_generation_carries_the_state_and_is_greedy_at_temperature_zero():
    net = model(norm="batch").train()
    prompt = torch.randint(7, (2, 3))
    found = net.generate(prompt, 6, temperature=0)
    assert net.training
    net.eval()
    expected = prompt
    for _ in range(6):
        expected = torch.cat((expected, net(expected)[0][:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(found, expected)


def test_generation_samples_with_its_own_seed_and_among_the_top_k():
    net = model()
    prompt = torch.randint(7, (4, 3))
    seeded = [net.generate(prompt, 8, generator=torch.Generator().manual_seed(2)) for _ in range(2)]
    assert torch.equal(*seeded)
    assert torch.equal(net.generate(prompt, 8, top_k=1), net.generate(prompt, 8, temperature=0))
    assert net.generate(prompt, 0).shape == (4, 3)


def test_every_parameter_of_a_model_gets_a_gradient():
    net = model(norm="batch", dropout=0.1)
    logits, _ = net(torch.randint(7, (2, 9)))
    logits.square().sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_the_head_reads_a_relu_rnn_as_well():
    net = SequenceModel(nn.LayerSpec(cells.ReLURNN(6)), vocabulary=5)
    assert net(torch.randint(5, (2, 4)))[0].shape == (2, 4, 5)
