"""Transitions: the A of x_t = A_t x_{t-1} + b_t, as what a parallel solver asks of it.

Each knows how to act, how to run the whole recurrence at once (`scan`), the same with a pull towards given states
(`filter`), and what it is when time runs backwards (`backward`). States are (batch, time, n).
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

__all__ = ["Coupled", "Dense", "Diagonal", "InBasis", "Piecewise", "Transition", "Zero"]

Scan = Callable[..., Tensor]  # linear_scan, or another of the same signature


class Transition(abc.ABC):
    """A_t for every step of a batch, or one that holds for all steps."""

    rounded: ClassVar[bool] = False  # whether `mv` and `scan` agree only to rounding, which a long memory adds up

    @abc.abstractmethod
    def mv(self, x: Tensor) -> Tensor:
        """A_t x_t for every t."""

    @abc.abstractmethod
    def scan(self, offset: Tensor, initial: Tensor, reset: Tensor | None = None, *, reverse: bool = False) -> Tensor:
        """x_t = A_t x_{t-1} + offset_t from `initial`; where `reset`, x_t = offset_t. In `reverse`, from x_{t+1}.

        Without a graph `offset` may be overwritten.
        """

    @abc.abstractmethod
    def filter(
        self, offset: Tensor, observed: Tensor, strength: Tensor, initial: Tensor, reset: Tensor | None = None
    ) -> Tensor:
        """`scan` with a pull of `strength` (batch, 1) towards `observed`, as a Kalman filter weighs it."""

    @abc.abstractmethod
    def scaled(self, factor: float | Tensor) -> "Transition":
        """factor A, with one factor for all or (batch, 1, 1)."""

    @abc.abstractmethod
    def backward(self) -> "Transition":
        """The transition of the adjoint, to be scanned in reverse: A'_{t+1} in the place of A_t."""

    @abc.abstractmethod
    def part(self, rows: Tensor | None, start: int, stop: int | None = None) -> "Transition":
        """Of the sequences `rows` (all if None), steps `start` to `stop`."""

    def followed_by(self, later: "Sequence[Transition]") -> "Transition":
        """This one and those of later stretches of time, as one."""
        raise IncompatibleError(f"{type(self).__name__} transitions cannot be put one after another.")

    @abc.abstractmethod
    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Transition":
        """The same with every tensor it is made of changed: to take it apart, send it and put it together again."""

    @abc.abstractmethod
    def product(self, steps: int) -> "Transition":
        """What `steps` steps make of the state that enters them: A_{T-1} … A_0, as a transition of one step."""


def _next(values: Tensor, time: int) -> Tensor:
    """Values of step t+1 in the place of t; the last is one that nothing enters."""
    return values if values.shape[time] == 1 else values.roll(-1, time)


def _part(values: Tensor, rows: Tensor | None, start: int, stop: int | None, time: int) -> Tensor:
    if values.shape[time] > 1:
        stop = values.shape[time] if stop is None else stop
        values = values.narrow(time, start, stop - start)
    return values if rows is None or values.shape[0] == 1 else values.index_select(0, rows)


class Diagonal(Transition):
    """Numbers, or complex pairs, for each step (batch or 1, time or 1, n). `by` is what runs the recurrence."""

    def __init__(self, blocks: BlockDiagonal, by: Scan = linear_scan):
        self.blocks = blocks.mapped(_rows)
        self.by = by

    def mv(self, x: Tensor) -> Tensor:
        return self.blocks.mv(x)

    def scan(self, offset: Tensor, initial: Tensor, reset: Tensor | None = None, *, reverse: bool = False) -> Tensor:
        factors, plain = self._factors()
        free = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        return plain(
            self.by(factors, self._seen(offset), self._seen(initial), reset=reset, reverse=reverse, overwrite=free)
        )

    def filter(
        self, offset: Tensor, observed: Tensor, strength: Tensor, initial: Tensor, reset: Tensor | None = None
    ) -> Tensor:
        factors, plain = self._factors()
        seen = self._seen
        return plain(diagonal_filter(factors, seen(offset), seen(observed), strength, seen(initial), reset=reset))

    def _factors(self) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        if self.blocks.imag is None:
            return self.blocks.real, lambda states: states
        return self.blocks.eigenvalues(), lambda states: torch.view_as_real(states).flatten(-2)

    def _seen(self, x: Tensor) -> Tensor:
        """The state as the numbers the transition multiplies: pairs as complex numbers."""
        return x if self.blocks.imag is None else torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())

    def scaled(self, factor: float | Tensor) -> Transition:
        return self.mapped(lambda part: factor * part)

    def backward(self) -> Transition:
        return Diagonal(self.blocks.transposed().mapped(lambda part: _next(part, 1)), self.by)

    def part(self, rows: Tensor | None, start: int, stop: int | None = None) -> Transition:
        return self.mapped(lambda part: _part(part, rows, start, stop, 1))

    def product(self, steps: int) -> Transition:
        factors = self.blocks.eigenvalues()
        whole = factors**steps if factors.shape[1] == 1 else factors.prod(1, keepdim=True)
        if not whole.is_complex():
            return Diagonal(BlockDiagonal(whole))
        pair = (part.repeat_interleave(2, -1) for part in (whole.real, whole.imag))
        return Diagonal(BlockDiagonal(*pair))

    def followed_by(self, later: Sequence[Transition]) -> Transition:
        every = [part for part in (self, *later) if isinstance(part, Diagonal)]
        if self.blocks.real.shape[1] == 1 and self.blocks.real.shape[0] == 1:
            return self  # the same at every step
        real = torch.cat([part.blocks.real for part in every], 1)
        imags = [part.blocks.imag for part in every if part.blocks.imag is not None]
        return Diagonal(BlockDiagonal(real, torch.cat(imags, 1) if imags else None), self.by)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Transition:
        return Diagonal(self.blocks.mapped(change), self.by)


