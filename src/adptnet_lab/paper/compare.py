"""`adptnet compare`: a verdict for every claim, from the stored rows."""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from tyro.conf import Positional, arg

from .forecast import Forecast
from .recipe import SCALES, Check, GridPoint, Rows, Scale, Subset
from .registry import Claim, Headline, PaperResult, ReproductionError, find_results, load_headlines
from .rows import DEFAULT_FOLDER, RowStore, open_row_store
from .selection import parse_changes
from .verdicts import ClaimVerdict, Outcome, not_testable

__all__ = [
    "GROUPS",
    "Compare",
    "JudgedHeadline",
    "JudgedResult",
    "Tally",
    "describe_progress",
    "describe_scale",
    "describe_tally",
    "judge",
    "judge_headlines",
    "print_rows_folder",
    "render_verdicts",
    "run",
    "summarize_tally",
    "tally_verdicts",
]

AT_SIZE, REDUCED, OWN, CHECKS = (
    "at the paper's scale",
    "at reduced scale only",
    "our additions and readings",
    "checks of the code",
)
GROUPS = (AT_SIZE, REDUCED, OWN, CHECKS)

Tally = dict[str, Counter[Outcome]]  # by group; verdicts of different groups are never added


@dataclass(frozen=True)
class Compare:
    """Print for each claim of the paper whether it holds, fails, is undecided, is not testable, or has not been run."""

    labels: Positional[tuple[str, ...]] = ()
    """Labels of the paper; all of them if none is given."""
    scale: Scale | None = None
    """Scale of the rows. Default: for each claim the largest scale at which the points it needs have been run."""
    rows: Path | None = None
    """Folder of the rows. Default: runs/paper, where reproduce writes them; if it has none, the rows in results/, which
    are committed to the repository."""
    format: Literal["text", "csv", "json"] = "text"
    """text for people; csv or json for programs, with one record per claim."""
    set: Annotated[tuple[str, ...], arg(metavar="SETTING=VALUE")] = ()
    """Judge the rows that `adptnet reproduce --set` has written for these changed settings."""


class JudgedResult(NamedTuple):
    """A result with its rows and a verdict for each of its claims."""

    result: PaperResult
    scale: Scale | None  # None if nothing was run
    rows: Rows
    verdicts: list[tuple[Claim, ClaimVerdict]]
    problem: str = ""  # why the rows are invalid; no figure or table is made from invalid rows

    @property
    def reduction(self) -> str:
        """By how much rows of the scale `paper` are smaller than the paper's; empty if they are not."""
        return self.result.recipe.reduction(self.rows[0].settings) if self.scale == "paper" and self.rows else ""

    @property
    def size(self) -> str:
        """The scale of the rows in words; empty if nothing was run."""
        return f"{self.scale} with {self.reduction}" if self.reduction else self.scale or ""


class JudgedHeadline(NamedTuple):
    """A statement of the abstract, with the verdicts on the claims that decide it."""

    headline: Headline
    verdict: ClaimVerdict
    parts: list[tuple[str, Claim, ClaimVerdict]]  # with the name of the result

    @property
    def ours(self) -> str:
        """Our numbers beside the paper's."""
        return self._fill_in(self.headline.ours)

    @property
    def found(self) -> str:
        """Findings of the runs, in sentences."""
        return self._fill_in(self.headline.found)

    @property
    def scales(self) -> str:
        """The scales of the claims with their numbers of runs, and how many claims have no rows that can test them."""
        runs: dict[str, list[int]] = {}
        untested = 0
        for _, _, verdict in self.parts:
            if verdict.outcome in (Outcome.NOT_RUN, Outcome.NOT_TESTABLE) or verdict.scale is None:
                untested += 1
            else:
                name = verdict.scale + (f" with {verdict.reduction}" if verdict.reduction else "")
                runs.setdefault(name, []).append(verdict.runs)
        texts = [f"{name}, {_format_range(counts)}" for name, counts in runs.items()]
        if untested:
            texts.append(f"{untested} of {len(self.parts)} claims not tested")
        return "; ".join(texts)

    def _fill_in(self, text: str) -> str:
        return text.format(*(_Shown(verdict) for _, _, verdict in self.parts))


