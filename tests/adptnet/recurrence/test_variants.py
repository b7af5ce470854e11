"""The variants of the paper: the properties of each, beyond agreement with the brute-force implementation."""

import math

import pytest
import torch
from torch.testing import assert_close

import adptnet
from adptnet import (
    ADPTNet,
    ADPTState,
    TrainableBeta,
    cells,
    conjugates,
    directions,
    drive,
    projections,
    solvers,
    spectra,
)
from adptnet.errors import IncompatibleError, InputError
from support import brute
from support.members import all_conjugates, all_directions, all_projections, build


@pytest.mark.parametrize(
    ("short", "explicit"),
    [
        (adptnet.TaylorADPTNet(6, beta=0.1), ADPTNet.paper(6, beta=0.1, conjugate=conjugates.Taylor())),
        (adptnet.TaylorADPTNet(6, order=2), ADPTNet.paper(6, conjugate=conjugates.Taylor(order=2))),
        (adptnet.LinearADPTNet(6, state_size=8), ADPTNet.paper(6, state_size=8, direction=directions.FromInput())),
        (adptnet.CoupledADPTNet(6, gain=drive.LRU()), ADPTNet.paper(6, gain=drive.LRU(), memory=cells.SlowMemory())),
    ],
    ids=["Taylor", "Taylor 2", "Linear", "Coupled"],
)
def test_a_named_variant_equals_the_explicit_layer(short, explicit):
    assert type(short) is ADPTNet
    assert short.spec == explicit.spec


@pytest.mark.parametrize(("order", "slope"), [(1, 2), (2, 3)])
@pytest.mark.parametrize("spectrum", [spectra.Linspace(), spectra.S4DInv(), spectra.ContinuousPM()], ids=repr)
def test_the_error_of_taylor_falls_with_beta_at_its_order(order, slope, spectrum):
    states, silent = torch.randn(50, 12), torch.zeros(50, 12)
    exact = ADPTNet.paper(12, spectrum=spectrum).cell
    betas, errors = [0.04, 0.02, 0.01], []
    for beta in betas:
        cells_ = [
            ADPTNet.paper(12, beta=beta, spectrum=spectrum, conjugate=c).cell
            for c in (conjugates.Exact(), conjugates.Taylor(order))
        ]
        for cell in cells_:
            cell.load_state_dict(exact.state_dict())
        errors.append((cells_[0].step(states, silent) - cells_[1].step(states, silent)).norm())
    measured = (errors[0] / errors[2]).log() / torch.tensor(betas[0] / betas[2]).log()
    assert abs(measured - slope) < 0.1


def test_taylor_has_the_eigenvalues_on_its_diagonal():
    cell = adptnet.TaylorADPTNet(6, beta=0.5).cell
    states = torch.randn(4, 6)
    diagonal = cell.conjugate(states, torch.zeros(4, 6)).diagonal()
    assert_close(diagonal, cell.eigenvalues().real.expand(4, 6))


def test_one_product_step_is_exact():
    one = ADPTNet.paper(6, beta=1.0, conjugate=conjugates.Product(steps=1))
    exact = ADPTNet.paper(6, beta=1.0)
    exact.load_state_dict(one.state_dict())
    x = torch.randn(2, 9, 6)
    assert torch.equal(one(x)[0], exact(x)[0])


def test_a_linear_layer_is_linear_in_its_state():
    layer = adptnet.LinearADPTNet(6, beta=4.0)
    x = torch.randn(1, 9, 6)
    a, b = torch.randn(2, 1, 6)
    position = torch.zeros(1, dtype=torch.int64)
    end = lambda s: layer(x, ADPTState(s, position))[1].state  # noqa: E731
    assert_close(end(a + 2 * b) - end(torch.zeros(1, 6)), end(a) + 2 * end(b) - 3 * end(torch.zeros(1, 6)))
    drives = layer.cell.prepare(x, torch.arange(9).unsqueeze(0))
    jacobian = layer.cell.jacobian(torch.randn(9, 6), drives[0])
    assert_close(jacobian, layer.cell.conjugate(torch.randn(9, 6), drives[0]).dense())


