"""Spiking cells, layers and networks, compared with their equations written out and with the parallel solvers."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import adptnet
from adptnet import SpikingADPTNet, adjoints, analysis, cells, directions, projections, solvers, spectra
from adptnet.cells.spiking import surrogate
from adptnet.errors import IncompatibleError, InputError, SpecError
from adptnet.nn import Recurrent, SpikingModelSpec, silif_for_speech, spiking_adpt_for_speech
from adptnet.nn.spiking_layer import spiking_adpt
from adptnet.ops import _backends, _build

SIZE = 5
raw = {"input_projection": projections.Identity()}
neurons = {
    "LIF": cells.LIF(SIZE),
    "LIF, reset decays": cells.LIF(SIZE, reset="decayed"),
    "LIF, reset to zero": cells.LIF(SIZE, reset="zero"),
    "LIF, no reset": cells.LIF(SIZE, reset="none"),
    "recurrent LIF": cells.LIF(SIZE, recurrent=projections.Dense()),
    "delayed LIF": cells.DelayedLIF(SIZE, delay=3),
    "delays": cells.DelayedLIF(SIZE, delay=(1, 4)),
    "ALIF": cells.ALIF(SIZE),
    "recurrent ALIF": cells.ALIF(SIZE, recurrent=projections.Dense()),
    "adLIF": cells.AdLIF(SIZE),
    "SiLIF": cells.SiLIF(SIZE),
    "C-SiLIF": cells.CSiLIF(SIZE, dt=(0.1, 0.5)),
    "resonate-and-fire": cells.ResonateAndFire(SIZE),
    "resonate-and-fire, zero": cells.ResonateAndFire(SIZE, reset="zero"),
    "ADPT": spiking_adpt(SIZE, beta=1.0, threshold=0.5, **raw),
    "ADPT, subtract": spiking_adpt(SIZE, beta=1.0, spike_reset="subtract", threshold=0.5, **raw),
    "ADPT, zero": spiking_adpt(SIZE, beta=1.0, spike_reset="zero", threshold=0.5, spiking_directions=True, **raw),
    "ADPT, adaptation": spiking_adpt(SIZE, beta=1.0, spike_adaptation=True, threshold=0.5, **raw),
    "ADPT, no memory": spiking_adpt(SIZE, beta=1.0, spike_reset="subtract", threshold=0.5, memory=None, **raw),
}
each_neuron = pytest.mark.parametrize("spec", neurons.values(), ids=neurons)


def currents(batch: int = 3, steps: int = 24, strength: float = 3.0) -> torch.Tensor:
    """Return random currents, strong enough that neurons fire, but not at every step."""
    return strength * (0.3 + torch.randn(batch, steps, SIZE))


def run(cell: cells.Cell, inputs: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return states and spikes of one sequence."""
    states = solvers.Sequential()(cell, inputs).states
    return states.detach().numpy(), cell.output(states).detach().numpy()


def to_numpy(parameter) -> np.ndarray:
    return parameter.detach().numpy()


@each_neuron
def test_neurons_fire_and_fall_silent(spec):
    """The comparisons below would test little on a neuron that never fires."""
    cell = spec.build()
    spikes = cell.output(solvers.Sequential()(cell, currents(8, 80)).states)
    assert set(spikes.unique().tolist()) == {0.0, 1.0}
    assert 0.005 < spikes.mean() < 0.9


@each_neuron
def test_single_steps_and_chunks_equal_the_whole_sequence(spec):
    layer, x = Recurrent(spec), currents()
    y, final = layer(x)
    state, outputs = None, []
    for t in range(x.shape[1]):
        out, state = layer.step(x[:, t], state)
        outputs.append(out)
    assert_close(torch.stack(outputs, 1), y)
    assert_close(state.state, final.state)
    first, middle = layer(x[:, :17])
    second, end = layer(x[:, 17:], middle)
    assert_close(torch.cat((first, second), 1), y)
    assert_close(end.state, final.state)
    assert not [name for name in layer.state_dict() if "state" in name]


@each_neuron
def test_time_major_and_lengths(spec):
    layer, x = Recurrent(spec), currents()
    time_first = Recurrent(spec, batch_first=False)
    time_first.load_state_dict(layer.state_dict())
    assert_close(time_first(x.transpose(0, 1))[0].transpose(0, 1), layer(x)[0])
    y, final = layer(x, lengths=torch.tensor([24, 7, 1]))
    alone, end = layer(x[1:2, :7])
    assert_close(y[1:2, :7], alone)
    assert_close(final.state[1:2], end.state)


