"""Results in words: a page for each subject and one for all of them, with the machine beside the numbers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .subject import Size

__all__ = ["line", "page", "summary"]

NOTE = (
    "CPU time is user and system time of the whole process, all threads together. Sides of a size are timed in turn, "
    "in one process; least and median are over the repeats. Others: cores that other processes kept busy meanwhile."
)


def page(result: Mapping[str, Any]) -> str:
    """One subject: verdicts, then every time."""
    lines = [f"# {result['subject']}", "", result["about"], "", f"`adptnet bench {result['subject']}`", ""]
    if result["refused"]:
        return "\n".join([*lines, f"**Refused: {result['refused']}**", ""])
    lines += [*_machine(result["cases"]), ""]
    lines += _verdicts(result["cases"])
    lines += _numbers(result["cases"])
    lines += _times(result["cases"])
    lines += _skipped(result["cases"])
    return "\n".join(lines)


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """All subjects: what was expected and what was found."""
    every = Counter(v["outcome"] for result in results for case in result["cases"] for v in case["verdicts"])
    lines = ["# Benchmarks", "", "Written by `adptnet bench`; a page and a JSON file for each subject beside this one."]
    lines += ["**Measured on a CPU. The speed on GPUs is not measured.**", "", "![Goals and times](summary.svg)", ""]
    lines += [", ".join(f"{count} {outcome}" for outcome, count in every.most_common()) + ".", ""]
    for result in results:
        lines += [f"## [{result['subject']}]({result['subject']}.md)", "", result["about"], ""]
        if result["refused"]:
            lines += [f"**Refused: {result['refused']}**", ""]
            continue
        lines += [*_machine(result["cases"]), ""]
        lines += _verdicts(result["cases"])
    return "\n".join(lines)


def line(size: Size, verdicts: Sequence[Mapping[str, Any]]) -> str:
    """What is printed when a case is done."""
    shown = "\n".join(
        f"    {v['outcome']:12s} {v['goal']}: {_number(v['value'])} ({v['expected']})"
        + (f", {v['remark']}" if v["remark"] else "")
        for v in verdicts
    )
    return f"  {size}\n{shown}" if shown else f"  {size}"


def _machine(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each machine and version."""
    lines = []
    for case in cases:
        m = case["machine"]
        kernels = sorted({what.split(", ", 1)[-1] for what in m["kernels"].values()})
        cache = "" if m["last_cache"] is None else f", last cache {m['last_cache'] >> 20} MiB"
        said = (
            f"{m['processor']} ({m['machine']}, {m['cores']} cores, {m['instructions']}{cache}), {m['system']}; "
            f"Python {m['python']}, torch {m['torch']} ({m['blas']}), numpy {m['numpy']}, adptnet {m['adptnet']}"
            f"{' at ' + m['git'][:12] if m['git'] else ''}; kernels {', '.join(kernels)}"
            f"{'; **--fast: a look, not a result**' if case['fast'] else ''}."
        )
        if said not in lines:
            lines.append(said)
    loads = [case["neighbours"] for case in cases]
    if loads:
        spans = [_span([n[key] for n in loads]) for key in ("load_before", "load_after", "others")]
        least, most = (pick(case["repeats"] for case in cases) for pick in (min, max))
        repeats = f"{least}" if least == most else f"{least} to {most}"
        load = f"Load average {spans[0]} before and {spans[1]} after a case"
        lines.append(f"{load}; others {spans[2]} cores; {repeats} repeats.")
    return lines


def _span(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "unknown"
    return f"{min(known):.1f}" if min(known) == max(known) else f"{min(known):.1f} to {max(known):.1f}"


def _verdicts(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [_size(case), _claimed(v), v["expected"], _number(v["value"]), v["outcome"] + _remark(v)]
        for case in cases
        for v in case["verdicts"]
    ]
    return _table(["batch x steps x state", "", "expected", "found", "verdict"], rows) if rows else []


def _claimed(verdict: Mapping[str, Any]) -> str:
    return f"{verdict['goal']} (paper, {verdict['claim']})" if verdict["claim"] else str(verdict["goal"])


def _remark(verdict: Mapping[str, Any]) -> str:
    return f" ({verdict['remark']})" if verdict["remark"] else ""


def _numbers(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for case in cases for name in case["numbers"]))
    if not names:
        return []
    rows = [[name, *(_number(case["numbers"].get(name)) for case in cases)] for name in names]
    return _table(["", *map(_size, cases)], rows)


def _times(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for case in cases:
        load, others = (_number(case["neighbours"][key]) for key in ("load_after", "others"))
        for side in case["sides"]:
            times = [f"{1e3 * side[clock][which]:.4g}" for clock in ("cpu", "wall") for which in ("least", "median")]
            rows.append([_size(case), side["side"], str(side["threads"]), *times, load, others])
    if not rows:
        return []
    head = ["batch x steps x state", "ms", "threads", "CPU least", "CPU median", "wall least", "wall median", "load"]
    return [NOTE, "", *_table([*head, "others"], rows)]


def _skipped(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    said = dict.fromkeys(f"Not run: {name}: {why}." for case in cases for name, why in case["skipped"].items())
    return [*said, ""] if said else []


def _size(case: Mapping[str, Any]) -> str:
    return str(Size(**case["size"]))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(cells) + " |" for cells in lines), ""]
