"""Solvers: how all steps of a sequence are found. The same call for each, and the same `Solution`."""

from .base import Result, Solution, Solver
from .sequential import Sequential

__all__ = ["Result", "Sequential", "Solution", "Solver"]
