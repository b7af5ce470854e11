"""What a spectrum is: a source of discrete eigenvalues Λ̄ on a real state.

A complex eigenvalue a + ib is the real 2-by-2 block [[a, -b], [b, a]] on two neighbouring numbers of the state, so
the state, the rotations and every bound stay real.
"""

import abc
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..._typing import Device, DType, Matrix, Vector
from ...optim import NoDecay
from ...spec import Spec

__all__ = ["BlockDiagonal", "Spectrum", "SpectrumSpec", "compute_dtype"]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype recurrences run in for parameters of `dtype`: never below float32."""
    return torch.promote_types(dtype, torch.float32)


class BlockDiagonal(NamedTuple):
    """A diagonal matrix, or one of 2-by-2 blocks [[a, -b], [b, a]] when `imag` is given."""

    real: Tensor  # (n,), or (*b, n) where steps differ: a, twice for a pair
    imag: Tensor | None = None  # likewise: b, twice for a pair

    def mv(self, x: Vector) -> Vector:
        """Λ x."""
        if self.imag is None:
            return self.real * x
        return self.real * x + self.imag * _quarter_turn(x)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "BlockDiagonal":
        """The same change made to each part."""
        return BlockDiagonal(change(self.real), None if self.imag is None else change(self.imag))

    def transposed(self) -> "BlockDiagonal":
        """Λ'."""
        return BlockDiagonal(self.real, None if self.imag is None else -self.imag)

    def modulus(self) -> Tensor:
        """|λ| of each number of the state."""
        return self.real.abs() if self.imag is None else torch.hypot(self.real, self.imag)

    def eigenvalues(self) -> Tensor:
        """One number each: real (n,), or complex (n/2,), the member of each conjugate pair with a + ib."""
        return self.real if self.imag is None else torch.complex(self.real[..., ::2], self.imag[..., ::2])

    def heads(self, count: int) -> "BlockDiagonal":
        """The same, with the state divided into `count` equal parts along a dimension of their own."""
        real = self.real.unflatten(-1, (count, -1))
        return BlockDiagonal(real, None if self.imag is None else self.imag.unflatten(-1, (count, -1)))

    def dense(self) -> Matrix:
        """Λ as a matrix."""
        size = self.real.shape[-1]
        eye = torch.eye(size, dtype=self.real.dtype, device=self.real.device).expand(*self.real.shape, size)
        imag = None if self.imag is None else self.imag.unsqueeze(-2)
        return BlockDiagonal(self.real.unsqueeze(-2), imag).mv(eye).mT


def _quarter_turn(x: Tensor) -> Tensor:
    """Each pair (p, q) becomes (-q, p): multiplication by i."""
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((-second, first), -1).flatten(-2)


class Spectrum(NoDecay, abc.ABC):
    """A built spectrum. It owns its parameters.

    Each method takes `dt`, the length of a step in units of the usual one, (*b, 1): Λ̄ comes from continuous time, so
    steps may differ. Without it every step is 1.
    """

    @abc.abstractmethod
    def forward(self, dt: Tensor | None = None) -> BlockDiagonal:
        """Λ̄, in at least float32."""

    @abc.abstractmethod
    def log_modulus(self, dt: Tensor | None = None) -> Tensor:
        """ln |λ̄| of each number of the state; -inf where λ̄ = 0. Exact close to |λ̄| = 1, where Λ̄ is not."""

    @abc.abstractmethod
    def hold(self, dt: Tensor | None = None) -> BlockDiagonal:
        """What one step of a held input adds up to: (1 - λ̄) / λ, of the magnitude where λ̄ < 0, and 1 where λ̄ = 0."""


class SpectrumSpec(Spec, abc.ABC):
    """The description of a spectrum."""

    @abc.abstractmethod
    def build(self, state_size: int, *, expansion: int = 1, device: Device = None, dtype: DType = None) -> Spectrum:
        """Makes the spectrum.

        Args:
            state_size: Size of the real state.
            expansion: Numbers of the state for each channel of the input, where the input is expanded (neighbours in
                the state); families that are defined per channel then repeat over the channels.
        """

    @property
    def is_complex(self) -> bool:
        """Whether eigenvalues come in complex pairs."""
        return False

    @property
    def has_negative(self) -> bool:
        """Whether some real eigenvalue is negative."""
        return False

    @property
    def grows(self) -> bool:
        """Whether some |λ̄| starts at 1 or above."""
        return False
