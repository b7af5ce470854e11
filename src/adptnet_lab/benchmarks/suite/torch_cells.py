"""Parallel solves of an `nn.GRUCell`, whose Jacobians have a closed form, against the same step as a plain function."""

from functools import partial

import torch
from torch import Tensor, nn

from adptnet import cells, solvers

from ..benchmark import Benchmark, Case, Size
from ..goals import Goal
from ..timing import Side

__all__ = ["TORCH_CELLS"]

SOLVERS: dict[str, solvers.Solver] = {"DEER": solvers.DEER(), "Quasi": solvers.QuasiDEER()}


def _make_case(size: Size, fast: bool) -> Case:
    torch.manual_seed(0)
    gru, x = nn.GRUCell(size.state, size.state), torch.randn(size)
    sides, goals, numbers = [], [], {}
    of_function = cells.from_function(_Step(gru), state_size=size.state)
    exact = _solve(solvers.Sequential(), cells.from_torch(gru), x).states
    for name, solver in SOLVERS.items():
        for kind, cell in (("nn.GRUCell", cells.from_torch(gru)), ("function", of_function)):
            run = partial(_solve, solver, cell, x)
            solution = run()
            numbers[f"iterations of {name}, {kind}"] = float(solution.iterations.max())
            numbers[f"distance of {name}, {kind}"] = float((solution.states - exact).abs().max())
            sides.append(Side(f"{name}, {kind}", run))
        goals.append(
            Goal(
                f"{name}, nn.GRUCell / function",
                lambda f, name=name: f.cpu(f"{name}, nn.GRUCell") / f.cpu(f"{name}, function"),  # type: ignore[misc]
                at_most=0.4,
            )
        )
    return Case(sides, goals, numbers)


class _Step(nn.Module):
    """The step of a GRU as a function of state and input, of which nothing else is known.

    Args:
        gru: The cell.
    """

    def __init__(self, gru: nn.GRUCell):
        super().__init__()
        self.gru = gru

    def forward(self, state: Tensor, inputs: Tensor) -> Tensor:
        after: Tensor = self.gru(inputs, state)
        return after


@torch.no_grad()
def _solve(solver: solvers.Solver, cell: cells.Cell, x: Tensor) -> solvers.Solution:
    return solver(cell, x)


TORCH_CELLS = Benchmark(
    "DEER and Quasi-DEER of an nn.GRUCell, with closed-form Jacobians, against those of its step as a plain function.",
    (Size(1, 1024, 16),),
    (Size(1, 64, 4),),
    ("linear_scan", "solvers"),
    _make_case,
    threads=(1,),
)
