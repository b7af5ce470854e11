"""`KoopmanDEER` with several means: the means of M and of J over intervals of time, and their number."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from adptnet import ADPTNet, cells, solvers, spectra
from adptnet.errors import InputError
from adptnet.solvers.linearizations import INTERVAL, MeanConjugate, MeanJacobian, MeanRotation
from adptnet.solvers.problem import make_problem
from adptnet.solvers.transitions import PiecewiseTransition

many_cells = {
    "real": lambda: ADPTNet.paper(6, beta=1.0).cell,
    "complex": lambda: ADPTNet.paper(6, beta=0.5, spectrum=spectra.S4DInv()).cell,
    "gru": lambda: cells.from_torch(nn.GRUCell(6, 5)),
    "function": lambda: cells.from_function(lambda s, u: torch.tanh(0.5 * s.roll(1, -1) + u), 6, 6),
}
many_solvers = {
    "16 means of J": lambda: solvers.KoopmanDEER(mean=MeanJacobian, means=16),
    "means of J": lambda: solvers.KoopmanDEER(mean=MeanJacobian, means="auto"),
    "means of M": lambda: solvers.KoopmanDEER(means="auto"),
}


@pytest.mark.parametrize("solver", many_solvers)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("steps", [5, 70])
@pytest.mark.parametrize("cell", many_cells)
def test_states_and_gradients_are_those_of_the_loop(solver, dtype, steps, cell):
    cell = many_cells[cell]().to(dtype)
    x = torch.randn(2, steps, 6, dtype=dtype, requires_grad=True)
    state = torch.randn(2, cell.state_size, dtype=dtype, requires_grad=True)
    reset, lengths = torch.rand(2, steps) < 0.05, torch.tensor([steps, steps - 2])
    weight = torch.randn(2, steps, cell.state_size, dtype=dtype)
    leaves = [x, state, *(p for p in cell.parameters() if p.requires_grad)]

    def solve(solver):
        solution = solver(cell, x, state, reset=reset, lengths=lengths)
        loss = (solution.states * weight).sum()
        return solution, torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    found, gradients = solve(many_solvers[solver]())
    exact, expected = solve(solvers.Sequential())
    assert found.result == solvers.Result.CONVERGED
    tolerance = 20 * torch.finfo(dtype).eps ** (5 / 6)
    scale = float(exact.states.detach().abs().max())
    assert_close(found.states, exact.states, atol=tolerance * scale, rtol=0)
    for gradient, truth in zip(gradients, expected, strict=True):
        assert_close(gradient, truth, atol=5 * tolerance * max(1.0, float(truth.abs().max())), rtol=0)


def find_interval_lengths(size, steps, means="auto"):
    cell, x = ADPTNet.paper(size, beta=1.0).cell, torch.randn(1, steps, size)
    system = make_problem(cell, x, None, None, None, None).make_system(cell)
    transition = solvers.KoopmanDEER(means=means).linearize(cell, system, torch.randn(1, steps, size))
    return list(transition.lengths) if isinstance(transition, PiecewiseTransition) else [steps]


def test_intervals_have_64_steps_or_as_many_as_the_state_dimensions():
    assert find_interval_lengths(4, 2 * INTERVAL + 3) == [INTERVAL, INTERVAL, 3]
    assert find_interval_lengths(4, INTERVAL) == [INTERVAL]
    assert find_interval_lengths(100, 150) == [100, 50]
    assert find_interval_lengths(4, 3, means=16) == [1, 1, 1]


def test_more_means_and_means_of_J_take_fewer_iterations():
    torch.manual_seed(0)
    cell, x = ADPTNet.paper(16, beta=1.0).cell, torch.randn(1, 512, 16)
    with torch.no_grad():
        one, of_jacobian = (
            solver(cell, x).iterations.double().mean()
            for solver in (solvers.KoopmanDEER(), solvers.KoopmanDEER(mean=MeanJacobian, means="auto"))
        )
    assert of_jacobian < 0.8 * one


@pytest.mark.parametrize("means", [0, -1, 2.0, True, "four", None])
@pytest.mark.parametrize("mean", [MeanConjugate, MeanJacobian, MeanRotation])
def test_a_wrong_number_of_means_is_rejected(mean, means):
    with pytest.raises(InputError, match='integer >= 1, or "auto"'):
        solvers.KoopmanDEER(mean=mean, means=means)


def test_solvers_print_their_means():
    assert repr(solvers.KoopmanDEER(means="auto")) == "KoopmanDEER(means='auto')"
    assert repr(solvers.KoopmanDEER(mean=MeanJacobian, means=4)) == "KoopmanDEER(means=4, mean=MeanJacobian)"
