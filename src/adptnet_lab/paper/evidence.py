"""Statistics behind the verdicts: estimates with 95 % intervals, and the number of seeds that would decide."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

__all__ = [
    "EXPONENT_TOLERANCE",
    "OUTLIER_FACTOR",
    "Estimate",
    "count_seeds_to_decide",
    "detectable_effect",
    "estimate_mean",
    "estimate_share",
    "estimate_trend",
    "has_outlier",
    "largest_excess",
    "paired_difference",
    "prediction_interval",
    "rank_correlation",
    "student_quantile",
]

# how far exponents may lie outside the interval of ln λ̄, as a fraction of its width; they vary more between networks
EXPONENT_TOLERANCE = 0.01

# a count is an outlier if it exceeds this factor times the median of its sample
OUTLIER_FACTOR = 2.0

Values = Sequence[float] | np.ndarray[tuple[int, ...], np.dtype[np.float64]]

_POWER = 0.8  # probability with which an effect of the stated size is detected
_MOST_SEEDS = 1000


class Estimate(NamedTuple):
    """A number estimated from independent runs, with its 95 % confidence interval.

    Attributes:
        mean: The estimate.
        low: Lower end of the interval.
        high: Upper end of the interval.
        runs: Number of independent runs, or of pairs of runs, that it rests on.
        unit: Unit, for printing. A leading Δ or "point" marks a difference, "of the …" a share, printed in percent.
        deviation: Standard deviation between runs; NaN if it is unknown.
    """

    mean: float
    low: float
    high: float
    runs: int
    unit: str = ""
    deviation: float = math.nan

    def __str__(self) -> str:
        unit = self.unit.removeprefix("Δ").strip()
        sign = "+" if self.unit.startswith(("Δ", "point")) else ""
        scale = 1.0
        if unit.startswith("of the "):  # a share
            scale, unit = 100.0, f"% {unit}"
        values = [scale * value for value in (self.mean, self.low, self.high)]
        mean, low, high = (f"{value:{sign}.3g}" if math.isfinite(value) else "?" for value in values)
        unit = " " * bool(unit) + unit
        return f"{mean}{unit} (no interval)" if low == high == "?" else f"{mean} [{low}, {high}]{unit}"


@functools.cache
def student_quantile(probability: float, degrees: int) -> float:
    """Return a quantile of Student's t distribution.

    Args:
        probability: In (0, 1).
        degrees: Degrees of freedom, at least 1.
    """
    if probability < 0.5:
        return -student_quantile(1 - probability, degrees)
    # The density is integrated by the trapezoidal rule in equal steps of ln(1 + t), which resolve both the centre and
    # the heavy tail at one degree of freedom; the relative error is below 10⁻⁷ up to 0.975 (compared with scipy).
    t = np.expm1(np.linspace(0, math.log(1e4), 200_001))
    density = (1 + t**2 / degrees) ** (-(degrees + 1) / 2)
    cumulative = np.concatenate([[0.0], np.cumsum(np.diff(t) * (density[1:] + density[:-1]) / 2)])
    constant = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    return float(np.interp(probability - 0.5, constant * cumulative, t))


def estimate_mean(values: Values, unit: str = "") -> Estimate:
    """Return the mean of independent runs, with its interval by Student's t.

    Args:
        values: One value per run.
        unit: Unit, for printing.

    Returns:
        The estimate. With a single run the interval is the whole real line.
    """
    array = np.asarray(values, dtype=float)
    mean, count = float(array.mean()), len(array)
    if count < 2:
        return Estimate(mean, -math.inf, math.inf, count, unit)
    deviation = float(array.std(ddof=1))
    half = student_quantile(0.975, count - 1) * deviation / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, count, unit, deviation)


def paired_difference(first: Values, second: Values, unit: str = "") -> Estimate:
    """Return the mean of `first` minus `second`, pair by pair, with its interval.

    Args:
        first: Values under the first condition.
        second: Values under the second condition, in the same order.
        unit: Unit, for printing.
    """
    return estimate_mean(np.asarray(first, dtype=float) - np.asarray(second, dtype=float), unit)


def prediction_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval in which one more run lies with a probability of 95 %.

    Args:
        values: One value per run.
    """
    found = estimate_mean(values)
    if found.runs < 2:
        return -math.inf, math.inf
    half = student_quantile(0.975, found.runs - 1) * found.deviation * math.sqrt(1 + 1 / found.runs)
    return found.mean - half, found.mean + half


