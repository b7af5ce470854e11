"""Parallel-in-time solvers against the sequential loop: states, laws, iteration counts, results."""

import gc
import subprocess
import sys
import weakref
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from adptnet import ADPTNet, LinearADPTNet, cells, directions, drive, errors, solvers, spectra
from adptnet.recurrence.conjugates import Exact, Product, Stateful, Taylor
from adptnet.solvers import Result
from adptnet.solvers.convergence_test import default_rtol
from adptnet.solvers.iterates import EvaluatedIterate
from adptnet.solvers.parallel import full_precision
from support.members import (
    all_blocks,
    all_cells,
    all_dampings,
    all_linearizations,
    all_spectra,
    build,
    build_cell,
    cell_name,
    covering_cells,
    covering_combinations,
    is_legal,
    legal_combinations,
    make_even,
    name_of,
)

STEPS = 9


class RaggedProblem:
    """A batch of ragged sequences with resets and an initial state for a cell, and its exact states."""

    def __init__(self, axes, steps=STEPS):
        self.cell = build_cell(axes)
        self.inputs = torch.randn(3, steps, self.cell.input_size)
        self.state = self.cell.initial_state(3) + 0.5 * torch.randn(3, self.cell.state_size)
        self.lengths = torch.tensor([steps, 4, steps - 3])
        self.reset = torch.zeros(3, steps, dtype=torch.bool)
        self.reset[0, steps // 2] = self.reset[2, 0] = self.reset[2, steps // 2 + 1] = True
        self.exact = {resets: self.solve(solvers.Sequential(), resets) for resets in (False, True)}

    def solve(self, solver, resets=True, **more):
        reset = self.reset if resets else None
        with torch.no_grad():
            return solver(self.cell, self.inputs, self.state, lengths=self.lengths, reset=reset, **more)


def assert_solves(combination, problem):
    solution = problem.solve(combination.solver(rtol=1e-13), combination.takes_resets)
    exact = problem.exact[combination.takes_resets]
    assert solution.result <= Result.FINISHED, str(combination)
    # The Q that the stateful cell remembers may be no rotation, and then amplifies the state.
    allowed = 1e-9 * max(1.0, float(exact.states.abs().max()))
    assert_close(solution.states, exact.states, atol=allowed, rtol=0, msg=lambda text: f"{combination}\n{text}")
    assert_close(solution.final, exact.final, atol=allowed, rtol=0, msg=lambda text: f"{combination}\n{text}")
    if combination.blocks == "whole":
        assert torch.equal(solution.converged_steps, problem.lengths), str(combination)


@pytest.mark.parametrize("axes", covering_cells, ids=cell_name)
def test_a_solver_finds_the_sequential_states(axes):
    problem = RaggedProblem(axes)
    for combination in covering_combinations(axes):
        assert_solves(combination, problem)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("axes", all_cells, ids=cell_name)
def test_every_legal_solver_finds_the_sequential_states(axes):
    problem = RaggedProblem(axes)
    for combination in legal_combinations(axes):
        assert_solves(combination, problem)


def test_the_covering_combinations_hold_every_pair():
    covered = [combination for axes in covering_cells for combination in covering_combinations(axes)]
    for linearization in all_linearizations:
        for axes in covering_cells:
            expected = is_legal(axes, linearization, "undamped")
            assert expected == any(c.axes == axes and c.linearization == linearization for c in covered)
        for damping in all_dampings:
            assert any(c.linearization == linearization and c.damping == damping for c in covered), damping
        for blocks in all_blocks:
            assert any(c.linearization == linearization and c.blocks == blocks for c in covered), blocks


@pytest.mark.parametrize(
    ("axes", "solver", "words"),
    [
        ("GRUCell", solvers.ForwardDEER(), ["ForwardDEER", "TorchCell", "has no M", "QuasiDEER"]),
        ("GRUCell", solvers.ConvDEER(), ["ConvDEER", "constant eigenvalues", "TorchCell", "QuasiDEER"]),
        ("GRUCell", all_linearizations["Koopman, polar"](), ["one plane and one head", "KoopmanDEER()"]),
        ("GRUCell", solvers.QuasiDEER(solvers.Proximal()), ["Proximal", "ball", "TorchCell", "Scale(0.99)"]),
        ({"width": 6, "conjugate": Stateful()}, solvers.ForwardDEER(), ["StatefulCell", "has no M"]),
        ({"width": 6, "conjugate": Taylor()}, solvers.ConvDEER(solvers.Proximal()), ["Proximal", "ball", "ADPTCell"]),
        ({"width": 6, "memory": cells.SlowMemory()}, all_linearizations["Conv, by FFT"](), ["Coupled", "scan"]),
        ({"width": 6, "start": True}, all_linearizations["Koopman, polar"](), ["one plane", "KoopmanDEER()"]),
        ({"width": 6, "conjugate": Product(2)}, all_linearizations["Koopman, polar"](), ["one plane", "KoopmanDEER()"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(value)[:40],
)
def test_a_solver_that_does_not_fit_the_cell_names_one_that_does(axes, solver, words):
    cell = build_cell(axes)
    with pytest.raises(errors.IncompatibleError) as raised:
        solver(cell, torch.randn(2, 20, cell.input_size))
    for word in words:
        assert word in str(raised.value)


def test_a_convolution_rejects_resets():
    cell = build_cell({"width": 6, "beta": 1.0})
    with pytest.raises(errors.IncompatibleError, match="no reset"):
        all_linearizations["Conv, by FFT"]()(cell, torch.randn(2, 9, 6), reset=torch.ones(2, 9, dtype=torch.bool))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: solvers.ConvDEER("scale"), "Damping"),
        (lambda: solvers.ConvDEER(on_failure="raise"), "Policy"),
        (lambda: solvers.ConvDEER(atol=-1.0), "atol"),
        (lambda: solvers.DEER(max_iterations=0), "max_iterations"),
        (lambda: solvers.DEER(patience=1.5), "patience"),
        (lambda: solvers.DEER(fixed_iterations=True), "fixed_iterations"),
        (lambda: solvers.QuasiDEER(probes=0), "probes"),
        (lambda: solvers.KoopmanDEER(means=0), "means"),
        (lambda: solvers.Scale(1.5), r"in \[0, 1\]"),
        (lambda: solvers.TrustRegion(-0.1), "finite number"),
        (lambda: solvers.TrustRegion(float("nan")), "finite number"),
        (lambda: solvers.Adaptive(least=0.0), "least"),
        (lambda: solvers.Adaptive(factor=1.0), "factor"),
        (lambda: solvers.BlockWise(solvers.Sequential(), 3), "parallel in time"),
        (lambda: solvers.BlockWise(solvers.DEER()), "num_blocks"),
        (lambda: solvers.BlockWise(solvers.DEER(), 2, block_length=3), "num_blocks"),
        (lambda: solvers.BlockWise(solvers.DEER(), block_length=0), "block_length"),
    ],
)
def test_a_wrong_argument_is_named(make, words):
    with pytest.raises(errors.InputError, match=words):
        make()


def run(solver, cell, *given_, **more):
    with torch.no_grad():
        return solver(cell, *given_, **more)


exact_first = {name: make for name, make in all_linearizations.items() if name != "Conv, by FFT"}


@pytest.mark.parametrize("linearization", exact_first)
@pytest.mark.parametrize(
    ("damping", "spectrum"),
    [(None, spectra.Linspace()), (solvers.Scale(0.6), spectra.Negative(spectra.S4DInv(), 0.5))],
    ids=["real", "pairs, damped"],
)
def test_after_k_iterations_the_first_k_states_are_exact(linearization, damping, spectrum):
    cell = build_cell({"width": 6, "beta": 4.0, "spectrum": spectrum})
    inputs = torch.randn(2, 9, 6)
    exact = run(solvers.Sequential(), cell, inputs).states
    for k in (1, 2, 5, 8):
        options = {"max_iterations": k, "on_failure": solvers.Return(), "patience": None, "rtol": 0.0, "atol": 0.0}
        found = run(exact_first[linearization](damping, **options), cell, inputs)
        assert_close(found.states[:, :k], exact[:, :k], atol=1e-13, rtol=1e-13)


one_iteration = {name: all_linearizations[name] for name in ("DEER", "Quasi", "Forward", "Conv")}


@pytest.mark.parametrize("linearization", one_iteration)
@pytest.mark.parametrize(
    "axes",
    [
        {"width": 6, "beta": 0.0},
        {"width": 6, "beta": 0.0, "spectrum": spectra.S4DInv()},
        {"width": 6, "beta": 0.0, "spectrum": spectra.Negative(spectra.S4DReal(), 0.5), "rope": drive.RoPE()},
        {"width": 6, "beta": 2.0, "spectrum": spectra.FromExponents((-0.1,) * 6)},
    ],
    ids=name_of,
)
def test_a_linear_layer_takes_one_iteration(linearization, axes):
    cell = build_cell(axes)
    inputs, state = torch.randn(3, 40, 6), torch.randn(3, 6)
    found = run(one_iteration[linearization](on_failure=solvers.Raise()), cell, inputs, state)
    assert found.iterations.tolist() == [1, 1, 1]
    assert_close(found.states, run(solvers.Sequential(), cell, inputs, state).states, atol=1e-11, rtol=0)


@pytest.mark.parametrize("spectrum", [spectra.Linspace(), spectra.S4DInv()], ids=repr)
def test_a_layer_with_directions_from_the_input_takes_one_iteration_of_deer(spectrum):
    cell = LinearADPTNet(6, beta=2.0, spectrum=spectrum).cell
    inputs = torch.randn(2, 40, 6)
    found = run(solvers.DEER(on_failure=solvers.Raise()), cell, inputs)
    assert found.iterations.tolist() == [1, 1]
    assert_close(found.states, run(solvers.Sequential(), cell, inputs).states, atol=1e-11, rtol=0)


def iterates(make, cell, inputs, count):
    options = {"on_failure": solvers.Return(), "patience": None}
    return [run(make(max_iterations=k, **options), cell, inputs) for k in range(1, count)]


@pytest.mark.parametrize("spectrum", [spectra.Linspace(), spectra.S4DInv()], ids=repr)
@pytest.mark.parametrize("direction", [directions.FromState(), directions.FromInput()], ids=["state", "input"])
def test_for_taylor_of_order_one_several_linearizations_are_the_same(spectrum, direction):
    cell = build_cell({"width": 6, "beta": 0.5, "conjugate": Taylor(), "spectrum": spectrum, "direction": direction})
    inputs = torch.randn(2, 21, 6)
    same = [solvers.ConvDEER, solvers.ForwardDEER]
    same += [solvers.QuasiDEER] if isinstance(direction, directions.FromInput) else []
    for first, *others in zip(*(iterates(make, cell, inputs, 9) for make in same), strict=True):
        for other in others:
            assert_close(other.states, first.states, atol=1e-15, rtol=1e-14)
    counts = [run(make(), cell, inputs).iterations.tolist() for make in same]
    assert all(count == counts[0] for count in counts)


def hard_case(steps=2048):
    """A layer with long memory, which takes many iterations."""
    layer = ADPTNet.paper(16, beta=1.0, spectrum=spectra.Linspace(dt_min=1e-4, dt_max=1e-1))
    return layer.cell, torch.randn(1, steps, 16)


def test_on_the_hard_case_the_default_is_exact():
    cell, inputs = hard_case()
    exact = run(solvers.Sequential(), cell, inputs)
    found = run(solvers.ConvDEER(), cell, inputs)
    assert found.result <= Result.FINISHED
    assert found.converged_steps.tolist() == [2048]
    assert_close(found.states, exact.states, atol=1e-8, rtol=0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("make", [solvers.ConvDEER, solvers.ForwardDEER])
def test_the_longest_hard_case_is_exact_or_reports_that_it_is_not(make):
    layer = ADPTNet.paper(64, beta=1.0, spectrum=spectra.Linspace(dt_min=1e-4, dt_max=1e-1), dtype=torch.float32)
    inputs = torch.randn(1, 16384, 64, dtype=torch.float32)
    returned = run(make(on_failure=solvers.Return()), layer.cell, inputs)
    if returned.result == Result.CONVERGED:
        residual, scale = evaluate_residual(layer.cell, inputs, returned.states)
        assert (residual <= 2e-7 + 1e-5 * scale).all()
    else:
        assert int(returned.converged_steps) < 16384
    finished = run(make(), layer.cell, inputs)
    exact = run(solvers.Sequential(), layer.double().cell, inputs.double()).states
    error, own = (
        float((states - exact).abs().max())
        for states in (finished.states, run(solvers.Sequential(), layer.float().cell, inputs).states)
    )
    assert finished.result <= Result.FINISHED
    assert error <= 4 * own, (error, own)  # of the rounding error of float32 itself


def diverging_case():
    """A layer whose undamped iteration diverges, and one sequence (of zeros) that it solves in one iteration."""
    cell = build_cell({"width": 6, "beta": 2.0, "spectrum": spectra.Linspace(dt_min=1e-4, dt_max=1e-1)})
    inputs = torch.randn(3, 120, 6)
    inputs[1] = 0
    return cell, inputs


def test_sequences_that_did_not_converge_are_finished_sequentially():
    cell, inputs = diverging_case()
    exact = run(solvers.Sequential(), cell, inputs)
    found = run(solvers.ConvDEER(max_iterations=2), cell, inputs)
    assert found.results.tolist() == [Result.FINISHED, Result.CONVERGED, Result.FINISHED]
    assert_close(found.states, exact.states, atol=1e-9, rtol=0)
    assert found.converged_steps.tolist() == [120, 120, 120]
    assert "FINISHED" in repr(found)
    assert float(found.residual.max()) < 1e-12


def test_raise_reports_what_went_wrong_and_what_to_do():
    cell, inputs = diverging_case()
    with pytest.raises(errors.NotConverged) as raised:
        run(solvers.ConvDEER(max_iterations=2, on_failure=solvers.Raise()), cell, inputs)
    for word in ("ConvDEER", "iterations", "residual", "2 of 3 sequences (0, 2)", "of 120", "BlockWise", "Finish()"):
        assert word in str(raised.value)
    assert isinstance(raised.value, ArithmeticError)


def test_return_reports_that_it_did_not_converge_or_that_it_diverged():
    cell, inputs = diverging_case()
    options = {"on_failure": solvers.Return()}
    found = run(solvers.ConvDEER(max_iterations=2, patience=None, **options), cell, inputs)
    assert found.results.tolist() == [Result.NOT_CONVERGED, Result.CONVERGED, Result.NOT_CONVERGED]
    assert found.iterations.tolist() == [2, 1, 2]
    cell, inputs = hard_case(400)
    found = run(solvers.Picard(**options), cell, inputs)
    assert found.results.tolist() == [Result.DIVERGED]
    assert int(found.iterations.max()) < 400
    assert int(found.converged_steps.max()) < 400


@pytest.mark.parametrize("policy", [solvers.Finish(), solvers.Return()], ids=repr)
@pytest.mark.parametrize("make", [solvers.ConvDEER, solvers.DEER, solvers.KoopmanDEER, solvers.Jacobi])
def test_nan_is_reported_and_the_steps_before_it_are_right(make, policy):
    cell = build_cell({"width": 6, "beta": 0.1})
    inputs = torch.randn(3, 20, 6)
    exact = run(solvers.Sequential(), cell, inputs)
    inputs[1, 7, 2] = torch.nan
    found = run(make(on_failure=policy), cell, inputs)
    assert found.results[1] == Result.NON_FINITE
    assert found.results[[0, 2]].max() <= Result.FINISHED
    right = int(found.converged_steps[1])
    assert right == 7 if isinstance(policy, solvers.Finish) else right <= 7
    assert_close(found.states[1, :right], exact.states[1, :right], atol=1e-9, rtol=0)
    assert_close(found.states[[0, 2]], exact.states[[0, 2]], atol=1e-9, rtol=0)
    assert found.states[1, 7:].isnan().any(-1).all() or isinstance(policy, solvers.Return)


def test_nan_in_the_padding_does_not_matter():
    cell = build_cell({"width": 6, "beta": 1.0})
    inputs, lengths = torch.randn(2, 20, 6), torch.tensor([20, 7])
    clean = run(solvers.ConvDEER(), cell, inputs, lengths=lengths)
    inputs[1, 7:] = torch.nan
    found = run(solvers.ConvDEER(), cell, inputs, lengths=lengths)
    assert torch.equal(found.states, clean.states)
    assert found.result == Result.CONVERGED


@pytest.mark.parametrize("linearization", all_linearizations)
@pytest.mark.parametrize(("batch", "steps"), [(0, 5), (2, 1)])
@pytest.mark.parametrize("blocks", all_blocks)
def test_empty_batches_and_single_steps_are_solved(linearization, batch, steps, blocks):
    cell = build_cell({"width": 6, "beta": 1.0})
    inputs, state = torch.randn(batch, steps, 6), torch.randn(batch, 6)
    solver = all_linearizations[linearization]()
    solver = solver if all_blocks[blocks] is None else solvers.BlockWise(solver, **all_blocks[blocks])
    found, exact = run(solver, cell, inputs, state), run(solvers.Sequential(), cell, inputs, state)
    assert found.states.shape == exact.states.shape
    assert found.result == Result.CONVERGED
    assert found.converged_steps.tolist() == [steps] * batch
    assert_close(found.states, exact.states, atol=1e-12, rtol=0)
    assert_close(found.final, exact.final, atol=1e-12, rtol=0)
    assert repr(found)


@pytest.mark.parametrize("make", [solvers.DEER, solvers.ForwardDEER, solvers.KoopmanDEER])
def test_one_sequence_may_come_without_a_batch(make):
    cell = build_cell({"width": 6, "beta": 1.0})
    inputs, state = torch.randn(1, 12, 6), torch.randn(1, 6)
    whole, one = run(make(), cell, inputs, state), run(make(), cell, inputs[0], state[0])
    assert torch.equal(one.states, whole.states[0])
    assert torch.equal(one.final, whole.final[0])
    guessed = run(make(), cell, inputs[0], state[0], guess=one.states)
    assert_close(guessed.states, one.states, atol=1e-11, rtol=0)


@pytest.mark.parametrize("linearization", ["DEER", "Quasi", "Forward", "Conv", "Jacobi"])
@pytest.mark.parametrize("damping", ["undamped", "scale", "adaptive"])
def test_iterations_do_not_depend_on_the_other_sequences(linearization, damping):
    torch.manual_seed(1)  # no residual is within rounding of its tolerance: dropped steps move the scans by rounding
    cell = build_cell({"width": 6, "beta": 2.0, "spectrum": spectra.Linspace(dt_min=0.05, dt_max=1.0)})
    inputs = torch.randn(4, 24, 6) * torch.tensor([1.0, 0.01, 10.0, 0.0])[:, None, None]
    inputs[1, 5:] = 0
    solver = all_linearizations[linearization](all_dampings[damping])
    together = run(solver, cell, inputs)
    for i in range(4):
        alone = run(solver, cell, inputs[i : i + 1])
        assert int(alone.iterations) == int(together.iterations[i]), i
        assert int(alone.results) == int(together.results[i]), i
        assert_close(together.states[i], alone.states[0], atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("make", [solvers.ConvDEER, solvers.ForwardDEER, solvers.QuasiDEER, solvers.DEER])
def test_one_run_gives_the_iterations_of_every_shorter_sequence(make):
    cell = build_cell({"width": 6, "beta": 1.0})
    inputs = torch.randn(3, 40, 6)
    options = {"on_failure": solvers.Return(), "patience": None}
    history = run(make(**options), cell, inputs).history
    for k in (1, 2, 7, 16, 23, 40):
        assert history.iterations_for(k).tolist() == run(make(**options), cell, inputs[:, :k]).iterations.tolist(), k
    assert history.iterations_for(41).tolist() == [-1, -1, -1]
    assert len(history.residual) == 1 + int(run(make(**options), cell, inputs).iterations.max())


@pytest.mark.parametrize("make", [solvers.ConvDEER, solvers.QuasiDEER, solvers.DEER])
def test_a_better_guess_takes_no_more_iterations(make):
    cell = build_cell({"width": 6, "beta": 2.0})
    inputs = torch.randn(2, 50, 6)
    cold = run(make(), cell, inputs)
    warm = run(make(), cell, inputs, guess=cold.states + 1e-6 * torch.randn_like(cold.states))
    done = run(make(), cell, inputs, guess=cold.states)
    assert (warm.iterations <= cold.iterations).all()
    assert (done.iterations <= 2).all()  # one more where residuals of the size of rounding do not fall
    assert_close(warm.states, cold.states, atol=1e-10, rtol=0)


def test_a_guess_of_the_wrong_shape_is_rejected():
    cell = build_cell({"width": 6})
    with pytest.raises(errors.InputError, match="guess has shape"):
        run(solvers.ConvDEER(), cell, torch.randn(2, 9, 6), guess=torch.zeros(2, 8, 6))


@pytest.mark.parametrize("steps", [1, 4, 5, 6, 17])
@pytest.mark.parametrize(
    "blocks",
    [
        {"num_blocks": 1},
        {"num_blocks": 5},
        {"num_blocks": 40},
        {"block_length": 1},
        {"block_length": 5},
        {"block_length": 40},
    ],
    ids=str,
)
def test_blocks_may_be_of_any_length(steps, blocks):
    cell = build_cell({"width": 6, "beta": 1.0})
    inputs, lengths = torch.randn(3, steps, 6), torch.tensor([steps, 1, max(1, steps - 2)])
    found = run(
        solvers.BlockWise(solvers.QuasiDEER(on_failure=solvers.Raise()), **blocks), cell, inputs, lengths=lengths
    )
    exact = run(solvers.Sequential(), cell, inputs, lengths=lengths)
    assert_close(found.states, exact.states, atol=1e-11, rtol=0)
    assert_close(found.final, exact.final, atol=1e-11, rtol=0)
    assert torch.equal(found.converged_steps, lengths)
    guessed = run(solvers.BlockWise(solvers.QuasiDEER(), **blocks), cell, inputs, lengths=lengths, guess=found.states)
    assert_close(guessed.states, exact.states, atol=1e-11, rtol=0)


COMPILED = """
import sys
import torch
from adptnet import ADPTNet, solvers

torch.manual_seed(0)
torch.set_num_threads(1)
cell, inputs = ADPTNet.paper(6, beta=0.1, dtype=torch.float64).cell, torch.randn(2, 5, 6, dtype=torch.float64)
exact = solvers.Sequential()(cell, inputs).states
for name in sys.argv[1:]:
    solver = getattr(solvers, name)(fixed_iterations=6, on_failure=solvers.Return())

    def solve(inputs):
        solution = solver(cell, inputs)
        return solution.states, solution.results, solution.iterations

    eager = solve(inputs)
    compiled = torch.compile(solve, backend="eager", fullgraph=True)(inputs)
    torch.testing.assert_close(compiled, eager, atol=1e-12, rtol=0)
    torch.testing.assert_close(compiled[0], exact, atol=1e-10, rtol=0)
    assert compiled[1].tolist() == [0, 0]
"""


def test_a_fixed_number_of_iterations_can_be_compiled():
    # In a separate process, without the runtime shape checks, which the compiler cannot trace.
    subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILED, "ForwardDEER"], check=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_solvers_can_be_compiled():
    names = ["ConvDEER", "KoopmanDEER", "Jacobi", "Picard"]
    subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILED, *names], check=True)


