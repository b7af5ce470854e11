"""The report as Markdown."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .recipe import MARKS, Outcome, Table
from .registry import load_labels

if TYPE_CHECKING:
    from .report import ReportEntry

__all__ = ["render_markdown"]


def render_markdown(entries: Sequence["ReportEntry"], counts: Counter[Outcome]) -> str:
    """Return the report: a table of all verdicts, then a section per result.

    Args:
        entries: The results.
        counts: Number of claims with each outcome.
    """
    lines = [
        "# Claims of the paper, tested",
        "",
        f"{sum(counts.values())} claims: " + ", ".join(f"{MARKS[o]} {o} {counts[o]}" for o in Outcome) + ".",
        "docs/how-to/reproduce.md explains the verdicts. `adptnet report --rows results` also writes this report as an",
        "HTML page with a β slider, runs/report/index.html.",
        "",
        "| result | claim | verdict |",
        "| --- | --- | --- |",
    ]
    for entry in entries:
        result = entry.judged.result
        for claim, verdict in entry.judged.verdicts:
            lines.append(f"| {result.name} | {_format_cell(claim.says)} | {MARKS[verdict.outcome]} {verdict.outcome} |")
    for entry in entries:
        lines += ["", *_render_result(entry)]
    lines += ["", "## Tables of settings and of quoted numbers", ""]
    for label in load_labels().values():
        if label.kind != "result":
            lines.append(f"- {label.name}: {label.kind}, {label.configuration or label.literature}")
    return "\n".join(lines) + "\n"


def _render_result(entry: "ReportEntry") -> list[str]:
    result, scale = entry.judged.result, entry.judged.scale
    lines = [f"## {result.name}: {result.title}", "", f"Labels: {', '.join(result.labels)}. Section {result.section}."]
    lines += ["", f"*Set-up of the paper.* {result.setup}"]
    lines += ["", f"    adptnet reproduce {result.name} --scale {scale or 'laptop'}", ""]
    lines.append(f"Rows of the scale {scale}." if scale else "Not run.")
    for claim, verdict in entry.judged.verdicts:
        lines += ["", f"- **{MARKS[verdict.outcome]} {verdict.outcome}** — {claim.says}", f"  - {verdict.why}"]
        lines.append(f"  - *Test:* {result.recipe.checks[claim.id].description}")
    for heading, table in (("Numbers of the paper", entry.paper_table), ("Our numbers", entry.our_table)):
        if table is not None:
            lines += ["", f"{heading}:", "", *_render_table(table)]
    for figure in entry.figures:
        lines += ["", f"![{figure.caption}](figures/{figure.stem}.svg)", "", f"*{figure.caption}.*"]
    if result.assumptions:
        lines += ["", "Assumptions where the paper is not specific:", "", *(f"- {text}" for text in result.assumptions)]
    if result.deviations:
        points = ", ".join(map(str, result.deviations))
        lines += ["", f"See docs/explanation/deviations.md, point {points}."]
    return lines


def _render_table(table: Table) -> list[str]:
    head = "| " + " | ".join(_format_cell(column) for column in table.columns) + " |"
    ruler = "|" + " --- |" * len(table.columns)
    return [head, ruler, *("| " + " | ".join(_format_cell(cell) for cell in row) + " |" for row in table.rows)]


def _format_cell(value: Any) -> str:
    return (f"{value:g}" if isinstance(value, float) else str(value)).replace("|", "\\|")
