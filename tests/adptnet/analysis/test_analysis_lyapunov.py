"""Lyapunov exponents: known values, every kind of cell, gradients, and invalid input."""

import math
import resource

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from adptnet import ADPTNet, ADPTState, Recurrent, SequenceModel, cells, projections, solvers, spectra
from adptnet.analysis import (
    certificate,
    gradient_flossing_loss,
    jacobians,
    key_value_statistics,
    local_errors,
    lyapunov_exponents,
    materialize_conjugate,
    mean_log_singular_values,
    parallelizability,
    propagators,
    singular_value_shifts,
)
from adptnet.analysis.lyapunov import random_frame
from adptnet.errors import IncompatibleError, InputError, NonFiniteError
from support.members import build, legal, name_of


def henon(x):
    return torch.stack([1 - 1.4 * x[0] ** 2 + x[1], 0.3 * x[0]])


def lorenz_flow(x, dt=0.01):
    """Return one step of the fourth-order Runge-Kutta method for the Lorenz system."""

    def field(x):
        return torch.stack([10 * (x[1] - x[0]), x[0] * (28 - x[2]) - x[1], x[0] * x[1] - 8 / 3 * x[2]])

    a = field(x)
    b = field(x + dt / 2 * a)
    c = field(x + dt / 2 * b)
    return x + dt / 6 * (a + 2 * b + 2 * c + field(x + dt * c))


# Known values


def test_a_diagonal_system_has_the_logarithms_of_its_eigenvalues():
    eigenvalues = torch.tensor([1.3, -0.9, 0.5, 0.2, -0.05])
    found = lyapunov_exponents(lambda x: eigenvalues * x, state=torch.randn(5), steps=600)
    assert_close(found.exponents, eigenvalues.abs().log(), atol=1e-12, rtol=0)
    assert found.exponents.shape == found.standard_error.shape == (5,)
    assert (found.standard_error < 1e-12).all()
    assert found.window == (70, 600)


def test_a_wide_spectrum_is_orthonormalized_often_and_a_narrow_one_seldom():
    wide, narrow = torch.tensor([1.0, 1e-9]), torch.tensor([0.9, 0.89])
    assert lyapunov_exponents(lambda x: wide * x, state=torch.ones(2), steps=100).interval == 1
    assert lyapunov_exponents(lambda x: narrow * x, state=torch.ones(2), steps=1000).interval == 64
    found = lyapunov_exponents(lambda x: wide * x, state=torch.ones(2), steps=100)
    assert_close(found.exponents, wide.log(), atol=1e-12, rtol=0)


def test_a_spectrum_that_widens_on_the_way_loses_no_digits():
    """The interval between two QR steps, long while J is the identity, is shortened where J is not."""
    late = torch.diag(torch.tensor([1.0, 1e-12]))
    matrices = torch.cat((torch.eye(2).expand(300, 2, 2), late.expand(300, 2, 2)))
    cell = cells.from_function(lambda x, u: (u.unflatten(-1, (2, 2)) @ x.unsqueeze(-1)).squeeze(-1), 2)
    found = lyapunov_exponents(cell, matrices.flatten(1), state=torch.ones(2), transient=0)
    assert found.interval == 64
    assert_close(found.exponents.sum(), torch.tensor(0.5 * math.log(1e-12)), atol=1e-10, rtol=0)


def test_a_few_ill_conditioned_steps_among_many_lose_no_digits():
    """A saturated tanh makes one Jacobian nearly singular, also if QR runs at every second step only."""
    matrices = torch.linalg.qr(torch.randn(200, 3, 3)).Q
    for start in (50, 91, 150):
        matrices[start : start + 2] *= torch.tensor([1.0, 1e-2, 1e-4]).reshape(3, 1)
    cell = cells.from_function(lambda x, u: (u.unflatten(-1, (3, 3)) @ x.unsqueeze(-1)).squeeze(-1), 3)
    for steady in (0.0, 0.3, 2.0):  # the rest of the spectrum sets the interval: long, a few steps, two
        scale = torch.tensor([steady, 0.0, -steady]).exp().reshape(3, 1)
        moved = matrices[0] @ (scale * (matrices[0].mT @ matrices))
        found = lyapunov_exponents(cell, moved.flatten(1), state=torch.zeros(3), transient=0)
        expected = torch.linalg.slogdet(moved).logabsdet.mean()
        assert_close(found.exponents.sum(), expected, atol=1e-10, rtol=0)


