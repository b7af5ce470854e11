"""Points where the paper is wrong or silent: one claim per test, numbered as in docs/explanation/deviations.md.

All tests run in float64. Many parts are written here from their definitions with dense matrices, independently of the
library.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, eye
from torch.nn.functional import layer_norm, one_hot, sigmoid, softplus
from torch.testing import assert_close

from adptnet import ADPTNet, cells, directions, drive, projections, retractions, spectra
from adptnet.recurrence.conjugates import RotatedConjugate
from adptnet.recurrence.directions import unit
from adptnet.recurrence.spectra import BlockDiagonal
from adptnet_lab.paper.registry import load_results
from adptnet_lab.tasks import WordProblem

SIZE = 6
WIDE = spectra.Linspace(dt_min=0.05, dt_max=3.0)  # λ̄ from 0.98 down to 0.22
DENSE, ORTHOGONAL = projections.Dense(), projections.Orthogonal()
all_retractions = [retractions.Exponential(), retractions.Cayley()]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unit_vectors(*shape: int, seed: int = 0) -> Tensor:
    return unit(randn(*shape, seed=seed))


def orthogonal(size: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(randn(size, size, seed=seed)).Q


def skew(key: Tensor, value: Tensor) -> Tensor:
    return torch.outer(key, value) - torch.outer(value, key)


def rotate_diagonal(key: Tensor, value: Tensor, beta: float, lambda_bar: Tensor) -> Tensor:
    """Return Q Λ̄ Q' computed with dense matrices."""
    rotation = torch.linalg.matrix_exp(beta * skew(key, value))
    return rotation @ torch.diag(lambda_bar) @ rotation.mT


def norm(matrix: Tensor) -> Tensor:
    """Return the largest singular value."""
    return torch.linalg.matrix_norm(matrix, 2)


def make_cell(beta: float, spectrum=WIDE, projection=ORTHOGONAL, size=SIZE, seed=0, **axes):
    torch.manual_seed(seed)
    spec = cells.ADPTSpec(size, beta=beta, spectrum=spectrum, projection=projection, **axes)
    return spec.build().requires_grad_(False)


def set_weights(cell, key_weight: Tensor, value_weight: Tensor):
    """Set K and V, and return the cell."""
    cell.directions[0].key_projection.weight.copy_(key_weight)
    cell.directions[0].value_projection.weight.copy_(value_weight)
    return cell


def make_extremal_cell(beta: float, retraction=all_retractions[0]):
    """Return a cell with K = diag(-1, 1, …), V = I: at the state e_n, J is diagonal and ‖J - M‖ attains the bound."""
    cell = make_cell(beta, projection=DENSE, retraction=retraction)
    key_weight = eye(SIZE)
    key_weight[0, 0] = -1
    return set_weights(cell, key_weight, eye(SIZE))  # Linspace sorts λ̄ from the largest to the smallest


