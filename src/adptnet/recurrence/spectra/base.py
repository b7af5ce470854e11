"""Base classes of the spectra: discrete eigenvalues Λ̄ on a real state.

A complex eigenvalue a + ib is the real 2-by-2 block [[a, -b], [b, a]] on two neighbouring state dimensions, so the
state, the rotations and every bound stay real.
"""

import abc
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..._typing import Device, DType, Matrix, Vector
from ...optim import NoDecay
from ...spec import Spec

__all__ = ["BlockDiagonal", "Spectrum", "SpectrumSpec"]


class BlockDiagonal(NamedTuple):
    """A diagonal matrix, or a matrix of 2-by-2 blocks [[a, -b], [b, a]] if `imag` is not None."""

    real: Tensor  # (n,), or (*b, n) if it varies between steps: a, repeated for both dimensions of a pair
    imag: Tensor | None = None  # likewise for b

    def mv(self, x: Vector) -> Vector:
        """Return Λ x.

        Args:
            x: (*b, n).
        """
        if self.imag is None:
            return self.real * x
        return self.real * x + self.imag * _quarter_turn(x)

    def mm(self, matrix: Tensor) -> Matrix:
        """Return Λ times a matrix, (*b, n, n).

        Args:
            matrix: (*b, n, n), or (n, n).
        """
        rows = self.map(lambda part: part.unsqueeze(-2))
        return rows.mv(matrix.mT.expand(*self.real.shape[:-1], *matrix.shape[-2:])).mT

    def map(self, function: Callable[[Tensor], Tensor]) -> "BlockDiagonal":
        """Return the blocks with a function applied to `real` and to `imag`.

        Args:
            function: The function of one tensor.
        """
        return BlockDiagonal(function(self.real), None if self.imag is None else function(self.imag))

    def pairs(self) -> "BlockDiagonal":
        """Return the nearest matrix of 2-by-2 blocks: of real entries p, q of a pair their mean."""
        if self.imag is not None:
            return self
        mean = self.real.unflatten(-1, (-1, 2)).mean(-1).repeat_interleave(2, -1)
        return BlockDiagonal(mean, torch.zeros_like(mean))

    def pair_matrices(self) -> Tensor:
        """Return the matrix of each pair of state dimensions, (*b, n / 2, 2, 2)."""
        real = self.real.unflatten(-1, (-1, 2))
        imag = torch.zeros_like(real) if self.imag is None else self.imag.unflatten(-1, (-1, 2))
        first = torch.stack((real[..., 0], -imag[..., 0]), -1)
        second = torch.stack((imag[..., 1], real[..., 1]), -1)
        return torch.stack((first, second), -2)

    def multiply(self, other: "BlockDiagonal") -> "BlockDiagonal":
        """Return the product with another matrix of 2-by-2 blocks.

        Args:
            other: The other factor; both have an `imag`.
        """
        assert self.imag is not None
        assert other.imag is not None
        return BlockDiagonal(
            self.real * other.real - self.imag * other.imag, self.real * other.imag + self.imag * other.real
        )

    def transpose(self) -> "BlockDiagonal":
        """Return the transpose Λ'."""
        return BlockDiagonal(self.real, None if self.imag is None else -self.imag)

    def modulus(self) -> Tensor:
        """Return |λ| for each state dimension, (*b, n)."""
        return self.real.abs() if self.imag is None else torch.hypot(self.real, self.imag)

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues: real (n,), or complex (n/2,) with a + ib for each conjugate pair a ± ib."""
        return self.real if self.imag is None else torch.complex(self.real[..., ::2], self.imag[..., ::2])

    def split_heads(self, count: int) -> "BlockDiagonal":
        """Return the blocks with the state divided into equal parts, (*b, count, n / count).

        Args:
            count: The number of parts.
        """
        return self.map(lambda part: part.unflatten(-1, (count, -1)))

    def dense(self) -> Matrix:
        """Return Λ as a matrix, (*b, n, n)."""
        size = self.real.shape[-1]
        eye = torch.eye(size, dtype=self.real.dtype, device=self.real.device).expand(*self.real.shape, size)
        imag = None if self.imag is None else self.imag.unsqueeze(-2)
        return BlockDiagonal(self.real.unsqueeze(-2), imag).mv(eye).mT


def _quarter_turn(x: Tensor) -> Tensor:
    """Map each pair (p, q) to (-q, p): multiplication by i."""
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((-second, first), -1).flatten(-2)


class Spectrum(NoDecay, abc.ABC):
    """Base class of the modules that hold the eigenvalues and their parameters.

    Each method takes `dt`, (*b, 1), the length of each step in units of the regular step: Λ̄ is the discretisation of a
    continuous-time system, so that steps may differ in length. None means that every step has length 1.
    """

    @abc.abstractmethod
    def forward(self, dt: Tensor | None = None) -> BlockDiagonal:
        """Return Λ̄, in at least float32.

        Args:
            dt: The length of each step, (*b, 1), or None.
        """

    @abc.abstractmethod
    def log_modulus(self, dt: Tensor | None = None) -> Tensor:
        """Return ln |λ̄| for each state dimension; -inf where λ̄ = 0.

        It is accurate close to |λ̄| = 1, where the logarithm of a rounded |λ̄| is not.

        Args:
            dt: The length of each step, (*b, 1), or None.
        """

    @abc.abstractmethod
    def zero_order_hold(self, dt: Tensor | None = None) -> BlockDiagonal:
        """Return the zero-order-hold gain (1 - λ̄) / λ: the effect of an input that is constant during one step.

        A negative eigenvalue has the gain of its modulus. The gain is 1 where λ̄ = 0.

        Args:
            dt: The length of each step, (*b, 1), or None.
        """

    def log_step(self) -> Tensor | None:
        """Return ln Δt for each state dimension, (n,); None for a spectrum without step sizes."""
        return None


class SpectrumSpec(Spec, abc.ABC):
    """Base class of the specs of a spectrum."""

    @abc.abstractmethod
    def build(self, state_size: int, *, expansion: int = 1, device: Device = None, dtype: DType = None) -> Spectrum:
        """Build the spectrum.

        Args:
            state_size: Dimension of the real state.
            expansion: State dimensions per input channel (neighbours in the state), if the input is expanded; families
                that are defined per channel then repeat over the channels.
            device: Device of the parameters.
            dtype: Dtype of the parameters.
        """

    @property
    def is_complex(self) -> bool:
        """True if eigenvalues come in complex pairs."""
        return False

    @property
    def has_negative(self) -> bool:
        """True if some real eigenvalue is negative."""
        return False

    @property
    def grows(self) -> bool:
        """True if some |λ̄| is initialised at 1 or above."""
        return False
