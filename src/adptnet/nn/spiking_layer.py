"""`SpikingADPTNet`, a recurrent layer whose outputs are spikes, and the spec of its cell."""

import dataclasses
from typing import Any

from ..cells import ADPTSpec, SlowMemory, SpikingADPT
from ..cells.spiking import Boxcar, Spike, SpikeReset
from ..errors import SpecError
from ..recurrence.beta import BetaValue
from ..recurrence.directions import DirectionSpec, FromState
from ..recurrence.projections import Dense, LowParam
from ..recurrence.projections.factored import square_factors
from ..recurrence.spectra import LogUniformDecay
from ..spec import suggest_name
from .adpt_layer import Recurrent

__all__ = ["SpikingADPTNet", "spiking_adpt"]

_OPTIONS = ("beta", "threshold", "spike", "spike_reset", "spike_adaptation", "spiking_directions", "dt")


def spiking_adpt(
    width: int,
    *,
    beta: BetaValue = 0.125,
    threshold: float = 1.0,
    spike: Spike = Boxcar(),
    spike_reset: SpikeReset = "none",
    spike_adaptation: bool = False,
    spiking_directions: bool = False,
    dt: float = 0.004,
    **axes: Any,
) -> SpikingADPT:
    """Return the spec of the cell of SpikingADPTNet.

    It has a slow memory with negative feedback, the timescales of the SiLIF neuron, and `LowParam` projections.

    Args:
        width: Features in, neurons out.
        beta: Strength of the non-linearity.
        threshold: Firing threshold.
        spike: The spike function with its surrogate gradient.
        spike_reset: How a spike resets the membrane.
        spike_adaptation: Whether the slow memory follows the spikes too; see `cells.SpikingADPT`.
        spiking_directions: Apply K and V to the spikes instead of ReLU(x).
        dt: Seconds per step.
        axes: Other fields of `cells.ADPTSpec`, such as `spectrum`.
    """
    size = axes.get("state_size") or width
    low_param = LowParam(square_factors(size), rank=max(1, 3 * size // 32))
    direction: DirectionSpec = FromState(spike=threshold) if spiking_directions else FromState(relu=True)
    defaults = {
        "spectrum": LogUniformDecay(dt=dt),
        "memory": SlowMemory(LogUniformDecay(2.5, 10.0, dt), feedback=(-1.0, 0.0)),
        "direction": direction,
        "projection": low_param,
        "input_projection": low_param if size == width else Dense(),
    }
    known = [field.name for field in dataclasses.fields(ADPTSpec) if field.name not in ("width", "beta")]
    for name in axes:
        if name not in known:
            raise SpecError(f"SpikingADPTNet({name}=...) is unknown.{suggest_name(name, (*known, *_OPTIONS))}")
    cell = ADPTSpec(width, beta=beta, **{**defaults, **axes})
    return SpikingADPT(cell, threshold=threshold, spike=spike, reset=spike_reset, adaptation=spike_adaptation)


def SpikingADPTNet(width: int, **options: Any) -> Recurrent:
    """Return a layer whose outputs are spikes (sec:spiking_ADPTNet): (batch, time, width) in and out.

    Args:
        width: Features in, neurons out. With another `state_size` a read-out maps the spikes to `width` features.
        options: Arguments of `spiking_adpt`; and `solver`, `adjoint`, `batch_first`, `device`, `dtype`, `readout`; see
            `Recurrent`.
    """
    names = ("solver", "adjoint", "batch_first", "device", "dtype", "readout")
    run = {name: options.pop(name) for name in names if name in options}
    return Recurrent(spiking_adpt(width, **options), **run)
