"""Block-wise DEER: iterations, memory and time by the number of blocks, and what it saves (sec:block_deer)."""

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adptnet import solvers, spectra
from adptnet.analysis import plot
from adptnet.cells import ADPTState
from adptnet.nn import ADPTNet

from ..evidence import rank_correlation
from ..recipe import Check, Finding, Point, Recipe, Rows, Scale, Table, Verdict
from .deer_iterations import METHODS, RTOL, network

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCKS = [1, 2, 4, 8, 16, 32]
TRIALS, WARM_UPS = 7, 2
COMPARED = ("Conv", "Forward")


class _PeakMemory(TorchDispatchMode):
    """The most bytes in tensors alive at one time, of those made while it is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self._known or not size:
            return
        self._known.add(place)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._forget, place, size).atexit = False

    def _forget(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.alive -= size


def _solver(method: str, **options: Any) -> Any:
    return METHODS[method](rtol=RTOL, patience=None, on_failure=solvers.Return(), **options)


def _iterations_of_blocks(method: str, layer: ADPTNet, x: Tensor, blocks: int) -> list[int]:
    """The count of each block, the last state of one entering the next."""
    found, state = [], None
    for part in x.chunk(blocks, dim=1):
        solution = _solver(method)(layer.cell, part, state)
        found.append(int(solution.iterations.max()))
        state = ADPTState(solution.final, solution.position)
    return found


def _run(point: Point) -> Finding:
    settings = point.settings
    layer = network(settings["width"], 0.125, 1e-4)
    x = torch.randn(1, settings["steps"], settings["width"])
    numbers: dict[str, Any] = {}
    times: dict[str, Any] = {}
    for method in COMPARED:
        each = _iterations_of_blocks(method, layer, x, settings["blocks"])
        median = max(1, round(float(np.median(each))))
        solver = solvers.BlockWise(_solver(method, fixed_iterations=median), num_blocks=settings["blocks"])

        def solve(solver: solvers.BlockWise = solver) -> object:
            with torch.no_grad():
                return solver(layer.cell, x)

        with _PeakMemory() as memory:
            solve()
        numbers[method] = {"iterations": each, "median": median, "bytes": memory.peak}
        times[method] = _seconds(solve, settings["trials"])
    return Finding(numbers, layer.spec, times)


def _seconds(solve: Callable[[], object], trials: int) -> float:
    """The mean of some trials after the warm-ups."""
    for _ in range(WARM_UPS):
        solve()
    begun = time.perf_counter()
    for _ in range(trials):
        solve()
    return (time.perf_counter() - begun) / trials


def _points(scale: Scale) -> list[Point]:
    lengths, blocks, width, trials = {
        "smoke": ([32], [1, 2], 8, 1),
        "laptop": ([2048, 4096], BLOCKS, 64, TRIALS),
        "paper": ([4096, 8192], BLOCKS, 64, TRIALS),
    }[scale]
    return [Point({"steps": t, "blocks": b, "width": width, "trials": trials}) for t in lengths for b in blocks]


def _series(rows: Rows, steps: int, what: Callable[[Any, str], float]) -> dict[str, list[float]]:
    return {method: [what(row, method) for row in rows.where(steps=steps)] for method in COMPARED}


def _median(row: Any, method: str) -> float:
    return float(row.numbers[method]["median"])


def _bytes(row: Any, method: str) -> float:
    return float(row.numbers[method]["bytes"])


def _time(row: Any, method: str) -> float:
    return float(row.time[method])


def _fewer(rows: Rows) -> Verdict:
    """The median count over blocks never rises with their number and falls in all, for each length and method."""
    every = [s for t in rows.values("steps") for s in _series(rows, t, _median).values()]
    holds = all(list(s) == sorted(s, reverse=True) and s[-1] < s[0] for s in every)
    return Verdict.of(holds, "; ".join(" → ".join(f"{v:g}" for v in s) for s in every))


def _memory(rows: Rows) -> Verdict:
    """Memory falls with every doubling of the blocks up to 8, and the first doubling saves more bytes than the last."""
    every = [s for t in rows.values("steps") for s in _series(rows, t, _bytes).values()]
    holds = all(s[0] > s[1] > s[2] > s[3] and s[0] - s[1] > s[-2] - s[-1] for s in every)
    return Verdict.of(holds, "; ".join(" → ".join(f"{v / 2**20:.1f}" for v in s) + " MiB" for s in every))


def _slower(rows: Rows) -> Verdict:
    """Spearman's correlation of blocks and time is at least 0.8, for each length and method."""
    every = [s for t in rows.values("steps") for s in _series(rows, t, _time).values()]
    found = [rank_correlation(rows.values("blocks"), s) for s in every]
    shown = "; ".join(" → ".join(f"{1000 * v:.0f}" for v in s) + " ms" for s in every)
    return Verdict.of(all(value >= 0.8 for value in found), f"smallest correlation {min(found):.2f}; {shown}")


