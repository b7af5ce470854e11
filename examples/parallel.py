"""Compare every solver with the sequential loop: on an ADPTNet, on a torch.nn.GRUCell, and on a hard ADPTNet.

Prints iterations, errors of states and gradients, and CPU time. Less than half a minute on one core:

    python examples/parallel.py
"""

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
HARD = {  # Return() shows the result of the iterations alone
    "Sequential": solvers.Sequential(),
    "ConvDEER": solvers.ConvDEER(on_failure=solvers.Return()),
    "  Finish(), the default": solvers.ConvDEER(on_failure=solvers.Finish()),
    "  Scale(0.99)": solvers.ConvDEER(solvers.Scale(0.99), on_failure=solvers.Return()),
    "  Adaptive()": solvers.ConvDEER(solvers.Adaptive(), on_failure=solvers.Return()),
    "  Proximal()": solvers.ConvDEER(solvers.Proximal(), on_failure=solvers.Return()),
    "  blocks of 256 steps": solvers.BlockWise(solvers.ConvDEER(on_failure=solvers.Return()), block_length=256),
}
NOTES = """
iterations   updates until every step is within tolerance, at least one; a range if sequences differ.
result       CONVERGED: by iterations alone. FINISHED: the rest was computed sequentially, so it is exact too.
             DIVERGED: the residual rose three times in a row and exceeds that of the guess.
steps        converged steps, counted from the first.
residual     largest |f(s_{t-1}) - s_t|.
error        largest difference of a state from Sequential's.
gradient     largest difference from backpropagation through Sequential, relative to the largest gradient.
time         CPU time of the states, relative to Sequential. For an ADPT cell Sequential is one compiled operation if
             there is a C++ compiler: the fast path on a CPU, since k iterations evaluate every step up to k times. For
             a GRUCell it is a Python loop. The number of iterations is what carries over to parallel devices."""


class Row(NamedTuple):
    """Outcome of one solver. Of a batch: the range of iterations, and the worst of the rest."""

    result: solvers.Result
    iterations: tuple[int, int]
    converged_steps: int
    residual: float
    error: float
    time: float
    gradient_error: float | None


def main(length: int = 256, hard_length: int = 4096) -> dict[str, dict[str, Row]]:
    """Print three tables and return their rows."""
    torch.manual_seed(0)
    layer = adpt.ADPTNet.paper(32, beta=1.0, dtype=torch.float64)
    gru = cells.from_torch(torch.nn.GRUCell(32, 32, dtype=torch.float64))
    slow = adpt.ADPTNet.paper(32, beta=1.0, spectrum=spectra.Linspace(dt_min=1e-4), dtype=torch.float64)
    x = torch.randn(2, length, 32, dtype=torch.float64)
    long = torch.randn(1, hard_length, 32, dtype=torch.float64)

    print(f"ADPTNet, β = 1, state dimension 32, two sequences of {length} steps, float64")
    tables = {"ADPTNet": compare(SOLVERS, layer.cell, x, gradients=True)}
    print("\ntorch.nn.GRUCell, the same inputs")
    tables["GRU"] = compare(SOLVERS, gru, x, gradients=True)
    print(f"\nHard: ADPTNet, β = 1, memories of up to 20,000 steps, one sequence of {hard_length} steps")
    tables["hard"] = compare(HARD, slow.cell, long, gradients=False)
    print(NOTES)
    return tables


def compare(candidates: dict[str, solvers.Solver], cell: cells.Cell, x: Tensor, gradients: bool) -> dict[str, Row]:
    """Solve `x` by every solver that supports the cell, and print a table."""
    print(f"\n{'':24}{'iterations':>10}  {'result':<14}{'steps':>5} residual   error  gradient   time")
    rows: dict[str, Row] = {}
    for name, solver in candidates.items():
        try:
            solver(cell, x[:, :1])  # raises if the solver does not support the cell; compiles at the first use
        except errors.IncompatibleError as error:
            print(f"{name:<24}not supported: {str(error).split('. ')[0]}.")
            continue
        start = time.process_time()
        with torch.no_grad():
            solution = solver(cell, x)
        seconds = time.process_time() - start
        gradient = differentiate(solver, cell, x) if gradients else []
        if name == "Sequential":
            exact, exact_gradient, sequential_seconds = solution.states, gradient, seconds
        rows[name] = row = Row(
            solution.result,
            (int(solution.iterations.min()), int(solution.iterations.max())),
            int(solution.converged_steps.min()),
            solution.residual.max().item(),
            (solution.states - exact).abs().max().item(),
            seconds / sequential_seconds,
            max(map(relative_error, gradient, exact_gradient)) if gradients else None,
        )
        low, high = row.iterations
        shown = str(high) if low == high else f"{low} to {high}"
        gradient_error = "-" if row.gradient_error is None else f"{row.gradient_error:.0e}"
        print(
            f"{name:<24}{shown:>10}  {row.result.name:<14}{row.converged_steps:>5}{row.residual:9.0e}"
            f"{row.error:8.0e}{gradient_error:>10}{row.time:7.2f}"
        )
    return rows


def differentiate(solver: solvers.Solver, cell: cells.Cell, x: Tensor) -> list[Tensor]:
    """Return the gradients of a loss over all states, with respect to the inputs and every parameter."""
    x = x.clone().requires_grad_()
    loss = solver(cell, x).states.sin().square().mean()
    return list(torch.autograd.grad(loss, [x, *cell.parameters()]))


def relative_error(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).abs().max() / exact.abs().max()).item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
