"""`adptnet sweep`: one run for every point of a grid, on this machine or on a cluster."""

import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, UseAppendAction

from adptnet.errors import AdptnetError, IncompatibleError, InputError

from .. import training
from ..tasks import TASKS
from ..training import Experiment, Keeping
from ..training.signals import stoppable
from .spec_flags import Draft, draft_of, experiment_of, flags, peeked, with_flags

__all__ = ["Job", "Point", "Slurm", "SweepFailed", "command", "points"]


class SweepFailed(AdptnetError, RuntimeError):
    """Some points of a sweep did not end well."""


@dataclass(frozen=True)
class Slurm:
    """What each job asks a cluster for."""

    partition: str | None = None
    """The partition; the cluster's default if not given."""
    minutes: int = 24 * 60
    """Time limit. A point that needs longer is queued again and goes on from its last checkpoint."""
    cpus: int = 2
    """Cores of a job."""
    gpus: int = 0
    """GPUs of a job."""
    at_once: int = 16
    """Jobs that run at the same time."""


_OPTIONS: list[tuple[str, Any, Any]] = [
    (
        "grid",
        Annotated[
            UseAppendAction[tuple[tuple[str, ...], ...]],
            tyro.conf.arg(metavar="FIELD VALUE ...", help="A field and its values, e.g. model.beta 0 0.125 4."),
        ],
        (),
    ),
    ("config", Annotated[Path | None, tyro.conf.arg(help="Begin from a config.json, or the one of a run.")], None),
    ("output", Annotated[Path | None, tyro.conf.arg(help="Folder for all runs. runs/sweep if not given.")], None),
    ("jobs", Annotated[int, tyro.conf.arg(help="Runs at the same time on this machine.")], 1),
    ("shard", Annotated[str, tyro.conf.arg(help="Take every n-th point, from the i-th on: i/n.")], "1/1"),
    ("cluster", Annotated[Literal["local", "slurm"], tyro.conf.arg(help="Processes here, or jobs of Slurm.")], "local"),
    ("slurm", Slurm, Slurm()),
    ("keep", Keeping, Keeping()),
]


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    values: dict[str, str]
    experiment: Experiment
    folder: Path


def command(arguments: Sequence[str]) -> tuple[Any, Any]:
    """The command `sweep` as `arguments` make it, and the function that runs it."""
    name, base = peeked(arguments)
    task = Annotated[Positional[str], tyro.conf.arg(metavar="TASK", help="What to learn: " + ", ".join(TASKS) + ".")]
    kind = dataclasses.make_dataclass("Sweep", [("name", task, name), *_OPTIONS, *flags(base)], frozen=True)
    kind.__doc__ = "Run every point of a grid. Points that are finished are skipped, so a sweep can be started again."

    def run(options: Any) -> None:
        output = options.output or Path("runs/sweep")
        every = points(draft_of(experiment_of(options, base)), options.grid, output)
        mine = sharded(every, options.shard)
        left = [point for point in mine if training.finished(point.folder) is None]
        print(f"{len(every)} points, {len(mine)} in this shard, {len(mine) - len(left)} of them finished", flush=True)
        failed = []
        if left and options.cluster == "local":
            failed = run_here(left, options.jobs, options.keep)
        elif left:
            submit(left, executor_for(output / "slurm", options.slurm), options.keep)
        table(mine)
        if failed:
            logs = ", ".join(str(point.folder / "log.txt") for point in failed)
            raise SweepFailed(f"{len(failed)} of {len(left)} runs did not end well: see {logs}")

    return kind, run


def points(base: Draft, grid: Sequence[Sequence[str]], output: Path) -> list[Point]:
    """Every combination of the grid's values, each in a folder named by its settings."""
    for axis in grid:
        if len(axis) < 2:
            raise InputError(f"--grid {' '.join(axis)}: a field and its values, e.g. --grid model.beta 0 0.125 4.")
    fields = [axis[0] for axis in grid]
    for field in fields:
        if fields.count(field) > 1:
            raise InputError(f"--grid {field} is given twice. Pass all of its values at once: --grid {field} 0 1.")
    found: dict[str, Point] = {}
    for choice in itertools.product(*(axis[1:] for axis in grid)):
        values = dict(zip(fields, choice, strict=True))
        try:
            experiment = with_flags(base, [token for item in values.items() for token in _tokens(*item)])
        except SystemExit:
            print(f"This was the point {_shown(values)} of the grid.", file=sys.stderr)
            raise
        found.setdefault(experiment.digest, Point(values, experiment, output / experiment.digest))  # 0 and 0.0 are one
    return list(found.values())


def sharded(every: list[Point], shard: str) -> list[Point]:
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise InputError(f"--shard {shard}: i/n with i from 1 to n, e.g. --shard 1/2.")
    return every[int(match[1]) - 1 :: int(match[2])]


