"""The step at many known states: Jacobians and Newton passes against their PyTorch implementations."""

import pytest
import torch
from torch.testing import assert_close

from adptnet import ADPTNet, analysis, directions, errors, projections, retractions, solvers, spectra
from adptnet.ops import adpt_step
from adptnet.ops.adpt_scan.form import is_basic_form
from adptnet.ops.adpt_scan.packing import pack
from adptnet.ops.adpt_step import reference
from adptnet.ops.tolerance import Tolerance
from adptnet.recurrence.step import jacobian
from support.kernels import use_threads

pytestmark = pytest.mark.skipif(
    not adpt_step.has_kernel(torch.float64), reason="no compiler, or ADPTNET_BACKEND=reference"
)

LIMITS = Tolerance(0.0, 1e-6)

both_retractions = pytest.mark.parametrize("retraction", [retractions.Exponential(), retractions.Cayley()], ids=repr)


def make_layer(size, **axes):
    return ADPTNet.paper(size, beta=axes.pop("beta", 1.3), **axes)


@torch.no_grad()
def kernel_arguments(layer):
    form = layer.cell.recurrence.form
    constants = pack(layer.cell.evaluate(stacked=True), form)
    assert is_basic_form(form, paired=constants.imag is not None, slow=False)
    return constants, form


@both_retractions
@pytest.mark.parametrize("size", [1, 2, 3, 13, 50])
@torch.no_grad()
def test_jacobians_equal_the_closed_form(size, retraction):
    layer = make_layer(size, retraction=retraction, projection=projections.Dense(bias=True))
    states = torch.randn(3, 21, size)
    states[0, 3] = 0
    found = adpt_step.Jacobians(states, *kernel_arguments(layer))
    expected = jacobian(layer.cell.evaluate(), states, states).dense()
    assert_close(found(0, 21), expected, atol=1e-12, rtol=0)
    assert_close(found(4, 9), expected[:, 4:9], atol=1e-12, rtol=0)
    assert found(5, 5).shape == (3, 0, size, size)


@pytest.mark.parametrize("distance", [0.0, 1e-9, 1e-3])
@torch.no_grad()
def test_jacobians_where_key_and_value_are_parallel(distance):
    layer = make_layer(9)
    key, value = layer.cell.directions[0].key_projection, layer.cell.directions[0].value_projection
    value.weight.copy_(key.weight + distance * torch.randn(9, 9))
    states = torch.randn(1, 5, 9)
    found = adpt_step.Jacobians(states, *kernel_arguments(layer))(0, 5)
    assert_close(found, jacobian(layer.cell.evaluate(), states, states).dense(), atol=1e-9, rtol=0)


@torch.no_grad()
def test_in_single_precision_jacobians_are_as_accurate_as_the_closed_form():
    layer = ADPTNet.paper(33, beta=0.5, dtype=torch.float32)
    states = torch.randn(2, 40, 33, dtype=torch.float32)
    found = adpt_step.Jacobians(states, *kernel_arguments(layer))(0, 40)
    exact = jacobian(layer.double().cell.evaluate(), states.double(), states.double()).dense()
    assert (found.double() - exact).abs().max() <= 64 * torch.finfo(torch.float32).eps


def test_a_cell_runs_the_kernel_where_no_gradient_is_recorded():
    layer, states = make_layer(6), torch.randn(2, 7, 6)
    with torch.no_grad():
        found = layer.cell.jacobian(states, states)
    recorded = layer.cell.jacobian(states, states)
    assert recorded.requires_grad
    assert_close(found, recorded.detach(), atol=1e-12, rtol=0)
    brute = torch.func.jacrev(layer.cell.step)(states[1, 3], states[1, 3])
    assert_close(found[1, 3], brute.detach(), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "axes",
    [
        {"spectrum": spectra.S4DInv()},
        {"direction": directions.FromState(relu=True)},
        {"direction": directions.FromState(heads=2)},
        {"direction": directions.FromInput()},
    ],
    ids=repr,
)
@torch.no_grad()
def test_unsupported_forms_run_the_torch_implementation(axes):
    layer = make_layer(6, **axes)
    form = layer.cell.recurrence.form
    constants = pack(layer.cell.evaluate(stacked=True), form)
    assert not is_basic_form(form, paired=constants.imag is not None, slow=False)
    drive = layer.cell.prepare(torch.randn(1, 8, 6), torch.arange(8)[None])
    assert layer.cell.jacobian(torch.randn(1, 8, layer.state_size), drive).isfinite().all()


