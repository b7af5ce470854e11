"""Guarantees of CONVERGED: large steps, small channels, resets, long memories; and steps that cannot be solved."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from adptnet import ADPTNet, cells, solvers, spectra
from adptnet.errors import InputError, NotConverged
from adptnet.ops._linalg import solve_linear
from adptnet.ops.tolerance import Tolerance, recent_scale, remembered_scale
from adptnet.solvers.adjoints import Implicit
from adptnet.solvers.convergence_test import default_rtol
from adptnet.solvers.gradient_solve import Backward
from adptnet.solvers.iterates import EvaluatedIterate
from adptnet.solvers.problem import make_problem
from adptnet.solvers.rounding import find_cancelling_steps, random_signs

every_solver = pytest.mark.parametrize(
    "solver",
    [
        solvers.DEER,
        solvers.QuasiDEER,
        solvers.ConvDEER,
        solvers.ForwardDEER,
        solvers.KoopmanDEER,
        solvers.Jacobi,
        lambda **options: solvers.BlockWise(solvers.ConvDEER(**options), num_blocks=3),
    ],
    ids=["deer", "quasi", "conv", "forward", "koopman", "jacobi", "blocks"],
)
any_cell = pytest.mark.parametrize(
    "solver", [solvers.DEER, solvers.QuasiDEER, solvers.Jacobi], ids=lambda s: s.__name__
)


@every_solver
def test_a_loud_step_before_a_reset_does_not_loosen_the_steps_after_it(solver):
    torch.manual_seed(1)
    layer = ADPTNet.paper(16, beta=4.0).float()
    x = torch.randn(1, 60, 16, dtype=torch.float32)
    x[:, 0] *= 1e6
    reset = torch.zeros(1, 60, dtype=torch.bool)
    reset[:, 1] = True
    exact = layer.double().solve(x.double(), reset=reset, solver=solvers.Sequential()).states[:, 1:]
    expected = torch.autograd.grad(exact.square().sum(), list(layer.parameters()), allow_unused=True)
    exact, layer = exact.detach(), layer.float()
    found = layer.solve(x, reset=reset, solver=solver(on_failure=solvers.Finish())).states[:, 1:]
    assert_close(found.detach().double(), exact, atol=2e-5 * float(exact.abs().max()), rtol=0)
    gradients = torch.autograd.grad(found.square().sum(), list(layer.parameters()), allow_unused=True)
    for gradient, truth in zip(gradients, expected, strict=True):
        if truth is not None:
            assert_close(gradient.double(), truth, atol=2e-4 * float(truth.abs().max()), rtol=0)


@any_cell
def test_a_large_state_at_entry_does_not_loosen_small_ones_after_it(solver):
    weight = torch.randn(6, 6) / 6**0.5
    cell = cells.from_function(lambda s, u: 1e-8 * torch.tanh(1e8 * s.clamp(-1e-8, 1e-8) @ weight.to(s) + u), 6, 6)
    x, state = torch.randn(1, 40, 6, dtype=torch.float32), torch.ones(1, 6, dtype=torch.float32)
    found, exact = solver()(cell, x, state).states, solvers.Sequential()(cell, x, state).states
    assert_close(found, exact, atol=1e-12, rtol=0)


@any_cell
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_small_channel_beside_a_large_one_is_right(solver, dtype):
    def step(s, u):
        return torch.cat((0.5 * s[:, :1] + 1e8 * u[:, :1], torch.tanh(2 * s[:, 1:] + u[:, 1:])), -1)

    cell, x = cells.from_function(step, 3, 3), torch.randn(2, 60, 3, dtype=dtype)
    found, exact = solver()(cell, x).states, solvers.Sequential()(cell, x).states
    tolerance = 100 * torch.finfo(dtype).eps ** (5 / 6)
    assert_close(found[..., 1:], exact[..., 1:], atol=tolerance, rtol=0)


@pytest.mark.parametrize("solver", [solvers.Jacobi(), solvers.QuasiDEER(solvers.Adaptive())])
def test_residuals_that_add_up_along_a_long_memory_are_not_convergence(solver):
    """The diagonal of a rotation by 90° is zero, so Quasi-DEER's transition is zero although the memory is long."""
    keep, quarter = 0.96, torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    cell = cells.from_function(lambda s, u: keep * s @ quarter.to(s) + (1 - keep) * u, 2, 2)
    rotating = torch.stack([torch.linalg.matrix_power(quarter, t % 4)[0] for t in range(600)]).float()
    x = rotating + 0.1 * torch.randn(1, 600, 2, dtype=torch.float32)
    exact = solvers.Sequential()(cell, x.double()).states
    found = solver(cell, x).states
    assert_close(found.double(), exact, atol=2e-5 * float(exact.abs().max()), rtol=0)


