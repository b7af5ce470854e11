"""Small residuals that add up along a long memory: good initial guesses, and gradients with a small slow component."""

import pytest
import torch
from torch.testing import assert_close

from adptnet import ADPTNet, adjoints, cells, solvers
from adptnet.solvers import Result, Sequential
from adptnet.solvers.convergence_test import default_rtol

KEEP = 0.9999
QUARTER = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def with_fast_channel(slow):
    """Return a step whose last channel has a short memory, and the others that of `slow`."""
    return lambda s, u: torch.cat((slow(s[:, :-1], u[:, :-1]), torch.tanh(0.5 * s[:, -1:] + u[:, -1:])), -1)


def guess_with_slow_error(exact, jacobian, size):
    """Return states whose residual is `size` of the scale in the slow channels, where it adds up."""
    slow, scale = exact[..., :-1], exact.abs().cummax(1).values
    error, errors = torch.zeros_like(slow[:, 0]), []
    for t in range(exact.shape[1]):
        before = error @ jacobian
        error = before + size * scale[:, t, :-1] * torch.where(before < 0, -1.0, 1.0)
        errors.append(error)
    fast = (1 + 1e3 * size * torch.randn_like(exact[..., -1:])) * exact[..., -1:]
    return torch.cat((slow + torch.stack(errors, 1), fast), -1)


@precisions
@pytest.mark.parametrize("distance", [0.0, 0.1, 0.5, 0.9, 1.1, 10.0])
@pytest.mark.parametrize("solver", [solvers.Jacobi, solvers.QuasiDEER])
@pytest.mark.parametrize("jacobian", [torch.tensor([[KEEP]]), KEEP * QUARTER], ids=["decay", "rotation"])
def test_a_guess_near_the_tolerance_is_not_returned_if_its_errors_add_up(solver, jacobian, distance, dtype):
    """The distance is that of the residual, in tolerances."""
    size = len(jacobian) + 1
    step = with_fast_channel(lambda s, u: s @ jacobian.to(s) + (1 - KEEP) * u)
    cell, state = cells.from_function(step, size, size), torch.ones(1, size, dtype=dtype)
    x, rtol = 1 + 0.3 * torch.randn(1, 400, size, dtype=dtype), default_rtol(dtype)
    exact = Sequential()(cell, x.double(), state.double()).states
    guess = guess_with_slow_error(exact, jacobian.double(), distance * rtol)
    found = solver(max_iterations=20)(cell, x, state, guess=guess.to(dtype)).states
    scale = exact.abs().cummax(1).values
    assert float(((found - exact).abs() / scale).max()) <= 100 * rtol


@precisions
@pytest.mark.parametrize("solver", [solvers.DEER, solvers.QuasiDEER, solvers.ConvDEER, solvers.ForwardDEER])
def test_the_solution_as_guess_needs_few_iterations(solver, dtype):
    layer = ADPTNet.paper(8, beta=0.5).to(dtype)
    x = torch.randn(2, 300, 8, dtype=dtype)
    states = solver()(layer.cell, x).states.detach()
    again = solver()(layer.cell, x, guess=states)
    assert again.result == Result.CONVERGED
    assert int(again.iterations.max()) <= 2


@precisions
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_gradients_have_the_slow_component_that_is_a_millionth_of_the_rest(share, dtype):
    """In each step the component is `share` tolerances of the rest, and it adds up along the memory."""
    rtol, steps = default_rtol(dtype), 1200
    basis = torch.linalg.qr(torch.randn(3, 3))[0]
    matrix = (basis * torch.tensor([KEEP, 0.3, -0.2])) @ basis.T
    cell = cells.from_function(lambda s, u: s @ matrix.to(s) + 0.1 * torch.tanh(u), 3, 3)
    x = torch.randn(1, steps, 3, dtype=dtype)
    weight = torch.randn(1, steps, 2) @ basis[:, 1:].T + share * rtol * basis[:, 0]

    def gradient(solver, dtype):
        state = torch.ones(1, 3, dtype=dtype, requires_grad=True)
        states = solver(cell, x.to(dtype), state, adjoint=adjoints.Implicit(max_iterations=40)).states
        return torch.autograd.grad((states * weight.to(dtype)).sum(), state)[0]

    exact, found = gradient(Sequential(), torch.float64), gradient(solvers.Jacobi(max_iterations=2), dtype)
    assert_close(found.double(), exact, atol=100 * rtol * float(exact.abs().max()), rtol=0)
