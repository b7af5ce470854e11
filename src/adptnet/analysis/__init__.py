"""Analysis of recurrent dynamics: Lyapunov exponents, certified bounds, and convergence of parallel-in-time solvers.

lyapunov             Lyapunov exponents, and mean log singular values of the Jacobians
jacobians            Jacobians along a trajectory, and their products over several steps (`propagators`)
certificate          proved bounds on Jacobians and exponents, for every input or along one trajectory
trajectory_bounds    such bounds on single Jacobians, at given states or at each step of one trajectory
ball                 `Ball`: a bound on the norm of the state, for every input
timescales           eigenvalue spread, memory horizon, angle between key and value
entropy              M as a dense matrix, and the entropy of its off-diagonal entries
parallelizability    a report on the parallel solvers: exponents, contraction, iterations, advice
prediction           predicted iterations of a parallel solver
convergence          error theory of Newton iterations over time: local errors, `overshoot`, quadratic basin
cost                 multiply-accumulates of a step and of its linearizations
spiking_efficiency   firing rates, operations and energy of a spiking network: `efficiency`, `ActivityWarning`
flossing             gradient flossing, a loss on the Lyapunov exponents
layer_inputs         the inputs of the recurrent layers inside a model

`head_constants`, `trajectory` and `recompute` serve the others; `plot`, `verify` and `explain` are imported separately.
"""

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
