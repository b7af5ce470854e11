"""Exported steps and sequences give the results of the model on the whole sequence."""

import copy
import dataclasses
import sys

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from adptnet import Bidirectional, Recurrent, SequenceModel, SpikingADPTNet, Stack, cells, drive, presets, spectra
from adptnet.errors import IncompatibleError, InputError
from adptnet.integrations.streaming import StreamingStep, export_step, run_onnx, write_onnx, write_onnx_sequence
from adptnet.nn import ADPTNet, SpikingModelSpec, silif_for_speech, spiking_adpt_for_speech
from support.members import legal_layers

NETWORKS = {
    "silif": silif_for_speech(12, input_size=7, output_size=3),
    "adpt": spiking_adpt_for_speech(12, input_size=7, output_size=3, beta=0.8, threshold=0.4),
    "adpt that resets": spiking_adpt_for_speech(
        12, input_size=7, output_size=3, beta=0.8, threshold=0.4, spike_reset="subtract", spike_adaptation=True
    ),
    "lif, mean": SpikingModelSpec(cells.LIF(12), 7, 3, readout="mean"),
    "delayed": SpikingModelSpec(cells.DelayedLIF(12, delay=(1, 4)), 7, 3),
    "complex": SpikingModelSpec(cells.CSiLIF(12), 7, 3, depth=1),
}


def firing(spec: SpikingModelSpec, dtype: torch.dtype = torch.float64):
    """Return a network in evaluation mode whose neurons fire, and frames (batch, time, channels)."""
    model = dataclasses.replace(spec, momentum=0.6).build(dtype=dtype)
    frames = torch.poisson(torch.full((3, 25, 7), 0.6, dtype=dtype))
    for layer in model.layers:
        torch.nn.init.constant_(layer.currents.norm.norm.weight, 4.0)
        torch.nn.init.normal_(layer.currents.norm.norm.bias, 1.0)
    with torch.no_grad():
        for _ in range(5):
            model(frames)
        model.eval()
        assert all(0.01 < trace.spikes.mean() < 0.9 for trace in model.trace(frames))
    return model, frames


def streamed(step, frames, carried):
    answers = []
    for t in range(frames.shape[1]):
        answer, *carried = step(frames[:, t], *carried)
        answers.append(answer)
    return torch.stack(answers, 1)


