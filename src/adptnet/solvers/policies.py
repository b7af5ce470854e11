"""Failure policies: how a solver handles sequences that did not converge."""

import abc
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import NonFiniteError, NotConverged
from .base import Result, Solver
from .fixed_point import IterationResult
from .system import System

__all__ = ["Finish", "Policy", "Raise", "Return", "SystemSolution"]


class SystemSolution(NamedTuple):
    """States of a system after the failure policy was applied."""

    states: Tensor  # (batch, time, n)
    results: Tensor  # (batch,), one `Result` per sequence
    outcome: IterationResult  # where the iteration ended


class Policy(abc.ABC):
    """Base class of failure policies."""

    returns_iterate: ClassVar[bool] = False  # whether failures are returned as they are, without reading any value

    def apply(self, system: System, outcome: IterationResult, solver: Solver) -> SystemSolution:
        """Return the solution, with the sequences that did not converge handled by `handle`.

        Args:
            system: The equations.
            outcome: Where the iteration ended.
            solver: The solver, for messages.

        Raises:
            NotConverged: A sequence did not converge and the policy is `Raise`.
            NonFiniteError: The same, if the drive of a sequence is not finite.
        """
        failed = ~outcome.converged
        results = torch.where(outcome.converged, int(Result.CONVERGED), int(Result.NOT_CONVERGED))
        results = torch.where(failed & (outcome.rising | ~outcome.finite), int(Result.DIVERGED), results)
        if outcome.all_converged or (outcome.all_converged is None and not bool(failed.any())):
            return SystemSolution(outcome.states, results, outcome)
        return self.handle(system, outcome, results, solver)

    @abc.abstractmethod
    def handle(self, system: System, outcome: IterationResult, results: Tensor, solver: Solver) -> SystemSolution:
        """Handle the sequences that did not converge, of which there is at least one.

        Args:
            system: The equations.
            outcome: Where the iteration ended.
            results: (batch,), one `Result` per sequence.
            solver: The solver, for messages.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Finish(Policy):
    """Compute the steps that did not converge sequentially: always exact. The result is `FINISHED`."""

    def handle(self, system: System, outcome: IterationResult, results: Tensor, solver: Solver) -> SystemSolution:
        """Compute failed sequences sequentially, from the first step that is unconverged in any of them."""
        failed, states, total = ~outcome.converged, outcome.states, system.axis.total(system.steps)
        rows = failed.nonzero().squeeze(-1)
        _run_sequentially(system, states, rows, int(outcome.converged_steps[rows].min()))
        finite = _count_finite_steps(system, states)
        is_finite = finite == total
        lengths = torch.full_like(finite, total) if system.lengths is None else system.lengths
        results = torch.where(failed, torch.where(is_finite, int(Result.FINISHED), int(Result.NON_FINITE)), results)
        finished = torch.where(failed, torch.minimum(finite, lengths), outcome.converged_steps)
        residual = outcome.residual.clone()
        residual[rows] = torch.where(is_finite[rows], _compute_residual(system, rows, states), torch.nan)
        return SystemSolution(states, results, outcome._replace(residual=residual, converged_steps=finished))


class Raise(Policy):
    """Raise `errors.NotConverged`."""

    def handle(self, system: System, outcome: IterationResult, results: Tensor, solver: Solver) -> SystemSolution:
        _check_finite_drive(system)
        raise NotConverged(_describe_failure(solver, outcome, results, system.axis.total(system.steps)))


class Return(Policy):
    """Return the last iterate as it is. Check `Solution.results`."""

    returns_iterate = True

    def handle(self, system: System, outcome: IterationResult, results: Tensor, solver: Solver) -> SystemSolution:
        steps = _count_finite_steps(system, outcome.states)
        non_finite = ~outcome.converged & (steps < system.axis.total(system.steps))
        return SystemSolution(outcome.states, torch.where(non_finite, int(Result.NON_FINITE), results), outcome)


def _count_finite_steps(system: System, states: Tensor) -> Tensor:
    """Return the number of steps before the first with NaN or infinity, (batch,). Padding counts as finite."""
    finite, valid = states.isfinite().all(-1), system.valid
    return system.axis.count_leading(finite if valid is None else finite | ~valid)


def _run_sequentially(system: System, states: Tensor, rows: Tensor, begin: int) -> None:
    """Fill the states of `rows` from step `begin` of all steps, one process after another, in place."""
    axis, stop = system.axis, 0
    last = system.initial.index_select(0, rows)
    for rank, length in enumerate(axis.lengths(system.steps)):
        stop += length
        if rank == axis.rank and stop > begin:
            start = max(0, begin - (stop - length))
            before = states[rows, start - 1] if start else last
            states[rows, start:] = system.part(rows, start, before).run()
        last = axis.broadcast(states[rows, -1], rank) if length else last


def _compute_residual(system: System, rows: Tensor, states: Tensor) -> Tensor:
    """Return max |f(s_{t-1}) - s_t| of each sequence in `rows`."""
    part = system.part(rows, 0, system.initial.index_select(0, rows))
    chosen = states.index_select(0, rows)
    part = system.axis.with_previous(part, chosen)
    distance = (part.evaluate(part.entering_states(chosen)) - chosen).abs().amax(-1)
    valid = part.valid
    return system.axis.maximum((distance if valid is None else torch.where(valid, distance, 0.0)).amax(-1))


def _check_finite_drive(system: System) -> None:
    """Raise `NonFiniteError` if the drive is not finite, which no solver can solve."""
    non_finite = ~system.step_inputs[0].isfinite().all(-1)
    valid = system.valid
    non_finite = non_finite if valid is None else non_finite & valid
    if bool(non_finite.any()):
        sequence, step = non_finite.nonzero()[0].tolist()
        raise NonFiniteError(
            f"the drive of sequence {sequence} is not finite at step {step}: the inputs hold NaN or infinity, or are "
            "so large that they overflow. Fix or drop them; adptnet never replaces them."
        )


def _describe_failure(solver: Solver, outcome: IterationResult, results: Tensor, steps: int) -> str:
    """Return the message of `NotConverged`: how far the solver came, and what to try."""
    failed = (~outcome.converged).nonzero().squeeze(-1).tolist()
    shown = ", ".join(map(str, failed[:8])) + (", …" if len(failed) > 8 else "")
    kinds = sorted({Result(int(results[i])).name for i in failed})
    return (
        f"{solver} stopped after {int(outcome.iterations.max())} iterations ({', '.join(kinds)}): residual "
        f"{float(outcome.residual[failed].max()):.1e} in {len(failed)} of {len(outcome.converged)} sequences ({shown});"
        f" steps before {int(outcome.converged_steps[failed].min())} of {steps} have converged. Wrap it in "
        "solvers.BlockWise(..., num_blocks=8), damp it with solvers.Adaptive(), raise max_iterations (or patience, if "
        "the residual kept rising), or pass on_failure=solvers.Finish()."
    )
