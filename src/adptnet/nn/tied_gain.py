"""Real eigenvalues and the gain that is tied to them in closed form, with derivatives, for short calls in training.

With r = exp(log_decay + log_dt), λ̄ = exp(-r). Both logarithms have the same derivatives: ∂λ̄ = -r λ̄; ∂gain = -∂λ̄ for
the gain 1 - λ̄ of EMA, and -∂λ̄ λ̄/gain for the gain √(1 - λ̄²) of LRU.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.adpt_layer import LayerVectors, LinearizedVectors, VectorSource
from ..recurrence.drive.gain import EMA, LRU, Gain, evaluate_lru
from ..recurrence.spectra.continuous import ContinuousSpectrum

__all__ = ["TiedGain"]


class TiedGain(VectorSource):
    """λ̄ and gain as functions of `log_decay` and `log_dt`, with the operations of the modules.

    Args:
        gain: The gain.
        beta: A fixed β, (heads,); None without a rotation.
        source_count: The number of sources: 1 without `log_dt`, otherwise 2.
    """

    def __init__(self, gain: Gain, beta: Tensor | None, source_count: int):
        self.is_ema = type(gain.spec) is EMA
        self.beta = beta
        self.source_count = source_count

    @staticmethod
    def find_parameters(spectrum: Any, gain: Gain) -> list[Tensor] | None:
        """Return `log_decay`, and `log_dt` if there is one; None if spectrum and gain are of another kind.

        Args:
            spectrum: The spectrum.
            gain: The gain.
        """
        if type(spectrum) is not ContinuousSpectrum or type(gain.spec) not in (EMA, LRU) or gain.real is not None:
            return None
        decay, dt = spectrum.log_decay, spectrum.log_dt
        if spectrum.frequency is not None or spectrum.log_frequency is not None:
            return None
        if dt is None:
            return [decay]
        return [decay, dt] if decay.shape == dt.shape else None

    def evaluate(self, sources: Sequence[Any]) -> LayerVectors:
        log_modulus = _evaluate_log_modulus(sources)
        if self.is_ema:
            return LayerVectors(log_modulus.exp(), None, -torch.expm1(log_modulus), None, self.beta)
        return LayerVectors(log_modulus.exp(), None, evaluate_lru(log_modulus), None, self.beta)

    def linearize(self, sources: Sequence[Any]) -> LinearizedVectors:
        vectors = self.evaluate(sources)
        of_real = vectors.real * _evaluate_log_modulus(sources)
        of_gain = of_real.neg()
        if not self.is_ema:
            of_gain = (of_gain * vectors.real / vectors.gain_real).masked_fill_(vectors.gain_real == 0, 0.0)
        return LinearizedVectors(vectors, (of_real, of_gain))

    def pull_back(self, at: LinearizedVectors, gradients: LayerVectors) -> list[Any]:
        of_real, of_gain = at.derivatives
        gradient = (gradients.real * of_real).addcmul_(gradients.gain_real, of_gain)
        # Parameters must not share the memory of their gradients.
        return [gradient, *(gradient.clone() for _ in range(1, self.source_count))]


def _evaluate_log_modulus(sources: Sequence[Any]) -> Tensor:
    """Return ln λ̄ = -r."""
    decay, *dt = sources
    log_modulus: Tensor = -dt[0].exp() * decay.exp() if dt else -decay.exp()
    return log_modulus
