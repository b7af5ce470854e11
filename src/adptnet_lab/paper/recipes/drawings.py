"""Explanatory figures: what they show is computed, and what they say is checked where it can be."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adptnet.analysis import plot

from ...tasks import CopyMemory, SelectiveCopy, Task
from ...tasks.base import IGNORED
from ..recipe import Check, Finding, Point, Recipe, Rows, Scale, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = np.ndarray[Any, Any]
BLUE, RED, GREEN = plot.COLOURS[:3]


def _one(**settings: Any) -> Callable[[Scale], list[Point]]:
    """The same single point at every scale."""
    return lambda scale: [Point(settings)]


# fig:tradeoffs

_QUALITIES = {
    "non-linear\nrecurrence (i)": (0.0, 1.0),
    "adaptability (ii)": (1.0, 0.0),
    "long-range\nmemory (iii)": (0.0, -1.0),
    "parallel\nin time (iv)": (-1.0, 0.0),
}
_CONFLICTS = [(0, 3), (0, 2), (1, 2)]


def _draw_tradeoffs(rows: Rows) -> "Figure":
    figure = plot.blank(4.6, 4.2)
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
    axis.text(0.0, -1.55, "red: at odds with each other", ha="center", fontsize=8, color=RED)
    axis.set(xlim=(-1.7, 1.7), ylim=(-1.7, 1.4))
    axis.set_axis_off()
    return figure


# fig:dynamical_system

_GROWING = np.array([[0.6, 0.4], [0.2, 0.4]])


def _non_linear(x: Array, y: Array) -> tuple[Array, Array]:
    return -2 * x - 3 * x * y, 3 * y - y**2


def _run_planes(point: Point) -> Finding:
    """Eigenvalues of the linear systems, and of the Jacobian at the critical points of the non-linear one."""
    critical = {"origin": (0.0, 0.0), "above": (0.0, 3.0)}
    at = {
        name: [sorted([-2 - 3 * y, 3 - 2 * y]), [float(part) for part in _non_linear(np.array(x), np.array(y))]]
        for name, (x, y) in critical.items()
    }
    return Finding(
        {
            "unstable": sorted(np.linalg.eigvals(_GROWING).real.tolist()),
            "stable": sorted(np.linalg.eigvals(-_GROWING).real.tolist()),
            "critical": at,
        }
    )


def _linear(rows: Rows) -> Verdict:
    """From eight directions exp(20A) x is longer than x where all eigenvalues are positive, shorter where negative."""
    numbers, matrix = rows[0].numbers, torch.tensor(rows[0].settings["growing"], dtype=torch.float64)
    angles = torch.arange(8, dtype=torch.float64) * (math.pi / 4)
    starts = torch.stack([angles.cos(), angles.sin()])  # of length one
    longer, shorter = (torch.linalg.matrix_exp(20 * sign * matrix) @ starts for sign in (1, -1))
    least, most = float(longer.norm(dim=0).min()), float(shorter.norm(dim=0).max())
    return Verdict.of(
        min(numbers["unstable"]) > 0 > max(numbers["stable"]) and least > 1 > most,
        f"at least {least:.2g} times as long with {numbers['unstable']}, at most {most:.2g} with {numbers['stable']}",
    )


def _critical(rows: Rows) -> Verdict:
    """The field is zero at (0, 0) and (0, 3); eigenvalues there are of both signs at one, negative at the other."""
    at = rows[0].numbers["critical"]
    rest = all(field == [0, 0] for _, field in at.values())
    kinds = sorted(
        "sink" if max(values) < 0 else "saddle" if min(values) < 0 < max(values) else "source"
        for values, _ in at.values()
    )
    return Verdict.of(
        rest and kinds == ["saddle", "sink"], f"eigenvalues {at['origin'][0]} at (0, 0), {at['above'][0]} at (0, 3)"
    )


def _draw_planes(rows: Rows) -> "Figure":
    figure = plot.blank(10, 3.2)
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
        plot.bare(axis)
    return figure


# fig:ortho_gd


def _run_descent(point: Point) -> Finding:
    """Descent to an orthogonal matrix two radians away, by four kinds of step."""
    rate, eye = point.settings["rate"], torch.eye(3)
    start = torch.linalg.qr(torch.randn(3, 3))[0]
    turn = torch.tensor([[0.0, -1.0, 0.3], [1.0, 0.0, -0.3], [-0.3, 0.3, 0.0]])
    target = torch.linalg.matrix_exp(2 * turn / torch.linalg.matrix_norm(turn, 2)) @ start
    found: dict[str, Any] = {}
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
        found[kind] = {"away": away, "distance": distance, "path": torch.stack(path)}
    return Finding(found)


def _leaves(rows: Rows) -> Verdict:
    """‖QQ' - I‖ exceeds 0.01 along Euclidean descent."""
    worst = max(rows[0].numbers["Euclidean"]["away"])
    return Verdict.of(worst > 0.01, f"up to {worst:.2g}")


