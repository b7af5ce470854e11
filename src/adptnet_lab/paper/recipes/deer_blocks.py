"""Block-wise DEER: iterations, memory and time by the number of blocks, and the memory it saves (sec:block_deer)."""

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adptnet import solvers, spectra
from adptnet.analysis import plot
from adptnet.cells import ADPTState
from adptnet.nn import ADPTNet

from ..evidence import estimate_mean, rank_correlation
from ..recipe import Check, GridPoint, Recipe, Rows, RunOutput, Scale, Table, use_complete_seeds
from ..settings.deer_networks import build_network, make_solver
from ..verdicts import ClaimVerdict, combine, decide, judge_increase, judge_limit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCKS = [1, 2, 4, 8, 16, 32]
TRIALS, WARM_UPS = 7, 2
COMPARED = ("Conv", "Forward")
TORCH_PROGRAM = {"program": "reference"}  # the kind of program the paper times; points without it run our kernels


class _PeakMemory(TorchDispatchMode):
    """Measures the peak number of bytes in live tensors that were created while the mode is active."""

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


def _measure_peak(call: Callable[[], object]) -> int:
    """Return the peak number of bytes of a call. Garbage collection, whose moment varies, is suspended."""
    with _PeakMemory():
        call()  # the first call fills caches
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with _PeakMemory() as memory:
            call()
    finally:
        if was_enabled:
            gc.enable()
    peak: int = memory.peak
    return peak


def _solve_blocks(method: str, layer: ADPTNet, x: Tensor, blocks: int) -> Iterator[solvers.Solution]:
    """Solve the blocks sequentially; the final state of each block is the initial state of the next."""
    state = None
    for block in x.chunk(blocks, dim=1):
        solution = make_solver(method)(layer.cell, block, state)
        yield solution
        state = ADPTState(solution.final, solution.position)


def _run(point: GridPoint) -> RunOutput:
    with _use_program(point.settings.get("program")):
        return _measure(point)