class _Shown:
    """A verdict as the placeholders of `abstract.toml` show it; a number that does not exist is its outcome."""

    def __init__(self, verdict: ClaimVerdict):
        self.interval = verdict.interval or str(verdict.outcome)
        self.why = verdict.why if verdict.interval else str(verdict.outcome)
        self.outcome = str(verdict.outcome)
        self.runs = verdict.runs


def _format_range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{high} run{'s' if high != 1 else ''}" if low == high else f"{low} to {high} runs"


def judge(result: PaperResult, store: RowStore, scale: Scale | None = None) -> JudgedResult:
    """Test the claims of a result.

    Args:
        result: The result.
        store: Its rows.
        scale: Scale of the rows. Default: the largest scale that has a row for every setting. A claim that needs only a
            subset of the points is tested at the largest scale at which that subset has been run.

    Raises:
        ReproductionError: The rows lack a number that a test needs.
    """
    scales: Sequence[Scale] = [scale] if scale else SCALES[::-1]
    complete = _find_largest_scale(result, store, scales)
    verdicts = []
    for claim in result.claims:
        check = result.recipe.checks[claim.id]
        needed = _find_largest_scale(result, store, scales, check.subset) if check.subset else complete
        if check.reads and needed.scale is not None:
            rows = store.read_rows(result, needed.scale, check.reads).rows
            needed = needed._replace(rows=rows, problem=_describe_nan(rows))
        try:
            verdict = _judge_claim(check, needed, complete)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise ReproductionError(
                f"{result.name}: its rows at the scale {needed.scale} lack what the test of {claim.id!r} needs "
                f"({type(error).__name__}: {error}). If they were edited, delete their file and run them again."
            ) from error
        if verdict.scale == "paper" and needed.rows:
            verdict = verdict._replace(reduction=result.recipe.reduction(needed.rows[0].settings))
        verdicts.append((claim, _add_cause(claim, _allow_for_size(verdict))))
    return JudgedResult(result, complete.scale, complete.rows, verdicts, complete.problem)


class _ScaleRows(NamedTuple):
    """The rows of the largest scale that has every setting, or the reason why there are none."""

    scale: Scale | None
    rows: Rows
    missing: str = ""
    problem: str = ""


def _find_largest_scale(
    result: PaperResult, store: RowStore, scales: Sequence[Scale], subset: Subset | None = None
) -> _ScaleRows:
    incomplete = []
    for scale in scales:
        stored = store.read_rows(result, scale, subset)
        if stored.rows and not stored.gaps:
            return _ScaleRows(scale, stored.rows, problem=_describe_nan(stored.rows))
        if stored.rows:
            incomplete.append(f"{stored.left} of {len(stored.rows) + stored.left} points left at scale {scale}")
    return _ScaleRows(None, Rows([]), "; ".join(incomplete) or f"adptnet reproduce {result.name}")


def _judge_claim(check: Check, needed: _ScaleRows, complete: _ScaleRows) -> ClaimVerdict:
    scale = needed.scale or complete.scale
    if scale is not None and SCALES.index(scale) < SCALES.index(check.smallest_scale):
        why = f"needs the scale {check.smallest_scale}" + (f": {check.reason}" if check.reason else "")
        return not_testable(why)._replace(scale=scale)
    if needed.scale is None:
        return ClaimVerdict(Outcome.NOT_RUN, needed.missing, runs=0)
    verdict = not_testable(f"the rows are invalid: {needed.problem}") if needed.problem else check.test(needed.rows)
    return verdict._replace(scale=needed.scale)


def _allow_for_size(verdict: ClaimVerdict) -> ClaimVerdict:
    """Leave a claim undecided that fails at a reduced size only because the paper's effect is larger."""
    if not verdict.by_size or verdict.is_at_size:
        return verdict
    needs = "at this reduced size the interval excludes the paper's effect, which is that of another size"
    return verdict._replace(outcome=Outcome.UNDECIDED, needs=needs)


def _add_cause(claim: Claim, verdict: ClaimVerdict) -> ClaimVerdict:
    """Name the cause of a failure. Unless it is known, a failure at reduced scale is put down to the scale."""
    if verdict.outcome != Outcome.FAILS:
        return verdict
    if claim.cause:
        return verdict._replace(cause=claim.cause, because=claim.because)
    if not verdict.is_at_size:
        return verdict._replace(cause="scale", because="run at a reduced size only, which may not carry over")
    return verdict


