"""CONVERGED means correct to tolerance in every channel, for states and gradients: random solves against float64."""

import collections

import pytest
import torch

from adptnet.solvers import Result, Sequential
from support.random_problems import judge, random_problem

CHUNK = 250


@pytest.fixture(autouse=True)
def single_precision():
    """Use float32, the default of users; the test suite uses float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


def check(seeds):
    outcomes, wrong = collections.Counter(), []
    for seed in seeds:
        result, right = judge(seed)
        outcomes[result] += 1
        if not right:
            wrong.append(seed)
    assert not wrong, f"CONVERGED, but wrong, for seeds {wrong}"
    return outcomes


def test_random_solves_that_converged_are_right():
    assert check(range(60))[Result.CONVERGED] > 40


@pytest.mark.parametrize("seed", [1476, 13158])
def test_solves_whose_gradients_are_more_sensitive_than_their_states(seed):
    """The seeds are of problems whose gradients cancel to zero, or with a large state and a small adjoint."""
    assert judge(seed) == (Result.CONVERGED, True)


def test_gradients_that_are_zero_in_exact_arithmetic():
    """Seed 1476 in 60 digits: the loss does not depend on K and V, so a float64 gradient is rounding error only."""
    mpmath = pytest.importorskip("mpmath")
    problem = random_problem(1476)
    cell, (batch, steps, _) = problem.cell, problem.inputs.shape
    drive = cell.prepare(problem.inputs, torch.zeros(batch, steps, dtype=torch.int64)).tolist()
    eigenvalues, beta = cell.eigenvalues(), 0.0125
    real, imag = eigenvalues.real[0].item(), eigenvalues.imag[0].item()
    solution, leaves = problem.solve(Sequential())
    weight = (torch.ones_like(solution.states) / solution.states.abs().amax(1, keepdim=True)).detach()

    def loss(key, value):
        total, states = mpmath.mpf(0), []
        for row in range(batch):
            x = mpmath.matrix([0, 0])
            for t in range(int(problem.lengths[row])):
                x = mpmath.matrix([0, 0]) if problem.reset[row, t] else x
                k, v = key * x, value * x
                norms = mpmath.norm(k) * mpmath.norm(v)
                angle = beta * (k[0] * v[1] - k[1] * v[0]) / norms if norms else mpmath.mpf(0)
                cos, sin = mpmath.cos(angle), mpmath.sin(angle)
                rotation = mpmath.matrix([[cos, -sin], [sin, cos]])
                transition = rotation * mpmath.matrix([[real, -imag], [imag, real]]) * rotation.T
                x = transition * x + mpmath.matrix(drive[row][t])
                states.append((row, t, x))
                total += sum(weight[row, t, i].item() * x[i] for i in range(2))
        return total, states

    with mpmath.workdps(60):
        names = [name for name, parameter in cell.named_parameters() if parameter.requires_grad]
        weights = [mpmath.matrix(leaves[1 + i].tolist()) for i, name in enumerate(names) if "projection" in name][:2]
        base, states = loss(*weights)
        for row, t, x in states:
            for i in range(2):
                assert abs(x[i] - solution.states[row, t, i].item()) <= 1e-13 * mpmath.norm(x)
        for which in range(2):
            for entry in ((0, 0), (0, 1), (1, 0), (1, 1)):
                changed = [each.copy() for each in weights]
                changed[which][entry] += mpmath.mpf(10) ** -20
                assert abs(loss(*changed)[0] - base) <= abs(base) * mpmath.mpf(10) ** -55  # rounding in 60 digits
    found = torch.autograd.grad((solution.states * weight).sum(), leaves)
    assert all(found[1 + names.index(name)].abs().max() > 0 for name in names if "key" in name or "value" in name)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, 20_000, CHUNK))
def test_twenty_thousand_random_solves_that_converged_are_right(first):
    assert check(range(first, first + CHUNK))[Result.CONVERGED] > 0.7 * CHUNK
