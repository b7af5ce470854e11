"""A map as a program of numbers gives the states of the map itself, or no program."""

import pytest
import torch

from adptnet import analysis
from adptnet.analysis.scalar_program import record_program
from adptnet.analysis.trajectory import MapCell

MATRIX = torch.tensor([[0.5, -0.25], [0.125, 0.75]], dtype=torch.float64)


def henon(state):
    return torch.stack((1 - 1.4 * state[0] ** 2 + state[1], 0.3 * state[0]))


def lorenz(state, dt=0.01):
    x, y, z = state.unbind(-1)
    return state + dt * torch.stack((10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z), -1)


def driven(state, drive):
    return torch.cat((state[:1].tanh() - drive, (-state[1:]).sin() / 2 + drive.cos()))


def pendulum(state):
    angle, speed = state
    return torch.add(state, torch.stack([speed, -angle.sin()]), alpha=0.1).reshape(2)


SUPPORTED = [(henon, 2), (lorenz, 3), (pendulum, 2)]
UNSUPPORTED = [
    lambda state: state @ MATRIX.to(state),
    lambda state: torch.where(state > 0, state, -state / 2),
    lambda state: state.clone().add_(1.0),
    lambda state: torch.tensor([0.1, 0.2], dtype=state.dtype) * state,
]


@pytest.mark.parametrize(("function", "size"), SUPPORTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_program_has_the_states_of_the_map(function, size, dtype):
    state = torch.linspace(0.1, 0.4, size, dtype=dtype)
    cell, drive = MapCell(function, size, driven=False), torch.zeros(1, 30, 1, dtype=dtype)
    with torch.no_grad():
        found = cell.scan(drive, state.unsqueeze(0))
        expected = [state]
        for _ in range(30):
            expected.append(function(expected[-1]))
    assert found is not None
    assert found.dtype == dtype
    torch.testing.assert_close(found[0], torch.stack(expected[1:]), rtol=2e4 * torch.finfo(dtype).eps, atol=0)


def test_a_program_of_a_driven_map_reads_its_inputs():
    cell, x = MapCell(driven, 2, driven=True), torch.randn(1, 9, 1, dtype=torch.float64)
    state = torch.randn(1, 2, dtype=torch.float64)
    with torch.no_grad():
        found = cell.scan(x, state)
        assert found is not None
        for t in range(9):
            state = cell.step(state, x[:, t])
            torch.testing.assert_close(found[:, t], state)


@pytest.mark.parametrize("function", UNSUPPORTED)
def test_other_operations_have_no_program(function):
    assert record_program(function, torch.tensor([0.3, -0.4])) is None


def test_a_map_of_many_dimensions_has_no_program():
    assert record_program(lambda state: state * 0.5, torch.ones(50)) is None


def test_numbers_that_python_rejects_run_in_torch():
    def overflow(state):
        return state / (state - 3.0)

    start = torch.tensor([4.5], dtype=torch.float64)  # 3, then a division by zero
    with pytest.raises(analysis.trajectory.NonFiniteError, match="not finite after step 1"):
        analysis.lyapunov_exponents(overflow, state=start, steps=20)


def test_exponents_with_and_without_a_program_agree(monkeypatch):
    state = torch.tensor([0.1, 0.1], dtype=torch.float64)
    found = analysis.lyapunov_exponents(henon, state=state, steps=2000)
    monkeypatch.setattr(MapCell, "scan", lambda *args, **options: None)
    expected = analysis.lyapunov_exponents(henon, state=state, steps=2000)
    torch.testing.assert_close(found.exponents.sum(), expected.exponents.sum())  # ln 0.3 for every trajectory
    torch.testing.assert_close(found.exponents, expected.exponents, rtol=0.05, atol=0)  # a chaotic one
