"""Adaptive neurons, with a slow variable: ALIF, adLIF, SiLIF. The state is the membranes, then the slow variables."""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..._typing import Device, DType
from ...recurrence.projections import Projection, ProjectionSpec
from ...recurrence.spectra import BlockDiagonal
from ...solvers.transitions import CoupledTransition, Transition
from ...spec import check_kind, check_nonnegative, check_scale, spec
from ..structure import Structure
from .base import (
    SLOW_DECAY,
    LeakySpec,
    NeuronSpec,
    Range,
    Rates,
    SpikingCell,
    check_decay,
    check_range,
    decay_membrane,
    draw_parameter,
    to_compute_dtype,
)
from .surrogate import Boxcar, Spike

__all__ = ["ALIF", "ALIFCell", "AdLIF", "AdLIFCell", "SiLIF", "SiLIFCell"]


class _AdaptiveCell(SpikingCell):
    """Base class of the cells with a membrane and one slow variable for each neuron."""

    def __init__(self, spec: NeuronSpec):
        super().__init__(spec.width, 2, spec.spike, spec.initial)
        self.threshold = spec.threshold
        self.size = spec.width

    def membrane(self, state: Tensor) -> Tensor:
        return state[..., : self.size]

    def slow_state(self, state: Tensor) -> Tensor:
        """Return the slow variable of each neuron.

        Args:
            state: (..., state_size).
        """
        return state[..., self.size :]

    def above_threshold(self, state: Tensor) -> Tensor:
        return self.membrane(state) - self.threshold


def _make_transition(membrane: tuple[Tensor, Tensor], slow: tuple[Tensor, Tensor]) -> Transition:
    """Return the transition in the absence of spikes, given the two rows of each neuron's 2-by-2 matrix."""
    rows = [torch.stack(torch.broadcast_tensors(*row), -1) for row in (membrane, slow)]
    return CoupledTransition(torch.stack(rows, -2)[None, None])


@spec
class ALIF(LeakySpec):
    """Adaptive LIF neurons, whose threshold θ + strength · a rises with each spike (eq:alif).

    a[t] = α a[t-1] + (1 - α) s[t-1] with the spikes s. The membrane is that of `LIF`, reset with the threshold at t. As
    printed in the paper, the threshold decays to zero without spikes; here it decays to θ.

    Attributes:
        recurrent: The recurrent projection W; None for neurons without recurrent connections.
        slow_decay: Range from which the initial α is drawn; α is trained.
        strength: How much a neuron that fires at every step raises its threshold.
    """

    recurrent: ProjectionSpec | None = None
    slow_decay: Range = SLOW_DECAY
    strength: float = 1.8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay(self, slow_decay=self.slow_decay)
        check_nonnegative(self, strength=self.strength)
        if self.recurrent is not None:
            check_kind(self, ProjectionSpec, "projections.Dense()", recurrent=self.recurrent)

    def build(self, *, device: Device = None, dtype: DType = None) -> "ALIFCell":
        return ALIFCell(self, device=device, dtype=dtype)


class ALIFCell(_AdaptiveCell):
    """The cell of `ALIF`.

    Args:
        spec: The spec of the neurons.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: ALIF, *, device: Device = None, dtype: DType = None):
        super().__init__(spec)
        self.spec = spec
        self.decay = Rates(spec.width, spec.decay, device, dtype)
        self.slow_decay = Rates(spec.width, spec.slow_decay, device, dtype)
        self.recurrent: Projection | None = None
        if spec.recurrent is not None:
            self.recurrent = spec.recurrent.build(spec.width, spec.width, device=device, dtype=dtype)

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        spec, decay, slow_decay = self.spec, self.decay(), self.slow_decay()
        recurrent = None if self.recurrent is None else self.recurrent.bind(decay.dtype)

        def step(state: Tensor, drive: Tensor) -> Tensor:
            membrane, raised = state.split(self.size, -1)
            spikes = self.output(state)
            current = drive if recurrent is None else drive + recurrent(spikes)
            raised = slow_decay * raised + (1 - slow_decay) * spikes
            threshold = spec.threshold + spec.strength * raised
            membrane = decay_membrane(spec.reset, decay, membrane, spikes, threshold) + (1 - decay) * current
            return torch.cat((membrane, raised), -1)

        return step

    def structure(self) -> Structure:
        return super().structure()._replace(eigenvalues=self.eigenvalues)

    def eigenvalues(self) -> BlockDiagonal:
        """Return both decay factors, by which the state is multiplied between spikes."""
        return BlockDiagonal(torch.cat((self.decay(), self.slow_decay())))

    def above_threshold(self, state: Tensor) -> Tensor:
        return self.membrane(state) - self.threshold - self.spec.strength * self.slow_state(state)


@spec
class AdLIF(LeakySpec):
    """Adaptive LIF neurons with a slow current w (eq:adlif), driven by the membrane u and by the spikes s.

    u[t] = d u[t-1] + (1 - d)(I[t] + w[t-1]) - θ s[t-1],  w[t] = α w[t-1] + (1 - α)(a u[t-1] + b s[t-1]).

    Attributes:
        coupling: Range from which the initial a is drawn; a is trained. (1, 1) is the equation as printed.
        jump: Range of the initial b, likewise. The default is that of adLIF's authors, negated, as they subtract w.
        slow_decay: Range from which the initial α is drawn; α is trained.
    """

    slow_decay: Range = SLOW_DECAY
    coupling: Range = (-1.0, 1.0)
    jump: Range = (-2.0, 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay(self, slow_decay=self.slow_decay)
        check_range(self, -math.inf, math.inf, coupling=self.coupling, jump=self.jump)

    def build(self, *, device: Device = None, dtype: DType = None) -> "AdLIFCell":
        return AdLIFCell(self, device=device, dtype=dtype)


class AdLIFCell(_AdaptiveCell):
    """The cell of `AdLIF`.

    Args:
        spec: The spec of the neurons.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: AdLIF, *, device: Device = None, dtype: DType = None):
        super().__init__(spec)
        self.spec = spec
        self.decay = Rates(spec.width, spec.decay, device, dtype)
        self.slow_decay = Rates(spec.width, spec.slow_decay, device, dtype)
        self.coupling = draw_parameter(spec.width, *spec.coupling, device, dtype)
        self.jump = draw_parameter(spec.width, *spec.jump, device, dtype)

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        spec, decay, slow_decay = self.spec, self.decay(), self.slow_decay()
        coupling, jump = to_compute_dtype(self.coupling), to_compute_dtype(self.jump)

        def step(state: Tensor, drive: Tensor) -> Tensor:
            membrane, slow = state.split(self.size, -1)
            spikes = self.output(state)
            after = decay_membrane(spec.reset, decay, membrane, spikes, spec.threshold) + (1 - decay) * (drive + slow)
            slow = slow_decay * slow + (1 - slow_decay) * (coupling * membrane + jump * spikes)
            return torch.cat((after, slow), -1)

        return step

    def structure(self) -> Structure:
        return super().structure()._replace(linear=self._linear_transition)

    def _linear_transition(self, drive: Tensor) -> Transition:
        decay, slow_decay = self.decay(), self.slow_decay()
        return _make_transition((decay, 1 - decay), ((1 - slow_decay) * to_compute_dtype(self.coupling), slow_decay))