def test_heads_do_not_see_each_other():
    cell = ADPTNet.paper(6, beta=2.0, direction=directions.FromState(heads=3)).cell
    jacobian = cell.jacobian(torch.randn(6), torch.zeros(6))
    for i in range(3):
        for j in range(3):
            block = jacobian[2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
            assert block.any() == (i == j)


def test_the_controlled_dot_product_has_the_given_value():
    for dot in (-0.7, 0.0, 0.5, 1.0):
        key, value = directions.FromState(dot=dot, heads=2).build(8, projections.Dense())(torch.randn(5, 8))
        assert_close((key * value).sum(-1), torch.full((5, 2), dot), atol=1e-12, rtol=0)
        assert_close(key.norm(dim=-1), torch.ones(5, 2))


def test_spikes_are_zeros_and_ones_with_a_boxcar_derivative():
    x = torch.tensor([-2.0, -0.4, 0.0, 0.4, 2.0], requires_grad=True)
    spikes = directions.spike(x)
    assert spikes.tolist() == [0, 0, 1, 1, 1]
    spikes.sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 1, 0]


def test_a_learned_start_is_a_change_of_basis_at_beta_zero():
    cell = ADPTNet.paper(6, beta=0.0, start=True).cell
    q = cell.start.dense()
    state = torch.randn(6)
    assert_close(cell.step(state, torch.zeros(6)), q @ (cell.spectrum().real * (q.T @ state)))
    assert cell.eigenvalues() is None


def test_a_stateful_rotation_stays_orthogonal():
    layer = ADPTNet.paper(5, beta=1.0, conjugate=conjugates.Stateful())
    solution = layer.solve(torch.randn(2, 30, 5))
    rotation = layer.cell.rotation(solution.states)
    assert_close(rotation @ rotation.mT, torch.eye(5).expand(2, 30, 5, 5), atol=1e-12, rtol=0)
    assert (rotation[:, -1] - torch.eye(5)).norm() > 0.1


def test_a_coupled_cell_without_feedback_is_the_plain_one_and_its_average():
    coupled = adptnet.CoupledADPTNet(6, beta=1.0, memory=cells.SlowMemory(feedback=0.0))
    plain = ADPTNet.paper(6, beta=1.0)
    plain.cell.load_state_dict(coupled.cell.fast.state_dict())
    x = torch.randn(2, 20, 6)
    assert_close(coupled(x)[0], plain(x)[0])
    states = coupled.solve(x).states
    gamma, w = coupled.cell.slow().real, torch.zeros(2, 6)
    for t in range(20):
        w = gamma * w + (1 - gamma) * states[:, t, :6]
        assert_close(coupled.cell.slow_state(states[:, t]), w)


@pytest.mark.parametrize("projection", all_projections, ids=repr)
def test_a_projection_is_its_matrix(projection):
    built = projection.build(6, 6)
    for parameter in built.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter)
    x = torch.randn(3, 4, 6)
    assert_close(built(x), x @ brute.matrix(built).T + brute.bias(built))
    assert_close(built.dense(), brute.matrix(built))
    assert built.parameter_count == sum(p.numel() for p in built.parameters())
    singular = torch.linalg.svdvals(brute.matrix(built))
    if singular[-1] > 1e-9:
        assert_close(built.condition_number(), singular[0] / singular[-1])


