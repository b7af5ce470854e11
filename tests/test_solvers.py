"""Every solver finds the states of `Sequential`, with their gradients, or says that it does not."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from adptnet import ADPTNet, adjoints, cells, conjugates, directions, errors, solvers, spectra
from adptnet.solvers import linearisations
from members import build, legal, name_of

FAMILY = {
    "deer": solvers.DEER,
    "quasi": solvers.QuasiDEER,
    "forward": solvers.ForwardDEER,
    "conv": solvers.ConvDEER,
    "koopman": solvers.KoopmanDEER,
    "koopman3": lambda *damping, **options: solvers.KoopmanDEER(*damping, means=3, **options),
    "jacobi": solvers.Jacobi,
    "picard": solvers.Picard,
}
NEEDS_M = ("forward", "conv")
DAMPINGS = [solvers.Scale(0.9), solvers.TrustRegion(0.1), solvers.Adaptive(), solvers.Proximal()]
STEPS, LENGTHS = 13, [13, 6, 1]


def others():
    """Cells without M."""
    return [
        cells.from_torch(torch.nn.GRUCell(4, 5)),
        cells.from_torch(torch.nn.LSTMCell(4, 3)),
        cells.from_torch(torch.nn.RNNCell(4, 5)),
        cells.TanhRNN(4, 5).build(),
    ]


def task(cell):
    torch.manual_seed(1)
    x = torch.randn(3, STEPS, cell.input_size)
    state = 0.3 * torch.randn(3, cell.state_size) + cell.initial_state(1)
    return x, state, {"reset": torch.rand(3, STEPS) < 0.1, "lengths": torch.tensor(LENGTHS)}


def solvable(name, cell):
    return name not in NEEDS_M or not isinstance(cell, (cells.StatefulCell, cells.TanhRNNCell, type(others()[0])))


@pytest.mark.parametrize("axes", legal, ids=name_of)
def test_every_linearisation_finds_the_sequential_states(axes):
    cell = build(axes).cell
    x, state, options = task(cell)
    with torch.no_grad():
        expected = solvers.Sequential()(cell, x, state, **options)
        for name, solver in FAMILY.items():
            if solvable(name, cell):
                found = solver(rtol=1e-13)(cell, x, state, **options)
                assert_close(found.states, expected.states, atol=1e-9, rtol=1e-9)
                assert_close(found.final, expected.final, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("damping", DAMPINGS, ids=repr)
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("axes", [legal[0], legal[8], {"width": 4, "beta": 4.0}], ids=name_of)
def test_damped_and_in_blocks_the_states_are_the_same(axes, name, damping):
    cell = build(axes).cell
    x, state, options = task(cell)
    with torch.no_grad():
        expected = solvers.Sequential()(cell, x, state, **options)
        solver = FAMILY[name](damping, rtol=1e-13)
        for each in (solver, solvers.BlockWise(solver, block_length=5), solvers.BlockWise(solver, num_blocks=2)):
            assert_close(each(cell, x, state, **options).states, expected.states, atol=1e-9, rtol=1e-9)


def gradients(cell, solver, adjoint=None):
    x, state, options = task(cell)
    x.requires_grad_()
    state.requires_grad_()
    found = solver(cell, x, state, adjoint=adjoint, **options)
    weight = torch.randn(found.states.shape, generator=torch.Generator().manual_seed(2))
    loss = (weight * found.states).sum() + found.final.sin().sum()
    return torch.autograd.grad(loss, [x, state, *cell.parameters()], allow_unused=True, materialize_grads=True)


def assert_same_gradients(found, expected):
    for one, other in zip(found, expected, strict=True):
        scale = max(1e-12, float(other.abs().max()))
        assert float((one - other).abs().max()) <= 1e-8 * scale


@pytest.mark.parametrize("name", FAMILY)
def test_gradients_are_those_of_back_propagation_through_time(name):
    layers = [build(axes).cell for axes in (*legal[::11], {"width": 4, "beta": 2.0, "memory": cells.SlowMemory()})]
    for cell in [*layers, *others()]:
        if solvable(name, cell):
            expected = gradients(cell, solvers.Sequential())
            assert_same_gradients(gradients(cell, FAMILY[name](rtol=1e-13)), expected)


@pytest.mark.parametrize(
    "adjoint",
    [
        adjoints.Implicit(max_iterations=0),
        adjoints.Implicit(max_iterations=2),
        adjoints.Unrolled(),
        adjoints.Checkpointed(),
    ],
    ids=repr,
)
def test_gradients_do_not_depend_on_the_adjoint(adjoint):
    for cell in (build(legal[0]).cell, build(legal[9]).cell, others()[0]):
        expected = gradients(cell, solvers.Sequential())
        for solver in (solvers.QuasiDEER(rtol=1e-13), solvers.BlockWise(solvers.QuasiDEER(rtol=1e-13), 3)):
            assert_same_gradients(gradients(cell, solver, adjoint), expected)


def test_a_captured_tensor_gets_its_gradient():
    weight = torch.randn(3, 3, requires_grad=True)
    cell = cells.from_function(lambda state, drive: torch.tanh(0.4 * state @ weight.mT + drive), 3)
    x = torch.randn(2, 9, 3)
    found, expected = (
        torch.autograd.grad(solver(cell, x).states.sin().sum(), weight)[0]
        for solver in (solvers.QuasiDEER(), solvers.Sequential())
    )
    assert_close(found, expected, atol=1e-12, rtol=1e-9)
    loss = solvers.QuasiDEER()(cell, x).states.sin().sum()
    with pytest.raises(errors.IncompatibleError, match=r"parameter of the cell.*Unrolled"):
        torch.autograd.grad(loss, weight, create_graph=True)


@pytest.mark.parametrize("solver", [solvers.ConvDEER(), solvers.BlockWise(solvers.QuasiDEER(), 2)], ids=repr)
def test_second_derivatives_and_forward_mode(solver):
    layer, x = ADPTNet(4, beta=1.0), torch.randn(2, 6, 4, requires_grad=True)

    def twice(solver):
        loss = solver(layer.cell, x).states.pow(3).sum()
        inner = torch.autograd.grad(loss, [x, *layer.cell.parameters()], create_graph=True, allow_unused=True)
        return torch.autograd.grad(sum(part.square().sum() for part in inner if part is not None), x)[0]

    assert_close(twice(solver), twice(solvers.Sequential()), atol=1e-9, rtol=1e-8)
    point, direction = x.detach(), torch.randn(2, 6, 4)

    def along(solver):
        return torch.func.jvp(lambda y: solver(layer.cell, y).states, (point,), (direction,))[1]

    assert_close(along(solver), along(solvers.Sequential()))


@pytest.mark.parametrize("name", ["deer", "quasi", "forward", "conv", "jacobi"])
@pytest.mark.parametrize("damping", [None, solvers.Scale(0.7)], ids=repr)
def test_after_k_iterations_the_first_k_states_are_exact(name, damping):
    cell, x = ADPTNet(5, beta=3.0, spectrum=spectra.Negative(spectra.S4DReal(), 0.5)).cell, torch.randn(2, 30, 5)
    with torch.no_grad():
        expected = solvers.Sequential()(cell, x).states
        for k in (1, 4, 11):
            solver = FAMILY[name](damping, max_iterations=k, patience=None, on_failure=solvers.Return())
            found = solver(cell, x).states
            assert_close(found[:, :k], expected[:, :k], atol=1e-13, rtol=1e-11)


@pytest.mark.parametrize("name", ["deer", "quasi", "forward", "conv"])
def test_a_linear_layer_takes_one_iteration(name):
    for layer in (ADPTNet(6, beta=0.0), ADPTNet(6, beta=5.0, spectrum=spectra.Linspace(dt_min=0.01, dt_max=0.01))):
        solution = FAMILY[name]()(layer.cell, torch.randn(2, 300, 6))
        assert solution.result == solvers.Result.CONVERGED
        assert solution.iterations.tolist() == [1, 1]


def test_taylor_makes_conv_and_forward_the_same():
    x = torch.randn(2, 40, 6)
    layer = ADPTNet(6, beta=0.3, conjugate=conjugates.Taylor())
    conv, forward = (solver()(layer.cell, x) for solver in (solvers.ConvDEER, solvers.ForwardDEER))
    assert torch.equal(conv.states, forward.states)
    linear = ADPTNet(6, beta=0.3, conjugate=conjugates.Taylor(), direction=directions.FromInput())
    found = [solver()(linear.cell, x) for solver in (solvers.ConvDEER, solvers.ForwardDEER, solvers.QuasiDEER)]
    assert all(torch.equal(found[0].iterations, other.iterations) for other in found)
    assert all(torch.equal(found[0].states, other.states) for other in found)


def test_a_layer_linear_in_its_state_is_one_scan_of_matrices():
    solution = solvers.DEER()(ADPTNet(6, beta=3.0, direction=directions.FromInput()).cell, torch.randn(2, 50, 6))
    assert solution.iterations.tolist() == [1, 1]


def test_koopman_takes_fewer_iterations_than_the_diagonal_at_large_beta():
    torch.manual_seed(0)
    layer, x = ADPTNet(32, beta=4.0), torch.randn(3, 400, 32)
    koopman, quasi = (solver()(layer.cell, x).iterations for solver in (solvers.KoopmanDEER, solvers.QuasiDEER))
    assert koopman.float().mean() < quasi.float().mean()
    polar = solvers.KoopmanDEER(mean=linearisations.MeanRotation)(layer.cell, x)
    assert_close(polar.states, solvers.Sequential()(layer.cell, x).states, atol=1e-9, rtol=1e-9)


def test_a_mean_in_single_precision_converges():
    layer = ADPTNet(32, beta=1.0, dtype=torch.float32)
    assert solvers.KoopmanDEER()(layer.cell, torch.randn(2, 500, 32).float()).result == solvers.Result.CONVERGED


def test_failure_is_a_value_and_the_policy_deals_with_it():
    cell, x = ADPTNet(6, beta=4.0).cell, torch.randn(3, 60, 6)
    options = {"max_iterations": 2}
    expected = solvers.Sequential()(cell, x).states
    finished = solvers.ConvDEER(**options)(cell, x)
    assert finished.result == solvers.Result.FINISHED
    assert_close(finished.states, expected, atol=1e-11, rtol=1e-11)
    returned = solvers.ConvDEER(on_failure=solvers.Return(), **options)(cell, x)
    assert returned.result == solvers.Result.NOT_CONVERGED
    assert (returned.converged_steps < 60).all()
    with pytest.raises(errors.NotConverged, match=r"3 of 3 sequences.*on_failure=solvers.Finish"):
        solvers.ConvDEER(on_failure=solvers.Raise(), **options)(cell, x)
    with pytest.warns(errors.NotConvergedWarning, match="Return"):
        ADPTNet(6, beta=4.0)(x, solver=solvers.ConvDEER(on_failure=solvers.Return(), **options))


@pytest.mark.parametrize("name", FAMILY)
def test_edges(name):
    layer, solver = ADPTNet(6, beta=1.0), FAMILY[name]()
    for batch, steps in ((2, 0), (0, 5), (2, 1)):
        assert layer(torch.randn(batch, steps, 6), solver=solver)[0].shape == (batch, steps, 6)
    x = torch.randn(2, 9, 6)
    x[0, 4] = torch.nan
    solution = solver(layer.cell, x)
    assert solution.results.tolist() == [solvers.Result.NON_FINITE, solvers.Result.CONVERGED]
    assert solution.converged_steps.tolist() == [4, 9]


def test_a_sequence_does_not_depend_on_its_neighbours():
    cell, x = ADPTNet(6, beta=2.0).cell, torch.randn(4, 40, 6)
    together = solvers.QuasiDEER()(cell, x)
    for i in range(4):
        alone = solvers.QuasiDEER()(cell, x[i : i + 1])
        assert_close(together.states[i], alone.states[0], atol=1e-10, rtol=1e-10)
        assert abs(int(together.iterations[i] - alone.iterations)) <= 1  # which steps are dropped when is shared


def test_a_step_that_hands_back_what_it_was_given():
    cell, x = cells.from_function(lambda state, drive: drive, 3, 3), torch.randn(2, 40, 3)
    before = x.clone()
    for name in ("jacobi", "picard", "quasi", "deer"):
        with torch.no_grad():
            assert_close(FAMILY[name]()(cell, x).states, before)
        leaf = before.clone().requires_grad_()
        FAMILY[name]()(cell, leaf).states.sum().backward()
        assert torch.equal(leaf.detach(), before)
        assert torch.equal(leaf.grad, torch.ones_like(before))
    assert torch.equal(x, before)


def test_after_finishing_blocks_every_step_counts_as_right():
    cell, x = ADPTNet(6, beta=4.0).cell, torch.randn(3, 13, 6)
    solver = solvers.BlockWise(solvers.ConvDEER(max_iterations=1), block_length=5)
    assert solver(cell, x, lengths=torch.tensor([13, 4, 10])).converged_steps.tolist() == [13, 4, 10]


def test_padding_makes_no_nan_in_gradients():
    cell, x = cells.from_function(lambda state, drive: 0.5 * state.sqrt() + drive, 2, 2), torch.rand(2, 12, 2) + 0.1
    for solver in (solvers.QuasiDEER(), solvers.BlockWise(solvers.QuasiDEER(), block_length=4)):
        leaf = x.clone().requires_grad_()
        found = solver(cell, leaf, torch.ones(2, 2), lengths=torch.tensor([12, 2]))
        found.states.sum().backward()
        assert leaf.grad.isfinite().all()


def test_one_run_tells_the_count_of_every_shorter_one():
    cell, x = ADPTNet(6, beta=2.0).cell, torch.randn(3, 80, 6)
    history = solvers.ConvDEER()(cell, x).history
    for steps in (1, 20, 50):
        assert torch.equal(history.iterations_for(steps), solvers.ConvDEER()(cell, x[:, :steps]).iterations)


def test_a_guess_makes_it_shorter():
    cell, x = ADPTNet(6, beta=2.0).cell, torch.randn(3, 80, 6)
    first = solvers.ConvDEER()(cell, x)
    again = solvers.ConvDEER()(cell, x, guess=first.states)
    assert again.iterations.tolist() == [1, 1, 1]
    with pytest.raises(errors.InputError, match="guess has shape"):
        solvers.ConvDEER()(cell, x, guess=first.states[:, 1:])


def test_resets_to_an_initial_state_that_is_not_zero():
    class Started(cells.Cell):
        input_size, state_size = 2, 2

        def step(self, state, drive):
            return 0.5 * state + drive

        def initial_state(self, batch, *, device=None, dtype=None):
            return torch.ones(batch, 2)

    x, reset = torch.randn(1, 20, 2), torch.arange(20).unsqueeze(0) == 7
    solution = solvers.DEER()(Started(), x, reset=reset)
    assert solution.iterations.tolist() == [1]
    assert_close(solution.states, solvers.Sequential()(Started(), x, reset=reset).states)


COMPILED = """
import torch
from adptnet import ADPTNet, solvers

