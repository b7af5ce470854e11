"""The report as one self-contained HTML page."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from .compare import GROUPS, JudgedHeadline, describe_scale
from .markdown import CAUSES, KINDS, describe_outcome, group_failures
from .recipe import Table
from .registry import Claim, load_labels
from .tables import format_cell
from .verdicts import MARKS, ClaimVerdict, Outcome

if TYPE_CHECKING:
    from .report import ReportContent, ReportEntry

__all__ = ["render_html"]

# Content Security Policy: the browser loads nothing from elsewhere, whatever the rows contain.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_KIND = {
    Outcome.HOLDS: "holds",
    Outcome.FAILS: "fails",
    Outcome.UNDECIDED: "undecided",
    Outcome.NOT_TESTABLE: "untestable",
    Outcome.NOT_RUN: "unrun",
}


def render_html(content: "ReportContent", dial: Mapping[str, Any] | None) -> str:
    """Return the report as an HTML page.

    Args:
        content: Verdicts, figures and tables.
        dial: Data of the β slider; without it the page has none.
    """
    entries = content.entries
    others = "".join(
        f"<li><code>{escape(label.name)}</code> {label.kind}: {escape(label.configuration or label.literature)}</li>"
        for label in load_labels().values()
        if label.kind != "result"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>ADPTNet: claims of the paper, tested</title>
<style>{_read_asset("report.css")}</style>
</head>
<body>
<header>
<h1>Claims of the paper, tested</h1>
<p>The statements of the abstract of <i>ADPTNet: Adaptive with Prescriptive Timescales Non-Linear SSM for Sequence
Modelling</i>, tested on our own runs. Brackets are 95 % intervals. At the scale <i>paper</i> the networks have the
paper's sizes, at the scale <i>laptop</i> smaller ones, which decide nothing about the abstract.</p>
</header>
<main>
<section id="abstract">{"".join(map(_render_headline, content.headlines))}</section>
<section id="counts"><h2>Counts</h2>{_render_tally(content)}</section>
<section id="failures"><h2>Failures by cause</h2>{_render_failures(entries)}</section>
{_render_dial(dial)}
<section id="overview"><h2>All claims</h2>
<table><tbody>{"".join(_render_overview_row(entry) for entry in entries if entry.judged.verdicts)}</tbody></table>
</section>
{"".join(_render_result(entry) for entry in entries)}
<section><h2>Tables of settings and of quoted numbers</h2><ul>{others}</ul></section>
</main>
</body>
</html>
"""


def _read_asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _make_anchor(name: str) -> str:
    return name.replace(":", "-")


def _render_badge(verdict: ClaimVerdict) -> str:
    return f'<span class="badge {_KIND[verdict.outcome]}">{escape(describe_outcome(verdict))}</span>'


def _render_link(entry: "ReportEntry") -> str:
    result = entry.judged.result
    return f'<a href="#{_make_anchor(result.name)}">{escape(result.title)}</a>'


def _render_headline(judged: JudgedHeadline) -> str:
    """Render a statement of the abstract: verdict, numbers, and on demand what was run, came out and remains open."""
    headline = judged.headline
    parts = "".join(
        f"<li>{_render_badge(verdict)} {escape(_say(claim))}<p>{escape(describe_scale(verdict))}: {escape(verdict.why)}"
        f'</p><p><a href="#{_make_anchor(result)}">{escape(result)}</a></p></li>'
        for result, claim, verdict in judged.parts
    )
    needs = f"<p>To decide: {escape(judged.verdict.needs)}.</p>" if judged.verdict.needs else ""
    return f"""<article class="headline {_KIND[judged.verdict.outcome]}">
<h3>{_render_badge(judged.verdict)} {escape(headline.says)}</h3>
<p><b>Paper:</b> {escape(headline.paper)}</p>
<p><b>Ours:</b> {escape(judged.ours)} <span class="scale">Scale: {escape(judged.scales)}</span></p>
<details><summary>What was run, what came out, what remains open</summary>
<p><b>What was run.</b> {escape(headline.run)}</p><p><b>What came out.</b> {escape(judged.found)}</p>
<p><b>What remains open.</b> {escape(headline.open)}</p>{needs}<ul class="claims">{parts}</ul></details>
</article>
"""