def test_a_product_of_rotations_has_exponents_of_zero():
    rotations = torch.linalg.qr(torch.randn(300, 7, 7)).Q
    cell = cells.from_function(lambda x, u: (u.unflatten(-1, (7, 7)) @ x.unsqueeze(-1)).squeeze(-1), 7)
    found = lyapunov_exponents(cell, rotations.flatten(1), state=torch.randn(7))
    assert_close(found.exponents, torch.zeros(7), atol=1e-14, rtol=0)


def test_the_henon_map():
    start = torch.tensor([0.1, 0.1]) + 0.01 * torch.randn(32, 2)
    found = lyapunov_exponents(henon, state=start, steps=2000)
    assert_close(found.exponents.mean(0), torch.tensor([0.419, -1.623]), atol=1e-2, rtol=0)
    assert_close(found.exponents.sum(-1), torch.full((32,), math.log(0.3)), atol=1e-12, rtol=0)
    assert float(found.dimension.mean()) == pytest.approx(1.258, abs=0.01)
    assert (found.exponents.std(0) / found.standard_error.mean(0)).tolist() == pytest.approx([1, 1], abs=0.5)


def test_single_precision_finds_the_same_exponents():
    found = lyapunov_exponents(henon, state=torch.tensor([0.1, 0.1], dtype=torch.float32), steps=1000)
    assert found.exponents.dtype == torch.float32
    assert_close(found.exponents.sum().double(), torch.tensor(math.log(0.3)), atol=1e-5, rtol=0)
    layer = ADPTNet.paper(6, beta=0.5, dtype=torch.float32)
    x = torch.randn(200, 6)
    with torch.no_grad():
        single, double = lyapunov_exponents(layer, x.float()).exponents, lyapunov_exponents(layer.double(), x).exponents
    assert_close(single.double(), double, atol=1e-5, rtol=0)


def test_the_lorenz_system_by_its_flow():
    start = torch.tensor([1.0, 1.0, 20.0]) + torch.randn(96, 3)
    found = lyapunov_exponents(lorenz_flow, state=start, steps=4000)
    per_time = found.exponents.mean(0) / 0.01
    assert_close(per_time, torch.tensor([0.906, 0.0, -14.57]), atol=2e-2, rtol=0)
    assert_close(per_time.sum(), torch.tensor(-41 / 3), atol=1e-3, rtol=0)  # the divergence of the field
    assert float(found.dimension.mean()) == pytest.approx(2.06, abs=0.01)


# Every kind of cell


def test_the_exponents_are_those_of_the_definition():
    """The reference runs QR at every step."""
    layer, x = ADPTNet.paper(6, beta=1.0, spectrum=spectra.Linspace(dt_min=0.1, dt_max=2.0)), torch.randn(120, 6)
    with torch.no_grad():
        found = lyapunov_exponents(layer, x, transient=20)
        frame, total = torch.eye(6), torch.zeros(6)
        for t, matrix in enumerate(jacobians(layer, x)):
            frame, upper = torch.linalg.qr(matrix @ frame)
            total += upper.diagonal().abs().log() if t >= 20 else 0
    expected = (total / 100).sort(descending=True).values
    assert_close(found.exponents, expected, atol=0.02, rtol=0)  # another initial frame
    assert_close(found.exponents.sum(), expected.sum(), atol=1e-12, rtol=0)


other_cells = {
    "GRU": lambda: nn.GRUCell(3, 4),
    "LSTM": lambda: nn.LSTMCell(3, 4),
    "RNN": lambda: cells.from_torch(nn.RNNCell(3, 4)),
    "tanh": lambda: cells.TanhRNN(3, 5).build(),
    "layer": lambda: Recurrent(cells.TanhRNN(3)),
    "function": lambda: cells.from_function(
        lambda x, u: torch.tanh(x + u.sum(-1, keepdim=True)) + 0.3 * x.roll(1, -1), 4, 3
    ),
}


def same_sum(system, x):
    found = lyapunov_exponents(system, x, transient=10)
    matrices = jacobians(system, x)[..., 10:, :, :]
    expected = torch.linalg.slogdet(matrices).logabsdet.mean(-1)
    assert_close(found.exponents.sum(-1), expected, atol=1e-10, rtol=0)
    assert (found.exponents.diff() <= 0).all()
    singular = mean_log_singular_values(system, x, transient=10)
    assert_close(singular.sum(-1), expected, atol=1e-10, rtol=0)
    assert (found.exponents.cumsum(-1) <= singular.cumsum(-1) + 1e-10).all()  # Horn


