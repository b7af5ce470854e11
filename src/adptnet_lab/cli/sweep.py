"""`adptnet sweep TASK`: train every point of a grid, on this machine or on a Slurm cluster."""

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
from .._json_files import write_json
from .._runtime import catch_stop_signals
from ..tasks import TASKS
from ..training import Experiment, SaveOptions
from .draft import Draft, draft_from_experiment, read_draft
from .spec_flags import apply_flags, make_experiment, make_flags

__all__ = [
    "Job",
    "Slurm",
    "SweepFailed",
    "SweepPoint",
    "expand_grid",
    "make_executor",
    "make_options",
    "run",
    "run_locally",
    "submit",
]


class SweepFailed(AdptnetError, RuntimeError):
    """Some runs of a sweep failed."""


@dataclass(frozen=True)
class Slurm:
    """Resources of each Slurm job."""

    partition: str | None = None
    """Partition; the cluster's default if not given."""
    minutes: int = 24 * 60
    """Time limit. A point that needs longer is queued again and resumes from its last checkpoint."""
    cpus: int = 2
    """Cores per job."""
    gpus: int = 0
    """GPUs per job."""
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
    ("config", Annotated[Path | None, tyro.conf.arg(help="Start from this config.json, or from that of a run.")], None),
    ("output", Annotated[Path | None, tyro.conf.arg(help="Folder of all runs. runs/sweep if not given.")], None),
    ("jobs", Annotated[int, tyro.conf.arg(help="Number of runs at the same time on this machine.")], 1),
    ("shard", Annotated[str, tyro.conf.arg(help="Take every n-th point, starting at the i-th: i/n.")], "1/1"),
    ("cluster", Annotated[Literal["local", "slurm"], tyro.conf.arg(help="Local processes, or Slurm jobs.")], "local"),
    ("slurm", Slurm, Slurm()),
    ("keep", SaveOptions, SaveOptions()),
]


@dataclass(frozen=True)
class SweepPoint:
    """One run of a sweep.

    Attributes:
        values: The values of the grid's fields, as typed.
        experiment: The experiment.
        folder: The folder of the run.
    """

    values: dict[str, str]
    experiment: Experiment
    folder: Path


def make_options(arguments: Sequence[str]) -> type:
    """Return the dataclass of the options. Its flags depend on the task and the layer in `arguments`.

    Args:
        arguments: The arguments after `adptnet sweep`.
    """
    name, draft = read_draft(arguments)
    task = Annotated[
        Positional[str],
        tyro.conf.arg(metavar="TASK", help="Task to learn: " + ", ".join(TASKS) + "; or your own, module:Name."),
    ]
    options = dataclasses.make_dataclass(
        "Sweep", [("name", task, name), *_OPTIONS, *make_flags(draft)], frozen=True, namespace={"draft": draft}
    )
    options.__doc__ = "Train every point of a grid. Finished points are skipped, so a sweep can be started again."
    return options


def run(options: Any) -> None:
    """Run the points that have not finished, or submit them to Slurm, and print the scores of the others.

    Args:
        options: An instance of the class that `make_options` returned.

    Raises:
        SweepFailed: Some runs failed.
    """
    output = options.output or Path("runs/sweep")
    points = expand_grid(draft_from_experiment(make_experiment(options, options.draft)), options.grid, output)
    shard = _select_shard(points, options.shard)
    left = [point for point in shard if training.read_result(point.folder) is None]
    counts = f"{len(points)} points, {len(shard)} in this shard, {len(shard) - len(left)} of them finished"
    print(counts, flush=True)
    failed = []
    if left and options.cluster == "local":
        failed = run_locally(left, options.jobs, options.keep)
    elif left:
        submit(left, make_executor(output / "slurm", options.slurm), options.keep)
    _print_scores(shard)
    if failed:
        logs = ", ".join(str(point.folder / "log.txt") for point in failed)
        raise SweepFailed(f"{len(failed)} of {len(left)} runs failed: see {logs}")