def test_counts_of_the_factored_projections():
    low, kron, both = (
        projections.LowRank(rank=4).build(12, 12),
        projections.Kronecker(factors=(4, 3)).build(12, 12),
        projections.LowParam(factors=(4, 3), rank=2).build(12, 12),
    )
    assert (low.parameter_count, low.macs) == (96, 96)
    assert (kron.parameter_count, kron.macs) == (25, 84)
    assert (both.parameter_count, both.macs) == (73, 132)
    assert low.condition_number().isinf()
    assert low.float().condition_number().isinf()  # the singular values past the rank are rounding errors
    assert both.condition_number().isinf()  # as initialised: C is all ones
    assert projections.Orthogonal().build(12, 12).condition_number() < 1 + 1e-9


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("shape", [(3, 3), (6, 3), (3, 6)], ids=["square", "tall", "wide"])
def test_weight_decay_leaves_an_orthogonal_matrix_orthogonal(shape, device):
    projection = projections.Orthogonal().build(*shape)
    if device == "meta":
        filled = projections.Orthogonal().build(*shape, device="meta").to_empty(device="cpu")
        filled.load_state_dict(projection.state_dict())
        projection = filled
    expected, loss_weights = projection.dense().detach(), torch.randn(shape[::-1])
    optimizer = torch.optim.AdamW(projection.parameters(), lr=1e-3, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (projection.dense() * loss_weights).sum().backward()
        optimizer.step()
    assert_close(projection.dense(), expected, rtol=0, atol=0.05)
    assert_close(torch.linalg.svdvals(projection.dense()), torch.ones(3))


def test_the_preactivations_of_low_param_match_a_dense_layers():
    """The KL divergence is about 1e-2 at rank 16, factors (128, 8), n = 1024 (fig:pre_activation_distribution).

    See point 9 of docs/explanation/deviations.md.
    """
    x = torch.randn(1024, 1024)
    dense = (x @ projections.Dense().build(1024, 1024).dense().T).flatten()
    kls = []
    for seed in range(5):
        torch.manual_seed(seed)
        low = projections.LowParam(factors=(128, 8), rank=16).build(1024, 1024)(x).detach().flatten()
        edges = torch.linspace(-2.5, 2.5, 61)
        p, q = (torch.histogram(v.detach(), edges).hist + 1 for v in (low, dense))
        p, q = p / p.sum(), q / q.sum()
        kls.append(float((p * (p / q).log()).sum()))
    assert sum(kls) / 5 < 0.03


def test_uniform_decay_draws_rates_and_spaces_steps_as_printed():
    built = spectra.UniformDecay(decay_min=2.0, decay_max=100.0, dt_min=1e-4, dt_max=5e-4).build(5)
    assert_close(built.log_dt.exp(), torch.linspace(1e-4, 5e-4, 5))
    rates = spectra.UniformDecay().build(500).log_decay.exp()
    assert 2 <= rates.min() < 5
    assert 97 < rates.max() <= 100


def test_the_ring_is_even_by_area():
    eigenvalues = spectra.LRURing(r_min=0.5, r_max=0.9, max_phase=1.0).build(4000)().eigenvalues().detach()
    squared = eigenvalues.abs() ** 2
    assert squared.min() >= 0.25
    assert squared.max() <= 0.81
    assert abs(float(squared.mean()) - (0.25 + 0.81) / 2) < 0.02
    assert eigenvalues.angle().min() > 0
    assert eigenvalues.angle().max() <= 1


def test_s4d_lin_counts_in_multiples_of_pi():
    built = spectra.S4DLin().build(8)
    assert_close(built.frequency, torch.pi * torch.arange(4.0).flip(0))


def test_given_exponents_are_the_logarithms_of_the_eigenvalues():
    built = spectra.FromExponents((-0.5, -2.0)).build(2)
    assert_close(built().real.log(), torch.tensor([-0.5, -2.0]))
    with pytest.warns(UserWarning, match="the state may grow"):
        chaotic = ADPTNet.paper(2, spectrum=spectra.FromExponents((0.9, -1.0)), gain=drive.ZOH(), beta=1.0)
    assert chaotic(torch.randn(1, 5, 2))[0].isfinite().all()


def test_step_sizes_are_per_channel_or_per_state_dimension():
    each = spectra.S4DReal(dt_per="state").build(12, expansion=4)
    shared = spectra.Linspace(dt_per="channel").build(12, expansion=4)
    assert each.log_dt.shape == (12,)
    assert shared.log_dt.shape == (3,)


# --- arguments of a call: the length of each step, a β for each sequence


WITH_ARGUMENTS = [
    {"width": 6, "beta": 1.0},
    {"width": 6, "beta": 1.0, "spectrum": spectra.S4DInv(), "gain": drive.ZOH()},
    {"width": 6, "beta": 1.0, "direction": directions.FromInput(heads=2), "gain": drive.LRU()},
    {"width": 6, "beta": 0.5, "direction": directions.FromState(heads=3), "conjugate": conjugates.Taylor(2)},
    {
        "width": 6,
        "beta": 0.5,
        "conjugate": conjugates.Product(2),
        "spectrum": spectra.Sparse(spectra.ContinuousPM(), 0.3),
    },
]


@pytest.mark.parametrize("axes", WITH_ARGUMENTS, ids=repr)
def test_steps_with_dt_and_beta_are_the_brute_force_ones(axes):
    layer = build(axes)
    x, dt, beta = torch.randn(3, 7, 6), torch.rand(3, 7) * 3, torch.tensor([0.0, 0.3, 2.0])
    y, _ = layer(x, dt=dt, beta=beta)
    assert_close(y, brute.trajectory(layer, x, torch.zeros(3, 6), dt=dt, beta=beta)[1], atol=1e-9, rtol=0)
    assert_close(layer(x, dt=torch.ones(3, 7))[0], layer(x)[0])
    _, middle = layer(x[:, :3], dt=dt[:, :3], beta=beta)
    stepped, _ = layer.step(x[:, 3], middle, dt=dt[:, 3], beta=beta)
    assert_close(stepped, y[:, 3])
    assert_close(layer(x[1], dt=dt[1], beta=beta[1])[0], y[1])
    assert_close(layer.solve(x, dt=dt, beta=beta).states, layer.cell.output(y), atol=1e-9, rtol=1e-9)


def test_two_half_steps_without_input_are_one_step_at_beta_zero():
    layer = ADPTNet.paper(4, beta=0.0)
    start = layer.initial_state(1)._replace(state=torch.randn(1, 4))
    halves, _ = layer(torch.zeros(1, 2, 4), start, dt=torch.full((1, 2), 0.5))
    whole, _ = layer(torch.zeros(1, 1, 4), start)
    assert_close(halves[:, -1], whole[:, -1])


def test_invalid_call_arguments_raise():
    layer = ADPTNet.paper(4)
    x = torch.randn(2, 5, 4)
    for bad, message in [
        ({"dt": torch.ones(2, 4)}, "it must be (batch, time), (2, 5)"),
        ({"dt": -torch.ones(2, 5)}, "dt must be in 0 to 1e+15"),
        ({"beta": torch.ones(3)}, "it must be (batch,), (2,)"),
        ({"beta": torch.tensor([0.1, torch.nan])}, "no NaN"),
    ]:
        with pytest.raises(InputError) as error:
            layer(x, **bad)
        assert message in str(error.value)
    with pytest.raises(IncompatibleError, match="CoupledCell takes no dt="):
        adptnet.CoupledADPTNet(4)(x, dt=torch.ones(2, 5))
    with pytest.raises(InputError, match="dt= needs padded sequences"):
        layer(x[:1], cu_seqlens=torch.tensor([0, 2, 5]), dt=torch.ones(1, 5))


# --- β


def test_a_trainable_beta_uses_the_clipped_value_and_reports_both():
    beta = adptnet.recurrence.beta.Beta(TrainableBeta((0.01, 0.02), minimum=1e-4, maximum=0.025))
    with torch.no_grad():
        beta.parameter.copy_(torch.tensor([1e8, -100.0]))
    assert beta.report() == {"raw": [1e8, -100.0], "used": [0.025, 1e-4]}
    beta(torch.zeros(1)).sum().backward()
    assert beta.parameter.grad.tolist() == [1, 1]  # so that β can return to its range
    assert adptnet.recurrence.beta.Beta(0.5).report() == {"raw": [0.5], "used": [0.5]}


def test_without_straight_through_a_beta_outside_its_range_has_no_gradient():
    spec = TrainableBeta((0.01, 0.02, 0.02), minimum=1e-4, maximum=0.025, straight_through=False)
    beta = adptnet.recurrence.beta.Beta(spec)
    with torch.no_grad():
        beta.parameter.copy_(torch.tensor([1.0, -1.0, 0.02]))
    used = beta(torch.zeros(1))
    assert used.flatten().tolist() == [0.025, 1e-4, 0.02]
    used.sum().backward()
    assert beta.parameter.grad.tolist() == [0, 0, 1]
    layer = ADPTNet(4, beta=TrainableBeta(0.02, maximum=0.025, straight_through=False))
    assert adptnet.Spec.from_json(layer.spec.to_json()) == layer.spec
    layer(torch.randn(1, 5, 4))[0].sum().backward()
    assert layer.cell.beta.parameter.grad.abs() > 0


def test_rope_is_a_complex_state_space_model_with_the_minus_sign():
    """x_t = R(tθ) Σ λ^{t-k} R(-kθ) u_k (deviations.md, point 8). The printed matrix is e^{-iθ} on (real, imaginary)."""
    layer = ADPTNet.paper(6, beta=0.0, rope=drive.RoPE(sign=1))
    theta = (layer.cell.drive.rope.log_dt + layer.cell.drive.rope.log_frequency).exp()
    with torch.no_grad():
        layer.cell.spectrum.log_dt.copy_(layer.cell.spectrum.log_dt[::2].repeat_interleave(2))
    x = torch.randn(1, 12, 6)
    rotated = torch.view_as_complex(layer(x)[0].unflatten(-1, (3, 2)).contiguous())
    back = rotated * torch.exp(1j * theta * torch.arange(12.0).unsqueeze(-1))
    decay = layer.cell.spectrum().real[::2]
    u = layer.cell.drive.gain(layer.cell.spectrum).mv(layer.cell.drive.project(x))
    u = torch.view_as_complex(u.unflatten(-1, (3, 2)).contiguous())
    state, states = torch.zeros(1, 3, dtype=torch.complex128), []
    for t in range(12):
        state = decay * torch.exp(1j * theta) * state + u[:, t]
        states.append(state)
    assert_close(back, torch.stack(states, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pairs_are_rotated_alike_for_any_memory_layout_and_any_layout_of_positions(dtype):
    rope = drive.RoPE().build(6, dtype=dtype)
    flat = torch.randn(2 * 5 * 6 + 1, dtype=dtype)
    u = flat[1:].view(2, 5, 6)  # at an odd offset, where pairs cannot be viewed as complex numbers
    row = torch.arange(5) + 7
    both = row.repeat(2, 1)
    results = []
    for inputs, position in ((u, both), (u.clone(), both), (u.clone(), row.expand(2, 5)), (u.mT.clone().mT, row)):
        inputs = inputs.detach().requires_grad_()
        rotated = rope(inputs, position)
        gradients = torch.autograd.grad(rotated.square().cumsum(1).sum(), [inputs, *rope.parameters()])
        results.append([rotated, *gradients])
    for other in results[1:]:
        assert_close(other, results[0])
    assert not torch.equal(results[0][0], u)


def test_pairs_are_rotated_inside_vmap_for_any_strides():
    layer = ADPTNet.paper(8, beta=0.5, rope=drive.RoPE(), input_projection=projections.Identity())
    x = torch.randn(4, 41)[:, :40].unflatten(1, (5, 8))
    assert_close(torch.vmap(lambda one: layer(one)[0])(x), torch.stack([layer(one)[0] for one in x]))


def test_tied_rotary_positions_take_the_step_sizes_of_the_spectrum():
    spectrum = spectra.Sparse(spectra.Negative(spectra.Linspace(dt_min=1e-2, dt_max=1.0), 0.5), 0.3)
    layer = ADPTNet.paper(6, beta=0.5, rope=drive.RoPE(tied=True), spectrum=spectrum)
    own = ADPTNet.paper(6, beta=0.5, rope=drive.RoPE(), spectrum=spectrum)
    own.load_state_dict(layer.state_dict(), strict=False)
    log_dt = layer.cell.spectrum.spectrum.spectrum.log_dt
    with torch.no_grad():
        own.cell.drive.rope.log_dt.copy_((log_dt[::2] + log_dt[1::2]) / 2)
    x = torch.randn(2, 7, 6)
    assert_close(layer(x)[0], own(x)[0])
    assert "cell.drive.rope.log_dt" not in layer.state_dict()
    layer.cell.drive(layer.cell.drive.project(x), torch.arange(7), own.cell.spectrum)  # any spectrum of this size
    layer.cell.drive.rope(x, torch.arange(7), layer.cell.spectrum).square().cumsum(-2)[..., 0].sum().backward()
    assert log_dt.grad.abs().max() > 0
    assert adptnet.Spec.from_json(layer.spec.to_json()) == layer.spec


@pytest.mark.parametrize("spectrum", [spectra.FromExponents((-0.1, -0.2)), spectra.Timescales()])
def test_tied_rotary_positions_need_step_sizes(spectrum):
    layer = ADPTNet.paper(2, rope=drive.RoPE(tied=True), spectrum=spectrum)
    if layer.cell.spectrum.log_step() is not None:
        pytest.skip("this spectrum has step sizes")
    with pytest.raises(adptnet.errors.IncompatibleError, match=r"it has none. Pass spectrum=spectra.Linspace\(\)"):
        layer(torch.randn(1, 3, 2))


def test_log_step_has_an_entry_for_every_state_dimension():
    pairs = spectra.S4DInv(dt_per="channel").build(8, expansion=4)
    assert_close(pairs.log_step(), pairs.log_dt.repeat_interleave(4))
    assert_close(spectra.Linspace().build(5).log_step(), spectra.Linspace().build(5).log_dt)


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"direction": directions.FromInput(heads=2)},
        {"rotation_aware": True},
        {"conjugate": conjugates.Product(2)},
        {"conjugate": conjugates.Taylor(2)},
    ],
    ids=repr,
)
def test_directions_from_the_input_are_not_computed_at_beta_zero(axes):
    axes = {"direction": directions.FromInput(), **axes}
    layer = ADPTNet.paper(6, beta=0.0, **axes)
    plain = ADPTNet.paper(6, beta=0.0, conjugate=conjugates.Diagonal())
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, 9, 6)
    assert layer.cell.prepare(x, torch.arange(9)).shape[-1] == 6
    assert_close(layer(x)[0], plain(x)[0], rtol=1e-14, atol=1e-15)
    for solver in (solvers.DEER(), solvers.ConvDEER()):
        assert_close(layer(x, solver=solver)[0], plain(x)[0])
    state, one = torch.randn(2, 6, requires_grad=True), layer.cell.prepare(x, torch.arange(9))[:, 0]
    assert_close(layer.cell.jacobian(state, one), torch.diag(layer.cell.spectrum().real).expand(2, 6, 6))
    rotated = ADPTNet.paper(6, beta=1.0, **axes)
    rotated.load_state_dict(layer.state_dict())
    given = layer(x, beta=torch.ones(2))[0]  # β of a call still rotates
    assert_close(given, rotated(x)[0])
    assert not torch.allclose(given, plain(x)[0])
    assert_close(layer(x, dt=torch.ones(2, 9))[0], plain(x)[0])