def invertible(axes) -> bool:
    return "Sparse" not in name_of(axes)


@pytest.mark.parametrize("axes", [axes for axes in legal if invertible(axes)], ids=name_of)
@torch.no_grad()
def test_the_exponents_of_every_layer_sum_to_the_mean_log_determinant(axes):
    layer = build(axes)
    same_sum(layer, torch.randn(2, 24, layer.width))


@pytest.mark.parametrize("name", other_cells)
@torch.no_grad()
def test_the_exponents_of_other_cells_sum_to_the_mean_log_determinant(name):
    same_sum(other_cells[name](), torch.randn(2, 40, 3))


def test_a_singular_jacobian_has_exponents_of_minus_infinity_not_of_rounding():
    """fig:orthogonal_rnn_lyapunov shows e^-40 for such exponents: the rounding error of the code behind the figure."""
    layer = Recurrent(cells.OrthogonalRNN(16))
    with torch.no_grad():
        found = lyapunov_exponents(layer, torch.randn(200, 16)).exponents
    assert found[0].isfinite()
    assert (found == -torch.inf).any()
    assert found[found.isfinite()].min() > -10


def test_the_leading_exponents_are_those_of_the_whole_spectrum():
    layer, x = ADPTNet.paper(12, beta=1.0, spectrum=spectra.Linspace(dt_min=0.05, dt_max=3.0)), torch.randn(2, 400, 12)
    with torch.no_grad():
        whole, leading = lyapunov_exponents(layer, x), lyapunov_exponents(layer, x, count=3)
    assert leading.exponents.shape == (2, 3)
    assert_close(leading.exponents, whole.exponents[:, :3], atol=5e-3, rtol=0)


def test_each_trajectory_of_a_batch_is_its_own():
    layer, x = ADPTNet.paper(6, beta=1.0), torch.randn(3, 90, 6)
    with torch.no_grad():
        batch, alone = lyapunov_exponents(layer, x), lyapunov_exponents(layer, x[0])
        turned = Recurrent(layer.cell, batch_first=False)
        assert_close(lyapunov_exponents(turned, x.transpose(0, 1)).exponents, batch.exponents)
    assert alone.exponents.shape == (6,)
    assert alone.final.shape == (6,)
    assert_close(alone.exponents, batch.exponents[0], atol=1e-10, rtol=0)
    assert_close(alone.final, layer(x[:1])[1].state[0])
    assert "per step over steps 19 to 90" in str(batch)


def test_many_states_may_follow_one_input_and_a_state_carries_its_position():
    layer, x = ADPTNet.paper(6, beta=1.0), torch.randn(50, 6)
    with torch.no_grad():
        found = lyapunov_exponents(layer, x, state=torch.randn(4, 6))
        later = ADPTState(torch.randn(1, 6), torch.tensor([7]))
        assert lyapunov_exponents(layer, x, state=later).exponents.shape == (6,)
    assert found.exponents.shape == (4, 6)


def test_an_undriven_cell_runs_from_the_state_it_is_given():
    layer = ADPTNet.paper(6, beta=1.0)
    with torch.no_grad():
        found = lyapunov_exponents(layer, state=torch.randn(6), steps=60)
        driven = lyapunov_exponents(layer, torch.zeros(60, 6), state=found.final)
    assert found.exponents.shape == driven.exponents.shape == (6,)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_length():
    layer = ADPTNet.paper(64, beta=0.5)
    peaks = []
    for steps in (5000, 15000):
        lyapunov_exponents(layer, torch.randn(steps, 64))
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks[1] - peaks[0] < 50_000  # kilobytes; 10,000 more Jacobians are 320,000, their graph several times that