def expand_grid(draft: Draft, grid: Sequence[Sequence[str]], output: Path) -> list[SweepPoint]:
    """Return a point for every combination of the grid's values, without duplicates.

    Args:
        draft: Provides everything that is not in the grid.
        grid: The axes, each a field followed by its values.
        output: The folder of the sweep. Each point has a folder in it, named by a hash of its settings.

    Raises:
        InputError: An axis has no values, or a field has two axes.
        SystemExit: A value cannot be parsed; the reason was printed.
    """
    for axis in grid:
        if len(axis) < 2:
            raise InputError(f"--grid {' '.join(axis)}: a field and its values, e.g. --grid model.beta 0 0.125 4.")
    fields = [axis[0] for axis in grid]
    for field in fields:
        if fields.count(field) > 1:
            raise InputError(f"--grid {field} is given twice. Pass all of its values at once: --grid {field} 0 1.")
    points: dict[str, SweepPoint] = {}
    for choice in itertools.product(*(axis[1:] for axis in grid)):
        values = dict(zip(fields, choice, strict=True))
        try:
            experiment = apply_flags(draft, [word for item in values.items() for word in _to_words(*item)])
        except SystemExit:
            print(f"This was the point {_format_values(values)} of the grid.", file=sys.stderr)
            raise
        point = SweepPoint(values, experiment, output / experiment.digest)
        points.setdefault(experiment.digest, point)  # 0 and 0.0 are the same point
    return list(points.values())


def _select_shard(points: list[SweepPoint], shard: str) -> list[SweepPoint]:
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise InputError(f"--shard {shard}: i/n with i from 1 to n, e.g. --shard 1/2.")
    return points[int(match[1]) - 1 :: int(match[2])]


def run_locally(points: list[SweepPoint], jobs: int, keep: SaveOptions) -> list[SweepPoint]:
    """Run each point in a process of its own.

    Args:
        points: The points to run.
        jobs: The number of processes at a time.
        keep: How often the runs are saved.

    Returns:
        The points that failed.
    """
    if jobs < 1:
        raise InputError(f"--jobs {jobs}: the number of runs at the same time, at least 1.")
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    running: set[subprocess.Popen[bytes]] = set()
    stopping = threading.Event()

    def run_point(point: SweepPoint) -> bool:
        saving = [
            word
            for field in dataclasses.fields(keep)
            for word in _to_words(f"keep.{field.name}", _to_text(getattr(keep, field.name)))
        ]
        command = [sys.executable, "-m", "adptnet", "train", "--output", str(point.folder), "--resume", *saving]
        log = point.folder / "log.txt"
        try:
            point.folder.mkdir(parents=True, exist_ok=True)
            config = point.folder / "config.json"
            if not config.exists():
                write_json(config, json.loads(point.experiment.to_json()))
            with open(log, "ab") as file:
                start = file.tell()
                environment = {"OMP_NUM_THREADS": threads, **os.environ}
                process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        except OSError as error:
            reason = f"{point.folder} cannot be written to ({error.strerror})"
            print(f"{_format_values(point.values)}: FAILED: {reason}", flush=True)
            return False
        running.add(process)
        if stopping.is_set():
            process.terminate()
        succeeded = process.wait() == 0
        running.remove(process)
        outcome = "done" if succeeded else "stopped" if stopping.is_set() else f"FAILED: {_last_line(log, start)}"
        print(f"{_format_values(point.values)}: {outcome}", flush=True)
        return succeeded

    with catch_stop_signals(interrupt=True), ThreadPoolExecutor(jobs) as pool:
        try:
            outcomes = [pool.submit(run_point, point) for point in points]
            return [point for point, outcome in zip(points, outcomes, strict=True) if not outcome.result()]
        except KeyboardInterrupt:
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()  # a run saves a checkpoint, from which it can be resumed
            raise


