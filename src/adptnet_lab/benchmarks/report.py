"""Results as Markdown: a page for each benchmark and one for all of them, with the machine beside the numbers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .benchmark import Size

__all__ = ["format_case", "render_page", "render_summary"]

NOTE = (
    "CPU time is user and system time of the whole process, all threads together. Sides of a size are timed in turn, "
    "in one process; least and median are over the repeats. Others: cores that other processes kept busy meanwhile."
)


def render_page(result: Mapping[str, Any]) -> str:
    """Return the page of a benchmark: its verdicts, then all numbers and times.

    Args:
        result: The content of its file, as `read_results` returns it.
    """
    lines = [f"# {result['benchmark']}", "", result["about"], "", f"`adptnet bench {result['benchmark']}`", ""]
    if result["refused"]:
        return "\n".join([*lines, f"**Not timed: {result['refused']}**", ""])
    lines += [*_describe_machines(result["cases"]), ""]
    lines += _render_verdicts(result["cases"])
    lines += _render_numbers(result["cases"])
    lines += _render_times(result["cases"])
    lines += _render_skipped(result["cases"])
    return "\n".join(lines)


def render_summary(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of all benchmarks: for every goal what was expected and what was measured.

    Args:
        results: The contents of their files, as `read_results` returns them.
    """
    every = Counter(v["outcome"] for result in results for case in result["cases"] for v in case["verdicts"])
    lines = [
        "# Benchmarks",
        "",
        "Written by `adptnet bench`, with a page and a JSON file for each benchmark.",
    ]
    lines += ["**Measured on a CPU. The speed on GPUs is not measured.**", "", "![Goals and times](summary.svg)", ""]
    lines += [", ".join(f"{count} {outcome}" for outcome, count in every.most_common()) + ".", ""]
    for result in results:
        lines += [f"## [{result['benchmark']}]({result['benchmark']}.md)", "", result["about"], ""]
        if result["refused"]:
            lines += [f"**Not timed: {result['refused']}**", ""]
            continue
        lines += [*_describe_machines(result["cases"]), ""]
        lines += _render_verdicts(result["cases"])
    return "\n".join(lines)


def format_case(size: Size, verdicts: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that is printed when a case is done: its size and its verdicts.

    Args:
        size: The size.
        verdicts: The verdicts, as dictionaries.
    """
    shown = "\n".join(
        f"    {v['outcome']:12s} {v['goal']}: {_format_number(v['value'])} ({v['expected']})"
        + (f", {v['remark']}" if v["remark"] else "")
        for v in verdicts
    )
    return f"  {size}\n{shown}" if shown else f"  {size}"


def _describe_machines(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each machine and version, and one on the load."""
    lines = []
    for case in cases:
        m = case["machine"]
        kernels = sorted({what.split(", ", 1)[-1] for what in m["kernels"].values()})
        cache = "" if m["last_cache"] is None else f", last cache {m['last_cache'] >> 20} MiB"
        line = (
            f"{m['processor']} ({m['machine']}, {m['cores']} cores, {m['instructions']}{cache}), {m['system']}; "
            f"Python {m['python']}, torch {m['torch']} ({m['blas']}), numpy {m['numpy']}, adptnet {m['adptnet']}"
            f"{' at ' + m['git'][:12] if m['git'] else ''}; kernels {', '.join(kernels)}"
            f"{'; **--fast: a first impression, not a result**' if case['fast'] else ''}."
        )
        if line not in lines:
            lines.append(line)
    loads = [case["neighbours"] for case in cases]
    if loads:
        spans = [_format_range([n[key] for n in loads]) for key in ("load_before", "load_after", "others")]
        least, most = (pick(case["repeats"] for case in cases) for pick in (min, max))
        repeats = f"{least}" if least == most else f"{least} to {most}"
        load = f"Load average {spans[0]} before and {spans[1]} after a case"
        lines.append(f"{load}; others {spans[2]} cores; {repeats} repeats.")
    return lines


def _format_range(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "unknown"
    return f"{min(known):.1f}" if min(known) == max(known) else f"{min(known):.1f} to {max(known):.1f}"


def _render_verdicts(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [
            _format_size(case),
            _format_goal(v),
            v["expected"],
            _format_number(v["value"]),
            _format_outcome(v),
        ]
        for case in cases
        for v in case["verdicts"]
    ]
    return _render_table(["batch x steps x state", "", "expected", "found", "verdict"], rows) if rows else []


def _format_goal(verdict: Mapping[str, Any]) -> str:
    return f"{verdict['goal']} (paper, {verdict['claim']})" if verdict["claim"] else str(verdict["goal"])


def _format_outcome(verdict: Mapping[str, Any]) -> str:
    return f"{verdict['outcome']} ({verdict['remark']})" if verdict["remark"] else str(verdict["outcome"])


def _render_numbers(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for case in cases for name in case["numbers"]))
    if not names:
        return []
    rows = [[name, *(_format_number(case["numbers"].get(name)) for case in cases)] for name in names]
    return _render_table(["", *map(_format_size, cases)], rows)


def _render_times(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for case in cases:
        load, others = (_format_number(case["neighbours"][key]) for key in ("load_after", "others"))
        for side in case["sides"]:
            times = [f"{1e3 * side[clock][which]:.4g}" for clock in ("cpu", "wall") for which in ("least", "median")]
            rows.append([_format_size(case), side["side"], str(side["threads"]), *times, load, others])
    if not rows:
        return []
    head = ["batch x steps x state", "ms", "threads", "CPU least", "CPU median", "wall least", "wall median", "load"]
    return [NOTE, "", *_render_table([*head, "others"], rows)]


def _render_skipped(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = dict.fromkeys(f"Not run: {name}: {why}." for case in cases for name, why in case["skipped"].items())
    return [*lines, ""] if lines else []


def _format_size(case: Mapping[str, Any]) -> str:
    return str(Size(**case["size"]))


def _format_number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _render_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(cells) + " |" for cells in lines), ""]
