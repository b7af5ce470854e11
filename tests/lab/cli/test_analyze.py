"""The command that analyzes every recurrent layer of a checkpoint."""

import json

import numpy
import pytest

from adptnet import ADPTNet, SequenceModel, conjugates, save, spectra
from adptnet.analysis import certificate
from adptnet.analysis import plot as draw
from adptnet_lab import cli

WIDE = spectra.Linspace(dt_min=0.05, dt_max=3.0)


def frozen(beta=0.5, size=6, **axes):
    return ADPTNet.paper(size, beta=beta, **{"spectrum": WIDE, **axes}).requires_grad_(False)


def test_the_command_analyzes_every_layer_of_a_checkpoint(tmp_path, capsys):
    model = SequenceModel(frozen(1.0, 8, spectrum=spectra.Negative(WIDE)).spec, depth=2, vocabulary=6)
    save(model.float(), tmp_path / "model.safetensors")
    options = ["analyze", str(tmp_path / "model.safetensors"), "--output", str(tmp_path / "out")]
    assert cli.main([*options, "--group", "S3", "--length", "24", "--sequences", "2"]) == 0
    printed = capsys.readouterr().out
    assert "blocks.0.layer" in printed
    assert "blocks.1.layer" in printed
    assert "entropy of M" in printed
    numbers = json.loads((tmp_path / "out" / "analyze.json").read_text())
    assert set(numbers["layers"]) == {"blocks.0.layer", "blocks.1.layer"}
    assert len(numbers["layers"]["blocks.0.layer"]["exponents"][0]) == 8
    for name in ("spectra", "shifts", "conjugates"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert "<svg" in (tmp_path / "out" / f"{name}.svg").read_text()[:1000]
    assert cli.main([*options, "--group", "S5"]) == 1
    assert "S5 has 120 elements; the model takes 6 tokens" in capsys.readouterr().err


def test_the_command_takes_inputs_from_a_file_and_any_saved_layer(tmp_path, capsys):
    save(frozen(0.1, 4), tmp_path / "layer.safetensors")
    numpy.save(tmp_path / "x.npy", numpy.random.default_rng(0).normal(size=(2, 16, 4)))
    options = ["analyze", str(tmp_path / "layer.safetensors"), "--output", str(tmp_path / "out"), "--length", "30"]
    assert cli.main([*options, "--inputs", str(tmp_path / "x.npy")]) == 0
    (tmp_path / "broken.npy").write_text("no")
    assert cli.main([*options, "--inputs", str(tmp_path / "broken.npy")]) == 1
    assert "numpy.save" in capsys.readouterr().err


def test_the_command_explains_what_it_cannot_use(tmp_path, capsys):
    layer, model = tmp_path / "layer.safetensors", tmp_path / "model.safetensors"
    save(frozen(0.1, 4), layer)
    save(SequenceModel(frozen(0.1, 4).spec, depth=1, vocabulary=6), model)
    names = numpy.array(["a"])
    files = {"beyond": numpy.array([[0, 6] * 4]), "parts": numpy.ones((1, 8)) / 2, "names": names, "none": names[:0]}
    files |= {
        "none": numpy.zeros((0, 8), dtype=int),
        "below": numpy.array([[0, -1] * 4]),
        "i": numpy.ones((1, 8, 4)) * 1j,
    }
    for name, values in files.items():
        numpy.save(tmp_path / f"{name}.npy", values)
    for path, options, words in (
        (model, ["--sequences", "0"], "--sequences 0: must be at least 1"),
        (model, ["--length", "-3"], "--length -3: must be at least 1"),
        (layer, ["--group", "S3"], "the model takes feature vectors, not tokens"),
        (tmp_path, [], "is a folder"),
        (model, ["--inputs", "beyond"], "numbers from 0 to 6; the model takes tokens: integers from 0 to 5"),
        (model, ["--inputs", "below"], "numbers from -1 to 0"),
        (model, ["--inputs", "parts"], "float64; the model takes tokens"),
        (model, ["--inputs", "names"], "not a .npy file of numbers"),
        (model, ["--inputs", "none"], "nothing to analyze"),
        (layer, ["--inputs", "i"], "real numbers"),
    ):
        given = [options[0], str(tmp_path / f"{options[1]}.npy")] if "--inputs" in options else options
        assert cli.main(["analyze", str(path), "--output", str(tmp_path / "out"), *given]) == 1
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "layer",
    [frozen(0.0, 1), frozen(0.5, 2, spectrum=spectra.S4DInv()), frozen(2.0, 4, conjugate=conjugates.Taylor())],
    ids=["one number", "one pair", "Taylor"],
)
def test_the_command_takes_the_smallest_states_and_bounds_what_it_draws(layer, tmp_path, capsys, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        draw, "shifts", lambda values, bounds: drawn.update(values=values, bounds=bounds) or draw.new_figure(1, 1)
    )
    save(layer, tmp_path / "layer.safetensors")
    options = ["--output", str(tmp_path / "out"), "--length", "24", "--sequences", "2"]
    assert cli.main(["analyze", str(tmp_path / "layer.safetensors"), *options]) == 0
    assert ("M is diagonal" in capsys.readouterr().out) == (layer.cell.state_size < 3)
    (shift,), (bound,) = drawn["values"].values(), drawn["bounds"].values()
    assert float(shift.abs().max()) <= bound + 1e-12
    held = certificate(layer)
    if layer.cell.state_size == 4:  # the singular values of M itself are not the moduli of Λ̄
        assert bound == pytest.approx(
            float((held.upper - layer.cell.eigenvalues().modulus().sort().values.flip(0)).max())
        )
        assert bound > held.deviation
