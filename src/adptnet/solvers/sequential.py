"""One step after another: exact by construction, and what every other solver is compared with."""

import torch
from torch import Tensor

from ..cells.base import ADPTState, Cell
from ..errors import InputError
from ..ops._torch_state import without_autocast
from .adjoints import Adjoint, Checkpointed, Implicit, LoopAdjoint, Unrolled
from .base import Result, Solution, Solver, finite_steps
from .problem import Problem, pose

__all__ = ["Sequential"]


class Sequential(Solver):
    """Runs the cell step by step."""

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
        if guess is not None:
            raise InputError("Sequential computes every step once and takes no guess. Drop guess=.")
        with without_autocast(inputs.device):
            problem = pose(cell, inputs, state, lengths, reset, adjoint)
            states = self._states(cell, problem, adjoint or Unrolled())
        finite = finite_steps(problem.masked(states.detach()))
        broken = finite < problem.steps
        return problem.solution(
            self,
            states,
            results=torch.where(broken, int(Result.NON_FINITE), int(Result.CONVERGED)),
            iterations=torch.ones_like(finite),
            residual=torch.where(broken, torch.nan, 0.0),
            converged_steps=finite if problem.lengths is None else torch.minimum(finite, problem.lengths),
        )

    def _states(self, cell: Cell, problem: Problem, adjoint: Adjoint) -> Tensor:
        fused = _fused(cell, problem, adjoint)
        if fused is not None:
            return fused
        system = problem.system(cell)
        if isinstance(adjoint, LoopAdjoint):
            return adjoint.run(system.loop(), problem.state, problem.steps)
        assert isinstance(adjoint, Implicit)
        with torch.no_grad():
            states = system.run()
        return adjoint.attach(cell, system, states, None)

    def __repr__(self) -> str:
        return "Sequential()"


def _fused(cell: Cell, problem: Problem, adjoint: Adjoint) -> Tensor | None:
    """All states in one operation, if the cell has one."""
    if not isinstance(adjoint, (Unrolled, Checkpointed)):
        return None
    lean = isinstance(adjoint, Checkpointed)
    return cell.scan(problem.drive, problem.state, reset=problem.reset, lengths=problem.lengths, lean=lean)
