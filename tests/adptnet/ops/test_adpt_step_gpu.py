"""Newton passes and whole iterations on the GPU path, with the kernels run by Triton's interpreter."""

import pytest
import torch

import adptnet
from adptnet import directions, solvers, spectra
from adptnet.ops import _backends, _gpu, adpt_step
from adptnet.ops.adpt_scan import Constants, Form, RetractionKind, launch
from adptnet.ops.adpt_scan import reference as scan_reference
from adptnet.ops.adpt_scan.packing import unpack
from adptnet.ops.adpt_step import reference
from adptnet.ops.tolerance import Tolerance
from adptnet.recurrence.conjugates import Product
from adptnet.recurrence.drive import InputPhase
from adptnet.recurrence.step import conjugate, step
from support.kernels import VARIANTS, make_problem

LIMITS = Tolerance(1e-3, 1e-2)


@pytest.fixture
def kernels(emulated_gpu, monkeypatch):
    """Return the module with the kernels, with chunks short enough for tiny sequences to have several."""
    monkeypatch.setattr(adpt_step.triton, "LENGTH", 4)
    monkeypatch.setattr(adpt_step.triton, "COLUMNS", 4)
    return adpt_step.triton


def run_passes(problem, *, diagonal, resets, recent):
    """Return the pass of the kernels, and that of the specification in float32 and in float64."""
    drive, initial, constants, form = problem
    batch, steps = drive.shape[:2]
    states, restart = torch.randn(batch, steps, initial.shape[1]), torch.randn_like(initial)
    reset = torch.rand(batch, steps) < 0.3 if resets else None
    scale = 3 * torch.rand_like(initial) if recent else None

    def specification(dtype):
        parameters = unpack(Constants(*(None if t is None else t.to(dtype) for t in constants)), form)
        real = parameters.blocks.real

        def transition(state, given):
            return conjugate(parameters, state, given).diagonal() if diagonal else real

        given = [t.to(dtype) for t in (states, drive, initial, restart)]
        given[1] = scan_reference._normalize_directions(given[1], initial.shape[1], form)
        assert parameters.blocks.imag is None  # the specification is for a real spectrum
        return reference.newton_pass(
            given[0].clone(), *given[1:], reset, lambda s, u: step(parameters, s, u), transition, real,
            tolerance=LIMITS, recent=None if scale is None else scale.to(dtype),
        )  # fmt: skip

    single = [None if t is None else t.float() for t in (states, drive, initial, restart)]
    rounded = Constants(*(None if t is None else t.float() for t in constants))
    found = adpt_step.DevicePass(rounded, form, diagonal)(
        *single, reset, tolerance=LIMITS, recent=None if scale is None else scale.float()
    )
    return found, specification(torch.float32), specification(torch.float64)


def check(problem, **options):
    """Compare with float64: at most 8 times the error of the float32 specification."""
    passes = (each[:5] for each in run_passes(problem, **options))  # without A and the tolerances
    for name, found, rounded, exact in zip(adpt_step.Pass._fields[:5], *passes, strict=True):
        size = float(exact.abs().max())
        allowed = 8 * max(float((rounded - exact).abs().max()), torch.finfo(torch.float32).eps / 2 * size)
        assert float((found - exact).abs().max()) <= allowed, name


@pytest.mark.parametrize("diagonal", [False, True], ids=["conv", "forward"])
@pytest.mark.parametrize(("batch", "steps", "size"), [(2, 1, 1), (1, 19, 5), (3, 4, 17)])
def test_a_pass_equals_the_specification(kernels, diagonal, batch, steps, size):
    options = {"bias": True, "retraction": RetractionKind.CAYLEY} if size == 5 else {}
    problem = make_problem(batch, steps, size, dtype=torch.float64, **options)
    check(problem, diagonal=diagonal, resets=steps > 1, recent=size > 1)


def check_pull_back(problem):
    """Compare J'g with autograd through the step in float64: at most 8 times the error of float32."""
    drive, initial, constants, form = problem
    entering, g = torch.randn(*drive.shape[:2], initial.shape[1]), torch.randn(*drive.shape[:2], initial.shape[1])

    def specification(dtype):
        parameters = unpack(Constants(*(None if t is None else t.to(dtype) for t in constants)), form)
        point = entering.to(dtype).requires_grad_()
        given = scan_reference._normalize_directions(drive.to(dtype), initial.shape[1], form)
        return torch.autograd.grad(step(parameters, point, given), point, g.to(dtype))[0].double()

    single = Constants(*(None if t is None else t.float() for t in constants))
    found = adpt_step.DevicePass(single, form, False).pull_back(entering.float(), drive.float(), g.float())
    exact, rounded = specification(torch.float64), specification(torch.float32)
    allowed = 8 * max(
        float((rounded - exact).abs().max()), torch.finfo(torch.float32).eps / 2 * float(exact.abs().max())
    )
    assert float((found - exact).abs().max()) <= allowed