torch.set_default_dtype(torch.float64)
layer, x = ADPTNet(4, beta=0.5), torch.randn(2, 20, 4)
solver = solvers.ForwardDEER(fixed_iterations=20, on_failure=solvers.Return())
compiled = torch.compile(lambda y: solver(layer.cell, y).states, fullgraph=True, backend="eager")
assert float((compiled(x) - solvers.Sequential()(layer.cell, x).states).abs().max()) < 1e-9
"""


def test_compiled_with_fixed_iterations():
    subprocess.run([sys.executable, "-c", COMPILED], check=True)  # without the checks of shapes, which do not compile


@pytest.mark.parametrize("solver", [solvers.ConvDEER(), solvers.ForwardDEER()], ids=repr)
def test_a_cell_without_m_is_refused_with_what_to_use(solver):
    with pytest.raises(errors.IncompatibleError, match=r"TorchCell has n.*QuasiDEER"):
        solver(others()[0], torch.randn(2, 5, 4))


def test_auto_says_why():
    choice = solvers.Auto().choose(ADPTNet(8).cell, 1, 4096, "cpu")
    assert choice.reason.endswith(".")
    x = torch.randn(2, 100, 8)
    layer = ADPTNet(8, beta=1.0)
    assert_close(solvers.Auto()(layer.cell, x).states, solvers.Sequential()(layer.cell, x).states, atol=1e-9, rtol=1e-9)


spectrum_strategy = st.sampled_from(
    [spectra.Linspace(), spectra.Negative(spectra.S4DReal(), 0.5), spectra.S4DInv(), spectra.LRURing()]
)


def no_silent_failure(seed, steps, pairs, beta, spectrum, name, damping, dtype):
    torch.manual_seed(seed)
    layer = ADPTNet(2 * pairs, beta=beta, spectrum=spectrum, dtype=dtype)
    x = torch.randn(2, steps, 2 * pairs, dtype=dtype)
    solver = FAMILY[name](damping, on_failure=solvers.Return())
    with torch.no_grad():
        found = solver(layer.cell, x)
        drive = layer.cell.prepare(x, torch.arange(steps).expand(2, steps))
        entering = torch.cat((torch.zeros_like(found.states[:, :1]), found.states[:, :-1]), 1)
        values = layer.cell.step(entering, drive)
        eps = torch.finfo(dtype).eps
        scale = torch.maximum(entering.abs().amax(-1), values.abs().amax(-1))
        right = ((values - found.states).abs().amax(-1) <= 2 * eps + 1.1 * eps**0.75 * scale).all(-1)
        assert bool((right | (found.results != solvers.Result.CONVERGED)).all())
        finished = FAMILY[name](damping)(layer.cell, x)
        assert bool((finished.results <= solvers.Result.FINISHED).all())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    steps=st.integers(1, 30),
    pairs=st.integers(1, 4),
    beta=st.sampled_from([0.0, 0.1, 1.0, 5.0, 100.0]),
    spectrum=spectrum_strategy,
    name=st.sampled_from(sorted(FAMILY)),
    damping=st.sampled_from([None, *DAMPINGS]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_no_silent_failure(seed, steps, pairs, beta, spectrum, name, damping, dtype):
    no_silent_failure(seed, steps, pairs, beta, spectrum, name, damping, dtype)