def _rows(values: Tensor) -> Tensor:
    return values.reshape(1, 1, -1) if values.dim() == 1 else values


class Dense(Transition):
    """Matrices for each step, (batch or 1, time or 1, n, n)."""

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

    def scaled(self, factor: float | Tensor) -> Transition:
        return Dense((factor.unsqueeze(-1) if isinstance(factor, Tensor) else factor) * self.matrices)

    def backward(self) -> Transition:
        return Dense(_next(self.matrices.mT, 1))

    def part(self, rows: Tensor | None, start: int, stop: int | None = None) -> Transition:
        return Dense(_part(self.matrices, rows, start, stop, 1))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Transition:
        return Dense(change(self.matrices))

    def product(self, steps: int) -> Transition:
        if self.matrices.shape[1] == 1:
            return Dense(torch.linalg.matrix_power(self.matrices, steps))
        whole = self.matrices[:, :1]
        for t in range(1, steps):
            whole = self.matrices[:, t : t + 1] @ whole
        return Dense(whole)


class InBasis(Transition):
    """U A U' for an orthogonal U, one for each sequence or for all, (batch or 1, n, n)."""

    rounded = True

    def __init__(self, basis: Tensor, inner: Transition):
        self.basis = basis
        self.inner = inner

    def _inside(self, x: Tensor) -> Tensor:
        return x @ self.basis

    def _state_inside(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(-2) @ self.basis).squeeze(-2)

    def _outside(self, x: Tensor) -> Tensor:
        return x @ self.basis.mT

    def mv(self, x: Tensor) -> Tensor:
        return self._outside(self.inner.mv(self._inside(x)))

    def scan(self, offset: Tensor, initial: Tensor, reset: Tensor | None = None, *, reverse: bool = False) -> Tensor:
        return self._outside(self.inner.scan(self._inside(offset), self._state_inside(initial), reset, reverse=reverse))

    def filter(
        self, offset: Tensor, observed: Tensor, strength: Tensor, initial: Tensor, reset: Tensor | None = None
    ) -> Tensor:
        inside = self._inside
        return self._outside(
            self.inner.filter(inside(offset), inside(observed), strength, self._state_inside(initial), reset)
        )

    def scaled(self, factor: float | Tensor) -> Transition:
        return InBasis(self.basis, self.inner.scaled(factor))

    def backward(self) -> Transition:
        return InBasis(self.basis, self.inner.backward())

    def part(self, rows: Tensor | None, start: int, stop: int | None = None) -> Transition:
        basis = self.basis if rows is None or self.basis.shape[0] == 1 else self.basis.index_select(0, rows)
        return InBasis(basis, self.inner.part(rows, start, stop))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Transition:
        return InBasis(change(self.basis), self.inner.mapped(change))

    def product(self, steps: int) -> Transition:
        return InBasis(self.basis, self.inner.product(steps))