def test_a_sequence_that_cannot_be_right_in_every_channel_is_not_called_converged():
    """In float32, with channels of scale 1e8 and 1, the mean of M cannot resolve the small channel."""
    cell = ADPTNet.paper(4, beta=2.0).float().cell
    x = torch.randn(1, 60, 4, dtype=torch.float32) * torch.tensor([1e8, 1.0, 1.0, 1.0], dtype=torch.float32)
    try:
        solution = solvers.KoopmanDEER(on_failure=solvers.Raise())(cell, x)
    except NotConverged:
        return
    exact = solvers.Sequential()(cell.double(), x.double()).states
    assert ((solution.states.double() - exact).abs() <= 2e-4 * exact.abs().amax(1, keepdim=True)).all()


def test_gradients_of_blocks_of_one_sequence_with_complex_eigenvalues():
    layer, x = ADPTNet.paper(8, beta=1.0, spectrum=spectra.S4DInv()), torch.randn(1, 50, 8, requires_grad=True)
    reset = torch.rand(1, 50) < 0.1
    solver = solvers.BlockWise(solvers.ConvDEER(), num_blocks=2)
    found, expected = (
        torch.autograd.grad(layer.solve(x, reset=reset, solver=each).states.square().sum(), x)[0]
        for each in (solver, solvers.Sequential())
    )
    assert_close(found, expected, atol=1e-9, rtol=0)


def test_singular_equations_of_a_trust_region_fail_without_a_crash():
    matrices = torch.eye(3).repeat(2, 1, 1)
    matrices[1] = 0
    solved = solve_linear(matrices, torch.ones(2, 3, 1))
    assert torch.equal(solved[0], torch.ones(3, 1))
    assert solved[1].isnan().all()