@pytest.mark.parametrize("gain", [drive.EMA(), drive.LRU(), drive.ZOH(tied=False)])
def test_expansion_and_gain_in_one_pass_equal_the_two(gain):
    layer = ADPTNet.paper(3, state_size=12, beta=0.3, gain=gain, input_projection=projections.Expand())
    drive_of = layer.cell.drive
    x = torch.randn(20, 5, 3, requires_grad=True)
    fused = drive_of.project_and_scale(x, layer.cell.spectrum)
    separate = drive_of(drive_of.project(x), torch.arange(5), layer.cell.spectrum)
    assert fused is not None
    assert_close(fused, separate)
    sources = [x, *(p for p in layer.cell.parameters() if p.requires_grad)]
    weight = torch.randn_like(fused)
    results = [torch.autograd.grad((y * weight).sum(), sources, allow_unused=True) for y in (fused, separate)]
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_close(one, other)


def test_large_positions_do_not_lose_precision():
    layer = ADPTNet.paper(6, beta=0.0, rope=drive.RoPE(), dtype=torch.float32)
    far = ADPTState(torch.zeros(1, 6, dtype=torch.float32), torch.tensor([10_000_000]))
    x = torch.randn(1, 1, 6)
    double = layer(x.float(), far)[0].double()
    layer.double()
    assert_close(double, layer(x.float().double(), far.to(torch.float64))[0], atol=1e-5, rtol=1e-4)


