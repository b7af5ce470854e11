"""Linearisations: which A stands for the derivative of the step in s ← scan(A, f(s) - A s).

The states that are found do not depend on A, only how many iterations it takes and what each costs.
"""

import abc
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from ..cells.base import Cell
from ..errors import IncompatibleError, InputError
from ..ops.linear_scan import linear_scan
from ..recurrence.conjugates import RotatedConjugate
from ..recurrence.spectra import BlockDiagonal
from .system import System, stretch
from .transitions import Dense, Diagonal, InBasis, Piecewise, Transition, Zero

__all__ = [
    "ConjugateDiagonal",
    "FullJacobian",
    "Identity",
    "JacobianDiagonal",
    "Linear",
    "Linearisation",
    "MeanConjugate",
    "MeanRotation",
    "Nothing",
]


class Linearisation(abc.ABC):
    """Chooses the transition of each iteration."""

    solver: ClassVar[str]  # the name of the solver that uses it

    @abc.abstractmethod
    def transition(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        """A at the states that enter each step. Raises if the cell has not what this needs."""

    def options(self) -> list[str]:
        """What was chosen beside the kind, as typed."""
        return []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.options())})"


def _in_stretches(numbers: int, entering: Tensor, drive: Tensor, of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`of` a stretch of time after another, where each state takes as much memory as `numbers` states."""
    length = max(1, 16 * stretch(entering) // max(1, numbers))
    steps = entering.shape[1]
    if steps <= length:
        return of(entering, drive)
    parts = (slice(start, start + length) for start in range(0, steps, length))
    return torch.cat([of(entering[:, at], drive[:, at]) for at in parts], 1)


class FullJacobian(Linearisation):
    """A = J_t: Newton's method (DEER). n² numbers for each step; fewest iterations."""

    solver = "DEER"

    def transition(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        dense = _in_stretches(cell.state_size, entering, system.givens[0], cell.jacobian)
        return Dense(dense)


class JacobianDiagonal(Linearisation):
    """A = diag J_t (Quasi-DEER): in closed form for ADPT cells, by n exact derivatives along the axes otherwise.

    Args:
        probes: If given, the diagonal is estimated from this many random signs z as the mean of z ⊙ J z
            (Hutchinson), which costs `probes` derivatives instead of n. The relative error of the estimate of an
            entry is about the size of the rest of its row over √probes.
        seed: Of the signs, which are the same at every iteration.
    """

    solver = "QuasiDEER"

    def __init__(self, probes: int | None = None, seed: int = 0):
        if probes is not None and (not isinstance(probes, int) or probes < 1):
            raise InputError(f"QuasiDEER(probes={probes!r}): must be a whole number from 1, or None for the exact one.")
        self.probes = probes
        self.seed = seed

    def transition(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        drive = system.givens[0]
        if self.probes is not None:
            return Diagonal(BlockDiagonal(self._estimated(cell.stepper(), entering, drive)))
        lambda_bar = cell.eigenvalues()
        pairs = lambda_bar is not None and lambda_bar.imag is not None

        def stacked(state: Tensor, at: Tensor) -> Tensor:
            blocks = cell.jacobian_blocks(state, at)
            real = blocks.real.expand_as(state)
            return real if blocks.imag is None else torch.cat((real, blocks.imag.expand_as(state)), -1)

        found = _in_stretches(cell.state_size, entering, drive, stacked)
        return Diagonal(BlockDiagonal(*found.chunk(2, -1)) if pairs else BlockDiagonal(found))

    def _estimated(self, step: Callable[[Tensor, Tensor], Tensor], entering: Tensor, drive: Tensor) -> Tensor:
        assert self.probes is not None
        signs = torch.randint(
            0, 2, (self.probes, entering.shape[-1]), generator=torch.Generator().manual_seed(self.seed)
        ).to(entering)
        total = torch.zeros_like(entering)
        for sign in signs * 2 - 1:
            along = torch.func.jvp(lambda state: step(state, drive), (entering,), (sign.expand_as(entering),))[1]
            total = total + sign * along
        return total / self.probes

    def options(self) -> list[str]:
        return [] if self.probes is None else [f"probes={self.probes}"]


class ConjugateDiagonal(Linearisation):
    """A = diag M_t (Forward-DEER, eq:diag_M): O(n), no derivative of anything."""

    solver = "ForwardDEER"

    def transition(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        length = stretch(entering)
        pieces: list[Transition] = []
        for state, drive in zip(entering.split(length, 1), system.givens[0].split(length, 1), strict=True):
            transition = cell.forward_transition(state, drive)
            if transition is None:
                raise IncompatibleError(
                    f"ForwardDEER needs a cell of the form M x + drive; {type(cell).__name__} has no M. "
                    "Use solvers.QuasiDEER() for this cell, or solvers.Sequential()."
                )
            pieces.append(transition)
        return pieces[0] if len(pieces) == 1 else pieces[0].followed_by(pieces[1:])


class Linear(Linearisation):
    """A = Λ̄ (Conv-DEER): the same at every step and iteration, known before the first.

    Args:
        by: What runs the recurrence: `ops.linear_scan`, or `ops.lti_convolution` for one by FFT.
    """

    solver = "ConvDEER"

    def __init__(self, by: Callable[..., Tensor] = linear_scan):
        self.by = by

    def transition(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        transition = cell.linear_transition(system.givens[0])
        if transition is None:
            raise IncompatibleError(
                f"ConvDEER needs a cell with constant eigenvalues; {type(cell).__name__} has none. "
                "Use solvers.QuasiDEER() for this cell, or solvers.Sequential()."
            )
        if self.by is linear_scan:
            return transition
        return _run_by(transition, self.by)

    def options(self) -> list[str]:
        return [] if self.by is linear_scan else [f"by={getattr(self.by, '__name__', self.by)}"]


def _run_by(transition: Transition, by: Callable[..., Tensor]) -> Transition:
    if isinstance(transition, Diagonal):
        return Diagonal(transition.blocks, by)
    if isinstance(transition, InBasis):
        return InBasis(transition.basis, _run_by(transition.inner, by))
    raise IncompatibleError(
        f"a {type(transition).__name__} transition is no convolution of numbers. Use solvers.ConvDEER() with its scan."
    )


class _Mean(Linearisation):
    """A mean over time, one for each of `means` equal stretches, for each sequence by itself."""

    solver = "KoopmanDEER"

    def __init__(self, means: int = 1):
        if not isinstance(means, int) or means < 1:
            raise InputError(f"KoopmanDEER(means={means!r}): must be a whole number from 1.")
        self.means = means

    def transition(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        drive, valid, steps = system.givens[0], system.valid, entering.shape[1]
        length = -(-steps // self.means)
        pieces, lengths = [], []
        for start in range(0, steps, length):
            at = slice(start, min(start + length, steps))
            lengths.append(at.stop - start)
            counted = torch.ones_like(entering[:, at, :1]) if valid is None else valid[:, at].unsqueeze(-1).to(entering)
            weight = counted / counted.sum(1, keepdim=True).clamp(min=1)
            pieces.append(self.mean(cell, entering[:, at], drive[:, at], weight))
        return pieces[0] if len(pieces) == 1 else Piecewise(pieces, lengths)

    @abc.abstractmethod
    def mean(self, cell: Cell, entering: Tensor, drive: Tensor, weight: Tensor) -> Transition:
        """The transition of one stretch; the weights (batch, time, 1) add up to one."""

    def options(self) -> list[str]:
        return [] if self.means == 1 else [f"means={self.means}"]


class MeanConjugate(_Mean):
    """A = the mean of M_t over the guess (Koopman-DEER, sec:conclusion); of J_t for cells without M.

    Real eigenvalues make the mean symmetric, and it is run in its eigenbasis; other means are run as a matrix.
    """

    def mean(self, cell: Cell, entering: Tensor, drive: Tensor, weight: Tensor) -> Transition:
        dense, symmetric = mean_matrix(cell, entering, drive, weight)
        return in_eigenbasis(dense) if symmetric else Dense(dense.unsqueeze(1))


def in_eigenbasis(symmetric: Tensor) -> Transition:
    """A matrix (batch, n, n) for all time, run in its eigenbasis."""
    finite = symmetric.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    eigenvalues, basis = torch.linalg.eigh(torch.where(finite, (symmetric + symmetric.mT) / 2, 0.0))  # raises at NaN
    eigenvalues = torch.where(finite.squeeze(-1), eigenvalues, torch.nan)  # which the loop sees and names
    return InBasis(basis, Diagonal(BlockDiagonal(eigenvalues.unsqueeze(1))))


def mean_matrix(cell: Cell, entering: Tensor, drive: Tensor, weight: Tensor) -> tuple[Tensor, bool]:
    """The mean of M, or of J for a cell without M, (batch, n, n); and whether it is symmetric."""
    length = stretch(entering)
    total = torch.zeros((), dtype=entering.dtype, device=entering.device)
    lambda_bar = cell.eigenvalues()
    symmetric = lambda_bar is not None and lambda_bar.imag is None
    for start in range(0, entering.shape[1], length):
        at = slice(start, start + length)
        conjugate = cell.conjugate(entering[:, at], drive[:, at])
        if conjugate is None:
            break
        total = total + conjugate.weighted_sum(weight[:, at])
    else:
        return total, symmetric
    length = max(1, 16 * length // cell.state_size)
    for start in range(0, entering.shape[1], length):
        at = slice(start, start + length)
        total = total + (weight[:, at].unsqueeze(-1) * cell.jacobian(entering[:, at], drive[:, at])).sum(1)
    return total, False


class MeanRotation(_Mean):
    """A = K̂ Λ̄ K̂' with K̂ the rotation nearest to the mean of Q_t (its polar factor): the form the paper proposes."""

    def mean(self, cell: Cell, entering: Tensor, drive: Tensor, weight: Tensor) -> Transition:
        lambda_bar = cell.eigenvalues()
        total = torch.eye(cell.state_size, dtype=entering.dtype, device=entering.device)
        for start in range(0, entering.shape[1], stretch(entering)):
            at = slice(start, start + stretch(entering))
            conjugate = cell.conjugate(entering[:, at], drive[:, at])
            if lambda_bar is None or not isinstance(conjugate, RotatedConjugate) or len(conjugate.rotations) > 1:
                raise IncompatibleError(
                    "the mean rotation needs a cell with M = Q Λ̄ Q' for one plane and one head; this is "
                    f"{type(cell).__name__} with {type(conjugate).__name__}. Use solvers.KoopmanDEER()."
                )
            total = total + conjugate.turned_sum(weight[:, at])
        assert lambda_bar is not None
        left, _, right = torch.linalg.svd(total)
        return InBasis(left @ right, Diagonal(lambda_bar))


class Nothing(Linearisation):
    """A = 0: s ← f(s) (Jacobi). Nothing but the step itself; right one step further with each iteration."""

    solver = "Jacobi"

    def transition(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        return Zero()


class Identity(Linearisation):
    """A = I (Picard)."""

    solver = "Picard"

    def transition(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        return Diagonal(BlockDiagonal(torch.ones(cell.state_size, dtype=entering.dtype, device=entering.device)))
