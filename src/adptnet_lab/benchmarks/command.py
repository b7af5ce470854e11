"""`adptnet bench`: measure operations, layers and solvers on this machine, and compare them with stated goals."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tyro.conf import Positional

from adptnet._io.files import write_atomic
from adptnet.errors import AdptnetError, InputError, WrongResultError
from adptnet.spec import suggest_name

from ..paper import svg
from . import checks, machine, report, result_files, summary_figure
from .benchmark import Benchmark, Size, parse_size
from .goals import Measurements, judge_goals
from .gpu import run_gpu
from .suite import BENCHMARKS
from .timing import time_interleaved

__all__ = ["Bench", "run"]

GPU = "gpu"
REPEATS, FAST_REPEATS = 7, 3
SECONDS = 20.0  # per size: longer than most disturbances of a shared machine


@dataclass(frozen=True)
class Bench:
    """Measure CPU and wall time of operations, layers and solvers in turn, and compare them with stated goals.

    Every operation is first compared with its reference: values, and gradients where it has a backward pass. One that
    disagrees is not timed.
    Results are JSON and Markdown for each benchmark, and a figure. Earlier results in the folder are kept if they are
    of the same machine and versions.
    """

    benchmarks: Positional[tuple[str, ...]] = ()
    """Benchmarks to measure; all but `gpu` if none is named. --list shows them. `gpu` checks and times the GPU kernels
    on this card and writes gpu.json; it is measured alone."""
    list: bool = False
    """Show the benchmarks and measure nothing."""
    fast: bool = False
    """Small sizes, three repeats, and nothing that takes minutes: for a first impression."""
    sizes: tuple[str, ...] = ()
    """Sizes to measure at, each batch,steps,state (8,1024,128), instead of the benchmark's own."""
    repeats: int | None = None
    """Repeats of each side. By default at least 7, and more until --seconds have passed; 3 with --fast."""
    seconds: float = SECONDS
    """Seconds per size, unless --repeats or --fast is given."""
    threads: tuple[int, ...] = (1, 2)
    """Numbers of threads to measure with."""
    output: Path = Path("runs/bench")
    """Folder of the results."""
    minutes: float = 10.0
    """Time limit of `gpu`: no measurement starts after it."""


def run(options: Bench) -> None:
    """Measure the benchmarks, write the results and print the verdicts.

    Args:
        options: The options.

    Raises:
        InputError: A benchmark, a size or a number is not valid.
        WrongResultError: An operation disagrees with its reference; the other benchmarks were measured.
    """
    if options.benchmarks == (GPU,):
        run_gpu(options.output, options.minutes)
        return
    if options.list:
        for name, benchmark in BENCHMARKS.items():
            print(f"{name}: {benchmark.about}\n  sizes {'; '.join(map(str, benchmark.sizes))}")
        print(f"{GPU}: the GPU kernels against their references, then against other layers, on this card")
        return
    chosen = {name: _find_benchmark(name) for name in options.benchmarks or BENCHMARKS}
    sizes = [parse_size(size) for size in options.sizes]
    if (options.repeats is not None and options.repeats < 1) or not options.threads or min(options.threads) < 1:
        raise InputError(f"--repeats {options.repeats} --threads {options.threads}: both are integers >= 1.")
    if not 0 <= options.seconds < math.inf:
        raise InputError(f"--seconds {options.seconds}: must be a number >= 0, such as 20.")
    options.output.mkdir(parents=True, exist_ok=True)
    description = machine.describe_machine()  # once, because writing a result may change the state of the repository
    rejected: dict[str, str] = {}
    errors: dict[str, str | None] = {}  # by operation, each of which is checked once
    for name, benchmark in chosen.items():
        print(f"{name}: {benchmark.about}", flush=True)
        for operation in benchmark.operations:
            if operation not in errors:
                errors[operation] = checks.find_missing_kernel(operation) or checks.find_error(operation)
        reason = "; ".join(
            f"{operation}: {errors[operation]}" for operation in benchmark.operations if errors[operation]
        )
        if reason:
            print(f"  not timed: {reason}", flush=True)
            rejected[name] = reason
            result_files.write_results(options.output, name, benchmark.about, [], refused=reason)
            _write_page(options.output, name)
            continue
        for size in sizes or (benchmark.fast_sizes if options.fast else benchmark.sizes):
            _measure(name, benchmark, size, options, description)
    for path in _write_summary(options.output):
        print(f"wrote {path}")
    if rejected:
        raise WrongResultError("not timed: " + "; ".join(f"{name}: {reason}" for name, reason in rejected.items()))


def _find_benchmark(name: str) -> Benchmark:
    if name == GPU:
        raise InputError("gpu is measured alone: adptnet bench gpu.")
    if name not in BENCHMARKS:
        raise InputError(f"there is no benchmark {name!r}.{suggest_name(name, BENCHMARKS)}")
    return BENCHMARKS[name]


def _measure(name: str, benchmark: Benchmark, size: Size, options: Bench, description: dict[str, Any]) -> None:
    """Measure one case, write it and print its verdicts."""
    threads = [count for count in options.threads if benchmark.threads is None or count in benchmark.threads]
    repeats = options.repeats or (FAST_REPEATS if options.fast else REPEATS)
    seconds = 0.0 if options.repeats or options.fast else options.seconds
    with machine.watch_load() as load, _default_float32():
        case = benchmark.make_case(size, options.fast)
        times = time_interleaved(case.sides, repeats=repeats, seconds=seconds, threads=threads or [1])
    measurements = Measurements(times, case.numbers)
    verdicts = judge_goals(case.goals, measurements, load.others)
    done = max((len(timing.cpu.values) for timing in times.values()), default=repeats)
    how = {"fast": options.fast, "repeats": done}
    new = result_files.describe_case(size, measurements, verdicts, dict(case.skipped), load, description, **how)
    before = result_files.read_results(options.output, name)
    cases = result_files.merge_cases(before["cases"] if before else [], new)
    result_files.write_results(options.output, name, benchmark.about, cases)
    _write_page(options.output, name)
    print(report.format_case(size, new["verdicts"]), flush=True)


@contextmanager
def _default_float32() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _write_page(folder: Path, name: str) -> None:
    result = result_files.read_results(folder, name)
    assert result is not None
    write_atomic(folder / f"{name}.md", (report.render_page(result) + "\n").encode())


def _write_summary(folder: Path) -> list[Path]:
    """Write the page and the figure of all results in the folder, and return their paths."""
    results = [result for name in BENCHMARKS if (result := result_files.read_results(folder, name)) is not None]
    page, figure = folder / "summary.md", folder / "summary.svg"
    write_atomic(page, (report.render_summary(results) + "\n").encode())
    try:
        drawing = svg.render_svg(summary_figure.draw_summary(results), "summary")
    except AdptnetError as error:
        print(f"no figure: {error}")
        return [page]
    write_atomic(figure, svg.add_background(drawing).encode())
    return [page, figure]
