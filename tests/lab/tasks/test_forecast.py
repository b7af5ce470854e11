"""Dynamical systems and their forecasts against closed forms and published numbers."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from adptnet import ADPTNet, Spec
from adptnet.errors import InputError, SpecError
from adptnet.nn import BlockSpec
from adptnet_lab.tasks import Forecast
from adptnet_lab.tasks.base import generator_for
from adptnet_lab.tasks.dynamics import Delay, Equations, largest_exponent, runge_kutta, system_of, trajectories
from adptnet_lab.tasks.equations import parsed

OSCILLATOR = "x' = v; v' = -x"
SMALL = Forecast(count=4, samples=300, length=50)


def test_formulas_are_read_as_they_are_written():
    names, field = parsed("a' = -b**2 / 4 + 3*(a - 1); b' = sin(pi*a) - sqrt(abs(b)) + 2^3")
    state = np.random.default_rng(0).standard_normal((5, 2))
    a, b = state.T
    expected = np.stack([-(b**2) / 4 + 3 * (a - 1), np.sin(np.pi * a) - np.sqrt(np.abs(b)) + 8], -1)
    assert names == ("a", "b")
    assert field(state) == pytest.approx(expected, rel=1e-14)
    assert parsed("x' = 1")[1](np.zeros((3, 1))).tolist() == [[1.0]] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x' = y", "'y' in 'y' is unknown"),
        ("x' = __import__('os')", "is unknown. A formula has numbers"),
        ("x' = x.real", "'x.real'"),
        ("x' = (lambda: 1)()", "is unknown"),
        ("x' = [x]", "is unknown"),
        ("x' = sin(x, x)", "is unknown"),
        ("x' = True", "is unknown"),
        ("x' = 2 +", "cannot be read as a formula"),
        ("x = 2", "is no equation. Write them as: x' = 10"),
        ("x' = 1; x' = 2", "one equation for each variable"),
        (";", "one equation for each variable"),
    ],
)
def test_what_is_no_formula_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        parsed(text)


def test_the_integrator_is_of_fourth_order():
    def error(dt):
        state = np.array([[1.0, 0.0]])
        for _ in range(round(2 / dt)):
            state = runge_kutta(parsed(OSCILLATOR)[1], state, dt)
        return np.abs(state - [[np.cos(2), -np.sin(2)]]).max()

    order = np.log2(error(0.1) / error(0.05))
    assert order == pytest.approx(4, abs=0.1)


@pytest.fixture(scope="module")
def grid():
    """A smooth stretch of the delay equation, 40 points a unit of time."""
    system = Delay(dt=1 / 40, substeps=1)
    state = 0.9 + 0.3 * np.sin(np.linspace(-17, 0, system.lag + 2))[None] ** 2
    points = []
    for _ in range(40 * 160):
        state = system.step(state)
        points.append(state[0, -1])
    return np.array(points[40 * 100 :])


def test_the_delay_equation_obeys_its_definition(grid):
    slope = (grid[2:] - grid[:-2]) * 20
    now = np.arange(17 * 40, len(grid) - 1)
    late = grid[now - 17 * 40]
    assert slope[now - 1] == pytest.approx(0.2 * late / (1 + late**10) - 0.1 * grid[now], abs=2e-5)


def test_the_delay_equation_is_solved_to_fourth_order(grid):
    def error(substeps):
        system, stride = Delay(dt=1.0, substeps=substeps), 40 // substeps
        now = 20 * 40
        state = grid[now - stride * (system.lag + 1) : now + 1 : stride][None]
        found = []
        for _ in range(30):
            state = system.step(state)
            found.append(state[0, -1])
        return np.abs(found - grid[now + 40 : now + 31 * 40 : 40]).max()

    assert np.log2(error(4) / error(8)) == pytest.approx(4, abs=0.5)


def test_the_exponent_of_lorenz_is_the_published_one():
    found = largest_exponent(system_of("lorenz63"), count=64, steps=2000)
    assert found == pytest.approx(0.9056, abs=0.02)  # 2300 time units in all
    assert largest_exponent(Equations("x' = -2*x", dt=0.1), count=2, steps=50) == pytest.approx(-2, rel=1e-4)
    two = Equations("x' = -x; y' = -3*y", dt=0.1)
    assert largest_exponent(two, count=2, steps=100) == pytest.approx(-1, rel=2e-3)


def test_lorenz_fills_its_attractor():
    samples = trajectories(system_of("lorenz63"), 16, 400, seed=1, transient=500)
    assert samples.mean((0, 1)) == pytest.approx([0, 0, 23.55], abs=1.5)  # z by a long run; x and y by symmetry
    assert samples.std((0, 1)) == pytest.approx([7.92, 9.02, 8.62], rel=0.1)


def test_samples_follow_one_another_and_are_normalised():
    batch = SMALL.batch(6, generator_for(0))
    assert batch.inputs.shape == batch.targets.shape == (6, 50, 3)
    assert_close(batch.inputs[:, 1:], batch.targets[:, :-1])
    bank = SMALL.bank("train")
    assert_close(bank.mean((0, 1)), torch.zeros(3), atol=1e-9, rtol=0)
    assert_close(bank.std((0, 1)), torch.ones(3))
    raw = trajectories(system_of("lorenz63"), 4, 300, seed=0)
    assert raw.shape == (4, 300, 3)
    assert not torch.equal(bank, SMALL.bank("test"))
    one, two = (list(SMALL.evaluation("test", 7, 3)) for _ in range(2))
    assert [len(b.inputs) for b in one] == [3, 3, 1]
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(one, two, strict=True))
    assert Spec.from_json(SMALL.to_json()) == SMALL


def test_noise_is_on_training_inputs_alone():
    task = Forecast(count=4, samples=300, length=50, noise=0.1)
    batch = task.batch(200, generator_for(0))
    difference = batch.inputs[:, 1:] - batch.targets[:, :-1]
    assert float(difference.std()) == pytest.approx(0.1, rel=0.03)
    clean = next(task.evaluation("test", 4, 4))
    assert torch.equal(clean.inputs[:, 1:], clean.targets[:, :-1])


def test_the_score_of_the_mean_is_one():
    targets = SMALL.bank("train")
    assert SMALL.scores(torch.zeros_like(targets), targets)["nrmse"] == pytest.approx(1, abs=1e-3)
    assert SMALL.chance == 1
    assert float(SMALL.loss(targets + 2, targets)) == pytest.approx(4)


class Oracle(nn.Module):
    """Integrates the equations itself, from a last sample that is off by `error`."""

    def __init__(self, task, error):
        super().__init__()
        self.error = nn.Parameter(torch.tensor(error))
        self.system = system_of(task.system)
        raw = trajectories(self.system, task.count, task.samples, seed=_seed(task))
        self.mean, self.deviation = raw.mean((0, 1)), raw.std((0, 1), ddof=1)

    def step(self, x, state=None):
        moved = self.system.step(x.numpy() * self.deviation + self.mean)
        return torch.from_numpy((moved - self.mean) / self.deviation), None

    def forward(self, x):
        return self.step(x[:, -1] + self.error.detach())[0].unsqueeze(1), None


def _seed(task):
    return int(np.random.SeedSequence([task.seed, 0]).generate_state(1)[0])


def test_the_horizon_of_a_model_that_knows_the_equations():
    task = Forecast(count=8, samples=520, length=20)
    perfect = task.horizon(Oracle(task, 0.0), sequences=4, longest=9.0)
    assert perfect.full == pytest.approx(9, abs=0.02)
    assert perfect.mean == perfect.median == perfect.full
    # An error e grows as e exp(λ t): it reaches 0.4 after ln(0.4 / e) Lyapunov times, give or take.
    blurred = task.horizon(Oracle(task, 1e-3), sequences=64, longest=9.0)
    assert blurred.mean == pytest.approx(np.log(0.4 / 1e-3), rel=0.25)
    assert task.horizon(Oracle(task, 1.0), sequences=16, longest=0.5).mean < 0.1


def test_the_horizon_of_a_layer_runs_on_its_own_outputs():
    model = SMALL.model(BlockSpec(ADPTNet(8).spec)).build()
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
        (lambda: Forecast("x' = x**2", count=2, samples=20, length=5).bank("train"), "run away"),
        (lambda: Forecast("x' = -x", count=2, samples=20, length=5, dt=1.0).bank("train"), "comes to rest"),
        (lambda: Forecast(OSCILLATOR, count=2, samples=20, length=5).lyapunov_time, "neighbours do not part"),
        (lambda: SMALL.batch(4, generator_for(0), length=300), "of 1 to 299 steps"),
        (lambda: SMALL.batch(0, generator_for(0)), "there must be one at least"),
        (lambda: SMALL.horizon(nn.Linear(1, 1), threshold=0.0), "threshold must be a positive number"),
    ],
)
def test_bad_input_is_explained(make, message):
    with pytest.raises((InputError, SpecError), match=message):
        make()
