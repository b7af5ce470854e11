"""Tests of the baselines against their definitions, the interface of a layer, and public implementations."""

import math

import pytest
import torch
from torch import nn as torch_nn
from torch.testing import assert_close

from adptnet import ADPTNet, SequenceModel, Spec, cells, load, nn, save, solvers
from adptnet.errors import InputError, SpecError
from adptnet.nn.mixer import MixerState
from adptnet_lab import baselines, tasks
from adptnet_lab.training import TrainConfig, train

WIDTH = 12
SPECS = [
    baselines.Attention(WIDTH, num_heads=3),
    baselines.Mamba(WIDTH, state_size=3, taps=3),
    baselines.Mamba(WIDTH, state_size=2, expand=1, taps=1, rank=2),
    baselines.Hawk(WIDTH, num_heads=2),
    baselines.Hawk(WIDTH, state_size=10, taps=2),
    baselines.GatedLinearAttention(WIDTH, num_heads=2, rank=3),
    baselines.GatedLinearAttention(WIDTH, num_heads=3, key_width=9),
    baselines.DeltaNet(WIDTH, num_heads=3),
    baselines.GatedDeltaNet(WIDTH, num_heads=2),
]


@pytest.fixture(params=SPECS, ids=str)
def mixer(request):
    made = request.param.build()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if not parameter.any():
                parameter.normal_(std=0.3)  # so that biases have an effect
            if "rates.bias" in name or "step_size.bias" in name:
                parameter.add_(2.0)  # so that decays have an effect
    return made


def test_outputs_are_causal(mixer):
    x = torch.randn(2, 9, WIDTH)
    changed = x.clone()
    changed[:, 6:] = torch.randn(2, 3, WIDTH)
    assert_close(mixer(x)[0][:, :6], mixer(changed)[0][:, :6])
    assert not torch.allclose(mixer(x)[0][:, 6], mixer(changed)[0][:, 6])


def test_chunks_and_single_steps_agree_with_the_whole_sequence(mixer):
    x = torch.randn(3, 11, WIDTH)
    whole, final = mixer(x)
    parts, state = [], None
    for chunk in (x[:, :1], x[:, 1:3], x[:, 3:8], x[:, 8:8], x[:, 8:]):
        if chunk.shape[1] or state is not None:
            y, state = mixer(chunk, state)
            parts.append(y)
    assert_close(torch.cat(parts, 1), whole)
    assert_close(state, final)
    state = None
    for t in range(11):
        y, state = mixer.step(x[:, t], state)
        assert_close(y, whole[:, t])
    assert state.position.tolist() == [11] * 3
    assert not any(part.requires_grad for part in state.detach().parts)


def test_padding_is_ignored_and_the_state_is_that_at_the_true_end(mixer):
    lengths = torch.tensor([7, 1, 4])
    x = torch.randn(3, 7, WIDTH)
    for row, length in enumerate(lengths):
        x[row, length:] = torch.nan
    y, state = mixer(x, lengths=lengths)
    more = torch.randn(3, 2, WIDTH)
    after, _ = mixer(more, state)
    for row, length in enumerate(lengths):
        alone, state_alone = mixer(x[row : row + 1, :length])
        assert_close(y[row : row + 1, :length], alone)
        assert bool((y[row, length:] == 0).all())
        assert_close(after[row : row + 1], mixer(more[row : row + 1], state_alone)[0])
    y.square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in mixer.parameters() if p.grad is not None)


