"""Certificates: they hold, are attained, are never looser than the paper's, and explain why there is none."""

import math

import pytest
import torch
from torch import eye
from torch.testing import assert_close

from adptnet import ADPTNet, CoupledADPTNet, Recurrent, cells, conjugates, directions, projections, retractions, spectra
from adptnet.analysis import (
    certificate,
    deviation_bounds,
    jacobians,
    lyapunov_exponents,
    mean_log_singular_values,
    singular_value_shifts,
)
from adptnet.analysis.head_constants import compute_head_constants, enclosing_radius, joint_condition_number
from adptnet.analysis.trajectory import make_trajectory
from adptnet.errors import IncompatibleError, InputError
from adptnet.recurrence.spectra import BlockDiagonal
from support.members import adpt_cell, all_retractions, build, legal, name_of

ROUNDING = 1 + 1e-9
WIDE = spectra.Linspace(dt_min=0.05, dt_max=3.0)
kinds_of_spectrum = [WIDE, spectra.Linspace(), spectra.Negative(WIDE, 0.5), spectra.S4DInv(dt_min=0.05, dt_max=1.0)]


def norm(matrix):
    return torch.linalg.matrix_norm(matrix, 2)


def deviation(cell, states):
    """Return ‖J - M‖ at each state."""
    silent = torch.zeros_like(states)
    return norm(cell.jacobian(states, silent) - cell.conjugate(states, silent).dense())


def ill_conditioned(size):
    """Return a matrix with a random condition number up to ten thousand."""
    left, right = torch.linalg.qr(torch.randn(2, size, size)).Q
    return left @ torch.diag(torch.logspace(0, -4 * float(torch.rand(())), size)) @ right


