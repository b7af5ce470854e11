"""The page: a table for each task, the models of the user beside the known ones, and what was not run."""

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from .known import KNOWN
from .rows import choose_rate
from .suites import BUDGETS, FACTORS, SUITES, BudgetName, SuiteName

__all__ = ["render_page"]

_NEAR = 0.1  # relative difference of parameter counts that a table does not mention


def render_page(rows: Sequence[dict[str, Any]], suites: Collection[SuiteName], own: Collection[str]) -> str:
    """Return a Markdown page.

    Args:
        rows: The rows.
        suites: The suites to show.
        own: Names of models to set in bold and list first.
    """
    lines: list[str] = []
    for name in suites:
        suite = SUITES[name]
        lines += [f"## {name}", "", suite.about, ""]
        budgets = {json.dumps(row["budget"], sort_keys=True): row["budget"] for row in rows if row["suite"] == name}
        for budget in budgets.values():
            chosen = [row for row in rows if row["suite"] == name and row["budget"] == budget]
            lines += _describe_budget(budget, suite.parameters)
            for task in (each for each in suite.tasks if any(row["task"] == each for row in chosen)):
                lines += _render_table(task, [row for row in chosen if row["task"] == task], own, suite.parameters)
            lines += _list_missing(name, budget, chosen)
    return "\n".join(lines)


def _describe_budget(budget: dict[str, Any], parameters: int) -> list[str]:
    rates = ", ".join(f"{rate:g}" for rate in budget["rates"])
    return [
        f"### Budget: {budget['name']}",
        "",
        f"{budget['steps']:,} steps of {budget['batch_size']} sequences, AdamW, learning rates {rates}. Known models "
        f"have {parameters:,} parameters, as nearly as their width allows. ×k is the score in per cent at k times the "
        "training length: the mean over the seeds, with the lowest and the highest in brackets. CPU seconds are those "
        "of one run, training and test.",
        "",
    ]


def _render_table(task: str, rows: Sequence[dict[str, Any]], own: Collection[str], parameters: int) -> list[str]:
    names = list(dict.fromkeys(row["model"] for row in rows))
    order = [name for name in names if name in own] + [name for name in KNOWN if name in names and name not in own]
    order += [name for name in names if name not in order]
    lines = [f"#### {task}: {rows[0]['metric']}, chance {100 * rows[0]['chance']:.1f} %", ""]
    lines.append("| model | parameters | rate | seeds | " + " | ".join(f"×{k}" for k in FACTORS) + " | CPU s |")
    lines.append("| --- " * (5 + len(FACTORS)) + "|")
    far = False
    for name in order:
        last = [row for row in rows if row["model"] == name][-1]["fingerprint"]  # of code that was changed, the last
        same = [row for row in rows if row["model"] == name and row["fingerprint"] == last]
        rate = choose_rate([row for row in same if row["seed"] == same[0]["seed"]])
        runs = [row for row in same if row["rate"] == rate]
        finished = [row for row in runs if row["test"]]
        differs = abs(runs[0]["parameters"] / parameters - 1) > _NEAR
        far = far or differs
        cells = [
            f"**{_escape(name)}**" if name in own else _escape(name),
            f"{runs[0]['parameters']:,}" + ("\\*" if differs else ""),
            f"{rate:g}",
            str(len(runs)) + (f", {len(runs) - len(finished)} diverged" if len(finished) < len(runs) else ""),
            *(_format_scores([row["test"][str(k)] for row in finished if str(k) in row["test"]]) for k in FACTORS),
            f"{sum(row['seconds'] for row in runs) / len(runs):.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    if far:
        lines += ["", f"\\* differs from {parameters:,} parameters by more than {_NEAR:.0%}."]
    return [*lines, ""]


def _format_scores(scores: Sequence[float]) -> str:
    if not scores:
        return "–"
    mean = f"{100 * sum(scores) / len(scores):.1f}"
    return mean if len(scores) == 1 else f"{mean} [{100 * min(scores):.0f}, {100 * max(scores):.0f}]"


def _list_missing(suite: SuiteName, budget: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a list of the runs of known models that have no row, with their cost by the rows of the same task."""
    lines = list(_find_missing(suite, budget, rows))
    return ["#### Not run", "", *lines, ""] if lines else []


def _find_missing(suite: SuiteName, budget: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    if budget["name"] not in BUDGETS:
        return
    name: BudgetName = budget["name"]
    seeds, rates = BUDGETS[name].seeds, BUDGETS[name].rates
    for task in SUITES[suite].tasks:
        for model in KNOWN:
            own = [row for row in rows if row["task"] == task and row["model"] == model]
            missing = len(rates) + len(seeds) - 1 - len(own)
            if missing <= 0:
                continue
            times = [row["seconds"] for row in own] or [row["seconds"] for row in rows if row["task"] == task]
            cost = f"about {missing * sum(times) / len(times):.0f} CPU s" if times else "cost unknown"
            like = "" if own or not times else ", by the mean of the other models"
            yield f"- {task}, {model}: {missing} of {len(rates) + len(seeds) - 1} runs ({cost}{like})"


def _escape(name: str) -> str:
    return name.replace("|", "\\|").replace("_", "\\_")