def test_a_parallel_solver_may_find_the_states():
    layer, x = ADPTNet.paper(6, beta=0.3).requires_grad_(False), torch.randn(2, 80, 6)
    expected = lyapunov_exponents(layer, x)
    found = lyapunov_exponents(layer, x, solver=solvers.ConvDEER())
    assert_close(found.exponents, expected.exponents, atol=1e-9, rtol=0)
    assert_close(found.final, expected.final, atol=1e-9, rtol=0)
    with pytest.raises(InputError, match="is not parallel in time"):
        lyapunov_exponents(layer, x, solver=solvers.Sequential())
    with pytest.raises(InputError, match=r"torch.no_grad\(\)"):
        lyapunov_exponents(layer.requires_grad_(), x, solver=solvers.ConvDEER())
    wild = ADPTNet.paper(6, beta=4.0, spectrum=spectra.Negative()).requires_grad_(False)
    with pytest.raises(InputError, match="did not find the states"):
        lyapunov_exponents(wild, x, solver=solvers.ConvDEER(max_iterations=3, on_failure=solvers.Return()))


def exponents_by_autograd(layer, x, transient):
    """Return exponents by `torch.func.jacrev` and QR at every step."""
    steps, size = x.shape
    step, drive = layer.cell.stepper(), layer.cell.prepare(x.unsqueeze(0), torch.arange(steps).unsqueeze(0))[0]
    state, frame, total = torch.zeros(size), random_frame(size, size), torch.zeros(size)
    for t in range(steps):
        matrix = torch.func.jacrev(step)(state, drive[t])
        state = step(state, drive[t])
        frame, upper = torch.linalg.qr(matrix @ frame)
        total += upper.diagonal().abs().log() if t >= transient else 0
    return (total / (steps - transient)).sort(descending=True).values


@torch.no_grad()
def test_the_exponents_are_those_of_automatic_differentiation_and_qr_at_each_step():
    layer, x = ADPTNet.paper(24, beta=0.125), torch.randn(100, 24)
    found = lyapunov_exponents(layer, x, solver=solvers.ConvDEER())
    assert_close(found.exponents, exponents_by_autograd(layer, x, found.window[0]), atol=1e-6, rtol=0)


# Products


def test_propagators_are_products_of_neighbours():
    layer, x = ADPTNet.paper(5, beta=1.0), torch.randn(2, 13, 5)
    with torch.no_grad():
        matrices = jacobians(layer, x)
        for span in (1, 2, 5, 6, 13):
            found = propagators(layer, x, span=span)
            assert found.shape == (2, 14 - span, 5, 5)
            for start in range(14 - span):
                expected = torch.eye(5).expand(2, 5, 5)
                for t in range(start, start + span):
                    expected = matrices[:, t] @ expected
                assert_close(found[:, start], expected)
    with pytest.raises(InputError, match="span=14"):
        propagators(layer, x, span=14)


# Gradients


@pytest.mark.parametrize("count", [1, 4])
def test_the_exponents_are_differentiable(count):
    weight = torch.randn(4, 4) / 2
    inputs = torch.randn(30, 4)

    def exponents(weight, inputs):
        return lyapunov_exponents(
            lambda x, u: torch.tanh(weight @ x + u), inputs, state=torch.ones(4), count=count
        ).exponents

    arguments = (weight.requires_grad_(), inputs[:12].requires_grad_())
    assert torch.autograd.gradcheck(exponents, arguments, eps=1e-5, atol=1e-5)


def test_gradients_reach_the_parameters_of_a_layer():
    layer = ADPTNet.paper(5, beta=1.0, spectrum=spectra.Linspace(dt_min=0.1, dt_max=1.0))
    lyapunov_exponents(layer, torch.randn(40, 5)).exponents.sum().backward()
    assert layer.cell.spectrum.log_dt.grad.abs().min() > 0
    assert layer.cell.directions[0].key_projection.weight.grad.abs().max() > 0


def test_gradient_flossing_moves_the_leading_exponents_to_their_targets():
    layer = Recurrent(cells.TanhRNN(8, 16))
    targets = [-0.05, -0.1, -0.2]
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.01)
    with torch.no_grad():
        before = lyapunov_exponents(layer, torch.randn(4, 200, 8), count=3).exponents.mean(0)
    for _ in range(70):
        optimiser.zero_grad()
        loss = gradient_flossing_loss(layer, torch.randn(2, 40, 8), targets)
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        after = lyapunov_exponents(layer, torch.randn(4, 200, 8), count=3).exponents.mean(0)
    assert (before - torch.tensor(targets)).abs().min() > 0.2
    assert_close(after, torch.tensor(targets), atol=0.06, rtol=0)


