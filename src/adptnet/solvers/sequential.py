"""One step after another: exact by construction, and what every other solver is compared with."""

import torch
from torch import Tensor

from ..adjoints import Adjoint, Loop, Unrolled
from ..cells.base import ADPTState, Cell
from ..errors import InputError
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
        with torch.autocast(inputs.device.type, enabled=False):
            problem = pose(cell, inputs, state, lengths, reset)
            states = (adjoint or Unrolled()).run(_loop(cell, problem), problem.state, problem.steps)
        final = problem.final(states)
        states = problem.masked(states)
        finite = finite_steps(states.detach())
        broken = finite < problem.steps
        return Solution(
            states=states if problem.batched else states.squeeze(0),
            final=final if problem.batched else final.squeeze(0),
            results=torch.where(broken, int(Result.NON_FINITE), int(Result.CONVERGED)),
            iterations=torch.ones_like(finite),
            residual=torch.where(broken, torch.nan, 0.0),
            converged_steps=finite if problem.lengths is None else torch.minimum(finite, problem.lengths),
            solver=self,
        )

    def __repr__(self) -> str:
        return "Sequential()"


def _loop(cell: Cell, problem: Problem) -> Loop:
    step = cell.stepper()
    drives = problem.drive.unbind(-2)
    resets = None if problem.reset is None else problem.reset.unsqueeze(-1).unbind(-2)

    valid = None if problem.valid is None else problem.valid.unsqueeze(-1).unbind(-2)

    def loop(state: Tensor, entering: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        states: list[Tensor] = []
        for t in range(start, stop):
            # Past the end of a sequence its last step is done again, so that nothing new, and no NaN, can arise there.
            entering = state if valid is None else torch.where(valid[t], state, entering)
            if resets is not None:
                entering = torch.where(resets[t], problem.fresh, entering)
            state = step(entering, drives[t])
            if t == 0:
                _check_step(cell, entering, state)
            states.append(state)
        return torch.stack(states, -2) if states else state.unsqueeze(-2)[..., :0, :], entering

    return loop


def _check_step(cell: Cell, before: Tensor, after: Tensor) -> None:
    if after.shape != before.shape or after.dtype != before.dtype:
        given, made = (f"{tuple(state.shape)}, {state.dtype}" for state in (before, after))
        raise InputError(
            f"the step of {type(cell).__name__} made a state of shape {made} of one of shape {given}. "
            "It must keep both, for any leading dimensions."
        )
