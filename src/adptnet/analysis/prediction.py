"""How many iterations a parallel solver should need, by the linear theory around the trajectory it looks for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cells import ADPTState
from ..errors import IncompatibleError
from ..solvers import Newton, Solver
from ..solvers.damping import Undamped
from ..solvers.system import System
from .systems import Posed, posed

__all__ = ["equations", "predicted_iterations"]

_DENSE_LIMIT = 2**22  # numbers of Jacobians that are kept


def equations(trajectory: Posed) -> System:
    """The equations that a parallel solver solves for this trajectory."""
    state = trajectory.state.detach()
    return System(trajectory.cell.stepper(), (trajectory.drive.detach(),), state, state)


@torch.no_grad()
def predicted_iterations(
    system: Any,
    inputs: Tensor | None,
    solver: Solver,
    *,
    state: Tensor | ADPTState | None = None,
    steps: int | None = None,
) -> Tensor:
    """Iterations that `solver` should need for each sequence, (batch,), by how its errors shrink to first order.

    With the transitions A_t of the solver and the Jacobians J_t along the true trajectory, an error e_t of the guess
    becomes e'_t = A_t e'_{t-1} + (J_t - A_t) e_{t-1}, plus what is quadratic in e (eq:weighted_sum_local_errors, with
    the error that is left in place of the local one). It is run from the error of the solver's own guess to its own
    tolerance. For `DEER`, A = J and this says 1: what it takes beyond that is the quadratic part.

    Args:
        system: A layer, a cell or a function, as for `lyapunov_exponents`.
        inputs: (batch, time, features), or (time, features).
        solver: An undamped one: `solvers.ConvDEER()`, `ForwardDEER()`, `QuasiDEER()`, `KoopmanDEER()`, …
        state: Where trajectories start.
        steps: How many steps, for a system without inputs.
    """
    if not isinstance(solver, Newton) or not isinstance(solver.damping, Undamped):
        raise IncompatibleError(f"the prediction is for undamped iterations; got {solver}. Pass solvers.QuasiDEER().")
    trajectory = posed(system, inputs, state, steps)
    problem = equations(trajectory)
    truth = problem.run()
    entering = problem.entering(truth)
    transition = solver.linearise(trajectory.cell, problem, entering)
    allowed = solver.tolerance(truth.dtype).allowed(truth, problem.reset)
    derivative = _derivative(trajectory, problem, entering)
    error = solver.guess(trajectory.cell, problem) - truth
    nothing = torch.zeros_like(problem.initial)
    needed = torch.zeros(len(truth), dtype=torch.int64, device=truth.device)
    for _ in range(trajectory.steps):
        before = torch.cat((nothing.unsqueeze(1), error[:, :-1]), 1)
        moved = derivative(before)
        open_ones = ((moved - error).abs() > allowed).any(-1).any(-1)
        if not bool(open_ones.any()):
            break
        needed += open_ones
        error = transition.scan(moved - transition.mv(before), nothing)
    return needed


def _derivative(trajectory: Posed, problem: System, entering: Tensor) -> Callable[[Tensor], Tensor]:
    """J_t e for every step: by the Jacobians, or where they would be too many by forward differentiation."""
    if entering.numel() * entering.shape[-1] <= _DENSE_LIMIT:
        matrices = trajectory.cell.jacobian(entering, problem.givens[0])
        return lambda error: (matrices @ error.unsqueeze(-1)).squeeze(-1)

    def forward(error: Tensor) -> Tensor:
        moved: Tensor = torch.func.jvp(lambda state: problem.step(state, *problem.givens), (entering,), (error,))[1]
        return moved

    return forward
