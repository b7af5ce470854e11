"""The report as Markdown."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .recipe import MARKS, Outcome, Table
from .registry import labels

if TYPE_CHECKING:
    from .report import Entry

__all__ = ["page"]


def page(entries: Sequence["Entry"], counts: Counter[Outcome]) -> str:
    """Verdicts at a glance, then every result."""
    lines = [
        "# The paper, checked",
        "",
        f"{sum(counts.values())} claims: " + ", ".join(f"{MARKS[o]} {o} {counts[o]}" for o in Outcome) + ".",
        "How verdicts are made: docs/how-to/reproduce.md. The same with a β dial: index.html.",
        "",
        "| result | claim | verdict |",
        "| --- | --- | --- |",
    ]
    for entry in entries:
        result = entry.judged.result
        for claim, verdict in entry.judged.verdicts:
            lines.append(f"| {result.name} | {_cell(claim.says)} | {MARKS[verdict.outcome]} {verdict.outcome} |")
    for entry in entries:
        lines += ["", *_result(entry)]
    lines += ["", "## Tables that set up or quote others", ""]
    for label in labels().values():
        if label.kind != "result":
            lines.append(f"- {label.name}: {label.kind}, {label.configuration or label.literature}")
    return "\n".join(lines) + "\n"


def _result(entry: "Entry") -> list[str]:
    result, scale = entry.judged.result, entry.judged.scale
    lines = [f"## {result.name}: {result.title}", "", f"Labels: {', '.join(result.labels)}. Section {result.section}."]
    lines += ["", f"*Set-up of the paper.* {result.setup}"]
    lines += ["", f"    adptnet reproduce {result.name} --scale {scale or 'laptop'}", ""]
    lines.append(f"Rows of the scale {scale}." if scale else "Not run.")
    for claim, verdict in entry.judged.verdicts:
        lines += ["", f"- **{MARKS[verdict.outcome]} {verdict.outcome}** — {claim.says}", f"  - {verdict.why}"]
        lines.append(f"  - *Test:* {result.recipe.checks[claim.id].words}")
    for heading, table in (("The paper", entry.paper), ("Ours", entry.ours)):
        if table is not None:
            lines += ["", f"{heading}:", "", *_table(table)]
    for picture in entry.pictures:
        lines += ["", f"![{picture.caption}](figures/{picture.stem}.svg)", "", f"*{picture.caption}.*"]
    if result.assumptions:
        lines += ["", "Assumed, where the paper is silent:", "", *(f"- {text}" for text in result.assumptions)]
    if result.deviations:
        points = ", ".join(map(str, result.deviations))
        lines += ["", f"See docs/explanation/deviations.md, point {points}."]
    return lines


def _table(table: Table) -> list[str]:
    head = "| " + " | ".join(_cell(column) for column in table.columns) + " |"
    ruler = "|" + " --- |" * len(table.columns)
    return [head, ruler, *("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in table.rows)]


def _cell(value: Any) -> str:
    return (f"{value:g}" if isinstance(value, float) else str(value)).replace("|", "\\|")
