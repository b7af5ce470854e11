"""Explanatory figures of the paper. Their content is computed, and their claims are tested where possible."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adptnet.analysis import plot

from ...tasks import CopyMemory, SelectiveCopy, Task
from ...tasks.base import IGNORED
from ..recipe import Check, GridPoint, Recipe, Rows, RunOutput, Scale
from ..verdicts import ClaimVerdict, decide

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = np.ndarray[Any, Any]
BLUE, RED, GREEN = plot.COLORS[:3]


def _single_point(**settings: Any) -> Callable[[Scale], list[GridPoint]]:
    """Return a function that gives the same single point at every scale."""
    return lambda scale: [GridPoint(settings)]


# fig:tradeoffs

_QUALITIES = {
    "non-linear\nrecurrence (i)": (0.0, 1.0),
    "adaptability (ii)": (1.0, 0.0),
    "long-range\nmemory (iii)": (0.0, -1.0),
    "parallel\nin time (iv)": (-1.0, 0.0),
}
_CONFLICTS = [(0, 3), (0, 2), (1, 2)]


def _draw_tradeoffs(rows: Rows) -> "Figure":
    figure = plot.new_figure(4.6, 4.2)
    axis = figure.subplots()
    names, places = list(_QUALITIES), list(_QUALITIES.values())
    for first, second in _CONFLICTS:
        axis.annotate(
            "",
            places[second],
            places[first],
            arrowprops={"arrowstyle": "<->", "color": RED, "lw": 1.8, "shrinkA": 34, "shrinkB": 34},
        )
    for name, place in zip(names, places, strict=True):
        axis.text(*place, name, ha="center", va="center", fontsize=10)
    axis.text(0.0, -1.55, "red: in conflict", ha="center", fontsize=8, color=RED)
    axis.set(xlim=(-1.7, 1.7), ylim=(-1.7, 1.4))
    axis.set_axis_off()
    return figure


# fig:dynamical_system

_GROWING = np.array([[0.6, 0.4], [0.2, 0.4]])


def _non_linear(x: Array, y: Array) -> tuple[Array, Array]:
    return -2 * x - 3 * x * y, 3 * y - y**2


def _run_planes(point: GridPoint) -> RunOutput:
    """Compute the eigenvalues of the linear systems, and of the Jacobian of the non-linear one at its critical
    points."""
    critical = {"origin": (0.0, 0.0), "above": (0.0, 3.0)}
    by_point = {
        name: [sorted([-2 - 3 * y, 3 - 2 * y]), [float(part) for part in _non_linear(np.array(x), np.array(y))]]
        for name, (x, y) in critical.items()
    }
    return RunOutput(
        {
            "unstable": sorted(np.linalg.eigvals(_GROWING).real.tolist()),
            "stable": sorted(np.linalg.eigvals(-_GROWING).real.tolist()),
            "critical": by_point,
        }
    )


def _check_linear(rows: Rows) -> ClaimVerdict:
    """In eight directions, exp(20A) x is longer than x if all eigenvalues are positive and shorter if all are
    negative."""
    numbers, matrix = rows[0].numbers, torch.tensor(rows[0].settings["growing"], dtype=torch.float64)
    angles = torch.arange(8, dtype=torch.float64) * (math.pi / 4)
    starts = torch.stack([angles.cos(), angles.sin()])  # unit vectors
    longer, shorter = (torch.linalg.matrix_exp(20 * sign * matrix) @ starts for sign in (1, -1))
    least, most = float(longer.norm(dim=0).min()), float(shorter.norm(dim=0).max())
    return decide(
        min(numbers["unstable"]) > 0 > max(numbers["stable"]) and least > 1 > most,
        f"at least {least:.2g} times as long with {numbers['unstable']}, at most {most:.2g} with {numbers['stable']}",
    )


def _check_critical(rows: Rows) -> ClaimVerdict:
    """The field is zero at (0, 0) and (0, 3). The eigenvalues of its Jacobian have both signs at one of these points
    and are negative at the other."""
    by_point = rows[0].numbers["critical"]
    is_zero = all(field == [0, 0] for _, field in by_point.values())
    kinds = sorted(
        "sink" if max(values) < 0 else "saddle" if min(values) < 0 < max(values) else "source"
        for values, _ in by_point.values()
    )
    origin, above = by_point["origin"][0], by_point["above"][0]
    return decide(is_zero and kinds == ["saddle", "sink"], f"eigenvalues {origin} at (0, 0), {above} at (0, 3)")


def _draw_planes(rows: Rows) -> "Figure":
    figure = plot.new_figure(10, 3.2)
    axes = figure.subplots(1, 3)
    y, x = np.mgrid[-2:2:24j, -2:2:24j]
    for axis, matrix, title in zip(axes, (_GROWING, -_GROWING), ("Unstable, linear", "Stable, linear"), strict=False):
        axis.streamplot(
            x,
            y,
            matrix[0, 0] * x + matrix[0, 1] * y,
            matrix[1, 0] * x + matrix[1, 1] * y,
            color=BLUE,
            density=0.8,
            linewidth=0.8,
        )
        axis.plot(0, 0, "o", color=RED)
        axis.set(title=title)
    y, x = np.mgrid[-1:4.5:24j, -2:2:24j]
    axes[2].streamplot(x, y, *_non_linear(x, y), color=BLUE, density=0.9, linewidth=0.8)
    for name, place in {"saddle": (0, 0), "sink S": (0, 3)}.items():
        axes[2].plot(*place, "o", color=RED)
        axes[2].annotate(name, place, textcoords="offset points", xytext=(6, 6), fontsize=9)
    axes[2].set(title="Non-linear")
    for axis in axes:
        plot.strip_axes(axis)
    return figure


# fig:ortho_gd


def _run_descent(point: GridPoint) -> RunOutput:
    """Run gradient descent to an orthogonal matrix at a distance of two radians, by four kinds of step."""
    rate, eye = point.settings["rate"], torch.eye(3)
    start = torch.linalg.qr(torch.randn(3, 3))[0]
    skew = torch.tensor([[0.0, -1.0, 0.3], [1.0, 0.0, -0.3], [-0.3, 0.3, 0.0]])
    target = torch.linalg.matrix_exp(2 * skew / torch.linalg.matrix_norm(skew, 2)) @ start
    numbers: dict[str, Any] = {}
    for kind in ("Euclidean", "exponential", "Cayley", "Cayley as printed"):
        q, away, distance, path = start, [], [], []
        for _ in range(point.settings["steps"]):
            away.append(float(torch.linalg.matrix_norm(q @ q.mT - eye, 2)))
            distance.append(float((q - target).norm()))
            path.append(q[:, 0])
            gradient = 2 * (q - target)
            tangent = -rate * 0.5 * (gradient @ q.mT - q @ gradient.mT)  # eq:tangent_proj
            if kind == "Euclidean":
                q = q - rate * gradient
            elif kind == "exponential":
                q = torch.linalg.matrix_exp(tangent) @ q
            elif kind == "Cayley":
                q = torch.linalg.solve(eye - tangent / 2, (eye + tangent / 2) @ q)
            else:
                q = (eye - tangent / 2) @ (eye + tangent / 2) @ q
        numbers[kind] = {"away": away, "distance": distance, "path": torch.stack(path)}
    return RunOutput(numbers)


def _check_leaves(rows: Rows) -> ClaimVerdict:
    """‖QQ' - I‖ exceeds 0.01 along Euclidean descent."""
    worst = max(rows[0].numbers["Euclidean"]["away"])
    return decide(worst > 0.01, f"up to {worst:.2g}")