def _describe_nan(rows: Rows) -> str:
    """Name the runs with a NaN among their numbers, on which nothing is judged; empty if there are none."""
    runs = [str(GridPoint(row.settings, row.seed)) for row in rows if _has_nan(row.numbers)]
    return f"NaN in {len(runs)} of {len(rows)} runs, the first with {runs[0]}" if runs else ""


def _has_nan(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_nan, value.values()))
    if isinstance(value, list):
        return any(map(_has_nan, value))
    return isinstance(value, float) and math.isnan(value)


def judge_headlines(judged: Sequence[JudgedResult]) -> list[JudgedHeadline]:
    """Return the verdicts on the statements of the abstract.

    A statement holds if all its claims hold at the paper's scale, and fails if one of them fails there. Otherwise it is
    undecided, or not testable if nothing of it has been run at any scale that can test it.

    Args:
        judged: All results.
    """
    by_name = {(one.result.name, claim.id): (claim, verdict) for one in judged for claim, verdict in one.verdicts}
    return [
        JudgedHeadline(headline, _judge_parts(parts), parts)
        for headline in load_headlines()
        if (
            parts := [
                (result, *by_name[result, claim]) for result, claim in headline.claims if (result, claim) in by_name
            ]
        )
    ]


def _judge_parts(parts: Sequence[tuple[str, Claim, ClaimVerdict]]) -> ClaimVerdict:
    """Return the verdict on a statement from those on its claims."""
    failing = [verdict for _, _, verdict in parts if verdict.outcome == Outcome.FAILS and verdict.is_at_size]
    if failing:
        return failing[0]
    weakest = min((verdict for _, _, verdict in parts), key=lambda verdict: verdict.runs)
    undecided = [
        f"{result}/{claim.id}"
        for result, claim, verdict in parts
        if verdict.outcome != Outcome.HOLDS or not verdict.is_at_size
    ]
    if not undecided:
        return weakest
    untested = (Outcome.NOT_TESTABLE, Outcome.NOT_RUN)
    if all(verdict.outcome in untested for _, _, verdict in parts):
        return weakest._replace(
            outcome=Outcome.NOT_TESTABLE, needs="nothing of it has been run at a scale that can test it"
        )
    return weakest._replace(
        outcome=Outcome.UNDECIDED, needs=f"not decided at the paper's scale: {', '.join(undecided)}"
    )


def describe_scale(verdict: ClaimVerdict) -> str:
    """Return the scale and the number of runs behind a verdict, in words.

    Args:
        verdict: The verdict.
    """
    if verdict.outcome == Outcome.NOT_RUN or verdict.scale is None:
        return "not run"
    scale = f"scale {verdict.scale}" + (f" with {verdict.reduction}" if verdict.reduction else "")
    if verdict.outcome == Outcome.NOT_TESTABLE:
        return f"not testable with the rows at the {scale}"
    return f"{scale}, {verdict.runs} run{'s' if verdict.runs != 1 else ''}"


def tally_verdicts(judged: Sequence[JudgedResult]) -> Tally:
    """Count verdicts by group: claims of the paper at its scale and at reduced scale, our own claims, and code checks.

    Args:
        judged: The results.
    """
    tally: Tally = {group: Counter() for group in GROUPS}
    for one in judged:
        for claim, verdict in one.verdicts:
            tally[_find_group(claim, verdict)][verdict.outcome] += 1
    return tally


def _find_group(claim: Claim, verdict: ClaimVerdict) -> str:
    if claim.kind == "check":
        return CHECKS
    if claim.kind != "paper":
        return OWN
    return AT_SIZE if verdict.is_at_size else REDUCED


def describe_tally(tally: Tally) -> list[str]:
    """Return one line per group with its counts.

    Args:
        tally: The counts.
    """
    names = {AT_SIZE: "claims of the paper at its own scale", REDUCED: "claims of the paper at reduced scale only"}
    lines = []
    for group in GROUPS:
        counts = ", ".join(f"{outcome} {tally[group][outcome]}" for outcome in Outcome if tally[group][outcome])
        lines.append(f"{tally[group].total()} {names.get(group, group)}: {counts or 'none'}")
    return lines


