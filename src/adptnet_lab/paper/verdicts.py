"""Verdicts on claims, and the rules that turn an estimate with its interval into one.

A claim that something is larger *holds* if the 95 % interval of the difference is above zero, and *fails* if the
interval excludes an effect of the size that matters, which is half of the paper's own effect where it prints one. In
between the data do not decide: the verdict is *undecided*, and states which effect the runs could have detected and how
many would decide. A claim that must hold in every run fails with the first exception, and needs three runs to hold.
"""

import enum
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from .evidence import (
    Estimate,
    count_seeds_to_decide,
    detectable_effect,
    estimate_mean,
    estimate_share,
    prediction_interval,
)

__all__ = [
    "FEWEST_RUNS",
    "MARKS",
    "ClaimVerdict",
    "Outcome",
    "Scale",
    "combine",
    "decide",
    "judge_absence",
    "judge_equal",
    "judge_every",
    "judge_increase",
    "judge_limit",
    "judge_observation",
    "judge_share",
    "judge_trained",
    "not_testable",
]

Scale = Literal["smoke", "laptop", "paper"]

FEWEST_RUNS = 3  # that a statement about every run needs before it holds


class Outcome(enum.StrEnum):
    """The possible outcomes of testing a claim."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"
    NOT_TESTABLE = "not testable"
    NOT_RUN = "not run"


MARKS = {
    Outcome.HOLDS: "✓",
    Outcome.FAILS: "✗",
    Outcome.UNDECIDED: "?",
    Outcome.NOT_TESTABLE: "–",
    Outcome.NOT_RUN: "·",
}


class ClaimVerdict(NamedTuple):
    """The outcome of a test, with the evidence that decides it.

    Attributes:
        outcome: The outcome.
        why: The numbers that decide it, in words.
        estimate: The deciding number with its interval; None if it is exact, such as a count of operations.
        runs: Number of independent runs (seeds, networks) behind it.
        needs: For an undecided claim: the effect that these runs could have detected, and how many would decide.
        scale: Scale of the rows.
        reduction: By how much points of the scale `paper` are smaller than the paper's; empty if they are not.
        by_size: Whether the claim fails only because an effect of the paper's size is excluded, not its sign.
        cause: For a failing claim: "paper", "ours" or "scale".
        because: The cause in words.
    """

    outcome: Outcome
    why: str
    estimate: Estimate | None = None
    runs: int = 1
    needs: str = ""
    scale: Scale | None = None
    reduction: str = ""
    by_size: bool = False
    cause: str = ""
    because: str = ""

    @property
    def is_at_size(self) -> bool:
        """Whether the rows have the paper's own size."""
        return self.scale == "paper" and not self.reduction

    @property
    def interval(self) -> str:
        """The deciding number with its interval; "exact" if no run-to-run variation enters; empty without a verdict."""
        if self.outcome in (Outcome.NOT_RUN, Outcome.NOT_TESTABLE):
            return ""
        return "exact" if self.estimate is None else str(self.estimate)


def not_testable(why: str) -> ClaimVerdict:
    """Return the verdict `not testable`.

    Args:
        why: Why these rows cannot test the claim.
    """
    return ClaimVerdict(Outcome.NOT_TESTABLE, why)


def decide(holds: bool, why: str, *, runs: int = 1) -> ClaimVerdict:
    """Return `holds` or `fails` for a statement whose numbers do not vary between runs, such as a count or a theorem.

    Args:
        holds: Result of the test.
        why: The numbers that decide it.
        runs: Number of cases that were computed.
    """
    return ClaimVerdict(Outcome.HOLDS if holds else Outcome.FAILS, why, None, runs)


def judge_increase(found: Estimate, relevant: float, why: str = "") -> ClaimVerdict:
    """Judge the claim that a difference is positive.

    Args:
        found: The difference.
        relevant: Smallest difference that matters: the claim fails if the interval lies below it and is not above 0.
        why: Further numbers, appended to the estimate.
    """
    if found.low > 0:
        outcome = Outcome.HOLDS
    elif found.high < relevant:
        outcome = Outcome.FAILS
    else:
        outcome = Outcome.UNDECIDED
    verdict = _conclude(outcome, found, relevant, why)
    return verdict._replace(by_size=outcome == Outcome.FAILS and found.high >= 0)


def judge_absence(found: Estimate, relevant: float, why: str = "") -> ClaimVerdict:
    """Judge the claim that there is no increase.

    Args:
        found: The difference.
        relevant: Smallest increase that matters: the claim holds if the interval lies below it.
        why: Further numbers, appended to the estimate.
    """
    outcome = Outcome.HOLDS if found.high < relevant else Outcome.FAILS if found.low > 0 else Outcome.UNDECIDED
    return _conclude(outcome, found, relevant, why)


def judge_equal(found: Estimate, margin: float, why: str = "") -> ClaimVerdict:
    """Judge the claim that two conditions are alike: the interval of their difference lies within a margin.

    Args:
        found: The difference.
        margin: Largest difference that counts as alike.
        why: Further numbers, appended to the estimate.
    """
    if -margin < found.low and found.high < margin:
        outcome = Outcome.HOLDS
    elif found.low > margin or found.high < -margin:
        outcome = Outcome.FAILS
    else:
        outcome = Outcome.UNDECIDED
    return _conclude(outcome, found, margin, why)


