"""Predicted iterations of a parallel solver, by linear theory around the true trajectory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cells import ADPTState
from ..cells.structure import compute_jacobian, make_step
from ..errors import IncompatibleError
from ..solvers import Newton, Solver
from ..solvers.damping import Undamped
from ..solvers.system import System
from .trajectory import Trajectory, make_trajectory

__all__ = ["make_system", "predict_iterations"]

_DENSE_LIMIT = 2**22  # Jacobian entries that are kept in memory


def make_system(trajectory: Trajectory) -> System:
    """Return the system of equations that a parallel solver solves for this trajectory.

    Args:
        trajectory: The trajectory.
    """
    state = trajectory.state.detach()
    return System(make_step(trajectory.cell), (trajectory.drive.detach(),), state, state)


@torch.no_grad()
def predict_iterations(
    system: Any,
    inputs: Tensor | None,
    solver: Solver,
    *,
    state: Tensor | ADPTState | None = None,
    steps: int | None = None,
) -> Tensor:
    """Predict the iterations that `solver` needs for each sequence, to first order in the error.

    With the transitions A_t of the solver and the Jacobians J_t along the true trajectory, an error e_t of the guess
    becomes e'_t = A_t e'_{t-1} + (J_t - A_t) e_{t-1}, up to terms quadratic in e (eq:weighted_sum_local_errors, with
    the remaining error in place of the local one). The recursion runs from the error of the solver's initial guess to
    its tolerance. For `DEER`, A = J and the prediction is 1: further iterations come from the quadratic terms.

    Args:
        system: A layer, a cell or a function, as for `lyapunov_exponents`.
        inputs: (batch, time, features), or (time, features).
        solver: An undamped solver: `solvers.ConvDEER()`, `ForwardDEER()`, `QuasiDEER()`, `KoopmanDEER()`, …
        state: Initial states.
        steps: Number of steps, for a system without inputs.

    Returns:
        (batch,) int64.

    Raises:
        IncompatibleError: The solver is damped or not of the Newton family.
    """
    if not isinstance(solver, Newton) or not isinstance(solver.damping, Undamped):
        raise IncompatibleError(f"predict_iterations needs an undamped solver; got {solver}. Pass solvers.QuasiDEER().")
    trajectory = make_trajectory(system, inputs, state, steps)
    problem = make_system(trajectory)
    truth = problem.run()
    entering = problem.entering_states(truth)
    transition = solver.linearize(trajectory.cell, problem, entering)
    allowed = solver.tolerance(truth.dtype).allowed(truth, problem.reset)
    derivative = _make_jvp(trajectory, problem, entering)
    error = solver.initial_guess(trajectory.cell, problem) - truth
    zero = torch.zeros_like(problem.initial)
    needed = torch.zeros(len(truth), dtype=torch.int64, device=truth.device)
    for _ in range(trajectory.steps):
        before = torch.cat((zero.unsqueeze(1), error[:, :-1]), 1)
        propagated = derivative(before)
        unconverged = ((propagated - error).abs() > allowed).any(-1).any(-1)
        if not bool(unconverged.any()):
            break
        needed += unconverged
        error = transition.scan(propagated - transition.mv(before), zero)
    return needed


def _make_jvp(trajectory: Trajectory, problem: System, entering: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the map e ↦ J_t e for all steps: by stored Jacobians, or by forward-mode differentiation if too large."""
    if entering.numel() * entering.shape[-1] <= _DENSE_LIMIT:
        matrices = compute_jacobian(trajectory.cell, entering, problem.step_inputs[0])
        return lambda error: (matrices @ error.unsqueeze(-1)).squeeze(-1)

    def forward(error: Tensor) -> Tensor:
        product: Tensor = torch.func.jvp(
            lambda state: problem.step(state, *problem.step_inputs), (entering,), (error,)
        )[1]
        return product

    return forward
