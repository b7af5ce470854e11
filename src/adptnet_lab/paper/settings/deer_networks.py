"""Networks and solvers of the iteration counts (table:baseline_deer_untrained_config)."""

from typing import Any

from torch import Tensor

from adptnet import drive, solvers, spectra
from adptnet.nn import ADPTNet

__all__ = ["MAX_ITERATIONS", "METHODS", "RTOL", "build_network", "make_solver", "solve"]

RTOL = 6.4e-6  # relative tolerance; about three quarters of the digits of float32
METHODS = {"Quasi": solvers.QuasiDEER, "Forward": solvers.ForwardDEER, "Conv": solvers.ConvDEER}
MAX_ITERATIONS = 150


def build_network(width: int, beta: float, dt_min: float, dt_max: float = 1e-1, negative: float = 0.0) -> ADPTNet:
    """Return a layer with dense K and V, EMA gain, RoPE, decay 0.5 and logarithmically spaced Δt, without gradients.

    Args:
        width: Width and state dimension.
        beta: β.
        dt_min: Smallest Δt.
        dt_max: Largest Δt.
        negative: Fraction of negative eigenvalues.
    """
    spectrum: spectra.SpectrumSpec = spectra.Linspace(dt_min=dt_min, dt_max=dt_max, decay=0.5)
    if negative:
        spectrum = spectra.Negative(spectrum, negative)
    layer = ADPTNet.paper(width, beta=beta, spectrum=spectrum, rope=drive.RoPE(), gain=drive.EMA())
    return layer.requires_grad_(False)


def make_solver(method: str, damping_factor: float = 1.0, **options: Any) -> Any:
    """Return a solver that iterates every sequence to the end and returns iterates that did not converge.

    Args:
        method: A key of `METHODS`.
        damping_factor: Factor of `solvers.Scale`; 1 means no damping.
        **options: Further options of the solver.
    """
    damping = solvers.Scale(damping_factor) if damping_factor < 1 else None
    return METHODS[method](damping, rtol=RTOL, patience=None, on_failure=solvers.Return(), **options)


def solve(method: str, layer: ADPTNet, x: Tensor, max_iterations: int = MAX_ITERATIONS) -> solvers.Solution:
    """Solve a layer without damping.

    Args:
        method: A key of `METHODS`.
        layer: The layer.
        x: Inputs, (batch, time, width).
        max_iterations: Limit on the number of iterations.
    """
    solution: solvers.Solution = make_solver(method, max_iterations=max_iterations)(layer.cell, x)
    return solution