def loop_recent_scale(values, reset, half_life, recent):
    scale, found = recent.clone(), []
    for t in range(values.shape[1]):
        scale = torch.where(reset[:, t, None], 0.0, scale * 0.5 ** (1 / half_life))
        scale = torch.maximum(scale, values[:, t].abs())
        found.append(scale)
    return torch.stack(found, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("steps", [1, 2, 300, 3000])
def test_the_recent_scale_is_that_of_a_loop(dtype, steps):
    values = torch.randn(2, steps, 3, dtype=dtype) * 10.0 ** torch.randint(-30, 30, (2, steps, 3))
    values[:, ::7] = 0
    reset, recent = torch.rand(2, steps) < 0.2, torch.rand(2, 3, dtype=dtype) * 1e20
    expected = loop_recent_scale(values.double(), reset, 8, recent.double())
    for resets in (reset, torch.zeros_like(reset)):
        expected = loop_recent_scale(values.double(), resets, 8, recent.double())
        assert_close(recent_scale(values, resets, recent).double(), expected, atol=0, rtol=1e-2)
        assert_close(remembered_scale(values, resets, recent).double(), expected[:, -1], atol=0, rtol=1e-2)
    assert_close(recent_scale(values, None, recent).double(), expected, atol=0, rtol=1e-2)


def test_a_tolerance_never_measures_a_step_by_another_channel_or_a_later_step():
    values = torch.tensor([[[1e6, 1.0], [1.0, 1.0], [1.0, 1e-3], [1e9, 1.0]]])
    allowed = Tolerance(0.0, 1e-6).allowed(values)
    assert allowed[0, 0, 1] < 1.1e-6  # not relative to the channel beside it
    assert allowed[0, 1, 0] < 1.1e-6  # not relative to the step before it, larger than all of this one
    assert allowed[0, 2, 1] > 0.8e-6  # a channel that crosses zero keeps its scale
    assert allowed[0, 2, 0] < 1.1e-6  # not relative to the step after it


def center_over_batch(s, u):
    return torch.tanh(s - s.mean(0, keepdim=True) + u)


def shift_rows(s, u):
    return torch.tanh(torch.cat((torch.zeros_like(s[:1]), s[:-1])) + u)


class CountingStep:
    """A step whose result depends on how often it was called."""

    calls = 0

    def __call__(self, s, u):
        self.calls += 1
        return torch.tanh(0.5 * s + u + self.calls)


@any_cell
@pytest.mark.parametrize("step", [center_over_batch, shift_rows], ids=lambda step: step.__name__)
def test_a_step_that_couples_rows_is_rejected(solver, step):
    cell, x = cells.from_function(step, 6, 6), torch.randn(3, 20, 6)
    with pytest.raises(InputError, match="treats rows independently"):
        solver()(cell, x)
    assert solvers.Sequential()(cell, x).states.isfinite().all()


@any_cell
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_that_is_random_or_counts_is_rejected(solver, batch):
    dropout = nn.Dropout()
    for step in (lambda s, u: torch.tanh(dropout(s) + u), CountingStep()):
        with pytest.raises(InputError, match="two results for the same state and input"):
            solver()(cells.from_function(step, 6, 6), torch.randn(batch, 20, 6))
    dropout.eval()
    assert solver()(cells.from_function(lambda s, u: torch.tanh(dropout(s) / 2 + u), 6, 6), torch.randn(batch, 20, 6))


def test_the_check_can_be_skipped_and_is_not_run_on_our_own_cells(monkeypatch):
    cell = cells.from_function(center_over_batch, 6, 6)
    assert solvers.Jacobi(check=False)(cell, torch.randn(3, 20, 6)).states.isfinite().all()
    assert "check=False" in repr(solvers.Jacobi(check=False))
    monkeypatch.setattr("adptnet.solvers.step_check._call_step", None)
    layer = ADPTNet.paper(4)
    assert layer.solve(torch.randn(2, 9, 4), solver=solvers.ConvDEER()).result == solvers.Result.CONVERGED


@pytest.mark.parametrize("solver", [solvers.DEER, solvers.QuasiDEER], ids=lambda s: s.__name__)
def test_a_step_that_branches_on_its_values_is_explained(solver):
    def step(s, u):
        return torch.tanh(0.5 * s + u) if bool((s > -100).all()) else s

    with pytest.raises(InputError, match=r"torch\.where"):
        solver()(cells.from_function(step, 4, 4), torch.randn(2, 9, 4))


def test_a_dead_channel_does_not_hide_a_slow_one():
    """One channel of the solution is exactly zero, so that the relative error of any iterate is infinite there."""
    keep = 0.98
    cell = cells.from_function(lambda s, u: torch.cat((0 * s[:, :1], keep * s[:, 1:] + (1 - keep) * u), -1), 2, 1)
    x = 1 + 0.1 * torch.randn(1, 750, 1, dtype=torch.float32)
    exact = solvers.Sequential()(cell, x.double()).states
    for guess in (None, torch.full((1, 750, 2), 10.0, dtype=torch.float32)):
        found = solvers.Jacobi()(cell, x, guess=guess).states
        assert_close(found.double(), exact, atol=3e-5, rtol=0)


def test_the_check_leaves_running_statistics_as_they_were():
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, state, inputs):
            return torch.tanh(self.norm(state) + inputs)

    step = Step().double()
    step.norm.running_mean.fill_(0.5)
    before = copy.deepcopy(step.state_dict())
    with pytest.raises(InputError, match="BatchNorm"):
        solvers.QuasiDEER()(cells.from_function(step, 4, 4), torch.randn(2, 9, 4))
    assert_close(step.state_dict(), before, atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["mean", "dropout", "hook"])
