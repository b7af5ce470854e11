"""bugkira/pararnn-torch beside our solvers on one GRU.

    pip install pararnn-torch
    python -m adptnet_lab.benchmarks.peers.pararnn_torch --size 1 1024 16

It asks for a range of Triton versions even where no GPU is; on a CPU any Triton that can be imported will do
(`pip install --no-deps pararnn-torch triton`). Two Jacobians are run: dense, which is Newton's method, and its default.
Run here with pararnn-torch 0.17.4 and Triton 3.9.0.
"""

import sys

import torch
from torch import Tensor, nn

from .side_by_side import Peer, Problem, compare

try:
    from pararnn import NewtonConfig, NewtonStats, newton_apply
except ImportError as error:
    sys.exit(f"pararnn-torch cannot be imported ({error}). Run: pip install pararnn-torch")


class Cell(nn.Module):
    """The GRU as its solver wants it: the state first."""

    def __init__(self, cell: nn.GRUCell):
        super().__init__()
        self.cell = cell
        self.hidden_size = self.d_h = cell.hidden_size
        self.input_size = self.d_in = cell.input_size

    def step(self, state: Tensor, x: Tensor) -> Tensor:
        gates, inner = x @ self.cell.weight_ih.mT + self.cell.bias_ih, state @ self.cell.weight_hh.mT
        reset, update, new = gates.chunk(3, -1)
        reset_inner, update_inner, new_inner = (inner + self.cell.bias_hh).chunk(3, -1)
        new = torch.tanh(new + torch.sigmoid(reset + reset_inner) * new_inner)
        update = torch.sigmoid(update + update_inner)
        return (1 - update) * new + update * state


def peers(problem: Problem) -> list[Peer]:
    found = []
    cell = Cell(problem.cell)
    for name, options in (("dense", {"jac_structure": "dense"}), ("its default", {})):
        # As many iterations as it takes, to the residual that our solvers are asked for.
        config = NewtonConfig(max_iters=problem.x.shape[1], residual_atol=1e-6, residual_fail=None, **options)
        stats = NewtonStats()

        def run(x: Tensor, config=config, stats=stats) -> Tensor:
            return newton_apply(cell, x, config, stats=stats)

        peer = problem.of_torch(f"pararnn-torch, {name} Jacobian", run)
        peer.iterations = lambda stats=stats: stats.iters
        found.append(peer)
    return found


if __name__ == "__main__":
    compare(peers, __doc__)