@each_neuron
def test_a_parallel_solver_finds_the_same_spikes_and_gradients(spec):
    cell, x = spec.build(), currents(2, 15)
    expected = solvers.Sequential()(cell, x)
    weight = torch.randn_like(cell.output(expected.states))

    def gradients(states):
        cell.zero_grad()
        (cell.output(states) * weight).sum().backward()
        return [p.grad for p in cell.parameters() if p.grad is not None]

    expected_gradients = gradients(expected.states)
    for solver in (solvers.QuasiDEER(), solvers.Jacobi()):
        solution = solver(cell, x, adjoint=adjoints.Implicit())
        assert solution.result <= solvers.Result.FINISHED
        assert_close(cell.output(solution.states), cell.output(expected.states), atol=0, rtol=0)
        assert_close(solution.states, expected.states, atol=1e-6, rtol=1e-6)
        for gradient, reference in zip(gradients(solution.states), expected_gradients, strict=True):
            assert_close(gradient, reference, atol=1e-5, rtol=1e-5)


@each_neuron
def test_a_neuron_spec_round_trips_through_json(spec):
    assert type(spec).from_json(spec.to_json()) == spec


# The equations, written out in NumPy.


def test_lif_by_its_equation():
    for reset in ("subtract", "decayed", "zero", "none"):
        cell, x = cells.LIF(SIZE, reset=reset, threshold=0.8).build(), currents(1)[0]
        states, spikes = run(cell, x)
        d, u, s = to_numpy(cell.decay()), np.zeros(SIZE), np.zeros(SIZE)
        for t, current in enumerate(x.numpy()):
            kept = {"subtract": d * u - 0.8 * s, "decayed": d * (u - 0.8 * s), "zero": d * u * (1 - s), "none": d * u}
            u = kept[reset] + (1 - d) * current
            s = (u >= 0.8).astype(float)
            np.testing.assert_allclose(states[t], u, atol=1e-12)
            np.testing.assert_array_equal(spikes[t], s)


@pytest.mark.parametrize("delay", [None, 1, 4])
def test_recurrent_and_delayed_lif_by_their_equations(delay):
    """The recurrent current is W s[t] in rsnn and W s[t - τ] in eq:delay_lif."""
    spec = cells.LIF(SIZE, recurrent=projections.Dense()) if delay is None else cells.DelayedLIF(SIZE, delay)
    cell, x = spec.build(), currents(1)[0]
    states, spikes = run(cell, x)
    w, d = to_numpy(cell.recurrent.dense()), to_numpy(cell.decay())
    u, past = np.zeros(SIZE), [np.zeros(SIZE)] * 6
    for t, current in enumerate(x.numpy()):
        u = d * u + (1 - d) * (current + w @ past[-1 - (delay or 0)]) - past[-1]
        past.append((u >= 1).astype(float))
        np.testing.assert_allclose(states[t, :SIZE], u, atol=1e-12)
        np.testing.assert_array_equal(spikes[t], past[-1])


def test_each_neuron_has_a_delay_of_its_own():
    torch.manual_seed(1)
    cell, x = cells.DelayedLIF(SIZE, delay=(1, 4)).build(), currents(1)[0]
    assert len(cell.delays.unique()) > 1
    states, _ = run(cell, x)
    w, d, delays = to_numpy(cell.recurrent.dense()), to_numpy(cell.decay()), cell.delays.numpy()
    u, past = np.zeros(SIZE), [np.zeros(SIZE)] * 6
    for t, current in enumerate(x.numpy()):
        delayed = np.array([past[-1 - delays[j]][j] for j in range(SIZE)])
        u = d * u + (1 - d) * (current + w @ delayed) - past[-1]
        past.append((u >= 1).astype(float))
        np.testing.assert_allclose(states[t, :SIZE], u, atol=1e-12)


