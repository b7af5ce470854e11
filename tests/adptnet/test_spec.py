"""Specs: printing, comparison, JSON, and errors that name the wrong field."""

import json
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch

from adptnet import (
    ADPTNet,
    Spec,
    TrainableBeta,
    cells,
    conjugates,
    directions,
    drive,
    nn,
    projections,
    retractions,
    spectra,
)
from adptnet.errors import IncompatibleError, SpecError
from adptnet.spec import spec
from support.members import legal, name_of


def whole_models():
    layer = ADPTNet.paper(6, beta=TrainableBeta(0.5, maximum=2.0), gate=drive.SoftplusGate()).spec
    yield layer
    yield nn.LayerSpec(cells.ReLURNN(5))
    yield nn.BidirectionalSpec(layer)
    yield nn.StackSpec(nn.BidirectionalSpec(layer), depth=2, dropout=0.1)
    yield nn.BlockSpec(layer, norm="rms", prenorm=False, glu=False)
    yield nn.ModelSpec(nn.BlockSpec(layer), depth=2, vocabulary=7)
    yield nn.ModelSpec(nn.BlockSpec(layer), input_size=3, output_size=2, head="mean")


@pytest.mark.parametrize("axes", legal, ids=name_of)
def test_a_layers_spec_survives_json_and_builds_the_same_layer(axes):
    layer = ADPTNet.paper(**axes)
    read = Spec.from_json(layer.spec.to_json())
    assert read == layer.spec
    assert hash(read) == hash(layer.spec)
    twin = read.build()
    assert isinstance(twin, ADPTNet)
    assert {k: v.shape for k, v in twin.state_dict().items()} == {k: v.shape for k, v in layer.state_dict().items()}


@pytest.mark.parametrize("spec", list(whole_models()), ids=lambda s: type(s).__name__)
def test_a_models_spec_survives_json_and_is_its_modules(spec):
    assert Spec.from_json(spec.to_json()) == spec
    assert spec.build().spec == spec


def test_a_spec_prints_as_what_to_type():
    assert repr(spectra.Negative(spectra.S4DReal(dt_min=0.01), 0.25)) == (
        "Negative(spectrum=S4DReal(dt_min=0.01, dt_max=0.1, trainable=True, dt_per='channel'), fraction=0.25)"
    )


def test_numpy_numbers_are_written_as_json_numbers():
    written = spectra.Linspace(dt_min=numpy.float32(0.0625)).to_json()
    assert Spec.from_json(written) == spectra.Linspace(dt_min=0.0625)
    assert type(ADPTNet.paper(numpy.int64(4), beta=numpy.float32(0.5)).spec.cell.beta) is float
    assert ADPTNet.paper(4, beta=Fraction(1, 8)).spec == ADPTNet.paper(4).spec


