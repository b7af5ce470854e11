"""Cells: what one step is. A solver needs nothing else."""

from .adpt import ADPTCell
from .base import ADPTState, Cell, CellSpec
from .baselines import OrthogonalRNN, OrthogonalRNNCell, ReLURNN, ReLURNNCell, TanhRNN, TanhRNNCell
from .coupled import CoupledCell
from .gated import GRU, LSTM
from .spec import ADPTSpec, SlowMemory
from .stateful import StatefulCell
from .wrap import from_function, from_torch

__all__ = [
    "GRU",
    "LSTM",
    "ADPTCell",
    "ADPTSpec",
    "ADPTState",
    "Cell",
    "CellSpec",
    "CoupledCell",
    "OrthogonalRNN",
    "OrthogonalRNNCell",
    "ReLURNN",
    "ReLURNNCell",
    "SlowMemory",
    "StatefulCell",
    "TanhRNN",
    "TanhRNNCell",
    "from_function",
    "from_torch",
]
