"""Predicted and measured iterations, the report on parallelisability, the figures, and the command."""

import json
import math
import subprocess
import sys

import numpy
import pytest
import torch
from torch import nn

from adptnet import ADPTNet, Bidirectional, SequenceModel, conjugates, projections, save, solvers, spectra
from adptnet.analysis import (
    captured,
    certificate,
    lyapunov_exponents,
    materialised,
    parallelisability,
    predicted_iterations,
    singular_value_shifts,
)
from adptnet.analysis import plot as draw
from adptnet.errors import IncompatibleError, InputError
from adptnet_lab import cli

WIDE = spectra.Linspace(dt_min=0.05, dt_max=3.0)


def frozen(beta=0.5, size=6, **axes):
    return ADPTNet(size, beta=beta, **{"spectrum": WIDE, **axes}).requires_grad_(False)


# Iterations


@pytest.mark.parametrize("kind", [solvers.ConvDEER, solvers.ForwardDEER, solvers.QuasiDEER, solvers.KoopmanDEER])
@pytest.mark.parametrize("beta", [0.05, 0.3])
def test_the_predicted_iterations_are_the_measured_ones(kind, beta):
    layer, x = frozen(beta), torch.randn(3, 100, 6)
    solver = kind(rtol=2e-12)  # at the last digits rounding adds an iteration or two
    predicted = predicted_iterations(layer, x, solver)
    measured = layer.solve(x, solver=solver).iterations
    assert (predicted - measured).abs().max() <= 1
    assert measured.min() >= 4


def test_a_gru_is_predicted_too_and_a_linear_cell_takes_one():
    cell, x = nn.GRUCell(3, 5).requires_grad_(False), torch.randn(2, 60, 3)
    report = parallelisability(cell, x)
    quasi = {each.name: each for each in report.solvers}["QuasiDEER"]
    assert (quasi.predicted - quasi.iterations).abs().max() <= 1
    assert predicted_iterations(frozen(0.0), torch.randn(30, 6), solvers.ConvDEER()).tolist() == [
        0
    ]  # the guess is right
    with pytest.raises(IncompatibleError, match="undamped"):
        predicted_iterations(cell, x, solvers.Sequential())


# The report


def test_a_contracting_layer_is_recommended_to_run_in_parallel():
    layer = frozen(0.02, projection=projections.Orthogonal(), spectrum=spectra.Linspace(dt_min=0.5, dt_max=2.0))
    report = parallelisability(layer, torch.randn(2, 128, 6))
    assert report.certified.contracts
    assert float(report.spectrum.largest.max()) < 0
    assert {each.name for each in report.solvers} == {
        *("DEER", "QuasiDEER", "ForwardDEER", "ConvDEER", "KoopmanDEER", "Jacobi", "Picard")
    }
    assert report.best.converged
    assert report.best.gain() > 2
    assert "in parallel" in report.recommendation
    assert "for every input" in report.recommendation
    assert report.best.gain(processors=1) < 1
    assert "step by step" in parallelisability(layer, torch.randn(64, 6), processors=1.0).recommendation
    assert "ConvDEER" in str(report)
    jacobi = {each.name: each for each in report.solvers}["Jacobi"]
    assert jacobi.depth == float(jacobi.iterations.double().mean())  # no scan
    assert {each.name for each in report.solvers if each.predicted is None} == {"DEER"}  # what it takes is quadratic
    with pytest.raises(InputError, match="processors=0"):
        parallelisability(layer, torch.randn(64, 6), processors=0)
    assert "about 1 iteration instead" in parallelisability(frozen(0.0), torch.randn(64, 6)).recommendation


def test_a_chaotic_layer_is_recommended_to_run_step_by_step():
    layer = frozen(4.0, spectrum=spectra.Negative(WIDE, 0.5))
    report = parallelisability(layer, torch.randn(2, 128, 6), solvers={"quasi": solvers.QuasiDEER(max_iterations=100)})
    assert float(report.spectrum.largest.max()) > 0.1
    assert report.recommendation.startswith("Run it step by step")
    assert "chaotic" in str(report)