def test_alif_by_its_equation_with_a_resting_threshold():
    cell, x = cells.ALIF(SIZE, strength=0.7).build(), currents(1)[0]
    states, spikes = run(cell, x)
    d, alpha = to_numpy(cell.decay()), to_numpy(cell.slow_decay())
    u, a, s = np.zeros((3, SIZE))
    for t, current in enumerate(x.numpy()):
        a = alpha * a + (1 - alpha) * s
        u = d * u + (1 - d) * current - (1 + 0.7 * a) * s
        s = (u >= 1 + 0.7 * a).astype(float)
        np.testing.assert_allclose(states[t], [*u, *a], atol=1e-12)
        np.testing.assert_array_equal(spikes[t], s)


def test_adlif_by_its_equation():
    cell, x = cells.AdLIF(SIZE).build(), currents(1)[0]
    states, spikes = run(cell, x)
    d, alpha = to_numpy(cell.decay()), to_numpy(cell.slow_decay())
    a, b = to_numpy(cell.coupling), to_numpy(cell.jump)
    u, w, s = np.zeros((3, SIZE))
    for t, current in enumerate(x.numpy()):
        u, w = d * u + (1 - d) * (current + w) - s, alpha * w + (1 - alpha) * (a * u + b * s)
        s = (u >= 1).astype(float)
        np.testing.assert_allclose(states[t], [*u, *w], atol=1e-12)
        np.testing.assert_array_equal(spikes[t], s)


def test_silif_by_its_equation():
    cell, x = cells.SiLIF(SIZE).build(), currents(1)[0]
    with torch.no_grad():
        cell.coupling[0], cell.jump[0] = 1.7, -0.4  # clamped in the step
    states, spikes = run(cell, x)
    step = np.exp(to_numpy(cell.log_dt))
    alpha, beta = (np.exp(-np.exp(to_numpy(rate)) * step) for rate in (cell.log_decay, cell.log_slow_decay))
    a, b = to_numpy(cell.coupling).clip(0, 1), to_numpy(cell.jump).clip(0, 2)
    u, w, s = np.zeros((3, SIZE))
    for t, current in enumerate(x.numpy()):
        w = beta * w + a * u + b * s
        u = alpha * (u - s) + (1 - alpha) * (current - w)
        s = (u > 1).astype(float)
        np.testing.assert_allclose(states[t], [*u, *w], atol=1e-12)
        np.testing.assert_array_equal(spikes[t], s)


def test_resonant_neurons_by_their_equations_in_complex_numbers():
    x = currents(1)[0]
    complex_silif, resonator = cells.CSiLIF(SIZE, dt=(0.1, 0.5)).build(), cells.ResonateAndFire(SIZE).build()
    for cell in (complex_silif, resonator):
        states, spikes = run(cell, x)
        step, decay = np.exp(to_numpy(cell.log_dt)), np.exp(to_numpy(cell.log_decay))
        multiplier = np.exp(step * (-decay + 1j * to_numpy(cell.frequency)))
        u, s = np.zeros(SIZE, complex), np.zeros(SIZE)
        for t, current in enumerate(x.numpy()):
            if cell is complex_silif:
                u = multiplier * (u - 0.5 * s) + to_numpy(cell.gain) * current
                s = (2 * u.real - 1 > 0).astype(float)
            else:
                u = multiplier * (u - 1j * s) + current
                s = (u.imag >= 1).astype(float)
            np.testing.assert_allclose(states[t].reshape(-1, 2), np.stack((u.real, u.imag), -1), atol=1e-12)
            np.testing.assert_array_equal(spikes[t], s)