def random_cell(seed, size=6):
    torch.manual_seed(seed)
    beta = float(10 ** (3 * torch.rand(()) - 2))
    axes = {"retraction": all_retractions[seed % 2], "spectrum": kinds_of_spectrum[seed // 2 % 4]}
    kind = [projections.Dense(), projections.Orthogonal(), projections.Dense()][seed // 8 % 3]
    cell = cells.ADPTSpec(size, beta=beta, projection=kind, **axes).build().requires_grad_(False)
    if seed // 8 % 3 == 2:
        for part in (cell.directions[0].key_projection, cell.directions[0].value_projection):
            part.weight.copy_(ill_conditioned(size))
    return cell


def random_states(cell, count):
    """Return random states, and states close to where K or V shrink most."""
    states = torch.randn(count, cell.state_size)
    for i, part in enumerate((cell.directions[0].key_projection, cell.directions[0].value_projection)):
        worst = torch.linalg.svd(part.dense()).Vh[-1]
        states[i::4] = worst + 10 ** (-4 * torch.rand(len(states[i::4]), 1)) * states[i::4]
    return states


@torch.no_grad()
def check_many(seeds, states_each):
    worst, pairs = 0.0, 0
    for seed in seeds:
        cell = random_cell(seed)
        held, states = certificate(cell), random_states(cell, states_each)
        matrices = cell.jacobian(states, torch.zeros_like(states))
        gaps = norm(matrices - cell.conjugate(states, torch.zeros_like(states)).dense())
        local = deviation_bounds(cell, states)
        assert (gaps <= local * ROUNDING).all()
        assert (local <= held.deviation * ROUNDING).all()
        assert held.deviation <= held.paper * ROUNDING
        weights = (cell.directions[0].key_projection.dense(), cell.directions[0].value_projection.dense())
        looser = 2 * enclosing_radius(cell.spectrum()) * cell.spec.beta * sum(map(torch.linalg.cond, weights))
        assert held.deviation <= float(looser) * ROUNDING
        values = torch.linalg.svdvals(matrices)
        assert (values <= held.upper * ROUNDING).all()
        assert (values >= held.lower / ROUNDING).all()
        worst, pairs = max(worst, float(gaps.max()) / held.deviation), pairs + states_each
    return worst, pairs


def test_the_bounds_hold_for_ten_thousand_random_cells_states_and_beta():
    worst, pairs = check_many(range(96), 108)
    assert pairs >= 10_000
    assert 0.2 < worst <= ROUNDING


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("thousand", range(10))
def test_the_bounds_hold_for_ten_thousand_random_cells(thousand):
    worst, _ = check_many(range(1000 * thousand, 1000 * (thousand + 1)), 8)
    assert 0.2 < worst <= ROUNDING


def attaining_layer(beta, retraction, size=6):
    """Return the layer that attains the bound at the state e_n: V = I, K = diag(-1, 1, …), λ̄ in descending order."""
    layer = ADPTNet.paper(size, beta=beta, retraction=retraction, spectrum=WIDE).requires_grad_(False)
    key = eye(size)
    key[0, 0] = -1
    layer.cell.directions[0].key_projection.weight.copy_(key)
    layer.cell.directions[0].value_projection.weight.copy_(eye(size))
    return layer


@pytest.mark.parametrize("retraction", all_retractions, ids=repr)
@pytest.mark.parametrize("beta", [0.01, 0.125, 1.0])
def test_the_bound_is_attained_also_by_the_largest_exponent(beta, retraction):
    layer = attaining_layer(beta, retraction)
    held, start = certificate(layer), eye(6)[-1]
    assert_close(deviation(layer.cell, start).item(), held.deviation, rtol=1e-12, atol=0)
    found = lyapunov_exponents(layer, state=start, steps=450, transient=300)  # beyond that λ̄_n^t underflows
    assert_close(float(found.largest), held.exponents[1], atol=1e-12, rtol=0)
    moduli = layer.cell.eigenvalues().real
    assert_close(held.exponents[1], float((moduli.max() + 2 * beta * (moduli.max() - moduli.min())).log()))


def ascend(objective, *variables, steps, rate):
    """Return the largest value that gradient ascent finds; each row of the variables is a separate attempt."""
    optimiser = torch.optim.Adam(variables, lr=rate, maximize=True)
    best = 0.0
    for _ in range(steps):
        optimiser.zero_grad()
        values = objective()
        values.log().sum().backward()
        optimiser.step()
        best = max(best, values.max().item())
    return max(best, objective().max().item())


def gaps(retraction, x, key, value, eigen, beta):
    """Return ‖J - M‖ by automatic differentiation; each row has its own weights, Λ̄ (dense) and β."""

    def rotate(x, key, value, beta):
        return retraction(directions.unit(key @ x), directions.unit(value @ x), beta)

    def gap(x, key, value, eigen, beta):
        def step(x):
            rotation = rotate(x, key, value, beta)
            return rotation.apply(eigen @ rotation.apply_transposed(x))

        rotation = rotate(x, key, value, beta).dense()
        return torch.func.jacrev(step)(x) - rotation @ eigen @ rotation.mT

    return norm(torch.func.vmap(gap)(x, key, value, eigen, beta))


def attack_weights(retraction, attempts, steps):
    """Run gradient ascent on ‖J - M‖ / bound over K, V, Λ̄ and x; half start at random, half near the example."""
    size, near = 4, (torch.arange(attempts) % 2).reshape(-1, 1, 1)
    beta = 10 ** (3 * torch.rand(attempts, 1) - 2)
    signs = torch.tensor([-1.0, 1, 1, 1])
    key, value = (
        near * torch.diag(s) + torch.randn(attempts, size, size) * (1 - 0.9 * near) for s in (signs, signs.abs())
    )
    raw = torch.linspace(1, -1, size) * 2 + 0.1 * torch.randn(attempts, size)
    x = near.squeeze(-1) * 2 * eye(size)[-1] + 0.3 * torch.randn(attempts, size)
    variables = [v.requires_grad_() for v in (key, value, raw, x)]

    def objective():
        eigenvalues = raw.tanh()
        conditions = sum(s[..., 0] / s[..., -1] for s in map(torch.linalg.svdvals, (key, value)))
        bounds = beta.squeeze(-1) * (eigenvalues.amax(-1) - eigenvalues.amin(-1)) * conditions
        return gaps(retraction, x, key, value, torch.diag_embed(eigenvalues), beta) / bounds

    return ascend(objective, *variables, steps=steps, rate=0.02)


def attack_states(retraction, cells, steps):
    """Run gradient ascent on ‖J - M‖ over the state alone, eight per cell, against the certificates of the weights."""
    x = torch.cat([random_states(cell, 8) for cell in cells]).requires_grad_()
    every = {
        "key": [cell.directions[0].key_projection.dense() for cell in cells],
        "value": [cell.directions[0].value_projection.dense() for cell in cells],
        "eigen": [cell.spectrum().dense() for cell in cells],
        "beta": [torch.tensor([cell.spec.beta]) for cell in cells],
    }
    given = {name: torch.stack(parts).repeat_interleave(8, 0) for name, parts in every.items()}
    bounds = torch.tensor([certificate(cell).deviation for cell in cells]).repeat_interleave(8)
    return ascend(
        lambda: gaps(retraction, x / x.norm(dim=-1, keepdim=True), **given) / bounds, x, steps=steps, rate=0.02
    )


def attack_state(cell, steps):
    """Run gradient ascent over the state of one cell of any form, with its own Jacobians."""
    x = random_states(cell, 8).requires_grad_()
    largest = ascend(lambda: deviation(cell, x / x.norm(dim=-1, keepdim=True)), x, steps=steps, rate=0.02)
    return largest / certificate(cell).deviation


@pytest.mark.parametrize("place", [0, 1], ids=lambda place: repr(all_retractions[place]))
def test_an_adversary_comes_close_to_the_bound_but_not_past_it(place):
    retraction = all_retractions[place]
    assert 0.9 < attack_weights(retraction, 6, 60) <= ROUNDING
    assert attack_states(retraction, [random_cell(seed) for seed in range(place, 16, 2)], 10) <= ROUNDING


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", [0, 1], ids=lambda place: repr(all_retractions[place]))
def test_an_adversary_with_time_does_not_pass_the_bound(place):
    retraction = all_retractions[place]
    assert 0.99 < attack_weights(retraction, 32, 1500) <= ROUNDING
    assert 0.5 < attack_states(retraction, [random_cell(seed) for seed in range(place, 96, 2)], 300) <= ROUNDING


# The constants of the bound


def test_the_enclosing_radius_is_that_of_a_fine_grid():
    assert enclosing_radius(BlockDiagonal(torch.tensor([0.9, -0.3, 0.1]))) == pytest.approx(0.6)
    for _ in range(8):
        real, imag = (torch.randn(2, 3).repeat_interleave(2, -1)).unbind()
        blocks = BlockDiagonal(real, imag)
        centres = torch.linspace(-4, 4, 80_001).unsqueeze(-1)
        grid = (blocks.eigenvalues() - centres).abs().amax(-1).min()
        assert enclosing_radius(blocks) == pytest.approx(float(grid), abs=1e-4)
        assert enclosing_radius(blocks) <= float(grid) + 1e-12


def test_the_joint_condition_number_is_above_every_state_and_below_the_sum_of_condition_numbers():
    ratios = []
    for seed in range(60):
        torch.manual_seed(seed)
        key, value = (ill_conditioned(5) for _ in range(2)) if seed % 2 else torch.randn(2, 5, 5)
        found = joint_condition_number(key, value)
        states = torch.randn(2000, 5)
        for i, matrix in enumerate((key, value)):
            states[i::3] = (
                torch.linalg.svd(matrix).Vh[-1] + 10 ** (-5 * torch.rand(len(states[i::3]), 1)) * states[i::3]
            )
        each = [norm(m) * states.norm(dim=-1) / (states @ m.mT).norm(dim=-1) for m in (key, value)]
        reached = float((each[0] + each[1]).max())
        assert reached <= found * ROUNDING
        assert found <= float(torch.linalg.cond(key) + torch.linalg.cond(value)) * ROUNDING
        ratios.append(reached / found)
    assert max(ratios) > 0.99  # it is not only valid but nearly attained
    assert joint_condition_number(eye(5), torch.linalg.qr(torch.randn(5, 5)).Q) == pytest.approx(2, abs=1e-12)
    assert joint_condition_number(torch.diag(torch.tensor([1.0, 0.01])), eye(2)) == pytest.approx(101, rel=0.01)
    assert joint_condition_number(torch.diag(torch.tensor([1.0, 0.0])), eye(2)) == math.inf


@pytest.mark.parametrize("condition", [1e6, 1e8, 1e10, 1e13])
def test_the_joint_condition_number_holds_to_the_end_of_floating_point(condition):
    for seed in range(4):
        torch.manual_seed(seed)
        left, right = torch.linalg.qr(torch.randn(2, 5, 5)).Q
        key = left @ torch.diag(torch.logspace(0, -math.log10(condition), 5)) @ right
        for value in (eye(5), torch.linalg.qr(torch.randn(5, 5)).Q @ key):  # the second has the same worst state
            found = joint_condition_number(key, value)
            worst = torch.linalg.svd(key).Vh[-1]
            states = worst + 10 ** (-16 * torch.rand(500, 1)) * torch.randn(500, 5)
            each = [norm(m) * states.norm(dim=-1) / (states @ m.mT).norm(dim=-1) for m in (key, value)]
            assert float((each[0] + each[1]).max()) <= found * ROUNDING
            assert found <= float(torch.linalg.cond(key) + torch.linalg.cond(value)) * (1 + 1e-14 * condition)


# Every layer


@pytest.mark.parametrize("axes", legal, ids=name_of)
@torch.no_grad()
def test_certificates_hold_for_every_layer_and_exist_where_the_spec_says_so(axes):
    layer = build(axes)
    x = torch.randn(2, 24, layer.width)
    always, here = certificate(layer), certificate(layer, x, transient=4)
    check_certified(layer, always)
    found = lyapunov_exponents(layer, x, transient=4).exponents
    low, high = found.flip(-1).cumsum(-1).amin(0), found.cumsum(-1).amax(0)
    for held in (here, always):
        assert (high <= held.upper_sums + 1e-9).all()
        assert (low >= held.lower_sums - 1e-9).all()
        assert held.exponents[0] - 1e-9 <= float(found.min())
        assert float(found.max()) <= held.exponents[1] + 1e-9
        assert held.exponents[1] <= math.log(held.lipschitz) + 1e-12
    assert here.holds
    if here.deviation < math.inf:  # a coupled or stateful cell has no M
        assert here.deviation <= always.deviation * ROUNDING + 1e-12
    assert (here.upper <= always.upper * ROUNDING + 1e-12).all()
    assert (here.lower >= always.lower / ROUNDING - 1e-12).all()
    assert always.deviation <= always.paper * ROUNDING
    if always.ball is not None:
        trajectory = make_trajectory(layer, x)
        radii = always.ball.along(trajectory.drive, trajectory.state)
        inside = layer.solve(x).states[..., : sum(always.ball.sizes)].norm(dim=-1)
        assert (inside <= radii * ROUNDING).all()


def check_certified(layer, held):
    """Check that a certificate exists where the spec has one, or where there is a proof beyond the lemmas.

    A slow memory and the second-order Taylor form have proofs of their own.
    """
    beyond = {"memory", "|λ̄| >= 1", f"conjugate={conjugates.Taylor(2)}"}
    outside = set(layer.spec.cell.outside_lemmas) - beyond
    singular = any(math.isinf(head.rotation_rate) for head in compute_head_constants(adpt_cell(layer)))
    assert held.holds == (not outside and not singular)
    if not held.holds:
        assert held.deviation == held.lipschitz == math.inf
        assert "no bound on the Jacobian holds for every input" in str(held)
        assert all(reason in str(held) for reason in held.reasons)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"direction": directions.FromState(relu=True)}, "ReLU"),
        ({"direction": directions.FromState(spike=0.1)}, "discontinuous"),
        ({"direction": directions.FromState(layer_norm=True)}, "layer_norm"),
        ({"direction": directions.FromState(dot=0.5)}, "parallel"),
        ({"projection": projections.Dense(bias=True)}, "bias"),
        ({"projection": projections.LowRank(rank=2)}, "singular"),
        ({"projection": projections.LowParam(factors=(3, 2), rank=2)}, "κ = ∞"),
        ({"rotation_aware": True}, "rotation_aware"),
        ({"conjugate": conjugates.Stateful()}, "stored rotation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_certificate_has_reasons(axes, words):
    held = certificate(ADPTNet.paper(6, beta=1.0, **axes))
    assert not held.holds
    assert any(words in reason for reason in held.reasons)
    assert held.ball is not None  # the state is bounded nevertheless
    assert not held.contracts


def test_without_rotation_the_bounds_are_exact():
    singular = {"projection": projections.LowRank(rank=2), "direction": directions.FromState(relu=True)}
    for axes in (
        {"beta": 0.0, **singular},
        {"beta": 3.0, "spectrum": spectra.Linspace(dt_min=0.5, dt_max=0.5), **singular},
        {"beta": 3.0, "direction": directions.FromInput(layer_norm=True)},
        {"beta": 0, "conjugate": conjugates.Diagonal(), "rotation_aware": False},
    ):
        layer = ADPTNet.paper(6, **axes)
        held = certificate(layer)
        moduli = layer.cell.spectrum().modulus().sort(descending=True).values
        assert held.deviation == 0
        assert_close(held.upper, moduli.detach())
        assert held.contracts
        assert "J = M" in held.bound
        with torch.no_grad():
            assert certificate(layer, torch.randn(30, 6)).deviation < 1e-12


def test_a_head_that_does_not_rotate_may_have_any_weights():
    layer = ADPTNet.paper(6, beta=(0.0, 0.5), direction=directions.FromState(heads=2)).requires_grad_(False)
    layer.cell.directions[0].key_projection.projections[0].weight.zero_()
    assert certificate(layer).holds
    layer.cell.directions[0].key_projection.projections[1].weight.zero_()
    assert not certificate(layer).holds


def test_the_bound_of_the_paper_is_reported_where_the_paper_has_one():
    orthogonal = ADPTNet.paper(6, beta=0.1, projection=projections.Orthogonal(), spectrum=WIDE).requires_grad_(False)
    held = certificate(orthogonal)
    moduli = orthogonal.cell.eigenvalues().real
    assert held.paper == pytest.approx(8 * 0.1 * float(moduli.max()))  # lemma:J_singular_vals
    assert held.deviation == pytest.approx(2 * 0.1 * float(moduli.max() - moduli.min()))
    assert certificate(ADPTNet.paper(6, spectrum=spectra.Negative())).paper == math.inf
    assert f"(paper: {held.paper:.4g})" in str(held)


def test_taylor_and_product_have_bounds_of_their_own():
    """Compare adversarial states with the bound of each form."""
    for conjugate in (conjugates.Taylor(), conjugates.Taylor(2), conjugates.Product(3)):
        for seed, beta in enumerate((0.05, 2.0)):
            torch.manual_seed(seed)
            spec = cells.ADPTSpec(5, beta=beta, spectrum=WIDE, conjugate=conjugate, projection=projections.Orthogonal())
            cell = spec.build().requires_grad_(False)
            held = certificate(cell)
            assert held.holds
            assert deviation(cell, torch.randn(500, 5)).max().item() <= held.deviation * ROUNDING
            assert attack_state(cell, 15) <= ROUNDING
            values = torch.linalg.svdvals(cell.jacobian(torch.randn(500, 5), torch.zeros(500, 5)))
            assert (values <= held.upper * ROUNDING).all()


def test_the_ball_of_a_coupled_cell_needs_a_small_feedback():
    memory = cells.SlowMemory(spectra.Linspace(dt_min=0.1, dt_max=0.1), feedback=0.01)
    calm = CoupledADPTNet(5, beta=0.5, memory=memory, spectrum=WIDE).requires_grad_(False)
    assert certificate(calm).ball.contraction < 1
    assert certificate(CoupledADPTNet(5, beta=0.5, memory=cells.SlowMemory(feedback=3.0))).ball.contraction > 1
    x = torch.randn(1, 400, 5)
    trajectory = make_trajectory(calm, x)
    largest = float(trajectory.drive[..., :5].norm(dim=-1).max())
    assert float(calm.solve(x).states.norm(dim=-1).max()) <= certificate(calm).ball.radius(largest)


# Other cells


def test_plain_networks_are_certified_by_their_weights():
    for spec in (cells.TanhRNN(5), cells.ReLURNN(5), cells.OrthogonalRNN(5)):
        layer = Recurrent(spec).requires_grad_(False)
        held = certificate(layer)
        values = torch.linalg.svdvals(jacobians(layer, torch.randn(50, 5)))
        assert (values <= held.upper * ROUNDING).all()
        assert held.lipschitz == pytest.approx(float(norm(layer.cell.recurrent.dense())))


def test_other_cells_have_bounds_along_a_trajectory_only():
    cell = torch.nn.GRUCell(3, 4)
    held = certificate(cell)
    assert not held.holds
    assert "TorchCell" in held.reasons[0]
    x = torch.randn(30, 3)
    here = certificate(cell, x)
    assert here.deviation == math.inf  # a GRU has no M
    with torch.no_grad():
        assert_close(here.upper_sums, mean_log_singular_values(cell, x, transient=0).cumsum(-1))
    with pytest.raises(InputError, match="neither a layer nor a cell"):
        certificate(lambda x: x)
    assert certificate(lambda x: 0.5 * x, state=torch.ones(2), steps=10).lipschitz == pytest.approx(0.5)


def test_a_trajectory_does_not_certify_contraction():
    """Jacobians along a trajectory say nothing about other states: this map contracts near zero, expands elsewhere."""
    held = certificate(lambda x: x**3, state=torch.full((2,), 0.1), steps=20)
    assert held.lipschitz < 0.1
    assert not held.contracts
    assert not held.everywhere
    assert "any two states" not in str(held)
    assert "‖J_t‖ <= 0.03 along the trajectory" in str(held)
    assert "‖J - M‖" not in str(held)  # there is no M
    assert "‖J - M‖" in str(certificate(ADPTNet.paper(4)))
    assert "‖J - M‖" not in str(certificate(Recurrent(cells.TanhRNN(4))))


# Shifts


def test_the_shifts_are_the_singular_values_less_the_moduli_and_within_the_bound():
    layer, x = ADPTNet.paper(6, beta=0.2, projection=projections.Orthogonal(), spectrum=WIDE), torch.randn(2, 50, 6)
    with torch.no_grad():
        shifts = singular_value_shifts(layer, x)
        moduli = layer.cell.eigenvalues().modulus().sort(descending=True).values
        assert_close(shifts + moduli, torch.linalg.svdvals(jacobians(layer, x)))
    assert shifts.shape == (2, 50, 6)
    assert float(shifts.abs().max()) <= certificate(layer).deviation * ROUNDING
    with pytest.raises(IncompatibleError, match="has no M"):
        singular_value_shifts(torch.nn.GRUCell(3, 4), x)


def test_deviation_bounds_cover_relu_and_singular_weights_and_reject_the_rest():
    for axes in (
        {"direction": directions.FromState(relu=True)},
        {"projection": projections.LowRank(rank=3)},
        {"direction": directions.FromState(heads=2), "beta": (0.1, 2.0)},
        {"conjugate": conjugates.Product(2), "retraction": retractions.Cayley()},
        {"conjugate": conjugates.Taylor(2), "spectrum": spectra.S4DInv(dt_min=0.1, dt_max=1.0)},
    ):
        cell = cells.ADPTSpec(6, **{"beta": 1.0, "spectrum": WIDE, **axes}).build().requires_grad_(False)
        states = torch.randn(300, 6)
        assert (deviation(cell, states) <= deviation_bounds(cell, states) * ROUNDING).all()
        assert (deviation_bounds(cell, torch.zeros(2, 6)) == 0).all()
        assert_close(deviation_bounds(cell, 1e-200 * states), deviation_bounds(cell, states))
    half = ADPTNet.paper(6, beta=1.0, direction=directions.FromState(heads=2)).requires_grad_(False)
    part = torch.cat((torch.zeros(3), torch.randn(3)))
    assert 0 < float(deviation(half.cell, part)) <= float(deviation_bounds(half, part)) < math.inf
    with pytest.raises(InputError, match=r"shape \(2, 5\); they must be \(..., 6\)"):
        deviation_bounds(half, torch.zeros(2, 5))
    from_input = ADPTNet.paper(6, direction=directions.FromInput())
    assert (deviation_bounds(from_input, states) == 0).all()
    assert deviation_bounds(from_input, states.float()).dtype == torch.float64
    with pytest.raises(InputError, match="they must be"):
        deviation_bounds(from_input, torch.zeros(2, 5))
    with pytest.raises(IncompatibleError, match="which measures"):
        deviation_bounds(ADPTNet.paper(6, direction=directions.FromState(dot=0.5)), states)
