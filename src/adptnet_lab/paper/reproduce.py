"""`adptnet reproduce LABEL…`: run the points that have no row yet, and store one row per point."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy
import torch
from tyro.conf import Positional, arg

from .._runtime import catch_stop_signals, describe_environment
from . import scoring
from .forecast import Forecast, describe_rest, format_duration
from .recipe import GridPoint, Scale, Subset
from .registry import PaperResult, ReproductionError, find_results, load_labels, load_results
from .rows import DEFAULT_FOLDER, RowStore, open_row_store, point_key, to_row_value
from .selection import is_selected, parse_changes, parse_only

__all__ = ["Reproduce", "run"]


@dataclass(frozen=True)
class Reproduce:
    """Run results of the paper by their labels. Finished points are skipped, so an interrupted run resumes."""

    labels: Positional[tuple[str, ...]] = ()
    """Labels of the paper: fig:time_ablation, table:s5_8_results, …"""
    all: bool = False
    """Run every result."""
    list: bool = False
    """List every label with its result and status; run nothing."""
    scale: Scale = "laptop"
    """smoke takes seconds, laptop minutes; paper uses the sizes of the paper."""
    rows: Path = DEFAULT_FOLDER
    """Folder of the rows."""
    only: Annotated[tuple[str, ...], arg(metavar="SETTING=VALUE,…")] = ()
    """Run only points with these settings: task=memorisation model=ADPTNet,Hawk seed=0."""
    set: Annotated[tuple[str, ...], arg(metavar="SETTING=VALUE")] = ()
    """Change a setting of every point: beta=0.125. The rows are kept apart; `adptnet compare --set` judges them."""
    dry_run: bool = False
    """List the points that would run and the time they are expected to take, from the rows of earlier runs."""
    shard: Annotated[str, arg(metavar="I/N")] = "1/1"
    """Run the I-th of N shards, to divide the work over machines."""
    processes: int = 1
    """Number of points to run in parallel, one core each."""
    keep_networks: bool = False
    """Save the trained network of each point beside the rows, for adptnet.load. The row names its file."""
    device: str = "cpu"
    """Device for training networks: cuda, cuda:1, … Everything else runs on the CPU."""


class _Job(NamedTuple):
    result: PaperResult
    point: GridPoint


def run(options: Reproduce) -> int:
    """Run the points that have no row, and return their number.

    Args:
        options: Results, scale and resources.

    Raises:
        ReproductionError: An option is invalid, data are missing, rows cannot be written, or a point failed.
    """
    if options.list:
        _print_labels(options.rows)
        return 0
    if bool(options.labels) == options.all:
        raise ReproductionError("pass either labels or --all. `adptnet reproduce --list` prints the labels.")
    chosen = find_results(options.labels)
    store = RowStore(options.rows, _parse_shard(options.shard), parse_changes(options.set, chosen))
    if options.processes < 1:
        raise ReproductionError(f"--processes {options.processes}: must be at least 1.")
    _check_device(options.device)
    sources = _find_sources(chosen)
    points = [point for result in sources for point in store.points(result, options.scale)]
    subset = parse_only(options.only, points, options.scale)
    jobs = list(_find_jobs(sources, store, options.scale, subset))
    forecast = Forecast(store, options.scale)
    if options.dry_run:
        _print_plan(jobs, forecast, options)
        return 0
    jobs = _drop_jobs_without_data(jobs, options)
    if jobs:
        store.prepare(options.scale)
    start, failed = time.monotonic(), []
    left = {id(job): forecast.seconds(job.result, job.point) for job in jobs}
    with closing(_run_jobs(jobs, options)) as finished:
        for number, (job, row) in enumerate(finished, 1):
            left.pop(id(job))
            if isinstance(row, str):
                failed.append(job)
                print(f"{number}/{len(jobs)}  {job.result.name}  {job.point}  FAILED", flush=True)
                print(row, file=sys.stderr, flush=True)
                continue
            try:
                store.add(job.result, options.scale, row)
            except OSError as error:
                raise ReproductionError(
                    f"the row of {job.result.name} could not be written to {store.path(job.result, options.scale)}: "
                    f"{error.strerror}. Earlier rows are kept. Free some space; the same command then resumes."
                ) from None
            store.delete_checkpoints(job.result, options.scale, job.point)
            took = f"{row['time']['seconds']:.1f} s{describe_rest(left.values(), options.processes)}"
            print(f"{number}/{len(jobs)}  {job.result.name}  {job.point}  {took}", flush=True)
    done = len(jobs) - len(failed)
    print(f"{done} points in {time.monotonic() - start:.0f} s; rows in {options.rows / options.scale}")
    if failed:
        raise ReproductionError(
            f"{len(failed)} of {len(jobs)} points failed, the first of them {failed[0].result.name}, "
            f"{failed[0].point}: see above. The rows of the others are stored; the same command retries these."
        )
    return done


def _find_sources(chosen: list[PaperResult]) -> list[PaperResult]:
    """Replace each result that shares the rows of another result by that result, and drop duplicates."""
    names = [result.recipe.source or result.name for result in chosen]
    return [load_results()[name] for name in dict.fromkeys(names)]


def _find_jobs(chosen: list[PaperResult], store: RowStore, scale: Scale, subset: Subset) -> Iterator[_Job]:
    """Yield the points of this shard that have no row."""
    number, count = store.shard
    place = 0
    for result in chosen:
        done = store.read_lines(result, scale)
        for point in store.points(result, scale):
            if is_selected(point, subset):
                place += 1
                if place % count == number % count and point_key(point) not in done:
                    yield _Job(result, point)


def _print_plan(jobs: list[_Job], forecast: Forecast, options: Reproduce) -> None:
    """Print the points that would run, with the time each is expected to take."""
    total, unknown = 0.0, 0
    for job in jobs:
        seconds = forecast.seconds(job.result, job.point)
        total, unknown = total + (seconds or 0), unknown + (seconds is None)
        print(f"{format_duration(seconds):>10}  {job.result.name}  {job.point}")
    for name in dict.fromkeys(job.result.name for job in jobs):
        problem = load_results()[name].recipe.find_missing_data(options.scale)
        if problem is not None:
            print(f"{name} cannot be run: {problem}")
    text = f"{len(jobs)} points, about {format_duration(total)} on one core"
    if options.processes > 1:
        text += f", {format_duration(total / options.processes)} with {options.processes} processes"
    print(text + (f"; {unknown} of them have no similar row to tell from" if unknown else "") + ". Nothing was run.")


def _drop_jobs_without_data(jobs: list[_Job], options: Reproduce) -> list[_Job]:
    """Return the jobs whose data files exist. Raise if a result was requested by its label and its data are missing."""
    missing: dict[str, str] = {}
    for result in {job.result.name: job.result for job in jobs}.values():
        problem = result.recipe.find_missing_data(options.scale)
        if problem is not None:
            missing[result.name] = problem
    if missing and not options.all:
        raise ReproductionError("; ".join(f"{name} cannot be run: {why}" for name, why in missing.items()))
    for name, why in missing.items():
        print(f"{name} is left out: {why}")
    return [job for job in jobs if job.result.name not in missing]


def _run_jobs(jobs: list[_Job], options: Reproduce) -> Generator[tuple[_Job, dict[str, Any] | str], None, None]:
    """Run the jobs and yield each with its row, or with a traceback if it failed, as they finish."""
    if options.processes == 1:
        for job in jobs:
            yield job, _run_or_traceback(job.result.name, job.point, options)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with catch_stop_signals() as stop_signal, ProcessPoolExecutor(options.processes, spawn, _end_with_parent) as pool:
        # Workers inherit the blocked signal: Ctrl-C reaches only this process, which then kills them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        waiting = {pool.submit(_run_or_traceback, job.result.name, job.point, options): job for job in jobs}
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            while waiting:
                for future in wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), future.result()
                if stop_signal.signum is not None:
                    raise KeyboardInterrupt
        except BrokenProcessPool:
            raise ReproductionError(
                "a worker process was killed, perhaps because memory ran out. Finished points are kept: run the same "
                "command with fewer --processes to resume."
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()  # rows are written by this process, so nothing is lost
            raise


def _end_with_parent() -> None:
    """Make a worker exit when its parent process exits, for whatever reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _run_or_traceback(name: str, point: GridPoint, options: Reproduce) -> dict[str, Any] | str:
    """Return the row of a point, or the traceback if it fails: one failing point must not stop the others."""
    try:
        return _run_point(name, point, options)
    except Exception:
        return traceback.format_exc()