def _check_stays(rows: Rows) -> ClaimVerdict:
    """‖QQ' - I‖ stays below 10⁻⁹ with either retraction, and the distance to the target at least halves."""
    numbers = [rows[0].numbers[kind] for kind in ("exponential", "Cayley")]
    worst = max(max(n["away"]) for n in numbers)
    closer = all(n["distance"][-1] < 0.5 * n["distance"][0] for n in numbers)
    return decide(
        worst < 1e-9 and closer,
        f"up to {worst:.1g}; distance {numbers[0]['distance'][0]:.2f} → {numbers[0]['distance'][-1]:.2f}",
    )


def _check_printed(rows: Rows) -> ClaimVerdict:
    """‖QQ' - I‖ stays below 10⁻⁹ with the step (I - ηψ/2)(I + ηψ/2) Q, which has no inverse."""
    numbers = rows[0].numbers["Cayley as printed"]
    return decide(max(numbers["away"]) < 1e-9, f"up to {max(numbers['away']):.2g}")


def _draw_descent(rows: Rows) -> "Figure":
    figure = plot.new_figure(8.6, 3.6)
    left, right = figure.add_subplot(1, 2, 1, projection="3d"), figure.add_subplot(1, 2, 2)
    u, v = np.mgrid[0 : 2 * np.pi : 30j, 0 : np.pi : 16j]
    left.plot_wireframe(np.cos(u) * np.sin(v), np.sin(u) * np.sin(v), np.cos(v), color="#999999", linewidth=0.3)
    for (kind, numbers), colour in zip(rows[0].numbers.items(), plot.COLORS, strict=False):
        if kind in ("Euclidean", "exponential"):
            path = np.asarray(numbers["path"])
            left.plot(*path.T, "-o", color=colour, markersize=3, label=kind)
        right.semilogy(np.maximum(numbers["away"], 1e-17), "-o", markersize=3, color=colour, label=kind)
    left.set(title="First column of Q and the unit sphere", xticks=[], yticks=[], zticks=[])
    _hide_panes(left)
    right.set(title="‖QQ' − I‖", xlabel="step", ylim=(1e-17, 100))
    right.legend(frameon=False, fontsize=8)
    plot.strip_axes(right)
    return figure