def test_what_does_not_fit_is_refused_with_its_reason():
    report = parallelisability(nn.LSTMCell(3, 4), torch.randn(40, 3))
    assert "has no M" in report.refused["ForwardDEER"]
    assert not report.certified.holds
    assert "no limit that is known" in str(report)
    doubled = parallelisability(lambda x: 0.5 * x.sin(), state=torch.randn(2, 3), steps=50)
    assert doubled.certified is None
    assert doubled.best.converged
    assert "with no limit" in str(doubled)
    one = parallelisability(frozen(), torch.randn(40, 6), solvers={"loop": solvers.Sequential()})
    assert "at once" in one.refused["loop"]
    assert one.best is None
    with pytest.raises(InputError, match="at least 4"):
        parallelisability(frozen(), torch.randn(2, 6))


# Figures


def is_written(paths):
    vector, pixels = paths
    assert pixels.read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in vector.read_text()[:1000]


def test_every_figure_is_drawn_with_what_it_may_meet(tmp_path):
    layers = {
        "plain": frozen(),
        "sparse": frozen(spectrum=spectra.Sparse(WIDE, 0.5)),
        "linear": frozen(0, conjugate=conjugates.Diagonal()),
    }
    x = torch.randn(2, 40, 6)
    exponents = {name: lyapunov_exponents(layer, x).exponents for name, layer in layers.items()}
    exponents["lost"] = torch.tensor([0.1, -0.5, -math.inf])
    eigenvalues = {name: layer.cell.spectrum.log_modulus() for name, layer in layers.items()}
    held = {name: certificate(layer) for name, layer in layers.items()}
    is_written(draw.save(draw.spectra(exponents, eigenvalues, held), tmp_path / "new" / "spectra"))
    is_written(draw.save(draw.spectra({"one": torch.zeros(3)}), tmp_path / "one.png"))
    shifts = {name: singular_value_shifts(layer, x) for name, layer in layers.items()}
    bounds = {name: certified.deviation for name, certified in held.items()}
    is_written(draw.save(draw.shifts(shifts, bounds), tmp_path / "shifts"))
    matrices = {name: materialised(layer, x)[0] for name, layer in layers.items()}
    is_written(draw.save(draw.matrices(matrices), tmp_path / "m"))
    is_written(draw.save(draw.iterations({"a": torch.tensor([3, 4]), "b": torch.tensor([900])}), tmp_path / "i"))
    with pytest.raises(InputError, match="no spectrum"):
        draw.spectra({})


def inside(figure):
    """Whether the legend of a figure is within it."""
    figure.canvas.draw()
    box, page = figure.legends[0].get_window_extent(), figure.bbox
    return box.x0 >= page.x0 and box.x1 <= page.x1 and box.y0 >= page.y0


@pytest.mark.parametrize("panels", [1, 2, 3])
def test_a_legend_fits_its_figure_and_names_what_is_drawn(panels):
    names = [f"layer {i}" for i in range(panels)]
    exponents = dict.fromkeys(names, torch.tensor([0.1, -0.5, -0.7, -math.inf]))
    eigenvalues = dict.fromkeys(names, torch.tensor([0.0, -0.5, -math.inf, -math.inf]))
    figure = draw.spectra(exponents, eigenvalues, dict.fromkeys(names, (-1.0, 0.5)))
    assert inside(figure)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert lines["exponent −∞"].get_xdata().tolist() == [4]
    assert lines["ln |λ̄| = −∞"].get_xdata().tolist() == [3, 4]
    plain = draw.spectra(dict.fromkeys(names, torch.tensor([0.1, -0.5])))
    assert "−∞" not in "".join(text.get_text() for text in plain.legends[0].texts)
    narrow = draw.spectra({"pair": torch.tensor([-5e-4, -5e-4 - 1e-17])}).axes[0].get_ylim()
    assert narrow[1] - narrow[0] > 1e-6


def test_the_same_figure_is_the_same_file(tmp_path):
    figure = draw.spectra({"one": torch.tensor([0.0, -1.0])})
    first, _ = draw.save(figure, tmp_path / "a")
    second, _ = draw.save(figure, tmp_path / "b")
    assert len(first.read_text()) == len(second.read_text())


def test_figures_bring_matplotlib_only_when_drawn():
    code = "import sys, adptnet.analysis.plot; print('matplotlib' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


# The command