def test_user_code_inside_our_own_cells_is_checked_too(kind):
    class Centred(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0, keepdim=True))

    cell = ADPTNet.paper(6, beta=1.0).cell
    if kind == "mean":
        cell.directions[0].key_projection = Centred(6, 6, bias=False)
    elif kind == "dropout":
        cell.directions[0].key_projection = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Dropout())
    else:
        cell.directions[0].key_projection.register_forward_hook(lambda module, given, found: found - found.mean(0))
    with pytest.raises(InputError, match=r"depends on the other rows|two results"):
        solvers.DEER()(cell, torch.randn(3, 20, 6))


def test_tolerances_that_are_not_numbers_are_rejected_and_zero_is_shown():
    with pytest.raises(InputError, match="atol=None"):
        solvers.DEER(atol=None)
    assert repr(solvers.DEER(rtol=0.0)) == "DEER(rtol=0.0)"
    assert repr(solvers.DEER()) == "DEER()"


def test_an_ill_conditioned_step_is_not_mistaken_for_one_that_couples_rows():
    weight = torch.randn(6, 6, dtype=torch.float32)
    cell = cells.from_function(lambda s, u: torch.tanh(30 * s @ weight + u), 6, 6)
    x = torch.randn(2, 12, 6, dtype=torch.float32)
    assert_close(solvers.DEER()(cell, x).states, solvers.Sequential()(cell, x).states, atol=1e-2, rtol=0)


@pytest.mark.parametrize("solver", [solvers.Jacobi, solvers.QuasiDEER])
def test_a_small_adjoint_at_a_large_state_is_right(solver):
    """The initial state saturates the tanh for many steps, and the adjoint is halved in each of them."""
    memory = torch.full((1,), 0.5, requires_grad=True)
    x, state = torch.randn(2, 60, 2), torch.full((2, 2), 1e6, requires_grad=True)

    def step(s, u):
        kept = memory.to(s) * s[:, :1] + 0.5 * u[:, :1]
        return torch.cat((kept, torch.tanh(3 * s[:, :1] + 0.3 * s[:, 1:] + u[:, 1:])), -1)

    def gradients(solver):
        states = solver(cells.from_function(step, 2, 2), x, state).states
        return torch.autograd.grad(states[..., 1].sum() + 1e-6 * states[..., 0].sum(), (memory, state))

    for found, exact in zip(gradients(solver()), gradients(solvers.Sequential()), strict=True):
        assert_close(found, exact, atol=1e-11 * float(exact.abs().max()), rtol=0)


def test_rounding_errors_do_not_prevent_convergence_of_deer_in_float32():
    """The error of float32 is above the tolerance in some channels; the loop has the same error."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    layer, x = ADPTNet.paper(16, beta=1.0), torch.randn(2, 1024, 16)
    torch.set_default_dtype(before)
    with torch.no_grad():
        solution = solvers.DEER(on_failure=solvers.Raise(), max_iterations=60)(layer.cell, x)
        loop = solvers.Sequential()(layer.cell, x).states
        exact = solvers.Sequential()(copy.deepcopy(layer.cell).double(), x.double()).states
    scale = exact.abs().cummax(1).values
    found, expected = (float(((states - exact).abs() / scale).max()) for states in (solution.states, loop))
    assert found <= 5 * expected


def single_precision_problem(beta):
    """Return a layer in float32, inputs of 1000 steps, and the states in float64."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    layer, x = ADPTNet.paper(16, beta=beta), torch.randn(2, 1000, 16)
    torch.set_default_dtype(before)
    with torch.no_grad():
        exact = solvers.Sequential()(copy.deepcopy(layer.cell).double(), x.double()).states
    return layer, x, exact


