"""The Kalman filter of a linear recurrence, for trust-region solvers (ELK)."""

from .parallel import diagonal_filter, matrix_filter

__all__ = ["diagonal_filter", "matrix_filter"]
