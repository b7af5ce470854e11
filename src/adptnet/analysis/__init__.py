"""Dynamics of any recurrent network: Lyapunov exponents, what is certain about them, and how parallel it can run."""

from .ball import Ball
from .bounds import Certificate, certificate, deviation_bounds, singular_value_shifts
from .capture import captured
from .convergence import LocalErrors, accumulated_error, jacobian_lipschitz, local_errors, overshoot, quadratic_basin
from .cost import Cost, cost
from .efficiency import ActivityWarning, Efficiency, efficiency
from .entropy import materialised, offdiagonal_entropy
from .flossing import gradient_flossing_loss
from .jacobians import jacobians, propagators
from .lyapunov import LyapunovSpectrum, lyapunov_exponents, mean_log_singular_values
from .parallelisability import Parallelisability, SolverReport, parallelisability
from .prediction import predicted_iterations
from .timescales import KeyValueStatistics, eigenvalue_spread, key_value_statistics, memory_horizon

__all__ = [
    "ActivityWarning",
    "Ball",
    "Certificate",
    "Cost",
    "Efficiency",
    "KeyValueStatistics",
    "LocalErrors",
    "LyapunovSpectrum",
    "Parallelisability",
    "SolverReport",
    "accumulated_error",
    "captured",
    "certificate",
    "cost",
    "deviation_bounds",
    "efficiency",
    "eigenvalue_spread",
    "gradient_flossing_loss",
    "jacobian_lipschitz",
    "jacobians",
    "key_value_statistics",
    "local_errors",
    "lyapunov_exponents",
    "materialised",
    "mean_log_singular_values",
    "memory_horizon",
    "offdiagonal_entropy",
    "overshoot",
    "parallelisability",
    "predicted_iterations",
    "propagators",
    "quadratic_basin",
    "singular_value_shifts",
]