def judge_limit(
    found: Estimate, *, above: float | None = None, below: float | None = None, why: str = ""
) -> ClaimVerdict:
    """Judge the claim that a number lies above or below a limit.

    Args:
        found: The number.
        above: Limit that the number is claimed to exceed.
        below: Limit that the number is claimed to stay below; exactly one of the two is given.
        why: Further numbers, appended to the estimate.
    """
    limit = above if above is not None else below
    assert limit is not None
    inside, outside = (
        (found.low > limit, found.high < limit) if above is not None else (found.high < limit, found.low > limit)
    )
    if found.low == found.high == limit:  # every run is at the limit, which counts as reaching it
        inside = True
    outcome = Outcome.HOLDS if inside else Outcome.FAILS if outside else Outcome.UNDECIDED
    return _conclude(outcome, found, abs(found.mean - limit), why)


def judge_observation(values: Sequence[float], reported: float, why: str = "") -> ClaimVerdict:
    """Judge a number that the paper reports for one network: the 95 % prediction interval of one more run contains it.

    Args:
        values: The number for each of our networks.
        reported: The paper's number.
        why: Further numbers, appended.
    """
    found, (low, high) = estimate_mean(values), prediction_interval(values)
    outcome = Outcome.HOLDS if low <= reported <= high else Outcome.FAILS
    if found.runs < FEWEST_RUNS:
        outcome = Outcome.UNDECIDED
    text = f"{reported:g} against {low:.2g} to {high:.2g}, where 95 % of our networks lie" + (f"; {why}" if why else "")
    return _conclude(outcome, found, abs(found.mean - reported), text)


def judge_every(inside: Sequence[bool], why: str, unit: str = "of the networks") -> ClaimVerdict:
    """Judge a statement about every run: one exception refutes it, and fewer than three runs do not confirm it.

    Args:
        inside: Whether the statement is true, run by run.
        why: The extreme numbers.
        unit: What the runs are, for printing.
    """
    if all(inside):
        return judge_trained(inside, why, unit)
    found = estimate_share(sum(inside), len(inside), unit)
    return ClaimVerdict(Outcome.FAILS, why, found, found.runs)


def judge_trained(inside: Sequence[bool], why: str, unit: str = "of the seeds") -> ClaimVerdict:
    """Judge a statement about networks that the paper trained once: fewer than three runs decide nothing, either way.

    Args:
        inside: Whether the statement is true, run by run.
        why: The extreme numbers.
        unit: What the runs are, for printing.
    """
    found = estimate_share(sum(inside), len(inside), unit)
    decided = Outcome.HOLDS if all(inside) else Outcome.FAILS
    outcome = Outcome.UNDECIDED if found.runs < FEWEST_RUNS else decided
    needs = "" if outcome != Outcome.UNDECIDED else _describe_few(found.runs)
    return ClaimVerdict(outcome, why, found, found.runs, needs)


def judge_share(successes: int, runs: int, least: float, why: str, unit: str = "of the runs") -> ClaimVerdict:
    """Judge the claim that at least a certain share of cases has a property.

    Args:
        successes: Number of cases with the property.
        runs: Number of cases.
        least: The share.
        why: Further numbers.
        unit: What the cases are, for printing.
    """
    return judge_limit(estimate_share(successes, runs, unit), above=least, why=why)


def combine(verdicts: Sequence[ClaimVerdict], why: str = "") -> ClaimVerdict:
    """Return the verdict on a claim of several parts: it fails with any of them, and holds only with all.

    Args:
        verdicts: Verdicts on the parts.
        why: Numbers of all parts. Default: those of the parts, joined.
    """
    for outcome in (Outcome.FAILS, Outcome.UNDECIDED, Outcome.NOT_TESTABLE, Outcome.HOLDS):
        deciding = [verdict for verdict in verdicts if verdict.outcome == outcome]
        if deciding:
            break
    text = why or "; ".join(dict.fromkeys(verdict.why for verdict in verdicts))
    return deciding[0]._replace(why=text, runs=min(verdict.runs for verdict in verdicts))


def _conclude(outcome: Outcome, found: Estimate, effect: float, why: str) -> ClaimVerdict:
    text = f"{found}" + (f"; {why}" if why else "")
    needs = _describe_power(found, effect) if outcome == Outcome.UNDECIDED else ""
    return ClaimVerdict(outcome, text, found, found.runs, needs)


def _describe_few(runs: int) -> str:
    return (
        f"{'one run has' if runs == 1 else f'{runs} runs have'} too little to say about all: {FEWEST_RUNS} would decide"
    )


def _describe_power(found: Estimate, effect: float) -> str:
    """Say which effect the runs could have detected, and how many would decide."""
    unit = found.unit.removeprefix("Δ").strip()
    unit = f" {unit}" if unit and not unit.startswith(("(", "of")) else ""
    if found.runs < 2:
        return f"one run shows no spread between seeds; {FEWEST_RUNS} are the least that can decide"
    if math.isnan(found.deviation):
        return f"the interval of {found.runs} runs is too wide; more runs are needed"
    seen = detectable_effect(found.deviation, found.runs)
    count = count_seeds_to_decide(found.deviation, effect)
    more = (
        f"{count} seeds would detect {effect:.2g}{unit}"
        if count
        else f"no affordable number would detect {effect:.2g}{unit}"
    )
    return f"{found.runs} seeds could have detected {seen:.2g}{unit} (with 80 % probability); {more}"
