"""`TimeParallel` in real process groups: results equal those of one process, and an error on one rank reaches all."""

import datetime
import functools
import json
import multiprocessing
import os
import signal
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn

from adptnet import ADPTNet, ADPTState, adjoints, cells, drive, errors, solvers, spectra
from adptnet.ops._backends import record_runs
from adptnet.ops.adpt_step import has_kernel
from adptnet.solvers.distributed import TimeParallel, sum_gradients
from adptnet.solvers.ranks import Ranks
from support.members import build

BATCH = 2
# Number of ranks: the number of steps on each rank.
CHUNKS = {1: (13,), 2: (8, 5), 4: (4, 1, 5, 3)}
STEPS = 13


def start_workers(worker, count, folder, seconds=60):
    """Start `count` processes in one process group, each of which calls `worker(rank, count, folder)`."""
    if "forkserver" in multiprocessing.get_all_start_methods():  # imports torch once, not in each process
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["adptnet", "torch.distributed", "torch._dynamo", "pytest"])
    else:
        context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_run_worker, args=(worker, rank, count, str(folder), seconds), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    return processes


def _run_worker(worker, rank, count, folder, seconds):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=seconds)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=count, timeout=timeout)
    try:
        returned = worker(rank, count, folder)
    except Exception:
        returned = {"error": traceback.format_exc()}
    with open(f"{folder}/returned{rank}.json", "w") as file:
        json.dump(returned, file)


def collect_results(processes, folder, ranks, seconds=100):
    """Wait for the workers and return their results."""
    deadline = time.monotonic() + seconds
    for rank in ranks:
        processes[rank].join(max(0.0, deadline - time.monotonic()))
    hanging = [rank for rank in ranks if processes[rank].is_alive()]
    for process in processes:
        process.kill()
    assert not hanging, f"ranks {hanging} did not end"
    returned = []
    for rank in ranks:
        with open(f"{folder}/returned{rank}.json") as file:
            returned.append(json.load(file))
    for rank, each in zip(ranks, returned, strict=True):
        assert "error" not in each, f"rank {rank}: {each['error']}"
    return returned


def cells_by_name():
    """Yield each name, its cell, and whether there are resets."""
    yield "real", build({"width": 6, "beta": 1.0}).cell, False
    yield "rope and resets", build({"width": 6, "beta": 1.0, "rope": drive.RoPE()}).cell, True
    yield "complex", build({"width": 6, "beta": 0.5, "spectrum": spectra.S4DInv()}).cell, True
    yield "coupled", build({"width": 6, "beta": 1.0, "memory": cells.SlowMemory()}).cell, False
    yield "gru", cells.from_torch(nn.GRUCell(6, 5)), True
    yield "learned start", build({"width": 6, "beta": 1.0, "start": True}).cell, False
    yield (
        "complex and coupled",
        build({"width": 6, "memory": cells.SlowMemory(), "spectrum": spectra.S4DInv()}).cell,
        True,
    )


def solvers_by_name():
    yield "ConvDEER", solvers.ConvDEER()
    yield "ForwardDEER", solvers.ForwardDEER()
    yield "QuasiDEER", solvers.QuasiDEER()
    yield "DEER", solvers.DEER()
    yield "Jacobi", solvers.Jacobi()
    yield "KoopmanDEER", solvers.KoopmanDEER()
    yield "Scale", solvers.QuasiDEER(solvers.Scale(0.9))
    yield "Adaptive", solvers.QuasiDEER(solvers.Adaptive())
    yield "too few iterations", solvers.QuasiDEER(max_iterations=2)


def all_cases():
    for cell_name, cell, resets in cells_by_name():
        for solver_name, solver in solvers_by_name():
            if cell_name != "gru" or solver_name not in ("ConvDEER", "ForwardDEER"):
                yield f"{solver_name} on {cell_name}", cell, solver, resets


def some_cases():
    """Return a varied selection of the cases; the slow test runs all of them."""
    main = ["ConvDEER", "ForwardDEER", "QuasiDEER", "DEER", "Jacobi"]
    chosen = {f"{solver} on {cell}" for cell in ("rope and resets", "complex", "coupled", "gru") for solver in main}
    chosen |= {"QuasiDEER on real", "ConvDEER on learned start", "ForwardDEER on complex and coupled"}
    chosen |= {"KoopmanDEER on rope and resets", "KoopmanDEER on complex", "Scale on complex", "Adaptive on coupled"}
    return [case for case in all_cases() if case[0] in chosen | {"too few iterations on gru"}]


