"""The tests behind verdicts: rank correlation, paired differences with an interval, containment."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Difference", "paired", "rank_correlation", "within"]

# Student's t, two-sided 95 %, for 1, 2, … degrees of freedom
_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's, with mean ranks for ties; NaN if either is constant or has a NaN."""
    first, second = _ranks(x), _ranks(y)
    if np.isnan([*x, *y]).any() or len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    _, inverse, counts = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: np.ndarray[tuple[int], np.dtype[np.float64]] = (last - (counts - 1) / 2)[inverse]
    return ranks


class Difference(NamedTuple):
    """The mean of paired differences, and its 95 % interval by Student's t."""

    mean: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.mean:+.3g} [{self.low:+.3g}, {self.high:+.3g}] over {self.pairs} pairs"


def paired(first: Sequence[float], second: Sequence[float]) -> Difference:
    """`first` minus `second`, pair by pair. One pair has no interval: it is everything."""
    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    count = len(differences)
    mean = float(differences.mean())
    if count < 2:
        return Difference(mean, -math.inf, math.inf, count)
    t = _T[count - 2] if count - 2 < len(_T) else 1.96
    half = t * float(differences.std(ddof=1)) / math.sqrt(count)
    return Difference(mean, mean - half, mean + half, count)


def within(values: Sequence[float], low: float, high: float) -> float:
    """How far the values leave [low, high] at most; negative if all are inside, infinite if one is NaN."""
    if np.isnan(values).any():
        return math.inf
    return max(low - min(values), max(values) - high)
