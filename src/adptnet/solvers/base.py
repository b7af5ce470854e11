"""What every solver takes and returns."""

import abc
import dataclasses
import enum

import torch
from torch import Tensor

from ..cells.base import ADPTState, Cell
from .adjoints import Adjoint
from .fixed_point import History

__all__ = ["Result", "Solution", "Solver"]


class Result(enum.IntEnum):
    """How a solve ended, from best to worst."""

    CONVERGED = 0  # every step is within tolerance; of a sequential solve, exact
    FINISHED = 1  # the part that did not converge was completed step by step: exact
    NOT_CONVERGED = 2
    DIVERGED = 3
    NON_FINITE = 4  # NaN or infinity among the states


@dataclasses.dataclass(frozen=True)
class Solution:
    """The states of a sequence and how they were found. Numbers are per sequence, (batch,)."""

    states: Tensor  # (batch, time, state_size)
    final: Tensor  # (batch, state_size): the state at the true end of each sequence
    position: Tensor  # (batch,) int64: where the step after it would be, counted from the last reset
    results: Tensor  # (batch,) int64: a `Result` each
    iterations: Tensor
    residual: Tensor  # max |f(s_{t-1}) - s_t|
    converged_steps: Tensor
    solver: "Solver"
    history: History | None = None  # of each iteration; None for solvers that do not iterate

    @property
    def result(self) -> Result:
        """The worst result of the batch."""
        return Result(int(self.results.max())) if self.results.numel() else Result.CONVERGED

    def __repr__(self) -> str:
        return (
            f"Solution({self.result.name}, states {tuple(self.states.shape)}, by {self.solver}, "
            f"iterations {_span(self.iterations)}, residual {_span(self.residual)})"
        )


def _span(values: Tensor) -> str:
    if not values.numel():
        return "-"
    low, high = values.min().item(), values.max().item()
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


class Solver(abc.ABC):
    """Finds the states of a cell along its inputs."""

    @abc.abstractmethod
    def __call__(
        self,
        cell: Cell,
        inputs: Tensor,
        state: Tensor | ADPTState | None = None,
        *,
        guess: Tensor | None = None,
        lengths: Tensor | None = None,
        reset: Tensor | None = None,
        adjoint: Adjoint | None = None,
    ) -> Solution:
        """Solves the sequence.

        Args:
            cell: What one step is.
            inputs: (batch, time, features), or (time, features) for one sequence.
            state: The state entering the first step, (batch, state_size); the cell's initial state if not given.
            guess: States to start from, for solvers that iterate.
            lengths: (batch,) true lengths of right-padded sequences. States past the end are zero, and `final` is the
                state at the true end.
            reset: (batch, time) bool. True at t: the state entering step t is the cell's initial state.
            adjoint: How to differentiate; the solver's own choice if not given.
        """


def finite_steps(states: Tensor) -> Tensor:
    """Steps before the first that is not finite, (batch,)."""
    finite = states.amax(-1).isfinite() & states.amin(-1).isfinite()  # a tenth of the time of every number's isfinite
    return finite.long().cumprod(-1).sum(-1) if finite.shape[-1] else torch.zeros_like(finite.sum(-1))