def _last_line(log: Path, start: int) -> str:
    """Return the last line that a run has added to its log since `start`, or the reason why there is none."""
    try:
        with open(log, "rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().decode(errors="replace").split("\n")
        is_full = shutil.disk_usage(log.parent).free < 4096
    except OSError as error:
        return f"{log} cannot be read ({error.strerror})"
    last = next((line.strip() for line in reversed(lines) if line.strip()), f"nothing is in {log}")
    return f"the disk of {log.parent} is full; {last}" if is_full else last


class Job:
    """A run as a submitit job: when its time is up, it saves, is queued again, and resumes."""

    def __call__(self, experiment: str, folder: str, keep: SaveOptions) -> dict[str, Any]:
        """Run `experiment`, which is given as JSON, in `folder` and return its result.

        Args:
            experiment: The experiment, as JSON.
            folder: The folder of the run.
            keep: How often the run is saved.
        """
        parsed = Experiment.from_json(experiment)
        assert isinstance(parsed, Experiment)
        warning = getattr(signal, "SIG" + os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2"))
        try:
            return training.run(parsed, Path(folder), resume=True, save_options=keep, signals=[warning])
        except training.Interrupted as stopped:
            signal.raise_signal(stopped.signum)  # all is saved; submitit's own handler queues the job again
            raise

    def checkpoint(self, experiment: str, folder: str, keep: SaveOptions) -> Any:
        """Return the submission with which submitit queues the job again.

        Args:
            experiment: The experiment, as JSON.
            folder: The folder of the run.
            keep: How often the run is saved.
        """
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, experiment, folder, keep)


def make_executor(folder: Path, slurm: Slurm) -> Any:
    """Return a submitit executor for Slurm.

    Args:
        folder: The folder of submitit's own files.
        slurm: The resources of each job.

    Raises:
        IncompatibleError: submitit is not installed, or this machine has no Slurm.
    """
    try:
        import submitit
    except ImportError:
        raise IncompatibleError("--cluster slurm needs submitit: pip install 'adptnet[cluster]'.") from None
    try:
        # a point is queued again until it has finished
        executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=1000)
    except RuntimeError as error:
        raise IncompatibleError(f"--cluster slurm: {error}. Use --cluster local on a machine without it.") from None
    parameters: dict[str, Any] = {
        "timeout_min": slurm.minutes,
        "cpus_per_task": slurm.cpus,
        "slurm_array_parallelism": slurm.at_once,
    }
    if slurm.partition is not None:
        parameters["slurm_partition"] = slurm.partition
    if slurm.gpus:
        parameters["gpus_per_node"] = slurm.gpus
    executor.update_parameters(**parameters)
    return executor


def submit(points: list[SweepPoint], executor: Any, keep: SaveOptions) -> list[Any]:
    """Submit all points as one array job and return the jobs.

    Args:
        points: The points to run.
        executor: A submitit executor.
        keep: How often the runs are saved.
    """
    experiments = [point.experiment.to_json() for point in points]
    folders = [str(point.folder) for point in points]
    jobs: list[Any] = executor.map_array(Job(), experiments, folders, [keep] * len(points))
    for point, job in zip(points, jobs, strict=True):
        print(f"{_format_values(point.values)}: job {job.job_id}")
    print("Start the same sweep again to see the results.")
    return jobs


def _print_scores(points: list[SweepPoint]) -> None:
    """Print a table of the points, with the scores of those that have finished."""
    from rich.console import Console
    from rich.table import Table

    names = list(points[0].values) if points else []
    table = Table()
    for name in (*names, points[0].experiment.task.metric if points else "", "seconds", "folder"):
        table.add_column(name)
    for point in points:
        result = training.read_result(point.folder)
        score, seconds = (f"{result['score']:.4f}", f"{result['seconds']:.0f}") if result else ("-", "-")
        table.add_row(*point.values.values(), score, seconds, point.folder.name)
    Console(file=sys.stdout).print(table)


def _to_words(field: str, value: str) -> list[str]:
    """Return a field and its value as words of a command line."""
    if value in ("True", "False"):
        group, _, name = field.rpartition(".")
        return [f"--{field}"] if value == "True" else [f"--{group}.no-{name}"]
    return [f"--{field}", *([value] if "(" in value else value.split())]


def _to_text(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _format_values(values: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items()) or "the one point"