def _render_tally(content: "ReportContent") -> str:
    """Render the counts of each group, which are never added."""
    head = "".join(f"<th>{escape(outcome)}</th>" for outcome in Outcome)
    body = "".join(
        f"<tr><td>{escape(group)}</td>" + "".join(f"<td>{content.tally[group][o]}</td>" for o in Outcome) + "</tr>"
        for group in GROUPS
    )
    return (
        f'<div class="scroll"><table><thead><tr><th>claims</th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _render_failures(entries: Sequence["ReportEntry"]) -> str:
    parts = []
    for heading, found in group_failures(entries).items():
        lines = [
            f"<li>{_render_link(entry)}: {escape(_say(claim))}"
            f"<p>{escape(verdict.because)} ({escape(verdict.interval)})</p></li>"
            for entry, claim, verdict in found
        ]
        parts.append(f'<h3>{escape(heading)}</h3><ul class="claims">{"".join(lines)}</ul>')
    return "".join(parts)


def _say(claim: Claim) -> str:
    kind = KINDS[claim.kind]
    return f"{claim.says} ({kind})" if kind else claim.says


def _render_overview_row(entry: "ReportEntry") -> str:
    """Render a table row: the result, the scale of its rows, and a mark per claim."""
    marks = "".join(
        f'<span class="mark {_KIND[verdict.outcome]}" title="{escape(f"{verdict.outcome}: {claim.says}")}">'
        f"{MARKS[verdict.outcome]}</span>"
        for claim, verdict in entry.judged.verdicts
    )
    return f"<tr><td>{_render_link(entry)}</td><td>{escape(entry.judged.size or 'not run')}</td><td>{marks}</td></tr>"


def _render_result(entry: "ReportEntry") -> str:
    result, scale = entry.judged.result, entry.judged.scale
    claims = []
    for claim, verdict in entry.judged.verdicts:
        test = f'<p class="test">Test: {escape(result.recipe.checks[claim.id].description)}</p>'
        notes = [f"{describe_scale(verdict)}: {verdict.why}"]
        notes += [f"To decide: {verdict.needs}."] if verdict.needs else []
        notes += [f"Cause: {CAUSES[verdict.cause].lower()}. {verdict.because}"] if verdict.because else []
        text = "".join(f"<p>{escape(note)}</p>" for note in notes)
        claims.append(f"<li>{_render_badge(verdict)} {escape(_say(claim))}{text}{test}</li>")
    figures = "".join(
        f'<figure><div class="scroll">{figure.inline}</div><figcaption>{escape(figure.caption)}</figcaption></figure>'
        for figure in entry.figures
    )
    command = f"adptnet reproduce {result.name} --scale {scale or 'laptop'}"
    state = "not run"
    if scale:
        source = result.recipe.source
        state = (
            f"rows of {source}"
            if source
            else f"rows of the scale {entry.judged.size}, {result.recipe.cost[scale]} on one core"
        )
    return f"""<section id="{_make_anchor(result.name)}" class="result">
<h2>{escape(result.title)}</h2>
<p class="labels">{" ".join(f"<code>{escape(label)}</code>" for label in result.labels)} · {escape(result.section)}</p>
<p>{escape(result.setup)}</p>
<pre>{escape(command)}</pre><p class="test">{escape(state)}</p>
<ul class="claims">{"".join(claims)}</ul>
{figures}
{"".join(_render_table(heading[0].upper() + heading[1:], table) for heading, table in entry.tables.items())}
{_render_list("Assumptions where the paper is not specific", result.assumptions)}
{_render_list("Deviations (docs/explanation/deviations.md)", [f"point {n}" for n in result.deviations])}
</section>
"""


def _render_list(heading: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    return f"<h3>{heading}</h3><ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _render_table(heading: str, table: Table) -> str:
    head = "".join(f"<th>{escape(format_cell(column))}</th>" for column in table.columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(format_cell(c))}</td>" for c in row) + "</tr>" for row in table.rows)
    table_html = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f"<details{' open' if len(table.rows) <= 14 else ''}><summary>{heading}</summary>{table_html}</details>"


def _render_dial(data: Mapping[str, Any] | None) -> str:
    if data is None:
        return ""
    embedded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return f"""<section id="dial">
<h2>Effect of β</h2>
<p>Move the slider. Q is computed on this page from one key and value. Spectrum, iterations and accuracy were measured
and are shown for the nearest β that was run.</p>
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
<script>{_read_asset("dial.js")}</script>
</section>
"""
