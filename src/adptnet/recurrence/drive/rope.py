"""Rotary positions: the oscillations of a complex spectrum, moved into the input (sec:eigvalue_param)."""

import math

import torch
from torch import Tensor, nn

from ..._typing import Device, DType
from ...errors import SpecError
from ...ops._torch_state import plain
from ...optim import NoDecay
from ...spec import Spec, check_scale, spec
from ..spectra.continuous import s4d_inv_frequencies

__all__ = ["RoPE", "RotaryPositions"]


@spec
class RoPE(Spec):
    """Turns each pair of the projected input by its position times a frequency (eq:rotary_embedding).

    The frequencies are those of S4D-Inv times a step size, evenly spaced in the logarithm, and learn.

    Attributes:
        dt_min, dt_max: Range of the step sizes, the smallest at the highest frequency.
        sign: +1 turns as the paper prints it, -1 the other way; mirror images of each other (deviations.md,
            point 8).
        trainable: Whether frequencies and step sizes learn.
    """

    dt_min: float = 1e-3
    dt_max: float = 1e-1
    sign: int = 1
    trainable: bool = True

    def __post_init__(self) -> None:
        check_scale(self, dt_min=self.dt_min, dt_max=self.dt_max)
        if self.dt_min > self.dt_max:
            raise SpecError(f"{self}: dt_min is the larger. Exchange the two.")
        if self.sign not in (1, -1):
            raise SpecError(f"RoPE(sign={self.sign!r}): must be 1 (as printed) or -1.")

    def build(self, state_size: int, *, device: Device = None, dtype: DType = None) -> "RotaryPositions":
        if state_size % 2:
            raise SpecError(f"RoPE turns pairs; the state size {state_size} is odd. Pass state_size={state_size + 1}.")
        return RotaryPositions(self, state_size, device, dtype)


class RotaryPositions(NoDecay):
    def __init__(self, spec: RoPE, state_size: int, device: Device, dtype: DType):
        super().__init__()
        self.spec = spec
        dtype = dtype or torch.get_default_dtype()
        pairs = state_size // 2
        steps = torch.linspace(math.log(spec.dt_min), math.log(spec.dt_max), pairs, dtype=torch.float64)
        frequencies = s4d_inv_frequencies(pairs).log()
        self.log_dt = nn.Parameter(steps.to(device, dtype), requires_grad=spec.trainable)
        self.log_frequency = nn.Parameter(frequencies.to(device, dtype), requires_grad=spec.trainable)

    def forward(self, u: Tensor, position: Tensor) -> Tensor:
        """`u` (*b, t, n) with the pairs of step t turned by position[t] times their frequency."""
        frequency = (self.log_dt.double() + self.log_frequency.double()).exp()
        phase = self.spec.sign * _distinct(position).unsqueeze(-1) * frequency  # in float64: positions are large
        cos, sin = phase.cos().to(u.dtype), phase.sin().to(u.dtype)
        if _as_complex(u):  # torch is several times as fast at this than at every second number
            turn = torch.complex(cos, -sin)
            return torch.view_as_real(torch.view_as_complex(u.unflatten(-1, (-1, 2))) * turn).flatten(-2)
        first, second = u[..., ::2], u[..., 1::2]
        return torch.stack((cos * first + sin * second, cos * second - sin * first), -1).flatten(-2)


def _distinct(position: Tensor) -> Tensor:
    """One row for all sequences where it was expanded from one: sines are not cheap."""
    return position[tuple(slice(None if stride else 1) for stride in position.stride())]


def _as_complex(u: Tensor) -> bool:
    """Whether pairs can be seen as complex numbers. Compilers prefer real ones, and transforms see other strides."""
    if not plain(u) or u.dtype not in (torch.float32, torch.float64):
        return False
    return u.is_contiguous() and u.storage_offset() % 2 == 0