def _stays(rows: Rows) -> Verdict:
    """‖QQ' - I‖ stays below 10⁻⁹ with either retraction, and the target comes closer."""
    numbers = [rows[0].numbers[kind] for kind in ("exponential", "Cayley")]
    worst = max(max(n["away"]) for n in numbers)
    closer = all(n["distance"][-1] < 0.5 * n["distance"][0] for n in numbers)
    return Verdict.of(
        worst < 1e-9 and closer,
        f"up to {worst:.1g}; distance {numbers[0]['distance'][0]:.2f} → {numbers[0]['distance'][-1]:.2f}",
    )


def _printed(rows: Rows) -> Verdict:
    """‖QQ' - I‖ stays below 10⁻⁹ with (I - ηψ/2)(I + ηψ/2) Q, without an inverse."""
    numbers = rows[0].numbers["Cayley as printed"]
    return Verdict.of(max(numbers["away"]) < 1e-9, f"up to {max(numbers['away']):.2g}", "the inverse is missing")


def _draw_descent(rows: Rows) -> "Figure":
    figure = plot.blank(8.6, 3.6)
    left, right = figure.add_subplot(1, 2, 1, projection="3d"), figure.add_subplot(1, 2, 2)
    u, v = np.mgrid[0 : 2 * np.pi : 30j, 0 : np.pi : 16j]
    left.plot_wireframe(np.cos(u) * np.sin(v), np.sin(u) * np.sin(v), np.cos(v), color="#999999", linewidth=0.3)
    for (kind, numbers), colour in zip(rows[0].numbers.items(), plot.COLOURS, strict=False):
        if kind in ("Euclidean", "exponential"):
            path = np.asarray(numbers["path"])
            left.plot(*path.T, "-o", color=colour, markersize=3, label=kind)
        right.semilogy(np.maximum(numbers["away"], 1e-17), "-o", markersize=3, color=colour, label=kind)
    left.set(title="First column of Q, on the sphere or not", xticks=[], yticks=[], zticks=[])
    _open(left)
    right.set(title="‖QQ' − I‖", xlabel="step", ylim=(1e-17, 100))
    right.legend(frameon=False, fontsize=8)
    plot.bare(right)
    return figure


# fig:topological_conjugates

_HERTZ, _RATE, _SWITCH, _STEP = 4.0, 1.0, 0.45, 0.001


def _oscillator() -> Array:
    """A damped oscillation in a plane, and a third direction that decays as fast."""
    w = 2 * math.pi * _HERTZ
    return np.array([[-_RATE, -w, 0.0], [w, -_RATE, 0.0], [0.0, 0.0, -_RATE]])


def _conjugate(rng: np.random.Generator) -> Array:
    """C⁻¹AC, with C a rotation times stretches."""
    change = np.linalg.qr(rng.standard_normal((3, 3)))[0] @ np.diag(rng.uniform(0.7, 1.4, 3))
    return np.linalg.solve(change, _oscillator() @ change)


def _trajectory(pieces: list[Array]) -> Array:
    state, path = np.array([1.0, 0.4, 0.3]), []
    for matrix in pieces:
        step = torch.linalg.matrix_exp(torch.tensor(matrix * _STEP)).numpy()
        for _ in range(round(_SWITCH / _STEP)):
            path.append(state)
            state = step @ state
    return np.asarray(path)


def _run_conjugates(point: Point) -> Finding:
    rng = np.random.default_rng(point.seed)
    matrices = [_oscillator(), *(_conjugate(rng) for _ in range(3))]
    stitched = _trajectory(matrices[1:])
    pieces = stitched.reshape(3, -1, 3)
    return Finding(
        {
            "eigenvalues": [
                [[e.real, e.imag] for e in sorted(np.linalg.eigvals(m), key=lambda e: e.imag)] for m in matrices
            ],
            "frequencies": [_frequency(piece) for piece in pieces],
            "paths": [_trajectory([m] * 3)[::5].tolist() for m in matrices[:2]],
            "stitched": stitched[::5].tolist(),
            "planes": [np.linalg.svd(piece - piece.mean(0))[2][2].tolist() for piece in pieces],
        }
    )


def _frequency(piece: Array) -> float:
    """Turns per second, from the angle in the plane of the two largest directions."""
    centred = piece - piece.mean(0)
    flat = centred @ np.linalg.svd(centred)[2][:2].T
    angle = np.unwrap(np.arctan2(flat[:, 1], flat[:, 0]))
    return float(abs(angle[-1] - angle[0]) / (2 * math.pi * _STEP * (len(piece) - 1)))


