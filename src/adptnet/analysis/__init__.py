"""Analysis of recurrent dynamics: Lyapunov exponents, certified bounds, and how well a network runs in parallel."""

from .ball import Ball
from .certificate import Certificate, certificate
from .convergence import LocalErrors, accumulated_error, jacobian_lipschitz, local_errors, overshoot, quadratic_basin
from .cost import Cost, cost
from .entropy import materialize_conjugate, offdiagonal_entropy
from .flossing import gradient_flossing_loss
from .jacobians import jacobians, propagators
from .layer_inputs import record_layer_inputs
from .lyapunov import LyapunovSpectrum, lyapunov_exponents, mean_log_singular_values
from .parallelizability import Parallelizability, SolverReport, parallelizability
from .prediction import predict_iterations
from .spiking_efficiency import ActivityWarning, Efficiency, efficiency
from .timescales import KeyValueStatistics, eigenvalue_spread, key_value_statistics, memory_horizon
from .trajectory_bounds import deviation_bounds, singular_value_shifts

__all__ = [
    "ActivityWarning",
    "Ball",
    "Certificate",
    "Cost",
    "Efficiency",
    "KeyValueStatistics",
    "LocalErrors",
    "LyapunovSpectrum",
    "Parallelizability",
    "SolverReport",
    "accumulated_error",
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
    "materialize_conjugate",
    "mean_log_singular_values",
    "memory_horizon",
    "offdiagonal_entropy",
    "overshoot",
    "parallelizability",
    "predict_iterations",
    "propagators",
    "quadratic_basin",
    "record_layer_inputs",
    "singular_value_shifts",
]
