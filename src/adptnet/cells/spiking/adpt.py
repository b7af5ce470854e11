"""The spiking ADPT cell: the output is spikes of the state (sec:spiking_ADPTNet)."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..._typing import Device, DType, Positions
from ...errors import IncompatibleError
from ...ops._backends import REFERENCE, Backend, note_run
from ...recurrence.conjugates import Stateful
from ...recurrence.step import step
from ...spec import check_kind, check_positive, spec
from ..adpt import ADPTCell
from ..base import Cell, CellSpec
from ..coupled import CoupledCell
from ..spec import ADPTSpec
from ..structure import Structure
from .base import RANDOM_RESET, Initial, SpikeReset, SpikingCell, check_choice, draw_parameter, to_compute_dtype
from .surrogate import Boxcar, Spike, check_spike

__all__ = ["SpikingADPT", "SpikingADPTCell"]

_FEEDBACK = Backend(
    REFERENCE,
    "the kernel does not support spikes that change the state.",
    'Use reset="none" and adaptation=False if the model may change.',
)


@spec
class SpikingADPT(CellSpec):
    """An ADPT cell, with or without a slow memory, whose output is the spikes [x >= θ] of its state.

    Attributes:
        cell: The recurrence. With `directions.FromState(spike=θ)` K and V are applied to the spikes, too.
        threshold: θ.
        spike: The spike function of x - θ with its surrogate derivative; a spec, or any callable.
        reset: Effect of a spike on the vector that M is applied to (M itself is computed from the state before the
            reset): "none", as in the paper; "subtract" subtracts θ; "zero" sets it to zero.
        adaptation: Let the slow memory follow x_t + b ⊙ s_t instead of x_t, with a trainable b drawn from [0, 2).
        initial: Initial state of a sequence: "zero", or "uniform" in [0, 1), drawn at every call, also in evaluation.
    """

    cell: ADPTSpec
    threshold: float = 1.0
    spike: Spike = Boxcar()
    reset: SpikeReset = "none"
    adaptation: bool = False
    initial: Initial = "zero"

    def __post_init__(self) -> None:
        check_kind(self, ADPTSpec, "cells.ADPTSpec(width=64)", cell=self.cell)
        check_positive(self, threshold=self.threshold)
        check_spike(self, self.spike)
        check_choice(self, SpikeReset, reset=self.reset)
        check_choice(self, Initial, initial=self.initial)
        if isinstance(self.cell.conjugate, Stateful):
            raise IncompatibleError(
                "SpikingADPT(cell=...): Stateful() has its rotation in the state. Pass conjugates.Exact()."
            )
        if self.adaptation and self.cell.memory is None:
            raise IncompatibleError(
                "SpikingADPT(adaptation=True): spikes adapt the slow memory, and the cell has none. "
                "Pass ADPTSpec(..., memory=cells.SlowMemory())."
            )

    @property
    def width(self) -> int:  # type: ignore[override]
        """Features of the input."""
        return self.cell.width

    @property
    def has_spike_feedback(self) -> bool:
        """True if spikes change the state; False if they are only a read-out of it."""
        return self.reset != "none" or self.adaptation

    def build(self, *, device: Device = None, dtype: DType = None) -> "SpikingADPTCell":
        return SpikingADPTCell(self, device=device, dtype=dtype)


class SpikingADPTCell(SpikingCell):
    """An ADPT cell, `inner`, whose state is read out as spikes.

    Without feedback of the spikes it has the structure of `inner`.

    Args:
        spec: The spec.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: SpikingADPT, *, device: Device = None, dtype: DType = None):
        inner = spec.cell.build(device=device, dtype=dtype)
        assert isinstance(inner, (ADPTCell, CoupledCell))
        size = spec.cell.size
        super().__init__(size, inner.state_size // size, spec.spike, spec.initial)
        self.spec = spec
        self.input_size = spec.width
        self.inner = inner
        self.jump = draw_parameter(size, 0.0, 2.0, device, dtype) if spec.adaptation else None

    def prepare(self, inputs: Tensor, position: Positions) -> Tensor:
        return self.inner.prepare(inputs, position)

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        if not self.spec.has_spike_feedback:
            return self.inner.stepper()
        return functools.partial(step, self.inner.evaluate(), carry=self._reset, follow=self._adapt)

    def _reset(self, x: Tensor) -> Tensor:
        """Return the vector that M is applied to."""
        if self.spec.reset == "none":
            return x
        spikes = self.spike(x - self.spec.threshold)
        return x - self.spec.threshold * spikes if self.spec.reset == "subtract" else x * (1 - spikes)

    def _adapt(self, x: Tensor) -> Tensor:
        """Return the vector that the slow memory follows."""
        return x if self.jump is None else x + to_compute_dtype(self.jump) * self.spike(x - self.spec.threshold)

    def membrane(self, state: Tensor) -> Tensor:
        return state[..., : self.spec.cell.size]

    def above_threshold(self, state: Tensor) -> Tensor:
        return self.membrane(state) - self.spec.threshold

    def structure(self) -> Structure:
        """Return the structure of `inner`; with spike feedback only what approximates the step, for solvers."""
        inner = self.inner.structure()
        if not self.spec.has_spike_feedback:
            return inner._replace(scan=self._scan)
        approximate = Structure(eigenvalues=inner.eigenvalues, linear=inner.linear, forward=inner.forward)
        return approximate._replace(stepper=self.stepper, choose_scan=lambda device: _FEEDBACK)

    def _scan(self, drive: Tensor, state: Tensor, *, reset: Tensor | None = None, **options: Any) -> Tensor | None:
        if reset is not None and self.initial != "zero":
            note_run("forward", RANDOM_RESET, log=False)
            return None
        return self.inner.scan(drive, state, reset=reset, **options)

    def with_arguments(self, *, dt: Tensor | None = None, beta: Tensor | None = None) -> Cell:
        if (dt is None and beta is None) or self.spec.has_spike_feedback:
            return super().with_arguments(dt=dt, beta=beta)
        return self.inner.with_arguments(dt=dt, beta=beta)