@pytest.mark.parametrize("reset", ["none", "subtract", "zero"])
@pytest.mark.parametrize("adaptation", [False, True])
@pytest.mark.parametrize("directions_", ["relu", "spikes"])
def test_the_spiking_adpt_cell_by_its_equations_with_dense_matrices(reset, adaptation, directions_):
    theta, beta = 0.5, 0.7
    spec = spiking_adpt(
        SIZE, beta=beta, threshold=theta, spike_reset=reset, spike_adaptation=adaptation,
        spiking_directions=directions_ == "spikes",
        projection=projections.Dense(), input_projection=projections.Dense(),
    )  # fmt: skip
    cell, inputs = spec.build(), currents(1, 30)[0]
    states, spikes = run(cell, inputs)
    coupled = cell.inner
    lam, slow_decay = (to_numpy(s().real) for s in (coupled.fast.spectrum, coupled.slow))
    plane = coupled.fast.directions[0]
    k, v = to_numpy(plane.key_projection.dense()), to_numpy(plane.value_projection.dense())
    b, feedback = to_numpy(coupled.fast.drive.input_projection.dense()), to_numpy(coupled.feedback)
    jump = to_numpy(cell.jump) if adaptation else 0.0
    x, w = np.zeros((2, SIZE))
    for t, current in enumerate(inputs.numpy()):
        source = np.maximum(x, 0) if directions_ == "relu" else (x >= theta).astype(float)
        key, value = k @ source, v @ source
        rotation = np.eye(SIZE)
        if key.any() and value.any():
            key, value = key / np.linalg.norm(key), value / np.linalg.norm(value)
            skew = torch.from_numpy(beta * (np.outer(key, value) - np.outer(value, key)))
            rotation = torch.linalg.matrix_exp(skew).numpy()
        fired = (x >= theta).astype(float)
        kept = {"none": x, "subtract": x - theta * fired, "zero": x * (1 - fired)}[reset]
        x = rotation @ np.diag(lam) @ rotation.T @ kept + (1 - lam) * (b @ current + feedback * w)
        w = slow_decay * w + (1 - slow_decay) * (x + jump * (x >= theta))
        np.testing.assert_allclose(states[t], [*x, *w], atol=1e-10)
        np.testing.assert_array_equal(spikes[t], x >= theta)
    assert (feedback < 0).all()
    assert 0 < spikes.sum() < spikes.size


def test_at_beta_zero_it_is_a_coupled_linear_recurrence_with_a_threshold():
    """Both states in closed form, by powers of a 2-by-2 matrix for each neuron."""
    layer, x = SpikingADPTNet(6, beta=0.0, threshold=0.3), 3 * torch.randn(2, 30, 6)
    y, _ = layer(x)
    coupled = layer.cell.inner
    lam, slow = coupled.fast.spectrum().real, coupled.slow().real
    gain, feedback = 1 - lam, coupled.feedback
    rows = [lam, gain * feedback, (1 - slow) * lam, slow + (1 - slow) * gain * feedback]
    step = torch.stack(rows, -1).unflatten(-1, (2, 2))  # (6, 2, 2)
    drive = gain * coupled.fast.drive.project(x)
    entering = torch.stack((drive, (1 - slow) * drive), -1)
    states = torch.zeros(2, 30, 6, 2)
    for t in range(30):
        for k in range(t + 1):
            power = torch.linalg.matrix_power(step, t - k)
            states[:, t] += (power @ entering[:, k].unsqueeze(-1)).squeeze(-1)
    assert_close(y, (states[..., 0] >= 0.3).to(y))
    assert 0.05 < y.mean() < 0.95
    nonlinear = SpikingADPTNet(6, beta=1.0, threshold=0.3)
    nonlinear.load_state_dict(layer.state_dict())
    assert (nonlinear(x)[0] != y).any()


def test_a_spiking_read_out_alone_is_the_layer_and_a_threshold():
    spiking = SpikingADPTNet(6, beta=1.0, threshold=0.2)
    inner = adptnet.nn.LayerSpec(spiking.spec.cell.cell).build()
    inner.load_state_dict({name.replace("inner.", ""): v for name, v in spiking.state_dict().items()})
    x = 3 * torch.randn(2, 30, 6)
    assert_close(spiking(x)[0], (inner(x)[0] >= 0.2).to(x))
    for solver in (solvers.ConvDEER(), solvers.ForwardDEER(), solvers.DEER()):
        assert_close(spiking(x, solver=solver)[0], spiking(x)[0])


def test_the_fused_operation_runs_the_coupled_spiking_cell(monkeypatch):
    layer, x = SpikingADPTNet(6, beta=1.0, threshold=0.2), torch.randn(2, 30, 6)
    states = solvers.Sequential()(layer.cell, x).states
    by_steps, state = [], layer.cell.initial_state(2)
    drive = layer.cell.prepare(x, torch.zeros(2, 30, dtype=torch.int64))
    for t in range(30):
        state = layer.cell.step(state, drive[:, t])
        by_steps.append(state)
    assert_close(states, torch.stack(by_steps, 1), atol=1e-10, rtol=1e-10)


def test_the_boxcar_acts_on_the_state_above_its_threshold():
    layer = SpikingADPTNet(4, beta=0.0, threshold=2.0)
    state = torch.tensor([1.4, 1.6, 2.4, 2.6, 0, 0, 0, 0], requires_grad=True)
    layer.cell.output(state).sum().backward()
    assert state.grad.tolist() == [0, 1, 1, 0, 0, 0, 0, 0]


