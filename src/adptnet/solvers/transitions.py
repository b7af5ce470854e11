"""Transitions: the matrices A_t of linear recurrences x_t = A_t x_{t-1} + b_t.

A transition multiplies vectors (`mv`), runs the recurrence in parallel over time (`scan`), runs it as a Kalman filter
that pulls the states towards observations (`filter`), and returns the transition of the adjoint recurrence
(`backward`). States are (batch, time, n).
"""

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import IncompatibleError
from ..ops.kalman_filter import diagonal_filter, matrix_filter
from ..ops.linear_scan import linear_scan
from ..ops.matrix_scan import matrix_scan
from ..recurrence.spectra import BlockDiagonal

__all__ = [
    "BasisTransition",
    "CoupledTransition",
    "DenseTransition",
    "DiagonalTransition",
    "PairTransition",
    "PiecewiseTransition",
    "Transition",
    "ZeroTransition",
]

Scan = Callable[..., Tensor]  # `linear_scan`, or a function of the same signature


class Transition(abc.ABC):
    """Base class of transitions: A_t for every step of a batch, or one A for all steps."""

    rounded: ClassVar[bool] = False  # whether `mv` and `scan` agree only to rounding, which accumulates over time

    @abc.abstractmethod
    def mv(self, x: Tensor) -> Tensor:
        """Return A_t x_t for every t.

        Args:
            x: (batch, time, n).
        """

    @abc.abstractmethod
    def scan(self, offset: Tensor, initial: Tensor, reset: Tensor | None = None, *, reverse: bool = False) -> Tensor:
        """Return the states of x_t = A_t x_{t-1} + offset_t, (batch, time, n).

        Args:
            offset: (batch, time, n). May be overwritten when gradients are disabled.
            initial: (batch, n), the state before the first step; with `reverse`, the state after the last.
            reset: (batch, time) bool. Where True, x_t = offset_t.
            reverse: Run from the last step to the first: x_t = A_t x_{t+1} + offset_t.
        """

    @abc.abstractmethod
    def filter(
        self, offset: Tensor, observed: Tensor, strength: Tensor, initial: Tensor, reset: Tensor | None = None
    ) -> Tensor:
        """Run `scan` as a Kalman filter that pulls the states towards observations.

        Args:
            offset: (batch, time, n).
            observed: (batch, time, n), the observations.
            strength: (batch, 1), the weight of the observations.
            initial: (batch, n), the state before the first step.
            reset: (batch, time) bool. Where True, the previous state is ignored.
        """

    @abc.abstractmethod
    def scale(self, factor: float | Tensor) -> "Transition":
        """Return factor · A.

        Args:
            factor: A number, or a tensor (batch, 1, 1) with one factor per sequence.
        """

    @abc.abstractmethod
    def backward(self) -> "Transition":
        """Return the transition of the adjoint recurrence, to be scanned in reverse: A'_{t+1} at step t."""

    @abc.abstractmethod
    def part(self, rows: Tensor | None, start: int, stop: int | None = None) -> "Transition":
        """Return the transition of a part of the batch and of the time.

        Args:
            rows: Indices of the sequences; None for all.
            start: The first step.
            stop: The step after the last; None for the end.
        """

    def concatenate(self, later: "Sequence[Transition]") -> "Transition":
        """Concatenate this transition and `later` ones along time.

        Args:
            later: The transitions of the chunks of time that follow, in order.

        Raises:
            IncompatibleError: If transitions of this class cannot be concatenated.
        """
        raise IncompatibleError(f"a {type(self).__name__} cannot be concatenated along time.")

    @abc.abstractmethod
    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Transition":
        """Return a copy with `change` applied to every tensor of the transition.

        Args:
            change: Maps a tensor to its replacement. Used to send a transition between processes.
        """

    @abc.abstractmethod
    def product(self, steps: int) -> "Transition":
        """Return the product A_{T-1} … A_0 of all steps, as a transition of one step.

        Args:
            steps: The number of steps T.
        """


