"""Leaky integrate-and-fire neurons: alone, recurrent, and with delays."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..._typing import Device, DType, Vector
from ...errors import CheckpointError, SpecError
from ...ops._backends import Backend, note_run
from ...ops.linear_scan import linear_scan
from ...recurrence.projections import Dense, Projection, ProjectionSpec
from ...recurrence.spectra import BlockDiagonal
from ...spec import check_kind, check_size, spec
from ..base import Cell, CellSpec
from ..dispatch import explain_replaced
from ..structure import Structure
from .base import (
    RANDOM_RESET,
    USUAL_DECAY,
    Initial,
    LeakySpec,
    Range,
    Rates,
    SpikingCell,
    check_choice,
    check_range,
    decay_membrane,
    draw_parameter,
    to_compute_dtype,
)

__all__ = ["LIF", "DelayedLIF", "DelayedLIFCell", "LIFCell", "LeakyIntegrator", "LeakyIntegratorCell"]

_LINEAR = Backend("linear_scan", "the step is linear, so one scan runs all steps.")


@spec
class LIF(LeakySpec):
    """Leaky integrate-and-fire neurons (discrete_lif, spiking, rsnn).

    u[t] = d u[t-1] + (1 - d)(I[t] + W s[t-1]) - θ s[t-1] with membrane u, input current I, spikes s and threshold θ.

    Attributes:
        recurrent: The recurrent projection W; None for neurons without recurrent connections.
    """

    recurrent: ProjectionSpec | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recurrent is not None:
            check_kind(self, ProjectionSpec, "projections.Dense()", recurrent=self.recurrent)

    def build(self, *, device: Device = None, dtype: DType = None) -> "LIFCell":
        return LIFCell(self, device=device, dtype=dtype)


class LIFCell(SpikingCell):
    """The cell of `LIF`. The state is the membrane.

    Args:
        spec: The spec of the neurons.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: LIF, *, device: Device = None, dtype: DType = None):
        super().__init__(spec.width, 1, spec.spike, spec.initial)
        self.spec = spec
        self.decay = Rates(spec.width, spec.decay, device, dtype)
        self.recurrent: Projection | None = None
        if spec.recurrent is not None:
            self.recurrent = spec.recurrent.build(spec.width, spec.width, device=device, dtype=dtype)

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        spec, decay = self.spec, self.decay()
        recurrent = None if self.recurrent is None else self.recurrent.bind(decay.dtype)

        def step(state: Tensor, drive: Tensor) -> Tensor:
            spikes = self.output(state)
            current = drive if recurrent is None else drive + recurrent(spikes)
            after: Tensor = decay_membrane(spec.reset, decay, state, spikes, spec.threshold) + (1 - decay) * current
            return after

        return step

    def structure(self) -> Structure:
        return super().structure()._replace(eigenvalues=self.eigenvalues)

    def eigenvalues(self) -> BlockDiagonal:
        """Return d, the decay factor between spikes. With it Conv-DEER is fixed-point parallel training (fpt)."""
        return BlockDiagonal(self.decay())

    def membrane(self, state: Tensor) -> Tensor:
        return state

    def above_threshold(self, state: Tensor) -> Tensor:
        return state - self.spec.threshold


@spec
class DelayedLIF(LeakySpec):
    """LIF neurons whose recurrent spikes arrive with a delay (eq:delay_lif). The state holds the spikes in transit.

    u[t] = d u[t-1] + (1 - d)(I[t] + W s[t-1-τ]) - θ s[t-1], with the letters of `LIF`.

    Attributes:
        delay: τ in steps, the same for every neuron; or a range (low, high) that the delay of each neuron is drawn from
            when the cell is built.
        recurrent: The recurrent projection W.
    """

    delay: int | tuple[int, int] = 10
    recurrent: ProjectionSpec = Dense()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kind(self, ProjectionSpec, "projections.Dense()", recurrent=self.recurrent)
        for end in self.delays:
            check_size(self, delay=end)
        if len(self.delays) != 2 or self.delays[0] > self.delays[1]:
            raise SpecError(f"DelayedLIF(delay={self.delay!r}): must be an integer >= 1, or a range (low, high).")

    @property
    def delays(self) -> tuple[int, int]:
        """The shortest and the longest delay."""
        return self.delay if isinstance(self.delay, tuple) else (self.delay, self.delay)

    def build(self, *, device: Device = None, dtype: DType = None) -> "DelayedLIFCell":
        return DelayedLIFCell(self, device=device, dtype=dtype)