def make_whole_problem(cell, resets):
    """Return inputs, initial state, resets, and the loss weights of all states and of the final state."""
    inputs = torch.randn(BATCH, STEPS, 6)
    reset = torch.zeros(BATCH, STEPS, dtype=torch.bool)
    if resets:
        reset[0, [2, 10]] = True  # with four ranks, step 10 is the first of the last chunk
        reset[1, 6] = True
    state = ADPTState(0.5 * torch.randn(BATCH, cell.state_size), torch.tensor([4, 0]))
    return inputs, state, reset if resets else None, torch.randn(BATCH, STEPS, cell.state_size), torch.randn(BATCH, 1)


def solve_and_differentiate(solver, cell, inputs, state, reset, loss_weights, final_loss_weights, **options):
    """Return the solution, and the gradients of a loss that depends on all states and on the final state."""
    for parameter in cell.parameters():
        parameter.grad = None
    inputs = inputs.clone().requires_grad_()
    initial = state.state.clone().requires_grad_()
    solution = solver(cell, inputs, state._replace(state=initial), reset=reset, **options)
    ((solution.states * loss_weights).sum() + (solution.final.square() * final_loss_weights).sum()).backward()
    return solution, inputs.grad, initial.grad


def compare_with_one_process(solver, group, cell, resets, adjoint=None):
    """Return the largest differences of states and of gradients from one process, and the distributed solution."""
    inputs, state, reset, loss_weights, final_loss_weights = make_whole_problem(cell, resets)
    exact, inputs_grad, state_grad = solve_and_differentiate(
        solvers.Sequential(), cell, inputs, state, reset, loss_weights, final_loss_weights
    )
    expected = {name: parameter.grad for name, parameter in cell.named_parameters()}
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    chunks = [values.split(CHUNKS[count], 1)[rank] for values in (inputs, loss_weights)]
    chunk_reset = None if reset is None else reset.split(CHUNKS[count], 1)[rank]
    # The initial state of rank 0 is used on all ranks; NaN shows that those of the other ranks are ignored.
    initial = state if rank == 0 else ADPTState(torch.full_like(state.state, torch.nan), state.position)
    # Every rank has the final state in its loss, and the losses of all ranks are summed.
    final_loss_weights = final_loss_weights / count
    found, own_inputs_grad, own_state_grad = solve_and_differentiate(
        TimeParallel(solver, group),
        cell,
        chunks[0],
        initial,
        chunk_reset,
        chunks[1],
        final_loss_weights,
        adjoint=adjoint,
    )
    sum_gradients(cell, group)
    pairs = [(found.states, exact.states.split(CHUNKS[count], 1)[rank]), (found.final, exact.final)]
    gradients = [(own_inputs_grad, inputs_grad.split(CHUNKS[count], 1)[rank])]
    gradients += [(own_state_grad, state_grad)] if rank == 0 else []
    gradients += [
        (parameter.grad, torch.zeros_like(parameter) if expected[name] is None else expected[name])
        for name, parameter in cell.named_parameters()
    ]
    scale = max(1.0, *(float(true.abs().max()) for _, true in gradients))
    return (
        max(float((ours - true).detach().abs().max()) for ours, true in pairs),
        max(float((ours - true).detach().abs().max()) for ours, true in gradients) / scale,
        found,
    )


def groups_of(rank):
    """Return the process groups of 1, 2 and 4 ranks that contain this rank, by their size."""
    groups = {count: dist.new_group(list(range(count))) for count in (1, 2, 4)}
    return {count: group for count, group in groups.items() if rank < count}


def compare_cases(cases, groups, all_group_sizes):
    """Return the differences from the results of one process for each case."""
    differences = {}
    torch.manual_seed(0)
    for number, (name, cell, solver, resets) in enumerate(cases()):
        # To save time, most cases run on 2 or 4 ranks in turn. RoPE, whose angles depend on the position of a chunk,
        # runs on both.
        alternating = (2,) if number % 2 == 0 else (4,)
        for size in (2, 4) if all_group_sizes or "rope" in name else alternating:
            if size in groups:
                torch.manual_seed(number)
                states, gradients, found = compare_with_one_process(solver, groups[size], cell, resets)
                results = sorted({solvers.Result(int(result)).name for result in found.results})
                differences[f"{name}, {size} ranks"] = {"states": states, "gradients": gradients, "results": results}
    return differences


