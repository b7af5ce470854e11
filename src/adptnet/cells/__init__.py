"""Cells: what one step is. A solver needs nothing else."""

from .adpt import ADPTCell, ADPTSpec
from .base import ADPTState, Cell, CellSpec
from .baselines import ReLURNN, ReLURNNCell
from .wrap import from_function, from_torch

__all__ = [
    "ADPTCell",
    "ADPTSpec",
    "ADPTState",
    "Cell",
    "CellSpec",
    "ReLURNN",
    "ReLURNNCell",
    "from_function",
    "from_torch",
]