def _shared(rows: Rows) -> Verdict:
    """The eigenvalues of all four matrices agree to 10⁻⁸, and the normals of their planes differ by more than 5°."""
    eigenvalues = np.asarray(rows[0].numbers["eigenvalues"])
    worst = float(np.abs(eigenvalues - eigenvalues[0]).max())
    return Verdict.of(
        worst < 1e-8 and _turns(rows) > 5, f"eigenvalues differ by {worst:.1g}; planes by at least {_turns(rows):.0f}°"
    )


def _turns(rows: Rows) -> float:
    normals = np.asarray(rows[0].numbers["planes"])
    cosines = np.abs((normals[1:] * normals[:-1]).sum(-1))
    return float(np.degrees(np.arccos(np.clip(cosines, 0, 1))).min())


def _stitched(rows: Rows) -> Verdict:
    """The frequency of each 450 ms is within 10 % of 4 Hz."""
    found = rows[0].numbers["frequencies"]
    return Verdict.of(all(abs(f - _HERTZ) < 0.1 * _HERTZ for f in found), ", ".join(f"{f:.2f} Hz" for f in found))


def _draw_conjugates(rows: Rows) -> "Figure":
    figure = plot.blank(9, 3.6)
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
        _open(axis)
    return figure


def _open(axis: Any) -> None:
    """No walls behind a picture of space: they would be white on a dark page."""
    for side in (axis.xaxis, axis.yaxis, axis.zaxis):
        side.set_pane_color((1, 1, 1, 0))


# fig:copy_memory, fig:selective_copy_memory


def _run_copy(point: Point) -> Finding:
    """One sequence of the task, and the targets in the window of the loss."""
    task: Task = SelectiveCopy() if point.settings["spread"] else CopyMemory()
    batch = task.batch(1, torch.Generator().manual_seed(point.seed))
    return Finding({"inputs": batch.inputs[0], "targets": batch.targets[batch.targets != IGNORED]}, task)


def _length(rows: Rows) -> Verdict:
    """Of the 64 steps drawn, 44 are between the tokens, which come first, and the window of the loss; of 128, 108."""
    inputs, targets = rows[0].numbers["inputs"], rows[0].numbers["targets"]
    tokens = len(targets)
    between = inputs[tokens:-tokens]
    holds = inputs[:tokens] == targets and len(inputs) == 64 and len(between) == 44 and 128 - 2 * tokens == 108
    said = f"{len(inputs)} − 2·{tokens} = {len(between)}, of them {between.count(0)} distractors and the first prompt"
    return Verdict.of(holds, f"{said}; 128 − 2·{tokens} = {128 - 2 * tokens}")


def _draw_copy(rows: Rows) -> "Figure":
    numbers, settings = rows[0].numbers, rows[0].settings
    inputs, targets = numbers["inputs"], numbers["targets"]
    figure = plot.blank(10, 2.2)
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
        title="Blue: to remember. Grey: distractors. Green: prompts. Red: the loss.",
        xlim=(-1, len(inputs)),
    )
    plot.bare(axis)
    return figure


_SECONDS: dict[Scale, str] = {"smoke": "1 s", "laptop": "1 s", "paper": "1 s"}

RECIPES = {
    "fig:tradeoffs": Recipe(
        1,
        _one(drawing="four qualities"),
        lambda point: Finding({}),
        {},
        {"Four qualities": _draw_tradeoffs},
        cost=_SECONDS,
    ),
    "fig:dynamical_system": Recipe(
        1,
        _one(growing=_GROWING.tolist()),
        _run_planes,
        {"linear": Check(_linear), "critical-points": Check(_critical)},
        {"Vector fields": _draw_planes},
        cost=_SECONDS,
    ),
    "fig:ortho_gd": Recipe(
        1,
        _one(rate=0.1, steps=30),
        _run_descent,
        {"leaves": Check(_leaves), "stays": Check(_stays), "printed": Check(_printed)},
        {"Descent on the orthogonal matrices": _draw_descent},
        cost=_SECONDS,
    ),
    "fig:topological_conjugates": Recipe(
        1,
        _one(hertz=_HERTZ, rate=_RATE, switch=_SWITCH),
        _run_conjugates,
        {"spectrum": Check(_shared), "stitched": Check(_stitched)},
        {"Conjugate systems, and switching between them": _draw_conjugates},
        cost=_SECONDS,
    ),
    "fig:copy_memory": Recipe(
        1,
        _one(symbols=8, spread=False),
        _run_copy,
        {"length": Check(_length)},
        {"Copy Memory": _draw_copy},
        cost=_SECONDS,
    ),
    "fig:selective_copy_memory": Recipe(
        1,
        _one(symbols=14, spread=True),
        _run_copy,
        {},
        {"Selective Copy": _draw_copy},
        cost=_SECONDS,
    ),
}