def test_the_flossing_loss_is_zero_at_its_targets_in_any_order():
    eigenvalues = torch.tensor([0.9, 0.3])
    targets = eigenvalues.log().flip(0)
    loss = gradient_flossing_loss(lambda x: eigenvalues * x, None, targets, state=torch.ones(2), steps=200)
    assert float(loss) < 1e-20
    with pytest.raises(InputError, match="targets"):
        gradient_flossing_loss(lambda x: eigenvalues * x, None, [math.nan], state=torch.ones(2), steps=200)


def test_exponents_of_minus_infinity_cannot_be_flossed():
    """The loss would be infinite and every gradient NaN."""
    line = torch.tensor([[0.5, 0.0], [0.5, 0.0]])
    assert float(gradient_flossing_loss(lambda x: line @ x, None, [0.0], state=torch.ones(2), steps=50)) > 0
    with pytest.raises(NonFiniteError, match=r"exponent 2 \(from the largest\) is -inf.*at most 1 target\."):
        gradient_flossing_loss(lambda x: line @ x, None, [0.0, -1.0], state=torch.ones(2), steps=50)
    with pytest.raises(NonFiniteError, match="No exponent is finite, so gradient flossing does not apply"):
        gradient_flossing_loss(lambda x: 0 * x, None, [0.0], state=torch.ones(2), steps=50)


# Invalid input


def test_a_diverging_state_is_named_with_its_step():
    with pytest.raises(NonFiniteError, match=r"after step 7 of sequence 1 .*diverges"):
        lyapunov_exponents(lambda x: x**2, state=torch.tensor([[0.5], [16.0]]), steps=60)
    with pytest.raises(NonFiniteError, match="Jacobian is not finite at step 3 of sequence 0"):
        lyapunov_exponents(lambda x: (x - 1).clamp(min=0).sqrt().square() + 0 * x, state=torch.tensor([4.0]), steps=20)


def test_wrong_input_is_explained():
    layer, x = ADPTNet.paper(4), torch.randn(2, 30, 4)
    with pytest.raises(InputError, match=r"ends after 30 steps, within the transient of 30.*transient=15"):
        lyapunov_exponents(layer, x, transient=30)
    with pytest.raises(InputError, match="transient=-1"):
        lyapunov_exponents(layer, x, transient=-1)
    with pytest.raises(InputError, match=r"count=5.*from 1 to 4"):
        lyapunov_exponents(layer, x, count=5)
    with pytest.raises(NonFiniteError, match=r"sequence 1, step 7.*lengths"):
        lyapunov_exponents(layer, x.index_put((torch.tensor(1), torch.tensor(7)), torch.tensor(torch.nan)))
    with pytest.raises(InputError, match=r"x\[i, :lengths\[i\]\]"):
        lyapunov_exponents(layer, nn.utils.rnn.pack_sequence([x[0], x[1, :7]]))
    with pytest.raises(InputError, match=r"steps=None.*steps=10_000"):
        lyapunov_exponents(henon, state=torch.zeros(2))
    with pytest.raises(InputError, match=r"plain function.*Pass state="):
        lyapunov_exponents(henon, steps=10)
    with pytest.raises(InputError, match="initial state may be a fixed point"):
        lyapunov_exponents(layer, steps=10)
    with pytest.raises(InputError, match="must keep the shape"):
        lyapunov_exponents(lambda x: x[:1], state=torch.zeros(2), steps=10)
    with pytest.raises(InputError, match=r"steps=31, but the inputs have 30"):
        lyapunov_exponents(layer, x, steps=31)
    model = SequenceModel(layer.spec, depth=2, vocabulary=5)
    with pytest.raises(InputError, match=r"holds 2 recurrent layers.*get_submodule\('blocks.0.layer'\)"):
        lyapunov_exponents(model, x)
    with pytest.raises(NonFiniteError, match="the initial state holds NaN or infinity"):
        lyapunov_exponents(henon, state=torch.tensor([0.0, math.inf]), steps=10)
    with pytest.raises(InputError, match="needs all 4 exponents"):
        _ = lyapunov_exponents(layer, x, count=2).dimension


def test_the_entropy_rate_needs_every_positive_exponent():
    def stretch(state):
        return state * torch.tensor([3.0, 2.0, 0.5], dtype=state.dtype)

    start = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(InputError, match="entropy_rate needs all 3 exponents"):
        _ = lyapunov_exponents(stretch, state=start, steps=200, count=2).entropy_rate
    rate = lyapunov_exponents(stretch, state=start, steps=200).entropy_rate
    assert float(rate) == pytest.approx(math.log(6))
    enough = lyapunov_exponents(lambda state: stretch(state) / 2.5, state=start, steps=200, count=2).entropy_rate
    assert float(enough) == pytest.approx(math.log(3 / 2.5))


