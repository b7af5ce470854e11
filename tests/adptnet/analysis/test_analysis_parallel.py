"""Predicted and measured iterations, the report on parallelizability, recorded inputs, and figures."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from adptnet import ADPTNet, Bidirectional, conjugates, projections, solvers, spectra
from adptnet.analysis import (
    certificate,
    lyapunov_exponents,
    materialize_conjugate,
    parallelizability,
    predict_iterations,
    record_layer_inputs,
    singular_value_shifts,
)
from adptnet.analysis import plot as draw
from adptnet.errors import IncompatibleError, InputError

WIDE = spectra.Linspace(dt_min=0.05, dt_max=3.0)


def frozen(beta=0.5, size=6, **axes):
    return ADPTNet.paper(size, beta=beta, **{"spectrum": WIDE, **axes}).requires_grad_(False)


# Iterations


@pytest.mark.parametrize("kind", [solvers.ConvDEER, solvers.ForwardDEER, solvers.QuasiDEER, solvers.KoopmanDEER])
@pytest.mark.parametrize("beta", [0.05, 0.3])
def test_the_predicted_iterations_are_the_measured_ones(kind, beta):
    layer, x = frozen(beta), torch.randn(3, 100, 6)
    solver = kind(rtol=2e-12)  # near machine precision rounding adds an iteration or two
    predicted = predict_iterations(layer, x, solver)
    measured = layer.solve(x, solver=solver).iterations
    assert (predicted - measured).abs().max() <= 1
    assert measured.min() >= 4


def test_a_gru_is_predicted_too_and_a_linear_cell_takes_one():
    cell, x = nn.GRUCell(3, 5).requires_grad_(False), torch.randn(2, 60, 3)
    report = parallelizability(cell, x)
    quasi = {each.name: each for each in report.solvers}["QuasiDEER"]
    assert (quasi.predicted - quasi.iterations).abs().max() <= 1
    assert predict_iterations(frozen(0.0), torch.randn(30, 6), solvers.ConvDEER()).tolist() == [
        0
    ]  # the initial guess is exact
    with pytest.raises(IncompatibleError, match="undamped"):
        predict_iterations(cell, x, solvers.Sequential())


# The report


def test_a_contracting_layer_is_recommended_to_run_in_parallel():
    layer = frozen(0.02, projection=projections.Orthogonal(), spectrum=spectra.Linspace(dt_min=0.5, dt_max=2.0))
    report = parallelizability(layer, torch.randn(2, 128, 6))
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
    assert "sequentially" in parallelizability(layer, torch.randn(64, 6), processors=1.0).recommendation
    assert "ConvDEER" in str(report)
    jacobi = {each.name: each for each in report.solvers}["Jacobi"]
    assert jacobi.depth == float(jacobi.iterations.double().mean())  # no scan
    assert {each.name for each in report.solvers if each.predicted is None} == {"DEER"}  # its convergence is quadratic
    with pytest.raises(InputError, match="processors=0"):
        parallelizability(layer, torch.randn(64, 6), processors=0)
    assert "about 1 iteration instead" in parallelizability(frozen(0.0), torch.randn(64, 6)).recommendation


def test_a_chaotic_layer_is_recommended_to_run_sequentially():
    layer = frozen(4.0, spectrum=spectra.Negative(WIDE, 0.5))
    report = parallelizability(layer, torch.randn(2, 128, 6), solvers={"quasi": solvers.QuasiDEER(max_iterations=100)})
    assert float(report.spectrum.largest.max()) > 0.1
    assert report.recommendation.startswith("Run it sequentially")
    assert "chaotic" in str(report)


def test_solvers_that_do_not_apply_are_listed_with_their_reason():
    report = parallelizability(nn.LSTMCell(3, 4), torch.randn(40, 3))
    assert "has no M" in report.rejected["ForwardDEER"]
    assert not report.certified.holds
    assert "no bound known" in str(report)
    doubled = parallelizability(lambda x: 0.5 * x.sin(), state=torch.randn(2, 3), steps=50)
    assert doubled.certified is None
    assert doubled.best.converged
    assert "with no bound" in str(doubled)
    one = parallelizability(frozen(), torch.randn(40, 6), solvers={"loop": solvers.Sequential()})
    assert "not parallel in time" in one.rejected["loop"]
    assert one.best is None
    with pytest.raises(InputError, match="at least 4"):
        parallelizability(frozen(), torch.randn(2, 6))


# Figures


def is_written(paths):
    vector, pixels = paths
    assert pixels.read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in vector.read_text()[:1000]


def test_every_figure_draws_edge_cases(tmp_path):
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
    matrices = {name: materialize_conjugate(layer, x)[0] for name, layer in layers.items()}
    is_written(draw.save(draw.matrices(matrices), tmp_path / "m"))
    is_written(draw.save(draw.iterations({"a": torch.tensor([3, 4]), "b": torch.tensor([900])}), tmp_path / "i"))
    with pytest.raises(InputError, match="no spectrum"):
        draw.spectra({})


def inside(figure):
    """Return whether the legend of a figure lies within the figure."""
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


def test_matplotlib_is_imported_only_when_a_figure_is_drawn():
    code = "import sys, adptnet.analysis.plot; print('matplotlib' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_the_inputs_of_each_layer_are_recorded_as_the_model_runs():
    both = Bidirectional(frozen(0.1, 4).spec)
    x = torch.randn(2, 10, 4)
    met = record_layer_inputs(both, x)
    assert len(met) == 2
    assert sorted(torch.equal(seen, x) for _, seen in met.values()) in ([False, True], [True, True])
    assert both.training