# Fixed-point parallel training.


def fpt(decay, theta, current, spike, iterations):
    """Run fixed-point training (fpt, eq:fpt_matrix) of one neuron: u ← -θ (B - I) s(u - θ) + B i, from u = 0.

    A smoothed threshold is positive even at u = 0, so the initial state of zero is reset as well.
    """
    steps = len(current)
    lags = torch.arange(steps)[:, None] - torch.arange(steps)
    powers = torch.where(lags >= 0, decay ** lags.clamp(min=0), 0.0)
    entering = theta * decay ** torch.arange(1, steps + 1) * spike(torch.tensor(-theta))
    u = torch.zeros(steps)
    for _ in range(iterations):
        u = -theta * (powers - torch.eye(steps)) @ spike(u - theta) + powers @ current - entering
    return u


@pytest.mark.parametrize("spike", [surrogate.Boxcar(), surrogate.Sigmoid(slope=4.0)], ids=repr)
def test_fixed_point_training_is_conv_deer_on_a_lif_whose_reset_decays(spike):
    cell = cells.LIF(1, reset="decayed", spike=spike, threshold=0.6).build()
    x = 3 * (0.3 + torch.randn(1, 30, 1))
    decay = cell.decay().item()
    current = (1 - decay) * x[0, :, 0]
    with torch.no_grad():
        for count in (1, 2, 5):
            solver = solvers.ConvDEER(fixed_iterations=count, on_failure=solvers.Return())
            found = solver(cell, x, guess=torch.zeros(1, 30, 1)).states[0, :, 0]
            assert_close(found, fpt(decay, 0.6, current, spike, count), atol=1e-12, rtol=1e-12)
        sequential, parallel = solvers.Sequential()(cell, x), solvers.ConvDEER()(cell, x)
    assert_close(fpt(decay, 0.6, current, spike, 30), sequential.states[0, :, 0], atol=1e-12, rtol=1e-12)
    assert_close(parallel.states, sequential.states, atol=1e-7, rtol=1e-7)
    assert_close(cell.output(parallel.states).round(), cell.output(sequential.states).round(), atol=0, rtol=0)
    assert parallel.result == solvers.Result.CONVERGED
    assert parallel.iterations.item() < 30


def test_gradients_of_a_smoothed_lif_agree_between_parallel_and_sequential_solvers():
    cell, x = cells.LIF(SIZE, reset="decayed", spike=cells.Sigmoid(4.0)).build(), currents(2, 30)
    gradients = []
    for solver in (solvers.Sequential(), solvers.ConvDEER()):
        cell.zero_grad()
        cell.output(solver(cell, x).states).square().sum().backward()
        gradients.append(cell.decay.log_rate.grad.clone())
    assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["SiLIF", "adLIF", "ALIF", "C-SiLIF", "LIF"])
def test_conv_deer_uses_the_transition_between_spikes(name):
    """Without spikes the transition is exact, and one iteration suffices."""
    cell = neurons[name].build()
    quiet = solvers.ConvDEER()(cell, currents(2, 30, strength=1e-3))
    assert (quiet.iterations == 1).all()
    loud = currents(2, 30)
    assert_close(solvers.ConvDEER()(cell, loud).states, solvers.Sequential()(cell, loud).states, atol=1e-7, rtol=1e-7)


# Surrogates.


@pytest.mark.parametrize(
    ("spike", "derivative"),
    [
        (surrogate.Boxcar(), lambda x: float(abs(x) < 0.5)),
        (surrogate.Triangle(), lambda x: max(0.0, 1 - abs(x))),
        (surrogate.ATan(alpha=3.0), lambda x: 1.5 / (1 + (math.pi / 2 * 3.0 * x) ** 2)),
        (surrogate.FastSigmoid(slope=10.0), lambda x: 1 / (1 + 10 * abs(x)) ** 2),
    ],
    ids=lambda v: repr(v) if isinstance(v, surrogate.SpikeFunction) else "",
)
def test_a_surrogate_is_a_step_with_its_derivative(spike, derivative):
    x = torch.tensor([-2.0, -0.7, -0.3, 0.0, 0.2, 0.6, 3.0], requires_grad=True)
    y = spike(x)
    assert y.tolist() == [0, 0, 0, 1, 1, 1, 1]
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert_close(gradient, torch.tensor([derivative(v) for v in x.tolist()]))
    assert_close(torch.func.vmap(torch.func.jacfwd(spike))(x.detach()), gradient)


