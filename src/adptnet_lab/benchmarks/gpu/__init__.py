"""`adptnet bench gpu`: check the GPU kernels on this card, then time them, and write one JSON file to send in.

kernel_checks   every kernel against its reference in float64: values and gradients
timings         layers, solvers and training against other recurrent layers
report          the JSON file, and the row for docs/explanation/gpu.md
"""

from .report import run_gpu

__all__ = ["run_gpu"]