def _shift_left(values: Tensor, time: int) -> Tensor:
    """Move the values of step t+1 to step t. The last step then holds a value that no scan uses."""
    return values if values.shape[time] == 1 else values.roll(-1, time)


def _select(values: Tensor, rows: Tensor | None, start: int, stop: int | None, time: int) -> Tensor:
    """Select sequences and steps of `values`, whose batch or time dimension may be 1 (broadcast)."""
    if values.shape[time] > 1:
        stop = values.shape[time] if stop is None else stop
        values = values.narrow(time, start, stop - start)
    return values if rows is None or values.shape[0] == 1 else values.index_select(0, rows)


class DiagonalTransition(Transition):
    """A real diagonal, or 2×2 blocks of complex pairs, per step: (batch or 1, time or 1, n).

    Args:
        blocks: The entries of the diagonal.
        by: The function that runs the recurrence, with the signature of `linear_scan`.
    """

    def __init__(self, blocks: BlockDiagonal, by: Scan = linear_scan):
        self.blocks = blocks.map(_as_batch)
        self.by = by

    def mv(self, x: Tensor) -> Tensor:
        return self.blocks.mv(x)

    def scan(self, offset: Tensor, initial: Tensor, reset: Tensor | None = None, *, reverse: bool = False) -> Tensor:
        factors, to_real = self._factors()
        offset, initial = self._to_factors(offset), self._to_factors(initial)
        overwrite = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        return to_real(self.by(factors, offset, initial, reset=reset, reverse=reverse, overwrite=overwrite))

    def filter(
        self, offset: Tensor, observed: Tensor, strength: Tensor, initial: Tensor, reset: Tensor | None = None
    ) -> Tensor:
        factors, to_real = self._factors()
        offset, observed, initial = (self._to_factors(values) for values in (offset, observed, initial))
        return to_real(diagonal_filter(factors, offset, observed, strength, initial, reset=reset))

    def _factors(self) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the diagonal, complex for pairs, and the function from its states back to real states."""
        if self.blocks.imag is None:
            return self.blocks.real, lambda states: states
        return self.blocks.eigenvalues(), lambda states: torch.view_as_real(states).flatten(-2)

    def _to_factors(self, x: Tensor) -> Tensor:
        """Convert real states to the form that `_factors` multiply: pairs become complex numbers."""
        return x if self.blocks.imag is None else torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())

    def scale(self, factor: float | Tensor) -> Transition:
        return self.map_tensors(lambda part: factor * part)

    def backward(self) -> Transition:
        return DiagonalTransition(self.blocks.transpose().map(lambda part: _shift_left(part, 1)), self.by)

    def part(self, rows: Tensor | None, start: int, stop: int | None = None) -> Transition:
        return self.map_tensors(lambda part: _select(part, rows, start, stop, 1))

    def product(self, steps: int) -> Transition:
        factors = self.blocks.eigenvalues()
        whole = factors**steps if factors.shape[1] == 1 else factors.prod(1, keepdim=True)
        if not whole.is_complex():
            return DiagonalTransition(BlockDiagonal(whole))
        pair = (part.repeat_interleave(2, -1) for part in (whole.real, whole.imag))
        return DiagonalTransition(BlockDiagonal(*pair))

    def concatenate(self, later: Sequence[Transition]) -> Transition:
        every = [part for part in (self, *later) if isinstance(part, DiagonalTransition)]
        if self.blocks.real.shape[1] == 1 and self.blocks.real.shape[0] == 1:
            return self  # the same for all steps
        real = torch.cat([part.blocks.real for part in every], 1)
        imags = [part.blocks.imag for part in every if part.blocks.imag is not None]
        return DiagonalTransition(BlockDiagonal(real, torch.cat(imags, 1) if imags else None), self.by)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Transition:
        return DiagonalTransition(self.blocks.map(change), self.by)


def _as_batch(values: Tensor) -> Tensor:
    return values.reshape(1, 1, -1) if values.dim() == 1 else values


class DenseTransition(Transition):
    """A matrix per step.

    Args:
        matrices: (batch or 1, time or 1, n, n).
    """

    rounded = True  # `matrix_scan` multiplies matrices of neighbouring steps, whose product may be larger than a state

    def __init__(self, matrices: Tensor):
        self.matrices = matrices

    def mv(self, x: Tensor) -> Tensor:
        return (self.matrices @ x.unsqueeze(-1)).squeeze(-1)

    def scan(self, offset: Tensor, initial: Tensor, reset: Tensor | None = None, *, reverse: bool = False) -> Tensor:
        return matrix_scan(self.matrices, offset, initial, reset=reset, reverse=reverse)

    def filter(
        self, offset: Tensor, observed: Tensor, strength: Tensor, initial: Tensor, reset: Tensor | None = None
    ) -> Tensor:
        return matrix_filter(self.matrices, offset, observed, strength, initial, reset=reset)

    def scale(self, factor: float | Tensor) -> Transition:
        return DenseTransition((factor.unsqueeze(-1) if isinstance(factor, Tensor) else factor) * self.matrices)

    def backward(self) -> Transition:
        return DenseTransition(_shift_left(self.matrices.mT, 1))

    def part(self, rows: Tensor | None, start: int, stop: int | None = None) -> Transition:
        return DenseTransition(_select(self.matrices, rows, start, stop, 1))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Transition:
        return DenseTransition(change(self.matrices))

    def product(self, steps: int) -> Transition:
        if self.matrices.shape[1] == 1:
            return DenseTransition(torch.linalg.matrix_power(self.matrices, steps))
        products = self.matrices
        while products.shape[1] > 1:  # products of neighbours, in about log2(steps) operations
            pairs = products.shape[1] // 2
            joined = products[:, 1 : 2 * pairs : 2] @ products[:, : 2 * pairs : 2]
            products = torch.cat((joined, products[:, 2 * pairs :]), 1)
        return DenseTransition(products)


class BasisTransition(Transition):
    """A transition in another basis: U A U'.

    Args:
        basis: The orthogonal U, (batch or 1, n, n).
        inner: The transition A in that basis.
    """

    rounded = True

    def __init__(self, basis: Tensor, inner: Transition):
        self.basis = basis
        self.inner = inner

    def _to_basis(self, x: Tensor) -> Tensor:
        return x @ self.basis

    def _state_to_basis(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(-2) @ self.basis).squeeze(-2)

    def _from_basis(self, x: Tensor) -> Tensor:
        return x @ self.basis.mT

    def mv(self, x: Tensor) -> Tensor:
        return self._from_basis(self.inner.mv(self._to_basis(x)))

    def scan(self, offset: Tensor, initial: Tensor, reset: Tensor | None = None, *, reverse: bool = False) -> Tensor:
        return self._from_basis(
            self.inner.scan(self._to_basis(offset), self._state_to_basis(initial), reset, reverse=reverse)
        )

    def filter(
        self, offset: Tensor, observed: Tensor, strength: Tensor, initial: Tensor, reset: Tensor | None = None
    ) -> Tensor:
        inside = self._to_basis
        return self._from_basis(
            self.inner.filter(inside(offset), inside(observed), strength, self._state_to_basis(initial), reset)
        )

    def scale(self, factor: float | Tensor) -> Transition:
        return BasisTransition(self.basis, self.inner.scale(factor))

    def backward(self) -> Transition:
        return BasisTransition(self.basis, self.inner.backward())

    def part(self, rows: Tensor | None, start: int, stop: int | None = None) -> Transition:
        basis = self.basis if rows is None or self.basis.shape[0] == 1 else self.basis.index_select(0, rows)
        return BasisTransition(basis, self.inner.part(rows, start, stop))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Transition:
        return BasisTransition(change(self.basis), self.inner.map_tensors(change))

    def product(self, steps: int) -> Transition:
        return BasisTransition(self.basis, self.inner.product(steps))


class _BlockTransition(Transition):
    """Base class of transitions of small blocks of the state.

    Args:
        matrices: (batch or 1, time or 1, blocks, m, m).
    """

    def __init__(self, matrices: Tensor):
        self.matrices = matrices

    @abc.abstractmethod
    def _to_blocks(self, x: Tensor) -> Tensor:
        """Reshape states (…, blocks·m) to (…, blocks, m)."""

    @abc.abstractmethod
    def _from_blocks(self, x: Tensor) -> Tensor:
        """Reshape blocks (…, blocks, m) to states."""

    def mv(self, x: Tensor) -> Tensor:
        return self._from_blocks((self.matrices @ self._to_blocks(x).unsqueeze(-1)).squeeze(-1))

    def scan(self, offset: Tensor, initial: Tensor, reset: Tensor | None = None, *, reverse: bool = False) -> Tensor:
        states = matrix_scan(
            self.matrices.transpose(1, 2),
            self._to_blocks(offset).transpose(1, 2),
            self._to_blocks(initial),
            reset=None if reset is None else reset.unsqueeze(1).expand(-1, self.matrices.shape[-3], -1),
            reverse=reverse,
        )
        return self._from_blocks(states.transpose(1, 2))

    def filter(
        self, offset: Tensor, observed: Tensor, strength: Tensor, initial: Tensor, reset: Tensor | None = None
    ) -> Tensor:
        blocks = self.matrices.shape[-3]
        states = matrix_filter(
            self.matrices.transpose(1, 2),
            self._to_blocks(offset).transpose(1, 2),
            self._to_blocks(observed).transpose(1, 2),
            strength.unsqueeze(1).expand(-1, blocks, -1),
            self._to_blocks(initial),
            reset=None if reset is None else reset.unsqueeze(1).expand(-1, blocks, -1),
        )
        return self._from_blocks(states.transpose(1, 2))

    def scale(self, factor: float | Tensor) -> Transition:
        return type(self)((factor[..., None, None] if isinstance(factor, Tensor) else factor) * self.matrices)

    def backward(self) -> Transition:
        return type(self)(_shift_left(self.matrices.mT, 1))

    def part(self, rows: Tensor | None, start: int, stop: int | None = None) -> Transition:
        return type(self)(_select(self.matrices, rows, start, stop, 1))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Transition:
        return type(self)(change(self.matrices))

    def product(self, steps: int) -> Transition:
        dense = DenseTransition(self.matrices).product(steps)
        assert isinstance(dense, DenseTransition)
        return type(self)(dense.matrices)

    def concatenate(self, later: Sequence[Transition]) -> Transition:
        return type(self)(
            torch.cat([part.matrices for part in (self, *later) if isinstance(part, _BlockTransition)], 1)
        )


class CoupledTransition(_BlockTransition):
    """A state of two halves, where the i-th entry (or pair) of one half couples only to the i-th of the other.

    Args:
        matrices: (batch or 1, time or 1, blocks, m, m), with m = 2 for real entries and m = 4 for pairs.
    """

    def _to_blocks(self, x: Tensor) -> Tensor:
        blocks, size = self.matrices.shape[-3], self.matrices.shape[-1]
        reshaped: Tensor = x.unflatten(-1, (2, blocks, size // 2)).transpose(-3, -2).flatten(-2)
        return reshaped

    def _from_blocks(self, x: Tensor) -> Tensor:
        reshaped: Tensor = x.unflatten(-1, (2, -1)).transpose(-3, -2).flatten(-3)
        return reshaped


class PairTransition(_BlockTransition):
    """A 2-by-2 matrix for each pair of neighbouring state dimensions, which need not be a complex number.

    Args:
        matrices: (batch or 1, time or 1, n / 2, 2, 2).
    """

    rounded = True  # as for `DenseTransition`

    def _to_blocks(self, x: Tensor) -> Tensor:
        reshaped: Tensor = x.unflatten(-1, (-1, 2))
        return reshaped

    def _from_blocks(self, x: Tensor) -> Tensor:
        return x.flatten(-2)


class PiecewiseTransition(Transition):
    """Consecutive transitions, one per piece of time.

    Args:
        pieces: The transitions, in order.
        lengths: The number of steps of each piece.
    """

    rounded = True

    def __init__(self, pieces: Sequence[Transition], lengths: Sequence[int]):
        self.pieces = pieces
        self.lengths = lengths

    def _iterate_pieces(self) -> Iterator[tuple[Transition, slice]]:
        """Yield each piece with its steps."""
        start = 0
        for piece, length in zip(self.pieces, self.lengths, strict=True):
            yield piece, slice(start, start + length)
            start += length

    def mv(self, x: Tensor) -> Tensor:
        return torch.cat([piece.mv(x[:, times]) for piece, times in self._iterate_pieces()], 1)

    def scan(self, offset: Tensor, initial: Tensor, reset: Tensor | None = None, *, reverse: bool = False) -> Tensor:
        states = []
        pieces = list(self._iterate_pieces())
        for piece, times in reversed(pieces) if reverse else pieces:
            resets = None if reset is None else reset[:, times]
            states.append(piece.scan(offset[:, times], initial, resets, reverse=reverse))
            initial = states[-1][:, 0 if reverse else -1]
        return torch.cat(states[::-1] if reverse else states, 1)

    def filter(
        self, offset: Tensor, observed: Tensor, strength: Tensor, initial: Tensor, reset: Tensor | None = None
    ) -> Tensor:
        states = []
        for piece, times in self._iterate_pieces():
            resets = None if reset is None else reset[:, times]
            states.append(piece.filter(offset[:, times], observed[:, times], strength, initial, resets))
            initial = states[-1][:, -1]
        return torch.cat(states, 1)

    def scale(self, factor: float | Tensor) -> Transition:
        return PiecewiseTransition([piece.scale(factor) for piece in self.pieces], self.lengths)

    def backward(self) -> Transition:
        """Return the adjoint transition with the same pieces.

        In the exact adjoint the boundaries of the pieces are one step earlier. They are not moved, because the pieces
        only approximate the Jacobian.
        """
        return PiecewiseTransition([piece.backward() for piece in self.pieces], self.lengths)

    def part(self, rows: Tensor | None, start: int, stop: int | None = None) -> Transition:
        stop = sum(self.lengths) if stop is None else stop
        left = [
            (piece.part(rows, 0), min(stop, times.stop) - max(start, times.start))
            for piece, times in self._iterate_pieces()
        ]
        left = [(piece, length) for piece, length in left if length > 0]
        return PiecewiseTransition([piece for piece, _ in left], [length for _, length in left])

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Transition:
        return PiecewiseTransition([piece.map_tensors(change) for piece in self.pieces], self.lengths)

    def product(self, steps: int) -> Transition:
        raise IncompatibleError(
            "the product over time of a transition in several pieces is not implemented. Use one mean: "
            "KoopmanDEER(means=1)."
        )


class ZeroTransition(Transition):
    """A = 0: the next state does not depend on this one."""

    def mv(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def scan(self, offset: Tensor, initial: Tensor, reset: Tensor | None = None, *, reverse: bool = False) -> Tensor:
        return offset

    def filter(
        self, offset: Tensor, observed: Tensor, strength: Tensor, initial: Tensor, reset: Tensor | None = None
    ) -> Tensor:
        pull = strength.unsqueeze(-1)
        return (offset + pull * observed) / (1 + pull)

    def scale(self, factor: float | Tensor) -> Transition:
        return self

    def backward(self) -> Transition:
        return self

    def part(self, rows: Tensor | None, start: int, stop: int | None = None) -> Transition:
        return self

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Transition:
        return self

    def product(self, steps: int) -> Transition:
        return self
