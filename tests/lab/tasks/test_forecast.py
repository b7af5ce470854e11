"""Tests of dynamical systems and forecasts against closed forms and published numbers."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from adptnet import ADPTNet, Spec
from adptnet.errors import InputError, SpecError
from adptnet.nn import BlockSpec
from adptnet_lab.tasks import Forecast
from adptnet_lab.tasks.base import make_generator
from adptnet_lab.tasks.dynamics import (
    MackeyGlass,
    ODESystem,
    estimate_largest_exponent,
    make_system,
    runge_kutta_step,
    simulate_trajectories,
)
from adptnet_lab.tasks.equations import parse_equations

OSCILLATOR = "x' = v; v' = -x"
SMALL = Forecast(count=4, samples=300, length=50)


def test_formulas_are_parsed():
    names, field = parse_equations("a' = -b**2 / 4 + 3*(a - 1); b' = sin(pi*a) - sqrt(abs(b)) + 2^3")
    state = np.random.default_rng(0).standard_normal((5, 2))
    a, b = state.T
    expected = np.stack([-(b**2) / 4 + 3 * (a - 1), np.sin(np.pi * a) - np.sqrt(np.abs(b)) + 8], -1)
    assert names == ("a", "b")
    assert field(state) == pytest.approx(expected, rel=1e-14)
    assert parse_equations("x' = 1")[1](np.zeros((3, 1))).tolist() == [[1.0]] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x' = y", "'y' in 'y' is unknown"),
        ("x' = __import__('os')", "is unknown. A formula may contain numbers"),
        ("x' = x.real", "'x.real'"),
        ("x' = (lambda: 1)()", "is unknown"),
        ("x' = [x]", "is unknown"),
        ("x' = sin(x, x)", "is unknown"),
        ("x' = True", "is unknown"),
        ("x' = 2 +", "cannot be parsed as a formula"),
        ("x = 2", "is not an equation. Write them as: x' = 10"),
        ("x' = 1; x' = 2", "one equation for each variable"),
        (";", "one equation for each variable"),
    ],
)
def test_invalid_formulas_raise(text, message):
    with pytest.raises(InputError, match=message):
        parse_equations(text)


def test_the_integrator_is_of_fourth_order():
    def error(dt):
        state = np.array([[1.0, 0.0]])
        for _ in range(round(2 / dt)):
            state = runge_kutta_step(parse_equations(OSCILLATOR)[1], state, dt)
        return np.abs(state - [[np.cos(2), -np.sin(2)]]).max()

    order = np.log2(error(0.1) / error(0.05))
    assert order == pytest.approx(4, abs=0.1)


@pytest.fixture(scope="module")
def grid():
    """Return part of a smooth solution of the delay equation, 40 points per unit of time."""
    system = MackeyGlass(dt=1 / 40, substeps=1)
    state = 0.9 + 0.3 * np.sin(np.linspace(-17, 0, system.lag + 2))[None] ** 2
    points = []
    for _ in range(40 * 160):
        state = system.step(state)
        points.append(state[0, -1])
    return np.array(points[40 * 100 :])


def test_the_solution_satisfies_the_delay_equation(grid):
    slope = (grid[2:] - grid[:-2]) * 20
    now = np.arange(17 * 40, len(grid) - 1)
    late = grid[now - 17 * 40]
    assert slope[now - 1] == pytest.approx(0.2 * late / (1 + late**10) - 0.1 * grid[now], abs=2e-5)


def test_the_delay_equation_is_solved_to_fourth_order(grid):
    def error(substeps):
        system, stride = MackeyGlass(dt=1.0, substeps=substeps), 40 // substeps
        now = 20 * 40
        state = grid[now - stride * (system.lag + 1) : now + 1 : stride][None]
        found = []
        for _ in range(30):
            state = system.step(state)
            found.append(state[0, -1])
        return np.abs(found - grid[now + 40 : now + 31 * 40 : 40]).max()

    assert np.log2(error(4) / error(8)) == pytest.approx(4, abs=0.5)


def test_the_exponent_of_lorenz_agrees_with_the_published_value():
    found = estimate_largest_exponent(make_system("lorenz63"), count=64, steps=2000)
    assert found == pytest.approx(0.9056, abs=0.02)  # 2300 time units in all
    assert estimate_largest_exponent(ODESystem("x' = -2*x", dt=0.1), count=2, steps=50) == pytest.approx(-2, rel=1e-4)
    two = ODESystem("x' = -x; y' = -3*y", dt=0.1)
    assert estimate_largest_exponent(two, count=2, steps=100) == pytest.approx(-1, rel=2e-3)


def test_lorenz_has_the_moments_of_its_attractor():
    samples = simulate_trajectories(make_system("lorenz63"), 16, 400, seed=1, transient=500)
    assert samples.mean((0, 1)) == pytest.approx([0, 0, 23.55], abs=1.5)  # z from a long run; x and y by symmetry
    assert samples.std((0, 1)) == pytest.approx([7.92, 9.02, 8.62], rel=0.1)


def test_targets_are_the_next_samples_and_samples_are_standardised():
    batch = SMALL.batch(6, make_generator(0))
    assert batch.inputs.shape == batch.targets.shape == (6, 50, 3)
    assert_close(batch.inputs[:, 1:], batch.targets[:, :-1])
    trajectories = SMALL.trajectories("train")
    assert_close(trajectories.mean((0, 1)), torch.zeros(3), atol=1e-9, rtol=0)
    assert_close(trajectories.std((0, 1)), torch.ones(3))
    raw = simulate_trajectories(make_system("lorenz63"), 4, 300, seed=0)
    assert raw.shape == (4, 300, 3)
    assert not torch.equal(trajectories, SMALL.trajectories("test"))
    one, two = (list(SMALL.evaluation("test", 7, 3)) for _ in range(2))
    assert [len(b.inputs) for b in one] == [3, 3, 1]
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(one, two, strict=True))
    assert Spec.from_json(SMALL.to_json()) == SMALL


def test_noise_affects_only_training_inputs():
    task = Forecast(count=4, samples=300, length=50, noise=0.1)
    batch = task.batch(200, make_generator(0))
    difference = batch.inputs[:, 1:] - batch.targets[:, :-1]
    assert float(difference.std()) == pytest.approx(0.1, rel=0.03)
    clean = next(task.evaluation("test", 4, 4))
    assert torch.equal(clean.inputs[:, 1:], clean.targets[:, :-1])


def test_the_score_of_the_mean_is_one():
    targets = SMALL.trajectories("train")
    assert SMALL.scores(torch.zeros_like(targets), targets)["nrmse"] == pytest.approx(1, abs=1e-3)
    assert SMALL.chance == 1
    assert float(SMALL.loss(targets + 2, targets)) == pytest.approx(4)


class Oracle(nn.Module):
    """Model that integrates the equations, from a last sample with an added `error`."""

    def __init__(self, task, error):
        super().__init__()
        self.error = nn.Parameter(torch.tensor(error))
        self.system = make_system(task.system)
        raw = simulate_trajectories(self.system, task.count, task.samples, seed=_seed(task))
        self.mean, self.deviation = raw.mean((0, 1)), raw.std((0, 1), ddof=1)

    def step(self, x, state=None):
        later = self.system.step(x.numpy() * self.deviation + self.mean)
        return torch.from_numpy((later - self.mean) / self.deviation), None

    def forward(self, x):
        return self.step(x[:, -1] + self.error.detach())[0].unsqueeze(1), None


def _seed(task):
    return int(np.random.SeedSequence([task.seed, 0]).generate_state(1)[0])


def test_the_horizon_of_a_model_that_knows_the_equations():
    task = Forecast(count=8, samples=520, length=20)
    perfect = task.horizon(Oracle(task, 0.0), sequences=4, longest=9.0)
    assert perfect.full == pytest.approx(9, abs=0.02)
    assert perfect.mean == perfect.median == perfect.full
    # An error e grows as e exp(λ t), so it reaches 0.4 after about ln(0.4 / e) Lyapunov times.
    blurred = task.horizon(Oracle(task, 1e-3), sequences=64, longest=9.0)
    assert blurred.mean == pytest.approx(np.log(0.4 / 1e-3), rel=0.25)
    assert task.horizon(Oracle(task, 1.0), sequences=16, longest=0.5).mean < 0.1


def test_the_horizon_of_a_layer():
    model = SMALL.model(BlockSpec(ADPTNet.paper(8).spec)).build()
    found = SMALL.horizon(model, sequences=3, longest=1.0)
    assert found.lyapunov_times.shape == (3,)
    assert found.mean <= found.full
    assert model.training


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Forecast("lorentz63"), "Perhaps you meant 'lorenz63'"),
        (lambda: Forecast(length=2000), "samples=2001 or more"),
        (lambda: Forecast(dt=-1.0), "dt must be a positive number"),
        (lambda: Forecast("mackey-glass", dt=3.1), "must be a multiple of dt"),
        (lambda: Forecast("x' = x**2", count=2, samples=20, length=5).trajectories("train"), "the equations diverge"),
        (lambda: Forecast("x' = -x", count=2, samples=20, length=5, dt=1.0).trajectories("train"), "comes to rest"),
        (
            lambda: Forecast(OSCILLATOR, count=2, samples=20, length=5).lyapunov_time,
            "trajectories do not diverge",
        ),
        (lambda: SMALL.batch(4, make_generator(0), length=300), "of 1 to 299 steps"),
        (lambda: SMALL.batch(0, make_generator(0)), "there must be at least one"),
        (lambda: SMALL.horizon(nn.Linear(1, 1), threshold=0.0), "threshold must be a positive number"),
    ],
)
def test_invalid_arguments_raise(make, message):
    with pytest.raises((InputError, SpecError), match=message):
        make()
