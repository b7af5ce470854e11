"""`adptnet compare`: a verdict for every claim, from the rows there are."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tyro.conf import Positional

from .recipe import SCALES, Check, Outcome, Part, Point, Rows, Scale, Verdict
from .registry import Claim, ReproductionError, Result, find
from .rows import WRITTEN, Shelf, choose_shelf

__all__ = ["Compare", "Judged", "judge", "notice", "progress", "run"]


@dataclass(frozen=True)
class Compare:
    """Say for each claim of the paper whether it holds, fails, cannot be tested at this scale, or has not been run."""

    labels: Positional[tuple[str, ...]] = ()
    """Labels of the paper; all of them if none is given."""
    scale: Scale | None = None
    """Rows of this scale; for each result the largest that is complete if not given."""
    rows: Path | None = None
    """Folder of the rows. If not given, runs/paper where reproduce writes them, or, if that has none, results, the rows
    that the repository comes with."""


class Judged(NamedTuple):
    """A result with its rows and a verdict for each of its claims."""

    result: Result
    scale: Scale | None  # None if nothing was run
    rows: Rows
    verdicts: list[tuple[Claim, Verdict]]
    spoilt: str = ""  # what is wrong with the rows: nothing is drawn from them


def judge(result: Result, shelf: Shelf, scale: Scale | None = None) -> Judged:
    """The verdicts on a result, at `scale` or the largest scale that is complete; a claim may need a part of it."""
    scales: Sequence[Scale] = [scale] if scale else SCALES[::-1]
    whole = _largest(result, shelf, scales)
    verdicts = []
    for claim in result.claims:
        check = result.recipe.checks[claim.id]
        found = _largest(result, shelf, scales, check.part) if check.part else whole
        try:
            verdict = _verdict(check, found, whole)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise ReproductionError(
                f"{result.name}: its rows at the scale {found.scale} lack what the test of {claim.id!r} needs "
                f"({type(error).__name__}: {error}). If they were edited, take their file away and run them again."
            ) from error
        if found.scale not in (None, whole.scale):
            verdict = verdict._replace(why=f"scale {found.scale}: {verdict.why}")
        verdicts.append((claim, verdict))
    return Judged(result, whole.scale, whole.rows, verdicts, whole.spoilt)


class _Found(NamedTuple):
    """The rows of the largest scale that is complete; or why there are none."""

    scale: Scale | None
    rows: Rows
    missing: str = ""
    spoilt: str = ""


def _largest(result: Result, shelf: Shelf, scales: Sequence[Scale], part: Part | None = None) -> _Found:
    begun = []
    for scale in scales:
        rows, left = shelf.rows(result, scale, part)
        if rows and not left:
            return _Found(scale, rows, spoilt=_not_a_number(rows))
        if rows:
            begun.append(f"{left} of {len(rows) + left} points left at scale {scale}")
    return _Found(None, Rows([]), "; ".join(begun) or f"adptnet reproduce {result.name}")


def _verdict(check: Check, found: _Found, whole: _Found) -> Verdict:
    scale = found.scale or whole.scale
    if scale is not None and SCALES.index(scale) < SCALES.index(check.smallest):
        return Verdict(Outcome.NOT_TESTABLE, f"needs the scale {check.smallest}")
    if found.scale is None:
        return Verdict(Outcome.NOT_RUN, found.missing)
    return Verdict(Outcome.FAILS, found.spoilt) if found.spoilt else check.test(found.rows)


def _not_a_number(rows: Rows) -> str:
    """The runs whose numbers have a NaN among them: no claim holds on those."""
    runs = [str(Point(row.settings, row.seed)) for row in rows if _has_nan(row.numbers)]
    return f"NaN in {len(runs)} of {len(rows)} runs, the first with {runs[0]}" if runs else ""


def _has_nan(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_nan, value.values()))
    if isinstance(value, list):
        return any(map(_has_nan, value))
    return isinstance(value, float) and math.isnan(value)


def progress(result: Result, shelf: Shelf) -> tuple[Scale | None, list[str]]:
    """The largest scale that is complete, and how far each is, with its cost."""
    done: Scale | None = None
    shown = []
    for scale in SCALES:
        rows, left = shelf.rows(result, scale)
        done = done if left else scale
        shown.append(f"{len(rows)} of {len(rows) + left}, {result.recipe.cost[scale]}")
    return done, shown


def notice(shelf: Shelf) -> None:
    """Print which rows are read, or that there are none."""
    if shelf.empty:
        print(f"No rows in {shelf.folder}/{{{','.join(SCALES)}}}: run some, or name their folder by --rows.")
    elif shelf.folder == WRITTEN:
        print(f"Rows of {shelf.folder}. Those that the repository comes with: --rows results.")
    else:
        print(f"Rows of {shelf.folder}.")


def run(options: Compare) -> Counter[Outcome]:
    """Prints every claim with its verdict, and returns how many there are of each."""
    counts: Counter[Outcome] = Counter()
    shelf = choose_shelf(options.rows)
    notice(shelf)
    for result in find(options.labels):
        judged = judge(result, shelf, options.scale)
        if not judged.verdicts:
            continue
        print(f"\n{result.name}  {result.title}" + (f"  (scale {judged.scale})" if judged.scale else ""))
        for claim, verdict in judged.verdicts:
            counts[verdict.outcome] += 1
            print(f"  {verdict.outcome.upper():<8} {claim.id}: {claim.says}\n           {verdict.why}")
    print("\n" + ", ".join(f"{outcome}: {counts[outcome]}" for outcome in Outcome))
    return counts
