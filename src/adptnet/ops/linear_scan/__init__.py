"""The diagonal linear recurrence x_t = a_t x_{t-1} + b_t."""

from .chunked import linear_scan

__all__ = ["linear_scan"]
