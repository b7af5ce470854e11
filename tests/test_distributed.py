"""The time axis over real process groups: the same states and gradients, and an error on every rank where one fails."""

import datetime
import json
import os
import signal
import time
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

from adptnet import ADPTState, adjoints, cells, drive, errors, solvers, spectra
from adptnet.solvers.distributed import TimeParallel, sum_gradients
from members import build

BATCH = 2
CHUNKS = {1: (23,), 2: (15, 8), 4: (7, 1, 9, 6)}
LEAST = {1: 1, 2: 1, 4: 2}  # every how many cases are run on as many ranks


def started(worker, count, folder, seconds=60):
    """`worker(rank, count, folder)` in processes of their own that are one process group."""
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
    """Each with a spectrum that forgets slowly enough for the chunks to matter, and whether to reset."""
    yield "real", build({"width": 6, "beta": 1.0}).cell, False
    yield "complex", build({"width": 6, "beta": 0.5, "spectrum": spectra.S4DInv()}).cell, False
    yield "rope", build({"width": 6, "beta": 1.0, "rope": drive.RoPE()}).cell, False
    yield "rope and resets", build({"width": 6, "beta": 1.0, "rope": drive.RoPE()}).cell, True
    yield "coupled", build({"width": 6, "beta": 1.0, "memory": cells.SlowMemory()}).cell, True
    yield "learned start", build({"width": 6, "beta": 1.0, "start": True}).cell, False
    yield "gru", cells.from_torch(nn.GRUCell(6, 5)), True


def cases():
    everywhere = {
        "DEER": solvers.DEER(),
        "QuasiDEER": solvers.QuasiDEER(),
        "Jacobi": solvers.Jacobi(),
        "KoopmanDEER": solvers.KoopmanDEER(),
        "Scale": solvers.QuasiDEER(solvers.Scale(0.9)),
        "Adaptive": solvers.QuasiDEER(solvers.Adaptive()),
        "stopped early": solvers.QuasiDEER(max_iterations=2),
    }
    adpt_only = {"ConvDEER": solvers.ConvDEER(), "ForwardDEER": solvers.ForwardDEER()}
    for cell_name, cell, resets in cells_by_name():
        for solver_name, solver in {**everywhere, **({} if cell_name == "gru" else adpt_only)}.items():
            yield f"{solver_name} on {cell_name}", cell, solver, resets


def whole_problem(cell, resets):
    inputs = torch.randn(BATCH, 23, 6)
    reset = torch.zeros(BATCH, 23, dtype=torch.bool)
    if resets:
        reset[0, [3, 15]] = True  # the second is the first step of a chunk
        reset[1, 9] = True
    state = ADPTState(0.5 * torch.randn(BATCH, cell.state_size), torch.tensor([4, 0]))
    return inputs, state, reset if resets else None, torch.randn(BATCH, 23, cell.state_size), torch.randn(BATCH, 1)


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


def compare_everything(rank, count, folder):
    torch.manual_seed(0)
    groups = groups_here(rank)
    said = {}
    T0=time.time()
    for number, (name, cell, solver, resets) in enumerate(cases()):
        for size, group in groups.items():
            if size == 1 and number % 4:
                continue
            torch.manual_seed(number)
            if rank==0: print(name,size,round(time.time()-T0,2),flush=True)
            states, gradients, found = compared(solver, group, cell, resets)
            results = sorted({solvers.Result(int(result)).name for result in found.results})
            said[f"{name}, {size} ranks"] = {"states": states, "gradients": gradients, "results": results}
    return said


def test_ranks_give_the_states_and_gradients_of_one_process(tmp_path):
    for said in said_by(started(compare_everything, 4, tmp_path), tmp_path, range(4)):
        off = {name: each for name, each in said.items() if not max(each["states"], each["gradients"]) <= 1e-9}
        assert not off
        early = [each["results"] for name, each in said.items() if "stopped early" in name]
        assert all("FINISHED" in results for results in early)
        rest = [each["results"] for name, each in said.items() if "early" not in name and "Jacobi" not in name]
        assert sum(results == ["CONVERGED"] for results in rest) > 0.8 * len(rest)
