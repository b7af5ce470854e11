"""Gains: what normalises the input for a given memory (sec:selective_ADPTNet)."""

import abc

import torch
from torch import Tensor, nn

from ...optim import NoDecay
from ...spec import Spec, spec
from ..spectra import BlockDiagonal, Spectrum
from ..spectra.base import compute_dtype

__all__ = ["EMA", "LRU", "ZOH", "Gain", "GainSpec"]


class GainSpec(Spec, abc.ABC):
    """The description of a gain.

    Attributes:
        tied: The gain follows the eigenvalues while they learn. If not, it starts there and learns on its own.
    """

    tied: bool

    @abc.abstractmethod
    def of(self, spectrum: Spectrum, dt: Tensor | None = None) -> BlockDiagonal:
        """The gain that belongs to the eigenvalues of `spectrum`."""

    def build(self, spectrum: Spectrum) -> "Gain":
        """Makes the gain for `spectrum`, which it does not own."""
        return Gain(self, spectrum)


class Gain(NoDecay):
    """A gain in use: a function of the spectrum, or a parameter of its own."""

    def __init__(self, spec: GainSpec, spectrum: Spectrum):
        super().__init__()
        self.spec = spec
        self.real: nn.Parameter | None = None
        self.imag: nn.Parameter | None = None
        if not spec.tied:
            start = spec.of(spectrum)
            dtype = next(spectrum.parameters()).dtype
            self.pair = 1 if spectrum().imag is None else 2  # one gain for a pair, as it has one eigenvalue
            self.real = _free(start.real[:: self.pair], dtype)
            self.imag = None if start.imag is None else _free(start.imag[:: self.pair], dtype)

    def forward(self, spectrum: Spectrum, dt: Tensor | None = None) -> BlockDiagonal:
        if self.real is None:
            return self.spec.of(spectrum, dt)
        return BlockDiagonal(self._spread(self.real), None if self.imag is None else self._spread(self.imag))

    def _spread(self, values: Tensor) -> Tensor:
        return values.to(compute_dtype(values.dtype)).repeat_interleave(self.pair)


def _free(start: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(start.detach().to(dtype, copy=True))


@spec
class EMA(GainSpec):
    """1 - |λ̄| (eq:generic_ema): the state is a moving average of the input."""

    tied: bool = True

    def of(self, spectrum: Spectrum, dt: Tensor | None = None) -> BlockDiagonal:
        return BlockDiagonal(-torch.expm1(spectrum.log_modulus(dt)))


@spec
class LRU(GainSpec):
    """√(1 - |λ̄|²) (eq:lru_normalisation): white input gives a state of unit variance."""

    tied: bool = True

    def of(self, spectrum: Spectrum, dt: Tensor | None = None) -> BlockDiagonal:
        squared = -torch.expm1(2 * spectrum.log_modulus(dt))
        still = squared == 0  # a step of length zero, where the square root has no derivative
        return BlockDiagonal(torch.where(still, 1.0, squared).sqrt().masked_fill(still, 0.0))


@spec
class ZOH(GainSpec):
    """(1 - λ̄)/λ (eq:zoh_normalisation with its sign put right): a continuous system with its input held each step."""

    tied: bool = True

    def of(self, spectrum: Spectrum, dt: Tensor | None = None) -> BlockDiagonal:
        return spectrum.hold(dt)
