"""bugkira/pararnn-torch against the solvers of adptnet on one GRU.

    pip install pararnn-torch
    python -m adptnet_lab.benchmarks.peers.pararnn_torch --size 1 1024 16

It requires a range of Triton versions even without a GPU; on a CPU any Triton that can be imported works
(`pip install --no-deps pararnn-torch triton`). It is run with two Jacobians: dense, which is Newton's method, and its
default. Tested with pararnn-torch 0.17.4 and Triton 3.9.0.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from .gru_comparison import GRUProblem, Implementation, compare

try:
    from pararnn import NewtonConfig, NewtonStats, newton_apply
except ImportError as error:
    sys.exit(f"pararnn-torch cannot be imported ({error}). Run: pip install pararnn-torch")


class Cell(nn.Module):
    """The GRU in the form that its solver takes: the state is the first argument.

    Args:
        cell: The cell whose weights are used.
    """

    def __init__(self, cell: nn.GRUCell):
        super().__init__()
        self.cell = cell
        self.hidden_size = self.d_h = cell.hidden_size
        self.input_size = self.d_in = cell.input_size

    def step(self, state: Tensor, x: Tensor) -> Tensor:
        """Return the next state.

        Args:
            state: (..., n).
            x: Input of this step, (..., n).
        """
        gates, inner = x @ self.cell.weight_ih.mT + self.cell.bias_ih, state @ self.cell.weight_hh.mT
        reset, update, new = gates.chunk(3, -1)
        reset_inner, update_inner, new_inner = (inner + self.cell.bias_hh).chunk(3, -1)
        new = torch.tanh(new + torch.sigmoid(reset + reset_inner) * new_inner)
        update = torch.sigmoid(update + update_inner)
        return (1 - update) * new + update * state


def make_implementations(problem: GRUProblem) -> list[Implementation]:
    """Return its solver with both Jacobians.

    Args:
        problem: The GRU and its input.
    """
    found = []
    cell = Cell(problem.cell)
    kinds: list[tuple[str, dict[str, str]]] = [("dense", {"jac_structure": "dense"}), ("its default", {})]
    for name, options in kinds:
        # As many iterations as it takes, to the residual that is required of our solvers.
        config = NewtonConfig(max_iters=problem.x.shape[1], residual_atol=1e-6, residual_fail=None, **options)
        stats = NewtonStats()

        def run(x: Tensor, config: Any = config, stats: Any = stats) -> Tensor:
            states: Tensor = newton_apply(cell, x, config, stats=stats)
            return states

        iterations = lambda stats=stats: stats.iters  # noqa: E731
        found.append(problem.from_torch(f"pararnn-torch, {name} Jacobian", run, iterations))
    return found


if __name__ == "__main__":
    compare(make_implementations, __doc__)