def test_a_reset_begins_a_sequence(mixer):
    x = torch.randn(2, 10, WIDTH)
    reset = torch.zeros(2, 10, dtype=torch.bool)
    reset[0, 4] = reset[0, 5] = reset[1, 8] = True
    _, earlier = mixer(torch.randn(2, 5, WIDTH))
    y, state = mixer(x, earlier, reset=reset)
    before = MixerState(tuple(p[:1] for p in earlier.parts), earlier.position[:1])
    assert_close(y[:1, :4], mixer(x[:1, :4], before)[0])
    assert_close(y[:1, 4:5], mixer(x[:1, 4:5])[0])
    assert_close(y[:1, 5:], mixer(x[:1, 5:])[0])
    assert_close(y[1:, 8:], mixer(x[1:, 8:])[0])
    assert state.position.tolist() == [5, 2]
    more = torch.randn(2, 3, WIDTH)
    assert_close(mixer(more, state)[0][1:], mixer(torch.cat((x[1:, 8:], more[1:]), 1))[0][:, 2:])
    assert_close(mixer(more, state)[0][:1], mixer(torch.cat((x[:1, 5:], more[:1]), 1))[0][:, 5:])


def test_resets_and_lengths_together(mixer):
    x = torch.randn(2, 8, WIDTH)
    reset = torch.zeros(2, 8, dtype=torch.bool)
    reset[0, 3] = reset[1, 6] = True  # the second is in the padding
    y, state = mixer(x, lengths=torch.tensor([5, 4]), reset=reset)
    more = torch.randn(2, 2, WIDTH)
    after = mixer(more, state)[0]
    assert_close(after[:1], mixer(torch.cat((x[:1, 3:5], more[:1]), 1))[0][:, 2:])
    assert_close(after[1:], mixer(torch.cat((x[1:, :4], more[1:]), 1))[0][:, 4:])
    assert y.shape == x.shape


def test_gradients_agree_with_finite_differences(mixer):
    x = torch.randn(1, 4, WIDTH, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: mixer(x)[0], x, atol=1e-6)