def estimate_share(successes: int, runs: int, unit: str = "of the runs") -> Estimate:
    """Return a share of runs with its exact (Clopper-Pearson) 95 % interval.

    Args:
        successes: Number of runs with the property.
        runs: Number of runs.
        unit: What the runs are, for printing.
    """
    if not runs:
        return Estimate(math.nan, 0.0, 1.0, 0, unit)
    low = 0.0 if successes == 0 else _solve_binomial(lambda p: 1 - _binomial_cdf(successes - 1, runs, p) - 0.025)
    high = 1.0 if successes == runs else _solve_binomial(lambda p: 0.025 - _binomial_cdf(successes, runs, p))
    return Estimate(successes / runs, low, high, runs, unit)


def _binomial_cdf(successes: int, runs: int, share: float) -> float:
    return sum(math.comb(runs, k) * share**k * (1 - share) ** (runs - k) for k in range(successes + 1))


def _solve_binomial(increasing: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if increasing(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


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


def estimate_trend(x: Sequence[float], y: Sequence[float]) -> Estimate:
    """Return Spearman's rank correlation over runs, with Bonett and Wright's interval.

    Args:
        x: The setting of each run.
        y: The result of each run.

    Returns:
        The correlation, 0 if it is undefined; then, and with fewer than four runs, the interval is [-1, 1].
    """
    found, runs = rank_correlation(x, y), len(x)
    if math.isnan(found) or runs < 4:
        return Estimate(0.0 if math.isnan(found) else found, -1.0, 1.0, runs, "(rank correlation)")
    clipped = min(max(found, -1 + 1 / runs**2), 1 - 1 / runs**2)  # the transform is infinite at ±1
    half = 1.96 * math.sqrt((1 + clipped**2 / 2) / (runs - 3))
    low, high = (math.tanh(math.atanh(clipped) + side * half) for side in (-1, 1))
    return Estimate(found, low, high, runs, "(rank correlation)")


def detectable_effect(deviation: float, runs: int) -> float:
    """Return the effect that a comparison of this many pairs of runs detects with a probability of 80 %.

    Args:
        deviation: Standard deviation between pairs.
        runs: Number of pairs.

    Returns:
        The effect, for a two-sided test at the 5 % level; infinite if there is one pair or `deviation` is NaN.
    """
    if runs < 2 or math.isnan(deviation):
        return math.inf
    factor = student_quantile(0.975, runs - 1) + student_quantile(_POWER, runs - 1)
    return factor * deviation / math.sqrt(runs)


def count_seeds_to_decide(deviation: float, effect: float) -> int | None:
    """Return the number of pairs with which an effect of the given size is detected with a probability of 80 %.

    Args:
        deviation: Standard deviation between pairs.
        effect: The effect.

    Returns:
        The number; None if it is above a thousand, `deviation` is NaN or `effect` is not positive.
    """
    if math.isnan(deviation) or effect <= 0 or detectable_effect(deviation, _MOST_SEEDS) > effect:
        return None
    low, high = 1, _MOST_SEEDS  # the detectable effect decreases with the number of pairs
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if detectable_effect(deviation, middle) <= effect else (middle, high)
    return high


def has_outlier(counts: Sequence[float]) -> bool:
    """Return whether a count is above `OUTLIER_FACTOR` times the median. This is the only definition of an outlier.

    Args:
        counts: The counts.
    """
    return bool(max(counts) > OUTLIER_FACTOR * np.median(counts))


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