def _faster(rows: Rows) -> Verdict:
    """The median over lengths and blocks of the time of Conv-DEER relative to Forward-DEER is below 0.75."""
    ratios = [_time(row, "Conv") / _time(row, "Forward") for row in rows]
    return Verdict.of(
        float(np.median(ratios)) < 0.75, f"median ratio {np.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
    )


def _advantage(rows: Rows) -> Verdict:
    """From one block to the most, the share of memory that Conv-DEER saves over Forward-DEER falls by 75 % or more."""
    saved = []
    for steps in rows.values("steps"):
        series = _series(rows, steps, _bytes)
        shares = [1 - conv / forward for conv, forward in zip(series["Conv"], series["Forward"], strict=True)]
        saved.append((shares[0], shares[-1]))
    return Verdict.of(
        all(first > 0 and last < first / 4 for first, last in saved),
        "; ".join(f"{first:.1%} → {last:.1%}" for first, last in saved),
    )


def _draw(rows: Rows) -> "Figure":
    lengths = rows.values("steps")
    figure = plot.blank(4.6 * (len(lengths) + 1), 3.3)
    axes = figure.subplots(1, len(lengths) + 1, squeeze=False)[0]
    for axis, steps in zip(axes, lengths, strict=False):
        seconds, memory = _series(rows, steps, _time), _series(rows, steps, _bytes)
        for method, colour in zip(COMPARED, plot.COLOURS, strict=False):
            axis.plot(
                np.multiply(1e3, seconds[method]), np.divide(memory[method], 2**20), "-o", color=colour, label=method
            )
        for x, y, blocks in zip(seconds["Conv"], memory["Conv"], rows.values("blocks"), strict=True):
            axis.annotate(f"{blocks}", (1e3 * x, y / 2**20), textcoords="offset points", xytext=(0, 6), fontsize=7)
        axis.set(xlabel="time (ms, this machine)", ylabel="peak memory (MiB)", title=f"T = {steps}", yscale="log")
        axis.legend(frameon=False, fontsize=8)
        plot.bare(axis)
    axis = axes[-1]
    for steps, style in zip(lengths, ("-", "--"), strict=False):
        for method, colour in zip(COMPARED, plot.COLOURS, strict=False):
            axis.plot(
                rows.values("blocks"),
                _series(rows, steps, _median)[method],
                style + "o",
                markersize=3,
                color=colour,
                label=f"{method}, T = {steps}",
            )
    axis.set_xscale("log", base=2)
    axis.set(xlabel="blocks", ylabel="median iterations", title="Iterations in a block", ylim=(0, None))
    axis.legend(frameon=False, fontsize=8)
    plot.bare(axis)
    return figure


def _table(rows: Rows) -> Table:
    lines = [
        [
            row.settings["steps"],
            row.settings["blocks"],
            *(int(_median(row, m)) for m in COMPARED),
            *(f"{_bytes(row, m) / 2**20:.2f}" for m in COMPARED),
            f"{_time(row, 'Conv') / _time(row, 'Forward'):.2f}",
        ]
        for row in rows
    ]
    columns = [f"iterations, {m}" for m in COMPARED] + [f"MiB, {m}" for m in COMPARED]
    return Table(["T", "blocks", *columns, "time, Conv / Forward"], lines)


# fig:block_wise_deer_comparison

QUARTERS = 4


def _savings_points(scale: Scale) -> list[Point]:
    steps = {"smoke": 64, "laptop": 512, "paper": 1024}[scale]
    return [Point({"steps": steps, "width": 16 if scale == "smoke" else 32, "beta": 1.0})]