def along(model, frames):
    """Return softmax(u) or u at every step of a run along the whole sequence."""
    seen = []
    hook = model.integrators.register_forward_hook(lambda module, given, outputs: seen.append(outputs[0]))
    with torch.no_grad():
        model(frames)
    hook.remove()
    return seen[0].softmax(-1) if model.spec.readout == "softmax" else seen[0]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_with_explicit_state_is_the_sequence(name):
    model, frames = firing(NETWORKS[name])
    step = StreamingStep(model)
    assert len(step.names) == 1 + len(step.initial(3))
    with torch.no_grad():
        assert_close(streamed(step, frames, step.initial(3)), along(model, frames), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name", [name if name == "silif" else pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS]
)
def test_an_exported_step_is_the_sequence(name, tmp_path):
    model, frames = firing(NETWORKS[name])
    step, expected = StreamingStep(model), along(model, frames)
    torch.export.save(export_step(model), tmp_path / "step.pt2")
    exported = torch.export.load(tmp_path / "step.pt2").module()
    with torch.no_grad():
        assert_close(streamed(exported, frames, step.initial(3)), expected, rtol=0, atol=1e-12)
        alone = streamed(exported, frames[:1], step.initial(1))  # any batch size
    assert_close(alone, expected[:1], rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_an_onnx_step_is_the_sequence(name, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, frames = firing(NETWORKS[name], torch.float32)
    path = tmp_path / "step.onnx"
    write_onnx(model, path)
    assert [file.name for file in tmp_path.iterdir()] == ["step.onnx"]  # no other file
    expected = along(model, frames).numpy()
    np.testing.assert_allclose(run_onnx(path, frames), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(run_onnx(path, frames[:1]), expected[:1], rtol=0, atol=1e-5)
    with pytest.raises(InputError, match=r"inputs have shape \(3, 7\); this step takes \(batch, time, 7\)"):
        run_onnx(path, frames[:, 0])


def test_what_cannot_be_exported_is_reported(tmp_path, monkeypatch):
    model = NETWORKS["silif"].build()
    with pytest.raises(InputError, match=r"Call model\.eval\(\) first"):
        export_step(model)
    with pytest.raises(InputError, match=r"has step\(\) and initial_state\(\); got Linear"):
        export_step(torch.nn.Linear(4, 4))
    with pytest.raises(InputError, match="got Bidirectional"):
        export_step(Bidirectional(ADPTNet(4).spec).eval())
    with pytest.raises(InputError, match='head="mean" needs the whole sequence'):
        export_step(SequenceModel(ADPTNet(4).spec, vocabulary=5, head="mean").eval())
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(InputError, match=r"ONNX needs onnx: pip install 'adptnet\[onnx\]'"):
        write_onnx(model.eval(), tmp_path / "step.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InputError, match=r"ONNX needs onnxruntime: pip install 'adptnet\[onnx\]'"):
        run_onnx(tmp_path / "step.onnx", np.zeros((1, 2, 7)))
    assert not list(tmp_path.iterdir())


def test_a_random_initial_state_is_not_exported(tmp_path):
    pytest.importorskip("onnxscript")
    model = SpikingModelSpec(cells.SiLIF(4, initial="uniform"), 7, 3).build().eval()
    with pytest.raises(IncompatibleError, match=r'Build the neurons with initial="zero"'):
        write_onnx(model, tmp_path / "step.onnx")


MODELS = {
    "layer": lambda: ADPTNet(6, beta=1.0),
    "tokens": lambda: SequenceModel(ADPTNet(6, beta=1.0).spec, depth=2, vocabulary=9),
    "numbers": lambda: SequenceModel(ADPTNet(6, beta=1.0).spec, input_size=3, output_size=2, head="last"),
    "gated": lambda: SequenceModel(presets.text(6), vocabulary=9),
    "stack": lambda: Stack(ADPTNet(6, spectrum=spectra.S4DInv(), beta=1.0).spec, 2),
    "expanded": lambda: ADPTNet(6, state_size=12, beta=1.0),
    "spikes": lambda: SpikingADPTNet(9, beta=0.8, threshold=0.3),
    "gru": lambda: Recurrent(cells.GRU(6)),
    "lstm": lambda: Recurrent(cells.from_torch(torch.nn.LSTMCell(6, 5))),
}


def inputs_of(model, batch=3, steps=200):
    """Return random inputs (batch, steps, ...) of a model."""
    like = StreamingStep(model).example(1)
    if not like.is_floating_point():
        return torch.randint(model.spec.vocabulary, (batch, steps))
    return torch.randn(batch, steps, like.shape[-1], dtype=like.dtype)


def outputs_of(model, x):
    """Return the outputs at every step of a run along the whole sequence."""
    if getattr(getattr(model, "spec", None), "head", None) == "last":
        return torch.stack([model(x[:, : t + 1])[0] for t in range(x.shape[1])], 1)
    return model(x)[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_any_model_is_the_sequence(name):
    model = MODELS[name]().eval()
    x, step = inputs_of(model, steps=20), StreamingStep(model)
    assert len(step.names) == 1 + len(step.initial(3))
    with torch.no_grad():
        assert_close(streamed(step, x, step.initial(3)), outputs_of(model, x), rtol=0, atol=1e-12)


def measure_tolerance(model, x):
    """Return the outputs along the sequence and how far another float32 program may be from them.

    That is 1e-5 of the largest output; or, if errors grow along the sequence, ten times the distance from float64.
    """
    precise = copy.deepcopy(model).double()
    with torch.no_grad():
        expected = outputs_of(model, x)
        error = (outputs_of(precise, x.double() if x.is_floating_point() else x) - expected).abs().max().item()
    return expected, max(1e-5 * max(1.0, expected.abs().max().item()), 10 * error)


def check_step(model, tmp_path):
    """Compare exported steps with the model: from its states at each of 200 steps, and 200 steps in a row."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    x, step = inputs_of(model), StreamingStep(model)
    expected, tolerance = measure_tolerance(model, x)
    calls, carried = [], step.initial(3)
    with torch.no_grad():
        for t in range(x.shape[1]):
            given = (x[:, t], *carried)
            output, *carried = step(*given)
            calls.append((given, (output, *carried)))
    given, answers = ([torch.cat(parts) for parts in zip(*side, strict=True)] for side in zip(*calls, strict=True))

    torch.export.save(export_step(model), tmp_path / "step.pt2")
    exported = torch.export.load(tmp_path / "step.pt2")
    assert not [n for n in exported.graph.nodes if "adptnet" in str(n.target)]  # standard operations only
    write_onnx(model, tmp_path / "step.onnx")
    session = runtime.InferenceSession(str(tmp_path / "step.onnx"))
    feed = {name: value.numpy() for name, value in zip(step.names, given, strict=True)}
    with torch.no_grad():
        found = exported.module()(*given)
    for program in (found, map(torch.from_numpy, session.run(None, feed))):
        for actual, answer in zip(program, answers, strict=True):
            assert_close(actual, answer, rtol=0, atol=1e-5 * max(1.0, answer.abs().max().item()))
    for rows, steps in ((3, 200), (1, 7)):
        answer = run_onnx(tmp_path / "step.onnx", x[:rows, :steps])
        np.testing.assert_allclose(answer, expected[:rows, :steps], rtol=0, atol=tolerance)


def test_an_onnx_step_has_the_eigenvalues_of_torch(tmp_path):
    """One unit in the last place of λ̄ = 0.9995 moves the state by up to 2,000 units."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    layer = ADPTNet(64, spectrum=spectra.Linspace(), beta=1.0, dtype=torch.float32).eval()
    write_onnx(layer, tmp_path / "step.onnx")
    constants = [onnx.numpy_helper.to_array(c) for c in onnx.load(tmp_path / "step.onnx").graph.initializer]
    expected = layer.cell.spectrum().eigenvalues().detach().numpy()
    assert any(np.array_equal(c, expected) for c in constants)


def test_an_onnx_step_in_float64_has_the_digits_of_float64(tmp_path):
    """Constants rounded to float32 would be seen: at 1e-8, or as NaN where a smallest norm of 2e-305 becomes zero."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    layer = ADPTNet(6, beta=1.0, gate=drive.SoftplusGate(), dtype=torch.float64).eval()
    x = inputs_of(layer)
    write_onnx(layer, tmp_path / "step.onnx")
    with torch.no_grad():
        expected = layer(x)[0].numpy()
    np.testing.assert_allclose(run_onnx(tmp_path / "step.onnx", x), expected, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_is_the_sequence(name, tmp_path):
    torch.set_default_dtype(torch.float32)
    model = MODELS[name]().eval()
    check_step(model, tmp_path)
    x = inputs_of(model)
    expected, tolerance = measure_tolerance(model, x)
    write_onnx_sequence(model, tmp_path / "sequence.onnx")
    session = pytest.importorskip("onnxruntime").InferenceSession(str(tmp_path / "sequence.onnx"))
    for rows, steps in ((3, 200), (1, 7)):
        (answer,) = session.run(None, {"input": x[:rows, :steps].numpy()})
        np.testing.assert_allclose(answer, expected[:rows, :steps], rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("axes", list(legal_layers()), ids=str)
def test_every_exported_layer_is_the_sequence(axes, tmp_path):
    torch.set_default_dtype(torch.float32)
    check_step(ADPTNet(**axes).eval(), tmp_path)


@pytest.fixture(autouse=True)
def default_dtype():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)
