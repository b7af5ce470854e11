"""The figure of a summary: the verdicts on all goals, the times of layers, and the growth of time with size."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adptnet.analysis import plot

from .benchmark import Size
from .goals import QUIET

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_summary"]

COLORS = {"met": plot.COLORS[2], "missed": plot.COLORS[1], "undecided": "#999999"}


def draw_summary(results: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw the goals on the left; on the right layers and growth, if they were measured.

    Args:
        results: The contents of the files of benchmarks, as `read_results` returns them.
    """
    cases_of = {result["benchmark"]: result["cases"] for result in results if result["cases"]}
    goals = _collect_goals(cases_of)
    right = [(draw, cases_of[benchmark]) for benchmark, draw in PANELS.items() if benchmark in cases_of]
    figure = plot.new_figure(13 if right else 9, max(3.6, 3.0 * len(right), 0.22 * len(goals) + 1.6))
    if not right:
        _draw_goals(figure.subplots(), goals)
        return figure
    sides: Any = figure.subfigures(1, 2, width_ratios=[1.25, 1])
    left, beside = sides
    _draw_goals(left.subplots(), goals)
    for (draw, cases), axis in zip(right, beside.subplots(len(right), 1, squeeze=False).flat, strict=True):
        draw(axis, cases)
        plot.strip_axes(axis)
        axis.tick_params(which="both", labelsize=7)
    return figure


def _collect_goals(cases_of: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the verdicts on goals that are not claims of the paper, by goal."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for benchmark, cases in cases_of.items():
        for case in cases:
            for verdict in case["verdicts"]:
                if verdict["claim"] is None and verdict["share"]:
                    rows.setdefault(f"{benchmark}: {verdict['goal']}", []).append(verdict)
    return rows


def _draw_goals(axis: "Axes", goals: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    if not goals:
        axis.axis("off")
        axis.text(0.5, 0.5, "no goal was measured", ha="center", va="center", transform=axis.transAxes)
        return
    for place, verdicts in enumerate(goals.values()):
        for outcome, color in COLORS.items():
            shares = [v["share"] for v in verdicts if v["outcome"] == outcome]
            axis.plot(shares, [place] * len(shares), "o", markersize=5, color=color, alpha=0.8)
    for outcome, color in COLORS.items():
        label = outcome if outcome != "undecided" else f"undecided, others kept over {QUIET:g} cores busy"
        axis.plot([], [], "o", color=color, label=label)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_yticks(range(len(goals)), list(goals), fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("share of what the goal allows; a dot for each size, left of the line is met", fontsize=8)
    plot.strip_axes(axis)
    axis.tick_params(axis="y", labelsize=7)
    above = 1.0 + 1.2 / max(8, len(goals))
    axis.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(0, above), ncols=3)


def _draw_layers(axis: "Axes", cases: Sequence[Mapping[str, Any]]) -> None:
    names = [side["side"] for side in cases[0]["sides"] if side["threads"] == 1 and "training" in side["side"]]
    width = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        times = [_least_ms(case, name) for case in cases]
        at = [number + place * width for number in range(len(cases))]
        axis.bar(at, times, width, color=plot.COLORS[place % len(plot.COLORS)], label=name.split(",")[0])
    axis.set_yscale("log")
    labels = [str(Size(**case["size"])).replace(" x ", "\nx ", 1) for case in cases]
    axis.set_xticks([number + 0.4 - width / 2 for number in range(len(cases))], labels, fontsize=6)
    axis.set_ylabel("training, ms of CPU", fontsize=8)
    axis.set_xlabel("batch x steps x state, one thread", fontsize=8)
    axis.set_ylim(top=4 * axis.get_ylim()[1])  # room for the legend
    axis.legend(frameon=False, fontsize=7, ncols=len(names), columnspacing=1.0, handlelength=1.0)


def _draw_growth(axis: "Axes", cases: Sequence[Mapping[str, Any]]) -> None:
    for number, case in enumerate(cases):
        for kind, mark in (("forward", "--o"), ("training", "-o")):
            points = [
                (int(side["side"].split(", ")[1]), 1e3 * side["cpu"]["least"])
                for side in case["sides"]
                if side["threads"] == 1 and side["side"].startswith(kind)
            ]
            color = plot.COLORS[number % len(plot.COLORS)]
            label = f"{kind}, up to {Size(**case['size'])}"
            axis.loglog(*zip(*points, strict=True), mark, markersize=3, color=color, label=label)
    axis.set_ylabel("ms of CPU", fontsize=8)
    axis.legend(frameon=False, fontsize=7, handlelength=3.0)


def _draw_time(axis: "Axes", cases: Sequence[Mapping[str, Any]]) -> None:
    _draw_growth(axis, cases)
    axis.set_xlabel("steps of a sequence, one thread", fontsize=8)


def _draw_batch(axis: "Axes", cases: Sequence[Mapping[str, Any]]) -> None:
    _draw_growth(axis, cases)
    axis.set_xlabel("sequences, one thread", fontsize=8)


def _least_ms(case: Mapping[str, Any], name: str) -> float:
    """Return the least CPU time of a side with one thread, in milliseconds; 0 if it was not measured."""
    return next(
        (1e3 * side["cpu"]["least"] for side in case["sides"] if (side["side"], side["threads"]) == (name, 1)), 0.0
    )


PANELS = {"layers": _draw_layers, "growth-time": _draw_time, "growth-batch": _draw_batch}
