"""Estimated cost of a spiking network on event-driven hardware: firing rates, operations, energy."""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cells import SpikingADPTCell
from ..cells.coupled import CoupledCell
from ..errors import InputError
from ..nn.spiking_model import SpikingModel, SpikingTrace
from ..recurrence.directions import FromState
from ..recurrence.projections import Projection

__all__ = ["AC_ENERGY", "MAC_ENERGY", "ActivityWarning", "Efficiency", "LayerActivity", "efficiency"]

MAC_ENERGY = 4.6e-12  # joules per 32-bit multiply-accumulate at 45 nm (Horowitz 2014)
AC_ENERGY = 0.9e-12  # joules per addition
SILENT, SATURATED = 1e-4, 0.5  # spikes per neuron and step


class ActivityWarning(UserWarning):
    """A layer almost never or almost always fires, so that no gradient passes through it."""


class LayerActivity(NamedTuple):
    """Activity of one layer. Operations are averages per step and sequence."""

    rate: float  # spikes per neuron and step
    silent_neurons: float  # fraction of neurons that never fired
    synaptic_operations: float  # additions: non-zero inputs and recurrent spikes, times the neurons they reach
    dense_operations: int  # multiply-accumulates of the same maps with dense inputs
    direction_macs: int  # multiply-accumulates of K and V as they are stored; 0 where the state is not rotated
    direction_additions: float | None  # additions of K and V, as dense matrices, where their input is spikes; else None


class Efficiency(NamedTuple):
    """Cost of a network on given frames. Energies are in joules per step and sequence."""

    layers: tuple[LayerActivity, ...]
    readout_operations: float  # additions of the read-out
    readout_macs: int
    energy: float  # additions for events; multiply-accumulates for K and V unless their input is spikes
    dense_energy: float  # multiply-accumulates for every map

    def __str__(self) -> str:
        lines = ["layer     rate   silent   additions   dense MACs   K, V MACs   K, V additions"]
        for i, layer in enumerate(self.layers):
            added = "—" if layer.direction_additions is None else f"{layer.direction_additions:,.0f}"
            lines.append(
                f"{i:<5}  {layer.rate:7.4f}  {layer.silent_neurons:6.1%}  {layer.synaptic_operations:10,.0f}  "
                f"{layer.dense_operations:11,}  {layer.direction_macs:10,}  {added:>15}"
            )
        lines.append(f"read-out: {self.readout_operations:,.0f} additions, {self.readout_macs:,} dense MACs")
        lines.append(
            f"energy per step: {self.energy:.2e} J, dense {self.dense_energy:.2e} J "
            f"({AC_ENERGY * 1e12} pJ per addition, {MAC_ENERGY * 1e12} pJ per multiply-accumulate)"
        )
        return "\n".join(lines)


@torch.no_grad()
def efficiency(model: SpikingModel, frames: Tensor, *, lengths: Tensor | None = None) -> Efficiency:
    """Measure firing rates, operations and energy of a network in evaluation mode.

    An event costs one addition for each neuron that it reaches, whatever its count. As usual, the elementwise work of
    the neurons is not counted. Warns with `ActivityWarning` of silent or saturated layers.

    Args:
        model: The network.
        frames: (batch, time, channels).
        lengths: (batch,) true lengths of right-padded recordings.
    """
    if not isinstance(model, SpikingModel):
        raise InputError(
            f"efficiency is defined for a SpikingModel; got {type(model).__name__}. Build one with nn.SpikingModelSpec."
        )
    if not len(frames):
        raise InputError(f"efficiency needs at least one recording; got frames of shape {tuple(frames.shape)}.")
    was_training = model.training
    model.eval()
    try:
        traces = model.trace(frames, lengths=lengths)
    finally:
        model.train(was_training)
    steps = float(frames.shape[0] * frames.shape[1] if lengths is None else torch.as_tensor(lengths).sum())
    layers = tuple(_measure_layer(model, i, trace, steps) for i, trace in enumerate(traces))
    fired = float(traces[-1].spikes.sum()) / steps
    decoder = model.decoder.projection
    readout = fired * decoder.out_features
    directions = sum(
        layer.direction_macs * MAC_ENERGY
        if layer.direction_additions is None
        else layer.direction_additions * AC_ENERGY
        for layer in layers
    )
    events = AC_ENERGY * (sum(layer.synaptic_operations for layer in layers) + readout)
    dense = sum(layer.dense_operations + layer.direction_macs for layer in layers) + decoder.macs
    for i, layer in enumerate(layers):
        if not SILENT <= layer.rate <= SATURATED:
            what = "almost never fires" if layer.rate < SILENT else "fires almost always"
            warnings.warn(
                f"layer {i} {what}: {layer.rate:.2g} spikes per neuron and step. Change the threshold, "
                "the scale of the batch norm before it, or the surrogate's width.",
                ActivityWarning,
                stacklevel=3,  # skips the decorator
            )
    return Efficiency(layers, readout, decoder.macs, events + directions, dense * MAC_ENERGY)


def _measure_layer(model: SpikingModel, i: int, trace: SpikingTrace, steps: float) -> LayerActivity:
    layer: Any = model.layers[i]
    projection: Projection = layer.currents.projection
    spikes = trace.spikes
    arriving = float((trace.inputs != 0).sum()) / steps
    fired = float(spikes.sum()) / steps
    macs, additions = _count_directions(layer.neurons.cell, fired)
    recurrent: Projection | None = getattr(layer.neurons.cell, "recurrent", None)
    recurrent_additions, recurrent_macs = (
        (0.0, 0) if recurrent is None else (fired * recurrent.out_features, recurrent.macs)
    )
    return LayerActivity(
        rate=fired / spikes.shape[-1],
        silent_neurons=float((spikes.sum((0, 1)) == 0).float().mean()),
        synaptic_operations=arriving * projection.out_features + recurrent_additions,
        dense_operations=projection.macs + recurrent_macs,
        direction_macs=macs,
        direction_additions=additions,
    )


def _count_directions(cell: object, fired: float) -> tuple[int, float | None]:
    """Return the multiply-accumulates of K and V, and their additions if their input is spikes."""
    if not isinstance(cell, SpikingADPTCell):
        return 0, None
    fast = cell.inner.fast if isinstance(cell.inner, CoupledCell) else cell.inner
    axes = cell.spec.cell
    if not axes.conjugate.has_directions or max(fast.beta.report()["used"]) == 0:
        return 0, None
    planes: Any = fast.directions
    macs = sum(plane.key_projection.macs + plane.value_projection.macs for plane in planes)
    of_spikes = isinstance(axes.direction, FromState) and axes.direction.spike is not None
    additions = 2 * len(fast.directions) * fired * axes.size / axes.heads
    return int(macs), additions if of_spikes else None