def test_strict_does_not_fire_at_the_threshold():
    assert surrogate.Boxcar(strict=True)(torch.zeros(1)).item() == 0


class _UserSurrogate(torch.autograd.Function):
    """A surrogate built as in snnTorch."""

    @staticmethod
    def forward(ctx, x):
        return (x > 0).to(x)

    @staticmethod
    def backward(ctx, gradient):
        return 7 * gradient


def test_any_callable_is_a_surrogate():
    spec = cells.LIF(2, spike=_UserSurrogate.apply, reset="none")
    layer = Recurrent(spec)
    x = torch.full((1, 3, 2), 4.0, requires_grad=True)
    layer(x)[0][:, 0].sum().backward()
    assert_close(x.grad[0, 0], 7 * (1 - layer.cell.decay()))
    with pytest.raises(SpecError, match="cannot be stored in a spec"):
        spec.to_json()


# Dynamics, determinism, errors.


def test_lyapunov_exponents_of_neurons():
    """The exponents of a LIF without reset are the logarithms of its decay factors."""
    cell = cells.LIF(SIZE, reset="none").build()
    found = analysis.lyapunov_exponents(cell, currents(1, 300)).exponents.flatten()
    assert_close(found.sum(), cell.decay().log().sum(), atol=1e-9, rtol=1e-9)
    assert_close(found.sort().values, cell.decay().log().sort().values, atol=0.02, rtol=0)
    spiking = analysis.lyapunov_exponents(SpikingADPTNet(4, beta=1.0).cell, torch.randn(1, 100, 4))
    assert spiking.exponents.isfinite().all()


def test_batches_share_no_graph_and_evaluation_is_deterministic():
    layer = SpikingADPTNet(SIZE)
    for _ in range(2):
        layer(currents())[0].sum().backward()
    x = currents()
    assert_close(layer(x)[0], layer(x)[0], atol=0, rtol=0)
    drawn = Recurrent(cells.SiLIF(SIZE, initial="uniform"))
    states = [drawn.solve(x).states for _ in range(2)]
    assert (states[0] != states[1]).any()
    start = drawn.initial_state(1000).state
    assert 0 <= start.min() < 0.1 < 0.9 < start.max() < 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: cells.LIF(4, spike=cells.Boxcar), r"Pass spike=Boxcar\(\)"),
        (lambda: cells.LIF(4, reset="soft"), "Known: decayed, none, subtract, zero"),
        (lambda: cells.LIF(4, decay=(0.5, 1.0)), "below 1"),
        (lambda: cells.LIF(4, decay=0.9), "must be a range"),
        (lambda: cells.DelayedLIF(4, delay=0), "integer >= 1"),
        (lambda: cells.DelayedLIF(4, delay=(3, 2)), r"a range \(low, high\)"),
        (lambda: cells.SiLIF(4, initial="random"), "Known: uniform, zero"),
        (lambda: cells.SpikingADPT(cells.ADPTSpec(4), adaptation=True), "memory=cells.SlowMemory"),
        (lambda: cells.SpikingADPT(cells.SiLIF(4)), "must be a ADPTSpec"),
        (lambda: SpikingADPTNet(4, treshold=1.0), r"treshold=.*Perhaps you meant 'threshold'"),
        (lambda: SpikingADPTNet(4, reset="zero"), r"reset=.*Perhaps you meant 'spike_reset'"),
        (lambda: SpikingADPTNet(0), "a width of 0: must be an integer >= 1"),
        (lambda: spiking_adpt_for_speech(0), "a width of 0: must be an integer >= 1"),
        (
            lambda: SpikingModelSpec(spiking_adpt(4, state_size=6), 3, 2),
            "instead of spikes. Build the neuron without state_size",
        ),
        (lambda: SpikingADPTNet(4, spike_reset="soft"), "Known: none, subtract, zero"),
        (lambda: SpikingModelSpec(cells.ReLURNN(4), 3, 2), r"cells.SiLIF\(512\)"),
        (lambda: SpikingModelSpec(cells.LIF(4), 3, 2, readout="sum"), "Known: last, max, mean, softmax"),
        (lambda: projections.Identity(bias=True), "no parameters"),
        (lambda: adptnet.ADPTNet.paper(4, state_size=6, input_projection=projections.Identity()), "must be equal"),
        (lambda: spectra.LogUniformDecay(5.0, 1.0), "Exchange"),
        (lambda: cells.SlowMemory(feedback=(1.0, -1.0)), "Exchange"),
    ],
)
def test_invalid_choices_raise_with_the_fix(make, words):
    with pytest.raises((SpecError, IncompatibleError), match=words):
        make()