@torch.no_grad()
def test_exponents_equal_those_of_the_torch_implementation(monkeypatch):
    layer, x = make_layer(7, beta=0.4), torch.randn(2, 300, 7)
    found = analysis.lyapunov_exponents(layer, x)
    monkeypatch.setenv("ADPTNET_BACKEND", "reference")
    expected = analysis.lyapunov_exponents(layer, x)
    assert_close(found.exponents, expected.exponents, atol=1e-10, rtol=0)
    assert_close(found.blocks, expected.blocks, atol=1e-10, rtol=0)


def run_passes(layer, batch, steps, *, diagonal, tiles, resets):
    """Return the results of one pass of the kernel and of the specification, from the same iterate."""
    size = layer.state_size
    states, drive = (
        torch.randn(batch, steps + 5, size)[:, 5:],
        torch.randn(batch, 3 * steps, size)[:, steps : 2 * steps],
    )
    initial, reset_state = torch.randn(batch, size), torch.randn(batch, size)
    limits = {"tolerance": Tolerance(1e-2, 1.0), "recent": 3 * torch.rand(batch, size), "tiles": tiles}
    limits["complete"] = True
    reset = torch.rand(batch, steps) < 0.15 if resets else None
    real = layer.cell.eigenvalues().real
    states_copy = states.clone()
    found = adpt_step.newton_pass(
        states, drive, initial, reset_state, reset, *kernel_arguments(layer), diagonal=diagonal, **limits
    )
    expected = reference.newton_pass(
        states_copy,
        drive,
        initial,
        reset_state,
        reset,
        layer.cell.step,
        lambda x, u: layer.cell.conjugate(x, u).diagonal() if diagonal else real,
        real,
        **limits,
    )
    return (states, *found), (states_copy, *expected)


@both_retractions
@pytest.mark.parametrize("diagonal", [False, True], ids=["conv", "forward"])
@pytest.mark.parametrize("tiles", [None, 1, 8])
@pytest.mark.parametrize("resets", [False, True], ids=["", "resets"])
@torch.no_grad()
def test_a_pass_equals_its_reference(retraction, diagonal, tiles, resets):
    for size, batch, steps in ((1, 1, 1), (5, 3, 37), (16, 2, 16), (33, 1, 50)):
        layer = make_layer(size, retraction=retraction)
        found, expected = run_passes(layer, batch, steps, diagonal=diagonal, tiles=tiles, resets=resets)
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b, atol=1e-11, rtol=1e-11)


@torch.no_grad()
def test_nan_spreads_within_its_sequence_only():
    layer = make_layer(5)
    states, drive, start = torch.randn(2, 30, 5), torch.randn(2, 30, 5), torch.zeros(2, 5)
    drive[0, 11, 4] = torch.nan
    arguments = (*kernel_arguments(layer),)
    found = adpt_step.newton_pass(states, drive, start, start, None, *arguments, diagonal=True, tolerance=LIMITS)
    for each in (found.residual, found.excess, found.move):
        assert each[0, :11].isfinite().all()
        assert each[0, 11].isnan()
        assert each[1].isfinite().all()