def compare_all(rank, count, folder):
    return compare_cases(all_cases, groups_of(rank), True)


def run_checks(rank, count, folder):
    groups = groups_of(rank)
    return {
        "compared": compare_cases(some_cases, groups, False),
        "alone": compare_one_rank(groups[1]) if rank == 0 else None,
        "errors": collect_errors(rank),
        "results": run_policies(rank),
        "gradients": compare_partial_gradients(rank),
        "gathered": count_messages(rank),
        "kernels": run_kernels(rank),
    }


def count_messages(rank):
    """Return how often the ranks gather tensors in one more iteration of a solve, and of its gradient."""
    torch.manual_seed(0)
    cell, inputs, count = cells.from_torch(nn.GRUCell(3, 4)), torch.randn(2, 40, 3), 0
    gather = Ranks.all_gather

    def count_and_gather(self, values):
        nonlocal count
        count += 1
        return gather(self, values)

    def run(iterations, adjoint_iterations):
        nonlocal count
        count = 0
        newton = solvers.QuasiDEER(fixed_iterations=iterations, on_failure=solvers.Return())
        adjoint = adjoints.Implicit(rtol=0.0, max_iterations=adjoint_iterations)
        solution = TimeParallel(newton)(cell, inputs[:, 10 * rank : 10 * rank + 10], adjoint=adjoint)
        forward, count = count, 0
        solution.states.sum().backward()
        return forward, count

    Ranks.all_gather = count_and_gather
    try:
        few, many = run(2, 1), run(3, 2)
    finally:
        Ranks.all_gather = gather
    return [more - fewer for more, fewer in zip(many, few, strict=True)]


def assert_all_agree(compared):
    different = {name: each for name, each in compared.items() if not max(each["states"], each["gradients"]) <= 1e-9}
    assert not different
    for name, each in compared.items():
        if "too few iterations" in name:
            assert each["results"] == ["FINISHED"]
        elif "Jacobi" not in name:  # Jacobi may stop at its limit of iterations
            assert each["results"] == ["CONVERGED"], name


def compare_one_rank(group):
    """Compare `TimeParallel` on one rank with the same solver outside a process group."""
    differences = {}
    for name, cell, solver, resets in some_cases()[::4]:
        if "Koopman" in name:
            continue  # one process averages M over unconverged steps only, `TimeParallel` over all steps
        torch.manual_seed(0)
        inputs, state, reset, _, _ = make_whole_problem(cell, resets)
        with torch.no_grad():
            plain = solver(cell, inputs, state, reset=reset)
            found = TimeParallel(solver, group)(cell, inputs, state, reset=reset)
        same = [
            torch.equal(getattr(plain, field), getattr(found, field))
            for field in ("results", "iterations", "converged_steps")
        ]
        differences[name] = {"states": float((plain.states - found.states).abs().max()), "same": same}
    return differences


