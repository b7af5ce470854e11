"""A choice of solver from the device, the batch, the width and the length, with its reason."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..cells.base import ADPTState, Cell
from ..cells.spec import ADPTSpec
from ..recurrence.directions import FromInput
from .adjoints import Adjoint
from .base import Solution, Solver
from .blockwise import BlockWise
from .newton import DEER, ConvDEER, QuasiDEER
from .problem import check_cell
from .sequential import Sequential

__all__ = ["Auto", "Choice"]

# On a CPU without the compiled operation, a step of the loop costs about as much as one iteration over this many
# numbers of state, whatever its size: `adptnet bench auto` measures it.
NUMBERS_A_STEP = 8192
ITERATIONS = 6  # of Conv-DEER at the paper's initialisation, and the check
SHORT = 64  # steps below which there is nothing to gain
BLOCK = 1024  # steps that are solved at a time: longer ones take more iterations, and sometimes fail


class Choice(NamedTuple):
    """A solver and why it was chosen."""

    solver: Solver
    reason: str


class Auto(Solver):
    """Chooses a solver for each call. The states are the same whichever it is; `solution.solver` tells.

    Where a compiled operation runs all steps of the cell, that is taken. Without one, on a CPU, steps are run one after
    another unless sequences are long, few and narrow, where most of a step would be overhead. On other devices they are
    solved together. `choose` gives the choice and its reason in words.
    """

    def choose(self, cell: Cell, batch: int, steps: int, device: torch.device | str) -> Choice:
        """The solver for `batch` sequences of `steps` steps of `cell` on `device`."""
        check_cell(cell)
        size = cell.state_size
        what = f"{batch} x {steps} steps of {size} numbers on {torch.device(device).type}"
        if steps < SHORT:
            return Choice(Sequential(), f"{what}: fewer than {SHORT} steps, nothing to gain.")
        if cell.scans(device):
            return Choice(Sequential(), f"{what}: one compiled operation runs all steps.")
        if torch.device(device).type != "cpu":
            return _together(cell, what, "all steps together fill the device (by rule; not measured here)")
        if cell.eigenvalues() is None:
            return Choice(Sequential(), f"{what}: a CPU, and a cell whose Jacobian costs as much as {size} steps.")
        work = batch * size * ITERATIONS
        if work > NUMBERS_A_STEP:
            return Choice(
                Sequential(), f"{what}: a CPU, and {ITERATIONS} iterations cost more than the overhead of a step."
            )
        return _together(cell, what, f"a step of the loop is mostly overhead, {ITERATIONS} iterations cost less")

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
        batch = inputs.shape[0] if inputs.dim() == 3 else 1
        solver = self.choose(cell, batch, inputs.shape[-2] if inputs.dim() > 1 else 0, inputs.device).solver
        if isinstance(solver, Sequential):
            guess = None  # it takes none
        return solver(cell, inputs, state, guess=guess, lengths=lengths, reset=reset, adjoint=adjoint)

    def __repr__(self) -> str:
        return "Auto()"


def _together(cell: Cell, what: str, why: str) -> Choice:
    spec = getattr(cell, "spec", None)
    if isinstance(spec, ADPTSpec) and isinstance(spec.direction, FromInput) and cell.state_size <= 16:
        return Choice(DEER(), f"{what}: {why}; linear in its state, so that one scan of matrices is exact.")
    if cell.eigenvalues() is None:
        return Choice(BlockWise(QuasiDEER(), block_length=BLOCK), f"{what}: {why}; no constant eigenvalues.")
    return Choice(BlockWise(ConvDEER(max_iterations=64), block_length=BLOCK), f"{what}: {why}.")