def test_one_initial_state_serves_every_sequence():
    weight, x, start = torch.randn(3, 3) / 2, torch.randn(2, 30, 3), torch.randn(3)
    found = lyapunov_exponents(lambda s, u: torch.tanh(weight @ s + u), x, state=start).exponents
    each = lyapunov_exponents(lambda s, u: torch.tanh(weight @ s + u), x, state=start.expand(2, 3)).exponents
    assert_close(found, each)
    cell = nn.GRUCell(3, 3)
    assert_close(jacobians(cell, x, state=start)[1], jacobians(cell, x[1], state=start))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: (x, x), "returned a tuple"),
        (lambda x: [x[0], x[1]], "returned a list.*torch.stack"),
        (lambda x: 0.5, "returned a float"),
        (lambda x: x * x[0].item(), r"tensor operations alone.*no .item\(\)"),
        (lambda x: x if x[0] > 0 else -x, "torch.where for if"),
        (lambda x: torch.tensor([x[0], x[1]]), "torch.stack for torch.tensor"),
        (lambda x: torch.from_numpy(x.numpy()), r"no .numpy\(\)"),
        (lambda x: x + torch.randn(2), "no random numbers"),
        (lambda x, u: x + u, r"\(x, u\) is called as f\(state\), since there are no inputs.*'u'"),
    ],
)
def test_a_function_that_cannot_be_analyzed_gets_a_clear_error(function, words):
    with pytest.raises(InputError, match=words):
        lyapunov_exponents(function, state=torch.ones(2), steps=20)


def test_an_error_of_the_function_itself_is_left_alone():
    with pytest.raises(RuntimeError, match=r"cannot be multiplied|size mismatch") as caught:
        lyapunov_exponents(lambda x: torch.ones(3, 3) @ x, state=torch.ones(2), steps=20)
    assert not isinstance(caught.value, InputError)


def test_every_analysis_rejects_empty_input():
    layer, x = ADPTNet.paper(4), torch.randn(2, 30, 4)
    for nothing in (x[:0], x[:, :0], x[0, :0]):
        for analyze in (lyapunov_exponents, mean_log_singular_values, jacobians, certificate, parallelizability):
            with pytest.raises(InputError, match="nothing to analyze"):
                analyze(layer, nothing)
        for analyze in (singular_value_shifts, local_errors, key_value_statistics, materialize_conjugate):
            with pytest.raises(InputError, match="nothing to analyze"):
                analyze(layer, nothing)
    with pytest.raises(InputError, match="nothing to analyze"):
        lyapunov_exponents(henon, state=torch.ones(0, 2), steps=20)
    with pytest.raises(InputError, match="dimension 0"):
        lyapunov_exponents(henon, state=torch.ones(0), steps=20)


def test_wrong_types_and_devices_are_explained():
    layer, x = ADPTNet.paper(4), torch.randn(2, 30, 4)
    with pytest.raises(InputError, match="the state is a list"):
        lyapunov_exponents(henon, state=[0.1, 0.1], steps=20)
    with pytest.raises(IncompatibleError, match=r"bidirectional nn\.GRU needs the whole sequence"):
        lyapunov_exponents(nn.GRU(4, 3, bidirectional=True), x)
    with pytest.raises(InputError, match=r"steps=100.0.*an integer >= 1"):
        lyapunov_exponents(henon, state=torch.zeros(2), steps=100.0)
    with pytest.raises(InputError, match=r"is called as f\(state, input\), since there are inputs"):
        lyapunov_exponents(henon, x, state=torch.zeros(2))
    with pytest.raises(InputError, match="inputs are on meta, the cell is on cpu"):
        lyapunov_exponents(layer, x.to("meta"))
    with pytest.raises(InputError, match="holds 2 recurrent layers"):
        certificate(SequenceModel(layer.spec, depth=2, vocabulary=5))


def test_parametrized_projections_are_differentiated():
    layer, x = ADPTNet.paper(6, beta=1.0, projection=projections.Orthogonal()), torch.randn(40, 6)
    with torch.no_grad():
        same_sum(layer, x)