def _run_point(name: str, point: GridPoint, options: Reproduce) -> dict[str, Any]:
    """Run one point and return its row."""
    result = load_results()[name]
    began, clock, processor = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.monotonic(), time.process_time()
    keeps_checkpoints = options.scale == "paper"
    store = RowStore(options.rows)
    folder = store.checkpoint_folder(result, options.scale, point) if keeps_checkpoints else None
    network = store.network_file(result, options.scale, point) if options.keep_networks else None
    with _isolate_run(point.seed, result.recipe.dtype, options.device, folder, network):
        output = result.recipe.run(point)
        machine = {**describe_environment(), "device": options.device}
    versions = {part: machine.pop(part) for part in ("adptnet", "torch", "python")} | {"numpy": numpy.__version__}
    return {
        "label": name,
        "scale": options.scale,
        "settings": to_row_value(point.settings),
        "seed": point.seed,
        "recipe": result.recipe.version,
        "numbers": output.numbers,
        "spec": None if output.spec is None else json.loads(output.spec.to_json()),
        **({"network": network.name} if network is not None and network.exists() else {}),
        "versions": versions,
        "machine": machine,
        "time": {
            "began": began,
            "seconds": time.monotonic() - clock,
            "processor": time.process_time() - processor,
            **output.times,
        },
    }


