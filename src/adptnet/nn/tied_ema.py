"""Real eigenvalues and their EMA gain in closed form, with derivatives, for short calls in training.

With r = exp(log_decay + log_dt): λ̄ = exp(-r), gain = 1 - exp(-r), and both logarithms have the same derivatives:
∂λ̄ = -r λ̄ and ∂gain = r λ̄.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.adpt_layer import LayerVectors, VectorSource
from ..recurrence.drive.gain import EMA, Gain
from ..recurrence.spectra.continuous import ContinuousSpectrum

__all__ = ["TiedEMA"]


class TiedEMA(VectorSource):
    """λ̄ and gain as functions of `log_decay` and `log_dt`, with the operations of `ContinuousSpectrum` and `EMA`.

    Args:
        beta: A fixed β, (heads,); None without a rotation.
    """

    def __init__(self, beta: Tensor | None):
        self.beta = beta

    @staticmethod
    def find_parameters(spectrum: Any, gain: Gain) -> list[Tensor] | None:
        """Return `log_decay` and `log_dt`; None if spectrum and gain are of another kind.

        Args:
            spectrum: The spectrum.
            gain: The gain.
        """
        if type(spectrum) is not ContinuousSpectrum or type(gain.spec) is not EMA or gain.real is not None:
            return None
        decay, dt = spectrum.log_decay, spectrum.log_dt
        if dt is None or spectrum.frequency is not None or spectrum.log_frequency is not None:
            return None
        return [decay, dt] if decay.shape == dt.shape else None

    def evaluate(self, sources: Sequence[Any]) -> LayerVectors:
        log_decay, log_dt = sources
        log_modulus = -log_dt.exp() * log_decay.exp()
        return LayerVectors(log_modulus.exp(), None, -torch.expm1(log_modulus), None, self.beta)

    def pull_back(self, sources: Sequence[Any], vectors: LayerVectors, gradients: LayerVectors) -> list[Any]:
        real, gain = gradients.real, gradients.gain_real
        log_decay, log_dt = sources
        gradient = (real - gain) * vectors.real * (-log_dt.exp() * log_decay.exp())
        return [gradient, gradient.clone()]  # parameters must not share the memory of their gradients
