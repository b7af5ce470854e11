"""A spectrum given by its exponents ln λ̄, and so directly by its timescales."""

import sys
import warnings

import torch
from torch import Tensor, nn

from ..._dtype import compute_dtype
from ..._typing import Device, DType
from ...errors import SpecError
from ...spec import spec
from .base import BlockDiagonal, Spectrum, SpectrumSpec

__all__ = ["FromExponents"]


@spec
class FromExponents(SpectrumSpec):
    """λ̄ = exp(exponent) for each state dimension: the memory of a mode is -1/exponent steps.

    An exponent of zero or above (|λ̄| >= 1) is allowed, with a warning, for chaotic systems. The state may then grow
    without bound, and of the gains only `ZOH` is defined.

    Attributes:
        exponents: ln λ̄, one for each state dimension.
        trainable: Whether the exponents are trained.
    """

    exponents: tuple[float, ...]
    trainable: bool = True

    def __post_init__(self) -> None:
        if (
            not isinstance(self.exponents, tuple)
            or not self.exponents
            or not all(isinstance(e, (int, float)) and abs(e) <= sys.float_info.max for e in self.exponents)
        ):
            raise SpecError(
                f"FromExponents(exponents={self.exponents!r}): needs finite numbers, e.g. (-0.1, -0.01). "
                "For eigenvalues of zero wrap it in Sparse."
            )

    @property
    def grows(self) -> bool:
        return max(self.exponents) >= 0

    def build(self, state_size: int, *, expansion: int = 1, device: Device = None, dtype: DType = None) -> Spectrum:
        if len(self.exponents) != state_size:
            raise SpecError(
                f"FromExponents has {len(self.exponents)} exponents, but the state has size {state_size}. "
                f"Pass state_size={len(self.exponents)}, or {state_size} exponents."
            )
        if self.grows and torch.device(device or "cpu").type != "meta":  # a meta module computes no states
            warnings.warn(
                f"FromExponents: the largest exponent is {max(self.exponents)}: |λ̄| >= 1, the state may grow.",
                stacklevel=2,
            )
        dtype = dtype or torch.get_default_dtype()
        return ExponentSpectrum(torch.tensor(self.exponents, dtype=dtype, device=device), self.trainable)


class ExponentSpectrum(Spectrum):
    """λ̄ = exp(exponents).

    Args:
        exponents: ln λ̄, (n,).
        trainable: Whether the exponents are trained.
    """

    def __init__(self, exponents: Tensor, trainable: bool):
        super().__init__()
        self.exponents = nn.Parameter(exponents, requires_grad=trainable)

    def forward(self, dt: Tensor | None = None) -> BlockDiagonal:
        return BlockDiagonal(self.log_modulus(dt).exp())

    def log_modulus(self, dt: Tensor | None = None) -> Tensor:
        exponents = self.exponents.to(compute_dtype(self.exponents.dtype))
        return exponents if dt is None else exponents * dt

    def zero_order_hold(self, dt: Tensor | None = None) -> BlockDiagonal:
        exponents, step = self.log_modulus(), 1.0 if dt is None else dt
        near = (exponents * step).abs() < 1e-4  # here expm1(a)/a by its series, which is defined at a = 0
        rate = torch.where(near, 1.0, exponents)
        grown = exponents * step
        series = step * (1 + grown / 2 * (1 + grown / 3 * (1 + grown / 4)))
        return BlockDiagonal(torch.where(near, series, torch.expm1(rate * step) / rate))
