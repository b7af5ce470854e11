"""Dynamics of any recurrent network: Lyapunov exponents, what is certain about them, and how parallel it can run."""

from .ball import Ball
from .bounds import Certificate, certificate, deviation_bounds, singular_value_shifts
from .flossing import gradient_flossing_loss
from .jacobians import jacobians, propagators
from .lyapunov import LyapunovSpectrum, lyapunov_exponents, mean_log_singular_values

__all__ = [
    "Ball",
    "Certificate",
    "LyapunovSpectrum",
    "certificate",
    "deviation_bounds",
    "gradient_flossing_loss",
    "jacobians",
    "lyapunov_exponents",
    "mean_log_singular_values",
    "propagators",
    "singular_value_shifts",
]