def test_a_layer_with_another_state_size_has_a_readout_of_its_spikes():
    layer = SpikingADPTNet(4, state_size=6, threshold=0.1)
    x = torch.randn(2, 5, 4)
    outputs, state = layer(x)
    assert (outputs.shape, state.state.shape) == ((2, 5, 4), (2, 12))
    spikes = layer.cell.output(layer.solve(x).states)
    assert_close(outputs, layer.readout(spikes))


def test_a_spike_function_must_return_a_spike_for_each_neuron():
    layer = Recurrent(cells.LIF(4, spike=lambda above: (above > 0).to(above).sum()))
    with pytest.raises(InputError, match=r"returned shape \(\) for \(2, .*elementwise"):
        layer(torch.randn(2, 3, 4))


# Networks.


@pytest.mark.parametrize(("width", "count"), [(512, 355_689), (2048, 1_069_481)])
def test_spiking_adptnet_has_as_many_parameters_as_in_the_paper(width, count):
    model = spiking_adpt_for_speech(width).build(device="meta")
    assert sum(p.numel() for p in model.parameters()) == count


def test_silif_has_as_many_parameters_as_its_authors_report():
    assert sum(p.numel() for p in silif_for_speech().build(device="meta").parameters()) == 359_017


def tiny(**changes) -> SpikingModelSpec:
    return SpikingModelSpec(cells.SiLIF(8), 6, 3, **changes)


@pytest.mark.parametrize("readout", ["softmax", "mean", "max", "last"])
def test_padding_does_not_change_the_output(readout):
    model, x = tiny(readout=readout).build(), 4 * torch.rand(2, 20, 6)
    for mode in (True, False):
        model.train(mode)
        short, _ = model(x[:, :12])
        padded = torch.cat((x[:, :12], torch.full((2, 8, 6), 99.0)), 1)
        assert_close(model(padded, lengths=torch.tensor([12, 12]))[0], short)


def test_the_read_out_sums_softmax_over_time_and_streams():
    model, x = tiny(dropout=0.5).build().eval(), 4 * torch.rand(2, 20, 6)
    score, final = model(x)
    assert_close(score.sum(-1), torch.full((2,), 20.0))
    total, state = torch.zeros(2, 3), None
    for t in range(20):
        probabilities, state = model.step(x[:, t], state)
        total = total + probabilities
    assert_close(total, score)
    assert all(torch.equal(a.state, b.state) for a, b in zip(state, final, strict=True))
    model.train()
    with pytest.raises(InputError, match=r"model\.eval"):
        model.step(x[:, 0])


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (torch.zeros(2, 3), r"one frame of each sequence, \(batch, 5\); got shape \(2, 3\)"),
        (torch.zeros(2, 7, 5), "For a whole sequence call the network itself"),
        (torch.zeros(2, 5, dtype=torch.int64), r"Pass inputs.float\(\)"),
        (torch.zeros(2, 5, dtype=torch.float64), "precision would be lost"),
    ],
)
def test_an_invalid_frame_raises(frame, words):
    model = SpikingModelSpec(cells.LIF(4), 5, 2).build(dtype=torch.float32).eval()
    with pytest.raises(InputError, match=words):
        model.step(frame)
    with pytest.raises(InputError, match="precision would be lost"):
        model(torch.zeros(2, 7, 5, dtype=torch.float64))


