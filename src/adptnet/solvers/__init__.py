"""Solvers, which compute the states of a sequence, sequentially or in parallel over time.

All solvers are called in the same way and return a `Solution`.
"""

from . import distributed, linearizations
from .auto import Auto
from .base import Result, Solution, Solver
from .blockwise import BlockWise
from .damping import Adaptive, Damping, Proximal, Scale, TrustRegion
from .newton import DEER, ConvDEER, ForwardDEER, Jacobi, KoopmanDEER, Newton, Picard, QuasiDEER
from .policies import Finish, Policy, Raise, Return
from .sequential import Sequential

__all__ = [
    "DEER",
    "Adaptive",
    "Auto",
    "BlockWise",
    "ConvDEER",
    "Damping",
    "Finish",
    "ForwardDEER",
    "Jacobi",
    "KoopmanDEER",
    "Newton",
    "Picard",
    "Policy",
    "Proximal",
    "QuasiDEER",
    "Raise",
    "Result",
    "Return",
    "Scale",
    "Sequential",
    "Solution",
    "Solver",
    "TrustRegion",
    "distributed",
    "linearizations",
]
