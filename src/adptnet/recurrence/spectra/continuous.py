"""Spectra given in continuous time: λ̄ = exp(-Δt λ) (eq:eig_parametrisation), with λ and Δt stored as logarithms.

The families of the paper (sec:eigvalue_param) differ only in the initial values of the parameters.
"""

import abc
import math
from typing import Literal

import torch
from torch import Tensor, nn

from ..._dtype import compute_dtype
from ..._typing import Device, DType
from ...errors import SpecError
from ...spec import check_positive, check_scale, spec
from .base import BlockDiagonal, Spectrum, SpectrumSpec

__all__ = [
    "ContinuousSpectrum",
    "LRURing",
    "Linspace",
    "LogUniformDecay",
    "S4DInv",
    "S4DLin",
    "S4DReal",
    "UniformDecay",
]

PerWhat = Literal["state", "channel"]


class ContinuousSpectrum(Spectrum):
    """λ̄ = exp(-Δt (decay - i frequency)). With a frequency every eigenvalue is a complex pair.

    Args:
        log_decay: Logarithm of the decay rates, one for each eigenvalue or pair.
        log_dt: Logarithm of the step sizes Δt: one for each eigenvalue, or fewer, each shared by an equal number of
            neighbouring eigenvalues. None for Δt = 1.
        log_frequency: Logarithm of the angular frequencies; None for real eigenvalues.
        frequency: The angular frequencies themselves, in place of `log_frequency`, if some are zero.
        trainable: Whether the parameters are trained.
    """

    def __init__(
        self,
        log_decay: Tensor,
        log_dt: Tensor | None,
        *,
        log_frequency: Tensor | None = None,
        frequency: Tensor | None = None,
        trainable: bool,
    ):
        super().__init__()

        def parameter(values: Tensor | None) -> nn.Parameter | None:
            return None if values is None else nn.Parameter(values, requires_grad=trainable)

        self.log_decay = nn.Parameter(log_decay, requires_grad=trainable)
        self.log_dt = parameter(log_dt)
        self.log_frequency = parameter(log_frequency)
        self.frequency = parameter(frequency)

    def forward(self, dt: Tensor | None = None) -> BlockDiagonal:
        decay, frequency, step = self._rates(dt)
        modulus = (-step * decay).exp()
        if frequency is None:
            return BlockDiagonal(modulus)
        phase = step * frequency
        return BlockDiagonal(_repeat_pairs(modulus * phase.cos()), _repeat_pairs(modulus * phase.sin()))

    def log_modulus(self, dt: Tensor | None = None) -> Tensor:
        decay, frequency, step = self._rates(dt)
        return -step * decay if frequency is None else _repeat_pairs(-step * decay)

    def zero_order_hold(self, dt: Tensor | None = None) -> BlockDiagonal:
        decay, frequency, step = self._rates(dt)
        if frequency is None:
            return BlockDiagonal(-torch.expm1(-step * decay) / decay)
        # (1 - λ̄) / λ, λ̄ = e^{-x} e^{iy}: 1 - λ̄ = -expm1(-x) + e^{-x} (2 sin²(y/2) - i sin y), without cancellation.
        x, y = step * decay, step * frequency
        real = -torch.expm1(-x) + (-x).exp() * 2 * (y / 2).sin().square()
        imag = -(-x).exp() * y.sin()
        scale = decay.square() + frequency.square()
        return BlockDiagonal(
            _repeat_pairs((real * decay - imag * frequency) / scale),
            _repeat_pairs((real * frequency + imag * decay) / scale),
        )

    def log_step(self) -> Tensor | None:
        if self.log_dt is None:
            return None
        size = self.log_decay.shape[-1] * (1 if self.log_frequency is None and self.frequency is None else 2)
        return self.log_dt.repeat_interleave(size // self.log_dt.shape[-1])

    def _rates(self, dt: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return decay rate, frequency and step length for every eigenvalue."""
        dtype = compute_dtype(self.log_decay.dtype)
        decay = self.log_decay.to(dtype).exp()
        step = torch.ones_like(decay)
        if self.log_dt is not None:
            step = self.log_dt.to(dtype).exp().repeat_interleave(decay.shape[-1] // self.log_dt.shape[-1])
        frequency = None if self.frequency is None else self.frequency.to(dtype)
        if self.log_frequency is not None:
            frequency = self.log_frequency.to(dtype).exp()
        return decay, frequency, step if dt is None else step * dt


def _repeat_pairs(values: Tensor) -> Tensor:
    """Repeat the value of each pair for both of its state dimensions."""
    return values.repeat_interleave(2, dim=-1)


class _Family(SpectrumSpec):
    """Base class of the families with a range of step sizes."""

    dt_min: float
    dt_max: float
    trainable: bool
    dt_per: PerWhat

    def __post_init__(self) -> None:
        check_scale(self, dt_min=self.dt_min, dt_max=self.dt_max)
        if self.dt_min > self.dt_max:
            raise SpecError(
                f"{type(self).__name__}(dt_min={self.dt_min}, dt_max={self.dt_max}): dt_min is larger than dt_max. "
                f"Pass dt_min={self.dt_max}, dt_max={self.dt_min}."
            )
        if self.dt_per not in ("state", "channel"):
            raise SpecError(f'{type(self).__name__}(dt_per={self.dt_per!r}): must be "state" or "channel".')

    def _count_steps(self, units: int, state_size: int, expansion: int) -> int:
        """Return the number of step sizes for `units` eigenvalues."""
        return state_size // expansion if self.dt_per == "channel" and expansion > 1 else units

    def _space_steps(self, count: int) -> Tensor:
        """Return the logarithms of `count` step sizes, evenly spaced in the logarithm."""
        return torch.linspace(math.log(self.dt_min), math.log(self.dt_max), count, dtype=torch.float64)

    def _make_spectrum(
        self, log_decay: Tensor, log_dt: Tensor | None, device: Device, dtype: DType, **frequencies: Tensor
    ) -> Spectrum:
        dtype = dtype or torch.get_default_dtype()
        return ContinuousSpectrum(
            log_decay.to(device, dtype),
            None if log_dt is None else log_dt.to(device, dtype),
            trainable=self.trainable,
            **{name: values.to(device, dtype) for name, values in frequencies.items()},
        )


def _repeat_log(value: float, count: int) -> Tensor:
    """Return the logarithm of `value`, `count` times."""
    return torch.full((count,), math.log(value), dtype=torch.float64)


def _count_pairs(name: str, state_size: int, expansion: int) -> int:
    """Return the number of pairs over which the frequencies run: those of a channel, or of the whole state."""
    size = expansion if expansion > 1 else state_size
    if size % 2:
        suggested = state_size // size * (size + 1)
        where = f"state_size={state_size} gives each channel {size}" if expansion > 1 else f"state_size={size} is odd"
        raise SpecError(
            f"{name} has complex eigenvalues of two state dimensions each; {where}. Pass state_size={suggested}."
        )
    return size // 2


@spec
class Linspace(_Family):
    """One decay rate, step sizes evenly spaced in the logarithm: the paper's default (sec:eigvalue_param).

    Attributes:
        dt_min, dt_max: Range of the step sizes.
        decay: Decay rate of all eigenvalues.
        trainable: Whether decay rates and step sizes are trained.
        dt_per: One step size for each "state" dimension, or for each "channel" of an expanded input.
    """

    dt_min: float = 1e-3
    dt_max: float = 1e-1
    decay: float = 0.5
    trainable: bool = True
    dt_per: PerWhat = "state"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scale(self, decay=self.decay)

    def build(self, state_size: int, *, expansion: int = 1, device: Device = None, dtype: DType = None) -> Spectrum:
        steps = self._count_steps(state_size, state_size, expansion)
        return self._make_spectrum(_repeat_log(self.decay, state_size), self._space_steps(steps), device, dtype)


@spec
class S4DReal(_Family):
    """Decay rates 1, 2, 3, … (eq:s4d_real), step sizes drawn log-uniformly.

    If the input is expanded, the rates count within each channel and each channel has one step size.

    Attributes:
        dt_min, dt_max: Range of the step sizes.
        trainable: Whether decay rates and step sizes are trained.
        dt_per: One step size for each "state" dimension, or for each "channel" of an expanded input.
    """

    dt_min: float = 1e-3
    dt_max: float = 1e-1
    trainable: bool = True
    dt_per: PerWhat = "channel"

    def build(self, state_size: int, *, expansion: int = 1, device: Device = None, dtype: DType = None) -> Spectrum:
        rates = expansion if expansion > 1 else state_size
        log_decay = torch.arange(1, rates + 1, dtype=torch.float64).log().repeat(state_size // rates)
        low, high = math.log(self.dt_min), math.log(self.dt_max)
        steps = self._count_steps(state_size, state_size, expansion)
        log_dt = low + (high - low) * torch.rand(steps, dtype=torch.float64)
        return self._make_spectrum(log_decay, log_dt, device, dtype)


class _Pairs(_Family):
    """Base class of the complex families: one decay rate, frequencies that run over a channel or the whole state."""

    decay: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scale(self, decay=self.decay)

    @property
    def is_complex(self) -> bool:
        return True

    @abc.abstractmethod
    def _frequencies(self, pairs: int) -> dict[str, Tensor]:
        """Return the frequencies of `pairs` pairs, from the highest down, keyed by the parameter that stores them."""

    def build(self, state_size: int, *, expansion: int = 1, device: Device = None, dtype: DType = None) -> Spectrum:
        pairs = _count_pairs(type(self).__name__, state_size, expansion)
        channels = state_size // (2 * pairs)
        frequencies = {name: values.repeat(channels) for name, values in self._frequencies(pairs).items()}
        steps = self._space_steps(self._count_steps(state_size // 2, state_size, expansion))
        return self._make_spectrum(_repeat_log(self.decay, state_size // 2), steps, device, dtype, **frequencies)


@spec
class S4DInv(_Pairs):
    """Complex pairs of one decay rate with the frequencies of S4D-Inv (eq:s4d-inv, its N counted with conjugates).

    Step sizes are evenly spaced in the logarithm, the smallest at the highest frequency. If the input is expanded, the
    frequencies run over each channel and each channel has one step size.

    Attributes:
        dt_min, dt_max: Range of the step sizes.
        decay: Decay rate of all pairs.
        trainable: Whether decay rates, frequencies and step sizes are trained.
        dt_per: One step size for each pair ("state"), or for each "channel" of an expanded input.
    """

    dt_min: float = 1e-3
    dt_max: float = 1e-1
    decay: float = 0.5
    trainable: bool = True
    dt_per: PerWhat = "channel"

    def _frequencies(self, pairs: int) -> dict[str, Tensor]:
        return {"log_frequency": s4d_inv_frequencies(pairs).log()}


def s4d_inv_frequencies(pairs: int) -> Tensor:
    """Return (N/π)(N/(2k + 1) - 1) for k = 0 … N/2 - 1, N = 2·pairs: from the highest down, all positive.

    Args:
        pairs: Number of complex pairs.

    Returns:
        (pairs,), float64.
    """
    size = 2 * pairs
    return size / math.pi * (size / (2 * torch.arange(pairs, dtype=torch.float64) + 1) - 1)


@spec
class S4DLin(_Pairs):
    """Complex pairs of one decay rate with the frequencies …, 2π, π, 0 of S4D-Lin.

    The frequencies are not stored as logarithms, because one is zero. Otherwise like `S4DInv`.

    Attributes:
        dt_min, dt_max: Range of the step sizes.
        decay: Decay rate of all pairs.
        trainable: Whether decay rates, frequencies and step sizes are trained.
        dt_per: One step size for each pair ("state"), or for each "channel" of an expanded input.
    """

    dt_min: float = 1e-3
    dt_max: float = 1e-1
    decay: float = 0.5
    trainable: bool = True
    dt_per: PerWhat = "channel"

    def _frequencies(self, pairs: int) -> dict[str, Tensor]:
        return {"frequency": math.pi * torch.arange(pairs - 1, -1, -1, dtype=torch.float64)}


@spec
class UniformDecay(_Family):
    """Decay rates drawn uniformly, step sizes linearly spaced: the paper's untrained networks.

    The defaults are those of table:baseline_untrained_config, including its equal step sizes.

    Attributes:
        decay_min, decay_max: Range of the decay rates.
        dt_min, dt_max: Range of the step sizes.
        trainable: Whether decay rates and step sizes are trained.
        dt_per: One step size for each "state" dimension, or for each "channel" of an expanded input.
    """

    decay_min: float = 2.0
    decay_max: float = 100.0
    dt_min: float = 1e-4
    dt_max: float = 1e-4
    trainable: bool = True
    dt_per: PerWhat = "state"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scale(self, decay_min=self.decay_min, decay_max=self.decay_max)
        if self.decay_min > self.decay_max:
            raise SpecError(f"{self}: decay_min is larger than decay_max. Exchange the two.")

    def build(self, state_size: int, *, expansion: int = 1, device: Device = None, dtype: DType = None) -> Spectrum:
        drawn = torch.rand(state_size, dtype=torch.float64)
        log_decay = (self.decay_min + (self.decay_max - self.decay_min) * drawn).log()
        steps = self._count_steps(state_size, state_size, expansion)
        log_dt = torch.linspace(self.dt_min, self.dt_max, steps, dtype=torch.float64).log()
        return self._make_spectrum(log_decay, log_dt, device, dtype)


@spec
class LogUniformDecay(SpectrumSpec):
    """Decay rates drawn log-uniformly, one step size for all: the initialisation of SiLIF's neurons.

    The defaults are those of its membranes for steps of 4 ms: λ̄ from exp(-1) to exp(-0.04).

    Attributes:
        decay_min, decay_max: Range of the decay rates.
        dt: Initial step size.
        trainable: Whether decay rates and step sizes are trained.
    """

    decay_min: float = 10.0
    decay_max: float = 250.0
    dt: float = 0.004
    trainable: bool = True

    def __post_init__(self) -> None:
        check_scale(self, decay_min=self.decay_min, decay_max=self.decay_max, dt=self.dt)
        if self.decay_min > self.decay_max:
            raise SpecError(f"{self}: decay_min is larger than decay_max. Exchange the two.")

    def build(self, state_size: int, *, expansion: int = 1, device: Device = None, dtype: DType = None) -> Spectrum:
        low, high = math.log(self.decay_min), math.log(self.decay_max)
        log_decay = low + (high - low) * torch.rand(state_size, dtype=torch.float64)
        dtype = dtype or torch.get_default_dtype()
        return ContinuousSpectrum(
            log_decay.to(device, dtype), _repeat_log(self.dt, state_size).to(device, dtype), trainable=self.trainable
        )


@spec
class LRURing(SpectrumSpec):
    """Complex pairs drawn uniformly by area from a ring in the unit disc, as in the Linear Recurrent Unit.

    Attributes:
        r_min: Inner radius.
        r_max: Outer radius, below 1.
        max_phase: Largest phase per step.
        trainable: Whether decay and frequency are trained. There is no step size.
    """

    r_min: float = 0.9
    r_max: float = 0.999
    max_phase: float = 2 * math.pi
    trainable: bool = True

    def __post_init__(self) -> None:
        check_positive(self, r_max=self.r_max, max_phase=self.max_phase)
        if not 0 <= self.r_min <= self.r_max < 1:
            raise SpecError(f"{self}: needs 0 <= r_min <= r_max < 1. Pass r_min=0.9, r_max=0.999.")

    @property
    def is_complex(self) -> bool:
        return True

    def build(self, state_size: int, *, expansion: int = 1, device: Device = None, dtype: DType = None) -> Spectrum:
        dtype = dtype or torch.get_default_dtype()
        pairs = _count_pairs("LRURing", state_size, 1)
        radius_drawn, phase_drawn = 1 - torch.rand(2, pairs, dtype=torch.float64)  # in (0, 1]: no logarithm of zero
        squared = self.r_min**2 + (self.r_max**2 - self.r_min**2) * radius_drawn
        log_decay = (-0.5 * squared.log()).log()
        log_frequency = (self.max_phase * phase_drawn).log()
        return ContinuousSpectrum(
            log_decay.to(device, dtype), None, log_frequency=log_frequency.to(device, dtype), trainable=self.trainable
        )