def test_a_network_equals_its_equations():
    """Linear map, batch norm over batch and time, neurons, then the leaky read-out, written out."""
    model, x = tiny(depth=1).build(), 4 * torch.rand(2, 20, 6)
    score, _ = model(x)
    layer = model.layers[0]
    current = x @ layer.currents.projection.weight.mT
    current = (current - current.mean((0, 1))) / (current.var((0, 1), unbiased=False) + 1e-5).sqrt()
    spikes = layer.neurons(current)[0]
    out = spikes @ model.decoder.projection.weight.mT
    out = (out - out.mean((0, 1))) / (out.var((0, 1), unbiased=False) + 1e-5).sqrt()
    decay = model.integrators.cell.decay
    u, total = torch.zeros(2, 3), torch.zeros(2, 3)
    for t in range(20):
        u = decay * u + (1 - decay) * out[:, t]
        total = total + u.softmax(-1)
    assert_close(score, total)
    assert spikes.any()
    assert layer.currents.norm.norm.momentum == 0.05
    bound = math.sqrt(6 / (6 + 8))
    assert bound * 0.8 < layer.currents.projection.weight.abs().max() <= bound


def test_a_network_learns_and_is_saved(tmp_path):
    torch.manual_seed(0)
    model = spiking_adpt_for_speech(16, input_size=6, output_size=2, dropout=0.0, layer_norm=False).build()
    x = (torch.rand(32, 20, 6) < 0.3).double()
    labels = torch.arange(32) % 2
    x[labels == 1, :, :3] *= 0.2
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    losses = []
    for _ in range(25):
        loss = nn.functional.cross_entropy(model(x)[0] / 20, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    adptnet.save(model, tmp_path / "model")
    again = adptnet.load(tmp_path / "model").eval()
    assert_close(again(x)[0], model(x)[0])


@pytest.mark.skipif(not _build.kernels_enabled(), reason="ADPTNET_BACKEND=reference")
def test_the_speech_networks_run_in_the_kernel(caplog, monkeypatch):
    monkeypatch.setattr(_backends, "_logged", set())
    model = spiking_adpt_for_speech(16, input_size=6, output_size=2).build()
    x, lengths = (torch.rand(3, 20, 6) < 0.3).double(), torch.tensor([20, 4, 9])
    model(x, lengths=lengths)[0].sum().backward()
    assert not caplog.records
    model.eval()
    fused = model(x, lengths=lengths)[0]
    monkeypatch.setenv("ADPTNET_BACKEND", "reference")
    assert_close(fused, model(x, lengths=lengths)[0])


def test_the_scan_of_integrators_equals_the_loop():
    layer = Recurrent(cells.LeakyIntegrator(5))
    x, lengths, reset = torch.randn(3, 9, 5), torch.tensor([9, 1, 4]), torch.rand(3, 9) < 0.3
    results = []
    for adjoint in (None, adjoints.Implicit()):  # in one scan, and step by step
        y, final = layer(x, lengths=lengths, reset=reset, adjoint=adjoint)
        gradient = torch.autograd.grad(y.sin().sum() + final.state.cos().sum(), layer.cell.decay)[0]
        results.append((y.detach(), final.state.detach(), gradient))
    for a, b in zip(*results, strict=True):
        assert_close(a, b)


def test_a_trace_holds_inputs_membranes_and_spikes_of_each_layer():
    model, x = tiny().build().eval(), 4 * torch.rand(2, 20, 6)
    first, second = model.trace(x, lengths=torch.tensor([20, 5]))
    assert_close(first.inputs[0], x[0])
    assert_close(second.inputs, first.spikes)
    assert not second.spikes[1, 5:].any()
    assert not first.membrane[1, 5:].any()
    assert_close((first.membrane > 1).to(x), first.spikes)


def test_spiking_directions_are_directions_of_the_cell():
    cell = SpikingADPTNet(SIZE, spiking_directions=True, threshold=0.4).spec.cell
    assert cell.cell.direction == directions.FromState(spike=0.4)


def test_a_network_of_a_layer_spec_raises_with_the_advice_to_pass_its_cell():
    for layer in (SpikingADPTNet(12), Recurrent(cells.SiLIF(12))):
        with pytest.raises(SpecError, match=r"must be a spiking cell\. Pass layer\.spec\.cell, not layer\.spec\."):
            SpikingModelSpec(layer.spec, input_size=7, output_size=3)
        assert SpikingModelSpec(layer.spec.cell, input_size=7, output_size=3).neuron.width == 12
    with pytest.raises(SpecError, match=r"must be a spiking cell\. Pass cells\.SiLIF\(512\)"):
        SpikingModelSpec(cells.GRU(12), input_size=7, output_size=3)