def _run_savings(point: Point) -> Finding:
    settings = point.settings
    spectrum = spectra.Linspace(dt_min=1e-3, dt_max=1e-1)
    layer = ADPTNet(settings["width"], beta=settings["beta"], spectrum=spectrum).requires_grad_(False)
    x = torch.randn(1, settings["steps"], settings["width"])
    whole = _solver("Conv")(layer.cell, x).history
    parts, state = [], None
    for part in x.chunk(QUARTERS, dim=1):
        solution = _solver("Conv")(layer.cell, part, state)
        assert solution.history is not None
        parts.append(solution.history.converged_steps[:, 0])
        state = ADPTState(solution.final, solution.position)
    assert whole is not None
    return Finding({"whole": whole.converged_steps[:, 0], "parts": parts}, layer.spec)


def _stored(converged: list[int], steps: int) -> int:
    """Iterates of single steps that were stored: all steps at every iteration."""
    return (len(converged) - 1) * steps


def _waste(rows: Rows) -> Verdict:
    """More than a tenth of the stored iterates are of steps that were right before."""
    steps, whole = rows[0].settings["steps"], rows[0].numbers["whole"]
    share = sum(whole[:-1]) / _stored(whole, steps)
    return Verdict.of(share > 0.1, f"{share:.0%} of {_stored(whole, steps):,} stored iterates")


def _prefix(rows: Rows) -> Verdict:
    """The number of right steps after k iterations is at least k, for every k."""
    whole = rows[0].numbers["whole"]
    return Verdict.of(all(right >= k for k, right in enumerate(whole)), f"right steps by iteration {whole}")


def _reduction(rows: Rows, kept: Callable[[list[int]], int]) -> Verdict:
    steps, whole, parts = rows[0].settings["steps"], rows[0].numbers["whole"], rows[0].numbers["parts"]
    ratio = _stored(whole, steps) / kept([_stored(part, steps // QUARTERS) for part in parts])
    each = ", ".join(str(len(part) - 1) for part in parts)
    return Verdict.of(3 <= ratio <= 8, f"{ratio:.1f} times less; {len(whole) - 1} iterations, in blocks {each}")


def _four(rows: Rows) -> Verdict:
    """The iterates of the block that stores most are 3 to 8 times fewer than those of the whole."""
    return _reduction(rows, max)


def _four_training(rows: Rows) -> Verdict:
    """The iterates of all four blocks together are 3 to 8 times fewer than those of the whole."""
    return _reduction(rows, sum)


def _draw_savings(rows: Rows) -> "Figure":
    steps, whole, parts = rows[0].settings["steps"], rows[0].numbers["whole"], rows[0].numbers["parts"]
    figure = plot.blank(9, 3.2)
    left, right = figure.subplots(1, 2, sharey=True)
    _shade(left, whole, 0, steps)
    for number, part in enumerate(parts):
        _shade(right, part, number * steps // QUARTERS, steps // QUARTERS)
    left.set(title="DEER", ylabel="iteration", xlabel="step")
    right.set(title=f"{QUARTERS} blocks, one after another", xlabel="step")
    for axis in (left, right):
        axis.set(xlim=(0, steps))
        plot.bare(axis)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    left.invert_yaxis()
    return figure


def _shade(axis: Any, converged: list[int], start: int, steps: int) -> None:
    """Rows of iterations: what was right before in one colour, what was still to be found in another."""
    for iteration, done in enumerate(converged[:-1], 1):
        first = iteration == 1 and not start
        axis.barh(
            iteration, done, left=start, height=0.85, color=plot.COLOURS[1], label="already right" if first else None
        )
        axis.barh(
            iteration,
            steps - done,
            left=start + done,
            height=0.85,
            color=plot.COLOURS[4],
            label="not yet" if first else None,
        )


RECIPES = {
    "fig:pareto_blocks": Recipe(
        version=1,
        points=_points,
        run=_run,
        checks={
            "iterations": Check(_fewer, "laptop"),
            "memory": Check(_memory, "laptop"),
            "time": Check(_slower, "laptop"),
            "faster": Check(_faster, "laptop"),
            "advantage": Check(_advantage, "laptop"),
        },
        figures={"Memory, time and iterations by the number of blocks": _draw},
        table=_table,
        cost={"smoke": "1 s", "laptop": "30 s", "paper": "1 min"},
        dtype=torch.float32,
    ),
    "fig:block_wise_deer_comparison": Recipe(
        version=1,
        points=_savings_points,
        run=_run_savings,
        checks={
            "waste": Check(_waste),
            "prefix": Check(_prefix),
            "four": Check(_four),
            "four-training": Check(_four_training),
        },
        figures={"Iterates that are stored": _draw_savings},
        cost={"smoke": "1 s", "laptop": "1 s", "paper": "2 s"},
        dtype=torch.float32,
    ),
}