@pytest.mark.parametrize("name", ["exponential", "relu", "directions in drive", "norm, fixed dot"])
def test_the_transposed_jacobian_equals_autograd(kernels, name):
    for batch, steps, size, pairs in ((2, 1, 6, True), (1, 17, 5, False)):
        check_pull_back(make_problem(batch, steps, size, pairs=pairs, dtype=torch.float64, **VARIANTS[name]))


def test_gradients_of_a_parallel_solve_use_the_kernel(kernels, monkeypatch):
    layer = adptnet.ADPTNet(3, dtype=torch.float32, beta=0.1, solver=solvers.ConvDEER())
    x, reset = torch.randn(2, 4, 3, dtype=torch.float32), torch.zeros(2, 4, dtype=torch.bool)
    reset[0, 2] = True
    calls, pull_back = [], adpt_step.DevicePass.pull_back
    monkeypatch.setattr(adpt_step.DevicePass, "pull_back", lambda *given: calls.append(1) or pull_back(*given))

    def differentiate(emulated):
        monkeypatch.setattr(_gpu, "_emulated", emulated)
        layer.zero_grad(set_to_none=True)
        layer(x, reset=reset)[0].square().sum().backward()
        return {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}

    expected = differentiate(False)
    assert not calls
    found = differentiate(True)
    assert calls
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-5 * float(value.abs().max()), rtol=0)


UNKNOWN = {"slow_memory", "rotates", "phased", "planes", "whole_state"}
NAMES = [name for name, given in VARIANTS.items() if not UNKNOWN & given.keys()]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_variant_equals_the_specification(kernels, name):
    for batch, steps, size in ((2, 1, 6), (1, 17, 12)):
        problem = make_problem(batch, steps, size, dtype=torch.float64, **VARIANTS[name])
        for diagonal in (False, True):
            form = problem[3]
            unsupported = launch.explain_unsupported_pass(
                form, size, paired=False, slow=False, diagonal=diagonal, dtype=torch.float32, device="cpu"
            )
            if unsupported is None:
                check(problem, diagonal=diagonal, resets=True, recent=True)
            else:
                assert diagonal
                assert form.retraction in (RetractionKind.TAYLOR_ONE, RetractionKind.TAYLOR_TWO)


def solve(layer, x, solver, **options):
    with torch.no_grad():
        return solver(layer.cell, x, **options)


def on_both(monkeypatch, layer, x, solver, **options):
    """Return the solutions of the CPU and of the GPU path, how often the host read, and the programs."""
    reads, read = [], _gpu.read
    monkeypatch.setattr(_gpu, "read", lambda values: reads.append(1) or read(values))
    monkeypatch.setattr(_gpu, "_emulated", False)
    expected = solve(layer, x, solver, **options)
    monkeypatch.setattr(_gpu, "_emulated", True)
    with _backends.record_runs() as runs:
        found = solve(layer, x, solver, **options)
    return found, expected, len(reads), [run.backend.name for run in runs if run.phase == "iteration"]


def assert_same_solution(found, expected):
    torch.testing.assert_close(found.states, expected.states, atol=2e-6, rtol=2e-6)
    assert torch.equal(found.results, expected.results)
    assert torch.equal(found.converged_steps, expected.converged_steps)
    assert (found.iterations - expected.iterations).abs().max() <= 1
    count = min(len(found.history.residual), len(expected.history.residual)) - 2
    torch.testing.assert_close(found.history.residual[:count], expected.history.residual[:count], atol=2e-6, rtol=1e-2)


@pytest.mark.parametrize("solver", [solvers.ConvDEER(), solvers.ForwardDEER()], ids=repr)
def test_a_solve_equals_that_of_the_cpu(kernels, monkeypatch, solver):
    layer = adptnet.ADPTNet(3, dtype=torch.float32, beta=0.1)
    x = torch.randn(2, 5, 3, dtype=torch.float32)
    x[1] *= 1e-3  # its iterations end first
    found, expected, reads, programs = on_both(monkeypatch, layer, x, solver)
    assert (reads, programs) == (1, ["triton"])
    assert found.result == solvers.Result.CONVERGED
    assert_same_solution(found, expected)


def test_resets_guesses_blocks_and_complex_pairs(kernels, monkeypatch):
    layer = adptnet.ADPTNet(4, dtype=torch.float32, beta=0.1, spectrum=spectra.LRURing())
    x, reset = torch.randn(2, 5, 4, dtype=torch.float32), torch.zeros(2, 5, dtype=torch.bool)
    reset[0, 2] = True
    guess = torch.randn(2, 5, 4, dtype=torch.float32)
    before = guess.clone()
    blocks = solvers.BlockWise(solvers.ConvDEER(), num_blocks=2)
    for solver, options in ((solvers.ConvDEER(), {"guess": guess}), (blocks, {"reset": reset})):
        found, expected, _, programs = on_both(monkeypatch, layer, x, solver, **options)
        assert set(programs) == {"triton"}
        torch.testing.assert_close(found.states, expected.states, atol=2e-6, rtol=2e-6)
        assert torch.equal(found.results, expected.results)
    assert torch.equal(guess, before)