@spec
class SiLIF(NeuronSpec):
    """The neuron of Fabre et al. 2025, as in their code: rates stored as logarithms, the reset inside the decay.

    w[t] = β w[t-1] + a u[t-1] + b s[t-1],  u[t] = α (u[t-1] - s[t-1]) + (1 - α)(I[t] - w[t]),  s = [u > θ].

    α = exp(-exp(log_decay + log_dt)), β likewise with log_slow_decay and the same log_dt; a is clamped to [0, 1], b to
    [0, 2]. The authors draw u, w and s uniformly from [0, 1) at every call; `initial="uniform"` does so for u and w.

    Attributes:
        dt: Initial step size, in seconds.
        decay: The range of the decay rates of the membrane, in 1/s, drawn log-uniformly.
        slow_decay: The range of the decay rates of w, likewise.
    """

    dt: float = 0.004
    decay: Range = (10.0, 250.0)
    slow_decay: Range = (2.5, 10.0)
    spike: Spike = dataclasses.field(default=Boxcar(strict=True), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scale(self, dt=self.dt)
        check_range(self, 1e-15, 1e15, decay=self.decay, slow_decay=self.slow_decay)

    def build(self, *, device: Device = None, dtype: DType = None) -> "SiLIFCell":
        return SiLIFCell(self, device=device, dtype=dtype)


class SiLIFCell(_AdaptiveCell):
    """The cell of `SiLIF`.

    Args:
        spec: The spec of the neurons.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: SiLIF, *, device: Device = None, dtype: DType = None):
        super().__init__(spec)
        self.spec = spec

        def draw_log(low: float, high: float) -> nn.Parameter:
            return draw_parameter(spec.width, math.log(low), math.log(high), device, dtype)

        self.log_dt = nn.Parameter(torch.full((spec.width,), math.log(spec.dt), device=device, dtype=dtype))
        self.log_decay, self.log_slow_decay = draw_log(*spec.decay), draw_log(*spec.slow_decay)
        self.coupling = draw_parameter(spec.width, 0.0, 1.0, device, dtype)
        self.jump = draw_parameter(spec.width, 0.0, 2.0, device, dtype)

    def _evaluate(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return α, β, a and b."""
        step = to_compute_dtype(self.log_dt).exp()
        decay, slow_decay = (
            torch.exp(-to_compute_dtype(rate).exp() * step) for rate in (self.log_decay, self.log_slow_decay)
        )
        return decay, slow_decay, to_compute_dtype(self.coupling).clamp(0, 1), to_compute_dtype(self.jump).clamp(0, 2)

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        decay, slow_decay, coupling, jump = self._evaluate()

        def step(state: Tensor, drive: Tensor) -> Tensor:
            membrane, slow = state.split(self.size, -1)
            spikes = self.output(state)
            slow = slow_decay * slow + coupling * membrane + jump * spikes
            membrane = decay * (membrane - spikes) + (1 - decay) * (drive - slow)
            return torch.cat((membrane, slow), -1)

        return step

    def structure(self) -> Structure:
        return super().structure()._replace(linear=self._linear_transition)

    def _linear_transition(self, drive: Tensor) -> Transition:
        decay, slow_decay, coupling, _ = self._evaluate()
        return _make_transition((decay - (1 - decay) * coupling, -(1 - decay) * slow_decay), (coupling, slow_decay))
