"""The examples, at a size of seconds: they run, write what they say, and what they say holds."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from adptnet.projections import LowParam
from adptnet.solvers import Result

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name):
    description = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(description)
    description.loader.exec_module(module)
    return module


def is_png(path):
    return path.read_bytes()[:4] == b"\x89PNG"


def test_every_example_says_first_what_it_shows_and_how_to_run_it():
    paths = sorted(EXAMPLES.glob("*.py"))
    assert [path.stem for path in paths] == [
        *("beta_effect", "gradient_flossing", "layer", "low_param_images", "own_cell", "parallel", "state_tracking"),
        "timescales",
    ]
    for path in paths:
        assert f"\n    python examples/{path.name}" in example(path.stem).__doc__


def test_every_change_of_the_state_tracking_table_trains(capsys):
    tracking = example("state_tracking")
    found = tracking.main(list(tracking.CHANGES), steps=1, size=16)
    assert list(found) == list(tracking.CHANGES)
    page = (EXAMPLES.parent / "docs" / "choosing.md").read_text()
    assert all(f"| {name} | " in page for name in found)
    assert len(capsys.readouterr().out.splitlines()) == len(found)


def test_the_layer_gives_the_same_numbers_every_way_and_its_loss_falls(tmp_path, capsys):
    losses = example("layer").main(tmp_path / "new", width=16, steps=30)
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert (tmp_path / "new" / "layer.safetensors").is_file()
    printed = capsys.readouterr().out
    differences = [float(line.split(", to ")[1][:5]) for line in printed.splitlines() if ", to " in line]
    assert len(differences) == 2
    assert max(differences) < 1e-14
    assert "outputs are identical" in printed


def test_flossing_brings_an_rnn_near_the_targets_that_the_layer_is_given(tmp_path, capsys):
    flossing = example("gradient_flossing")
    flossed, given = flossing.main(tmp_path / "new", size=6, updates=20)
    targets = torch.tensor(flossing.TARGETS)
    assert is_png(tmp_path / "new" / "gradient_flossing.png")
    assert (given - targets).abs().max() < 0.01
    assert flossed[0] > -0.6  # it starts at -0.92
    assert "certified" in capsys.readouterr().out


def test_the_statements_on_untrained_timescales_are_checked(tmp_path, capsys):
    checked = example("timescales").main(tmp_path / "new", longest=80, large=20, drawn=["retraction"])
    assert len(checked) == 14
    verdicts = {statement: holds for statement, holds, _ in checked}
    assert verdicts["β = 0.125: every exponent lies within [ln λ̄_min, ln λ̄_max]"]
    assert verdicts["the bounds hold wherever there is one"]
    assert not verdicts["an orthogonal RNN has a largest exponent of at least 0"]
    assert is_png(tmp_path / "new" / "timescales_retraction.png")
    assert "DOES NOT" in capsys.readouterr().out


def test_the_effect_of_beta_grows_up_to_a_half_turn(tmp_path):
    curves = example("beta_effect").main(tmp_path / "new", size=24, points=201)
    assert is_png(tmp_path / "new" / "beta_effect.png")
    angle, exponential, cayley = curves["angle"], curves["Exponential"], curves["Cayley"]
    turning = angle[1:] <= math.pi
    returning = (angle[:-1] >= math.pi) & (angle[1:] <= 2 * math.pi)
    assert (exponential.diff()[turning] > 0).all()
    assert (exponential.diff()[returning] < 0).all()
    assert (cayley.diff() > 0).all()
    assert exponential[0].abs() < 1e-15
    assert cayley[-1] < exponential.max() <= 8 / 24


def test_every_solver_agrees_with_sequential_or_says_that_it_does_not(capsys):
    parallel = example("parallel")
    tables = parallel.main(length=24, hard_length=300, rounds=1)
    assert list(tables["ADPTNet"]) == list(parallel.SOLVERS)
    assert set(parallel.SOLVERS) - set(tables["GRU"]) == {"ForwardDEER", "ConvDEER", "ConvDEER by FFT"}
    for row in (*tables["ADPTNet"].values(), *tables["GRU"].values()):
        assert row.result in (Result.CONVERGED, Result.FINISHED)
        assert row.error < 1e-9
        assert row.gradient_error < 1e-8
    for row in tables["hard"].values():
        assert row.error < 1e-8 or row.result > Result.FINISHED
    assert tables["hard"]["  Finish(), the default"].error < 1e-9
    assert tables["hard"]["  blocks of 256 steps"].result == Result.CONVERGED
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in (*parallel.SOLVERS, *parallel.HARD))
    assert "refused: ConvDEER needs a cell with constant eigenvalues" in printed


def test_a_network_of_ones_own_has_the_gradients_of_back_propagation_and_learns(capsys):
    worst, losses = example("own_cell").main(length=60, steps=25)
    assert worst < 1e-8
    assert len(losses) == 25
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    printed = capsys.readouterr().out
    assert all(f"  {name}(): CONVERGED after" in printed for name in ("QuasiDEER", "KoopmanDEER", "ConvDEER"))


@pytest.fixture(scope="module")
def low_param():
    return example("low_param_images")


@pytest.fixture(scope="module")
def low_param_run(low_param, tmp_path_factory):
    folder = tmp_path_factory.mktemp("low_param") / "new"
    return folder, *low_param.main(folder, steps=500, seeds=2)


def test_low_param_writes_two_figures_and_narrows_the_spread(low_param_run):
    folder, fits, _ = low_param_run
    assert is_png(folder / "low_param_images.png")
    assert is_png(folder / "low_param_preactivations.png")
    error = {fit.name: fit.error for fit in fits}
    parameters = {fit.name: fit.parameters for fit in fits}
    kronecker = [error[name] for name in error if name.startswith("Kronecker")]
    both = [error[name] for name in error if name.startswith("LowParam")]
    assert len(kronecker) == len(both) == 4
    assert max(both) - min(both) < 0.75 * (max(kronecker) - min(kronecker))
    assert all(with_rank < without for with_rank, without in zip(both, kronecker, strict=True))
    assert parameters["LowRank 4"] == 2 * 128 * 4
    assert parameters["LowParam 16×8 + 2"] == 16**2 + 8**2 + 2 * 128 * 2
    assert error["LowRank 16"] < error["Kronecker 64×2"] < error["Kronecker 2×64"]


def test_the_fits_are_as_good_as_such_matrices_can_be(low_param, low_param_run):
    _, fits, _ = low_param_run
    picture = low_param.picture()
    assert picture.min() >= 0
    assert picture.max() <= 1
    error = {fit.name: fit.error for fit in fits}

    def least(matrix, rank):  # Eckart and Young
        return torch.linalg.svdvals(matrix)[rank:].square().sum().item() / picture.numel()

    for rank in (2, 4, 16):
        assert 0.999 < error[f"LowRank {rank}"] / least(picture, rank) < 1.05
    for a, b in low_param.RATIOS:  # the same, of the blocks laid out as rows (Van Loan and Pitsianis)
        blocks = picture.reshape(a, b, a, b).transpose(1, 2).reshape(a * a, b * b)
        assert 0.999 < error[f"Kronecker {a}×{b}"] / least(blocks, 1) < 1.05


def test_low_param_starts_like_the_default_linear_layer_with_eight_outputs_that_differ(low_param, low_param_run):
    _, _, divergences = low_param_run
    default, printed = divergences.values()
    assert 0 < default < 0.03
    assert printed > 0.1
    outputs = LowParam(factors=(128, 8), rank=16).build(1024, 1024)(torch.randn(2, 1024)).detach()
    torch.testing.assert_close(outputs, outputs[:, :8].repeat(1, 128))


def test_the_divergence_is_that_of_its_definition(low_param):
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.5, 0.25]])
    assert low_param.divergence(p, q) == pytest.approx(0.5 * math.log(2))
    assert low_param.divergence(q, q) == 0