@pytest.mark.parametrize("linearization", all_linearizations)
def test_half_precision_and_autocast_stay_in_float32_inside(linearization):
    layer = ADPTNet.paper(6, beta=0.5, dtype=torch.float32)
    solver = all_linearizations[linearization]()
    inputs = torch.randn(2, 20, 6).bfloat16()
    plain = run(solver, layer.cell, inputs.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run(solver, layer.cell, inputs.float())
    half = run(solver, layer.cell, inputs)
    assert half.states.dtype == cast.states.dtype == torch.float32
    assert torch.equal(cast.states, plain.states)
    assert torch.equal(half.states, plain.states)


def test_the_precision_of_products_is_put_back():
    cell = build_cell({"width": 6})
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        run(solvers.DEER(), cell, torch.randn(1, 5, 6))
        assert torch.get_float32_matmul_precision() == "medium"
        with pytest.raises(errors.InputError):
            run(solvers.DEER(), cell, torch.randn(1, 5, 7))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("backend", ["cuda", "mkldnn"])
def test_a_precision_set_by_backend_is_put_back(backend):
    cell, products = build_cell({"width": 6}), getattr(torch.backends, backend).matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32"
    try:
        with full_precision():
            assert products.fp32_precision == "ieee"
        run(solvers.DEER(), cell, torch.randn(1, 5, 6))
        assert products.fp32_precision == "tf32"
    finally:
        products.fp32_precision = before


def test_solves_in_full_precision_do_not_read_the_setting_that_warns_in_torch_2_9(monkeypatch):
    def warn():
        raise AssertionError("torch 2.9 would warn")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", warn)
    run(solvers.DEER(), build_cell({"width": 6}), torch.randn(1, 5, 6))


def test_steps_of_different_lengths_and_a_beta_for_each_sequence():
    layer = ADPTNet.paper(6, beta=1.0)
    inputs, dt, beta = torch.randn(3, 15, 6), 0.1 + torch.rand(3, 15), torch.tensor([0.1, 1.0, 3.0])
    lengths = torch.tensor([15, 4, 9])
    for given_ in ({"dt": dt}, {"beta": beta}, {"dt": dt, "beta": beta}):
        with torch.no_grad():
            exact = layer.solve(inputs, lengths=lengths, **given_)
            for make in (solvers.DEER, solvers.QuasiDEER, solvers.ForwardDEER, solvers.ConvDEER, solvers.KoopmanDEER):
                for damping in (None, solvers.Proximal()):
                    found = layer.solve(inputs, lengths=lengths, solver=make(damping), **given_)
                    assert found.result <= Result.FINISHED
                    assert_close(found.states, exact.states, atol=1e-9, rtol=0)


# No silent failure: random small solves, each checked by a loop that is independent of the solver.


def random_solve(seed):
    """Return a random cell, inputs, a function that makes a solver, and a description."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)

    def pick(options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    dtype = pick([torch.float32, torch.float64])
    spectrum = pick(all_spectra)
    size = make_even(int(torch.randint(1, 9, (), generator=generator)), spectrum)
    beta = pick([0.0, 0.01, 0.3, 1.0, 3.0, 10.0, 100.0])
    axes = {"width": size, "spectrum": spectrum, "beta": beta, "conjugate": pick([Exact(), Taylor(), Product(2)])}
    linearization, damping = pick(list(all_linearizations)), pick(list(all_dampings))
    linearization = linearization if is_legal(axes, linearization, "undamped") else "Quasi"
    damping = damping if is_legal(axes, linearization, damping) else "undamped"
    steps = int(torch.randint(1, 41, (), generator=generator))
    cell = build(axes, dtype=dtype).cell
    inputs = 10 ** pick([-3.0, 0.0, 2.0]) * torch.randn(4, steps, size, dtype=dtype)

    iterations = pick([3, 30])

    def solver(**options):
        return all_linearizations[linearization](all_dampings[damping], max_iterations=iterations, **options)

    return cell, inputs, solver, f"{seed}: {linearization}, {damping}, {dtype}, {steps} steps, {axes}"


def evaluate_residual(cell, inputs, states):
    """Return the residual and the scale of each step, (batch, time), computed by a loop over time."""
    drive_ = cell.prepare(inputs, torch.arange(inputs.shape[1]).expand(inputs.shape[:2]))
    before, residual, scale = cell.initial_state(len(inputs)), [], []
    for t in range(inputs.shape[1]):
        after = cell.step(before, drive_[:, t])
        residual.append((after - states[:, t]).abs().amax(-1))
        scale.append(torch.maximum(before.abs().amax(-1), after.abs().amax(-1)))
        before = states[:, t]
    return torch.stack(residual, -1), torch.stack(scale, -1)


def assert_no_silent_failure(seed):
    cell, inputs, solver, name = random_solve(seed)
    eps = torch.finfo(inputs.dtype).eps
    found = run(solver(on_failure=solvers.Return()), cell, inputs)
    with torch.no_grad():
        residual, scale = evaluate_residual(cell, inputs, found.states)
    # The same step evaluated in another shape may round differently, by a few units in the last place.
    within = (residual <= eps + (default_rtol(inputs.dtype) + 64 * eps) * scale).all(-1)
    for i in range(len(inputs)):
        if found.results[i] == Result.CONVERGED:
            assert within[i], name
            assert int(found.converged_steps[i]) == inputs.shape[1], name
        else:
            assert int(found.converged_steps[i]) < inputs.shape[1], name
            assert found.results[i] in (Result.NOT_CONVERGED, Result.DIVERGED, Result.NON_FINITE), name
    exact = run(solvers.Sequential(), cell, inputs)
    nudged = run(solvers.Sequential(), cell, inputs * (1 + eps**0.75 * torch.randn_like(inputs).sign()))
    moved = (nudged.states - exact.states).abs().amax((1, 2))
    largest = exact.states.abs().amax((1, 2))
    calm = moved <= 100 * eps**0.75 * largest  # the others are chaotic: any two implementations differ
    allowed = 1000 * eps**0.75 * largest + eps
    done = (found.results == Result.CONVERGED) & calm
    assert ((found.states - exact.states).abs().amax((1, 2)) <= allowed)[done].all(), name
    finished = run(solver(on_failure=solvers.Finish()), cell, inputs)
    # Taylor at a large β amplifies the state until it overflows, in any implementation.
    assert torch.equal(finished.results == Result.NON_FINITE, exact.results == Result.NON_FINITE), name
    assert (finished.results[exact.results == Result.CONVERGED] <= Result.FINISHED).all(), name
    assert ((finished.states - exact.states).abs().amax((1, 2)) <= allowed)[calm].all(), name
    return found.results


def test_no_failure_is_silent():
    results = torch.cat([assert_no_silent_failure(seed) for seed in range(30)])
    assert (results == Result.CONVERGED).sum() > 40
    assert (results != Result.CONVERGED).sum() > 8  # both outcomes occur


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_failure_is_silent_in_ten_thousand():
    results = torch.cat([assert_no_silent_failure(seed) for seed in range(1000, 3600)])
    assert len(results) >= 10_000


@given(
    seed=st.integers(0, 2**31),
    beta=st.floats(0, 100),
    steps=st.integers(1, 40),
    size=st.integers(1, 8),
    spectrum=st.sampled_from(all_spectra),
    make=st.sampled_from(list(one_iteration.values())),
)
@settings(deadline=None, derandomize=True, max_examples=15)
def test_any_beta_shape_and_spectrum_are_finished_exactly(seed, beta, steps, size, spectrum, make):
    torch.manual_seed(seed)
    cell = build({"width": make_even(size, spectrum), "spectrum": spectrum, "beta": beta}).cell
    inputs = torch.randn(2, steps, cell.input_size)
    exact = run(solvers.Sequential(), cell, inputs)
    found = run(make(), cell, inputs)
    with torch.no_grad():
        residual, scale = evaluate_residual(cell, inputs, found.states)
    eps = torch.finfo(torch.float64).eps
    assert found.result <= Result.FINISHED
    assert (residual <= eps + (default_rtol(torch.float64) + 64 * eps) * scale).all()
    nudged = run(solvers.Sequential(), cell, inputs * (1 + 1e-12 * torch.randn_like(inputs).sign()))
    moved = float((nudged.states - exact.states).abs().max())
    assert_close(found.states, exact.states, atol=max(1e-9, 100 * moved), rtol=0)


def test_koopman_takes_fewer_iterations_than_the_diagonal_at_large_beta():
    torch.manual_seed(0)
    cell, inputs = ADPTNet.paper(32, beta=4.0).cell, torch.randn(3, 400, 32)
    koopman, quasi = (run(make(), cell, inputs).iterations for make in (solvers.KoopmanDEER, solvers.QuasiDEER))
    assert koopman.double().mean() < quasi.double().mean()


def test_a_mean_in_single_precision_converges():
    layer = ADPTNet.paper(32, beta=1.0, dtype=torch.float32)
    assert run(solvers.KoopmanDEER(), layer.cell, torch.randn(2, 500, 32).float()).result == Result.CONVERGED


def test_a_layer_warns_if_it_did_not_converge():
    with pytest.warns(errors.NotConvergedWarning, match="Return"):
        ADPTNet.paper(6, beta=4.0)(
            torch.randn(3, 60, 6), solver=solvers.ConvDEER(max_iterations=2, on_failure=solvers.Return())
        )


@pytest.mark.parametrize("make", [solvers.Jacobi, solvers.Picard, solvers.QuasiDEER, solvers.DEER])
def test_a_step_that_returns_its_input(make):
    cell, inputs = cells.from_function(lambda state, drive: drive, 3, 3), torch.randn(2, 40, 3)
    before = inputs.clone()
    assert_close(run(make(), cell, inputs).states, before)
    leaf = before.clone().requires_grad_()
    make()(cell, leaf).states.sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(before))
    assert torch.equal(leaf.detach(), before)
    assert torch.equal(inputs, before)


def test_after_finishing_blocks_every_step_counts_as_converged():
    cell, inputs = build_cell({"width": 6, "beta": 4.0}), torch.randn(3, 13, 6)
    solver = solvers.BlockWise(solvers.ConvDEER(max_iterations=1), block_length=5)
    assert run(solver, cell, inputs, lengths=torch.tensor([13, 4, 10])).converged_steps.tolist() == [13, 4, 10]


def test_the_history_of_blocks_counts_a_step_when_all_before_it_have_converged():
    cell, inputs = build_cell({"width": 6, "beta": 2.0}), torch.randn(3, 40, 6)
    lengths = torch.tensor([40, 23, 7])
    history = run(solvers.BlockWise(solvers.ConvDEER(), block_length=10), cell, inputs, lengths=lengths).history
    for steps in (3, 10, 27, 40):
        here = lengths.clamp(max=steps)
        shorter = solvers.BlockWise(solvers.ConvDEER(), block_length=10)
        expected = run(shorter, cell, inputs[:, :steps], lengths=here).iterations
        reached = history.iterations_for(steps)
        assert torch.equal(reached, torch.where(lengths >= steps, expected, -1))


def test_resets_to_an_initial_state_that_is_not_zero():
    class Started(cells.Cell):
        input_size, state_size = 2, 2

        def step(self, state, drive):
            return 0.5 * state + drive

        def initial_state(self, batch, *, device=None, dtype=None):
            return torch.ones(batch, 2)

    inputs, reset = torch.randn(1, 20, 2), torch.arange(20).unsqueeze(0) == 7
    solution = run(solvers.DEER(), Started(), inputs, reset=reset)
    assert solution.iterations.tolist() == [1]
    assert_close(solution.states, run(solvers.Sequential(), Started(), inputs, reset=reset).states)


def test_a_solution_has_the_position_of_the_next_step():
    cell, reset = build_cell({"width": 6, "beta": 1.0}), torch.zeros(3, 9, dtype=torch.bool)
    reset[1, 4] = True
    start = cells.ADPTState(cell.initial_state(3), torch.tensor([5, 0, 2]))
    for solver in (solvers.Sequential(), solvers.ConvDEER(), solvers.BlockWise(solvers.ConvDEER(), 2)):
        found = run(solver, cell, torch.randn(3, 9, 6), start, reset=reset, lengths=torch.tensor([9, 8, 3]))
        assert found.position.tolist() == [14, 4, 5]
    assert run(solvers.ConvDEER(), cell, torch.randn(9, 6)).position.tolist() == 9


def test_auto_gives_its_reason():
    cell, inputs = build_cell({"width": 8, "beta": 1.0}), torch.randn(2, 100, 8)
    assert solvers.Auto().choose(cell, 1, 4096, "cpu").reason.endswith(".")
    exact = run(solvers.Sequential(), cell, inputs)
    assert_close(run(solvers.Auto(), cell, inputs).states, exact.states, atol=1e-9, rtol=1e-9)


def test_a_result_prints_as_its_name():
    assert [str(result) for result in Result] == [result.name for result in Result]
    assert f"{Result.CONVERGED}" == "CONVERGED"


def test_the_repr_of_a_solver_shows_its_arguments():
    solver = solvers.ConvDEER(solvers.Scale(0.9), rtol=1e-3, patience=None, on_failure=solvers.Return())
    assert repr(solver) == "ConvDEER(Scale(0.9), rtol=0.001, patience=None, on_failure=Return())"
    assert repr(solvers.ForwardDEER()) == "ForwardDEER()"


@pytest.mark.parametrize("scale", [1e-3, 1e-8, 1e-20])
def test_small_states_are_found_to_as_many_digits(scale):
    layer = ADPTNet.paper(4, beta=1.0, dtype=torch.float32)
    inputs = scale * torch.randn(2, 20, 4).float()
    exact = run(solvers.Sequential(), layer.cell, inputs).states
    for make in (solvers.ConvDEER, solvers.QuasiDEER, solvers.KoopmanDEER):
        found = run(make(), layer.cell, inputs)
        assert found.result == Result.CONVERGED
        assert float((found.states - exact).abs().max()) <= 1e-4 * float(exact.abs().max())


def test_inference_mode_finds_the_same_states():
    layer, inputs = ADPTNet.paper(4, beta=1.0), torch.randn(2, 20, 4)
    for solver in (solvers.DEER(), solvers.QuasiDEER(), solvers.BlockWise(solvers.ConvDEER(), 3)):
        plain = run(solver, layer.cell, inputs)
        with torch.inference_mode():
            y, state = layer(inputs + 0, solver=solver)
            layer(inputs + 0, state, solver=solver)
        assert_close(y.clone(), plain.states, atol=1e-12, rtol=0)


def test_a_function_may_name_its_dimensions_by_number():
    weight = torch.randn(4, 4)
    steps = (
        lambda state, inputs: torch.softmax(state + inputs, 1),
        lambda state, inputs: torch.tanh(torch.mm(state, weight) + inputs),
        lambda state, inputs: torch.cat((inputs, 0.5 * state), 1)[:, :4],
    )
    inputs = torch.randn(3, 15, 4)
    for step in steps:
        cell = cells.from_function(step, 4, 4)
        exact = run(solvers.Sequential(), cell, inputs).states
        for make in (solvers.Jacobi, solvers.QuasiDEER, solvers.DEER):
            assert_close(run(make(), cell, inputs).states, exact, atol=1e-10, rtol=0)


def write_in_place(state, inputs):
    state.mul_(0.5)
    return state + inputs


@pytest.mark.parametrize("make", [solvers.Sequential, solvers.Jacobi])
@pytest.mark.parametrize(
    ("step", "words"),
    [
        (write_in_place, "wrote into the state"),
        (lambda state, inputs: (state, inputs), "returned tuple"),
        (lambda state, inputs: state[..., :2], "must keep both"),
    ],
    ids=["in place", "tuple", "shape"],
)
def test_a_step_that_breaks_the_contract_is_named(step, words, make):
    with pytest.raises(errors.InputError, match=words):
        run(make(), cells.from_function(step, 4, 4), torch.randn(2, 9, 4))


@pytest.mark.parametrize("solver", [solvers.Sequential(), solvers.ConvDEER(), solvers.Auto()], ids=repr)
def test_a_solver_explains_arguments_of_the_wrong_type(solver):
    cell, inputs = build_cell({"width": 4}), torch.randn(2, 9, 4)
    for what in (torch.nn.Linear(4, 4), 3, lambda state, inputs: state):
        with pytest.raises(errors.InputError, match=r"from_torch.*from_function"):
            solver(what, inputs)
    with pytest.raises(errors.InputError, match=r"adjoints.Implicit\(\)"):
        solver(cell, inputs, adjoint="implicit")


def test_raise_names_the_first_non_finite_input():
    cell, inputs = build_cell({"width": 4, "beta": 1.0}), torch.randn(2, 20, 4)
    inputs[1, 5, 1] = torch.nan
    with pytest.raises(errors.NonFiniteError, match="sequence 1 is not finite at step 5"):
        run(solvers.ConvDEER(on_failure=solvers.Raise()), cell, inputs)


def test_a_solve_keeps_no_iterate_alive():
    cell, inputs = cells.from_torch(torch.nn.GRUCell(3, 4)), torch.randn(2, 8, 3)
    iterates = []
    measure = EvaluatedIterate.__init__

    def note(self, *arguments):
        iterates.append(weakref.ref(self))
        measure(self, *arguments)

    gc.disable()
    try:
        with mock.patch.object(EvaluatedIterate, "__init__", note), torch.no_grad():
            solvers.QuasiDEER()(cell, inputs)
        assert iterates
        assert all(each() is None for each in iterates)
    finally:
        gc.enable()