# fig:topological_conjugates

_HERTZ, _RATE, _SWITCH, _STEP = 4.0, 1.0, 0.45, 0.001


def _make_oscillator() -> Array:
    """Return the matrix of a damped oscillation in a plane, with a third direction that decays at the same rate."""
    w = 2 * math.pi * _HERTZ
    return np.array([[-_RATE, -w, 0.0], [w, -_RATE, 0.0], [0.0, 0.0, -_RATE]])


def _make_conjugate(rng: np.random.Generator) -> Array:
    """Return C⁻¹AC for a random C, a rotation times a diagonal scaling."""
    change = np.linalg.qr(rng.standard_normal((3, 3)))[0] @ np.diag(rng.uniform(0.7, 1.4, 3))
    return np.linalg.solve(change, _make_oscillator() @ change)


def _integrate(matrices: list[Array]) -> Array:
    """Return the trajectory of systems that follow one another, each for `_SWITCH` seconds."""
    state, path = np.array([1.0, 0.4, 0.3]), []
    for matrix in matrices:
        step = torch.linalg.matrix_exp(torch.tensor(matrix * _STEP)).numpy()
        for _ in range(round(_SWITCH / _STEP)):
            path.append(state)
            state = step @ state
    return np.asarray(path)


def _run_conjugates(point: GridPoint) -> RunOutput:
    rng = np.random.default_rng(point.seed)
    matrices = [_make_oscillator(), *(_make_conjugate(rng) for _ in range(3))]
    stitched = _integrate(matrices[1:])
    pieces = stitched.reshape(3, -1, 3)
    return RunOutput(
        {
            "eigenvalues": [
                [[e.real, e.imag] for e in sorted(np.linalg.eigvals(m), key=lambda e: e.imag)] for m in matrices
            ],
            "frequencies": [_measure_frequency(piece) for piece in pieces],
            "paths": [_integrate([m] * 3)[::5].tolist() for m in matrices[:2]],
            "stitched": stitched[::5].tolist(),
            "planes": [np.linalg.svd(piece - piece.mean(0))[2][2].tolist() for piece in pieces],
        }
    )


def _measure_frequency(piece: Array) -> float:
    """Return the frequency in Hz, from the angle in the plane of the first two principal components."""
    centred = piece - piece.mean(0)
    flat = centred @ np.linalg.svd(centred)[2][:2].T
    angle = np.unwrap(np.arctan2(flat[:, 1], flat[:, 0]))
    return float(abs(angle[-1] - angle[0]) / (2 * math.pi * _STEP * (len(piece) - 1)))


def _check_shared(rows: Rows) -> ClaimVerdict:
    """The eigenvalues of all four matrices agree to 10⁻⁸, and the normals of their planes differ by more than 5°."""
    eigenvalues = np.asarray(rows[0].numbers["eigenvalues"])
    worst = float(np.abs(eigenvalues - eigenvalues[0]).max())
    return decide(
        worst < 1e-8 and _smallest_angle(rows) > 5,
        f"eigenvalues differ by {worst:.1g}; planes by at least {_smallest_angle(rows):.0f}°",
    )


def _smallest_angle(rows: Rows) -> float:
    """Return the smallest angle between the planes of consecutive pieces, in degrees."""
    normals = np.asarray(rows[0].numbers["planes"])
    cosines = np.abs((normals[1:] * normals[:-1]).sum(-1))
    return float(np.degrees(np.arccos(np.clip(cosines, 0, 1))).min())


def _check_stitched(rows: Rows) -> ClaimVerdict:
    """The frequency in each 450 ms piece is within 10 % of 4 Hz."""
    found = rows[0].numbers["frequencies"]
    return decide(all(abs(f - _HERTZ) < 0.1 * _HERTZ for f in found), ", ".join(f"{f:.2f} Hz" for f in found))


def _draw_conjugates(rows: Rows) -> "Figure":
    figure = plot.new_figure(9, 3.6)
    left, right = (figure.add_subplot(1, 2, place, projection="3d") for place in (1, 2))
    for path, colour, name in zip(rows[0].numbers["paths"], (BLUE, RED), ("x' = Ax", "x' = C⁻¹AC x"), strict=True):
        left.plot(*np.asarray(path).T, color=colour, linewidth=1, label=name)
    for number, (piece, colour) in enumerate(
        zip(np.array_split(np.asarray(rows[0].numbers["stitched"]), 3), (BLUE, RED, GREEN), strict=True)
    ):
        right.plot(*piece.T, color=colour, linewidth=1.2, label=f"C{number + 1}")
    left.set(title="Two conjugate systems")
    right.set(title="Switching every 450 ms")
    for axis in (left, right):
        axis.set(xticklabels=[], yticklabels=[], zticklabels=[])
        axis.legend(frameon=False, fontsize=8)
        _hide_panes(axis)
    return figure