@contextmanager
def _use_program(name: str | None) -> Iterator[None]:
    """Run everything in plain PyTorch operations, as the paper's program does, if `name` is "reference"."""
    if name is None:
        yield
        return
    before = os.environ.get("ADPTNET_BACKEND")
    os.environ["ADPTNET_BACKEND"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["ADPTNET_BACKEND"]
        else:
            os.environ["ADPTNET_BACKEND"] = before


def _measure(point: GridPoint) -> RunOutput:
    settings = point.settings
    layer = build_network(settings["width"], 0.125, 1e-4)
    x = torch.randn(1, settings["steps"], settings["width"])
    numbers: dict[str, Any] = {}
    calls: dict[str, Callable[[], object]] = {}
    for method in COMPARED:
        solutions = _solve_blocks(method, layer, x, settings["blocks"])
        counts = [int(solution.iterations.max()) for solution in solutions]
        median = max(1, round(float(np.median(counts))))
        solver = solvers.BlockWise(make_solver(method, fixed_iterations=median), num_blocks=settings["blocks"])

        def solve(solver: solvers.BlockWise = solver) -> object:
            with torch.no_grad():
                return solver(layer.cell, x)

        numbers[method] = {"iterations": counts, "median": median, "bytes": _measure_peak(solve)}
        calls[method] = solve
    return RunOutput(numbers, layer.spec, _measure_seconds(calls, settings["trials"]))


def _measure_seconds(calls: dict[str, Callable[[], object]], trials: int) -> dict[str, float]:
    """Return the median processor time of each call, after warm-up calls.

    The calls are interleaved, so that other programs on the machine slow down all of them alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for trial in range(WARM_UPS + trials):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if trial >= WARM_UPS:
                seconds[name].append(time.process_time() - start)
    return {name: float(np.median(values)) for name, values in seconds.items()}


def _make_points(scale: Scale) -> list[GridPoint]:
    lengths, blocks, width, trials = {
        "smoke": ([32], [1, 2], 8, 1),
        "laptop": ([2048, 4096], BLOCKS, 64, TRIALS),
        "paper": ([4096, 8192], BLOCKS, 64, TRIALS),
    }[scale]
    sizes = [{"steps": t, "blocks": b, "width": width, "trials": trials} for t in lengths for b in blocks]
    reference = [
        GridPoint({**size, **TORCH_PROGRAM}, seed) for seed in range(3 if scale == "paper" else 1) for size in sizes
    ]
    return [*reference, *(GridPoint(size) for size in sizes)]


def _series(rows: Rows, steps: int, number: Callable[[Any, str], float]) -> dict[str, list[float]]:
    """Return a number by the number of blocks, averaged over networks, for each method."""
    some = rows.where(steps=steps)
    return {
        method: [float(np.mean([number(row, method) for row in some.where(blocks=b)])) for b in some.values("blocks")]
        for method in COMPARED
    }


def _runs(rows: Rows) -> dict[tuple[int, int, str], dict[int, Any]]:
    """Return the rows by network, length and method, each by the number of blocks."""
    found: dict[tuple[int, int, str], dict[int, Any]] = {}
    for row in rows:
        for method in COMPARED:
            found.setdefault((row.seed, row.settings["steps"], method), {})[row.settings["blocks"]] = row
    return found


def _by_network(rows: Rows, number: Callable[[dict[int, Any], str], float]) -> list[float]:
    """Return a number of a series over blocks, averaged over lengths and methods: one value per network."""
    values: dict[int, list[float]] = {}
    for (seed, _, method), series in _runs(rows).items():
        values.setdefault(seed, []).append(number(series, method))
    return [float(np.mean(each)) for each in values.values()]


def _mean_count(row: Any, method: str) -> float:
    """Return the mean number of iterations over the blocks of a row."""
    return float(np.mean(row.numbers[method]["iterations"]))


def _median(row: Any, method: str) -> float:
    return float(row.numbers[method]["median"])


def _bytes(row: Any, method: str) -> float:
    return float(row.numbers[method]["bytes"])


def _time(row: Any, method: str) -> float:
    return float(row.time[method])


@use_complete_seeds
def _check_fewer(rows: Rows) -> ClaimVerdict:
    """The mean count with one block minus that with the most blocks has an interval over networks above 0, and its
    correlation with the number of blocks is below -0.8 in the mean. One iteration matters."""
    fewer = estimate_mean(
        _by_network(rows, lambda s, m: _mean_count(s[min(s)], m) - _mean_count(s[max(s)], m)), "Δ iterations"
    )
    trend = float(
        np.mean(_by_network(rows, lambda s, m: rank_correlation(list(s), [_mean_count(r, m) for r in s.values()])))
    )
    every = [s for t in rows.values("steps") for s in _series(rows, t, _mean_count).values()]
    text = "; ".join(" → ".join(f"{v:.1f}" for v in s) for s in every)
    return combine(
        [
            judge_increase(fewer, 1, f"one block − {max(rows.values('blocks'))}"),
            decide(trend < -0.8, text, runs=fewer.runs),
        ]
    )


@use_complete_seeds
def _check_memory(rows: Rows) -> ClaimVerdict:
    """Memory decreases with each doubling of the blocks up to 8, and the first doubling saves more bytes than the
    last."""
    every = [s for t in rows.values("steps") for s in _series(rows, t, _bytes).values()]
    holds = all(s[0] > s[1] > s[2] > s[3] and s[0] - s[1] > s[-2] - s[-1] for s in every)
    return decide(holds, "; ".join(" → ".join(f"{v / 2**20:.1f}" for v in s) + " MiB" for s in every), runs=len(rows))


@use_complete_seeds
def _check_slower(rows: Rows) -> ClaimVerdict:
    """The time with the most blocks divided by that with one, as a logarithm, has an interval over networks above 0. A
    tenth matters."""
    ratio = estimate_mean(
        _by_network(rows, lambda s, m: float(np.log(_time(s[max(s)], m) / _time(s[min(s)], m)))), "Δ ln of the ratio"
    )
    every = [s for t in rows.values("steps") for s in _series(rows, t, _time).values()]
    return judge_increase(ratio, 0.1, "; ".join(" → ".join(f"{1000 * v:.0f}" for v in s) + " ms" for s in every))


@use_complete_seeds
def _check_faster(rows: Rows) -> ClaimVerdict:
    """The time of Conv-DEER divided by that of Forward-DEER, the median over lengths and blocks, has an interval over
    networks below 0.75."""
    by_network: dict[int, list[float]] = {}
    for row in rows:
        by_network.setdefault(row.seed, []).append(_time(row, "Conv") / _time(row, "Forward"))
    found = estimate_mean([float(np.median(ratios)) for ratios in by_network.values()], "of the time")
    every = [ratio for ratios in by_network.values() for ratio in ratios]
    return judge_limit(found, below=0.75, why=f"{min(every):.2f} to {max(every):.2f} over lengths and blocks")


@use_complete_seeds
def _check_advantage(rows: Rows) -> ClaimVerdict:
    """From one block to the most, the share of memory that Conv-DEER saves over Forward-DEER drops by 75 % or more."""
    saved = []
    for steps in rows.values("steps"):
        series = _series(rows, steps, _bytes)
        shares = [1 - conv / forward for conv, forward in zip(series["Conv"], series["Forward"], strict=True)]
        saved.append((shares[0], shares[-1]))
    return decide(
        all(first > 0 and last < first / 4 for first, last in saved),
        "; ".join(f"{first:.1%} → {last:.1%}" for first, last in saved),
        runs=len(rows),
    )


def _prefer_reference(rows: Rows) -> Rows:
    """Return the rows of the plain PyTorch program."""
    return rows.where(**TORCH_PROGRAM)


def _draw(rows: Rows) -> "Figure":
    rows = _prefer_reference(rows)
    lengths = rows.values("steps")
    figure = plot.new_figure(4.6 * (len(lengths) + 1), 3.3)
    axes = figure.subplots(1, len(lengths) + 1, squeeze=False)[0]
    for axis, steps in zip(axes, lengths, strict=False):
        seconds, memory = _series(rows, steps, _time), _series(rows, steps, _bytes)
        for method, colour in zip(COMPARED, plot.COLORS, strict=False):
            axis.plot(
                np.multiply(1e3, seconds[method]), np.divide(memory[method], 2**20), "-o", color=colour, label=method
            )
        for x, y, blocks in zip(seconds["Conv"], memory["Conv"], rows.values("blocks"), strict=True):
            axis.annotate(f"{blocks}", (1e3 * x, y / 2**20), textcoords="offset points", xytext=(0, 6), fontsize=7)
        axis.set(xlabel="time (ms, this machine)", ylabel="peak memory (MiB)", title=f"T = {steps}", yscale="log")
        axis.legend(frameon=False, fontsize=8)
        plot.strip_axes(axis)
    axis = axes[-1]
    for steps, style in zip(lengths, ("-", "--"), strict=False):
        for method, colour in zip(COMPARED, plot.COLORS, strict=False):
            axis.plot(
                rows.values("blocks"),
                _series(rows, steps, _median)[method],
                style + "o",
                markersize=3,
                color=colour,
                label=f"{method}, T = {steps}",
            )
    axis.set_xscale("log", base=2)
    axis.set(xlabel="blocks", ylabel="median iterations", title="Iterations per block", ylim=(0, None))
    axis.legend(frameon=False, fontsize=8)
    plot.strip_axes(axis)
    return figure


def _make_table(rows: Rows) -> Table:
    lines = []
    for (steps, blocks), some in rows.groups("steps", "blocks").items():
        torch_rows = _prefer_reference(some)
        ours = Rows([row for row in some if "program" not in row.settings])
        lines.append(
            [
                steps,
                blocks,
                *(f"{np.mean([_mean_count(row, m) for row in torch_rows]):.1f}" for m in COMPARED),
                *(f"{np.mean([_bytes(row, m) for row in torch_rows]) / 2**20:.2f}" for m in COMPARED),
                *(
                    f"{np.mean([_time(r, 'Conv') / _time(r, 'Forward') for r in each]):.2f}"
                    for each in (torch_rows, ours)
                ),
            ]
        )
    columns = [f"iterations, {m}" for m in COMPARED] + [f"MiB, {m}" for m in COMPARED]
    return Table(["T", "blocks", *columns, "time, Conv / Forward", "the same, our kernels"], lines)


# fig:block_wise_deer_comparison

QUARTERS = 4


def _make_savings_points(scale: Scale) -> list[GridPoint]:
    steps = {"smoke": 64, "laptop": 512, "paper": 1024}[scale]
    settings = {"steps": steps, "width": 16 if scale == "smoke" else 32, "beta": 1.0}
    return [GridPoint(settings, seed) for seed in range(5 if scale == "paper" else 1)]


def _run_savings(point: GridPoint) -> RunOutput:
    settings = point.settings
    spectrum = spectra.Linspace(dt_min=1e-3, dt_max=1e-1)
    layer = ADPTNet.paper(settings["width"], beta=settings["beta"], spectrum=spectrum).requires_grad_(False)
    x = torch.randn(1, settings["steps"], settings["width"])
    whole = make_solver("Conv")(layer.cell, x).history
    parts = []
    for solution in _solve_blocks("Conv", layer, x, QUARTERS):
        assert solution.history is not None
        parts.append(solution.history.converged_steps[:, 0])
    assert whole is not None
    return RunOutput({"whole": whole.converged_steps[:, 0], "parts": parts}, layer.spec)


def _count_stored(converged: list[int], steps: int) -> int:
    """Return the number of stored iterates of single steps: all steps at every iteration."""
    return (len(converged) - 1) * steps


def _check_waste(rows: Rows) -> ClaimVerdict:
    """More than a tenth of the stored iterates belong to steps that had already converged, in the mean over
    networks."""
    shares = []
    for row in rows:
        whole = row.numbers["whole"]
        shares.append(sum(whole[:-1]) / _count_stored(whole, row.settings["steps"]))
    return judge_limit(estimate_mean(shares, "of the stored iterates"), above=0.1)


def _check_prefix(rows: Rows) -> ClaimVerdict:
    """The number of converged steps after k iterations is at least k, for every k."""
    inside = [all(steps >= k for k, steps in enumerate(row.numbers["whole"])) for row in rows]
    return decide(all(inside), f"converged steps by iteration {rows[0].numbers['whole']}", runs=len(rows))


def _judge_reduction(rows: Rows, combine_blocks: Callable[[list[int]], int]) -> ClaimVerdict:
    ratios, texts = [], []
    for row in rows:
        steps, whole, parts = row.settings["steps"], row.numbers["whole"], row.numbers["parts"]
        stored = combine_blocks([_count_stored(part, steps // QUARTERS) for part in parts])
        ratios.append(_count_stored(whole, steps) / stored)
        texts.append(f"{len(whole) - 1} iterations, in blocks {', '.join(str(len(part) - 1) for part in parts)}")
    return judge_limit(estimate_mean(ratios, "times less"), above=3, why=texts[0])


def _check_four(rows: Rows) -> ClaimVerdict:
    """The block that stores most stores at least 3 times fewer iterates than the whole sequence, in the mean over
    networks. With equal counts it would be 4 times."""
    return _judge_reduction(rows, max)


def _check_four_training(rows: Rows) -> ClaimVerdict:
    """All four blocks together store at least 3 times fewer iterates than the whole sequence, in the mean."""
    return _judge_reduction(rows, sum)


def _draw_savings(rows: Rows) -> "Figure":
    steps, whole, parts = rows[0].settings["steps"], rows[0].numbers["whole"], rows[0].numbers["parts"]
    figure = plot.new_figure(9, 3.2)
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_iterates(left, whole, 0, steps)
    for number, part in enumerate(parts):
        _draw_iterates(right, part, number * steps // QUARTERS, steps // QUARTERS)
    left.set(title="DEER", ylabel="iteration", xlabel="step")
    right.set(title=f"{QUARTERS} blocks, solved sequentially", xlabel="step")
    for axis in (left, right):
        axis.set(xlim=(0, steps))
        plot.strip_axes(axis)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    left.invert_yaxis()
    return figure


def _draw_iterates(axis: Any, converged: list[int], start: int, steps: int) -> None:
    """Draw a bar per iteration: steps that had converged before in one colour, the others in another."""
    for iteration, done in enumerate(converged[:-1], 1):
        first = iteration == 1 and not start
        axis.barh(
            iteration, done, left=start, height=0.85, color=plot.COLORS[1], label="already converged" if first else None
        )
        axis.barh(
            iteration,
            steps - done,
            left=start + done,
            height=0.85,
            color=plot.COLORS[4],
            label="not yet converged" if first else None,
        )


_TORCH = {"program": ["reference"]}

RECIPES = {
    "fig:pareto_blocks": Recipe(
        version=1,
        points=_make_points,
        run=_run,
        checks={
            "iterations": Check(_check_fewer, "laptop", _TORCH),
            "memory": Check(_check_memory, "laptop", _TORCH),
            "time": Check(_check_slower, "laptop", _TORCH),
            "faster": Check(_check_faster, "laptop", _TORCH),
            "advantage": Check(_check_advantage, "laptop", _TORCH),
            "faster-fused": Check(_check_faster, "laptop", {"program": [None]}),
        },
        figures={"Memory, time and iterations by the number of blocks": _draw},
        table=_make_table,
        cost={"smoke": "1 s", "laptop": "30 s", "paper": "1 min"},
        dtype=torch.float32,
    ),
    "fig:block_wise_deer_comparison": Recipe(
        version=1,
        points=_make_savings_points,
        run=_run_savings,
        checks={
            "waste": Check(_check_waste),
            "prefix": Check(_check_prefix),
            "four": Check(_check_four),
            "four-training": Check(_check_four_training),
        },
        figures={"Stored iterates": _draw_savings},
        cost={"smoke": "1 s", "laptop": "1 s", "paper": "2 s"},
        dtype=torch.float32,
    ),
}
