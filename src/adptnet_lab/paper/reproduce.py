"""`adptnet reproduce LABEL…`: runs what has not been run yet, a row at a time."""

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

from ..training import environment
from ..training.signals import stoppable
from . import scoring
from .recipe import Part, Point, Scale, belongs
from .registry import ReproductionError, Result, find, labels, results
from .rows import WRITTEN, Shelf, key, plain

__all__ = ["Reproduce", "run"]


@dataclass(frozen=True)
class Reproduce:
    """Run results of the paper by their labels. Finished points are skipped, so a run that was stopped goes on."""

    labels: Positional[tuple[str, ...]] = ()
    """Labels of the paper: fig:time_ablation, table:s5_8_results, …"""
    all: bool = False
    """Everything."""
    list: bool = False
    """Show every label, what it belongs to and its status; run nothing."""
    scale: Scale = "laptop"
    """smoke takes seconds, laptop minutes; paper has the paper's sizes."""
    rows: Path = WRITTEN
    """Folder of the rows."""
    only: Annotated[tuple[str, ...], arg(metavar="SETTING=VALUE,…")] = ()
    """Points with these settings alone: task=memorisation model=ADPTNet,Hawk."""
    shard: Annotated[str, arg(metavar="I/N")] = "1/1"
    """The I-th of N shares, to divide the work over machines."""
    processes: int = 1
    """Points at a time, one core each."""
    device: str = "cpu"
    """Where networks are trained: cuda, cuda:1, … All else runs on the CPU."""


class _Job(NamedTuple):
    result: Result
    point: Point


def run(options: Reproduce) -> int:
    """Runs the points that are left and returns their number."""
    if options.list:
        _list(options.rows)
        return 0
    if bool(options.labels) == options.all:
        raise ReproductionError("say what to run: some labels, or --all. `adptnet reproduce --list` shows the labels.")
    chosen = find(options.labels)
    shelf = Shelf(options.rows, _share(options.shard))
    if options.processes < 1:
        raise ReproductionError(f"--processes {options.processes}: must be at least 1.")
    _check_device(options.device)
    sources = _sources(chosen)
    jobs = list(_left(sources, shelf, options.scale, _part(options.only, sources, options.scale)))
    jobs = _possible(jobs, options)
    if jobs:
        shelf.prepare(options.scale)
    begun, failed = time.monotonic(), []
    with closing(_finished(jobs, options)) as finished:
        for number, (job, row) in enumerate(finished, 1):
            if isinstance(row, str):
                failed.append(job)
                print(f"{number}/{len(jobs)}  {job.result.name}  {job.point}  FAILED", flush=True)
                print(row, file=sys.stderr, flush=True)
                continue
            try:
                shelf.add(job.result, options.scale, row)
            except OSError as error:
                raise ReproductionError(
                    f"the row of {job.result.name} could not be written to {shelf.path(job.result, options.scale)}: "
                    f"{error.strerror}. Those before it are kept; "
                    "when there is room again, the same command goes on from them."
                ) from None
            shelf.forget(job.result, options.scale, job.point)
            print(f"{number}/{len(jobs)}  {job.result.name}  {job.point}  {row['time']['seconds']:.1f} s", flush=True)
    done = len(jobs) - len(failed)
    print(f"{done} points in {time.monotonic() - begun:.0f} s; rows in {options.rows / options.scale}")
    if failed:
        raise ReproductionError(
            f"{len(failed)} of {len(jobs)} points failed, the first of them {failed[0].result.name}, "
            f"{failed[0].point}: see above. The others have their rows; the same command tries these again."
        )
    return done


def _sources(chosen: list[Result]) -> list[Result]:
    """The results that have runs of their own: those chosen, or those that they show another side of."""
    names = [result.recipe.source or result.name for result in chosen]
    return [results()[name] for name in dict.fromkeys(names)]


def _left(chosen: list[Result], shelf: Shelf, scale: Scale, part: Part) -> Iterator[_Job]:
    """The points of this share that have no row."""
    number, count = shelf.share
    place = 0
    for result in chosen:
        done = shelf.lines(result, scale)
        for point in result.recipe.points(scale):
            if belongs(point.settings, part):
                place += 1
                if place % count == number % count and key(point) not in done:
                    yield _Job(result, point)