def test_an_iteration_is_five_launches_and_a_solve_one_read(kernels, monkeypatch):
    """The limits are six launches per iteration and one synchronization per solve."""
    launched = []
    names = ("evaluate_kernel", "summarize_kernel", "carry_kernel", "apply_kernel", "converge_kernel")
    for name in names:
        kernel = getattr(kernels, name)

        class Recorded:
            def __init__(self, name, kernel):
                self.name, self.kernel = name, kernel

            def __getitem__(self, grid):
                launched.append(self.name)
                return self.kernel[grid]

        monkeypatch.setattr(kernels, name, Recorded(name, kernel))
    layer = adptnet.ADPTNet(3, dtype=torch.float32, beta=0.2)
    x = torch.randn(2, 5, 3, dtype=torch.float32)
    found, _, reads, _ = on_both(monkeypatch, layer, x, solvers.ConvDEER())
    passes = kernels.FIRST_CHECK + 1  # one more evaluates the guess
    assert 1 < found.iterations.max() <= kernels.FIRST_CHECK
    assert reads == 1
    assert sorted(launched) == sorted(names * passes)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of the interpreter
def test_an_iterate_that_is_not_finite_is_left_to_the_host(kernels, monkeypatch):
    layer = adptnet.ADPTNet(3, dtype=torch.float32, beta=0.1)
    x = torch.randn(2, 4, 3, dtype=torch.float32)
    x[1, 2, 0] = torch.nan
    solver = solvers.ConvDEER(on_failure=solvers.Return(), max_iterations=6)
    found, expected, _, _ = on_both(monkeypatch, layer, x, solver)
    assert found.results.tolist() == expected.results.tolist() == [0, int(solvers.Result.NON_FINITE)]
    torch.testing.assert_close(found.states[0], expected.states[0], atol=2e-6, rtol=2e-6)


def test_limits_stop_an_iteration_as_on_a_cpu(kernels, monkeypatch):
    layer = adptnet.ADPTNet(3, dtype=torch.float32, beta=1.0)
    x = torch.randn(2, 5, 3, dtype=torch.float32)
    for given in ({"max_iterations": 2}, {"fixed_iterations": 3}):
        solver = solvers.ConvDEER(on_failure=solvers.Return(), **given)
        found, expected, _, _ = on_both(monkeypatch, layer, x, solver)
        assert torch.equal(found.iterations, expected.iterations)
        assert_same_solution(found, expected)


def test_unsupported_recurrences_run_the_eager_operations(kernels, monkeypatch):
    cells = {
        "slow memory": {"memory": adptnet.cells.SlowMemory()},
        "planes=2": {"conjugate": Product(2)},
        "Forward-DEER": {"spectrum": spectra.LRURing()},
        "phase": {"phase": InputPhase()},
    }
    for reason, axes in cells.items():
        layer = adptnet.ADPTNet(4, dtype=torch.float32, beta=0.1, **axes)
        x = torch.randn(1, 3, 4, dtype=torch.float32)
        with _backends.record_runs() as runs:
            solve(layer, x, solvers.ForwardDEER())
        (backend,) = {run.backend for run in runs if run.phase == "iteration"}
        assert not backend.is_kernel
        assert reason in backend.reason


def test_heads_of_every_size_that_a_kernel_has_have_a_pass(emulated_gpu):
    given = {"paired": False, "slow": False, "diagonal": False, "dtype": torch.float32, "device": "cpu"}
    assert launch.explain_unsupported_pass(Form(heads=2), 2 * launch.MAX_HEAD_SIZE, **given) is None
    assert "2049" in launch.explain_unsupported_pass(Form(), launch.MAX_HEAD_SIZE + 1, **given)


@pytest.mark.parametrize("diagonal", [False, True], ids=["conv", "forward"])
@pytest.mark.parametrize("name", ["heads", "relu", "directions in drive"])
def test_large_heads_store_the_projections(kernels, monkeypatch, name, diagonal):
    """Heads beyond `IN_REGISTERS`, here of any size, with blocks of columns and of steps that are not whole."""
    options = kernels.find_options

    def find_options(form, size, device):
        found = options(form, size, device)
        assert found["STORED"] != form.directions_in_drive
        return found | {"SOME": 4, "BLOCK": 16, "INNER": 16}

    monkeypatch.setattr(kernels, "IN_REGISTERS", 1)
    monkeypatch.setattr(kernels, "find_options", find_options)
    problem = make_problem(2, 5, 51, dtype=torch.float64, **VARIANTS[name])
    check(problem, diagonal=diagonal, resets=True, recent=False)


def test_directions_and_beta_may_come_with_the_drive(kernels, monkeypatch):
    layer = adptnet.ADPTNet(3, dtype=torch.float32, direction=directions.FromInput())
    x = torch.randn(2, 5, 3, dtype=torch.float32)
    found, expected, _, programs = on_both(monkeypatch, layer, x, solvers.ConvDEER())
    assert programs == ["triton"]
    assert_same_solution(found, expected)