def document(**changes):
    text = json.loads(ADPTNet.paper(6).spec.to_json())
    text["spec"]["cell"].update(changes)
    return json.dumps(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "not JSON"),
        ("[1, 2]", "has the keys"),
        ('{"adptnet_spec": 99, "spec": {}}', "newer adptnet: pip install --upgrade adptnet"),
        ('{"adptnet_spec": "one", "spec": {}}', "version, an integer"),
        ('{"adptnet_spec": 1, "spec": 3}', 'object with a "type"'),
        ('{"adptnet_spec": 1, "spec": {}, "more": 1}', "no key 'more'"),
        ('{"adptnet_spec": 1, "spec": {"type": "Linspce"}}', "Perhaps you meant 'Linspace'"),
        (document(wdith=3), "ADPTSpec has no field 'wdith'. Perhaps you meant 'width'"),
        (document(flow={"type": "RoPE"}), "no field 'flow'"),
        (document(direction={"type": "FromState", "relu": "false"}), "must be True or False"),
        ('{"adptnet_spec": 1, "spec": {"type": ["LayerSpec"]}}', "unknown here"),
        ("[" * 100_000, "not JSON"),
        (document(beta=-1), "beta must be a finite number >= 0"),
        (document(spectrum={"type": "Cayley"}), "spectrum must be a SpectrumSpec. Pass spectrum=spectra.Linspace()"),
        ('{"adptnet_spec": 1, "spec": {"type": "ADPTSpec"}}', "cannot be made from {}"),
    ],
)
def test_errors_name_what_is_wrong_in_a_spec(text, message):
    with pytest.raises(SpecError) as error:
        Spec.from_json(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: spectra.Linspace(dt_min=-1e-3), "dt_min must be a positive number"),
        (lambda: spectra.Linspace(dt_min=0.0), "dt_min must be a positive number"),
        (lambda: spectra.Linspace(dt_min=float("nan")), "dt_min must be a positive number"),
        (lambda: spectra.S4DReal(dt_min=1.0, dt_max=0.1), "Pass dt_min=0.1, dt_max=1.0"),
        (lambda: spectra.S4DInv(decay=-1.0), "decay must be a positive number"),
        (lambda: spectra.Sparse(spectra.Linspace(), 1.0), "fraction must be in [0, 1)"),
        (lambda: spectra.Sparse(1.0), "spectrum must be a SpectrumSpec"),
        (lambda: spectra.Sparse(seed=0.5), "seed must be an integer"),
        (lambda: spectra.Sparse(seed=2**70), "seed must be an integer"),
        (lambda: spectra.Linspace(dt_min=1e-46), "dt_min must be between 1e-15 and 1e15"),
        (lambda: spectra.Linspace(dt_per="row"), 'must be "state" or "channel"'),
        (lambda: spectra.Linspace(trainable="never"), "must be True or False"),
        (lambda: spectra.Negative(fraction=True), "fraction must be in [0, 1)"),
        (lambda: spectra.LRURing(r_max=1.0), "needs 0 <= r_min <= r_max < 1"),
        (lambda: spectra.UniformDecay(decay_min=3.0, decay_max=1.0), "decay_min is larger than decay_max"),
        (lambda: spectra.FromExponents(()), "needs finite numbers"),
        (lambda: spectra.FromExponents((-1.0,)).build(3), "Pass state_size=1, or 3 exponents"),
        (lambda: ADPTNet.paper(2, spectrum=spectra.FromExponents((0.1, -1.0))), "Pass gain=drive.ZOH()"),
        (
            lambda: ADPTNet.paper(6, projection=projections.LowParam((8, 9), 2)),
            "has size 72, but the state has size 6. Pass factors=(3, 2)",
        ),
        (lambda: ADPTNet.paper(6, state_size=8, input_projection=projections.Kronecker((4, 2))), "is square"),
        (lambda: projections.Kronecker(factors=(3,)), "factors are two sizes"),
        (lambda: projections.LowRank(rank=0), "rank must be an integer >= 1"),
        (lambda: directions.FromState(relu=True, spike=1.0), "either ReLU(x) or spikes"),
        (lambda: directions.FromState(dot=1.5), "in [-1, 1]"),
        (
            lambda: ADPTNet.paper(6, direction=directions.FromState(heads=4)),
            "not a multiple of 4 heads. Pass state_size=8",
        ),
        (
            lambda: ADPTNet.paper(6, spectrum=spectra.S4DInv(), direction=directions.FromState(heads=2)),
            "even size of each head",
        ),
        (lambda: ADPTNet.paper(7, spectrum=spectra.S4DInv()), "Pass state_size=8"),
        (
            lambda: ADPTNet.paper(6, beta=(0.1, 0.2)),
            "beta has 2 values, but the number of heads is 1. Pass direction=FromState(heads=2)",
        ),
        (lambda: ADPTNet.paper(6, beta=1e20), "no precision left"),
        (lambda: ADPTNet.paper(6, rope=drive.RoPE(), spectrum=spectra.S4DInv()), "Pass a real spectrum"),
        (lambda: ADPTNet.paper(5, rope=drive.RoPE()), "Pass state_size=6"),
        (lambda: drive.RoPE(sign=0), "must be 1 (as printed) or -1"),
        (lambda: conjugates.Taylor(order=3), "must be 1 or 2"),
        (
            lambda: ADPTNet.paper(6, conjugate=conjugates.Taylor(), rotation_aware=True),
            "Pass conjugate=conjugates.Exact()",
        ),
        (lambda: ADPTNet.paper(6, start=True, direction=directions.FromState(heads=2)), "Pass heads=1"),
        (
            lambda: ADPTNet.paper(6, conjugate=conjugates.Stateful(), memory=cells.SlowMemory()),
            "does not go with memory",
        ),
        (lambda: cells.SlowMemory(spectra.S4DInv()), "must be real"),
        (lambda: nn.BlockSpec(ADPTNet.paper(4, batch_first=False).spec), "Build the layer with batch_first=True"),
        (lambda: spectra.Negative(spectra.Linspace(), 1.5), "fraction must be in [0, 1)"),
        (lambda: spectra.Negative(spectra.Linspace), "Pass spectrum=Linspace()"),
        (lambda: spectra.S4DInv().build(7), "state_size=7 is odd. Pass state_size=8"),
        (lambda: ADPTNet.paper(6, beta=-0.5), "beta must be a finite number >= 0"),
        (lambda: ADPTNet.paper(6, beta=float("inf")), "beta must be a finite number >= 0"),
        (lambda: ADPTNet.paper(0), "width must be an integer >= 1"),
        (lambda: ADPTNet.paper(6.5), "width must be an integer >= 1"),
        (lambda: ADPTNet.paper(6, state_size=-3), "state_size must be an integer >= 1"),
        (
            lambda: ADPTNet.paper(6, retractions=retractions.Cayley()),
            "no argument 'retractions'. Perhaps you meant 'retraction'",
        ),
        (lambda: ADPTNet.paper(6, retraction="polar"), "Pass one of 'cayley', 'exponential'"),
        (lambda: ADPTNet.paper(6, conjugate=conjugates.Diagonal()), "Pass beta=0, or conjugate=conjugates.Exact()"),
        (lambda: ADPTNet.paper(6, projection=projections.Expand()), "Pass projection=projections.Dense()"),
        (lambda: ADPTNet.paper(6, state_size=8, input_projection=projections.Expand()), "Pass state_size=12"),
        (lambda: ADPTNet.paper(6, direction=directions.FromState), "Pass direction=FromState()"),
        (lambda: ADPTNet.paper(6, gain="mean"), "Pass one of 'ema', 'lru', 'zoh'"),
        (lambda: drive.SoftplusGate(rank=0), "rank must be an integer >= 1"),
        (lambda: TrainableBeta(2.0, maximum=1.0), "needs minimum <= initial <= maximum"),
        (lambda: nn.BlockSpec(ADPTNet.paper(4).spec, norm="bach"), "Perhaps you meant 'batch'"),
        (lambda: nn.BlockSpec(ADPTNet.paper(4).spec, dropout=1.0), "dropout must be in [0, 1)"),
        (
            lambda: nn.BlockSpec(torch.nn.Linear(4, 4)),
            "BlockSpec(layer=Linear): must be a LayerSpec, BidirectionalSpec or MixerSpec, or a layer. "
            "Pass e.g. ADPTNet(64).",
        ),
        (lambda: nn.StackSpec(64), "StackSpec(layer=int): must be a LayerSpec"),
        (lambda: nn.SequenceModel(ADPTNet.paper(4).spec), "pass one of them"),
        (lambda: nn.SequenceModel(ADPTNet.paper(4).spec, vocabulary=3, input_size=3), "pass one of them"),
        (lambda: nn.SequenceModel(ADPTNet.paper(4).spec, input_size=3), "pass output_size="),
        (lambda: nn.SequenceModel(ADPTNet.paper(4).spec, vocabulary=3, head="tokens"), "Perhaps you meant 'token'"),
        (lambda: nn.Stack(ADPTNet.paper(4).spec, 0), "depth must be an integer >= 1"),
    ],
)
def test_what_cannot_be_built_is_rejected_with_the_fix(make, message):
    with pytest.raises((SpecError, IncompatibleError)) as error:
        make()
    assert message in str(error.value)
    assert isinstance(error.value, ValueError)


def test_a_spec_holds_no_tensors():
    @spec
    class Holder(Spec):
        content: Any

    with pytest.raises(SpecError, match="cannot be stored in a spec"):
        Holder(torch.ones(())).to_json()


def test_two_specs_of_one_name_are_rejected():
    with pytest.raises(SpecError, match="Two specs are called Linspace"):

        @spec
        class Linspace(Spec):
            pass


def test_an_error_about_a_huge_value_stays_readable():
    with pytest.raises(IncompatibleError, match=r"^ADPTSpec\(beta=\(0.5, .* characters left out\) .*heads=") as raised:
        ADPTNet(8, beta=(0.5,) * 1_000_000)
    assert len(str(raised.value)) < 5000
