"""The time axis over real process groups: the same states and gradients, and an error on every rank where one fails."""

import datetime
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

from adptnet import ADPTState, adjoints, cells, drive, errors, solvers, spectra
from adptnet.solvers.distributed import TimeParallel, sum_gradients
from support.members import build

BATCH = 2
CHUNKS = {1: (13,), 2: (8, 5), 4: (4, 1, 5, 3)}
STEPS = 13


def started(worker, count, folder, seconds=60):
    """`worker(rank, count, folder)` in processes of their own that are one process group."""
    if "forkserver" in multiprocessing.get_all_start_methods():  # imports torch once, not in each process
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["adptnet", "torch.distributed", "torch._dynamo", "pytest"])
    else:
        context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_begin, args=(worker, rank, count, str(folder), seconds), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    return processes


def _begin(worker, rank, count, folder, seconds):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count, timeout=timeout)
    try:
        said = worker(rank, count, folder)
    except Exception:
        said = {"error": traceback.format_exc()}
    with open(f"{folder}/said{rank}.json", "w") as file:
        json.dump(said, file)


def said_by(processes, folder, ranks, seconds=100):
    """What the workers returned."""
    deadline = time.monotonic() + seconds
    for rank in ranks:
        processes[rank].join(max(0.0, deadline - time.monotonic()))
    hanging = [rank for rank in ranks if processes[rank].is_alive()]
    for process in processes:
        process.kill()
    assert not hanging, f"ranks {hanging} did not end"
    said = []
    for rank in ranks:
        with open(f"{folder}/said{rank}.json") as file:
            said.append(json.load(file))
    for rank, each in zip(ranks, said, strict=True):
        assert "error" not in each, f"rank {rank}: {each['error']}"
    return said


def cells_by_name():
    """Each cell, and whether there are resets."""
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
    yield "stopped early", solvers.QuasiDEER(max_iterations=2)


def all_cases():
    for cell_name, cell, resets in cells_by_name():
        for solver_name, solver in solvers_by_name():
            if cell_name != "gru" or solver_name not in ("ConvDEER", "ForwardDEER"):
                yield f"{solver_name} on {cell_name}", cell, solver, resets


def some_cases():
    """Of all cases those that differ most; the slow test has the rest."""
    main = ["ConvDEER", "ForwardDEER", "QuasiDEER", "DEER", "Jacobi"]
    chosen = {f"{solver} on {cell}" for cell in ("rope and resets", "complex", "coupled", "gru") for solver in main}
    chosen |= {"QuasiDEER on real", "ConvDEER on learned start", "ForwardDEER on complex and coupled"}
    chosen |= {"KoopmanDEER on rope and resets", "KoopmanDEER on complex", "Scale on complex", "Adaptive on coupled"}
    return [case for case in all_cases() if case[0] in chosen | {"stopped early on gru"}]


def whole_problem(cell, resets):
    inputs = torch.randn(BATCH, STEPS, 6)
    reset = torch.zeros(BATCH, STEPS, dtype=torch.bool)
    if resets:
        reset[0, [2, 10]] = True  # the second is the first step of a chunk
        reset[1, 6] = True
    state = ADPTState(0.5 * torch.randn(BATCH, cell.state_size), torch.tensor([4, 0]))
    return inputs, state, reset if resets else None, torch.randn(BATCH, STEPS, cell.state_size), torch.randn(BATCH, 1)


def differentiated(solver, cell, inputs, state, reset, weights, final_weights, **options):
    """The solution, and the gradients of a loss of all states and of the final one."""
    for parameter in cell.parameters():
        parameter.grad = None
    inputs = inputs.clone().requires_grad_()
    entering = state.state.clone().requires_grad_()
    solution = solver(cell, inputs, state._replace(state=entering), reset=reset, **options)
    ((solution.states * weights).sum() + (solution.final.square() * final_weights).sum()).backward()
    return solution, inputs.grad, entering.grad