def test_specs_checkpoints_and_models(mixer, tmp_path):
    assert Spec.from_json(mixer.spec.to_json()) == mixer.spec
    model = SequenceModel(mixer.spec, depth=2, vocabulary=7, norm="rms")
    tokens = torch.randint(7, (2, 6))
    save(model, tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors")
    assert_close(again(tokens)[0], model(tokens)[0])
    _, states = model(tokens[:, :4])
    assert_close(model(tokens[:, 4:], states)[0], model(tokens)[0][:, 4:])
    assert model.generate(tokens, 3, temperature=0).shape == (2, 9)
    save(mixer, tmp_path / "mixer.safetensors")
    assert type(load(tmp_path / "mixer.safetensors")) is type(mixer)
    half = mixer.spec.build(dtype=torch.float32)
    assert half(torch.randn(1, 3, WIDTH, dtype=torch.float32))[0].dtype == torch.float32


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # a warning about speed by torch's norm
def test_the_recurrence_runs_in_float32_under_autocast_and_in_bfloat16(mixer):
    x = torch.randn(2, 6, WIDTH, dtype=torch.float32)
    single = mixer.spec.build(dtype=torch.float32)
    whole, _ = single(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = single(x)
        single(x, state)
    half = single.to(torch.bfloat16)
    narrow, half_state = half(x.bfloat16())
    half.step(x[:, 0].bfloat16(), half_state)
    for found in (y.float(), narrow.float()):
        assert float((found - whole).abs().mean()) < 0.1 * float(whole.abs().mean()) + 1e-3
    if not isinstance(mixer, baselines.AttentionMixer):  # its state holds keys and values
        assert state.parts[-1].dtype == half_state.parts[-1].dtype == torch.float32


# Definitions, evaluated step by step.


def convolve(conv, x):
    taps = conv.weight.shape[1]
    y = torch.zeros_like(x) if conv.bias is None else conv.bias.expand_as(x).clone()
    for t in range(x.shape[1]):
        for back in range(min(taps, t + 1)):
            y[:, t] += conv.weight[:, taps - 1 - back] * x[:, t - back]
    return y


@torch.no_grad()
def test_attention_matches_its_definition():
    mixer = baselines.Attention(12, num_heads=3).build()
    x = torch.randn(2, 6, 12)
    query, key, value = (x @ part.T for part in mixer.enter.weight.split(12))

    def rotate(row, t):
        out = row.clone()
        for j in range(0, 4, 2):
            angle = t * 10_000 ** (-j / 4)
            out[j] = math.cos(angle) * row[j] - math.sin(angle) * row[j + 1]
            out[j + 1] = math.sin(angle) * row[j] + math.cos(angle) * row[j + 1]
        return out

    expected = torch.zeros(2, 6, 12)
    for b in range(2):
        for head in range(3):
            part = slice(4 * head, 4 * head + 4)
            for t in range(6):
                scores = torch.stack(
                    [rotate(query[b, t, part], t) @ rotate(key[b, s, part], s) / 2 for s in range(t + 1)]
                )
                expected[b, t, part] = scores.softmax(0) @ value[b, : t + 1, part]
    assert_close(mixer(x)[0], expected @ mixer.leave.weight.T)


@torch.no_grad()
def test_mamba_matches_its_definition():
    mixer = baselines.Mamba(12, state_size=3).build()
    x = torch.randn(2, 7, 12)
    u, gate = (x @ mixer.enter.weight.T).chunk(2, -1)
    u = torch.nn.functional.silu(convolve(mixer.convolution, u))
    selected = u @ mixer.select.weight.T
    dt = torch.log1p((selected[..., :1] @ mixer.step_size.weight.T + mixer.step_size.bias).exp())
    state = torch.zeros(2, 24, 3)
    for t in range(7):
        for n in range(3):
            a = -mixer.modes.log_decay[:, n].exp()
            state[..., n] = (dt[:, t] * a).exp() * state[..., n] + dt[:, t] * u[:, t] * selected[:, t, 1 + n, None]
        y = (state * selected[:, t, None, 4:]).sum(-1) + mixer.modes.skip * u[:, t]
        expected = (y * gate[:, t] * torch.sigmoid(gate[:, t])) @ mixer.leave.weight.T
        assert_close(mixer(x)[0][:, t], expected)
    assert_close(mixer.modes.log_decay.exp(), torch.arange(1.0, 4.0).expand(24, 3))
    initial = torch.nn.functional.softplus(mixer.step_size.bias)
    assert initial.min() > 1e-3 - 1e-9
    assert initial.max() < 0.1 + 1e-9
    assert mixer.modes.log_decay._no_weight_decay


@torch.no_grad()
def test_hawk_matches_its_definition():
    mixer = baselines.Hawk(12, num_heads=2).build()
    mixer.gate_bias.normal_()
    x = torch.randn(2, 7, 12)
    u = convolve(mixer.convolution, x @ mixer.enter.weight.T + mixer.enter.bias)
    branch = torch.nn.functional.gelu(x @ mixer.branch.weight.T + mixer.branch.bias, approximate="tanh")
    decay = torch.exp(-torch.nn.functional.softplus(mixer.decay.raw))
    assert bool(((decay >= 0.9) & (decay <= 0.999)).all())
    state = torch.zeros(2, 12)
    for t in range(7):
        gates = torch.stack(
            [
                torch.cat([u[:, t, 6 * h : 6 * h + 6] @ mixer.gate_weight[g, h] for h in range(2)], -1)
                + mixer.gate_bias[g]
                for g in range(2)
            ]
        ).sigmoid()
        a = decay ** (8 * gates[1])
        gain = torch.sqrt(1 - a**2) if t else 1.0
        state = a * state + gain * gates[0] * u[:, t]
        assert_close(mixer(x)[0][:, t], (state * branch[:, t]) @ mixer.leave.weight.T + mixer.leave.bias)


def test_the_square_root_of_hawk_has_a_bounded_derivative():
    from adptnet_lab.baselines.hawk import _BoundedSqrt

    x = torch.tensor([0.0, 1e-12, 0.25], requires_grad=True)
    (slope,) = torch.autograd.grad(_BoundedSqrt.apply(x).sum(), x)
    assert_close(slope, torch.tensor([1000.0, 1000.0, 1.0]))


@torch.no_grad()
def test_gated_linear_attention_matches_its_definition():
    mixer = baselines.GatedLinearAttention(12, num_heads=2, key_width=6, rank=3).build()
    mixer.norm.weight.normal_()
    x = torch.randn(1, 6, 12)
    forget = torch.sigmoid(mixer.forget(x)) ** (1 / 16)
    expected = torch.zeros(6, 12)
    for head in range(2):
        keys, values = slice(3 * head, 3 * head + 3), slice(6 * head, 6 * head + 6)
        state = torch.zeros(3, 6)
        for t in range(6):
            key, value = (mixer.key.weight @ x[0, t])[keys], (mixer.value.weight @ x[0, t])[values]
            state = torch.diag(forget[0, t, keys]) @ state + torch.outer(key, value)
            read = state.T @ (mixer.query.weight @ x[0, t])[keys] / math.sqrt(3)
            normed = read / torch.sqrt(read.square().mean() + torch.finfo(read.dtype).eps) * mixer.norm.weight
            gate = (mixer.gate.weight @ x[0, t])[values]
            expected[t] += mixer.leave.weight[:, values] @ (normed * gate * torch.sigmoid(gate))
    assert_close(mixer(x)[0][0], expected)


@torch.no_grad()
@pytest.mark.parametrize("gated", [False, True])
def test_delta_nets_match_their_definition(gated):
    mixer = (baselines.GatedDeltaNet if gated else baselines.DeltaNet)(12, num_heads=2).build()
    x = torch.randn(1, 6, 12)
    mixed = convolve(mixer.written.convolution, x @ mixer.written.enter.weight.T)[0]
    query, key, value = (mixed * torch.sigmoid(mixed)).split(12, -1)
    strength = torch.sigmoid(x[0] @ mixer.written.strength.weight.T)
    total = torch.zeros(6, 12)
    for head in range(2):
        part = slice(6 * head, 6 * head + 6)
        state = torch.zeros(6, 6)
        for t in range(6):
            k = key[t, part] / key[t, part].norm()
            forget = torch.tensor(1.0)
            if gated:
                dt = torch.log1p((mixer.step_size.weight[head] @ x[0, t] + mixer.rates.bias[head]).exp())
                forget = torch.exp(-mixer.rates.log_rate[head].exp() * dt)
            erase = torch.eye(6) - strength[t, head] * torch.outer(k, k)
            state = forget * erase @ state + strength[t, head] * torch.outer(k, value[t, part])
            read = state.T @ (query[t, part] / query[t, part].norm())
            normed = read / torch.sqrt(read.square().mean() + torch.finfo(read.dtype).eps)
            if gated:
                gate = mixer.gate.weight[part] @ x[0, t]
                normed = normed * gate * torch.sigmoid(gate)
            total[t] += mixer.leave.weight[:, part] @ normed
    assert_close(mixer(x)[0][0], total)


def test_the_delta_rule_overwrites_the_value_of_a_key():
    from adptnet.nn.mixer import Steps
    from adptnet_lab.baselines.fast_weights import scan_fast_weights

    keys = torch.eye(3)[[0, 1, 0]].reshape(1, 3, 1, 3)
    values = torch.randn(1, 3, 1, 4)
    steps = Steps(torch.arange(3).unsqueeze(0), None, None, None)
    _, state = scan_fast_weights(keys, keys, values, None, steps, strength=torch.ones(1, 3, 1))
    assert_close(state[0, 0, 0], values[0, 2, 0])  # the second value of key 0, without a trace of the first
    assert_close(state[0, 0, 1], values[0, 1, 0])


# Public implementations.


def test_mamba_agrees_with_transformers():
    transformers = pytest.importorskip(
        "transformers", reason="compares with transformers: pip install 'adptnet[baselines]'"
    )
    from transformers.models.mamba.modeling_mamba import MambaMixer as Theirs

    config = transformers.MambaConfig(
        hidden_size=32, state_size=5, expand=2, conv_kernel=4, time_step_rank=2, num_hidden_layers=1, use_mambapy=False
    )
    theirs = Theirs(config, layer_idx=0).float().eval()
    ours = baselines.Mamba(32, state_size=5).build(dtype=torch.float32)
    names = {
        "enter.weight": theirs.in_proj.weight,
        "convolution.weight": theirs.conv1d.weight.squeeze(1),
        "convolution.bias": theirs.conv1d.bias,
        "select.weight": theirs.x_proj.weight,
        "step_size.weight": theirs.dt_proj.weight,
        "step_size.bias": theirs.dt_proj.bias,
        "modes.log_decay": theirs.A_log,
        "modes.skip": theirs.D,
        "leave.weight": theirs.out_proj.weight,
    }
    ours.load_state_dict({name: tensor.detach().float() for name, tensor in names.items()})
    x = torch.randn(2, 23, 32, dtype=torch.float32)
    assert_close(ours(x)[0], theirs(x), atol=1e-5, rtol=1e-4)


def test_hawk_agrees_with_transformers():
    transformers = pytest.importorskip(
        "transformers", reason="compares with transformers: pip install 'adptnet[baselines]'"
    )
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock as Theirs

    config = transformers.RecurrentGemmaConfig(hidden_size=24, lru_width=24, num_attention_heads=3, conv1d_width=4)
    theirs = Theirs(config, layer_idx=0).double()  # in float32 its 1 - a² loses digits where a is near 1
    for parameter in theirs.parameters():
        torch_nn.init.normal_(parameter, std=0.5)
    unit = theirs.rg_lru
    ours = baselines.Hawk(24, num_heads=3).build()
    names = {
        "branch.weight": theirs.linear_y.weight,
        "branch.bias": theirs.linear_y.bias,
        "enter.weight": theirs.linear_x.weight,
        "enter.bias": theirs.linear_x.bias,
        "convolution.weight": theirs.conv_1d.weight.squeeze(1),
        "convolution.bias": theirs.conv_1d.bias,
        "gate_weight": torch.stack((unit.input_gate_weight, unit.recurrent_gate_weight)),
        "gate_bias": torch.stack((unit.input_gate_bias.flatten(), unit.recurrent_gate_bias.flatten())),
        "decay.raw": unit.recurrent_param,
        "leave.weight": theirs.linear_out.weight,
        "leave.bias": theirs.linear_out.bias,
    }
    ours.load_state_dict({name: tensor.detach() for name, tensor in names.items()})
    x = torch.randn(2, 17, 24)
    position = torch.arange(17).expand(2, 17)
    expected, _ = theirs(x, position, torch.ones(2, 17), use_cache=False)
    assert_close(ours(x)[0], expected, atol=1e-5, rtol=1e-5)  # its scan runs in float32


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_gru_and_lstm_agree_with_torch(kind):
    layer = baselines.baseline(kind, 6).build()
    whole = (torch_nn.GRU if kind == "gru" else torch_nn.LSTM)(6, 6, batch_first=True)
    whole.load_state_dict({f"{name}_l0": tensor for name, tensor in layer.cell.cell.state_dict().items()})
    x = torch.randn(3, 8, 6)
    assert_close(layer(x)[0], whole(x)[0])
    assert_close(layer(x, solver=solvers.QuasiDEER())[0], whole(x)[0], atol=1e-4, rtol=1e-4)
    assert Spec.from_json(layer.spec.to_json()) == layer.spec
    with pytest.raises(SpecError, match="width must be an integer >= 1"):
        cells.GRU(0)


@pytest.mark.parametrize("spec", [baselines.s4d(4, expansion=6), baselines.lru(4, state_size=10)], ids=["s4d", "lru"])
def test_diagonal_state_space_models_are_complex_recurrences(spec):
    layer = spec.build()
    x = torch.randn(2, 9, 4)
    drive = layer.cell.prepare(x, torch.arange(9).expand(2, 9))
    factor = layer.cell.eigenvalues().eigenvalues()
    pairs = torch.complex(drive[..., ::2].contiguous(), drive[..., 1::2].contiguous())
    state, states = torch.zeros_like(pairs[:, 0]), []
    for t in range(9):
        state = factor * state + pairs[:, t]
        states.append(torch.view_as_real(state).flatten(-2))
    assert_close(layer(x)[0], layer.readout(torch.stack(states, 1)))
    assert spec.cell.beta == 0


# Names and numbers of parameters.


@pytest.mark.parametrize("name", baselines.BASELINES)
def test_every_baseline_fits_into_the_same_block_and_learns(name):
    task = tasks.CopyMemory(length=21, training_sequences=64)
    model = task.model(nn.BlockSpec(baselines.baseline(name, 16), norm="rms")).build(dtype=torch.float32)
    record = train(model, task, TrainConfig(steps=25, batch_size=32, learning_rate=1e-2, clip=1.0))
    assert record.losses[-1] < record.losses[0] - 0.05


@pytest.mark.parametrize("name", ["gru", "mamba", "attention"])
def test_match_parameters_finds_the_nearest_width(name):
    task = tasks.WordProblem("S5")
    target = baselines.count_parameters(task.model(nn.BlockSpec(ADPTNet.paper(64).spec), depth=2))
    multiple = 4 if name == "attention" else 1

    def make(width):
        return task.model(nn.BlockSpec(baselines.baseline(name, width)), depth=2)

    found = baselines.match_parameters(make, target, multiple_of=multiple)
    width = found.block.width
    built = sum(p.numel() for p in found.build().parameters())
    assert built == baselines.count_parameters(found)
    for other in (width - multiple, width + multiple):
        assert abs(baselines.count_parameters(make(other)) - target) >= abs(built - target)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: baselines.baseline("grru", 4), "Perhaps you meant 'gru'"),
        (
            lambda: baselines.match_parameters(lambda width: baselines.baseline("gru", width), 0),
            "both must be at least 1",
        ),
        (
            lambda: baselines.match_parameters(lambda width: baselines.baseline("gru", 4), 10_000),
            "gives no more parameters",
        ),
        (lambda: baselines.Attention(12, num_heads=5), "it must be a multiple of num_heads. Pass width=15"),
        (lambda: baselines.Attention(9, num_heads=3), "rotary positions rotate pairs"),
        (lambda: baselines.Mamba(0), "width must be an integer >= 1"),
        (lambda: baselines.Hawk(8, state_size=9, num_heads=2), "Pass state_size=10"),
        (lambda: baselines.GatedLinearAttention(8, key_width=6), "Pass key_width=8"),
        (lambda: baselines.DeltaNet(8, taps=0), "taps must be an integer >= 1"),
        (lambda: nn.BlockSpec(torch_nn.GRU), "must be a LayerSpec, BidirectionalSpec or MixerSpec"),
        (lambda: baselines.Mamba(8).build()(torch.randn(2, 8)), r"takes floating point \(batch, time, 8\); got"),
        (lambda: baselines.Mamba(8).build()(torch.randn(1, 2, 8), solver=solvers.Sequential()), "takes no solver="),
        (lambda: baselines.Mamba(8).build()(torch.randn(1, 0, 8)), "at least one step"),
        (
            lambda: baselines.Mamba(8).build()(torch.randn(1, 2, 8), lengths=torch.tensor([3])),
            "between 1 and the padded",
        ),
        (lambda: baselines.Mamba(8).build()(torch.randn(1, 2, 8), reset=torch.zeros(1, 2)), "Pass reset.bool()"),
        (lambda: baselines.Mamba(8).build()(torch.randn(1, 2, 8), torch.zeros(1)), "must be the MixerState"),
    ],
)
def test_invalid_arguments_raise(make, message):
    with pytest.raises((InputError, SpecError), match=message):
        make()
