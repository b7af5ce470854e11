"""Your own recurrence, parallel in time: a leaky tanh network, as a function and then as a cell with a linear part.

Solves it by QuasiDEER and KoopmanDEER, compares gradients with back-propagation through time, adds the one method that
ConvDEER needs, and trains the network. About ten seconds on one core:

    python examples/own_cell.py
"""

import torch
from torch import Tensor, nn

from adptnet import adjoints, cells, solvers
from adptnet.recurrence.spectra import BlockDiagonal
from adptnet.solvers.transitions import Diagonal

SIZE, FEATURES = 16, 3


class Leaky(nn.Module):
    """state ← keep ⊙ state + (1 - keep) ⊙ tanh(W state + U input): any function of state and input will do.

    It is called with (rows, state_size) and (rows, features), the rows being sequences, steps or both, and must treat
    each row by itself. As it is a module, its parameters are those of the cell.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.Linear(SIZE, SIZE)
        self.input = nn.Linear(FEATURES, SIZE)
        self.logit = nn.Parameter(torch.linspace(0.0, 4.0, SIZE))  # keeps 50 % to 98 % a step

    def keep(self) -> Tensor:
        return torch.sigmoid(self.logit)

    def forward(self, state: Tensor, inputs: Tensor) -> Tensor:
        return torch.lerp(torch.tanh(self.recurrent(state) + self.input(inputs)), state, self.keep())


class LeakyCell(cells.Cell):
    """The same network as a cell. `step` is the only method it needs; the other one is for ConvDEER.

    The `step` of a cell takes leading dimensions as they come, (batch, state) or (batch, time, state).
    """

    def __init__(self, network: Leaky) -> None:
        super().__init__()
        self.network = network
        self.state_size = SIZE
        self.input_size = FEATURES

    def step(self, state: Tensor, drive: Tensor) -> Tensor:
        return self.network(state, drive)

    def linear_transition(self, drive: Tensor) -> Diagonal:
        """The derivative of a step with the tanh left out: one number for each of the state, the same at all times."""
        return Diagonal(BlockDiagonal(self.network.keep()))


def main(length: int = 200, steps: int = 40) -> tuple[float, list[float]]:
    """Runs all of it. Returns the largest relative error of a gradient, and the loss at every training step."""
    torch.manual_seed(0)
    network = Leaky().double()
    x = torch.randn(8, length, FEATURES, dtype=torch.float64)

    function = cells.from_function(network, state_size=SIZE, input_size=FEATURES)
    print(f"A leaky tanh network of {SIZE} numbers, 8 sequences of {length} steps.")
    worst = max(check(function, solver, x) for solver in (solvers.QuasiDEER(), solvers.KoopmanDEER()))

    print("The same with a linear_transition:")
    worst = max(worst, check(LeakyCell(network), solvers.ConvDEER(), x))

    return worst, train(function.float(), nn.Linear(SIZE, 1).float(), x.float(), steps)


def check(cell: cells.Cell, solver: solvers.Solver, x: Tensor) -> float:
    """Compares states and gradients with the plain loop, and returns the largest relative error of a gradient."""
    found = solver(cell, x)  # its gradients are by adjoints.Implicit(), the default
    exact = solvers.Sequential()(cell, x, adjoint=adjoints.Unrolled())  # back-propagation through time
    parameters = dict(cell.named_parameters())
    gradients, expected = (
        torch.autograd.grad(solution.states.square().mean(), list(parameters.values())) for solution in (found, exact)
    )
    errors = [
        ((ours - theirs).abs().max() / theirs.abs().max()).item()
        for ours, theirs in zip(gradients, expected, strict=True)
    ]
    states = (found.states - exact.states).abs().max().item()
    print(
        f"  {solver}: {found.result.name} after {int(found.iterations.max())} iterations, states to {states:.0e}, "
        f"gradients of {len(parameters)} parameters to {max(errors):.0e}."
    )
    return max(errors)


def train(cell: cells.Cell, readout: nn.Linear, x: Tensor, steps: int) -> list[float]:
    """Fits a running average of the first input, in single precision. A solve that fails raises, and ends the run."""
    targets = running_average(x[..., 0])
    optimiser = torch.optim.Adam([*cell.parameters(), *readout.parameters()], lr=1e-2)
    solver, guess, losses = solvers.KoopmanDEER(on_failure=solvers.Raise()), None, []
    for step in range(1, steps + 1):
        solution = solver(cell, x, guess=guess)
        loss = (readout(solution.states).squeeze(-1) - targets).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        guess = solution.states  # the same sequences come again: start where they were
        if step == 1 or step % max(1, steps // 4) == 0:
            taken = int(solution.iterations.max())
            print(f"training step {step:3d}: mean squared error {losses[-1]:.4f}, {taken} iterations")
    return losses


def running_average(inputs: Tensor, keep: float = 0.9) -> Tensor:
    average, averages = torch.zeros_like(inputs[:, 0]), []
    for value in inputs.unbind(1):
        average = keep * average + (1 - keep) * value
        averages.append(average)
    return torch.stack(averages, 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