def test_outside_lemmas_lists_the_variants_without_a_bound():
    inside = [
        {},
        {"direction": directions.FromInput()},
        {"direction": directions.FromState(heads=2)},
        {"projection": projections.Orthogonal()},
    ]
    outside = [
        {"direction": directions.FromState(relu=True)},
        {"direction": directions.FromState(layer_norm=True)},
        {"direction": directions.FromState(dot=0.5)},
        {"direction": directions.FromState(spike=0.5)},
        {"projection": projections.Dense(bias=True)},
        {"projection": projections.LowRank(rank=2)},
        {"rotation_aware": True},
        {"memory": cells.SlowMemory()},
        {"conjugate": conjugates.Stateful()},
        {"conjugate": conjugates.Taylor(order=2)},
    ]
    assert not any(cells.ADPTSpec(6, **axes).outside_lemmas for axes in inside)
    assert all(cells.ADPTSpec(6, **axes).outside_lemmas for axes in outside)


@pytest.mark.parametrize("name", ["TanhRNN", "ReLURNN", "OrthogonalRNN"])
def test_the_vanilla_networks_are_their_formula(name):
    layer = adptnet.Recurrent(getattr(cells, name)(4, state_size=5))
    cell = layer.cell
    x, state = torch.randn(2, 6, 4), torch.zeros(2, 5)
    for t in range(6):
        state = state @ cell.recurrent.dense().T + x[:, t] @ cell.input_weight.T + cell.bias
        state = state.tanh() if name == "TanhRNN" else state.relu()
    assert_close(layer(x)[1].state, state)
    w = cell.recurrent.dense()
    assert torch.allclose(w @ w.T, torch.eye(5)) == (name == "OrthogonalRNN")


