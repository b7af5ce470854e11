"""A spectrum given by its timescales in steps."""

import math

import torch

from ..._typing import Device, DType
from ...errors import SpecError
from ...spec import check_scale, spec
from .base import Spectrum, SpectrumSpec
from .continuous import ContinuousSpectrum

__all__ = ["Timescales", "order_by_golden_ratio"]

GOLDEN = (math.sqrt(5) - 1) / 2


@spec
class Timescales(SpectrumSpec):
    """Real eigenvalues λ̄ = exp(-1/τ) with timescales τ, in steps, evenly spaced in the logarithm.

    Neighbouring state dimensions have unlike timescales (`order_by_golden_ratio`), so that every head has short and
    long ones, whatever the number of heads. `Linspace` is sorted, and gives each head a narrow band.

    Attributes:
        shortest: The shortest timescale in steps: after τ steps a state has decayed to 1/e.
        longest: The longest timescale in steps.
        trainable: Whether the timescales are trained.
    """

    shortest: float = 0.5
    longest: float = 200.0
    trainable: bool = True

    def __post_init__(self) -> None:
        check_scale(self, shortest=self.shortest, longest=self.longest)
        if self.shortest > self.longest:
            raise SpecError(
                f"Timescales(shortest={self.shortest}, longest={self.longest}): shortest is larger than longest. "
                f"Pass shortest={self.longest}, longest={self.shortest}."
            )

    def build(self, state_size: int, *, expansion: int = 1, device: Device = None, dtype: DType = None) -> Spectrum:
        spaced = torch.linspace(math.log(self.shortest), math.log(self.longest), state_size, dtype=torch.float64)
        log_decay = -spaced[order_by_golden_ratio(state_size)]
        dtype = dtype or torch.get_default_dtype()
        return ContinuousSpectrum(log_decay.to(device, dtype), None, trainable=self.trainable)


def order_by_golden_ratio(count: int) -> torch.Tensor:
    """Return a permutation of 0 … count - 1 in which every run of neighbours is spread over the whole range.

    Entry i is the rank of the fractional part of i·φ, φ the golden ratio, among all of them: a sequence of low
    discrepancy.

    Args:
        count: Number of entries.

    Returns:
        (count,), int64.
    """
    fractions = torch.arange(count, dtype=torch.float64) * GOLDEN % 1.0
    return fractions.argsort(stable=True).argsort()
