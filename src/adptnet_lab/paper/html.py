"""The report as one HTML page that asks nothing of the network."""

import json
from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from .recipe import MARKS, Outcome, Table, Verdict
from .registry import labels

if TYPE_CHECKING:
    from .report import Entry

__all__ = ["page"]

# What the page may load: nothing but itself. The browser holds it to that, whatever is in the rows.
_ALONE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_KIND = {Outcome.HOLDS: "holds", Outcome.FAILS: "fails", Outcome.NOT_TESTABLE: "untestable", Outcome.NOT_RUN: "unrun"}


def page(entries: Sequence["Entry"], counts: Counter[Outcome], dial: dict[str, Any] | None) -> str:
    """The whole page."""
    total = sum(counts.values())
    tiles = "".join(f'<div class="tile {_KIND[o]}"><b>{counts[o]}</b><span>{escape(o)}</span></div>' for o in Outcome)
    others = "".join(
        f"<li><code>{escape(label.name)}</code> {label.kind}: {escape(label.configuration or label.literature)}</li>"
        for label in labels().values()
        if label.kind != "result"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_ALONE}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>ADPTNet: the paper, checked</title>
<style>{_asset("report.css")}</style>
</head>
<body>
<header>
<h1>The paper, checked</h1>
<p>{total} claims of <i>ADPTNet: Adaptive with Prescriptive Timescales Non-Linear SSM for Sequence Modelling</i>, each
with a verdict by a stated test on our own runs. A claim that fails is shown as failing.</p>
<div class="tiles">{tiles}</div>
</header>
<main>
{_dial(dial)}
<section id="glance"><h2>At a glance</h2>
{_failing(entries)}
<table><tbody>{"".join(_glance(entry) for entry in entries if entry.judged.verdicts)}</tbody></table>
</section>
{"".join(_result(entry) for entry in entries)}
<section><h2>Tables that set up or quote others</h2><ul>{others}</ul></section>
</main>
</body>
</html>
"""


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _anchor(name: str) -> str:
    return name.replace(":", "-")


def _badge(verdict: Verdict) -> str:
    return f'<span class="badge {_KIND[verdict.outcome]}">{escape(verdict.outcome)}</span>'


def _link(entry: "Entry") -> str:
    result = entry.judged.result
    return f'<a href="#{_anchor(result.name)}">{escape(result.title)}</a>'


def _failing(entries: Sequence["Entry"]) -> str:
    """The claims that fail, in full."""
    lines = [
        f"<li>{_badge(verdict)} {_link(entry)}: {escape(claim.says)}</li>"
        for entry in entries
        for claim, verdict in entry.judged.verdicts
        if verdict.outcome == Outcome.FAILS
    ]
    return f'<ul class="claims">{"".join(lines)}</ul>'


def _glance(entry: "Entry") -> str:
    """One line: a result, the scale of its rows, a mark for each claim."""
    marks = "".join(
        f'<span class="mark {_KIND[verdict.outcome]}" title="{escape(f"{verdict.outcome}: {claim.says}")}">'
        f"{MARKS[verdict.outcome]}</span>"
        for claim, verdict in entry.judged.verdicts
    )
    return f"<tr><td>{_link(entry)}</td><td>{entry.judged.scale or 'not run'}</td><td>{marks}</td></tr>"


def _result(entry: "Entry") -> str:
    result, scale = entry.judged.result, entry.judged.scale
    claims = []
    for claim, verdict in entry.judged.verdicts:
        test = f'<p class="test">Test: {escape(result.recipe.checks[claim.id].words)}</p>'
        claims.append(f"<li>{_badge(verdict)} {escape(claim.says)}<p>{escape(verdict.why)}</p>{test}</li>")
    figures = "".join(
        f'<figure><div class="scroll">{picture.inline}</div><figcaption>{escape(picture.caption)}</figcaption></figure>'
        for picture in entry.pictures
    )
    command = f"adptnet reproduce {result.name} --scale {scale or 'laptop'}"
    state = "not run"
    if scale:
        source = result.recipe.source
        state = f"rows of {source}" if source else f"rows of the scale {scale}, {result.recipe.cost[scale]} on one core"
    return f"""<section id="{_anchor(result.name)}" class="result">
<h2>{escape(result.title)}</h2>
<p class="labels">{" ".join(f"<code>{escape(label)}</code>" for label in result.labels)} · {escape(result.section)}</p>
<p>{escape(result.setup)}</p>
<pre>{escape(command)}</pre><p class="test">{escape(state)}</p>
<ul class="claims">{"".join(claims)}</ul>
{figures}
{_table("The paper's numbers", entry.paper)}{_table("Our numbers", entry.ours)}
{_list("Assumed, where the paper is silent", result.assumptions)}
{_list("Deviations (docs/explanation/deviations.md)", [f"point {n}" for n in result.deviations])}
</section>
"""


def _list(heading: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    return f"<h3>{heading}</h3><ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _table(heading: str, table: Table | None) -> str:
    if table is None:
        return ""
    head = "".join(f"<th>{escape(_cell(column))}</th>" for column in table.columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(_cell(c))}</td>" for c in row) + "</tr>" for row in table.rows)
    table_html = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f"<details{' open' if len(table.rows) <= 14 else ''}><summary>{heading}</summary>{table_html}</details>"


def _cell(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _dial(data: dict[str, Any] | None) -> str:
    if data is None:
        return ""
    embedded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return f"""<section id="dial">
<h2>The β dial</h2>
<p>Drag β. Q is computed here from one key and value; spectrum, iterations and accuracy are those of the nearest β that
was run.</p>
<label for="beta">β = <output id="beta-value"></output></label>
<input id="beta" type="range" min="0" max="1" step="0.001" value="0.5" aria-label="β">
<div class="panels">
<figure><canvas id="dial-rotation" width="256" height="256" role="img" aria-label="|Q|"></canvas>
<figcaption id="dial-share"></figcaption></figure>
<figure><svg id="dial-spectrum" viewBox="0 0 300 256" role="img" aria-label="spectrum"></svg>
<figcaption id="dial-interval"></figcaption></figure>
<figure><svg id="dial-iterations" viewBox="0 0 300 256" role="img" aria-label="iterations"></svg>
<figcaption id="dial-counts"></figcaption></figure>
<figure><svg id="dial-accuracy" viewBox="0 0 300 256" role="img" aria-label="accuracy"></svg>
<figcaption id="dial-scores"></figcaption></figure>
</div>
<script type="application/json" id="dial-data">{embedded}</script>
<script>{_asset("dial.js")}</script>
</section>
"""
