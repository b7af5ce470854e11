"""Spectra given in continuous time: λ̄ = exp(-Δt λ) (eq:eig_parametrisation), stored as logarithms.

The families of the paper (sec:eigvalue_param) differ only in where the parameters start.
"""

import math

import torch
from torch import Tensor, nn

from ..errors import SpecError
from ..spec import check_positive, spec
from .base import BlockDiagonal, Spectrum, SpectrumSpec, compute_dtype

__all__ = ["ContinuousSpectrum", "Linspace", "S4DInv", "S4DReal"]


class ContinuousSpectrum(Spectrum):
    """λ̄ = exp(-Δt (decay - i frequency)). A `log_frequency` makes every eigenvalue a pair."""

    def __init__(self, log_decay: Tensor, log_dt: Tensor, log_frequency: Tensor | None, *, trainable: bool):
        super().__init__()
        self.log_decay = nn.Parameter(log_decay, requires_grad=trainable)
        self.log_dt = nn.Parameter(log_dt, requires_grad=trainable)
        self.log_frequency = None if log_frequency is None else nn.Parameter(log_frequency, requires_grad=trainable)

    def forward(self) -> BlockDiagonal:
        decay, frequency, dt = self._rates()
        modulus = (-dt * decay).exp()
        if frequency is None:
            return BlockDiagonal(modulus)
        phase = dt * frequency
        return BlockDiagonal(_twice(modulus * phase.cos()), _twice(modulus * phase.sin()))

    def log_modulus(self) -> Tensor:
        decay, frequency, dt = self._rates()
        return -dt * decay if frequency is None else _twice(-dt * decay)

    def hold(self) -> BlockDiagonal:
        decay, frequency, dt = self._rates()
        if frequency is None:
            return BlockDiagonal(-torch.expm1(-dt * decay) / decay)
        # (1 - λ̄) / λ with λ̄ = e^{-x} e^{iy}: 1 - λ̄ = -expm1(-x) + e^{-x} (2 sin²(y/2) - i sin y), without cancellation.
        x, y = dt * decay, dt * frequency
        real = -torch.expm1(-x) + (-x).exp() * 2 * (y / 2).sin().square()
        imag = -(-x).exp() * y.sin()
        scale = decay.square() + frequency.square()
        return BlockDiagonal(
            _twice((real * decay - imag * frequency) / scale), _twice((real * frequency + imag * decay) / scale)
        )

    def _rates(self) -> tuple[Tensor, Tensor | None, Tensor]:
        dtype = compute_dtype(self.log_decay.dtype)
        decay = self.log_decay.to(dtype).exp()
        dt = self.log_dt.to(dtype).exp().repeat_interleave(decay.shape[-1] // self.log_dt.shape[-1])
        return decay, None if self.log_frequency is None else self.log_frequency.to(dtype).exp(), dt


def _twice(values: Tensor) -> Tensor:
    return values.repeat_interleave(2, dim=-1)


class _Continuous(SpectrumSpec):
    """What the families share: a range of step sizes, and whether the parameters learn."""

    dt_min: float
    dt_max: float
    trainable: bool

    def __post_init__(self) -> None:
        check_positive(self, dt_min=self.dt_min, dt_max=self.dt_max)
        if self.dt_min > self.dt_max:
            raise SpecError(
                f"{type(self).__name__}(dt_min={self.dt_min}, dt_max={self.dt_max}): dt_min is the larger. "
                f"Pass dt_min={self.dt_max}, dt_max={self.dt_min}."
            )

    def _spaced(self, count: int) -> Tensor:
        return torch.linspace(math.log(self.dt_min), math.log(self.dt_max), count, dtype=torch.float64)

    def _made(
        self,
        log_decay: Tensor,
        log_dt: Tensor,
        log_frequency: Tensor | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> Spectrum:
        dtype = dtype or torch.get_default_dtype()
        log_frequency = None if log_frequency is None else log_frequency.to(device, dtype)
        return ContinuousSpectrum(
            log_decay.to(device, dtype), log_dt.to(device, dtype), log_frequency, trainable=self.trainable
        )


@spec
class Linspace(_Continuous):
    """One decay rate, step sizes evenly spaced in the logarithm: the paper's default (sec:eigvalue_param)."""

    dt_min: float = 1e-3
    dt_max: float = 1e-1
    decay: float = 0.5
    trainable: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, decay=self.decay)

    def build(
        self,
        state_size: int,
        *,
        expansion: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Spectrum:
        log_decay = torch.full((state_size,), math.log(self.decay), dtype=torch.float64)
        return self._made(log_decay, self._spaced(state_size), None, device, dtype)


@spec
class S4DReal(_Continuous):
    """Decay rates 1, 2, 3, … (eq:s4d_real), step sizes drawn evenly in the logarithm.

    Where the input is expanded, the rates count within each channel and each channel has one step size.
    """

    dt_min: float = 1e-3
    dt_max: float = 1e-1
    trainable: bool = True

    def build(
        self,
        state_size: int,
        *,
        expansion: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Spectrum:
        rates = expansion if expansion > 1 else state_size
        log_decay = torch.arange(1, rates + 1, dtype=torch.float64).log().repeat(state_size // rates)
        low, high = math.log(self.dt_min), math.log(self.dt_max)
        log_dt = low + (high - low) * torch.rand(state_size // expansion, dtype=torch.float64)
        return self._made(log_decay, log_dt, None, device, dtype)


@spec
class S4DInv(_Continuous):
    """Complex pairs of one decay rate with the frequencies of S4D-Inv (eq:s4d-inv, its N counted with conjugates).

    Step sizes are evenly spaced in the logarithm, the smallest at the highest frequency. Where the input is
    expanded, the frequencies run within each channel and each channel has one step size.
    """

    dt_min: float = 1e-3
    dt_max: float = 1e-1
    decay: float = 0.5
    trainable: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, decay=self.decay)

    def build(
        self,
        state_size: int,
        *,
        expansion: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Spectrum:
        size = expansion if expansion > 1 else state_size
        if size % 2:
            what = f"expansion={size}" if expansion > 1 else f"state_size={size}"
            raise SpecError(
                f"S4DInv has complex eigenvalues, two numbers of the state each; {what} is odd. "
                f"Pass {what.split('=')[0]}={size + 1}."
            )
        k = torch.arange(size // 2, dtype=torch.float64)
        frequency = size / math.pi * (size / (2 * k + 1) - 1)
        pairs = state_size // 2
        log_decay = torch.full((pairs,), math.log(self.decay), dtype=torch.float64)
        log_dt = self._spaced(state_size // expansion if expansion > 1 else pairs)
        return self._made(log_decay, log_dt, frequency.log().repeat(state_size // size), device, dtype)
