"""The linear recurrence x_t = A_t x_{t-1} + b_t with dense matrices."""

from .chunked import matrix_scan

__all__ = ["matrix_scan"]