def test_the_command_analyses_every_layer_of_a_checkpoint(tmp_path, capsys):
    model = SequenceModel(frozen(1.0, 8, spectrum=spectra.Negative(WIDE)).spec, depth=2, vocabulary=6)
    save(model.float(), tmp_path / "model.safetensors")
    options = ["analyse", str(tmp_path / "model.safetensors"), "--output", str(tmp_path / "out")]
    assert cli.main([*options, "--group", "S3", "--length", "24", "--sequences", "2"]) == 0
    printed = capsys.readouterr().out
    assert "blocks.0.layer" in printed
    assert "blocks.1.layer" in printed
    assert "entropy of M" in printed
    numbers = json.loads((tmp_path / "out" / "analyse.json").read_text())
    assert set(numbers["layers"]) == {"blocks.0.layer", "blocks.1.layer"}
    assert len(numbers["layers"]["blocks.0.layer"]["exponents"][0]) == 8
    for name in ("spectra", "shifts", "conjugates"):
        is_written((tmp_path / "out" / f"{name}.svg", tmp_path / "out" / f"{name}.png"))
    assert cli.main([*options, "--group", "S5"]) == 1
    assert "S5 has 120 elements; the model takes 6 tokens" in capsys.readouterr().err


def test_the_command_takes_inputs_from_a_file_and_any_saved_layer(tmp_path, capsys):
    save(frozen(0.1, 4), tmp_path / "layer.safetensors")
    numpy.save(tmp_path / "x.npy", numpy.random.default_rng(0).normal(size=(2, 16, 4)))
    options = ["analyse", str(tmp_path / "layer.safetensors"), "--output", str(tmp_path / "out"), "--length", "30"]
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
        (model, ["--sequences", "0"], "--sequences 0: at least 1"),
        (model, ["--length", "-3"], "--length -3: at least 1"),
        (layer, ["--group", "S3"], "the model takes no tokens but features"),
        (tmp_path, [], "is a folder"),
        (model, ["--inputs", "beyond"], "numbers from 0 to 6; the model takes tokens, whole numbers from 0 to 5"),
        (model, ["--inputs", "below"], "numbers from -1 to 0"),
        (model, ["--inputs", "parts"], "float64; the model takes tokens"),
        (model, ["--inputs", "names"], "not a .npy file of numbers"),
        (model, ["--inputs", "none"], "nothing to analyse"),
        (layer, ["--inputs", "i"], "real numbers"),
    ):
        given = [options[0], str(tmp_path / f"{options[1]}.npy")] if "--inputs" in options else options
        assert cli.main(["analyse", str(path), "--output", str(tmp_path / "out"), *given]) == 1
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "layer",
    [frozen(0.0, 1), frozen(0.5, 2, spectrum=spectra.S4DInv()), frozen(2.0, 4, conjugate=conjugates.Taylor())],
    ids=["one number", "one pair", "Taylor"],
)
def test_the_command_takes_the_smallest_states_and_bounds_what_it_draws(layer, tmp_path, capsys, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        draw, "shifts", lambda values, bounds: drawn.update(values=values, bounds=bounds) or draw.blank(1, 1)
    )
    save(layer, tmp_path / "layer.safetensors")
    options = ["--output", str(tmp_path / "out"), "--length", "24", "--sequences", "2"]
    assert cli.main(["analyse", str(tmp_path / "layer.safetensors"), *options]) == 0
    assert ("M is diagonal" in capsys.readouterr().out) == (layer.cell.state_size < 3)
    (shift,), (bound,) = drawn["values"].values(), drawn["bounds"].values()
    assert float(shift.abs().max()) <= bound + 1e-12
    held = certificate(layer)
    if layer.cell.state_size == 4:  # M itself has not the moduli of Λ̄ as singular values
        assert bound == pytest.approx(
            float((held.upper - layer.cell.eigenvalues().modulus().sort().values.flip(0)).max())
        )
        assert bound > held.deviation


def test_what_enters_each_layer_is_captured_as_the_model_runs():
    both = Bidirectional(frozen(0.1, 4).spec)
    x = torch.randn(2, 10, 4)
    met = captured(both, x)
    assert len(met) == 2
    assert sorted(torch.equal(seen, x) for _, seen in met.values()) in ([False, True], [True, True])
    assert both.training
