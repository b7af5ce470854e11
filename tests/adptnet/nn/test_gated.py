"""The gated layer: its definition, its streaming state, and resets."""

import pytest
import torch
from torch.nn import functional

from adptnet import ADPTNet, analysis, cells
from adptnet.analysis.definition import define_conjugate
from adptnet.errors import InputError, SpecError
from adptnet.nn import Gated, GatedSpec, LayerSpec, SwiGLUBlockSpec

WIDTH, INNER = 3, 6


def make(taps: int = 4, **options) -> Gated:
    layer = GatedSpec(ADPTNet(INNER, **options).spec, WIDTH, taps).build(dtype=torch.float64)
    with torch.no_grad():
        layer.skip.weight.normal_()
        if layer.convolution is not None:
            layer.convolution.bias.normal_()
    return layer


def run_by_hand(layer: Gated, x: torch.Tensor) -> torch.Tensor:
    """One sequence from its beginning, step by step, as the docstring of `Gated` defines it."""
    values, gates = (x @ layer.enter.weight.T).split(INNER, -1)
    taps, state, outputs = layer.spec.taps, None, []
    for t in range(len(x)):
        u = values[t]
        if taps:
            weight, bias = layer.convolution.weight, layer.convolution.bias
            u = bias + sum(weight[:, taps - 1 - back] * values[t - back] for back in range(min(taps, t + 1)))
        u = functional.silu(u)
        s, state = layer.layer.step(u.unsqueeze(0), state)
        outputs.append(layer.leave.weight @ ((s[0] + layer.skip.weight * u) * functional.silu(gates[t])))
    return torch.stack(outputs)


@pytest.mark.parametrize("taps", [0, 1, 2, 4, 9])
def test_values_and_gradients_are_those_of_the_definition(taps):
    layer, x = make(taps), torch.randn(7, WIDTH, dtype=torch.float64, requires_grad=True)
    own = [x, *layer.parameters()]
    weights = torch.randn(7, WIDTH, dtype=torch.float64)
    expected, found = run_by_hand(layer, x), layer(x.unsqueeze(0))[0][0]
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), own),
        torch.autograd.grad((expected * weights).sum(), own),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("taps", [0, 2, 4])
@pytest.mark.parametrize("cut", [1, 2, 5])
def test_chunks_and_steps_give_the_whole_sequence(taps, cut):
    layer, x = make(taps), torch.randn(2, 8, WIDTH, dtype=torch.float64)
    whole, final = layer(x)
    first, state = layer(x[:, :cut])
    second, after = layer(x[:, cut:], state)
    torch.testing.assert_close(torch.cat((first, second), 1), whole)
    torch.testing.assert_close(after.recent, final.recent)
    state, outputs = None, []
    for t in range(8):
        y, state = layer.step(x[:, t], state)
        outputs.append(y)
    torch.testing.assert_close(torch.stack(outputs, 1), whole)
    torch.testing.assert_close(state.recent, final.recent)


def test_nothing_passes_a_reset_and_nothing_comes_from_padding():
    layer, x = make(), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    reset = torch.zeros(2, 9, dtype=torch.bool)
    reset[0, 4], reset[1, 2], reset[1, 3] = True, True, True
    y, state = layer(x, reset=reset)
    torch.testing.assert_close(y[0, 4:], run_by_hand(layer, x[0, 4:]))
    torch.testing.assert_close(y[1, 3:], run_by_hand(layer, x[1, 3:]))
    torch.testing.assert_close(y[1, 2:3], run_by_hand(layer, x[1, 2:3]))
    late = torch.zeros(2, 9, dtype=torch.bool)
    late[:, 7] = True  # the kept inputs of the convolution begin at the reset too
    _, state = layer(x, reset=late)
    fresh = layer(x[:, 7:])[1]
    torch.testing.assert_close(state.recent, fresh.recent)
    following = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(layer(following, state)[0], layer(following, fresh)[0])

    lengths = torch.tensor([9, 5])
    noisy = x.clone()
    noisy[1, 5:] = torch.nan
    y, state = layer(noisy, lengths=lengths)
    torch.testing.assert_close(y[1, :5], run_by_hand(layer, x[1, :5]))
    assert not y[1, 5:].any()
    torch.testing.assert_close(state.recent[1], layer(x[1:, :5])[1].recent[0])


def test_concatenated_sequences_do_not_mix():
    layer, x = make(), torch.randn(1, 9, WIDTH, dtype=torch.float64)
    y, state = layer(x, cu_seqlens=torch.tensor([0, 2, 9]))
    torch.testing.assert_close(y[0, :2], run_by_hand(layer, x[0, :2]))
    torch.testing.assert_close(y[0, 2:], run_by_hand(layer, x[0, 2:]))
    assert state.recent.shape == (2, 3, INNER)
    with pytest.raises(InputError, match="Drop one"):
        layer(x, cu_seqlens=torch.tensor([0, 9]), lengths=torch.tensor([9]))


def test_the_block_leaves_the_bounds_of_its_recurrence_as_they_are():
    """The certificate holds for every input, so also for those that the convolution and the map before it produce."""
    block = SwiGLUBlockSpec(GatedSpec(ADPTNet(INNER, beta=0.3).spec, WIDTH)).build(dtype=torch.float64)
    inner = block.layer.layer
    alone = inner.spec.build(dtype=torch.float64)
    alone.load_state_dict(inner.state_dict())
    bound, own = analysis.certificate(inner), analysis.certificate(alone)
    assert bound.deviation == own.deviation
    seen = []
    hook = inner.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    block(torch.randn(1, 20, WIDTH, dtype=torch.float64))
    hook.remove()
    states = inner.solve(seen[0]).states[0, :-1].detach()
    drive = torch.zeros_like(states)  # neither J nor M depends on it
    distance = inner.cell.jacobian(states, drive) - define_conjugate(inner.cell, states, drive)
    assert torch.linalg.matrix_norm(distance, 2).max() <= bound.deviation
    assert torch.linalg.matrix_norm(distance, 2).max() > 0


def test_other_cells_stand_in_it_and_errors_say_what_to_type():
    layer = GatedSpec(LayerSpec(cells.GRU(INNER)), WIDTH).build()
    assert layer(torch.randn(2, 5, WIDTH))[0].shape == (2, 5, WIDTH)
    with pytest.raises(SpecError, match="0 is no convolution"):
        GatedSpec(ADPTNet(4).spec, 4, taps=-1)
    with pytest.raises(SpecError, match="layer"):
        GatedSpec(4, 4)
    with pytest.raises(SpecError, match="batch_first=True"):
        GatedSpec(ADPTNet(4, batch_first=False).spec, 4)
    with pytest.raises(InputError, match=r"\(batch, time, 3\)"):
        layer(torch.randn(5, WIDTH))
    with pytest.raises(InputError, match="GatedState"):
        layer(torch.randn(2, 5, WIDTH), layer(torch.randn(1, 5, WIDTH))[1])
    with pytest.raises(InputError, match="one time step"):
        layer.step(torch.randn(2, 5, WIDTH))