def summarize_tally(tally: Tally) -> str:
    """Return the counts of the paper's claims in words, as the README has them.

    Args:
        tally: The counts.
    """
    size, reduced = tally[AT_SIZE], tally[REDUCED]
    return (
        f"Of the paper's claims, {size.total()} were tested at its own scale: {size[Outcome.HOLDS]} hold, "
        f"{size[Outcome.FAILS]} fail, {size[Outcome.UNDECIDED]} are undecided and {size[Outcome.NOT_TESTABLE]} cannot "
        f"be tested. Of {reduced.total()} more, run at reduced scale or not at all, {reduced[Outcome.HOLDS]} hold there"
    )


def describe_progress(result: PaperResult, store: RowStore) -> tuple[Scale | None, list[str]]:
    """Return the largest scale that is complete, and for each scale the number of finished points and the cost.

    Args:
        result: The result.
        store: Its rows.
    """
    largest: Scale | None = None
    texts = []
    for scale in SCALES:
        stored = store.read_rows(result, scale)
        largest = largest if stored.gaps else scale
        cost = Forecast(store, scale).cost(result)
        texts.append(f"{len(stored.rows)} of {len(stored.rows) + stored.left}, {cost}")
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


FIELDS = (
    "result",
    "claim",
    "says",
    "kind",
    "outcome",
    "scale",
    "reduction",
    "runs",
    "mean",
    "low",
    "high",
    "unit",
    "why",
    "needs",
)


def list_verdicts(judged: Sequence[JudgedResult]) -> list[dict[str, Any]]:
    """Return one record per claim, for programs.

    Args:
        judged: The results.
    """
    records = []
    for one in judged:
        for claim, verdict in one.verdicts:
            record: dict[str, Any] = {
                "result": one.result.name,
                "claim": claim.id,
                "says": claim.says,
                "kind": claim.kind,
                "outcome": str(verdict.outcome),
                "scale": verdict.scale,
                "reduction": verdict.reduction,
                "runs": verdict.runs,
            }
            for key in ("mean", "low", "high"):
                value = None if verdict.estimate is None else getattr(verdict.estimate, key)
                record[key] = value if value is not None and math.isfinite(value) else None
            record["unit"] = "" if verdict.estimate is None else verdict.estimate.unit.removeprefix("Δ").strip()
            record |= {key: getattr(verdict, key) for key in ("why", "needs", "cause", "because")}
            records.append(record)
    return records


def render_verdicts(judged: Sequence[JudgedResult], form: Literal["csv", "json"]) -> str:
    """Return the verdicts as CSV or JSON.

    Args:
        judged: The results.
        form: The format.
    """
    records = list_verdicts(judged)
    if form == "json":
        tally = tally_verdicts(judged)
        counts = {group: {str(outcome): n for outcome, n in found.items()} for group, found in tally.items()}
        content = {"summary": summarize_tally(tally), "counts": counts, "claims": records}
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    page = io.StringIO()
    writer = csv.DictWriter(page, [*FIELDS, "cause", "because"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return page.getvalue()


def run(options: Compare) -> Tally:
    """Print every claim with its verdict, and return the number of claims with each outcome, by group.

    Args:
        options: Labels, scale, folder and format.
    """
    chosen = find_results(options.labels)
    store = open_row_store(options.rows, parse_changes(options.set, chosen))
    judged = [judge(result, store, options.scale) for result in chosen]
    if options.format != "text":
        print(render_verdicts(judged, options.format), end="")
        return tally_verdicts(judged)
    print_rows_folder(store)
    for one in judged:
        if one.verdicts:
            print(f"\n{one.result.name}  {one.result.title}")
        for claim, verdict in one.verdicts:
            _print_verdict(claim, verdict)
    print()
    for line in describe_tally(tally_verdicts(judged)):
        print(line)
    return tally_verdicts(judged)


def _print_verdict(claim: Claim, verdict: ClaimVerdict) -> None:
    kind = {"paper": "", "reading": " (our reading)", "ours": " (our addition)", "check": " (check of the code)"}
    print(f"  {verdict.outcome.upper():<12} {claim.id}: {claim.says}{kind[claim.kind]}")
    print(f"               {describe_scale(verdict)}: {verdict.why}")
    if verdict.needs:
        print(f"               {verdict.needs}")
    if verdict.because:
        print(f"               cause ({verdict.cause}): {verdict.because}")
