"""`adptnet export` writes a file that runs without adptnet, and answers wrong arguments."""

import numpy as np
import pytest
import torch

import adptnet
from adptnet.integrations.streaming import StreamingStep, run_onnx
from adptnet_lab.cli import main


@pytest.fixture
def saved(tmp_path):
    model = adptnet.SequenceModel(adptnet.ADPTNet(6, beta=1.0).spec, vocabulary=9).eval()
    adptnet.save(model, tmp_path / "model.safetensors")
    return model, tmp_path


def test_a_saved_model_is_written_as_torch_program(saved, capsys):
    model, folder = saved
    assert main(["export", str(folder / "model.safetensors"), str(folder / "step.pt2")]) == 0
    assert "wrote" in capsys.readouterr().out
    program, step = torch.export.load(folder / "step.pt2").module(), StreamingStep(model)
    tokens = torch.tensor([3, 5])
    with torch.no_grad():
        torch.testing.assert_close(program(tokens, *step.initial(2)), step(tokens, *step.initial(2)))


@pytest.mark.slow
def test_a_saved_model_is_written_as_onnx(saved):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, folder = saved
    tokens = torch.randint(9, (2, 12))
    expected = model(tokens)[0].detach().numpy()
    assert main(["export", str(folder / "model.safetensors"), str(folder / "step.onnx")]) == 0
    np.testing.assert_allclose(run_onnx(folder / "step.onnx", tokens), expected, rtol=0, atol=1e-5)
    assert main(["export", str(folder / "model.safetensors"), str(folder / "all.onnx"), "--sequence"]) == 0
    session = runtime.InferenceSession(str(folder / "all.onnx"))
    np.testing.assert_allclose(session.run(None, {"input": tokens.numpy()})[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "flags", "answer"),
    [("step.txt", [], "the suffix must be .onnx"), ("step.pt2", ["--sequence"], "--sequence is for ONNX")],
)
def test_wrong_arguments_are_answered(saved, capsys, file, flags, answer):
    _, folder = saved
    assert main(["export", str(folder / "model.safetensors"), str(folder / file), *flags]) == 1
    assert answer in capsys.readouterr().err
    assert not (folder / file).exists()