class DelayedLIFCell(SpikingCell):
    """The cell of `DelayedLIF`. The state is the membrane, then the spikes of the last steps, the newest first.

    Args:
        spec: The spec of the neurons.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    delays: Tensor

    def __init__(self, spec: DelayedLIF, *, device: Device = None, dtype: DType = None):
        low, high = spec.delays
        super().__init__(spec.width, 1 + high, spec.spike, spec.initial)
        self.spec = spec
        self.decay = Rates(spec.width, spec.decay, device, dtype)
        self.recurrent = spec.recurrent.build(spec.width, spec.width, device=device, dtype=dtype)
        self.register_buffer("delays", torch.randint(low, high + 1, (spec.width,)).to(device))

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        spec, decay = self.spec, self.decay()
        recurrent, size = self.recurrent.bind(decay.dtype), self.spec.width
        arriving = (self.delays - 1) * size + torch.arange(size, device=self.delays.device)

        def step(state: Tensor, drive: Tensor) -> Tensor:
            membrane, sent = state[..., :size], state[..., size:]  # sent: the spikes of 1, 2, … steps before the last
            spikes = self.output(state)
            current = drive + recurrent(sent[..., arriving])
            after = decay_membrane(spec.reset, decay, membrane, spikes, spec.threshold) + (1 - decay) * current
            return torch.cat((after, spikes, sent[..., :-size]), -1)

        return step

    def check_buffers(self) -> None:
        """Raise `CheckpointError` if delays, which may have been loaded from a file, are outside the spec's range."""
        low, high = self.spec.delays
        if not (low <= int(self.delays.min()) and int(self.delays.max()) <= high):
            raise CheckpointError(
                f"delays range from {self.delays.min()} to {self.delays.max()}; the spec has {low} to {high}."
            )

    def initial_state(self, batch: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        """Return the initial state of the spec, with no spikes in transit. Arguments as for `Cell.initial_state`."""
        state = super().initial_state(batch, device=device, dtype=dtype)
        state[:, self.spec.width :] = 0.0
        return state

    def membrane(self, state: Tensor) -> Tensor:
        return state[..., : self.spec.width]

    def above_threshold(self, state: Tensor) -> Tensor:
        return self.membrane(state) - self.spec.threshold


@spec
class LeakyIntegrator(CellSpec):
    """Leaky integrators without spikes, for read-outs: u[t] = d u[t-1] + (1 - d) I[t].

    Attributes:
        width: Number of integrators.
        decay: The range that d is drawn from, and clamped to during training.
        initial: Initial state of a sequence: "zero", or "uniform" in [0, 1), drawn at every call, also in evaluation.
    """

    width: int
    decay: Range = USUAL_DECAY
    initial: Initial = "zero"

    def __post_init__(self) -> None:
        check_size(self, width=self.width)
        check_range(self, 0.0, 1.0, decay=self.decay)
        check_choice(self, Initial, initial=self.initial)

    def build(self, *, device: Device = None, dtype: DType = None) -> "LeakyIntegratorCell":
        return LeakyIntegratorCell(self, device=device, dtype=dtype)


class LeakyIntegratorCell(Cell):
    """The cell of `LeakyIntegrator`.

    Args:
        spec: The spec of the neurons.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: LeakyIntegrator, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = spec
        self.input_size = self.state_size = spec.width
        self.decay = draw_parameter(spec.width, *spec.decay, device, dtype)

    def step(self, state: Vector, drive: Vector) -> Vector:
        return self.stepper()(state, drive)

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the step as a function, with the decay factors evaluated once."""
        decay = self.eigenvalues().real
        return lambda state, drive: decay * state + (1 - decay) * drive

    def structure(self) -> Structure:
        return Structure(self.stepper, self.scan, self.choose_scan, self.eigenvalues)

    def scan(
        self,
        drive: Tensor,
        state: Tensor,
        *,
        reset: Tensor | None = None,
        lengths: Tensor | None = None,
        lean: bool = False,
    ) -> Tensor | None:
        """Run all steps by a linear scan; see `Structure.scan`."""
        backend = self.choose_scan(drive.device)
        if reset is not None and self.spec.initial != "zero":
            backend = RANDOM_RESET
        note_run("forward", backend, log=False)
        if not backend.is_kernel:
            return None
        decay = self.eigenvalues().real
        states = linear_scan(decay, (1 - decay) * drive, state, reset=reset)
        if lengths is None:
            return states
        ended = torch.arange(drive.shape[1], device=drive.device) >= lengths.unsqueeze(-1)
        return torch.where(ended.unsqueeze(-1), 0.0, states)

    def choose_scan(self, device: torch.device | str) -> Backend:
        """Return the program of `scan`; see `Structure.choose_scan`."""
        return explain_replaced(self, LeakyIntegratorCell) or _LINEAR  # the scan runs on any device

    def eigenvalues(self) -> BlockDiagonal:
        """Return the decay factors."""
        return BlockDiagonal(to_compute_dtype(self.decay).clamp(*self.spec.decay))

    def initial_state(self, batch: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        zero = super().initial_state(batch, device=device, dtype=dtype)
        return zero if self.spec.initial == "zero" else zero.uniform_(0, 1)
