"""Cells: one step of a recurrence each. Any solver runs any cell."""

from .adpt import ADPTCell
from .base import ADPTState, Cell, CellSpec
from .baselines import OrthogonalRNN, OrthogonalRNNCell, ReLURNN, ReLURNNCell, TanhRNN, TanhRNNCell
from .coupled import CoupledCell
from .function_cell import from_function
from .gated import GRU, LSTM
from .spec import ADPTSpec, SlowMemory
from .spiking import (
    ALIF,
    LIF,
    AdLIF,
    ATan,
    Boxcar,
    CSiLIF,
    DelayedLIF,
    FastSigmoid,
    LeakyIntegrator,
    ResonateAndFire,
    Sigmoid,
    SiLIF,
    SpikingADPT,
    SpikingADPTCell,
    SpikingCell,
    Triangle,
)
from .stateful import StatefulCell
from .structure import Structure
from .wrap import from_torch

__all__ = [
    "ALIF",
    "GRU",
    "LIF",
    "LSTM",
    "ADPTCell",
    "ADPTSpec",
    "ADPTState",
    "ATan",
    "AdLIF",
    "Boxcar",
    "CSiLIF",
    "Cell",
    "CellSpec",
    "CoupledCell",
    "DelayedLIF",
    "FastSigmoid",
    "LeakyIntegrator",
    "OrthogonalRNN",
    "OrthogonalRNNCell",
    "ReLURNN",
    "ReLURNNCell",
    "ResonateAndFire",
    "SiLIF",
    "Sigmoid",
    "SlowMemory",
    "SpikingADPT",
    "SpikingADPTCell",
    "SpikingCell",
    "StatefulCell",
    "Structure",
    "TanhRNN",
    "TanhRNNCell",
    "Triangle",
    "from_function",
    "from_torch",
]
