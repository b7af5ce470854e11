"""`adptnet compare`: a verdict for every claim, from the stored rows."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tyro.conf import Positional

from .recipe import SCALES, Check, ClaimVerdict, GridPoint, Outcome, Rows, Scale, Subset
from .registry import Claim, PaperResult, ReproductionError, find_results
from .rows import DEFAULT_FOLDER, RowStore, open_row_store

__all__ = ["Compare", "JudgedResult", "describe_progress", "judge", "print_rows_folder", "run"]


@dataclass(frozen=True)
class Compare:
    """Print for each claim of the paper whether it holds, fails, is not testable at this scale, or has not been run."""

    labels: Positional[tuple[str, ...]] = ()
    """Labels of the paper; all of them if none is given."""
    scale: Scale | None = None
    """Scale of the rows. Default: for each result the largest scale that is complete."""
    rows: Path | None = None
    """Folder of the rows. Default: runs/paper, where reproduce writes them; if it has none, the rows in results/, which
    are committed to the repository."""


class JudgedResult(NamedTuple):
    """A result with its rows and a verdict for each of its claims."""

    result: PaperResult
    scale: Scale | None  # None if nothing was run
    rows: Rows
    verdicts: list[tuple[Claim, ClaimVerdict]]
    problem: str = ""  # why the rows are invalid; no figure or table is made from invalid rows


def judge(result: PaperResult, store: RowStore, scale: Scale | None = None) -> JudgedResult:
    """Test the claims of a result.

    Args:
        result: The result.
        store: Its rows.
        scale: Scale of the rows. Default: the largest scale that is complete. A claim that needs only a subset of the
            points is tested at the largest scale at which that subset is complete.

    Raises:
        ReproductionError: The rows lack a number that a test needs.
    """
    scales: Sequence[Scale] = [scale] if scale else SCALES[::-1]
    complete = _find_largest_scale(result, store, scales)
    verdicts = []
    for claim in result.claims:
        check = result.recipe.checks[claim.id]
        needed = _find_largest_scale(result, store, scales, check.subset) if check.subset else complete
        try:
            verdict = _judge_claim(check, needed, complete)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise ReproductionError(
                f"{result.name}: its rows at the scale {needed.scale} lack what the test of {claim.id!r} needs "
                f"({type(error).__name__}: {error}). If they were edited, delete their file and run them again."
            ) from error
        if needed.scale not in (None, complete.scale):
            verdict = verdict._replace(why=f"scale {needed.scale}: {verdict.why}")
        verdicts.append((claim, verdict))
    return JudgedResult(result, complete.scale, complete.rows, verdicts, complete.problem)


class _ScaleRows(NamedTuple):
    """The rows of the largest scale that is complete, or the reason why there are none."""

    scale: Scale | None
    rows: Rows
    missing: str = ""
    problem: str = ""


def _find_largest_scale(
    result: PaperResult, store: RowStore, scales: Sequence[Scale], subset: Subset | None = None
) -> _ScaleRows:
    incomplete = []
    for scale in scales:
        rows, left = store.read_rows(result, scale, subset)
        if rows and not left:
            return _ScaleRows(scale, rows, problem=_describe_nan(rows))
        if rows:
            incomplete.append(f"{left} of {len(rows) + left} points left at scale {scale}")
    return _ScaleRows(None, Rows([]), "; ".join(incomplete) or f"adptnet reproduce {result.name}")


def _judge_claim(check: Check, needed: _ScaleRows, complete: _ScaleRows) -> ClaimVerdict:
    scale = needed.scale or complete.scale
    if scale is not None and SCALES.index(scale) < SCALES.index(check.smallest_scale):
        return ClaimVerdict(Outcome.NOT_TESTABLE, f"needs the scale {check.smallest_scale}")
    if needed.scale is None:
        return ClaimVerdict(Outcome.NOT_RUN, needed.missing)
    return ClaimVerdict(Outcome.FAILS, needed.problem) if needed.problem else check.test(needed.rows)


def _describe_nan(rows: Rows) -> str:
    """Name the runs with a NaN among their numbers, on which every claim fails; empty if there are none."""
    runs = [str(GridPoint(row.settings, row.seed)) for row in rows if _has_nan(row.numbers)]
    return f"NaN in {len(runs)} of {len(rows)} runs, the first with {runs[0]}" if runs else ""


def _has_nan(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_nan, value.values()))
    if isinstance(value, list):
        return any(map(_has_nan, value))
    return isinstance(value, float) and math.isnan(value)


def describe_progress(result: PaperResult, store: RowStore) -> tuple[Scale | None, list[str]]:
    """Return the largest scale that is complete, and for each scale the number of finished points and the cost.

    Args:
        result: The result.
        store: Its rows.
    """
    largest: Scale | None = None
    texts = []
    for scale in SCALES:
        rows, left = store.read_rows(result, scale)
        largest = largest if left else scale
        texts.append(f"{len(rows)} of {len(rows) + left}, {result.recipe.cost[scale]}")
    return largest, texts


def print_rows_folder(store: RowStore) -> None:
    """Print the folder from which rows are read, or that it contains no rows.

    Args:
        store: The rows.
    """
    if store.is_empty:
        print(
            f"No rows in {store.folder}/{{{','.join(SCALES)}}}. Run `adptnet reproduce`, or name a folder with --rows."
        )
    elif store.folder == DEFAULT_FOLDER:
        print(f"Rows from {store.folder}. For the rows that are committed to the repository: --rows results.")
    else:
        print(f"Rows from {store.folder}.")


def run(options: Compare) -> Counter[Outcome]:
    """Print every claim with its verdict, and return the number of claims with each outcome.

    Args:
        options: Labels, scale and folder.
    """
    counts: Counter[Outcome] = Counter()
    store = open_row_store(options.rows)
    print_rows_folder(store)
    for result in find_results(options.labels):
        judged = judge(result, store, options.scale)
        if not judged.verdicts:
            continue
        print(f"\n{result.name}  {result.title}" + (f"  (scale {judged.scale})" if judged.scale else ""))
        for claim, verdict in judged.verdicts:
            counts[verdict.outcome] += 1
            print(f"  {verdict.outcome.upper():<8} {claim.id}: {claim.says}\n           {verdict.why}")
    print("\n" + ", ".join(f"{outcome}: {counts[outcome]}" for outcome in Outcome))
    return counts
