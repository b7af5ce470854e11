"""Solve and train a recurrence of your own in parallel over time: a leaky tanh network.

A function of state and input suffices for most solvers; one more method lets ConvDEER run it. States and gradients are
compared with the sequential loop and backpropagation through time. About ten seconds on one core:

    python examples/own_cell.py
"""

import torch
from torch import Tensor, nn

from adptnet import adjoints, cells, solvers
from adptnet.recurrence.spectra import BlockDiagonal

SIZE, FEATURES = 16, 3


class Leaky(nn.Module):
    """Leaky tanh network: state ← keep ⊙ state + (1 - keep) ⊙ tanh(W state + U input).

    It is called with (rows, state_size) and (rows, features), where rows are sequences, steps or both, and must treat
    each row independently. Its parameters become those of the cell.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.Linear(SIZE, SIZE)
        self.input = nn.Linear(FEATURES, SIZE)
        self.logit = nn.Parameter(torch.linspace(0.0, 4.0, SIZE))  # keeps 50 % to 98 % per step

    def keep(self) -> Tensor:
        return torch.sigmoid(self.logit)

    def forward(self, state: Tensor, inputs: Tensor) -> Tensor:
        return torch.lerp(torch.tanh(self.recurrent(state) + self.input(inputs)), state, self.keep())


class LeakyCell(cells.Cell):
    """The same network as a cell. Only `step` is required; the linear part is for ConvDEER."""

    def __init__(self, network: Leaky) -> None:
        super().__init__()
        self.network = network
        self.state_size = SIZE
        self.input_size = FEATURES

    def step(self, state: Tensor, drive: Tensor) -> Tensor:
        return self.network(state, drive)

    def structure(self) -> cells.Structure:
        """Return the Jacobian of a step without its tanh as the linear part: diagonal, and constant over time."""
        return cells.Structure(eigenvalues=lambda: BlockDiagonal(self.network.keep()))


def main(length: int = 200, steps: int = 40) -> tuple[float, list[float]]:
    """Return the largest relative error of a gradient, and the training losses."""
    torch.manual_seed(0)
    network = Leaky().double()
    x = torch.randn(8, length, FEATURES, dtype=torch.float64)
    function = cells.from_function(network, state_size=SIZE, input_size=FEATURES)
    print(f"Leaky tanh network, state dimension {SIZE}, 8 sequences of {length} steps:")
    worst = max(
        compare(function, solvers.QuasiDEER(), x),
        compare(function, solvers.KoopmanDEER(), x),
        compare(LeakyCell(network), solvers.ConvDEER(), x),
    )
    return worst, train(function.float(), nn.Linear(SIZE, 1).float(), x.float(), steps)


def compare(cell: cells.Cell, solver: solvers.Solver, x: Tensor) -> float:
    """Compare states and gradients with the sequential loop; return the largest relative error of a gradient."""
    solution = solver(cell, x)  # gradients by adjoints.Implicit(), the default
    exact = solvers.Sequential()(cell, x, adjoint=adjoints.Unrolled())  # backpropagation through time
    gradients, expected = (torch.autograd.grad(s.states.square().mean(), cell.parameters()) for s in (solution, exact))
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(gradients, expected, strict=True)]
    print(
        f"  {solver}: {solution.result.name} after {int(solution.iterations.max())} iterations, error of the states "
        f"{(solution.states - exact.states).abs().max():.0e}, of the gradients {max(errors):.0e}"
    )
    return max(errors)


def train(cell: cells.Cell, readout: nn.Linear, x: Tensor, steps: int) -> list[float]:
    """Fit a running average of the first input in float32; a solve that fails raises an error."""
    targets = average(x[..., 0])
    optimizer = torch.optim.Adam([*cell.parameters(), *readout.parameters()], lr=1e-2)
    solver, guess, losses = solvers.KoopmanDEER(on_failure=solvers.Raise()), None, []
    for step in range(1, steps + 1):
        solution = solver(cell, x, guess=guess)
        loss = (readout(solution.states).squeeze(-1) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        guess = solution.states  # warm start: the next step solves the same sequences
        if step == 1 or step % max(1, steps // 4) == 0:
            iterations = int(solution.iterations.max())
            print(f"training step {step:3d}: mean squared error {losses[-1]:.4f}, {iterations} iterations")
    return losses


def average(inputs: Tensor, keep: float = 0.9) -> Tensor:
    """Return the exponential moving average of (batch, time) inputs."""
    mean, means = torch.zeros_like(inputs[:, 0]), []
    for value in inputs.unbind(1):
        mean = keep * mean + (1 - keep) * value
        means.append(mean)
    return torch.stack(means, 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