def _part(wanted: tuple[str, ...], chosen: list[Result], scale: Scale) -> Part:
    """What `--only` asks for, which some point must have."""
    points = [point for result in chosen for point in result.recipe.points(scale)]
    part: dict[str, list[Any]] = {}
    for text in wanted:
        name, equals, values = text.partition("=")
        if not equals:
            raise ReproductionError(f"--only {text}: must be SETTING=VALUE, for instance model=Hawk.")
        there = [point.settings[name] for point in points if name in point.settings]
        for value in values.split(","):
            meant = [_value(value), value]  # 10 is a number in one recipe and a name in another
            if there and not any(each in there for each in meant):
                values_there = dict.fromkeys(each if isinstance(each, str) else json.dumps(each) for each in there)
                raise ReproductionError(
                    f"--only {name}={value}: no point at the scale {scale} has it. {name} is {', '.join(values_there)}."
                )
            part.setdefault(name, []).extend(meant)
    if not any(belongs(point.settings, part) for point in points):
        known = sorted({name for point in points for name in point.settings})
        raise ReproductionError(
            f"--only {' '.join(wanted)}: no point at the scale {scale} is like that. Settings are {', '.join(known)}."
        )
    return part


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _possible(jobs: list[_Job], options: Reproduce) -> list[_Job]:
    """Those whose data are here. A result that was asked for by name has to be possible."""
    lacking: dict[str, str] = {}
    for result in {job.result.name: job.result for job in jobs}.values():
        lacks = result.recipe.lacks(options.scale)
        if lacks is not None:
            lacking[result.name] = lacks
    if lacking and not options.all:
        raise ReproductionError("; ".join(f"{name} cannot be run: {why}" for name, why in lacking.items()))
    for name, why in lacking.items():
        print(f"{name} is left out: {why}")
    return [job for job in jobs if job.result.name not in lacking]


def _finished(jobs: list[_Job], options: Reproduce) -> Generator[tuple[_Job, dict[str, Any] | str], None, None]:
    """Each job with its row, or with what went wrong, as they end."""
    if options.processes == 1:
        for job in jobs:
            yield job, _tried(job.result.name, job.point, options)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with stoppable() as asked, ProcessPoolExecutor(options.processes, spawn, _end_with_parent) as pool:
        # Workers inherit what is blocked: Ctrl-C is for this process, which ends them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        waiting = {pool.submit(_tried, job.result.name, job.point, options): job for job in jobs}
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            while waiting:
                for future in wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), future.result()
                if asked.signum is not None:
                    raise KeyboardInterrupt
        except BrokenProcessPool:
            raise ReproductionError(
                "a worker was ended from outside, perhaps for want of memory. Finished points are kept: the same "
                "command, with fewer --processes, goes on from them."
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()  # rows are written here, so it holds nothing
            raise


def _end_with_parent() -> None:
    """Lets a worker end with the process that began it, whatever ended that."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _tried(name: str, point: Point, options: Reproduce) -> dict[str, Any] | str:
    """The row of a point, or why there is none: one point must not end a night's run."""
    try:
        return _row(name, point, options)
    except Exception:
        return traceback.format_exc()


def _row(name: str, point: Point, options: Reproduce) -> dict[str, Any]:
    """Runs one point."""
    result = results()[name]
    began, clock = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.monotonic()
    folder = Shelf(options.rows).unfinished(result, options.scale, point) if options.scale == "paper" else None
    with _alone(point.seed, result.recipe.dtype, options.device, folder):
        finding = result.recipe.run(point)
        machine = {**environment(), "device": options.device}
    versions = {part: machine.pop(part) for part in ("adptnet", "torch", "python")} | {"numpy": numpy.__version__}
    return {
        "label": name,
        "scale": options.scale,
        "settings": plain(point.settings),
        "seed": point.seed,
        "recipe": result.recipe.version,
        "numbers": finding.numbers,
        "spec": None if finding.spec is None else json.loads(finding.spec.to_json()),
        "versions": versions,
        "machine": machine,
        "time": {"began": began, "seconds": time.monotonic() - clock, **finding.times},
    }


@contextmanager
def _alone(seed: int, dtype: torch.dtype, device: str = "cpu", unfinished: Path | None = None) -> Iterator[None]:
    """One thread, a default dtype and a seed of its own, so that numbers do not depend on what ran before."""
    device_token, folder_token = scoring.device.set(device), scoring.unfinished.set(unfinished)
    threads, before = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(before)
        scoring.device.reset(device_token)
        scoring.unfinished.reset(folder_token)


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ReproductionError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from None


def _share(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ReproductionError(f"--shard {text}: must be I/N with 1 <= I <= N, for instance 2/4.")
    return int(number), int(count)


def _list(folder: Path) -> None:
    """Every label, in the order of the paper."""
    from rich.console import Console
    from rich.table import Column, Table

    from .compare import progress

    whole = Column("label", overflow="fold")  # to be copied, so never cut short
    part = Column("belongs to", overflow="fold")
    table = Table(whole, part, "status", "claims", "smoke / laptop / paper: points done, cost on one core")
    known = {name: progress(result, Shelf(folder)) for name, result in results().items()}
    for label in labels().values():
        if label.kind != "result":
            table.add_row(label.name, "", label.kind, "", label.configuration or label.literature)
        for name in label.results:
            done, far = known[name]
            status = f"{done} done" if done else "not run"
            claims = str(len(results()[name].claims))
            table.add_row(label.name, "" if name == label.name else name, status, claims, " / ".join(far))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    total = sum(len(result.claims) for result in results().values())
    print(f"{len(labels())} labels, {len(results())} results, {total} claims.")
