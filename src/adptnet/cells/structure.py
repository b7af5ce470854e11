"""The structure of a cell: what is known of its step beyond the step itself, and what follows where it is not known."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .._typing import Matrix, Vector
from ..errors import InputError
from ..ops._backends import REFERENCE, Backend, note_run
from ..ops.adpt_step import Pass
from ..recurrence.conjugates import Conjugate, nearest_blocks
from ..recurrence.spectra import BlockDiagonal

if TYPE_CHECKING:  # solvers import cells; only `solvers.transitions` is used the other way
    from ..solvers.transitions import Transition
    from .base import Cell

__all__ = [
    "Structure",
    "choose_scan",
    "compute_jacobian",
    "compute_jacobian_blocks",
    "differentiate",
    "find_eigenvalues",
    "make_jacobian_chunks",
    "make_linear_transition",
    "make_step",
]

Step = Callable[[Tensor, Tensor], Tensor]

_DIFFERENTIATED = Backend(
    REFERENCE,
    "torch.func differentiates the step, one derivative for each state dimension.",
    "Use a solver without Jacobians, solvers.ConvDEER() or solvers.ForwardDEER(), if the cell has one that suits.",
)


class Structure(NamedTuple):
    """Functions that make solvers and analyses of a cell faster or more precise. Every one is optional.

    States are (..., state_size) and drives (..., features), as in `Cell.step`.

    Args:
        stepper: () → a function equal to `step`, with everything that is constant along a sequence evaluated once.
        scan: (drive, state, reset=, lengths=, lean=) → the states after all steps, (batch, time, state_size), in one
            operation; None where the operation does not apply. `reset` and `lengths` are as for a solver; with `lean`,
            only the states are saved for the backward pass.
        choose_scan: (device) → the program by which `scan` runs all steps there, or the reference with the reason.
        eigenvalues: () → Λ̄ if the cell has a constant spectrum; None otherwise.
        linear: (drive) → the transition of the linear part, which does not depend on the state: for Conv-DEER. By
            default it is Λ̄.
        forward: (state, drive) → the (block) diagonal of M as a transition (eq:diag_M): for Forward-DEER.
        conjugate: (state, drive) → M, if the step is M x + drive: for Koopman-DEER.
        jacobian: (state, drive) → the derivative of the step with respect to the state.
        jacobian_blocks: The same, but only its diagonal; for complex pairs the nearest a + ib of each 2-by-2 block.
        jacobian_chunks: (states, drive) → a function of (start, stop) that returns the Jacobians of these steps.
        newton_pass: (state, drive, diagonal=) → a fused Newton iteration, see `ops.adpt_step`, with the transition
            diag M, or Λ̄; None where there is none.
        radius: (state, drive, reset_state, reset) → the radius of a ball that provably contains the state after each
            step, (batch, time); None if no bound is known.
    """

    stepper: Callable[[], Step] | None = None
    scan: Callable[..., Tensor | None] | None = None
    choose_scan: Callable[[torch.device | str], Backend] | None = None
    eigenvalues: Callable[[], BlockDiagonal | None] | None = None
    linear: "Callable[[Tensor], Transition] | None" = None
    forward: "Callable[[Tensor, Tensor], Transition] | None" = None
    conjugate: Callable[[Tensor, Tensor], Conjugate] | None = None
    jacobian: Callable[[Tensor, Tensor], Tensor] | None = None
    jacobian_blocks: Callable[[Tensor, Tensor], BlockDiagonal] | None = None
    jacobian_chunks: Callable[[Tensor, Tensor], Callable[[int, int], Tensor]] | None = None
    newton_pass: Callable[..., Callable[..., Pass] | None] | None = None
    radius: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor | None] | None = None


def make_step(cell: "Cell") -> Step:
    """Return the step of a cell as a function, with everything that is constant along a sequence evaluated once.

    Args:
        cell: The cell.
    """
    stepper = cell.structure().stepper
    return cell.step if stepper is None else stepper()


def choose_scan(cell: "Cell", device: torch.device | str) -> Backend:
    """Return the program that runs all steps of a cell on a device; the reference if it is a loop.

    Args:
        cell: The cell.
        device: The device, which need not be present.
    """
    structure, name = cell.structure(), type(cell).__name__
    if structure.choose_scan is not None:
        return structure.choose_scan(device)
    if structure.scan is None:
        return Backend(REFERENCE, f"{name} has no fused operation for all steps.")
    return Backend("scan", f"{name} has a scan of its own.")


def find_eigenvalues(cell: "Cell") -> BlockDiagonal | None:
    """Return Λ̄ of a cell; None if it has no constant spectrum.

    Args:
        cell: The cell.
    """
    eigenvalues = cell.structure().eigenvalues
    return None if eigenvalues is None else eigenvalues()


def make_linear_transition(cell: "Cell", drive: Tensor) -> "Transition | None":
    """Return the transition of the linear part of a cell; None if it has none.

    Args:
        cell: The cell.
        drive: (batch, time, features).
    """
    linear = cell.structure().linear
    if linear is not None:
        return linear(drive)
    from ..solvers.transitions import DiagonalTransition

    blocks = find_eigenvalues(cell)
    return None if blocks is None else DiagonalTransition(blocks)


def compute_jacobian(cell: "Cell", state: Vector, drive: Tensor) -> Matrix:
    """Return the derivative of the step of a cell with respect to the state, (..., state_size, state_size).

    Args:
        cell: The cell.
        state: (..., state_size).
        drive: (..., features).

    Raises:
        InputError: `torch.func` cannot differentiate the step; the message says what to change.
    """
    jacobian = cell.structure().jacobian
    return differentiate(make_step(cell), state, drive) if jacobian is None else jacobian(state, drive)


def compute_jacobian_blocks(cell: "Cell", state: Vector, drive: Tensor) -> BlockDiagonal:
    """Return the diagonal of `compute_jacobian`; for complex pairs the nearest a + ib of each 2-by-2 block.

    Args:
        cell: The cell.
        state: (..., state_size).
        drive: (..., features).
    """
    blocks = cell.structure().jacobian_blocks
    if blocks is not None:
        return blocks(state, drive)
    lambda_bar = find_eigenvalues(cell)
    return nearest_blocks(compute_jacobian(cell, state, drive), lambda_bar is not None and lambda_bar.imag is not None)


def make_jacobian_chunks(cell: "Cell", states: Tensor, drive: Tensor) -> Callable[[int, int], Tensor]:
    """Return a function that computes Jacobians for a range of steps at a time, to limit memory.

    Args:
        cell: The cell.
        states: The state before each step, (batch, time, n).
        drive: (batch, time, features).

    Returns:
        A function of `start` and `stop` that returns the Jacobians of steps start … stop - 1, (batch, ·, n, n).
    """
    chunks = cell.structure().jacobian_chunks
    if chunks is not None:
        return chunks(states, drive)
    return lambda start, stop: compute_jacobian(cell, states[:, start:stop], drive[:, start:stop])


def differentiate(step: Step, state: Vector, drive: Tensor) -> Matrix:
    """Return the derivative of a step with respect to the state by `torch.func`.

    Args:
        step: The function of state and drive.
        state: (..., state_size).
        drive: (..., features).

    Raises:
        InputError: `torch.func` cannot differentiate the step; the message says what to change.
    """
    note_run("jacobian", _DIFFERENTIATED, log=False)
    flat_state, flat_drive = state.reshape(-1, state.shape[-1]), drive.reshape(-1, drive.shape[-1])
    try:
        flat: Tensor = torch.func.vmap(torch.func.jacfwd(step))(flat_state, flat_drive)
    except (RuntimeError, NotImplementedError) as error:
        raise _explain_vmap(error) from error
    return flat.reshape(*state.shape, state.shape[-1])


def _explain_vmap(error: Exception) -> Exception:
    """Return an `InputError` that says what `torch.func` does not support in a step; `error` itself if unrelated."""
    reason = next(iter(str(error).strip().splitlines()), "")
    if "data-dependent control flow" in str(error):
        return InputError(
            "the Jacobian of the step cannot be vectorised, because the step has data-dependent control flow: if, "
            "while, .item(), boolean indexing or one_hot without num_classes. Use torch.where(condition, a, b), or a "
            "solver without Jacobians: solvers.Jacobi()."
        )
    if "random operation" in str(error):
        return InputError(
            "the step is random: dropout in training mode, or noise drawn in the step. Call .eval() on it, or draw the "
            "noise beforehand and pass it as input."
        )
    if "vmap" in str(error) or "functorch" in str(error) or isinstance(error, NotImplementedError):
        return InputError(
            f"torch.func cannot compute the Jacobian of this step ({reason}). Use functions that torch.func supports, "
            "give the structure() of the cell a jacobian, or use a solver without Jacobians: solvers.Jacobi()."
        )
    return error
