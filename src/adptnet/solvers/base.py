"""Interface of the solvers: `Solver`, its `Solution`, and the `Result` of each sequence."""

import abc
import dataclasses
import enum
from typing import Any

import torch
from torch import Tensor, nn

from .._validate import mark_finite
from ..cells.base import Cell
from .adjoints import Adjoint
from .fixed_point import History

__all__ = ["Result", "Solution", "Solver"]


class Result(enum.IntEnum):
    """Outcome of a solve for one sequence, from best to worst."""

    CONVERGED = 0  # every step is within tolerance; exact for a sequential solve
    FINISHED = 1  # the steps that did not converge were computed sequentially: exact
    NOT_CONVERGED = 2  # the maximum number of iterations was reached
    DIVERGED = 3  # the residual kept rising, or an iterate overflowed
    NON_FINITE = 4  # NaN or infinity among the states

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Solution:
    """The states of a batch of sequences, and per sequence how the solve went.

    Attributes:
        states: (batch, time, state_size).
        final: (batch, state_size), the state at the true end of each sequence.
        position: (batch,) int64, the position of the next step, counted from the last reset.
        results: (batch,) int64, one `Result` per sequence.
        iterations: (batch,) int64, the number of iterations.
        residual: (batch,), max |f(s_{t-1}) - s_t|.
        converged_steps: (batch,) int64, the number of leading steps that have converged.
        solver: The solver that was used.
        cell: The cell. `solution.cell.unravel(solution.states)` has the structure of the module or function that it
            wraps.
        history: The residuals of each iteration; None for solvers that do not iterate.
    """

    states: Tensor
    final: Tensor
    position: Tensor
    results: Tensor
    iterations: Tensor
    residual: Tensor
    converged_steps: Tensor
    solver: "Solver"
    cell: Cell
    history: History | None = None

    @property
    def result(self) -> Result:
        """Worst result of the batch."""
        return Result(int(self.results.max())) if self.results.numel() else Result.CONVERGED

    @property
    def outputs(self) -> Tensor:
        """The outputs of the cell, (batch, time, output_size); for an `nn.LSTM` h of the last layer at each step."""
        return self.cell.output(self.states)

    def __repr__(self) -> str:
        return (
            f"Solution({self.result.name}, states {tuple(self.states.shape)}, by {self.solver}, "
            f"iterations {_format_range(self.iterations)}, residual {_format_range(self.residual)})"
        )


def _format_range(values: Tensor) -> str:
    """Format the smallest and the largest value."""
    if not values.numel():
        return "-"
    low, high = values.min().item(), values.max().item()
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


class Solver(abc.ABC):
    """Base class of solvers, which compute the states of a cell along its inputs."""

    @abc.abstractmethod
    def __call__(
        self,
        cell: nn.Module,
        inputs: Tensor,
        state: Any = None,
        *,
        guess: Tensor | None = None,
        lengths: Tensor | None = None,
        reset: Tensor | None = None,
        adjoint: Adjoint | None = None,
    ) -> Solution:
        """Solve a batch of sequences.

        Args:
            cell: The cell, which defines one step; or a layer, or an `nn.GRU` or another module of `torch.nn`.
            inputs: (batch, time, features), or (time, features) for one sequence. A layer or module with
                `batch_first=False` takes (time, batch, features); the solution is batch first nevertheless.
            state: The state that enters the first step, (batch, state_size), or in the structure of the module or
                function that the cell wraps; the cell's initial state if not given.
            guess: (batch, time, state_size), the states to start from, for solvers that iterate.
            lengths: (batch,) true lengths of right-padded sequences. States past the end are zero, and `final` is the
                state at the true end.
            reset: (batch, time) bool. Where True, the cell's initial state enters the step.
            adjoint: The method of differentiation; the solver's default if not given.

        Returns:
            The states, and per sequence whether they converged.

        Raises:
            InputError: If an argument has the wrong type, shape, dtype or device.
            IncompatibleError: If the cell lacks a method that the solver needs.
        """


def count_finite_steps(states: Tensor) -> Tensor:
    """Return the number of steps before the first with NaN or infinity, (batch,).

    Args:
        states: (batch, time, n).
    """
    finite = mark_finite(states)
    return finite.long().cumprod(-1).sum(-1) if finite.shape[-1] else torch.zeros_like(finite.sum(-1))