@pytest.mark.parametrize("solver", [solvers.ConvDEER, solvers.ForwardDEER, solvers.QuasiDEER])
@pytest.mark.parametrize("beta", [0.125, 1.0])
def test_rounding_errors_of_long_sequences_do_not_prevent_convergence(solver, beta):
    layer, x, exact = single_precision_problem(beta)
    with torch.no_grad():
        found = solver(on_failure=solvers.Raise(), max_iterations=50)(layer.cell, x).states
        loop = solvers.Sequential()(layer.cell, x).states
    scale = exact.abs().cummax(1).values
    error, expected = (float(((states - exact).abs() / scale).max()) for states in (found, loop))
    assert error <= 5 * expected


@pytest.mark.parametrize("solver", [solvers.ConvDEER, solvers.DEER])
def test_rounding_errors_of_long_sequences_do_not_prevent_convergence_of_gradients(solver, monkeypatch):
    layer, x, _ = single_precision_problem(1.0)
    left, iterate = [], Backward._iterate

    def record(self, *arguments):
        left.append(iterate(self, *arguments))
        return left[-1]

    monkeypatch.setattr(Backward, "_iterate", record)
    states = solver(max_iterations=50)(layer.cell, x, adjoint=Implicit(max_iterations=50)).states
    found = torch.autograd.grad(states.square().mean(), layer.cell.drive.input_projection.weight)[0]
    assert left == [0]
    cell = copy.deepcopy(layer.cell).double()
    exact = solvers.Sequential()(cell, x.double()).states
    expected = torch.autograd.grad(exact.square().mean(), cell.drive.input_projection.weight)[0]
    assert_close(found.double(), expected, atol=2e-4 * float(expected.abs().max()), rtol=0)


def test_rounding_errors_are_measured_per_sequence():
    """In the first channel terms of size 1000 cancel to 1. Both sequences of `pair` have the residual of rounding."""
    cell = cells.from_function(lambda s, u: torch.stack((s[..., 1] - 1000 + u[..., 0], 0 * s[..., 1] + 1000), -1), 2, 2)
    states = torch.tensor([1.0, 1000.0], dtype=torch.float32).repeat(3, 20, 1)
    x = torch.ones(3, 20, 2, dtype=torch.float32)
    state = states[:, 0].clone()
    states[:2, :, 0] += 1e-5
    states[2, :, 0] += 1e-2
    tolerance = Tolerance(0.0, default_rtol(torch.float32))

    def measure(rows):
        system = make_problem(cell, x[rows], state[rows], None, None, None).make_system(cell).detach()
        at = EvaluatedIterate(system, states[rows], tolerance, lambda *_: None, lambda *_: None)
        before = at.allowed.clone()
        at.allow_rounding(find_cancelling_steps(at.excess > 1, at.mark_settled()))
        return before, at.allowed, at.excess

    before, allowed, excess = measure([0, 1, 2])
    assert (excess[:2] <= 1).all()
    assert (excess[2] > 1).any()
    assert torch.equal(allowed[2], before[2])
    for i in range(2):
        assert (allowed[i] >= before[i]).all()
        assert torch.equal(measure([i])[1][0], allowed[i])
    assert (allowed <= tolerance.relative * 1001).all()


def test_the_signs_of_rounding_errors_do_not_depend_on_dropped_steps():
    like = torch.empty(2, 40, 3)
    assert torch.equal(random_signs(like, 1)[15:], random_signs(like[:1, 15:], 1))
    assert torch.equal(random_signs(like, 1, reverse=True)[:15], random_signs(like[:1, :15], 1, reverse=True))
    assert random_signs(like, 1).unique().tolist() == [-1, 1]
    assert not torch.equal(random_signs(like, 1), random_signs(like, 2))
