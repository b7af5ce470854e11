"""Linearizations: the matrices A that approximate the Jacobian of the step in s ← scan(A, f(s) - A s).

The solution does not depend on A. The number of iterations and the cost of each do.
"""

import abc
import functools
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..cells.base import Cell
from ..cells.structure import (
    compute_jacobian,
    compute_jacobian_blocks,
    find_eigenvalues,
    make_linear_transition,
    make_step,
)
from ..errors import IncompatibleError, InputError
from ..ops.linear_scan import linear_scan
from ..recurrence.conjugates import RotatedConjugate
from ..recurrence.spectra import BlockDiagonal
from .system import System, chunk_length
from .time_axis import TimeAxis
from .transitions import (
    BasisTransition,
    DenseTransition,
    DiagonalTransition,
    PiecewiseTransition,
    Transition,
    ZeroTransition,
)

__all__ = [
    "ConjugateDiagonal",
    "FullJacobian",
    "IdentityMatrix",
    "JacobianDiagonal",
    "LinearPart",
    "Linearization",
    "MeanConjugate",
    "MeanJacobian",
    "MeanRotation",
    "ZeroMatrix",
]


INTERVAL = 64  # steps per interval with means="auto"; intervals are scanned in sequence, so short ones cost parallelism


class Linearization(abc.ABC):
    """Base class of linearizations, which compute the transition of each iteration."""

    solver_name: ClassVar[str]  # the name of the solver that uses it, for messages

    @property
    def fused_diagonal(self) -> bool | None:
        """Whether a fused Newton pass uses diag M (True) or Λ̄ (False) for this linearization; None without one."""
        return None

    @property
    def supports_ranks(self) -> bool:
        """Whether the transition can be computed for a time axis that is split over processes."""
        return True

    @abc.abstractmethod
    def transition(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        """Return the transition A.

        Args:
            cell: The cell of the system.
            system: The equations.
            entering: (batch, time, n), the states that enter the steps.

        Raises:
            IncompatibleError: If the cell lacks a method that this linearization needs.
        """

    def options(self) -> list[str]:
        """Return the arguments that differ from their defaults, as source code."""
        return []

    def solver_options(self) -> list[str]:
        """Return the arguments of the solver `solver_name` for this linearization, as source code."""
        return self.options()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.options())})"


