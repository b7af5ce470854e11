"""The JavaScript example steps an exported file and gives the outputs of the model."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from adptnet import ADPTNet, Recurrent, SequenceModel, cells, drive
from adptnet.integrations.streaming import write_onnx

ROOT = Path(__file__).parents[3]
MODELS = {
    "tokens": lambda: SequenceModel(ADPTNet(8, beta=1.0).spec, depth=2, vocabulary=9),
    "numbers": lambda: ADPTNet(6, beta=0.5, rope=drive.RoPE()),
    "lstm": lambda: Recurrent(cells.from_torch(torch.nn.LSTMCell(6, 5))),
}


@pytest.fixture(scope="module")
def node():
    """Return the path of Node if it finds onnxruntime-web from the root of the repository, or in NODE_PATH."""
    pytest.importorskip("onnxscript")
    path = shutil.which("node")
    if path is None:
        pytest.skip("Node is not installed")
    found = subprocess.run([path, "-e", "require('onnxruntime-web')"], cwd=ROOT, capture_output=True, check=False)
    if found.returncode:
        pytest.skip("Node does not find onnxruntime-web: npm install onnxruntime-web")
    return path


@pytest.mark.parametrize(
    "name", ["tokens", *(pytest.param(name, marks=pytest.mark.slow) for name in ("numbers", "lstm"))]
)
def test_javascript_steps_an_exported_file(name, node, tmp_path):
    torch.manual_seed(0)
    model = MODELS[name]().float().eval()
    x = torch.randint(9, (3, 200)) if name == "tokens" else torch.randn(3, 200, 6, dtype=torch.float32)
    with torch.no_grad():
        expected = model(x)[0].transpose(0, 1).numpy()
    write_onnx(model, tmp_path / "step.onnx")
    (tmp_path / "inputs.json").write_text(json.dumps(x.transpose(0, 1).tolist()))
    program = [
        node,
        str(ROOT / "examples" / "step_onnx.mjs"),
        str(tmp_path / "step.onnx"),
        str(tmp_path / "inputs.json"),
    ]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-600:]
    tolerance = 1e-5 * max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(np.array(json.loads(done.stdout)), expected, rtol=0, atol=tolerance)
