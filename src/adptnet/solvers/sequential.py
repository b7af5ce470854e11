"""The sequential solver: exact by construction, and the reference for all other solvers."""

from typing import Any

import torch
from torch import Tensor, nn

from ..cells.base import ADPTState, Cell
from ..cells.structure import choose_scan
from ..errors import InputError
from ..ops._backends import REFERENCE, Backend, note_run
from ..ops._torch_state import without_autocast
from .adjoints import Adjoint, Implicit, LoopAdjoint, Unrolled
from .base import Result, Solution, Solver, count_finite_steps
from .problem import Problem, Trajectory, make_problem, resolve_system

__all__ = ["Sequential"]


class Sequential(Solver):
    """Run the cell sequentially over time, in one fused operation if the cell has one."""

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
        cell, inputs, state, reset = resolve_system(cell, inputs, state, reset)
        if guess is not None:
            raise InputError("Sequential computes every step once and takes no guess. Drop guess=.")
        problem, states = self._solve(cell, inputs, state, lengths, reset, adjoint)
        finite = count_finite_steps(problem.zero_padding(states.detach()))
        non_finite = finite < problem.steps
        return problem.make_solution(
            self,
            cell,
            states,
            results=torch.where(non_finite, int(Result.NON_FINITE), int(Result.CONVERGED)),
            iterations=torch.ones_like(finite),
            residual=torch.where(non_finite, torch.nan, 0.0),
            converged_steps=finite if problem.lengths is None else torch.minimum(finite, problem.lengths),
        )

    def run(
        self,
        cell: Cell,
        inputs: Tensor,
        state: Tensor | ADPTState | None = None,
        *,
        lengths: Tensor | None = None,
        reset: Tensor | None = None,
        adjoint: Adjoint | None = None,
    ) -> Trajectory:
        """Return the states alone. A `Solution` also counts the finite steps, which reads all states twice.

        Args:
            cell, inputs, state, lengths, reset, adjoint: As in a call.
        """
        problem, states = self._solve(cell, inputs, state, lengths, reset, adjoint)
        return problem.make_trajectory(states)

    def _solve(
        self,
        cell: Cell,
        inputs: Tensor,
        state: Tensor | ADPTState | None,
        lengths: Tensor | None,
        reset: Tensor | None,
        adjoint: Adjoint | None,
    ) -> tuple[Problem, Tensor]:
        with without_autocast(inputs.device):
            problem = make_problem(cell, inputs, state, lengths, reset, adjoint)
            return problem, self._run(cell, problem, adjoint or Unrolled())

    def _run(self, cell: Cell, problem: Problem, adjoint: Adjoint) -> Tensor:
        """Return the states, with the gradient that `adjoint` defines."""
        fused = _run_fused(cell, problem, adjoint)
        if fused is not None:
            return fused
        system = problem.make_system(cell)
        if isinstance(adjoint, LoopAdjoint):
            return adjoint.run(system.make_loop(), problem.state, problem.steps)
        assert isinstance(adjoint, Implicit)
        note_run("backward", adjoint.backend)
        with torch.no_grad():
            states = system.run()
        return adjoint.attach(cell, system, states, None)

    def __repr__(self) -> str:
        return "Sequential()"


def _run_fused(cell: Cell, problem: Problem, adjoint: Adjoint) -> Tensor | None:
    """Return all states, computed in one fused operation; None if the cell or the adjoint has none."""
    if not isinstance(adjoint, LoopAdjoint):
        return None
    if not adjoint.allows_fused_scan:
        note_run("forward", Backend(REFERENCE, f"{adjoint} differentiates a loop over time."), log=False)
        return None
    scan = cell.structure().scan
    if scan is None:
        note_run("forward", choose_scan(cell, problem.drive.device), log=False)
        return None
    return scan(problem.drive, problem.state, reset=problem.reset, lengths=problem.lengths, lean=adjoint.recomputes)