@contextmanager
def _isolate_run(
    seed: int, dtype: torch.dtype, device: str, folder: Path | None, network: Path | None
) -> Iterator[None]:
    """Set one thread, the default dtype and the seed, so that numbers do not depend on earlier runs; then restore."""
    device_token, folder_token = scoring.training_device.set(device), scoring.checkpoint_folder.set(folder)
    network_token = scoring.network_file.set(network)
    threads, default_dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(default_dtype)
        scoring.training_device.reset(device_token)
        scoring.checkpoint_folder.reset(folder_token)
        scoring.network_file.reset(network_token)


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ReproductionError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from None


def _parse_shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ReproductionError(f"--shard {text}: must be I/N with 1 <= I <= N, for instance 2/4.")
    return int(number), int(count)


def _print_labels(folder: Path) -> None:
    """Print every label, in the order of the paper, with its result and status."""
    from rich.console import Console
    from rich.table import Column, Table

    from .compare import describe_progress

    name_column = Column("label", overflow="fold")  # to be copied, so never truncated
    result_column = Column("belongs to", overflow="fold")
    table = Table(
        name_column, result_column, "status", "claims", "smoke / laptop / paper: points done, cost on one core"
    )
    progress = {name: describe_progress(result, RowStore(folder)) for name, result in load_results().items()}
    for label in load_labels().values():
        if label.kind != "result":
            table.add_row(label.name, "", label.kind, "", label.configuration or label.literature)
        for name in label.results:
            largest, texts = progress[name]
            status = f"{largest} done" if largest else "not run"
            claims = str(len(load_results()[name].claims))
            table.add_row(label.name, "" if name == label.name else name, status, claims, " / ".join(texts))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    total = sum(len(result.claims) for result in load_results().values())
    print(f"{len(load_labels())} labels, {len(load_results())} results, {total} claims.")
    committed = open_row_store(None).folder
    if folder == DEFAULT_FOLDER != committed:
        print(f"Status of {folder}. For the committed rows: adptnet reproduce --list --rows {committed}")