def test_every_direction_runs_with_every_conjugate():
    """Each pair builds and runs, or raises when its spec is made."""
    rejected = 0
    for direction in all_directions:
        for conjugate in all_conjugates:
            stateful = isinstance(conjugate, conjugates.Stateful)
            if stateful and (direction.heads > 1 or isinstance(direction, directions.FromInput)):
                with pytest.raises(IncompatibleError, match="Drop"):
                    ADPTNet.paper(12, direction=direction, conjugate=conjugate, beta=0.3)
                rejected += 1
                continue
            layer = ADPTNet.paper(12, direction=direction, conjugate=conjugate, beta=0.3)
            assert adptnet.verify(layer, torch.randn(1, 4, 12)).ok
    assert rejected == 6  # Stateful with heads, with directions from the input or from the whole state


def test_wrapped_cells_run_in_a_layer():
    layer = adptnet.Recurrent(cells.from_torch(torch.nn.LSTMCell(4, 4)))
    x = torch.randn(2, 6, 4)
    y, state = layer(x, lengths=[6, 3])
    assert y.shape == (2, 6, 4)
    assert state.state.shape == (2, 8)
    assert_close(layer.step(x[:, 0])[0], y[:, 0])
    with pytest.raises(InputError, match="Pass input_size="):
        adptnet.Recurrent(cells.from_function(lambda s, u: s + u, state_size=3))
    assert solvers.Sequential()(layer.cell, x).states.shape == (2, 6, 8)