def collect_errors(rank):
    """Return the error that this rank raises for each call in which one rank is given a different argument.

    The calls share one process group, which must remain usable after each error.
    """
    torch.manual_seed(0)
    cell, other = (cells.from_torch(nn.GRUCell(3, 4)) for _ in range(2))
    wide = cells.from_torch(nn.GRUCell(3, 5))
    inputs, solver = torch.randn(2, 3, 3), TimeParallel(solvers.QuasiDEER())
    unconverged = TimeParallel(solvers.QuasiDEER(max_iterations=1, on_failure=solvers.Raise()))

    def cross_backward():
        first, second = solver(cell, inputs), solver(cell, inputs)
        (first if rank == 1 else second).states.sum().backward()

    attempts = {
        "batch": lambda: solver(cell, inputs[:1] if rank == 2 else inputs),
        "dtype": lambda: solver(cell.float(), inputs.float()) if rank == 1 else solver(cell.double(), inputs),
        "size": lambda: solver(wide if rank == 3 else cell.double(), inputs),
        "weights": lambda: solver(other if rank == 1 else cell, inputs),
        "solver": lambda: (solver if rank else TimeParallel(solvers.DEER()))(cell, inputs),
        "features": lambda: solver(cell, inputs[..., :2] if rank == 1 else inputs),
        "no steps": lambda: solver(cell, inputs[:, :0] if rank == 0 else inputs),
        "lengths": lambda: solver(cell, inputs, lengths=torch.tensor([3, 2]) if rank == 3 else None),
        "adjoint": lambda: solver(cell, inputs, adjoint=adjoints.Unrolled()),
        "guess": lambda: solver(cell, inputs, guess=torch.zeros(2, 3 + rank // 3, 4)),
        "raise": lambda: unconverged(cell, inputs),
        "crossed": cross_backward,
    }
    raised = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            raised[name] = "nothing"
        except errors.AdptnetError as error:
            raised[name] = f"{type(error).__name__}: {error}"
        cell.double()
    return raised


def run_policies(rank):
    """Return results for too few iterations, NaN in the inputs, one unbatched sequence and an empty batch."""
    torch.manual_seed(0)
    cell = cells.from_torch(nn.GRUCell(3, 4))
    inputs = torch.randn(2, 12, 3)
    broken = inputs.clone()
    broken[1, 4] = torch.nan
    chunk = slice(3 * rank, 3 * rank + 3)
    returned = TimeParallel(solvers.QuasiDEER(max_iterations=1, on_failure=solvers.Return()))(cell, inputs[:, chunk])
    not_finite = TimeParallel(solvers.QuasiDEER())(cell, broken[:, chunk])
    one = TimeParallel(solvers.QuasiDEER())(cell, inputs[0, chunk])
    empty = TimeParallel(solvers.QuasiDEER())(cell, inputs[:0, chunk])
    exact = solvers.Sequential()(cell, inputs[0])
    return {
        "empty": list(empty.states.shape),
        "returned": returned.results.tolist(),
        "not finite": not_finite.results.tolist(),
        "steps": not_finite.converged_steps.tolist(),
        "one sequence": float((one.states - exact.states[chunk]).detach().abs().max()),
    }


def run_kernels(rank):
    """Return the error, and whether kernels run the iterations, if all ranks have kernels and if rank 1 has none."""
    torch.manual_seed(0)
    cell, inputs = ADPTNet.paper(6, beta=1.0).cell, torch.randn(2, 12, 6)
    exact = solvers.Sequential()(cell, inputs).states.detach()[:, 3 * rank : 3 * rank + 3]
    returned = {}
    for name, missing in {"all ranks": False, "not rank 1": rank == 1}.items():
        if missing:
            os.environ["ADPTNET_BACKEND"] = "reference"
        try:
            with torch.no_grad(), record_runs() as runs:
                found = TimeParallel(solvers.ForwardDEER())(cell, inputs[:, 3 * rank : 3 * rank + 3])
        finally:
            os.environ.pop("ADPTNET_BACKEND", None)
        programs = [run.backend for run in runs if run.phase == "iteration"]
        returned[name] = {"error": float((found.states - exact).abs().max()), "kernel": programs[-1].is_kernel}
    return returned


def compare_partial_gradients(rank):
    """Compare gradients with respect to the initial state, for a loss on the last rank and frozen parameters."""
    torch.manual_seed(0)
    cell = build({"width": 6, "beta": 1.0}).cell.requires_grad_(False)
    inputs, state = torch.randn(2, 12, 6), torch.randn(2, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(solvers.Sequential()(cell, inputs, state).final.sum(), state)
    initial = state if rank == 0 else None
    differences = {}
    for name, adjoint in {"iterated": None, "step by step": adjoints.Implicit(max_iterations=0)}.items():
        solver = TimeParallel(solvers.ConvDEER())
        solution = solver(cell, inputs[:, 3 * rank : 3 * rank + 3], initial, adjoint=adjoint)
        loss = solution.states[:, -1].sum() if rank == 3 else (0 * solution.states).sum()
        state.grad = None
        loss.backward()
        differences[name] = float((state.grad - expected).abs().max()) if rank == 0 else 0.0
    return differences


def test_four_ranks_agree_with_one_process_and_share_their_errors(tmp_path):
    every = collect_results(start_workers(run_checks, 4, tmp_path), tmp_path, range(4))
    for rank, returned in enumerate(every):
        assert_all_agree(returned["compared"])
        assert returned["results"]["empty"] == [0, 3, 4]
        assert returned["results"]["returned"] == [solvers.Result.NOT_CONVERGED] * 2
        assert returned["results"]["not finite"] == [solvers.Result.CONVERGED, solvers.Result.NON_FINITE]
        assert returned["results"]["steps"] == [12, 4]
        assert max(returned["gradients"]["iterated"], returned["gradients"]["step by step"]) < 1e-9
        assert returned["results"]["one sequence"] < 1e-9
        assert returned["gathered"][0] <= 6
        assert returned["gathered"][1] <= 4
        assert max(each["error"] for each in returned["kernels"].values()) < 1e-11
        assert returned["kernels"]["all ranks"]["kernel"] == has_kernel(torch.float64)
        assert not returned["kernels"]["not rank 1"]["kernel"]
        messages = returned["errors"]
        for name, words in {
            "batch": "a batch of 2 on rank 0, but 1 on rank 2",
            "dtype": "the dtype torch.float64 on rank 0, but torch.float32 on rank 1",
            "size": "a state of size 4 on rank 0, but 5 on rank 3",
            "weights": "the parameters of the cell on rank 1 are not those on rank 0",
            "solver": "the solver DEER()",
            "features": "inputs have 2 features",
            "no steps": "a chunk (batch, time, features)",
            "lengths": "takes no lengths=",
            "adjoint": "Drop adjoint=",
            "guess": "the guess has shape (2, 4, 4)",
            "raise": "stopped after 1 iterations (NOT_CONVERGED)",
            "crossed": "call backward through different solves",
        }.items():
            assert words in messages[name], (rank, name, messages[name])
        # The rank at fault raises the specific error; the others raise a DistributedError that names this rank.
        rank_at_fault = {"features": 1, "no steps": 0, "lengths": 3, "guess": 3}
        for name, faulty in rank_at_fault.items():
            assert messages[name].startswith("DistributedError: rank") == (rank != faulty)
    for name, each in every[0]["alone"].items():
        assert each["states"] < 1e-11, name
        assert all(each["same"]), name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_solver_on_every_cell_over_ranks(tmp_path):
    for returned in collect_results(start_workers(compare_all, 4, tmp_path), tmp_path, range(4), seconds=500):
        assert_all_agree(returned)


def solve_until_killed(call, rank, count, folder):
    """Solve and differentiate. Rank 1 kills itself when it evaluates its steps for the `call`-th time."""
    calls = []
    weight = torch.ones(3, requires_grad=True)

    def step(state, drive):
        calls.append(1)
        if rank == 1 and len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tanh(weight * state + drive)

    start, phase = time.monotonic(), "solve"
    try:
        solution = TimeParallel(solvers.Jacobi())(cells.from_function(step, 3), torch.randn(2, 9, 3))
        phase = "backward"
        solution.states.sum().backward()
    except errors.DistributedError as error:
        return {"message": str(error), "phase": phase, "seconds": time.monotonic() - start}
    return {"message": "nothing", "phase": phase, "calls": len(calls), "seconds": 0.0}


# The solve takes fewer than 36 evaluations of the steps, so the 36th is in the backward pass.
@pytest.mark.parametrize(("call", "phase"), [(6, "solve"), (36, "backward")])
def test_a_killed_rank_ends_the_others_with_a_clear_error(call, phase, tmp_path):
    worker = functools.partial(solve_until_killed, call)
    for returned in collect_results(start_workers(worker, 3, tmp_path, seconds=20), tmp_path, [0, 2]):
        assert "Another rank has exited" in returned["message"], returned
        assert "First look for an error in the output of the other ranks" in returned["message"]
        assert returned["phase"] == phase
        assert returned["seconds"] < 25


def test_without_a_process_group_the_error_gives_the_command():
    with pytest.raises(errors.DistributedError, match="torchrun --nproc-per-node=4"):
        TimeParallel(solvers.ConvDEER())(build({"width": 6}).cell, torch.randn(2, 3, 6))
    with pytest.raises(errors.DistributedError, match="init_process_group"):
        sum_gradients(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("solver", "words"),
    [
        (solvers.QuasiDEER(solvers.TrustRegion(0.1)), "TrustRegion"),
        (solvers.QuasiDEER(solvers.Proximal()), "Proximal"),
        (solvers.KoopmanDEER(means=2), "one mean"),
        (solvers.KoopmanDEER(mean=solvers.linearizations.MeanRotation), "one mean"),
    ],
)
def test_time_parallel_rejects_unsupported_options(solver, words):
    with pytest.raises(errors.IncompatibleError, match=words):
        TimeParallel(solver)


def test_time_parallel_wraps_newton_solvers_only():
    with pytest.raises(errors.InputError, match="Newton"):
        TimeParallel(solvers.BlockWise(solvers.ConvDEER(), 2))
    assert repr(TimeParallel(solvers.ConvDEER())) == "TimeParallel(ConvDEER())"