def run(cell, steps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Run a cell on random inputs; return the state before each step, and the drive, both (steps, n)."""
    inputs = randn(1, steps, cell.input_size, seed=seed)
    driven = cell.prepare(inputs, torch.arange(steps).unsqueeze(0))[0]
    state, entering = torch.zeros(cell.state_size), []
    step = cell.stepper()
    for t in range(steps):
        entering.append(state)
        state = step(state, driven[t])
    return torch.stack(entering), driven


def jacobians(cell, states: Tensor) -> Tensor:
    return cell.jacobian(states, torch.zeros_like(states))


def conjugates(cell, states: Tensor) -> Tensor:
    return cell.conjugate(states, torch.zeros_like(states)).dense()


def deviation(function: Callable[[Tensor], Tensor], matrix: Tensor, state: Tensor) -> Tensor:
    """Return ‖J - M‖ at `state`, where J is the derivative of `function` and M is `matrix`."""
    return norm(torch.func.jacfwd(function)(state) - matrix)


def exponents(matrices: Tensor, frame: Tensor, transient: int = 0) -> Tensor:
    """Return the Lyapunov exponents of the product of `matrices`, (time, ..., n, n), by Benettin's method.

    `frame` is the initial orthonormal basis.
    """
    total = torch.zeros(frame.shape[:-1])
    for t, matrix in enumerate(matrices):
        frame, triangle = torch.linalg.qr(matrix @ frame)
        if t >= transient:
            total += triangle.diagonal(dim1=-2, dim2=-1).abs().log()
    return total / (len(matrices) - transient)


def newton(step, driven: Tensor, transition, tolerance: float = 1e-10) -> list[Tensor]:
    """Return the iterates of a DEER solve from zero, (time, n) each, until the last residual is within `tolerance`."""
    guesses = [torch.zeros_like(driven)]
    while True:
        entering = torch.cat((torch.zeros_like(driven[:1]), guesses[-1][:-1]))
        matrices = transition(entering).expand(len(driven), -1, -1)
        offset = step(entering, driven) - (matrices @ entering.unsqueeze(-1)).squeeze(-1)
        state, states = torch.zeros_like(driven[0]), []
        for matrix, shift in zip(matrices, offset, strict=True):
            state = matrix @ state + shift
            states.append(state)
        guesses.append(torch.stack(states))
        entering = torch.cat((torch.zeros_like(driven[:1]), guesses[-1][:-1]))
        if (step(entering, driven) - guesses[-1]).abs().max() <= tolerance or len(guesses) > len(driven):
            return guesses


# The rotation


@pytest.mark.parametrize("beta", [1e-3, 0.125, 4.0])
def test_01_both_retractions_turn_one_plane_by_an_angle_in_closed_form(beta):
    key, value = unit_vectors(2, SIZE)
    angle = beta * (1 - (key @ value) ** 2).sqrt()
    s = beta * skew(key, value)
    assert_close(s @ s @ s, -(angle**2) * s)
    exponential = retractions.Exponential()(key, value, beta).dense()
    cayley = retractions.Cayley()(key, value, beta).dense()
    assert_close(exponential, torch.linalg.matrix_exp(s), atol=1e-14, rtol=0)
    assert_close(cayley, torch.linalg.solve(eye(SIZE) - s / 2, eye(SIZE) + s / 2), atol=1e-14, rtol=0)
    assert_close(cayley, torch.linalg.matrix_exp(s * 2 * (angle / 2).atan() / angle), atol=1e-14, rtol=0)


@pytest.mark.parametrize("retraction", all_retractions, ids=repr)
def test_01_at_parallel_key_and_value_the_rotation_is_the_identity_but_its_derivative_is_not_zero(retraction):
    key, change = unit_vectors(2, SIZE)
    rotation, derivative = torch.func.jvp(lambda value: retraction(key, value, 0.7).dense(), (key,), (change,))
    assert_close(rotation, eye(SIZE))
    assert_close(derivative, 0.7 * skew(key, change))
    assert norm(derivative) > 0.1


def test_01_the_two_by_two_core_of_the_paper_loses_every_digit_near_parallel_key_and_value_in_float32():
    def printed(key, value):  # eq:core_matrix, eq:core_exp, eq:eff_exp at β = 1
        left, right, dot = torch.stack((key, -value), 1), torch.stack((value, key), 1), key @ value
        core, determinant = torch.stack((dot, -torch.ones_like(dot), torch.ones_like(dot), -dot)).view(2, 2), 1 - dot**2
        small = torch.eye(2, dtype=torch.float32)
        exponential = determinant.sqrt().cos() * small + determinant.sqrt().sin() / determinant.sqrt() * core
        return torch.eye(SIZE, dtype=torch.float32) + left @ (-core / determinant @ (exponential - small)) @ right.mT

    lost = 0
    for key, other in unit_vectors(40, 2, SIZE):
        key, value = key.float(), unit(key + 1e-4 * other).float()
        exact = torch.linalg.matrix_exp(skew(key.double(), value.double()))
        change = norm(exact - eye(SIZE))
        assert norm(retractions.Exponential()(key, value, 1.0).dense() - exact) < 1e-2 * change
        error = (printed(key, value) - exact).abs().max()
        lost += not error < 0.1 * change  # NaN counts as lost
    assert lost > 20


def slope(error: Callable[[float], Tensor]) -> float:
    """Return the power of β with which `error` vanishes."""
    return math.log10(error(1e-2) / error(1e-3))


def test_02_the_printed_taylor_form_belongs_to_the_transposed_rotation():
    key, value = unit_vectors(2, SIZE)
    lambda_bar = torch.linspace(0.1, 0.9, SIZE)
    diagonal, s = torch.diag(lambda_bar), skew(key, value)

    def ours(beta):
        return diagonal + beta * (s @ diagonal - diagonal @ s)

    def printed(beta):  # eq:taylor_ADPTNet
        return diagonal + beta * (diagonal @ s - s @ diagonal)

    def exact(beta):
        return rotate_diagonal(key, value, beta, lambda_bar)

    def transposed(beta):
        return rotate_diagonal(value, key, beta, lambda_bar)

    assert slope(lambda beta: norm(ours(beta) - exact(beta))) == pytest.approx(2, abs=0.02)
    assert slope(lambda beta: norm(printed(beta) - exact(beta))) == pytest.approx(1, abs=0.02)
    assert slope(lambda beta: norm(printed(beta) - transposed(beta))) == pytest.approx(2, abs=0.02)


def test_02_the_listed_forward_deer_code_gives_the_diagonal_of_the_transposed_rotation():
    key, value = unit_vectors(2, SIZE)
    lambda_bar = torch.linspace(0.1, 0.9, SIZE)
    rotation = retractions.Exponential()(key, value, 1.0)
    left = (rotation.dense() - eye(SIZE)) @ torch.linalg.pinv(torch.stack((value, key), 0))  # Q = I + left right'
    right = torch.stack((value, key), 1)
    quadratic = right @ ((left.mT * lambda_bar) @ left)  # appendix:code_fwd_macs
    listed = lambda_bar + 2 * lambda_bar * (left * right).sum(-1) + (quadratic * right).sum(-1)
    assert_close(listed, rotate_diagonal(value, key, 1.0, lambda_bar).diagonal())
    ours = RotatedConjugate([rotation], BlockDiagonal(lambda_bar)).diagonal()
    assert_close(ours, rotate_diagonal(key, value, 1.0, lambda_bar).diagonal())
    assert (ours - listed).abs().max() > 0.01


def test_03_at_the_zero_state_the_step_is_continuous_and_every_gradient_finite():
    cell = make_cell(4.0).requires_grad_()
    state, driven = torch.zeros(SIZE, requires_grad=True), randn(SIZE)
    assert_close(cell.step(state, driven), driven)
    assert_close(cell.step(state + 1e-12 * randn(SIZE, seed=1), driven), driven, atol=1e-11, rtol=0)
    assert_close(jacobians(cell, state.detach()), cell.eigenvalues().dense())
    cell.step(state, driven).sum().backward()
    leaves = [state, *(p for p in cell.parameters() if p.grad is not None)]
    assert len(leaves) > 2
    assert all(p.grad.isfinite().all() for p in leaves)


def test_03_a_silent_relu_makes_the_step_discontinuous():
    cell = make_cell(4.0, direction=directions.FromState(relu=True))
    silent = -torch.ones(SIZE)
    alive = silent.clone()
    alive[:2] = 1e-12
    zero = torch.zeros(SIZE)
    silent[:2] = 0
    assert_close(cell.step(silent, zero), cell.eigenvalues().mv(silent))  # the identity rotation
    assert (cell.step(alive, zero) - cell.step(silent, zero)).norm() > 0.1


def test_03_a_state_in_the_null_space_of_k_makes_the_step_discontinuous():
    cell = make_cell(4.0, projection=DENSE)
    key_weight = eye(SIZE)
    key_weight[0, 0] = 0
    set_weights(cell, key_weight, orthogonal(SIZE))
    zero = torch.zeros(SIZE)
    inside, change = eye(SIZE)[0], 1e-12 * eye(SIZE)[1]
    assert_close(cell.step(inside, zero), cell.eigenvalues().mv(inside))
    assert (cell.step(inside + change, zero) - cell.step(inside, zero)).norm() > 0.1


def test_04_a_complex_spectrum_is_real_blocks_and_at_beta_zero_equals_complex_arithmetic():
    cell = make_cell(0.0, spectra.S4DInv(dt_min=0.05, dt_max=0.5))
    entering, driven = run(cell, 30)
    eigenvalues = cell.eigenvalues().eigenvalues()
    z = torch.zeros(SIZE // 2, dtype=torch.complex128)
    for state, shift in zip(entering, driven, strict=True):
        assert_close(torch.view_as_complex(state.unflatten(-1, (-1, 2))), z)
        z = eigenvalues * z + torch.view_as_complex(shift.unflatten(-1, (-1, 2)))


def test_04_a_constant_spectrum_makes_the_step_linear_only_if_it_is_real():
    def additivity(cell):
        x, y, zero = *randn(2, SIZE), torch.zeros(SIZE)
        return (cell.step(x + y, zero) - cell.step(x, zero) - cell.step(y, zero)).norm()

    assert additivity(make_cell(1.0, spectra.Linspace(dt_min=0.5, dt_max=0.5))) < 1e-14
    cell = make_cell(1.0, spectra.S4DInv(dt_min=0.5, dt_max=0.5))
    cell.spectrum.log_frequency.zero_()  # one frequency for all: e^{-0.25 ± 0.5i}, SIZE/2 times
    assert cell.eigenvalues().real.unique().numel() == 1
    assert additivity(cell) > 0.1


def test_04_the_nearest_complex_number_of_a_two_by_two_block():
    (p, q), (r, s) = block = randn(2, 2)
    basis = torch.stack((eye(2), torch.tensor([[0.0, -1.0], [1.0, 0.0]]))).flatten(1).mT
    nearest = torch.linalg.lstsq(basis, block.flatten().unsqueeze(-1)).solution.squeeze(-1)
    assert_close(nearest, torch.stack(((p + s) / 2, (r - q) / 2)))


def test_05_the_exponential_wraps_and_cayley_stops_at_a_half_turn():
    key, value = unit_vectors(2, SIZE)
    sine = (1 - (key @ value) ** 2).sqrt()

    def angle(retraction, beta):
        trace = retraction(key, value, beta).dense().trace()  # n - 2 + 2 cos
        return ((trace - SIZE + 2) / 2).clamp(-1, 1).acos()

    half, whole = float(math.pi / sine), float(2 * math.pi / sine)
    assert_close(retractions.Exponential()(key, value, whole).dense(), eye(SIZE))
    assert angle(retractions.Exponential(), 1.5 * half) < angle(retractions.Exponential(), half)
    angles = [float(angle(retractions.Cayley(), beta)) for beta in (1.0, 10.0, 100.0, 1e4)]
    assert angles == sorted(angles)
    assert math.pi - 1e-3 < angles[-1] < math.pi


@pytest.mark.parametrize("dot", [-0.9, 0.0, 0.5])
def test_06_the_controlled_dot_product_needs_the_square_root_to_keep_the_key_a_unit_vector(dot):
    key, value = unit_vectors(2, SIZE)
    across = unit(key - (key @ value) * value)
    printed = (1 - dot**2) * across + dot * value  # eq:parametric_kv_dot
    ours = math.sqrt(1 - dot**2) * across + dot * value
    assert_close(ours.norm(), torch.ones(()))
    assert float(ours @ value) == pytest.approx(dot, abs=1e-14)
    assert float(printed.square().sum()) == pytest.approx(1 - dot**2 + dot**4)


# Spectra, gains, positions


def test_07_s4d_inv_has_no_logarithm_as_printed_and_counts_conjugates_here():
    n, k = SIZE, torch.arange(SIZE // 2)
    printed = n / 2 / math.pi * (n / 2 / (2 * k + 1) - 1)  # eq:s4d-inv with n = dim/2
    assert printed.min() < 0
    frequency = make_cell(0.0, spectra.S4DInv()).spectrum.log_frequency.exp()
    assert_close(frequency, n / math.pi * (n / (2 * k + 1) - 1))
    assert frequency.min() > 0


def test_07_linspace_is_one_decay_rate_with_step_sizes_even_in_the_logarithm():
    spectrum = spectra.Linspace(dt_min=1e-3, dt_max=1e-1, decay=0.5).build(SIZE)
    step_sizes = -spectrum().real.log() / 0.5  # λ̄ = exp(-e^{log_dt} e^{log_decay})
    expected = torch.logspace(-3, -1, SIZE)
    assert_close(step_sizes, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("spectrum", [spectra.Linspace(), spectra.S4DInv()], ids=repr)
def test_07_the_zoh_gain_is_what_a_held_input_adds_in_one_step_and_is_printed_with_the_wrong_sign(spectrum):
    built = spectrum.build(SIZE)
    decay, step_size = built.log_decay.exp(), built.log_dt.exp()
    frequency = torch.zeros_like(decay) if built.log_frequency is None else built.log_frequency.exp()
    rate = torch.complex(decay, -frequency)
    moments = step_size * torch.linspace(0, 1, 4001).unsqueeze(-1)
    integral = torch.trapezoid((-rate * moments).exp(), moments, dim=0)
    ours = built.zero_order_hold().eigenvalues().to(torch.complex128)
    assert_close(ours, integral, rtol=1e-6, atol=0)
    printed = ((-rate * step_size).exp() - 1) / rate  # eq:zoh_normalisation
    assert_close(printed, -ours)


def test_07_gains_of_negative_and_zero_eigenvalues_use_the_modulus():
    mixed = spectra.Negative(spectra.Sparse(spectra.Linspace(), 0.5), 0.5).build(8)
    eigenvalues = mixed().real
    assert (eigenvalues < 0).any()
    assert (eigenvalues == 0).any()
    for spec in (drive.EMA(), drive.LRU(), drive.ZOH()):
        gain = spec.evaluate(mixed).real
        assert (gain[eigenvalues == 0] == 1).all()
        assert ((gain > 0) & (gain <= 1)).all()
    assert_close(drive.EMA().evaluate(mixed).real, 1 - eigenvalues.abs())
    assert_close(drive.LRU().evaluate(mixed).real, (1 - eigenvalues.square()).sqrt())


def test_08_a_complex_model_is_rotary_positions_with_a_minus_sign():
    steps, decay, angle = 20, 0.9, 0.3
    inputs = torch.view_as_complex(randn(steps, 2))
    eigenvalue = decay * torch.exp(torch.tensor(1j * angle))
    state, minus, plus = (torch.zeros((), dtype=torch.complex128) for _ in range(3))
    for t, u in enumerate(inputs):
        turn = torch.exp(torch.tensor(1j * angle * t))
        state = eigenvalue * state + u
        minus = decay * minus + u / turn
        plus = decay * plus + u * turn  # eq:recurrence_fn_redo
        assert_close(turn * minus, state)
    assert (turn * plus - state).abs() > 0.1
    assert abs(plus.abs() - state.abs()) > 0.1  # no rotation of the read-out makes them equal


def test_08_the_printed_rotary_matrix_turns_the_other_way():
    cosine, sine = math.cos(0.3), math.sin(0.3)
    printed = torch.tensor([[cosine, sine], [-sine, cosine]])  # eq:rotary_embedding
    pair = randn(2)
    rotated = torch.view_as_complex(printed @ pair)
    assert_close(rotated, torch.view_as_complex(pair) * torch.exp(torch.tensor(-0.3j)))


def test_08_the_position_is_part_of_the_state():
    layer = ADPTNet.paper(4)
    x = randn(2, 7, 4)
    _, state = layer(x)
    reset = torch.zeros(2, 7, dtype=torch.bool)
    reset[1, 5] = True
    _, restarted = layer(x, reset=reset)
    assert state.position.tolist() == [7, 7]
    assert restarted.position.tolist() == [7, 2]


def test_09_low_param_is_singular_as_initialised():
    outer, inner = 8, 3
    block = torch.rand(inner, inner, generator=torch.Generator().manual_seed(0)) - 0.5
    weight = torch.kron(torch.ones(outer, outer), block)  # the low-rank part starts at zero
    assert torch.linalg.matrix_rank(weight) == inner < outer * inner
    state = torch.zeros(outer * inner)
    state[0], state[inner] = 1, -1  # cancels between two blocks
    assert (weight @ state).norm() < 1e-14


def test_09_low_param_matches_the_default_linear_layer_not_the_printed_one():
    n, outer, inner = 1024, 128, 8  # fig:pre_activation_distribution
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-8, 8, 2001).unsqueeze(-1)

    def density(variances):  # of an output of Gaussian inputs, over all outputs
        return (torch.exp(-(x**2) / (2 * variances)) / (2 * math.pi * variances).sqrt()).mean(-1)

    def divergence(p, q):
        return float(torch.trapezoid(p * (p / q).log(), x.squeeze(-1)))

    to_default, to_printed = [], []
    for _ in range(100):
        block = (2 * torch.rand(inner, inner, generator=generator) - 1) / math.sqrt(n)
        low_param = density(outer * block.square().sum(-1))
        to_default.append(divergence(low_param, density(torch.tensor([1 / 3]))))  # weights uniform in ±1/√n
        to_printed.append(divergence(low_param, density(torch.tensor([1.0]))))  # weights uniform in ±√(3/n)
    assert sum(to_default) / 100 == pytest.approx(0.005, abs=0.002)
    assert sum(to_printed) / 100 == pytest.approx(0.22, abs=0.02)


def test_09_the_kronecker_vec_trick_is_a_x_b_transposed_row_major():
    a, b = randn(3, 3), randn(4, 4, seed=1)
    x = randn(12, seed=2)
    expected = torch.kron(a, b) @ x
    assert_close((a @ x.reshape(3, 4) @ b.mT).reshape(12), expected)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):  # eq:vec_trick, unless both factors are of one size
        (b.mT @ x.reshape(3, 4)) @ a
    square = randn(3, 3, seed=3)
    printed = ((square.mT @ x[:9].reshape(3, 3)) @ a).reshape(9)
    assert (printed - torch.kron(a, square) @ x[:9]).norm() > 0.1


# Theory


def radius(lambda_bar: BlockDiagonal) -> Tensor:
    """Return the radius of the smallest disc centred on the real axis that holds the spectrum (centres from a grid)."""
    centres = torch.linspace(-1, 1, 2001).unsqueeze(-1)
    return (lambda_bar.eigenvalues() - centres).abs().amax(-1).min()


def condition(cell) -> float:
    """Return κ(K) + κ(V)."""
    parts = (cell.directions[0].key_projection, cell.directions[0].value_projection)
    return sum(float(torch.linalg.cond(part.dense(), 2)) for part in parts)


@pytest.mark.parametrize("retraction", all_retractions, ids=repr)
@pytest.mark.parametrize("projection", [DENSE, ORTHOGONAL], ids=repr)
@pytest.mark.parametrize(
    "spectrum",
    [WIDE, spectra.Negative(WIDE, 0.5), spectra.S4DInv(dt_min=0.05, dt_max=1.0)],
    ids=["positive", "negative", "complex"],
)
def test_10_the_jacobian_stays_within_the_exact_bound_of_the_conjugate(spectrum, projection, retraction):
    for seed, beta in enumerate((0.05, 0.5, 4.0)):
        cell = make_cell(beta, spectrum, projection, seed=seed, retraction=retraction)
        states = randn(50, SIZE, seed=seed)
        gap = norm(jacobians(cell, states) - conjugates(cell, states)).max()
        bound = 2 * radius(cell.eigenvalues()) * beta * condition(cell)
        assert 0 < gap <= bound


@pytest.mark.parametrize("retraction", all_retractions, ids=repr)
@pytest.mark.parametrize("beta", [0.125, 1.0])
def test_10_the_bound_is_attained_also_by_the_largest_exponent(beta, retraction):
    cell = make_extremal_cell(beta, retraction)
    lambda_bar = cell.eigenvalues().real
    bound = 2 * beta * (lambda_bar.max() - lambda_bar.min())
    state = eye(SIZE)[-1]
    assert_close(norm(jacobians(cell, state) - conjugates(cell, state)), bound)
    states = [state]
    for _ in range(100):
        states.append(cell.step(states[-1], torch.zeros_like(state)))
    assert_close(states[-1], lambda_bar[-1] ** 100 * state)
    found = exponents(jacobians(cell, torch.stack(states)), eye(SIZE))
    assert_close(found.max(), (lambda_bar.max() + bound).log())


@pytest.mark.parametrize("beta", [0.01, 0.3])
@pytest.mark.parametrize("seed", [0, 1])
def test_11_partial_sums_of_the_exponents_are_bounded_by_partial_sums_of_the_spectrum(beta, seed):
    cell = make_cell(beta, seed=seed)
    states, _ = run(cell, 200, seed=seed)
    states = states[1:]  # the first is zero
    found = exponents(jacobians(cell, states), orthogonal(SIZE)).sort(descending=True).values
    moduli = cell.eigenvalues().modulus().sort(descending=True).values
    bound = norm(jacobians(cell, states) - conjugates(cell, states)).max()  # along this trajectory, the tightest
    upper = (moduli + bound).log()
    assert (found.cumsum(0) <= upper.cumsum(0) + 1e-12).all()
    lower = (moduli - bound).clamp(min=0).log().flip(0)  # minus infinity where |λ̄| is below the bound
    assert (found.flip(0).cumsum(0) >= lower.cumsum(0) - 1e-12).all()


def test_11_one_by_one_the_mean_log_singular_values_keep_to_the_bound():
    cell = make_cell(0.01)
    states = run(cell, 200)[0][1:]
    moduli = cell.eigenvalues().modulus().sort(descending=True).values
    bound = 2 * 0.01 * (moduli.max() - moduli.min())
    means = torch.linalg.svdvals(jacobians(cell, states)).log().mean(0)
    assert ((moduli - bound).log() <= means).all()
    assert (means <= (moduli + bound).log()).all()


def ball(cell, driven: Tensor) -> Tensor:
    """Return the bound on the norm of the state before each step."""
    largest = cell.eigenvalues().modulus().max()
    radii = [torch.zeros(())]
    for shift in driven[:-1]:
        radii.append(largest * radii[-1] + shift.norm())
    return torch.stack(radii)


@pytest.mark.parametrize("relu", [False, True])
def test_12_the_state_stays_in_its_ball_even_where_the_dynamics_are_chaotic(relu):
    spectrum = spectra.Negative(spectra.Linspace(), 0.5)
    cell = make_cell(4.0, spectrum, direction=directions.FromState(relu=relu))
    states, driven = run(cell, 400)
    assert exponents(jacobians(cell, states[1:]), eye(SIZE)).max() > 0.1
    assert (states.norm(dim=-1) <= ball(cell, driven) * (1 + 1e-12)).all()


def test_12_the_taylor_form_has_no_such_ball():
    lambda_bar = torch.diag(torch.tensor([0.9, 0.1]))
    quarter_turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])  # V; K = I
    state = torch.ones(2)
    for _ in range(50):
        s = skew(unit(state), unit(quarter_turn @ state))
        state = (lambda_bar + 1.0 * (s @ lambda_bar - lambda_bar @ s)) @ state
    assert state.norm() > 100


def orthogonal_certificate(beta: float, lambda_bar: Tensor) -> float:
    """Return the bound on ‖J - M‖ for directions from the state with orthogonal K and V."""
    return float(2 * beta * (lambda_bar.max() - lambda_bar.min()))


def test_13_a_relu_before_orthogonal_k_and_v_breaks_the_bound():
    cell = make_cell(0.125, direction=directions.FromState(relu=True))
    state = -torch.ones(SIZE)
    state[:2] = 0.001 * unit_vectors(2).abs()
    lambda_bar = cell.eigenvalues().real
    gap = norm(jacobians(cell, state) - conjugates(cell, state))
    assert gap > 8 * 0.125 * lambda_bar.max()  # lemma:J_singular_vals, claimed to hold with ReLU
    assert gap > 10 * orthogonal_certificate(0.125, lambda_bar)


def breaking_directions() -> dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], Tensor]]:
    """Return directions with orthogonal K and V, each with a unit-scale state near which their derivative blows up."""
    key_weight, value_weight = orthogonal(SIZE, 1), orthogonal(SIZE, 2)
    ones, bias, small = torch.ones(SIZE), randn(SIZE, seed=3), 1e-3 * randn(SIZE, seed=4)
    turn = eye(SIZE)
    turn[:2, :2] = torch.tensor([[0.0, -1.0], [1.0, 0.0]])  # K; it differs from V = I in the first two dimensions only

    def controlled(x):
        key, value = unit(turn @ x), unit(x)
        return math.sqrt(0.75) * unit(key - (key @ value) * value) + 0.5 * value, value

    return {
        "layer norm": (
            lambda x: (unit(layer_norm(key_weight @ x, (SIZE,), eps=0)), unit(value_weight @ x)),
            key_weight.mT @ (ones + small),
        ),
        "bias": (
            lambda x: (unit(key_weight @ x + bias), unit(value_weight @ x)),
            key_weight.mT @ (small - bias),
        ),
        "controlled dot": (controlled, eye(SIZE)[-1] + small * (eye(SIZE)[0] + eye(SIZE)[1])),
        "singular K": (
            lambda x: (unit(x * (1 - eye(SIZE)[0])), unit(value_weight @ x)),
            eye(SIZE)[0] + small,
        ),
    }


@pytest.mark.parametrize("kind", ["layer norm", "bias", "controlled dot", "singular K"])
def test_13_other_changes_of_the_directions_break_the_bound_too(kind):
    direction, state = breaking_directions()[kind]
    lambda_bar = make_cell(0.125).eigenvalues()

    def conjugate(x):
        return RotatedConjugate([retractions.Exponential()(*direction(x), 0.125)], lambda_bar)

    gap = deviation(lambda x: conjugate(x).mv(x), conjugate(state).dense(), state)
    assert gap > 10 * orthogonal_certificate(0.125, lambda_bar.real)


def test_13_a_rotation_aware_drive_adds_a_jacobian_that_grows_with_the_input():
    key_weight, value_weight, state = orthogonal(SIZE, 1), orthogonal(SIZE, 2), unit_vectors(SIZE)
    lambda_bar = make_cell(0.125).eigenvalues()

    def gap(scale):
        shift = scale * unit_vectors(SIZE, seed=3)

        def step(x):  # eq:rotation_aware_normalisation
            rotation = retractions.Exponential()(unit(key_weight @ x), unit(value_weight @ x), 0.125)
            return rotation.apply(lambda_bar.mv(rotation.apply_transposed(x)) + shift)

        rotation = retractions.Exponential()(unit(key_weight @ state), unit(value_weight @ state), 0.125)
        return deviation(step, RotatedConjugate([rotation], lambda_bar).dense(), state)

    assert gap(0.0) <= orthogonal_certificate(0.125, lambda_bar.real)
    assert gap(100.0) > 10 * orthogonal_certificate(0.125, lambda_bar.real)
    assert float(gap(2000.0) / gap(1000.0)) == pytest.approx(2, abs=0.1)


def test_13_the_taylor_form_has_a_wider_bound_of_its_own():
    key_weight, value_weight = orthogonal(SIZE, 1), orthogonal(SIZE, 2)
    lambda_bar = make_cell(0.5).eigenvalues().real
    beta, diagonal = 0.5, torch.diag(lambda_bar)
    spread = lambda_bar.max() - lambda_bar.min()

    def taylor(x):
        s = skew(unit(key_weight @ x), unit(value_weight @ x))
        return diagonal + beta * (s @ diagonal - diagonal @ s)

    wider = 2 * beta * spread + beta * spread  # 2rβ(κ_K + κ_V) + 2rβ with r = spread / 2
    moduli = lambda_bar.sort(descending=True).values
    largest = 0.0
    for state in randn(50, SIZE):
        largest = max(largest, float(norm(taylor(state))))
        found = torch.linalg.svdvals(torch.func.jacfwd(lambda x: taylor(x) @ x)(state))
        assert ((found - moduli).abs() <= wider).all()
    assert lambda_bar.max() < largest <= lambda_bar.max() + beta * spread


def test_13_input_driven_directions_have_the_conjugate_itself_as_jacobian():
    key, value = unit_vectors(2, SIZE)  # of the input, so constant in the state
    conjugate = RotatedConjugate([retractions.Exponential()(key, value, 4.0)], make_cell(4.0).eigenvalues())
    assert deviation(conjugate.mv, conjugate.dense(), unit_vectors(SIZE, seed=1)) < 1e-14


def test_14_exponents_of_input_driven_directions_are_not_the_logarithms_of_the_eigenvalues():
    lambda_bar = torch.tensor([0.99, 0.7, 0.4, 0.1])
    steps, copies, transient = 300, 256, 50
    key, value = unit_vectors(2, steps, copies, 4)
    rotation = retractions.Exponential()(key, value, 4.0)
    products = RotatedConjugate([rotation], BlockDiagonal(lambda_bar)).dense()
    found = exponents(products, orthogonal(4).expand(copies, 4, 4), transient).mean(0)
    assert_close(found, torch.tensor([-0.53, -0.69, -0.95, -1.42]), atol=0.01, rtol=0)
    assert_close(found.sum(), lambda_bar.log().sum())
    assert ((lambda_bar.min().log() < found) & (found < lambda_bar.max().log())).all()


def test_14_mean_log_singular_values_are_another_quantity_with_the_same_sum():
    cell = make_cell(4.0, spectra.Negative(spectra.Linspace(), 0.5))
    matrices = jacobians(cell, run(cell, 300)[0][1:])
    found = exponents(matrices, orthogonal(SIZE))
    means = torch.linalg.svdvals(matrices).log().mean(0)
    assert_close(found.sum(), means.sum(), rtol=1e-9, atol=1e-9)
    assert means.max() > found.max() + 0.1


@pytest.mark.parametrize("relu", [False, True])
def test_15_the_step_is_homogeneous_and_the_jacobian_has_degree_zero(relu):
    cell = make_cell(1.0, direction=directions.FromState(relu=relu))
    states = randn(20, SIZE)
    zero = torch.zeros_like(states)
    assert_close(cell.step(1000 * states, zero), 1000 * cell.step(states, zero))
    assert_close(jacobians(cell, states / 1000), jacobians(cell, states))
    odd = (cell.step(-states, zero) + cell.step(states, zero)).abs().max() < 1e-12
    assert odd == (not relu)


def test_15_the_lipschitz_constant_of_the_jacobian_grows_as_the_state_shrinks():
    cell = make_cell(1.0)
    x, y = unit_vectors(2, SIZE)

    def quotient(scale):
        return norm(jacobians(cell, scale * x) - jacobians(cell, scale * y)) / (scale * (x - y)).norm()

    assert_close(quotient(1e-3), 1000 * quotient(1.0))


def test_15_the_derivative_term_does_not_act_on_the_state_itself():
    cell = make_cell(4.0)
    states = randn(20, SIZE)
    extra = jacobians(cell, states) - conjugates(cell, states)
    assert norm(extra).min() > 0.1
    assert (extra @ states.unsqueeze(-1)).abs().max() < 1e-13


@pytest.mark.parametrize("beta", [0.01, 0.5, 2.0])
def test_15_the_misalignment_is_bounded_by_the_chord_of_the_angle(beta):
    cell = make_cell(beta)
    states = randn(50, SIZE)
    key, value = cell.directions[0](states)
    angle = beta * (1 - (key * value).sum(-1).square()).sqrt()
    lambda_bar = cell.eigenvalues()
    spread = lambda_bar.real.max() - lambda_bar.real.min()
    misalignment = norm(conjugates(cell, states) - lambda_bar.dense())
    assert (misalignment <= spread * (2 * (angle / 2).sin().abs()).clamp(max=1) * (1 + 1e-12)).all()


def test_15_products_of_transitions_differ_in_proportion_to_the_step_error_not_to_its_power():
    beta, count = 0.01, 8
    cell = make_cell(beta, spectra.Linspace())
    states = run(cell, count + 1)[0][1:]
    lambda_bar = cell.eigenvalues().dense()
    matrices = jacobians(cell, states)
    error = norm(matrices - lambda_bar).max()
    largest = torch.maximum(norm(matrices).max(), norm(lambda_bar))
    difference = norm(torch.linalg.multi_dot(list(matrices.flip(0))) - torch.linalg.matrix_power(lambda_bar, count))
    assert difference <= count * largest ** (count - 1) * error
    spread = lambda_bar.diagonal().max() - lambda_bar.diagonal().min()
    assert difference > 100 * (spread + 8 * beta * lambda_bar.max()) ** count  # sec:conv_fwd_deer


# Solvers


@pytest.mark.parametrize(
    ("beta", "spectrum"), [(0.0, WIDE), (1.0, spectra.Linspace(dt_min=0.5, dt_max=0.5))], ids=["beta 0", "constant"]
)
@pytest.mark.parametrize("method", ["DEER", "Conv"])
def test_16_a_linear_cell_takes_one_iteration_when_the_residual_of_the_new_guess_is_tested(beta, spectrum, method):
    cell = make_cell(beta, spectrum)
    _, driven = run(cell, 40)
    transitions = {"DEER": lambda s: jacobians(cell, s), "Conv": lambda s: cell.eigenvalues().dense()}
    guesses = newton(cell.step, driven, transitions[method])
    assert len(guesses) - 1 == 1
    change = (guesses[1] - guesses[0]).abs().max()
    assert change > 0.1  # a stopping rule on the change would need a second iteration


def test_16_each_iteration_makes_at_least_one_more_step_exact_so_the_length_bounds_the_count():
    cell = make_cell(4.0, spectra.Negative(spectra.Linspace(), 0.5))
    entering, driven = run(cell, 25)
    exact = torch.cat((entering[1:], cell.step(entering[-1:], driven[-1:])))
    guesses = newton(cell.step, driven, lambda s: cell.eigenvalues().dense(), tolerance=0.0)
    assert len(guesses) - 1 <= len(driven)
    for i, guess in enumerate(guesses):
        assert_close(guess[:i], exact[:i])
    assert (guesses[3] - exact).abs().max() > 1e-3


def mean_conjugate(cell, states: Tensor) -> Tensor:
    return conjugates(cell, states).mean(0)


def test_17_the_mean_conjugate_is_a_symmetric_contraction():
    cell = make_cell(4.0, spectra.Negative(WIDE, 0.5))
    mean = mean_conjugate(cell, randn(100, SIZE))
    assert_close(mean, mean.mT)
    assert norm(mean) <= cell.eigenvalues().modulus().max()


def test_17_koopman_deer_needs_fewer_iterations_than_the_constant_transition():
    counts = {"Conv": 0, "Koopman": 0}
    for seed in range(3):
        cell = make_cell(4.0, spectra.Linspace(), DENSE, size=16, seed=seed, gain=drive.LRU())
        _, driven = run(cell, 192, seed=seed)
        transitions = {
            "Conv": lambda s, cell=cell: cell.eigenvalues().dense(),
            "Koopman": lambda s, cell=cell: mean_conjugate(cell, s),
        }
        for method, transition in transitions.items():
            counts[method] += len(newton(cell.step, driven, transition, tolerance=1e-7)) - 1
    assert counts["Koopman"] < 0.9 * counts["Conv"]


def test_17_the_mean_conjugate_of_a_complex_spectrum_is_not_normal():
    cell = make_cell(4.0, spectra.S4DInv(dt_min=0.05, dt_max=1.0))
    states = randn(100, SIZE)
    one, mean = conjugates(cell, states[0]), mean_conjugate(cell, states)
    assert norm(one @ one.mT - one.mT @ one) < 1e-14
    assert norm(mean @ mean.mT - mean.mT @ mean) > 1e-3


def test_18_the_coupled_cell_has_a_constant_two_by_two_transition_for_each_unit():
    lambda_bar, slow_decay, gain, feedback = 0.9 * torch.rand(4, SIZE, generator=torch.Generator().manual_seed(0))

    def step(state, driven):  # eq:coupled_ADPTNet at β = 0; x and w side by side
        fast, slow = state.chunk(2, -1)
        fast = lambda_bar * fast + gain * (driven[..., :SIZE] + feedback * slow)
        return torch.cat((fast, slow_decay * slow + (1 - slow_decay) * fast), -1)

    rest = 1 - slow_decay
    rows = [
        [torch.diag(lambda_bar), torch.diag(gain * feedback)],
        [torch.diag(rest * lambda_bar), torch.diag(slow_decay + rest * gain * feedback)],
    ]
    transition = torch.cat([torch.cat(row, 1) for row in rows])
    zero = torch.zeros(2 * SIZE)
    assert_close(torch.func.jacfwd(step)(randn(2 * SIZE), zero), transition)
    assert len(newton(step, randn(30, 2 * SIZE), lambda s: transition)) - 1 == 1


def test_19_word_problem_accuracy_is_over_the_last_ten_positions_so_two_free_ones_of_eight_are_a_quarter():
    task = WordProblem("S5", length=8)
    for length, expected in ((8, 0.25), (16, 0.0)):
        targets = task.batch(64, torch.Generator().manual_seed(0), length=length).targets
        predictions = (targets + 1) % task.vocabulary
        predictions[:, :2] = targets[:, :2]  # all that a diagonal linear model can solve
        scores = task.scores(one_hot(predictions, task.vocabulary), targets)
        assert scores["accuracy"] == expected
        assert scores["all_positions"] == 2 / length
        assert scores["last_token"] == 0


def test_19_softplus_gates_would_let_the_rg_lru_forget_without_limit():
    decay, constant = 0.9, 8.0
    inputs = torch.linspace(-20, 200, 100)
    gated = decay ** (constant * sigmoid(inputs))
    assert gated.min() >= decay**constant
    assert (decay ** (constant * softplus(inputs))).min() < 1e-50


def test_20_the_norm_of_b_in_the_proof_of_lemma_1_exceeds_the_largest_eigenvalue():
    key, value = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    key, beta = unit(key), 4.0
    lambda_bar = torch.tensor([0.9, 1e-6, 1e-6])
    inverse = eye(3) - beta / 2 * skew(key, value)
    b = torch.linalg.solve(inverse, torch.diag(lambda_bar) @ inverse)  # eq:sub_B
    ratio = float(norm(b) / lambda_bar.max())
    spread = math.sqrt(1 + beta**2 / 4)  # condition number of I - βS/2
    assert ratio == pytest.approx((spread + 1 / spread) / 2, rel=1e-4)  # 1.342


def test_20_the_second_half_of_the_derivative_of_m_has_a_minus_sign():
    key, value, change = unit_vectors(3, SIZE)
    beta, lambda_bar = 1.0, torch.diag(torch.linspace(0.1, 0.9, SIZE))
    cayley = retractions.Cayley()
    rotation, derivative = torch.func.jvp(lambda x: cayley(key, x, beta).dense(), (value,), (change,))
    a = torch.linalg.inv(eye(SIZE) - beta / 2 * skew(key, value))  # eq:sub_A
    b = a @ lambda_bar @ torch.linalg.inv(a)  # eq:sub_B
    printed = beta * a @ b.mT @ skew(key, change) @ a.mT  # eq:simple_dQTdx
    assert_close(rotation @ lambda_bar @ derivative.mT, -printed)


def test_20_eigenvalues_of_an_orthogonal_matrix_lie_on_the_unit_circle_not_at_plus_and_minus_one():
    eigenvalues = torch.linalg.eigvals(orthogonal(SIZE))
    assert_close(eigenvalues.abs(), torch.ones(SIZE))
    assert eigenvalues.imag.abs().max() > 0.1


def test_20_weyls_inequality_is_attained():
    cell = make_extremal_cell(0.125)
    state = eye(SIZE)[-1]
    matrix, conjugate = jacobians(cell, state), conjugates(cell, state)
    shift = torch.linalg.svdvals(matrix)[0] - torch.linalg.svdvals(conjugate)[0]
    assert_close(shift, norm(matrix - conjugate))


def test_20_products_of_jacobians_need_the_power_of_the_exponent():
    jacobian = torch.diag(torch.tensor([1.1, 0.5]))
    largest = math.log(1.1)
    grown = [float(norm(torch.linalg.matrix_power(jacobian, k))) for k in (1, 10, 100)]
    assert grown == pytest.approx([math.exp(largest * k) for k in (1, 10, 100)])
    assert grown[-1] > 1000 * math.exp(largest)  # no constant a makes a e^α a bound for all k (eq:DEER_As)


def test_every_entry_of_the_page_names_a_test_of_its_number():
    page = (Path(__file__).parents[3] / "docs" / "explanation" / "deviations.md").read_text(encoding="utf-8")
    entries = re.findall(r"^\*\*(\d+)\. .*?(?=^\*\*\d+\. |\Z)", page, re.MULTILINE | re.DOTALL)
    named = re.findall(r"`(test_(\d\d)_\w+)`", page)
    assert [int(number) for number in entries] == [int(number) for _, number in named] == list(range(1, 22))
    assert all(name in globals() for name, _ in named)


def _state_tracking():
    """Return the paper's accuracies at 1, 2 and 4 times the training length, by spectrum, sparsity, β and sign."""
    rows = load_results()["table:s5_8_results"].numbers["rows"]
    return {tuple(row[:4]): row[4:] for row in rows}


def test_21_the_paper_has_no_pair_at_beta_one_where_sparsity_helps():
    found = _state_tracking()
    pairs = [
        (accuracies[0], found[spectrum, "75%", 1, sign][0])
        for (spectrum, sparsity, beta, sign), accuracies in found.items()
        if sparsity == "0%" and beta == 1 and (spectrum, "75%", 1, sign) in found
    ]
    assert pairs == [(64.3, 55.9), (56.2, 53.7)]


def test_21_in_the_paper_linspace_extrapolates_better_to_twice_the_length_and_worse_to_four_times():
    best = {
        name: [max(a[place] for key, a in _state_tracking().items() if key[0] == name) for place in (1, 2)]
        for name in ("Linspace", "S4D-Real")
    }
    assert best == {"Linspace": [62.4, 8.7], "S4D-Real": [60.3, 23.0]}