def run_here(left: list[Point], jobs: int, keep: Keeping) -> list[Point]:
    """Each point in a process of its own, `jobs` at a time; returns those that did not end well."""
    if jobs < 1:
        raise InputError(f"--jobs {jobs}: runs at the same time, from 1.")
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    running: set[subprocess.Popen[bytes]] = set()
    stopping = threading.Event()

    def one(point: Point) -> bool:
        saving = [
            token
            for field in dataclasses.fields(keep)
            for token in _tokens(f"keep.{field.name}", _typed(getattr(keep, field.name)))
        ]
        command = [sys.executable, "-m", "adptnet", "train", "--output", str(point.folder), "--resume", *saving]
        log = point.folder / "log.txt"
        try:
            point.folder.mkdir(parents=True, exist_ok=True)
            config = point.folder / "config.json"
            if not config.exists():
                training.write_json(config, json.loads(point.experiment.to_json()))
            with open(log, "ab") as file:
                begun = file.tell()
                alone = {"OMP_NUM_THREADS": threads, **os.environ}
                process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=alone)
        except OSError as error:
            print(f"{_shown(point.values)}: FAILED: {point.folder} cannot be written to ({error.strerror})", flush=True)
            return False
        running.add(process)
        if stopping.is_set():
            process.terminate()
        well = process.wait() == 0
        running.remove(process)
        outcome = "done" if well else "stopped" if stopping.is_set() else f"FAILED: {_last_line(log, begun)}"
        print(f"{_shown(point.values)}: {outcome}", flush=True)
        return well

    with stoppable(at_once=True), ThreadPoolExecutor(jobs) as pool:
        try:
            ends = [pool.submit(one, point) for point in left]
            return [point for point, end in zip(left, ends, strict=True) if not end.result()]
        except KeyboardInterrupt:
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()  # it saves, and can go on
            raise


def _last_line(log: Path, begun: int) -> str:
    """Return the last line that a run has added to its log, or why there is none."""
    try:
        with open(log, "rb") as file:
            file.seek(max(begun, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().decode(errors="replace").split("\n")
        full = shutil.disk_usage(log.parent).free < 4096
    except OSError as error:
        return f"{log} cannot be read ({error.strerror})"
    said = next((line.strip() for line in reversed(lines) if line.strip()), f"nothing is in {log}")
    return f"the disk of {log.parent} is full; {said}" if full else said


class Job:
    """A run as submitit takes it: when its time is up it saves, is queued again, and goes on where it was."""

    def __call__(self, described: str, folder: str, keep: Keeping) -> dict[str, Any]:
        experiment = Experiment.from_json(described)
        assert isinstance(experiment, Experiment)
        warning = getattr(signal, "SIG" + os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2"))
        try:
            return training.run(experiment, Path(folder), resume=True, keeping=keep, signals=[warning])
        except training.Interrupted as stopped:
            signal.raise_signal(stopped.signum)  # all is saved; submitit's own answer to it queues the job again
            raise

    def checkpoint(self, described: str, folder: str, keep: Keeping) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, described, folder, keep)


def executor_for(folder: Path, slurm: Slurm) -> Any:
    try:
        import submitit
    except ImportError:
        raise IncompatibleError("--cluster slurm needs submitit: pip install 'adptnet[cluster]'.") from None
    try:
        # a point is queued again until it has ended
        executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=1000)
    except RuntimeError as error:
        raise IncompatibleError(f"--cluster slurm: {error}. Use --cluster local on a machine without it.") from None
    wanted = {"timeout_min": slurm.minutes, "cpus_per_task": slurm.cpus, "slurm_array_parallelism": slurm.at_once}
    if slurm.partition is not None:
        wanted["slurm_partition"] = slurm.partition  # type: ignore[assignment]
    if slurm.gpus:
        wanted["gpus_per_node"] = slurm.gpus
    executor.update_parameters(**wanted)
    return executor


def submit(left: list[Point], executor: Any, keep: Keeping) -> list[Any]:
    """Puts every point into the cluster's queue, as one array."""
    described = [point.experiment.to_json() for point in left]
    jobs: list[Any] = executor.map_array(Job(), described, [str(point.folder) for point in left], [keep] * len(left))
    for point, job in zip(left, jobs, strict=True):
        print(f"{_shown(point.values)}: job {job.job_id}")
    print("Start the same sweep again to see what has come of them.")
    return jobs


def table(shown: list[Point]) -> None:
    """Prints the score of every point that is finished."""
    from rich.console import Console
    from rich.table import Table

    results = [(point, training.finished(point.folder)) for point in shown]
    names = list(shown[0].values) if shown else []
    made = Table()
    for name in (*names, shown[0].experiment.task.metric if shown else "", "seconds", "folder"):
        made.add_column(name)
    for point, result in results:
        score, seconds = (f"{result['score']:.4f}", f"{result['seconds']:.0f}") if result else ("-", "-")
        made.add_row(*point.values.values(), score, seconds, point.folder.name)
    Console(file=sys.stdout).print(made)


def _tokens(field: str, value: str) -> list[str]:
    """A field and its value as they stand on a command line."""
    if value in ("True", "False"):
        group, _, name = field.rpartition(".")
        return [f"--{field}"] if value == "True" else [f"--{group}.no-{name}"]
    return [f"--{field}", *([value] if "(" in value else value.split())]


def _typed(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _shown(values: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items()) or "the one point"