def compared(solver, group, cell, resets, adjoint=None):
    """The largest differences from one process, of states and of gradients, and the result."""
    inputs, state, reset, weights, final_weights = whole_problem(cell, resets)
    exact, inputs_grad, state_grad = differentiated(
        solvers.Sequential(), cell, inputs, state, reset, weights, final_weights
    )
    expected = {name: parameter.grad for name, parameter in cell.named_parameters()}
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    chunks = [values.split(CHUNKS[count], 1)[rank] for values in (inputs, weights)]
    marks = None if reset is None else reset.split(CHUNKS[count], 1)[rank]
    entering = state if rank == 0 else ADPTState(torch.full_like(state.state, torch.nan), state.position)
    found, own_inputs_grad, own_state_grad = differentiated(
        TimeParallel(solver, group), cell, chunks[0], entering, marks, chunks[1], final_weights / count, adjoint=adjoint
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


def groups_here(rank):
    made = {count: dist.new_group(list(range(count))) for count in (1, 2, 4)}
    return {count: group for count, group in made.items() if rank < count}


def comparisons(cases, groups, everything):
    """For each case, how far ranks are from one process."""
    said = {}
    torch.manual_seed(0)
    for number, (name, cell, solver, resets) in enumerate(cases()):
        for size in (2, 4) if everything or "rope" in name else (2 + 2 * (number % 2),):
            if size in groups:
                torch.manual_seed(number)
                states, gradients, found = compared(solver, groups[size], cell, resets)
                results = sorted({solvers.Result(int(result)).name for result in found.results})
                said[f"{name}, {size} ranks"] = {"states": states, "gradients": gradients, "results": results}
    return said


def compare_all(rank, count, folder):
    return comparisons(all_cases, groups_here(rank), True)


def work(rank, count, folder):
    groups = groups_here(rank)
    return {
        "compared": comparisons(some_cases, groups, False),
        "alone": alone(groups[1]) if rank == 0 else None,
        "errors": failures(rank),
        "results": policies(rank),
        "gradients": partial_gradients(rank),
    }


def assert_all_agree(compared):
    off = {name: each for name, each in compared.items() if not max(each["states"], each["gradients"]) <= 1e-9}
    assert not off
    for name, each in compared.items():
        assert "early" not in name or each["results"] == ["FINISHED"]
        assert "early" in name or "Jacobi" in name or each["results"] == ["CONVERGED"], name


def alone(group):
    """Of one rank, against the plain solver."""
    said = {}
    for name, cell, solver, resets in some_cases()[::4]:
        if "Koopman" in name:
            continue  # whose mean leaves out the steps that the plain solver has dropped
        torch.manual_seed(0)
        inputs, state, reset, _, _ = whole_problem(cell, resets)
        with torch.no_grad():
            plain = solver(cell, inputs, state, reset=reset)
            found = TimeParallel(solver, group)(cell, inputs, state, reset=reset)
        same = [
            torch.equal(getattr(plain, field), getattr(found, field))
            for field in ("results", "iterations", "converged_steps")
        ]
        said[name] = {"states": float((plain.states - found.states).abs().max()), "same": same}
    return said


def failures(rank):
    """What each rank is told when one of them is given something else. The group must work again each time."""
    torch.manual_seed(0)
    cell, other = (cells.from_torch(nn.GRUCell(3, 4)) for _ in range(2))
    wide = cells.from_torch(nn.GRUCell(3, 5))
    inputs, solver = torch.randn(2, 3, 3), TimeParallel(solvers.QuasiDEER())
    never = TimeParallel(solvers.QuasiDEER(max_iterations=1, on_failure=solvers.Raise()))

    def crossed():
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
        "raise": lambda: never(cell, inputs),
        "crossed": crossed,
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            said[name] = "nothing"
        except errors.AdptnetError as error:
            said[name] = f"{type(error).__name__}: {error}"
        cell.double()
    return said


def policies(rank):
    """The results of a solve that cannot converge."""
    torch.manual_seed(0)
    cell = cells.from_torch(nn.GRUCell(3, 4))
    inputs = torch.randn(2, 12, 3)
    broken = inputs.clone()
    broken[1, 4] = torch.nan
    chunk = slice(3 * rank, 3 * rank + 3)
    returned = TimeParallel(solvers.QuasiDEER(max_iterations=1, on_failure=solvers.Return()))(cell, inputs[:, chunk])
    finished = TimeParallel(solvers.QuasiDEER())(cell, broken[:, chunk])
    one = TimeParallel(solvers.QuasiDEER())(cell, inputs[0, chunk])
    empty = TimeParallel(solvers.QuasiDEER())(cell, inputs[:0, chunk])
    exact = solvers.Sequential()(cell, inputs[0])
    return {
        "empty": list(empty.states.shape),
        "returned": returned.results.tolist(),
        "not finite": finished.results.tolist(),
        "steps": finished.converged_steps.tolist(),
        "one sequence": float((one.states - exact.states[chunk]).detach().abs().max()),
    }


def partial_gradients(rank):
    """A loss on the last rank only, of weights that do not learn: the initial state is all that has a gradient."""
    torch.manual_seed(0)
    cell = build({"width": 6, "beta": 1.0}).cell.requires_grad_(False)
    inputs, state = torch.randn(2, 12, 6), torch.randn(2, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(solvers.Sequential()(cell, inputs, state).final.sum(), state)
    given = state if rank == 0 else None
    off = {}
    for name, adjoint in {"iterated": None, "step by step": adjoints.Implicit(max_iterations=0)}.items():
        solver = TimeParallel(solvers.ConvDEER())
        solution = solver(cell, inputs[:, 3 * rank : 3 * rank + 3], given, adjoint=adjoint)
        loss = solution.states[:, -1].sum() if rank == 3 else (0 * solution.states).sum()
        state.grad = None
        loss.backward()
        off[name] = float((state.grad - expected).abs().max()) if rank == 0 else 0.0
    return off


def test_ranks_give_the_states_and_gradients_of_one_process(tmp_path):
    every = said_by(started(work, 4, tmp_path), tmp_path, range(4))
    for rank, said in enumerate(every):
        assert_all_agree(said["compared"])
        assert said["results"]["empty"] == [0, 3, 4]
        assert said["results"]["returned"] == [solvers.Result.NOT_CONVERGED] * 2
        assert said["results"]["not finite"] == [solvers.Result.CONVERGED, solvers.Result.NON_FINITE]
        assert said["results"]["steps"] == [12, 4]
        assert max(said["gradients"]["iterated"], said["gradients"]["step by step"]) < 1e-9
        assert said["results"]["one sequence"] < 1e-9
        told = said["errors"]
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
            "crossed": "go backward through different solves",
        }.items():
            assert words in told[name], (rank, name, told[name])
        own = {"features": 1, "no steps": 0, "lengths": 3, "guess": 3}
        for name, where in own.items():
            assert told[name].startswith("DistributedError: rank") == (rank != where)
    for name, each in every[0]["alone"].items():
        assert each["states"] < 1e-11, name
        assert all(each["same"]), name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_solver_on_every_cell_over_ranks(tmp_path):
    for said in said_by(started(compare_all, 4, tmp_path), tmp_path, range(4), seconds=500):
        assert_all_agree(said)


def dies_in_the_search(rank, count, folder):
    return killed_at(6, rank)


def dies_in_backward(rank, count, folder):
    return killed_at(36, rank)


def killed_at(call, rank):
    """Rank 1 is killed when it evaluates its steps for the `call`-th time."""
    calls = []
    weight = torch.ones(3, requires_grad=True)

    def step(state, drive):
        calls.append(1)
        if rank == 1 and len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tanh(weight * state + drive)

    began, where = time.monotonic(), "the search"
    try:
        solution = TimeParallel(solvers.Jacobi())(cells.from_function(step, 3), torch.randn(2, 9, 3))
        where = "backward"
        solution.states.sum().backward()
    except errors.DistributedError as error:
        return {"told": str(error), "where": where, "seconds": time.monotonic() - began}
    return {"told": "nothing", "where": where, "calls": len(calls), "seconds": 0.0}


@pytest.mark.parametrize("worker", [dies_in_the_search, dies_in_backward])
def test_a_killed_rank_ends_the_others_with_a_clear_error(worker, tmp_path):
    for said in said_by(started(worker, 3, tmp_path, seconds=20), tmp_path, [0, 2]):
        assert "Another rank has ended" in said["told"], said
        assert "See what the other ranks printed first" in said["told"]
        assert said["where"] in worker.__name__.replace("_", " ")
        assert said["seconds"] < 25


def test_without_a_process_group_it_says_what_to_type():
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
        (solvers.KoopmanDEER(mean=solvers.linearisations.MeanRotation), "one mean"),
    ],
)
def test_what_does_not_work_over_ranks_is_refused(solver, words):
    with pytest.raises(errors.IncompatibleError, match=words):
        TimeParallel(solver)


def test_it_wraps_newton_solvers_only():
    with pytest.raises(errors.InputError, match="Newton"):
        TimeParallel(solvers.BlockWise(solvers.ConvDEER(), 2))
    assert repr(TimeParallel(solvers.ConvDEER())) == "TimeParallel(ConvDEER())"
