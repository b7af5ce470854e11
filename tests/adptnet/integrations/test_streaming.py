"""Exported steps give the results of the network on the whole sequence."""

import dataclasses
import sys

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from adptnet import cells
from adptnet.errors import IncompatibleError, InputError
from adptnet.integrations.streaming import StreamingStep, export_step, run_onnx, write_onnx
from adptnet.nn import ADPTNet, SpikingModelSpec, silif_for_speech, spiking_adpt_for_speech

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
    with pytest.raises(InputError, match=r"frames have shape \(3, 7\); this network takes \(batch, time, 7\)"):
        run_onnx(path, frames[:, 0])


def test_what_cannot_be_exported_is_reported(tmp_path, monkeypatch):
    model = NETWORKS["silif"].build()
    with pytest.raises(InputError, match=r"Call model\.eval\(\) first"):
        export_step(model)
    with pytest.raises(InputError, match="wraps a SpikingModel; got ADPTNet"):
        export_step(ADPTNet.paper(4))
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
    with pytest.raises(IncompatibleError, match=r'Build them with initial="zero"'):
        write_onnx(model, tmp_path / "step.onnx")
