"""The benchmarks of `adptnet bench`, by name."""

from ..benchmark import Benchmark
from .auto import AUTO
from .calls import CALLS
from .exponents import EXPONENTS
from .generation import GENERATION
from .growth import GROWTH_BATCH, GROWTH_TIME
from .layers import LAYERS
from .loops import LOOPS
from .memory import MEMORY
from .recurrence import RECURRENCE
from .rotations import ROTATIONS
from .scans import SCANS
from .solvers import SOLVERS
from .torch_cells import TORCH_CELLS
from .widths import WIDTHS

__all__ = ["BENCHMARKS"]

BENCHMARKS: dict[str, Benchmark] = {
    "recurrence": RECURRENCE,
    "loops": LOOPS,
    "layers": LAYERS,
    "calls": CALLS,
    "generation": GENERATION,
    "widths": WIDTHS,
    "growth-time": GROWTH_TIME,
    "growth-batch": GROWTH_BATCH,
    "rotations": ROTATIONS,
    "scans": SCANS,
    "solvers": SOLVERS,
    "torch-cells": TORCH_CELLS,
    "auto": AUTO,
    "exponents": EXPONENTS,
    "memory": MEMORY,
}