@pytest.mark.parametrize("threads", [1, 2, 3])
@torch.no_grad()
def test_results_do_not_depend_on_the_number_of_threads(threads):
    layer = make_layer(20)
    torch.manual_seed(2)
    states, drive, start = torch.randn(5, 700, 20), torch.randn(5, 700, 20), torch.zeros(5, 20)
    runs = []
    for count in (1, threads):
        with use_threads(count):
            arguments = kernel_arguments(layer)
            found = adpt_step.newton_pass(
                states, drive, start, start, None, *arguments, diagonal=True, tolerance=LIMITS, complete=True
            )
            runs.append((*found, adpt_step.Jacobians(states, *arguments)(0, 300)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("solver", [solvers.ConvDEER, solvers.ForwardDEER])
@pytest.mark.parametrize("tiles", [None, 8])
@pytest.mark.parametrize("resets", [False, True], ids=["", "resets"])
@torch.no_grad()
def test_a_solve_by_fused_passes_equals_the_one_in_torch(solver, tiles, resets, monkeypatch):
    layer, x = make_layer(9, beta=0.8), torch.randn(5, 120, 9)
    x[3] *= 1e-6  # a sequence that converges at another rate
    reset = torch.rand(5, 120) < 0.03 if resets else None
    runs = []
    calls = []
    fused_pass = adpt_step.newton_pass
    monkeypatch.setattr(adpt_step, "newton_pass", lambda *a, **o: calls.append(1) or fused_pass(*a, **o))
    for backend in ("auto", "reference"):
        monkeypatch.setenv("ADPTNET_BACKEND", backend)
        runs.append(layer.solve(x, solver=solver(atol=1e-9, rtol=1e-9, tiles=tiles), reset=reset))
        assert len(calls) == int(runs[0].iterations.max()) + 1  # the initial guess is evaluated too
    fused, plain = runs
    exact = layer.solve(x, solver=solvers.Sequential(), reset=reset).states
    assert fused.result == plain.result == solvers.Result.CONVERGED
    assert (fused.iterations - plain.iterations).abs().max() <= 1
    assert_close(fused.states, exact, atol=1e-7, rtol=0)
    assert (fused.residual <= 1e-9 * (1 + exact.abs().amax())).all()
    assert_close(fused.history.residual[0], plain.history.residual[0], atol=1e-11, rtol=0)


@torch.no_grad()
def test_a_sweep_over_tiles_takes_fewer_iterations():
    layer, x = make_layer(16, beta=1.0), torch.randn(2, 600, 16)
    plain, swept, alone = (layer.solve(x, solver=solvers.ConvDEER(tiles=tiles)) for tiles in (None, 8, 1))
    assert (2 * swept.iterations <= plain.iterations).all()
    assert (alone.iterations == 1).all()  # a tile of one step is the recurrence itself
    assert repr(solvers.ConvDEER(tiles=8)) == "ConvDEER(tiles=8)"


@pytest.mark.parametrize(
    ("solver", "axes"),
    [
        (solvers.QuasiDEER(tiles=8), {}),
        (solvers.ConvDEER(solvers.Scale(0.9), tiles=8), {}),
        (solvers.ConvDEER(tiles=8), {"spectrum": spectra.S4DInv()}),
    ],
    ids=repr,
)
def test_a_sweep_that_is_not_supported_raises(solver, axes):
    with pytest.raises(errors.IncompatibleError, match=r"tiles=8.*Drop tiles="):
        make_layer(6, **axes).solve(torch.randn(1, 20, 6), solver=solver)


def test_gradients_do_not_depend_on_the_pass():
    layer, x = make_layer(5), torch.randn(2, 30, 5)
    found = []
    for solver in (solvers.ConvDEER(), solvers.ForwardDEER(tiles=4), solvers.Sequential()):
        y, _ = layer(x, solver=solver)
        found.append(torch.autograd.grad(y.square().sum(), list(layer.parameters())))
    for gradients in found[:2]:
        for a, b in zip(gradients, found[2], strict=True):
            assert_close(a, b, atol=1e-9, rtol=1e-9)