def _map_chunks(
    function: Callable[[Tensor, Tensor], Tensor], entering: Tensor, drive: Tensor, memory_factor: int
) -> Tensor:
    """Apply `function` to one chunk of time after another, to limit its memory.

    `memory_factor` is the memory that it needs per step, in units of one state.
    """
    length = max(1, 16 * chunk_length(entering) // max(1, memory_factor))
    steps = entering.shape[1]
    if steps <= length:
        return function(entering, drive)
    chunks = (slice(start, start + length) for start in range(0, steps, length))
    return torch.cat([function(entering[:, at], drive[:, at]) for at in chunks], 1)


class FullJacobian(Linearization):
    """A = J_t: Newton's method (DEER). It stores n² entries per step and takes the fewest iterations."""

    solver_name = "DEER"

    def transition(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        jacobian = functools.partial(compute_jacobian, cell)
        return DenseTransition(_map_chunks(jacobian, entering, system.step_inputs[0], cell.state_size))


class JacobianDiagonal(Linearization):
    """A = diag J_t (Quasi-DEER): closed form for ADPT cells and torch.nn cells, else n exact directional derivatives.

    Args:
        probes: If given, estimate the diagonal from this many random sign vectors z as the mean of z ⊙ J z
            (Hutchinson), which costs `probes` directional derivatives instead of n. The error of the estimate of an
            entry is about the norm of the rest of its row divided by √probes.
        seed: Seed of the sign vectors, which are the same at every iteration.
    """

    solver_name = "QuasiDEER"

    def __init__(self, probes: int | None = None, seed: int = 0):
        if probes is not None and (not isinstance(probes, int) or probes < 1):
            raise InputError(f"QuasiDEER(probes={probes!r}): must be an integer >= 1, or None for the exact one.")
        self.probes = probes
        self.seed = seed

    def transition(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        drive = system.step_inputs[0]
        if self.probes is not None:
            return DiagonalTransition(BlockDiagonal(self._estimate(make_step(cell), entering, drive)))

        def stack_blocks(state: Tensor, drive: Tensor) -> Tensor:
            blocks = compute_jacobian_blocks(cell, state, drive)
            real = blocks.real.expand_as(state)
            return real if blocks.imag is None else torch.cat((real, blocks.imag.expand_as(state)), -1)

        stacked = _map_chunks(stack_blocks, entering, drive, cell.state_size)
        pairs = stacked.shape[-1] > entering.shape[-1]
        return DiagonalTransition(BlockDiagonal(*stacked.chunk(2, -1)) if pairs else BlockDiagonal(stacked))

    def _estimate(self, step: Callable[[Tensor, Tensor], Tensor], entering: Tensor, drive: Tensor) -> Tensor:
        """Return Hutchinson's estimate of the diagonal, (batch, time, n)."""
        assert self.probes is not None
        signs = torch.randint(
            0, 2, (self.probes, entering.shape[-1]), generator=torch.Generator().manual_seed(self.seed)
        ).to(entering)
        total = torch.zeros_like(entering)
        for sign in signs * 2 - 1:
            derivative = torch.func.jvp(lambda state: step(state, drive), (entering,), (sign.expand_as(entering),))[1]
            total = total + sign * derivative
        return total / self.probes

    def options(self) -> list[str]:
        return [] if self.probes is None else [f"probes={self.probes}"]


class ConjugateDiagonal(Linearization):
    """A = diag M_t (Forward-DEER, eq:diag_M): O(n) per step, without derivatives."""

    solver_name = "ForwardDEER"
    fused_diagonal = True

    def transition(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        forward, length = cell.structure().forward, chunk_length(entering)
        if forward is None:
            raise IncompatibleError(
                f"ForwardDEER needs a cell of the form M x + drive; {type(cell).__name__} has no M. "
                "Use solvers.QuasiDEER() for this cell, or solvers.Sequential()."
            )
        pieces: list[Transition] = [
            forward(state, drive)
            for state, drive in zip(entering.split(length, 1), system.step_inputs[0].split(length, 1), strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else pieces[0].concatenate(pieces[1:])


class LinearPart(Linearization):
    """A = Λ̄ (Conv-DEER), the linear part of the cell: the same at every step and iteration.

    Args:
        by: The function that runs the recurrence: `linear_scan`, or `lti_convolution` for FFTs.
    """

    solver_name = "ConvDEER"

    def __init__(self, by: Callable[..., Tensor] = linear_scan):
        self.by = by

    @property
    def fused_diagonal(self) -> bool | None:
        return False if self.by is linear_scan else None

    def transition(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        transition = make_linear_transition(cell, system.step_inputs[0])
        if transition is None:
            raise IncompatibleError(
                f"ConvDEER needs a cell with constant eigenvalues; {type(cell).__name__} has none. "
                "Use solvers.QuasiDEER() for this cell, or solvers.Sequential()."
            )
        if self.by is linear_scan:
            return transition
        return _with_scan(transition, self.by)

    def options(self) -> list[str]:
        return [] if self.by is linear_scan else [f"by={getattr(self.by, '__name__', self.by)}"]


def _with_scan(transition: Transition, by: Callable[..., Tensor]) -> Transition:
    """Return the transition with `by` as the function that runs the recurrence."""
    if isinstance(transition, DiagonalTransition):
        return DiagonalTransition(transition.blocks, by)
    if isinstance(transition, BasisTransition):
        return BasisTransition(transition.basis, _with_scan(transition.inner, by))
    raise IncompatibleError(
        f"the recurrence of a {type(transition).__name__} is not a convolution of scalars. Use solvers.ConvDEER(), "
        "which runs it by a scan."
    )


class _Mean(Linearization):
    """Base class of means over time: one mean per sequence and interval of time.

    Args:
        means: The number of equal intervals of time; "auto" for intervals of `INTERVAL` steps, or of n steps if the
            state has n > `INTERVAL` dimensions, so that an interval costs more than the eigenvectors of its mean.
    """

    solver_name = "KoopmanDEER"

    def __init__(self, means: int | Literal["auto"] = 1):
        if means != "auto" and (not isinstance(means, int) or isinstance(means, bool) or means < 1):
            raise InputError(f'KoopmanDEER(means={means!r}): must be an integer >= 1, or "auto".')
        self.means = means

    @property
    def supports_ranks(self) -> bool:
        return self.means == 1

    def transition(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        drive, valid, steps = system.step_inputs[0], system.valid, entering.shape[1]
        length = max(INTERVAL, cell.state_size) if self.means == "auto" else -(-steps // self.means)
        pieces, lengths = [], []
        for start in range(0, steps, length):
            at = slice(start, min(start + length, steps))
            lengths.append(at.stop - start)
            counted = torch.ones_like(entering[:, at, :1]) if valid is None else valid[:, at].unsqueeze(-1).to(entering)
            weight = counted / system.axis.sum(counted.sum(1, keepdim=True)).clamp(min=1)
            pieces.append(self.mean(cell, entering[:, at], drive[:, at], weight, system.axis))
        return pieces[0] if len(pieces) == 1 else PiecewiseTransition(pieces, lengths)

    @abc.abstractmethod
    def mean(self, cell: Cell, entering: Tensor, drive: Tensor, weight: Tensor, axis: TimeAxis) -> Transition:
        """Return the transition of one interval.

        Args:
            cell: The cell.
            entering: (batch, time, n), the states that enter the steps of the interval.
            drive: (batch, time, features), the drive of these steps.
            weight: (batch, time, 1), the weights of the mean, whose sum over time is one.
            axis: The time axis, over whose processes the interval extends.
        """

    def options(self) -> list[str]:
        return [] if self.means == 1 else [f"means={self.means!r}"]


class MeanConjugate(_Mean):
    """A = the time mean of M_t at the current iterate (Koopman-DEER, sec:conclusion), or of J_t for cells without M.

    If the eigenvalues are real, the mean is symmetric and is scanned in its eigenbasis. Other means are scanned as
    dense matrices.
    """

    def mean(self, cell: Cell, entering: Tensor, drive: Tensor, weight: Tensor, axis: TimeAxis) -> Transition:
        dense, symmetric = compute_mean_matrix(cell, entering, drive, weight)
        dense = axis.sum(dense)
        return diagonalize(dense) if symmetric else DenseTransition(dense.unsqueeze(1))


def diagonalize(symmetric: Tensor) -> Transition:
    """Return the transition of a symmetric matrix for all steps, in its eigenbasis.

    Args:
        symmetric: (batch, n, n).
    """
    finite = symmetric.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    eigenvalues, basis = torch.linalg.eigh(torch.where(finite, (symmetric + symmetric.mT) / 2, 0.0))  # raises at NaN
    eigenvalues = torch.where(finite.squeeze(-1), eigenvalues, torch.nan)  # the loop then reports DIVERGED
    return BasisTransition(basis, DiagonalTransition(BlockDiagonal(eigenvalues.unsqueeze(1))))


def compute_mean_matrix(cell: Cell, entering: Tensor, drive: Tensor, weight: Tensor) -> tuple[Tensor, bool]:
    """Return the mean of M_t over time, or of J_t for a cell without M, and whether it is symmetric.

    Args:
        cell: The cell.
        entering: (batch, time, n), the states that enter the steps.
        drive: (batch, time, features).
        weight: (batch, time, 1), the weights of the mean.

    Returns:
        The matrix (batch, n, n), and True if it is symmetric.
    """
    length = chunk_length(entering)
    total = torch.zeros((), dtype=entering.dtype, device=entering.device)
    conjugate = cell.structure().conjugate
    if conjugate is None:
        return compute_mean_jacobian(cell, entering, drive, weight), False
    lambda_bar = find_eigenvalues(cell)
    for start in range(0, entering.shape[1], length):
        at = slice(start, start + length)
        total = total + conjugate(entering[:, at], drive[:, at]).weighted_sum(weight[:, at])
    return total, lambda_bar is not None and lambda_bar.imag is None


def compute_mean_jacobian(cell: Cell, entering: Tensor, drive: Tensor, weight: Tensor) -> Tensor:
    """Return the mean of J_t over time, (batch, n, n), one chunk of time after another.

    Args:
        cell: The cell.
        entering: (batch, time, n), the states that enter the steps.
        drive: (batch, time, features).
        weight: (batch, time, 1), the weights of the mean.
    """
    length = max(1, 16 * chunk_length(entering) // cell.state_size)
    total = torch.zeros((), dtype=entering.dtype, device=entering.device)
    for start in range(0, entering.shape[1], length):
        at = slice(start, start + length)
        total = total + (weight[:, at].unsqueeze(-1) * compute_jacobian(cell, entering[:, at], drive[:, at])).sum(1)
    return total


class MeanJacobian(_Mean):
    """A = the time mean of J_t at the current iterate, scanned as a dense matrix."""

    def solver_options(self) -> list[str]:
        return [*self.options(), "mean=MeanJacobian"]

    def mean(self, cell: Cell, entering: Tensor, drive: Tensor, weight: Tensor, axis: TimeAxis) -> Transition:
        return DenseTransition(axis.sum(compute_mean_jacobian(cell, entering, drive, weight)).unsqueeze(1))


class MeanRotation(_Mean):
    """A = K̂ Λ̄ K̂', where K̂ is the rotation nearest to the mean of Q_t (its polar factor), as the paper proposes."""

    supports_ranks = False

    def solver_options(self) -> list[str]:
        return [*self.options(), "mean=MeanRotation"]

    def mean(self, cell: Cell, entering: Tensor, drive: Tensor, weight: Tensor, axis: TimeAxis) -> Transition:
        lambda_bar, make_conjugate = find_eigenvalues(cell), cell.structure().conjugate
        total = torch.eye(cell.state_size, dtype=entering.dtype, device=entering.device)
        for start in range(0, entering.shape[1], chunk_length(entering)):
            at = slice(start, start + chunk_length(entering))
            conjugate = None if make_conjugate is None else make_conjugate(entering[:, at], drive[:, at])
            if lambda_bar is None or not isinstance(conjugate, RotatedConjugate) or len(conjugate.rotations) > 1:
                raise IncompatibleError(
                    "the mean rotation needs a cell with M = Q Λ̄ Q' for one plane and one head; this is "
                    f"{type(cell).__name__} with {type(conjugate).__name__}. Use solvers.KoopmanDEER()."
                )
            total = total + conjugate.weighted_rotation_sum(weight[:, at])
        assert lambda_bar is not None
        left, _, right = torch.linalg.svd(total)
        return BasisTransition(left @ right, DiagonalTransition(lambda_bar))


class ZeroMatrix(Linearization):
    """A = 0 (Jacobi): s ← f(s). Each iteration evaluates only the step, and makes at least one more step exact."""

    solver_name = "Jacobi"

    def transition(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        return ZeroTransition()


class IdentityMatrix(Linearization):
    """A = I (Picard)."""

    solver_name = "Picard"

    def transition(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        return DiagonalTransition(
            BlockDiagonal(torch.ones(cell.state_size, dtype=entering.dtype, device=entering.device))
        )
