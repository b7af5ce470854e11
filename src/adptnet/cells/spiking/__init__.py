"""Spiking cells, whose output is spikes, and leaky integrators for read-outs. Their interface is that of all cells."""

from .adaptive import ALIF, AdLIF, AdLIFCell, ALIFCell, SiLIF, SiLIFCell
from .adpt import SpikingADPT, SpikingADPTCell
from .base import NeuronSpec, SpikeReset, SpikingCell
from .lif import LIF, DelayedLIF, DelayedLIFCell, LeakyIntegrator, LeakyIntegratorCell, LIFCell
from .resonant import CSiLIF, CSiLIFCell, ResonateAndFire, ResonateAndFireCell
from .surrogate import ATan, Boxcar, FastSigmoid, Sigmoid, Spike, SpikeFunction, Triangle

__all__ = [
    "ALIF",
    "LIF",
    "ALIFCell",
    "ATan",
    "AdLIF",
    "AdLIFCell",
    "Boxcar",
    "CSiLIF",
    "CSiLIFCell",
    "DelayedLIF",
    "DelayedLIFCell",
    "FastSigmoid",
    "LIFCell",
    "LeakyIntegrator",
    "LeakyIntegratorCell",
    "NeuronSpec",
    "ResonateAndFire",
    "ResonateAndFireCell",
    "SiLIF",
    "SiLIFCell",
    "Sigmoid",
    "Spike",
    "SpikeFunction",
    "SpikeReset",
    "SpikingADPT",
    "SpikingADPTCell",
    "SpikingCell",
    "Triangle",
]
