"""Statistics behind the verdicts: rank correlation, paired differences with a confidence interval, containment."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["EXPONENT_TOLERANCE", "PairedDifference", "largest_excess", "paired_difference", "rank_correlation"]

# by which exponents may leave the interval of ln λ̄, as a fraction of its width
EXPONENT_TOLERANCE = 0.01

# Student's t, two-sided 95 %, for 1, 2, … degrees of freedom
_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Spearman's rank correlation, with mean ranks for ties.

    Args:
        x: Values of the first variable.
        y: Values of the second variable, as many as `x`.

    Returns:
        A number in [-1, 1]; NaN if either variable is constant or contains a NaN.
    """
    first, second = _ranks(x), _ranks(y)
    if np.isnan([*x, *y]).any() or len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    _, inverse, counts = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: np.ndarray[tuple[int], np.dtype[np.float64]] = (last - (counts - 1) / 2)[inverse]
    return ranks


class PairedDifference(NamedTuple):
    """The mean of paired differences, with its 95 % confidence interval by Student's t."""

    mean: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.mean:+.3g} [{self.low:+.3g}, {self.high:+.3g}] over {self.pairs} pairs"


def paired_difference(first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    """Return the mean of `first` minus `second`, pair by pair, with its confidence interval.

    Args:
        first: Values under the first condition.
        second: Values under the second condition, in the same order.

    Returns:
        The difference. With a single pair the interval is the whole real line.
    """
    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    count = len(differences)
    mean = float(differences.mean())
    if count < 2:
        return PairedDifference(mean, -math.inf, math.inf, count)
    t = _T[count - 2] if count - 2 < len(_T) else 1.96
    half = t * float(differences.std(ddof=1)) / math.sqrt(count)
    return PairedDifference(mean, mean - half, mean + half, count)


def largest_excess(values: Sequence[float], low: float, high: float) -> float:
    """Return the largest distance by which a value leaves [low, high].

    Args:
        values: The values.
        low: Lower end of the interval.
        high: Upper end of the interval.

    Returns:
        The distance; negative if all values are inside, infinite if one is NaN.
    """
    if np.isnan(values).any():
        return math.inf
    return max(low - min(values), max(values) - high)
