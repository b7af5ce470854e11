"""Every solver on one ADPTNet layer and on a torch.nn.GRUCell, then on a layer that is hard to solve in parallel.

Prints for each solver how many iterations it took, how far its states and gradients are from those of Sequential, and
its CPU time beside Sequential's. Under half a minute on one core:

    python examples/parallel.py
"""

import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor

import adptnet as adpt
from adptnet import cells, errors, solvers, spectra
from adptnet.ops.lti_convolution import lti_convolution

SOLVERS = {
    "Sequential": solvers.Sequential(),
    "DEER": solvers.DEER(),
    "QuasiDEER": solvers.QuasiDEER(),
    "QuasiDEER, 4 probes": solvers.QuasiDEER(probes=4),
    "ForwardDEER": solvers.ForwardDEER(),
    "ConvDEER": solvers.ConvDEER(),
    "ConvDEER by FFT": solvers.ConvDEER(by=lti_convolution),
    "KoopmanDEER": solvers.KoopmanDEER(),
    "Jacobi": solvers.Jacobi(),
    "Picard": solvers.Picard(),
}
HARD = {  # with Return(), to see what the iterations alone come to
    "Sequential": solvers.Sequential(),
    "ConvDEER": solvers.ConvDEER(on_failure=solvers.Return()),
    "  Finish(), the default": solvers.ConvDEER(on_failure=solvers.Finish()),
    "  Scale(0.99)": solvers.ConvDEER(solvers.Scale(0.99), on_failure=solvers.Return()),
    "  Adaptive()": solvers.ConvDEER(solvers.Adaptive(), on_failure=solvers.Return()),
    "  Proximal()": solvers.ConvDEER(solvers.Proximal(), on_failure=solvers.Return()),
    "  blocks of 256 steps": solvers.BlockWise(solvers.ConvDEER(on_failure=solvers.Return()), block_length=256),
}
NOTES = """
iterations   updates until every step is within tolerance, at least one; a range where sequences differ.
result       CONVERGED: by iterations alone. FINISHED: given up, then completed step by step, so exact as well.
             DIVERGED: the residual rose three times in a row and is above that of the guess; given up.
right steps  how many, from the first on, are right.
residual     the largest |f(s_{t-1}) - s_t|.
error        the largest difference of a number of the state from Sequential's.
gradient     the largest difference from back-propagation through Sequential, relative to the largest gradient.
time         CPU time of the states, Sequential = 1. Of an ADPT cell Sequential is one compiled operation where there
             is a C++ compiler: on a CPU that is the fast path, as k iterations evaluate every step up to k times.
             Of a GRUCell it is a Python loop. What carries over to parallel devices is the count of iterations."""


class Row(NamedTuple):
    """What one solver did. Of a batch: the range of iterations, and the worst of the rest."""

    result: solvers.Result
    iterations: tuple[int, int]
    converged_steps: int
    residual: float
    error: float  # largest difference of a state from Sequential's
    time: float  # CPU time of the states, over Sequential's
    gradient_error: float | None = None  # relative, the worst over the inputs and all parameters


def main(length: int = 256, hard_length: int = 4096, rounds: int = 2) -> dict[str, dict[str, Row]]:
    """Prints three tables and returns their rows."""
    torch.manual_seed(0)
    layer = adpt.ADPTNet(32, beta=1.0, dtype=torch.float64)
    gru = cells.from_torch(torch.nn.GRUCell(32, 32, dtype=torch.float64))
    slow = adpt.ADPTNet(32, beta=1.0, spectrum=spectra.Linspace(dt_min=1e-4), dtype=torch.float64)
    x = torch.randn(2, length, 32, dtype=torch.float64)
    far = torch.randn(1, hard_length, 32, dtype=torch.float64)

    print(f"ADPTNet, β = 1: two sequences of {length} steps, a state of 32 numbers, float64.\n")
    tables = {"ADPTNet": compare(SOLVERS, layer.cell, x, rounds, gradients=True)}
    print("\ntorch.nn.GRUCell: the same inputs.\n")
    tables["GRU"] = compare(SOLVERS, gru, x, rounds, gradients=True)
    print(f"\nHard: ADPTNet, β = 1, memories of up to 20,000 steps, one sequence of {hard_length} steps.\n")
    tables["hard"] = compare(HARD, slow.cell, far, 1, gradients=False)
    print(NOTES)
    return tables


def compare(
    every: dict[str, solvers.Solver], cell: cells.Cell, x: Tensor, rounds: int, gradients: bool
) -> dict[str, Row]:
    """Solves `x` by every solver that takes the cell, and prints a table."""
    able, refusals = {}, {}
    for name, solver in every.items():
        try:
            solver(cell, x[:, :1])
            able[name] = solver
        except errors.IncompatibleError as refusal:
            refusals[name] = refusal
    found, times = race(able, cell, x, rounds)
    exact = gradient(able["Sequential"], cell, x) if gradients else None
    print(f"{'':24}{'iterations':>10}  {'result':<14}{'right steps':>11} residual   error  gradient   time")
    rows = {}
    for name, solution in found.items():
        rows[name] = row = Row(
            solution.result,
            (int(solution.iterations.min()), int(solution.iterations.max())),
            int(solution.converged_steps.min()),
            solution.residual.max().item(),
            (solution.states - found["Sequential"].states).abs().max().item(),
            times[name],
            None if exact is None else max(map(relative, gradient(able[name], cell, x), exact)),
        )
        low, high = row.iterations
        counted = str(high) if low == high else f"{low} to {high}"
        gradient_error = "-" if row.gradient_error is None else f"{row.gradient_error:.0e}"
        print(
            f"{name:<24}{counted:>10}  {row.result.name:<14}{row.converged_steps:>11}{row.residual:9.0e}"
            f"{row.error:8.0e}{gradient_error:>10}{row.time:7.2f}"
        )
    for name, refusal in refusals.items():
        print(f"{name:<24}refused: {str(refusal).split('. ')[0]}.")
    return rows


def race(
    able: dict[str, solvers.Solver], cell: cells.Cell, x: Tensor, rounds: int
) -> tuple[dict[str, solvers.Solution], dict[str, float]]:
    """Solutions without gradients, and CPU times over that of the first: medians over rounds of one run each."""
    able["Sequential"](cell, x[:, :1])  # the compiled operation is built at its first use
    ratios: dict[str, list[float]] = {name: [] for name in able}
    found = {}
    for _ in range(rounds):
        first = None
        for name, solver in able.items():
            start = time.process_time()
            with torch.no_grad():
                found[name] = solver(cell, x)
            taken = time.process_time() - start
            first = taken if first is None else first
            ratios[name].append(taken / first)
    return found, {name: statistics.median(values) for name, values in ratios.items()}


def gradient(solver: solvers.Solver, cell: cells.Cell, x: Tensor) -> list[Tensor]:
    """Of a loss that looks at every state: of the inputs and of every parameter."""
    x = x.clone().requires_grad_()
    loss = solver(cell, x).states.sin().square().mean()
    return list(torch.autograd.grad(loss, [x, *cell.parameters()]))


def relative(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).abs().max() / exact.abs().max()).item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