# --- edge cases of call arguments and of specs


def test_a_bidirectional_layer_reverses_dt_too():
    both = adptnet.Bidirectional(ADPTNet.paper(4, beta=1.0).spec)
    x, dt = torch.randn(2, 5, 4), torch.rand(2, 5)
    back = both.back(x.flip(1), dt=dt.flip(1))[0].flip(1)
    assert_close(both(x, dt=dt)[0], both.merge(torch.cat((both.ahead(x, dt=dt)[0], back), -1)))


@pytest.mark.parametrize("spectrum", [spectra.Linspace(), spectra.S4DInv(), spectra.Sparse()], ids=repr)
@pytest.mark.parametrize("gain", [drive.EMA(), drive.LRU(), drive.ZOH()], ids=repr)
def test_a_step_of_length_zero_has_finite_gradients(spectrum, gain):
    layer = ADPTNet.paper(4, gain=gain, spectrum=spectrum)
    dt = torch.ones(2, 4)
    dt[:, 1] = 0
    dt.requires_grad_()
    y, _ = layer(torch.randn(2, 4, 4), dt=dt)
    gradients = torch.autograd.grad(y.sum(), [dt, *layer.parameters()])
    assert all(g.isfinite().all() for g in gradients)


def test_dt_in_the_padding_does_not_matter():
    layer = ADPTNet.paper(4, beta=1.0, spectrum=spectra.S4DInv())
    x, dt = torch.randn(2, 4, 4), torch.rand(2, 4)
    noisy = dt.clone()
    noisy[1, 2:] = torch.tensor([torch.nan, -1.0])
    lengths = torch.tensor([4, 2])
    assert_close(layer(x, lengths=lengths, dt=noisy)[0], layer(x, lengths=lengths, dt=dt)[0])