class Coupled(Transition):
    """A state of two halves, whose i-th numbers (or pairs) act on each other and on nothing else.

    `matrices` is (batch or 1, time or 1, blocks, m, m): m = 2 for numbers, 4 for pairs.
    """

    def __init__(self, matrices: Tensor):
        self.matrices = matrices

    def _apart(self, x: Tensor) -> Tensor:
        """(…, 2·blocks·m/2) to (…, blocks, m)."""
        blocks, size = self.matrices.shape[-3], self.matrices.shape[-1]
        apart: Tensor = x.unflatten(-1, (2, blocks, size // 2)).transpose(-3, -2).flatten(-2)
        return apart

    def _together(self, x: Tensor) -> Tensor:
        together: Tensor = x.unflatten(-1, (2, -1)).transpose(-3, -2).flatten(-3)
        return together

    def mv(self, x: Tensor) -> Tensor:
        return self._together((self.matrices @ self._apart(x).unsqueeze(-1)).squeeze(-1))

    def scan(self, offset: Tensor, initial: Tensor, reset: Tensor | None = None, *, reverse: bool = False) -> Tensor:
        states = matrix_scan(
            self.matrices.transpose(1, 2),
            self._apart(offset).transpose(1, 2),
            self._apart(initial),
            reset=None if reset is None else reset.unsqueeze(1).expand(-1, self.matrices.shape[-3], -1),
            reverse=reverse,
        )
        return self._together(states.transpose(1, 2))

    def filter(
        self, offset: Tensor, observed: Tensor, strength: Tensor, initial: Tensor, reset: Tensor | None = None
    ) -> Tensor:
        blocks = self.matrices.shape[-3]
        states = matrix_filter(
            self.matrices.transpose(1, 2),
            self._apart(offset).transpose(1, 2),
            self._apart(observed).transpose(1, 2),
            strength.unsqueeze(1).expand(-1, blocks, -1),
            self._apart(initial),
            reset=None if reset is None else reset.unsqueeze(1).expand(-1, blocks, -1),
        )
        return self._together(states.transpose(1, 2))

    def scaled(self, factor: float | Tensor) -> Transition:
        return Coupled((factor[..., None, None] if isinstance(factor, Tensor) else factor) * self.matrices)

    def backward(self) -> Transition:
        return Coupled(_next(self.matrices.mT, 1))

    def part(self, rows: Tensor | None, start: int, stop: int | None = None) -> Transition:
        return Coupled(_part(self.matrices, rows, start, stop, 1))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Transition:
        return Coupled(change(self.matrices))

    def product(self, steps: int) -> Transition:
        dense = Dense(self.matrices).product(steps)
        assert isinstance(dense, Dense)
        return Coupled(dense.matrices)

    def followed_by(self, later: Sequence[Transition]) -> Transition:
        return Coupled(torch.cat([part.matrices for part in (self, *later) if isinstance(part, Coupled)], 1))


class Piecewise(Transition):
    """One transition after another, each for as many steps as `lengths` says."""

    rounded = True

    def __init__(self, pieces: Sequence[Transition], lengths: Sequence[int]):
        self.pieces = pieces
        self.lengths = lengths

    def _stretches(self) -> Iterator[tuple[Transition, slice]]:
        start = 0
        for piece, length in zip(self.pieces, self.lengths, strict=True):
            yield piece, slice(start, start + length)
            start += length

    def mv(self, x: Tensor) -> Tensor:
        return torch.cat([piece.mv(x[:, times]) for piece, times in self._stretches()], 1)

    def scan(self, offset: Tensor, initial: Tensor, reset: Tensor | None = None, *, reverse: bool = False) -> Tensor:
        states = []
        stretches = list(self._stretches())
        for piece, times in reversed(stretches) if reverse else stretches:
            resets = None if reset is None else reset[:, times]
            states.append(piece.scan(offset[:, times], initial, resets, reverse=reverse))
            initial = states[-1][:, 0 if reverse else -1]
        return torch.cat(states[::-1] if reverse else states, 1)

    def filter(
        self, offset: Tensor, observed: Tensor, strength: Tensor, initial: Tensor, reset: Tensor | None = None
    ) -> Tensor:
        states = []
        for piece, times in self._stretches():
            resets = None if reset is None else reset[:, times]
            states.append(piece.filter(offset[:, times], observed[:, times], strength, initial, resets))
            initial = states[-1][:, -1]
        return torch.cat(states, 1)

    def scaled(self, factor: float | Tensor) -> Transition:
        return Piecewise([piece.scaled(factor) for piece in self.pieces], self.lengths)

    def backward(self) -> Transition:
        """Of the same stretches, their ends one step off: as good for a surrogate."""
        return Piecewise([piece.backward() for piece in self.pieces], self.lengths)

    def part(self, rows: Tensor | None, start: int, stop: int | None = None) -> Transition:
        stop = sum(self.lengths) if stop is None else stop
        left = [
            (piece.part(rows, 0), min(stop, times.stop) - max(start, times.start)) for piece, times in self._stretches()
        ]
        left = [(piece, length) for piece, length in left if length > 0]
        return Piecewise([piece for piece, _ in left], [length for _, length in left])

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Transition:
        return Piecewise([piece.mapped(change) for piece in self.pieces], self.lengths)

    def product(self, steps: int) -> Transition:
        raise IncompatibleError(
            "a transition of several pieces has no one product. Use one mean: KoopmanDEER(means=1)."
        )


class Zero(Transition):
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

    def scaled(self, factor: float | Tensor) -> Transition:
        return self

    def backward(self) -> Transition:
        return self

    def part(self, rows: Tensor | None, start: int, stop: int | None = None) -> Transition:
        return self

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Transition:
        return self

    def product(self, steps: int) -> Transition:
        return self
