"""Automatic choice of a solver by device, batch size, state size and length, with the reason as a sentence."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..cells.base import Cell
from ..cells.spec import ADPTSpec
from ..cells.structure import choose_scan, find_eigenvalues
from ..ops._backends import Backend, note_run
from ..recurrence.directions import FromInput
from .adjoints import Adjoint
from .base import Solution, Solver
from .blockwise import BlockWise
from .newton import DEER, ConvDEER, QuasiDEER
from .problem import resolve_system
from .sequential import Sequential

__all__ = ["Auto", "Choice"]

# On a CPU without a compiled operation, one step of the eager loop takes about as long as one iteration of a parallel
# solver takes per this many elements of the state, for any state size. `adptnet bench auto` measures it.
ELEMENTS_PER_STEP = 8192
ITERATIONS = 6  # iterations of Conv-DEER at the paper's initialization, including the convergence test
SHORT = 64  # below this many steps a parallel solver gains nothing
BLOCK = 1024  # steps per block: longer blocks take more iterations, and sometimes fail


class Choice(NamedTuple):
    """A solver and the reason for choosing it."""

    solver: Solver
    reason: str


class Auto(Solver):
    """Choose a solver for each call. The states do not depend on the choice; `solution.solver` records it.

    If a compiled operation runs all steps of the cell, `Auto` uses it. Without one, on a CPU, it runs the steps
    sequentially, unless the sequences are long and both the batch and the state are small, where most of the time of a
    step is overhead. On other devices it solves in parallel over time. `choose` returns the choice and its reason.
    """

    def choose(self, cell: Cell, batch: int, steps: int, device: torch.device | str) -> Choice:
        """Choose the solver for a call.

        Args:
            cell: The cell.
            batch: The number of sequences.
            steps: Their length.
            device: The device of the inputs.
        """
        size = cell.state_size
        what = f"batch {batch}, {steps} steps, state size {size}, on {torch.device(device).type}"
        if steps < SHORT:
            return Choice(Sequential(), f"{what}: fewer than {SHORT} steps, so a parallel solver gains nothing.")
        if choose_scan(cell, device).is_kernel:
            return Choice(Sequential(), f"{what}: one compiled operation runs all steps.")
        if torch.device(device).type != "cpu":
            return _choose_parallel(
                cell, what, "solving in parallel over time fills the device (by rule, not measured)"
            )
        if find_eigenvalues(cell) is None:
            return Choice(Sequential(), f"{what}: on a CPU the Jacobian of this cell costs as much as {size} steps.")
        work = batch * size * ITERATIONS
        if work > ELEMENTS_PER_STEP:
            return Choice(
                Sequential(), f"{what}: on a CPU {ITERATIONS} iterations cost more than the overhead of the loop."
            )
        why = f"a step of the loop is mostly overhead, and {ITERATIONS} iterations cost less"
        return _choose_parallel(cell, what, why)

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
        batch = inputs.shape[0] if inputs.dim() == 3 else 1
        choice = self.choose(cell, batch, inputs.shape[-2] if inputs.dim() > 1 else 0, inputs.device)
        solver = choice.solver
        note_run("solver", Backend(repr(solver), choice.reason))
        if isinstance(solver, Sequential):
            guess = None  # `Sequential` takes no guess
        return solver(cell, inputs, state, guess=guess, lengths=lengths, reset=reset, adjoint=adjoint)

    def __repr__(self) -> str:
        return "Auto()"


def _choose_parallel(cell: Cell, what: str, why: str) -> Choice:
    """Choose the parallel-in-time solver that suits the cell."""
    spec = getattr(cell, "spec", None)
    if isinstance(spec, ADPTSpec) and isinstance(spec.direction, FromInput) and cell.state_size <= 16:
        return Choice(DEER(), f"{what}: {why}; the cell is linear in its state, so one scan of matrices is exact.")
    if find_eigenvalues(cell) is None:
        return Choice(
            BlockWise(QuasiDEER(), block_length=BLOCK), f"{what}: {why}; the cell has no constant eigenvalues."
        )
    return Choice(BlockWise(ConvDEER(max_iterations=64), block_length=BLOCK), f"{what}: {why}.")
