"""The defaults of `ADPTNet` and `SequenceModel`, the presets, and what stays as the paper has it."""

import json
import math

import pytest
import torch
from torch import nn

from adptnet import ADPTNet, SequenceModel, Spec, cells, directions, drive, optim, presets, spectra
from adptnet.errors import SpecError
from adptnet.nn import BlockSpec, LayerSpec, SwiGLUBlockSpec
from support.members import KIND_WIDTH


@pytest.mark.parametrize("width", [32, 256])
@pytest.mark.parametrize("length", [10, 300, 2000])
def test_outputs_of_the_default_have_order_one_in_the_first_steps_of_training(width, length):
    torch.manual_seed(0)
    for options in ({}, {"length": length}):
        layer, x = ADPTNet(width, **options), torch.randn(2, length, width)
        optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
        for _ in range(2 if length < 2000 else 1):
            y = layer(x)[0]
            assert 0.2 < y.std() < 2
            optimizer.zero_grad()
            (y - x.roll(1, 1)).square().mean().backward()
            optimizer.step()
        assert all(parameter.isfinite().all() for parameter in layer.parameters())


def test_timescales_are_given_in_steps_and_every_head_has_short_and_long_ones():
    layer = ADPTNet(64, timescales=(2, 50))
    memory = -1 / layer.cell.eigenvalues().real.log()
    torch.testing.assert_close(
        memory.sort().values, torch.logspace(math.log10(2), math.log10(50), 64), rtol=1e-4, atol=0
    )
    assert ADPTNet(8, length=100).spec.cell.spectrum == spectra.Timescales(0.5, 200.0)
    for heads in (2, 4, 8):
        own = ADPTNet(64, direction=directions.FromState(heads=heads)).cell.eigenvalues().real.detach()
        logs = (-1 / own.log()).log().unflatten(0, (heads, -1))
        covered = (logs.amax(1) - logs.amin(1)) / (logs.max() - logs.min())
        assert covered.min() > 0.75, heads
    sorted_heads = spectra.Linspace().build(64)().real.log().neg().log().unflatten(0, (4, -1))
    assert (sorted_heads.amax(1) - sorted_heads.amin(1)).max() < 0.26 * (sorted_heads.max() - sorted_heads.min())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_the_order_of_the_timescales_is_a_permutation(size):
    order = spectra.timescales.order_by_golden_ratio(size)
    assert order.sort().values.tolist() == list(range(size))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timescales": (1, 10), "length": 5}, "Pass one of them"),
        ({"length": 5, "spectrum": spectra.Linspace()}, "Pass one of them"),
        ({"timescales": 10}, "shortest and the longest"),
        ({"timescales": (10, 1)}, "shortest=1"),
        ({"timescales": (0, 1)}, "shortest"),
        ({"length": 0}, "integer >= 1"),
        ({"length": 2.5}, "integer >= 1"),
        ({"timescale": (1, 10)}, "timescales"),
    ],
)
def test_wrong_timescales_raise(options, message):
    with pytest.raises(SpecError, match=message):
        ADPTNet(4, **options)


def test_the_settings_of_the_paper_are_one_word_away_and_old_files_keep_their_meaning():
    assert ADPTNet.paper(6).spec == LayerSpec(cells.ADPTSpec(6))
    assert presets.paper(6) == BlockSpec(LayerSpec(cells.ADPTSpec(6)))
    cell = ADPTNet.paper(6).spec.cell
    assert (cell.beta, cell.spectrum, cell.gain, cell.gate) == (0.125, spectra.Linspace(), drive.EMA(), None)
    assert ADPTNet.paper(6, batch_first=False, dtype=torch.float64).batch_first is False
    short = {"adptnet_spec": 1, "spec": {"type": "LayerSpec", "cell": {"type": "ADPTSpec", "width": 6}}}
    assert Spec.from_json(json.dumps(short)) == ADPTNet.paper(6).spec
    old = {"type": "SwiGLUBlockSpec", "layer": short["spec"], "norm": "rms", "expansion": 4}
    assert Spec.from_json(json.dumps({"adptnet_spec": 1, "spec": old})) == SwiGLUBlockSpec(ADPTNet.paper(6).spec)


def test_a_slow_memory_keeps_the_gain_that_is_stable_with_it():
    assert ADPTNet(6, memory=cells.SlowMemory()).spec.cell.gain == drive.EMA()
    assert ADPTNet(6, memory=cells.SlowMemory(), gain=drive.LRU()).spec.cell.gain == drive.LRU()


def test_a_model_takes_a_layer_or_a_block():
    layer = ADPTNet(KIND_WIDTH).spec
    assert SequenceModel(layer, vocabulary=5).spec.block == SwiGLUBlockSpec(layer, expansion=2)
    changed = SequenceModel(presets.text(KIND_WIDTH), vocabulary=5, norm="batch", dropout=0.5).spec.block
    assert (changed.norm, changed.dropout, changed.layer) == ("batch", 0.5, presets.text(KIND_WIDTH).layer)
    assert SequenceModel(BlockSpec(layer, glu=False), vocabulary=5).spec.block == BlockSpec(layer, glu=False)
    with pytest.raises(SpecError, match="glu"):
        SequenceModel(layer, vocabulary=5, glu=False)


@pytest.mark.parametrize("name", presets.PRESETS)
@pytest.mark.parametrize("width", [5, 6, 8])
def test_presets_are_specs_and_every_width_trains(name, width):
    block = presets.PRESETS[name](width, length=30)
    assert Spec.from_json(block.to_json()) == block
    assert block.width == width
    torch.manual_seed(0)
    model, tokens = SequenceModel(block, vocabulary=3), torch.randint(3, (4, 12))
    optimizer = torch.optim.AdamW(optim.param_groups(model, lr=1e-2, weight_decay=0.01))
    losses = []
    for _ in range(16):
        loss = nn.functional.cross_entropy(model(tokens)[0].flatten(0, 1), tokens.flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]


def test_decay_spares_what_has_no_scale():
    model = SequenceModel(presets.text(KIND_WIDTH), vocabulary=5)
    inner = model.blocks[0].layer.layer.cell
    directions_ = {id(p) for module in inner.directions for p in module.parameters()}
    spared = {
        id(p) for group in optim.param_groups(model, 1e-3, 0.1) if not group["weight_decay"] for p in group["params"]
    }
    assert directions_ <= spared
    assert {id(p) for p in inner.spectrum.parameters()} <= spared
    assert id(model.blocks[0].layer.skip.weight) in spared
    assert all((id(p) in spared) == (p.dim() < 2) for p in model.blocks[0].enter.parameters())
    groups = optim.param_groups(model, 1e-3, 0.1, decay_directions=True)
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert {i for i in directions_ if i in decayed} == directions_
