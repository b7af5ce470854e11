"""What the scripts beside this one share: one GRU with the same weights on every side, and a table of what was found.

A side is a function of x, (batch, time, n), that returns all states; a peer that differentiates may also return the
gradient of their sum. States and gradients are compared with `torch.nn.GRU` in float64 before anything is timed.
"""

import argparse
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from adptnet import cells, solvers
from adptnet_lab.benchmarks import Side, interleaved, machine


@dataclasses.dataclass
class Peer:
    """One of the programs that are compared."""

    name: str
    states: Callable[[], Tensor]
    gradient: Callable[[], Tensor] | None = None  # of the sum of the states, with respect to x
    iterations: Callable[[], int | None] = lambda: None  # of the last call


class Problem:
    """A GRU, its input, and what is right."""

    def __init__(self, batch: int, steps: int, size: int):
        torch.manual_seed(0)
        self.cell = nn.GRUCell(size, size)
        self.x = torch.randn(batch, steps, size)
        self.rnn = self._rnn(torch.float32)
        x = self.x.double().requires_grad_()
        self.right = self._rnn(torch.float64)(x)[0]
        (self.right_gradient,) = torch.autograd.grad(self.right.sum(), x)

    def _rnn(self, dtype: torch.dtype) -> nn.GRU:
        size = self.x.shape[-1]
        rnn = nn.GRU(size, size, batch_first=True)
        rnn.load_state_dict({f"{name}_l0": value for name, value in self.cell.state_dict().items()})
        return rnn.to(dtype)

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W, U and both biases, for three gates in torch's order: reset, update, new."""
        cell = self.cell
        return tuple(w.detach() for w in (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh))

    def of_torch(self, name: str, run: Callable[[Tensor], Tensor]) -> Peer:
        """A program that torch differentiates."""

        def states() -> Tensor:
            with torch.no_grad():
                return run(self.x)

        def gradient() -> Tensor:
            x = self.x.clone().requires_grad_()
            return torch.autograd.grad(run(x).sum(), x)[0]

        return Peer(name, states, gradient)

    def ours(self) -> list[Peer]:
        """nn.GRU, and our solvers on the same cell."""
        wrapped = cells.from_torch(self.cell)
        peers = [self.of_torch("nn.GRU", lambda x: self.rnn(x)[0])]
        for solver in (solvers.DEER(), solvers.QuasiDEER()):
            found = {}

            def run(x: Tensor, solver=solver, found=found) -> Tensor:
                solution = solver(wrapped, x)
                found["iterations"] = int(solution.iterations.max())
                return solution.states

            peer = self.of_torch(f"adptnet {solver}", run)
            peer.iterations = lambda found=found: found.get("iterations")
            peers.append(peer)
        return peers


def compare(peers: Callable[[Problem], list[Peer]], about: str) -> None:
    """Reads the size from the command line, and prints a line for each side."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs=3, default=(1, 1024, 16), metavar=("BATCH", "STEPS", "STATE"))
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    problem = Problem(*options.size)
    every = [*problem.ours(), *peers(problem)]
    with machine.watched() as neighbours:
        sides = [Side(f"{peer.name}, states", peer.states) for peer in every]
        sides += [Side(f"{peer.name}, gradient", peer.gradient) for peer in every if peer.gradient]
        wrong = {f"{peer.name}, states": _distance(peer.states(), problem.right) for peer in every}
        counts = {f"{peer.name}, states": peer.iterations() for peer in every}
        wrong |= {
            f"{peer.name}, gradient": _distance(peer.gradient(), problem.right_gradient)
            for peer in every
            if peer.gradient
        }
        times = interleaved(sides, repeats=options.repeats)
    facts = machine.facts()
    print(f"{facts['processor']}, {facts['cores']} cores; torch {facts['torch']}, adptnet {facts['adptnet']}")
    print(f"load {neighbours.load_before} before, {neighbours.load_after} after, others {neighbours.others} cores")
    print(f"batch {options.size[0]}, steps {options.size[1]}, state {options.size[2]}, one thread, float32")
    print(f"{'':49s} CPU least   median  wall least   median (ms)  iterations  relative error")
    for (name, _), spent in times.items():
        clocks = (spent.cpu.least, spent.cpu.median, spent.wall.least, spent.wall.median)
        shown = " ".join(f"{1e3 * seconds:10.2f}" for seconds in clocks)
        print(f"{name:47s} {shown} {counts.get(name) or '':>16} {wrong[name]:15.1e}")


def _distance(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).abs().max() / right.abs().max())