def _hide_panes(axis: Any) -> None:
    """Make the panes of a 3D plot transparent: they would be white on a dark page."""
    for side in (axis.xaxis, axis.yaxis, axis.zaxis):
        side.set_pane_color((1, 1, 1, 0))


# fig:copy_memory, fig:selective_copy_memory


def _run_copy(point: GridPoint) -> RunOutput:
    """Generate one sequence of the task, with the targets inside the loss window."""
    task: Task = SelectiveCopy() if point.settings["spread"] else CopyMemory()
    batch = task.batch(1, torch.Generator().manual_seed(point.seed))
    return RunOutput({"inputs": batch.inputs[0], "targets": batch.targets[batch.targets != IGNORED]}, task)


def _check_length(rows: Rows) -> ClaimVerdict:
    """In the sequence of 64 steps, 44 steps lie between the tokens, which come first, and the loss window; in one of
    128 steps, 108."""
    inputs, targets = rows[0].numbers["inputs"], rows[0].numbers["targets"]
    tokens = len(targets)
    between = inputs[tokens:-tokens]
    holds = inputs[:tokens] == targets and len(inputs) == 64 and len(between) == 44 and 128 - 2 * tokens == 108
    text = (
        f"{len(inputs)} − 2·{tokens} = {len(between)}, {between.count(0)} of them distractors and one the first prompt"
    )
    return decide(holds, f"{text}; 128 − 2·{tokens} = {128 - 2 * tokens}")


def _draw_copy(rows: Rows) -> "Figure":
    numbers, settings = rows[0].numbers, rows[0].settings
    inputs, targets = numbers["inputs"], numbers["targets"]
    figure = plot.new_figure(10, 2.2)
    axis = figure.subplots()
    for t, value in enumerate(inputs):
        data = 0 < value <= settings["symbols"]
        colour = BLUE if data else "#cccccc" if value == 0 else GREEN
        axis.bar(t, 1, 0.9, bottom=1.2, color=colour)
        if data:
            axis.text(t, 1.7, str(value), ha="center", va="center", fontsize=6, color="white")
    for place, value in enumerate(targets):
        t = len(inputs) - len(targets) + place
        axis.bar(t, 1, 0.9, color=RED)
        axis.text(t, 0.5, str(value), ha="center", va="center", fontsize=6, color="white")
    axis.set_yticks([0.5, 1.7], ["target", "input"])
    axis.set(
        xlabel="step",
        title="Blue: tokens to remember. Grey: distractors. Green: prompts. Red: loss window.",
        xlim=(-1, len(inputs)),
    )
    plot.strip_axes(axis)
    return figure


_SECONDS: dict[Scale, str] = {"smoke": "1 s", "laptop": "1 s", "paper": "1 s"}

RECIPES = {
    "fig:tradeoffs": Recipe(
        1,
        _single_point(drawing="four qualities"),
        lambda point: RunOutput({}),
        {},
        {"Four qualities": _draw_tradeoffs},
        cost=_SECONDS,
    ),
    "fig:dynamical_system": Recipe(
        1,
        _single_point(growing=_GROWING.tolist()),
        _run_planes,
        {"linear": Check(_check_linear), "critical-points": Check(_check_critical)},
        {"Vector fields": _draw_planes},
        cost=_SECONDS,
    ),
    "fig:ortho_gd": Recipe(
        1,
        _single_point(rate=0.1, steps=30),
        _run_descent,
        {"leaves": Check(_check_leaves), "stays": Check(_check_stays), "printed": Check(_check_printed)},
        {"Descent on the orthogonal matrices": _draw_descent},
        cost=_SECONDS,
    ),
    "fig:topological_conjugates": Recipe(
        1,
        _single_point(hertz=_HERTZ, rate=_RATE, switch=_SWITCH),
        _run_conjugates,
        {"spectrum": Check(_check_shared), "stitched": Check(_check_stitched)},
        {"Conjugate systems, and switching between them": _draw_conjugates},
        cost=_SECONDS,
    ),
    "fig:copy_memory": Recipe(
        1,
        _single_point(symbols=8, spread=False),
        _run_copy,
        {"length": Check(_check_length)},
        {"Copy Memory": _draw_copy},
        cost=_SECONDS,
    ),
    "fig:selective_copy_memory": Recipe(
        1,
        _single_point(symbols=14, spread=True),
        _run_copy,
        {},
        {"Selective Copy": _draw_copy},
        cost=_SECONDS,
    ),
}
