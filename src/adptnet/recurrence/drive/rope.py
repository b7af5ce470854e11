"""Rotary positional encoding: the oscillations of a complex spectrum, moved into the input (sec:eigvalue_param)."""

import math

import torch
from torch import Tensor, nn

from ..._typing import Device, DType
from ...errors import IncompatibleError, SpecError
from ...ops._torch_state import can_bypass_dispatcher
from ...optim import NoDecay
from ...spec import Spec, check_scale, spec
from ..spectra import Spectrum
from ..spectra.continuous import s4d_inv_frequencies

__all__ = ["RoPE", "RotaryPositions"]


@spec
class RoPE(Spec):
    """Rotates each pair of the projected input by its position times a frequency (eq:rotary_embedding).

    The frequencies are those of S4D-Inv times a step size, evenly spaced in the logarithm. Both are trainable.

    Attributes:
        dt_min, dt_max: Range of the step sizes, the smallest at the highest frequency; without effect if `tied`.
        tied: Use the step sizes of the spectrum, as eq:recurrence_fn_redo does. A pair has the geometric mean of the
            step sizes of its two state dimensions. The spectrum must have step sizes.
        sign: +1 rotates as printed in the paper, -1 the other way; mirror images of each other (deviations.md,
            point 8).
        trainable: Whether frequencies and step sizes are trained.
    """

    dt_min: float = 1e-3
    dt_max: float = 1e-1
    sign: int = 1
    trainable: bool = True
    tied: bool = False

    def __post_init__(self) -> None:
        check_scale(self, dt_min=self.dt_min, dt_max=self.dt_max)
        if self.dt_min > self.dt_max:
            raise SpecError(f"{self}: dt_min is larger than dt_max. Exchange the two.")
        if self.sign not in (1, -1):
            raise SpecError(f"RoPE(sign={self.sign!r}): must be 1 (as printed) or -1.")

    def build(self, state_size: int, *, device: Device = None, dtype: DType = None) -> "RotaryPositions":
        """Build the encoding.

        Args:
            state_size: State dimension, even.
            device: Device of the parameters.
            dtype: Dtype of the parameters.
        """
        if state_size % 2:
            raise SpecError(
                f"RoPE rotates pairs; the state size {state_size} is odd. Pass state_size={state_size + 1}."
            )
        return RotaryPositions(self, state_size, device, dtype)


class RotaryPositions(NoDecay):
    """The rotary positional encoding of a projected input.

    Args:
        spec: The spec.
        state_size: State dimension n, even.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: RoPE, state_size: int, device: Device, dtype: DType):
        super().__init__()
        self.spec = spec
        dtype = dtype or torch.get_default_dtype()
        pairs = state_size // 2
        steps = torch.linspace(math.log(spec.dt_min), math.log(spec.dt_max), pairs, dtype=torch.float64)
        frequencies = s4d_inv_frequencies(pairs).log()
        self.log_dt: nn.Parameter | None = None
        if not spec.tied:
            self.log_dt = nn.Parameter(steps.to(device, dtype), requires_grad=spec.trainable)
        self.log_frequency = nn.Parameter(frequencies.to(device, dtype), requires_grad=spec.trainable)

    def forward(self, u: Tensor, position: Tensor, spectrum: Spectrum | None = None) -> Tensor:
        """Return `u` with the pairs of each step rotated by its position times their frequency.

        Args:
            u: B o, (*b, t, n).
            position: Steps since the sequence began, (*b, t).
            spectrum: The spectrum whose step sizes a tied encoding takes.

        Returns:
            (*b, t, n).
        """
        frequency = (self._log_step(spectrum).double() + self.log_frequency.double()).exp()
        # in float64, because positions are large
        phase = self.spec.sign * _drop_expanded(position).unsqueeze(-1) * frequency
        cos, sin = phase.cos().to(u.dtype), phase.sin().to(u.dtype)
        if _can_view_as_complex(u):  # several times faster than arithmetic on strided halves
            turn = torch.complex(cos, -sin)
            return torch.view_as_real(torch.view_as_complex(u.unflatten(-1, (-1, 2))) * turn).flatten(-2)
        first, second = u[..., ::2], u[..., 1::2]
        return torch.stack((cos * first + sin * second, cos * second - sin * first), -1).flatten(-2)

    def _log_step(self, spectrum: Spectrum | None) -> Tensor:
        """Return ln Δt of each pair."""
        if self.log_dt is not None:
            return self.log_dt
        steps = None if spectrum is None else spectrum.log_step()
        if steps is None:
            raise IncompatibleError(
                f"{self.spec} takes the step sizes of the spectrum, and it has none. Pass spectrum=spectra.Linspace(), "
                "or RoPE(tied=False)."
            )
        pairs: Tensor = steps.unflatten(-1, (-1, 2))
        return pairs.mean(-1)


def _drop_expanded(position: Tensor) -> Tensor:
    """Keep one entry along expanded (stride 0) dimensions, so that no sine is computed twice."""
    return position[tuple(slice(None if stride else 1) for stride in position.stride())]


def _can_view_as_complex(u: Tensor) -> bool:
    """Return whether pairs of `u` can be viewed as complex numbers.

    `torch.compile` handles real numbers better, and under `torch.func` transforms the visible strides are not those of
    the memory.
    """
    if not can_bypass_dispatcher(u) or u.dtype not in (torch.float32, torch.float64):
        return False
    return u.is_contiguous() and u.storage_offset() % 2 == 0
