"""Gains: the normalisation of the input for given timescales (sec:selective_ADPTNet)."""

import abc

import torch
from torch import Tensor, nn

from ..._dtype import compute_dtype
from ...optim import NoDecay
from ...spec import Spec, spec
from ..spectra import BlockDiagonal, Spectrum

__all__ = ["EMA", "LRU", "ZOH", "Gain", "GainSpec", "evaluate_lru"]


class GainSpec(Spec, abc.ABC):
    """Base class of the specs of a gain.

    Attributes:
        tied: Compute the gain from the eigenvalues at every call. If False, it is a separate parameter, initialised
            from the eigenvalues.
    """

    tied: bool

    @abc.abstractmethod
    def evaluate(self, spectrum: Spectrum, dt: Tensor | None = None) -> BlockDiagonal:
        """Return the gain for the eigenvalues of a spectrum.

        Args:
            spectrum: The spectrum.
            dt: The length of the steps, (*b, 1); None if all are 1.
        """

    def build(self, spectrum: Spectrum) -> "Gain":
        """Build the gain.

        Args:
            spectrum: The spectrum it belongs to, which does not become a submodule.
        """
        return Gain(self, spectrum)


class Gain(NoDecay):
    """A gain: a function of the spectrum if tied, a separate parameter otherwise.

    Args:
        spec: The spec of the gain.
        spectrum: The spectrum that a free gain is initialised from.
    """

    def __init__(self, spec: GainSpec, spectrum: Spectrum):
        super().__init__()
        self.spec = spec
        self.real: nn.Parameter | None = None
        self.imag: nn.Parameter | None = None
        if not spec.tied:
            start = spec.evaluate(spectrum)
            dtype = next(spectrum.parameters()).dtype
            self.pair = 1 if spectrum().imag is None else 2  # a complex pair has one eigenvalue, and one gain
            self.real = _make_parameter(start.real[:: self.pair], dtype)
            self.imag = None if start.imag is None else _make_parameter(start.imag[:: self.pair], dtype)

    def forward(self, spectrum: Spectrum, dt: Tensor | None = None) -> BlockDiagonal:
        """Return the gain of each state dimension.

        Args:
            spectrum: The spectrum that a tied gain is a function of.
            dt: The length of each step, (*b, 1), or None. A free gain does not depend on it.
        """
        if self.real is None:
            return self.spec.evaluate(spectrum, dt)
        return BlockDiagonal(self._expand(self.real), None if self.imag is None else self._expand(self.imag))

    def _expand(self, values: Tensor) -> Tensor:
        """Repeat the value of a pair for both of its state dimensions."""
        return values.to(compute_dtype(values.dtype)).repeat_interleave(self.pair)


def _make_parameter(start: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(start.detach().to(dtype, copy=True))


@spec
class EMA(GainSpec):
    """The gain 1 - |λ̄| (eq:generic_ema): the state is an exponential moving average of the input."""

    tied: bool = True

    def evaluate(self, spectrum: Spectrum, dt: Tensor | None = None) -> BlockDiagonal:
        return BlockDiagonal(-torch.expm1(spectrum.log_modulus(dt)))


@spec
class LRU(GainSpec):
    """The gain √(1 - |λ̄|²) of the Linear Recurrent Unit (eq:lru_normalisation).

    White-noise input gives a state of unit variance."""

    tied: bool = True

    def evaluate(self, spectrum: Spectrum, dt: Tensor | None = None) -> BlockDiagonal:
        return BlockDiagonal(evaluate_lru(spectrum.log_modulus(dt)))


def evaluate_lru(log_modulus: Tensor) -> Tensor:
    """Return √(1 - |λ̄|²).

    Args:
        log_modulus: ln |λ̄|.
    """
    squared = -torch.expm1(2 * log_modulus)
    zero = squared == 0  # a step of length zero, where the square root has no derivative
    return torch.where(zero, 1.0, squared).sqrt().masked_fill(zero, 0.0)


@spec
class ZOH(GainSpec):
    """The gain (1 - λ̄)/λ of a zero-order hold of a continuous-time system (eq:zoh_normalisation, sign corrected)."""

    tied: bool = True

    def evaluate(self, spectrum: Spectrum, dt: Tensor | None = None) -> BlockDiagonal:
        return spectrum.zero_order_hold(dt)
