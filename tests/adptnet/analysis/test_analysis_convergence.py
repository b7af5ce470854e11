"""Local errors, their sum, the quadratic basin, entropy, cost and timescales."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from adptnet import ADPTNet, cells, conjugates, directions, projections, retractions, spectra
from adptnet.analysis import (
    accumulated_error,
    certificate,
    cost,
    eigenvalue_spread,
    jacobian_lipschitz,
    jacobians,
    key_value_statistics,
    local_errors,
    lyapunov_exponents,
    materialize_conjugate,
    memory_horizon,
    offdiagonal_entropy,
    overshoot,
    propagators,
    quadratic_basin,
)
from adptnet.errors import IncompatibleError, InputError

WIDE = spectra.Linspace(dt_min=0.05, dt_max=3.0)


def frozen(beta=0.5, size=6, **axes):
    return ADPTNet.paper(size, beta=beta, **{"spectrum": WIDE, **axes}).requires_grad_(False)


# Local errors


@pytest.mark.parametrize("retraction", [retractions.Exponential(), retractions.Cayley()], ids=repr)
@pytest.mark.parametrize("beta", [0.05, 0.5, 4.0])
def test_the_local_errors_keep_to_the_bounds_of_the_table_and_to_tighter_ones(beta, retraction):
    layer, x = frozen(beta, projection=projections.Orthogonal(), retraction=retraction), torch.randn(2, 40, 6)
    found, held = local_errors(layer, x), certificate(layer)
    spread = eigenvalue_spread(layer)
    angle = key_value_statistics(layer, x).angle[..., 0, 0]
    assert found.similarity.shape == (2, 40)
    assert (found.similarity <= spread * (2 * (angle / 2).sin().abs()).clamp(max=1) + 1e-12).all()
    assert (found.derivative <= held.deviation + 1e-12).all()
    assert (found.derivative <= 8 * beta * float(held.upper[0])).all()  # table:error_summary
    assert (found.conv_to_deer <= (found.similarity + found.derivative) * found.state_norm + 1e-12).all()
    assert (found.forward_to_quasi <= found.derivative_diagonal * found.state_norm + 1e-12).all()
    assert (found.conv_to_quasi <= (found.forward + found.derivative_diagonal) * found.state_norm + 1e-12).all()


def test_the_derivative_term_vanishes_on_the_state():
    """The paper bounds the derivative term ε^der = ‖J - M‖ by 8βλ̄_max; but (J - M) s is zero for the state s itself."""
    layer, x = frozen(4.0), torch.randn(60, 6)
    found = local_errors(layer, x)
    assert float(found.derivative[1:].min()) > 0.01
    assert float(found.derivative_to_state.max()) < 1e-12
    matrices, states = jacobians(layer, x), torch.cat((torch.zeros(1, 6), layer.solve(x).states[:-1]))
    gap = layer.cell.eigenvalues().dense() - matrices
    assert_close(found.conv_to_deer, (gap @ states.unsqueeze(-1)).squeeze(-1).norm(dim=-1))


def test_complex_pairs_keep_the_nearest_complex_number_of_each_block():
    layer = frozen(0.5, spectrum=spectra.S4DInv(dt_min=0.05, dt_max=1.0))
    found = local_errors(layer, torch.randn(30, 6))
    assert float(found.forward[0]) < 1e-12  # at the zero state M = Λ̄, which is block diagonal already
    assert float(found.diagonal[0]) < 1e-12
    with pytest.raises(IncompatibleError, match="has no M"):
        local_errors(nn.GRUCell(3, 4), torch.randn(30, 3))


@pytest.mark.parametrize("growth", [0.0, 0.7, 1.0, 1.1])
def test_the_accumulated_error_is_the_sum_of_the_paper(growth):
    local = torch.rand(3, 9)
    along, total = accumulated_error(local, growth)
    steps = local.shape[-1]
    factors = [sum(growth**j for j in range(steps - k)) for k in range(steps)]  # (σ̃^{T-k} - 1)/(σ̃ - 1), also at σ̃ = 1
    assert_close(total, (local * torch.tensor(factors)).sum(-1))  # eq:total_approx_error
    assert_close(along[:, 2], growth**2 * local[:, 0] + growth * local[:, 1] + local[:, 2])  # eq:error_per_timestep
    with pytest.raises(InputError, match="growth"):
        accumulated_error(local, math.nan)
    with pytest.raises(InputError, match=r"growth=inf.*certificate\(layer, inputs\)"):
        accumulated_error(local, math.inf)  # the value of certificate(layer).lipschitz without a certificate
    with pytest.raises(InputError, match="at least one step"):
        accumulated_error(local[:, :0], growth)


# The basin


def test_the_quadratic_basin_is_the_formula_and_its_limits():
    assert quadratic_basin(-0.1, 50, 3.0, 2.0) == pytest.approx(2 / 12 * (math.expm1(-0.1) / math.expm1(-5)) ** 2)
    assert quadratic_basin(0.0, 50, 3.0) == pytest.approx(2 / (3 * 50**2))
    assert quadratic_basin(1e-9, 50, 3.0) == pytest.approx(quadratic_basin(0.0, 50, 3.0), rel=1e-6)
    assert quadratic_basin(0.5, 100_000, 3.0) == 0.0
    assert quadratic_basin(0.5, 100, 0.0) == math.inf
    with pytest.raises(InputError, match="overshoot"):
        quadratic_basin(0.1, 10, 1.0, 0.5)


def test_the_largest_exponent_may_be_a_tensor_of_one_number_and_no_more():
    layer, x = frozen(), torch.randn(2, 20, 6)
    largest = lyapunov_exponents(layer, x).largest
    assert quadratic_basin(largest.max(), 20, 1.0) == quadratic_basin(float(largest.max()), 20, 1.0)
    assert overshoot(layer, x, largest.max()) == overshoot(layer, x, float(largest.max()))
    for wrong, words in ((largest, r"largest.max\(\)"), (math.nan, "finite"), (-math.inf, "finite")):
        with pytest.raises(InputError, match=words):
            quadratic_basin(wrong, 20, 1.0)
        with pytest.raises(InputError, match=words):
            overshoot(layer, x, wrong)
    with pytest.raises(InputError, match="starts=0"):
        overshoot(layer, x, 0.0, starts=0)


def change(cell, x, direction):
    """Return ‖dJ/dx [direction]‖ at unit x, for a unit direction."""
    x, direction = x / x.norm(), direction / direction.norm()
    silent = torch.zeros_like(x)
    eager = torch.func.jacfwd(lambda y: cell.step(y, silent))
    return torch.linalg.matrix_norm(torch.func.jvp(eager, (x,), (direction,))[1], 2)


turning = pytest.mark.parametrize(
    "conjugate", [conjugates.Exact(), conjugates.Product(2), conjugates.Taylor()], ids=repr
)
retracting = pytest.mark.parametrize("retraction", [retractions.Exponential(), retractions.Cayley()], ids=repr)


@turning
@retracting
@pytest.mark.parametrize("beta", [0.02, 2.0])
def test_the_jacobian_changes_no_faster_than_its_lipschitz_constant(conjugate, retraction, beta):
    layer = frozen(beta, 4, conjugate=conjugate, retraction=retraction, projection=projections.Orthogonal())
    bound = jacobian_lipschitz(layer, 1.0)
    assert jacobian_lipschitz(layer, 0.1) == pytest.approx(10 * bound)
    found = torch.func.vmap(lambda x, d: change(layer.cell, x, d))(*torch.randn(2, 500, 4))
    assert 0.02 * bound < float(found.max()) <= bound


@pytest.mark.slow
@turning
@retracting
@pytest.mark.parametrize("beta", [0.02, 0.3, 2.0])
@pytest.mark.parametrize("distance", [1e-4, 0.3])
def test_an_adversary_does_not_make_the_jacobian_change_faster(conjugate, retraction, beta, distance):
    """Run gradient ascent on ‖J(x) - J(y)‖ / ‖x - y‖ from 32 pairs of states."""
    layer = frozen(beta, 4, conjugate=conjugate, retraction=retraction)
    bound = jacobian_lipschitz(layer, 1 - distance)  # distance of the segment from zero
    state, direction = (torch.randn(32, 4, requires_grad=True) for _ in range(2))
    optimiser = torch.optim.Adam((state, direction), lr=0.05, maximize=True)
    silent, largest = torch.zeros(64, 4), []
    for _ in range(60):
        optimiser.zero_grad()
        x, away = (part / part.norm(dim=-1, keepdim=True) for part in (state, direction))
        here, there = layer.cell.jacobian(torch.cat((x, x + distance * away)), silent).chunk(2)
        found = torch.linalg.matrix_norm(there - here, 2) / distance
        found.log().sum().backward()
        optimiser.step()
        largest.append(found.max().item())
    assert largest[0] < max(largest) <= bound


def test_there_is_no_lipschitz_constant_at_zero_or_without_a_certificate():
    with pytest.raises(InputError, match="ρ > 0"):
        jacobian_lipschitz(frozen(), 0.0)
    with pytest.raises(IncompatibleError, match="ReLU"):
        jacobian_lipschitz(frozen(direction=directions.FromState(relu=True)), 1.0)
    assert jacobian_lipschitz(frozen(0.0), 1.0) == 0


def test_the_overshoot_bounds_every_product_it_measured():
    layer, x = frozen(2.0), torch.randn(2, 24, 6)
    largest = float(lyapunov_exponents(layer, x, transient=0).largest.max())
    found = overshoot(layer, x, largest, starts=24)
    for span in (1, 3, 24):
        norms = torch.linalg.matrix_norm(propagators(layer, x, span=span), 2)
        assert float(norms.max()) <= found * math.exp(largest * span) * (1 + 1e-12)
    assert found >= overshoot(layer, x, largest, starts=4) >= 1


# Entropy


def test_the_entropy_is_that_of_its_definition():
    matrix = torch.randn(5, 5)
    squares = [float(matrix[i, j] ** 2) for i in range(5) for j in range(5) if i != j]
    shares = [s / sum(squares) for s in squares]
    assert float(offdiagonal_entropy(matrix)) == pytest.approx(-sum(p * math.log(p) for p in shares) / math.log(20))
    assert float(offdiagonal_entropy(torch.ones(4, 4) + 9 * torch.eye(4))) == pytest.approx(1)
    single = torch.eye(4)
    single[0, 1] = -3
    assert float(offdiagonal_entropy(single)) == 0
    assert offdiagonal_entropy(torch.eye(4)).isnan()
    assert offdiagonal_entropy(torch.randn(2, 3, 5, 5)).shape == (2, 3)
    with pytest.raises(InputError, match="square"):
        offdiagonal_entropy(torch.ones(3, 4))
    with pytest.raises(InputError, match="at least two"):
        offdiagonal_entropy(torch.ones(1, 1))


def test_complex_pairs_count_as_one_modulus_each():
    numbers = torch.randn(3, 3, dtype=torch.complex128)
    blocks = torch.stack((numbers.real, -numbers.imag, numbers.imag, numbers.real), -1).unflatten(-1, (2, 2))
    real = blocks.transpose(1, 2).reshape(6, 6)
    assert_close(offdiagonal_entropy(real, pairs=True), offdiagonal_entropy(numbers.abs()))
    with pytest.raises(InputError, match="size 5 is not made of pairs"):
        offdiagonal_entropy(torch.eye(5), pairs=True)


def test_m_is_materialized_at_the_state_that_enters_the_step():
    layer, x = frozen(1.0), torch.randn(2, 9, 6)
    states = layer.solve(x).states
    assert_close(materialize_conjugate(layer, x), layer.cell.conjugate(states[:, -2], x[:, 0]).dense())
    assert_close(materialize_conjugate(layer, x[0], step=0), layer.cell.eigenvalues().dense())
    with pytest.raises(InputError, match="9 steps"):
        materialize_conjugate(layer, x, step=9)
    with pytest.raises(IncompatibleError, match="has no M"):
        materialize_conjugate(nn.GRUCell(6, 4), x)


# Timescales and directions


def test_spread_and_horizon():
    assert eigenvalue_spread(frozen()) == pytest.approx(math.exp(-0.025) - math.exp(-1.5))
    assert_close(memory_horizon(torch.tensor([-0.5, -0.01, 0.0, 0.2])), torch.tensor([2.0, 100.0, math.inf, math.inf]))
    assert float(memory_horizon(-0.1, left=0.01)) == pytest.approx(math.log(100) / 0.1)
    with pytest.raises(InputError, match="left"):
        memory_horizon(-0.1, left=2.0)


def test_key_and_value_along_a_trajectory():
    layer = frozen(1.0, direction=directions.FromState(dot=0.5))
    found = key_value_statistics(layer, torch.randn(2, 20, 6))
    assert found.dot.shape == (2, 20, 1, 1)
    assert_close(found.dot[:, 1:], torch.full((2, 19, 1, 1), 0.5))  # the first state is zero
    assert_close(found.angle[:, 1:], torch.full((2, 19, 1, 1), math.sqrt(0.75)))
    assert "k·v" in str(found)
    several = frozen((0.1, 1.0), conjugate=conjugates.Product(3), direction=directions.FromState(heads=2))
    assert key_value_statistics(several, torch.randn(20, 6)).angle.shape == (1, 20, 3, 2)
    with pytest.raises(IncompatibleError, match="does not rotate"):
        key_value_statistics(frozen(0, conjugate=conjugates.Diagonal()), torch.randn(20, 6))


# Cost


def test_the_cost_of_a_step_is_two_projections_and_a_little():
    for size in (32, 64):
        found = cost(frozen(size=size))
        assert 2 * size**2 <= found.step <= 2 * size**2 + 60 * size
        assert found.prepare == pytest.approx(size**2, abs=4 * size)
        assert found.conjugate_diagonal <= 30 * size  # table:conv_forward_flops has 20 D
        assert found.jacobian >= found.jacobian_diagonal >= found.step / 2
    few = cost(frozen(size=64, projection=projections.LowParam(factors=(8, 8), rank=2)))
    assert few.step < found.step / 2
    assert "step" in str(few)


def test_the_cost_of_other_cells():
    found = cost(nn.GRUCell(8, 16))
    assert found.step == pytest.approx(3 * 16 * (8 + 16), rel=0.15)
    assert found.conjugate_diagonal is None
    assert cost(cells.TanhRNN(16).build()).step == 16**2
