"""The report as Markdown."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .compare import JudgedHeadline, describe_scale, describe_tally
from .recipe import Table
from .registry import Claim, load_labels
from .tables import format_cell
from .verdicts import MARKS, ClaimVerdict, Outcome

if TYPE_CHECKING:
    from .report import ReportContent, ReportEntry

__all__ = ["CAUSES", "KINDS", "describe_headline", "describe_outcome", "group_failures", "render_markdown"]

SHORT_CAUSES = {"paper": "wrong as stated", "ours": "our set-up differs", "scale": "reduced scale"}
CAUSES = {
    "paper": "The paper's statement is wrong",
    "ours": "Our set-up or program differs from the paper's",
    "scale": "Run at a reduced scale only",
}
KINDS = {"paper": "", "reading": "our reading", "ours": "our addition", "check": "check of the code"}


def render_markdown(content: "ReportContent") -> str:
    """Return the report: the abstract's claims first, then failures by cause, all verdicts, and a section per result.

    Args:
        content: Verdicts, figures and tables.
    """
    lines = [
        "# Claims of the paper, tested",
        "",
        "`adptnet report --rows results --output docs/report` writes this page, an HTML version with a β slider, and",
        "every table as CSV and JSON. [Reproduce the paper](../how-to/reproduce.md) explains the verdicts.",
        "",
        "At the scale `paper` networks have the paper's sizes, at the scale `laptop` smaller ones, which decide",
        "nothing about the abstract.",
        "",
        "## The abstract",
        "",
        *_render_table(_list_headlines(content.headlines)),
        "",
        "Counts, which are never added up:",
        "",
        *(f"- {line}" for line in describe_tally(content.tally)),
        "",
    ]
    for judged in content.headlines:
        lines += [f"**{judged.headline.says}** {describe_headline(judged)}", ""]
    lines += ["## Failures by cause", "", *_render_failures(content.entries)]
    lines += ["", "## All claims", "", *_render_table(_list_claims(content.entries))]
    for entry in content.entries:
        lines += ["", *_render_result(entry)]
    lines += ["", "## Tables of settings and of quoted numbers", ""]
    for label in load_labels().values():
        if label.kind != "result":
            lines.append(f"- {label.name}: {label.kind}, {label.configuration or label.literature}")
    return "\n".join(lines) + "\n"


def _list_headlines(headlines: Sequence[JudgedHeadline]) -> Table:
    rows = []
    for judged in headlines:
        verdict = f"{MARKS[judged.verdict.outcome]} {describe_outcome(judged.verdict)}"
        rows.append([judged.headline.says, judged.headline.paper, judged.ours, judged.scales, verdict])
    return Table(["the abstract says", "the paper", "ours (95 % interval)", "scale and runs", "verdict"], rows)


def describe_outcome(verdict: ClaimVerdict) -> str:
    """Return the outcome, and the cause of a failure in brackets.

    Args:
        verdict: The verdict.
    """
    return f"{verdict.outcome} ({SHORT_CAUSES[verdict.cause]})" if verdict.cause else str(verdict.outcome)


def describe_headline(judged: JudgedHeadline) -> str:
    """Return the paragraph on a statement of the abstract: what was run, what came out, what remains open.

    Args:
        judged: The statement and its verdicts.
    """
    claims = ", ".join(f"{result}/{claim.id} ({verdict.outcome})" for result, claim, verdict in judged.parts)
    needs = "; ".join(filter(None, (judged.verdict.because.rstrip("."), judged.verdict.needs)))
    needs = f": {needs}" if needs else ""
    headline = judged.headline
    return (
        f"*What was run.* {headline.run} *What came out.* {judged.found} *What remains open.* {headline.open} "
        f"*Verdict.* {describe_outcome(judged.verdict).capitalize()}{needs}. It rests on {claims}."
    )


def group_failures(entries: Sequence["ReportEntry"]) -> dict[str, list[tuple["ReportEntry", Claim, ClaimVerdict]]]:
    """Group failing claims by cause, and our own readings and additions apart from the paper's claims.

    Args:
        entries: All results.
    """
    groups: dict[str, list[tuple[ReportEntry, Claim, ClaimVerdict]]] = {text: [] for text in CAUSES.values()}
    own = groups.setdefault("Our readings and additions", [])
    for entry in entries:
        for claim, verdict in entry.judged.verdicts:
            if verdict.outcome == Outcome.FAILS:
                (groups[CAUSES[verdict.cause]] if claim.kind == "paper" else own).append((entry, claim, verdict))
    return {heading: found for heading, found in groups.items() if found}


def _render_failures(entries: Sequence["ReportEntry"]) -> list[str]:
    lines = []
    for heading, found in group_failures(entries).items():
        lines += [f"{heading}:", ""]
        lines += [
            f"- {entry.judged.result.name}: {_say(claim)} *{verdict.because}* ({verdict.interval})"
            for entry, claim, verdict in found
        ]
        lines.append("")
    return lines


def _say(claim: Claim) -> str:
    kind = KINDS[claim.kind]
    return f"{claim.says} ({kind})" if kind else claim.says


def _list_claims(entries: Sequence["ReportEntry"]) -> Table:
    rows = []
    for entry in entries:
        for claim, verdict in entry.judged.verdicts:
            mark = f"{MARKS[verdict.outcome]} {verdict.outcome}"
            rows.append([entry.judged.result.name, _say(claim), mark, verdict.interval, describe_scale(verdict)])
    return Table(["result", "claim", "verdict", "95 % interval", "scale and runs"], rows)


def _render_result(entry: "ReportEntry") -> list[str]:
    result, scale = entry.judged.result, entry.judged.scale
    lines = [f"## {result.name}: {result.title}", "", f"Labels: {', '.join(result.labels)}. Section {result.section}."]
    lines += ["", f"*Set-up of the paper.* {result.setup}"]
    lines += ["", f"    adptnet reproduce {result.name} --scale {scale or 'laptop'}"]
    for claim, verdict in entry.judged.verdicts:
        lines += ["", *_render_verdict(claim, verdict)]
        lines.append(f"  - *Test:* {result.recipe.checks[claim.id].description}")
    for heading, table in entry.tables.items():
        lines += ["", f"{heading[0].upper()}{heading[1:]}:", "", *_render_table(table)]
    for figure in entry.figures:
        lines += ["", f"![{figure.caption}](figures/{figure.stem}.svg)", "", f"*{figure.caption}.*"]
    if result.assumptions:
        lines += ["", "Assumptions where the paper is not specific:", "", *(f"- {text}" for text in result.assumptions)]
    if result.deviations:
        points = ", ".join(map(str, result.deviations))
        lines += ["", f"See docs/explanation/deviations.md, point {points}."]
    return lines


def _render_verdict(claim: Claim, verdict: ClaimVerdict) -> list[str]:
    lines = [
        f"- **{MARKS[verdict.outcome]} {verdict.outcome}** — {_say(claim)}",
        f"  - {describe_scale(verdict)}: {verdict.why}",
    ]
    if verdict.needs:
        lines.append(f"  - *To decide:* {verdict.needs}.")
    if verdict.because:
        lines.append(f"  - *Cause:* {CAUSES[verdict.cause].lower()}. {verdict.because}")
    return lines


def _render_table(table: Table) -> list[str]:
    head = "| " + " | ".join(map(_escape, table.columns)) + " |"
    ruler = "|" + " --- |" * len(table.columns)
    return [head, ruler, *("| " + " | ".join(map(_escape, row)) + " |" for row in table.rows)]


def _escape(value: object) -> str:
    return format_cell(value).replace("|", "\\|")
