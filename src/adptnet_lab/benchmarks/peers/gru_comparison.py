"""The comparison that the scripts in this folder share: one GRU with the same weights in every implementation.

States and gradients are compared with `torch.nn.GRU` in float64 before anything is timed.
"""

import argparse
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from adptnet import cells, solvers
from adptnet_lab.benchmarks import Side, machine, time_interleaved

__all__ = ["GRUProblem", "Implementation", "compare"]


@dataclasses.dataclass
class Implementation:
    """One of the implementations that are compared.

    Attributes:
        name: Its name in the table.
        states: Returns all hidden states, (batch, time, n).
        gradient: Returns the gradient of the sum of the states with respect to the input; None if it has none.
        iterations: Returns the number of iterations of the last call; None if it is not known.
    """

    name: str
    states: Callable[[], Tensor]
    gradient: Callable[[], Tensor] | None = None
    iterations: Callable[[], int | None] = lambda: None


class GRUProblem:
    """A GRU, its input, and its states and gradient in float64.

    Args:
        batch: The number of sequences.
        steps: The number of steps.
        size: The hidden size, and the size of the input.
    """

    def __init__(self, batch: int, steps: int, size: int):
        torch.manual_seed(0)
        self.cell = nn.GRUCell(size, size)
        self.x = torch.randn(batch, steps, size)
        self.rnn = self._make_rnn(torch.float32)
        x = self.x.double().requires_grad_()
        self.exact_states: Tensor = self._make_rnn(torch.float64)(x)[0]
        (self.exact_gradient,) = torch.autograd.grad(self.exact_states.sum(), x)

    def _make_rnn(self, dtype: torch.dtype) -> nn.GRU:
        size = self.x.shape[-1]
        rnn = nn.GRU(size, size, batch_first=True)
        rnn.load_state_dict({f"{name}_l0": value for name, value in self.cell.state_dict().items()})
        return rnn.to(dtype)

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W, U and both biases, for three gates in torch's order: reset, update, new."""
        cell = self.cell
        return cell.weight_ih.detach(), cell.weight_hh.detach(), cell.bias_ih.detach(), cell.bias_hh.detach()

    def from_torch(
        self, name: str, run: Callable[[Tensor], Tensor], iterations: Callable[[], int | None] = lambda: None
    ) -> Implementation:
        """Return an implementation that torch differentiates.

        Args:
            name: Its name in the table.
            run: Computes the states from the input.
            iterations: Returns the number of iterations of the last call.
        """

        def states() -> Tensor:
            with torch.no_grad():
                return run(self.x)

        def gradient() -> Tensor:
            x = self.x.clone().requires_grad_()
            return torch.autograd.grad(run(x).sum(), x)[0]

        return Implementation(name, states, gradient, iterations)

    def make_own(self) -> list[Implementation]:
        """Return `nn.GRU`, and the solvers of adptnet on the same cell."""
        cell = cells.from_torch(self.cell)
        own = [self.from_torch("nn.GRU", lambda x: self.rnn(x)[0])]
        for solver in (solvers.DEER(), solvers.QuasiDEER()):
            counts: list[int] = []

            def run(x: Tensor, solver: solvers.Solver = solver, counts: list[int] = counts) -> Tensor:
                solution = solver(cell, x)
                counts.append(int(solution.iterations.max()))
                return solution.states

            own.append(self.from_torch(f"adptnet {solver}", run, lambda counts=counts: counts[-1]))  # type: ignore[misc]
        return own


def compare(make_others: Callable[[GRUProblem], list[Implementation]], description: str | None) -> None:
    """Read the size from the command line, run all implementations, and print a line for each.

    Args:
        make_others: Returns the implementations of the other library.
        description: The text of the help.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs=3, default=(1, 1024, 16), metavar=("BATCH", "STEPS", "STATE"))
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    problem = GRUProblem(*options.size)
    every = [*problem.make_own(), *make_others(problem)]
    with machine.watch_load() as load:
        sides = [Side(f"{each.name}, states", each.states) for each in every]
        sides += [Side(f"{each.name}, gradient", each.gradient) for each in every if each.gradient]
        errors = {f"{each.name}, states": _relative_error(each.states(), problem.exact_states) for each in every}
        counts = {f"{each.name}, states": each.iterations() for each in every}
        errors |= {
            f"{each.name}, gradient": _relative_error(each.gradient(), problem.exact_gradient)
            for each in every
            if each.gradient
        }
        times = time_interleaved(sides, repeats=options.repeats)
    about = machine.describe_machine()
    print(f"{about['processor']}, {about['cores']} cores; torch {about['torch']}, adptnet {about['adptnet']}")
    print(f"load {load.load_before} before, {load.load_after} after, others {load.others} cores")
    print(f"batch {options.size[0]}, steps {options.size[1]}, state {options.size[2]}, one thread, float32")
    print(f"{'':49s} CPU least   median  wall least   median (ms)  iterations  relative error")
    for (name, _), timing in times.items():
        clocks = (timing.cpu.least, timing.cpu.median, timing.wall.least, timing.wall.median)
        shown = " ".join(f"{1e3 * seconds:10.2f}" for seconds in clocks)
        print(f"{name:47s} {shown} {counts.get(name) or '':>16} {errors[name]:15.1e}")


def _relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())
