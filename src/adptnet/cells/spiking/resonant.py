"""Neurons that oscillate: C-SiLIF and resonate-and-fire. Their state is a complex number, stored as a real pair."""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..._typing import Device, DType
from ...recurrence.spectra import BlockDiagonal
from ...spec import check_scale, spec
from ..structure import Structure
from .base import (
    NeuronSpec,
    Range,
    SpikeReset,
    SpikingCell,
    check_choice,
    check_range,
    draw_parameter,
    to_compute_dtype,
)
from .surrogate import Boxcar, Spike

__all__ = ["CSiLIF", "CSiLIFCell", "ResonateAndFire", "ResonateAndFireCell"]


class _ResonantCell(SpikingCell):
    """Base class of the cells with an eigenvalue λ̄ = exp(Δt (-decay + i frequency)) on a pair of state dimensions."""

    def __init__(self, spec: NeuronSpec, *, dt: Range, decay: Range, frequency: Range, device: Device, dtype: DType):
        super().__init__(spec.width, 2, spec.spike, spec.initial)

        def draw_log(low: float, high: float) -> nn.Parameter:
            return draw_parameter(spec.width, math.log(low), math.log(high), device, dtype)

        self.threshold = spec.threshold
        self.log_dt, self.log_decay = draw_log(*dt), draw_log(*decay)
        self.frequency = draw_parameter(spec.width, *frequency, device, dtype)

    def structure(self) -> Structure:
        return super().structure()._replace(eigenvalues=self.eigenvalues)

    def eigenvalues(self) -> BlockDiagonal:
        """Return λ̄, by which the state is multiplied between spikes."""
        step = to_compute_dtype(self.log_dt).exp()
        modulus, phase = (
            torch.exp(-to_compute_dtype(self.log_decay).exp() * step),
            to_compute_dtype(self.frequency) * step,
        )
        return BlockDiagonal((modulus * phase.cos()).repeat_interleave(2), (modulus * phase.sin()).repeat_interleave(2))


def _to_pairs(values: Tensor) -> Tensor:
    """Return real numbers as pairs with imaginary part zero."""
    return torch.stack((values, torch.zeros_like(values)), -1).flatten(-2)


@spec
class CSiLIF(NeuronSpec):
    """The complex neuron of Fabre et al. 2025: u[t] = λ̄ (u[t-1] - s[t-1]/2) + b I[t], s = [2 Re u > θ].

    Attributes:
        dt: The range of the step sizes, drawn log-uniformly.
        decay: Initial decay rate.
        frequency: Initial angular frequency.
    """

    dt: Range = (0.01, 5.0)
    decay: float = 0.5
    frequency: float = math.pi
    spike: Spike = dataclasses.field(default=Boxcar(strict=True), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 1e-15, 1e15, dt=self.dt)
        check_scale(self, decay=self.decay, frequency=self.frequency)

    def build(self, *, device: Device = None, dtype: DType = None) -> "CSiLIFCell":
        return CSiLIFCell(self, device=device, dtype=dtype)


class CSiLIFCell(_ResonantCell):
    """The cell of `CSiLIF`.

    Args:
        spec: The spec of the neurons.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: CSiLIF, *, device: Device = None, dtype: DType = None):
        decay, frequency = (spec.decay, spec.decay), (spec.frequency, spec.frequency)
        super().__init__(spec, dt=spec.dt, decay=decay, frequency=frequency, device=device, dtype=dtype)
        self.spec = spec
        self.gain = draw_parameter(spec.width, 0.0, 1.0, device, dtype)

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        lambda_bar, gain = self.eigenvalues(), to_compute_dtype(self.gain)
        return lambda state, drive: lambda_bar.mv(state - _to_pairs(self.output(state) / 2)) + _to_pairs(gain * drive)

    def membrane(self, state: Tensor) -> Tensor:
        return 2 * state[..., ::2]

    def above_threshold(self, state: Tensor) -> Tensor:
        return self.membrane(state) - self.threshold


@spec
class ResonateAndFire(NeuronSpec):
    """Izhikevich's resonate-and-fire: z[t] = λ̄ z[t-1] + I[t] with a real current, spikes where Im z reaches θ.

    Attributes:
        dt: Step size, in seconds.
        decay: The range of the decay rates, in 1/s, drawn log-uniformly.
        frequency: The range of the angular frequencies, in 1/s.
        reset: "subtract" subtracts θ from the imaginary part before the multiplication by λ̄; "zero" sets the state to
            zero; "none" does not reset.
    """

    dt: float = 0.004
    decay: Range = (1.0, 10.0)
    frequency: Range = (30.0, 60.0)
    reset: SpikeReset = "subtract"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scale(self, dt=self.dt)
        check_range(self, 1e-15, 1e15, decay=self.decay, frequency=self.frequency)
        check_choice(self, SpikeReset, reset=self.reset)

    def build(self, *, device: Device = None, dtype: DType = None) -> "ResonateAndFireCell":
        return ResonateAndFireCell(self, device=device, dtype=dtype)


class ResonateAndFireCell(_ResonantCell):
    """The cell of `ResonateAndFire`.

    Args:
        spec: The spec of the neurons.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: ResonateAndFire, *, device: Device = None, dtype: DType = None):
        dt, decay, frequency = (spec.dt, spec.dt), spec.decay, spec.frequency
        super().__init__(spec, dt=dt, decay=decay, frequency=frequency, device=device, dtype=dtype)
        self.spec = spec

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        lambda_bar, reset, threshold = self.eigenvalues(), self.spec.reset, self.threshold

        def step(state: Tensor, drive: Tensor) -> Tensor:
            spikes = self.output(state)
            if reset == "zero":
                state = state * (1 - spikes.repeat_interleave(2, -1))
            elif reset != "none":
                state = state - threshold * torch.stack((torch.zeros_like(spikes), spikes), -1).flatten(-2)
            return lambda_bar.mv(state) + _to_pairs(drive)

        return step

    def membrane(self, state: Tensor) -> Tensor:
        return state[..., 1::2]

    def above_threshold(self, state: Tensor) -> Tensor:
        return self.membrane(state) - self.threshold