@pytest.mark.parametrize(
    "conjugate", [conjugates.Exact(), conjugates.Taylor(), conjugates.Taylor(2), conjugates.Diagonal()]
)
@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("shape", [(4,), (4, 5)])
def test_the_forms_of_a_conjugate_agree_with_dt(conjugate, start, shape):
    beta = 0.5 if conjugate.has_directions else 0.0
    cell = ADPTNet.paper(4, start=start, conjugate=conjugate, beta=beta).cell.with_arguments(dt=torch.rand(4, 5))
    drives = cell.prepare(torch.randn(4, 5, 4), torch.arange(5).expand(4, 5))
    drives = drives if len(shape) == 2 else drives[:, 2]
    states = torch.randn(*shape, 4)
    operator = cell.conjugate(states, drives)
    assert_close(operator.mv(states), (operator.dense() @ states.unsqueeze(-1)).squeeze(-1))
    assert_close(operator.diagonal(), operator.dense().diagonal(dim1=-2, dim2=-1))


def test_the_zero_order_hold_has_the_right_derivative_at_exponent_zero():
    for exponent in (0.0, 1e-9, 1e-5, -1e-5, 0.5):
        exponents = torch.tensor([exponent])
        built = spectra.exponents.ExponentSpectrum(exponents, True)
        dt = torch.tensor([2.0])
        (found,) = torch.autograd.grad(built.zero_order_hold(dt).real.sum(), built.exponents)
        expected = (
            2.0
            if abs(exponent) < 1e-3
            else (2 * math.exp(2 * exponent) * exponent - math.expm1(2 * exponent)) / exponent**2
        )
        assert abs(float(found) - expected) < 1e-3


def test_integers_are_accepted_in_place_of_floats():
    layers = [
        ADPTNet.paper(4, beta=TrainableBeta(1)),
        ADPTNet.paper(4, beta=TrainableBeta((1, 2)), direction=directions.FromState(heads=2)),
        ADPTNet.paper(4, memory=cells.SlowMemory(feedback=1)),
        ADPTNet.paper(4, beta=(1,)),
    ]
    for layer in layers:
        assert layer(torch.randn(4, 4))[0].shape == (4, 4)
        assert layer.cell.step(torch.randn(layer.state_size), torch.randn(4)).shape == (layer.state_size,)


def test_directions_from_the_input_run_without_a_rotation():
    layer = ADPTNet.paper(4, beta=0, conjugate=conjugates.Diagonal(), direction=directions.FromInput())
    assert layer(torch.randn(2, 3, 4))[0].isfinite().all()
    with pytest.raises(IncompatibleError, match="takes no beta="):
        layer(torch.randn(2, 3, 4), beta=torch.ones(2))


def test_dt_works_under_vmap():
    layer = ADPTNet.paper(4, beta=1.0)
    x, dt = torch.randn(3, 4), torch.rand(3)
    mapped = torch.func.vmap(lambda a, d: layer.step(a, dt=d)[0])(x, dt)
    assert_close(mapped, layer.step(x, dt=dt)[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cells.SlowMemory(spectra.Negative()), "must be real, in [0, 1)"),
        (lambda: cells.SlowMemory(feedback=float("nan")), "must be a finite number"),
        (lambda: spectra.FromExponents(-0.1), "needs finite numbers"),
        (lambda: directions.FromState(dot="a"), "in [-1, 1]"),
        (lambda: directions.FromState(dot=True), "in [-1, 1]"),
        (lambda: ADPTNet.paper(4, beta=()), "Pass beta=0.125"),
        (lambda: ADPTNet.paper(4, beta=TrainableBeta(1e9)), "no precision left"),
        (
            lambda: ADPTNet.paper(8, projection=projections.Kronecker((4, 2)), direction=directions.FromState(heads=2)),
            "each of 2 heads has size 4. Pass factors=(2, 2), or state_size=16",
        ),
        (lambda: ADPTNet.paper(8, input_projection=projections.Kronecker((2, 2))), "Pass factors=(4, 2)."),
    ],
)
def test_invalid_specs_raise_with_the_fix(make, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is the test
        make()
    assert message in str(error.value)
