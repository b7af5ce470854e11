"""Scores of the layers on seven tasks: every run behind docs/results.md, and its tables.

    python -m adptnet_lab.benchmarks.studies.learning  # all of it, two hours on one core; resumes if interrupted
    python -m adptnet_lab.benchmarks.studies.learning s3 forecast  # some of it
    python -m adptnet_lab.benchmarks.studies.learning --tables  # the tables of the runs that have finished
    python -m adptnet_lab.benchmarks.studies.learning --times  # a training step with and without the kernels

Each experiment is one or more `adptnet sweep`; `--commands` prints them as they would be typed. CIFAR-10 and tiny
Shakespeare must be on this machine (`adptnet data fetch`). Rows are written to results/benchmarks/learning.jsonl,
tables to learning.md.
"""

import argparse
import json
import math
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from adptnet._io import files
from adptnet.cells import ADPTSpec
from adptnet_lab import training
from adptnet_lab.tasks import Forecast
from adptnet_lab.training import load_model, read_experiment

RESULTS = pathlib.Path("results/benchmarks")
SEEDS = "--grid training.seed 0 1 2"


@dataclass(frozen=True)
class SweepGroup:
    """Sweeps that share a table.

    Attributes:
        title: The title of the table.
        sweeps: The arguments of each `adptnet sweep`.
    """

    title: str
    sweeps: tuple[str, ...]


WORDS = "--model.norm batch --model.dropout 0.05 --training.lengths 8 16 32 --training.evaluation-size 4096"
TURNING = "--model.spectrum 'Negative(S4DReal(), 0.5)' --model.gain 'LRU()' --model.gate 'SoftplusGate()'"
COPY = (
    "selective-copy --task.length 40 --task.symbols 6 --task.vocabulary 8 --model.width 32 --model.depth 2"
    " --training.steps 1200 --training.batch-size 64 --training.learning-rate 3e-3 --training.weight-decay 0.1"
    " --training.schedule cosine --training.clip None --training.evaluation-size 2000"
)
SELECTIVE = "--model.state-size 64 --model.spectrum 'S4DReal()' --model.input-projection 'Expand()'"
MEMORY = (
    "copy-memory --model.width 128 --training.steps 7850 --training.batch-size 64 --training.learning-rate 5e-3"
    " --training.optimizer adam --training.schedule cosine --training.evaluate-every 785 --training.stop-at 0.9999"
)
IMAGES = (
    "sequential-image --task.side 16 --task.training-images 4000 --task.test-images 1000 --model.depth 2"
    " --training.steps 720 --training.batch-size 50 --training.weight-decay 0.01"
    " --training.schedule 'Cosine(warmup=0.1)' --training.clip 1 --training.evaluate-every 72"
    " --training.evaluation-size 1000"
)
TEXT = (
    "text --task.length 128 --model.depth 2 --model.dropout 0.1 --training.steps 2000 --training.batch-size 8"
    " --training.schedule 'Cosine(warmup=0.05)' --training.clip 1 --training.evaluate-every 500"
    " --training.evaluation-size 256 --training.evaluation-batch 64"
)
FAST = "--model.spectrum 'Linspace(dt_max=10.0)' --model.gain 'LRU()' --model.gate 'SoftplusGate(rank=16)'"
LORENZ = (
    "forecast --task.system lorenz63 --task.noise 0.005 --model.depth 2 --training.steps 2000 --training.batch-size 32"
    " --training.schedule 'Cosine(warmup=0.05)' --training.clip 1 --training.evaluate-every 500"
    " --training.evaluation-size 256"
)

EXPERIMENTS = {
    "s3": SweepGroup(
        "The word problem of S3 (six elements), trained at length 8",
        (
            f"word-problem {WORDS} {TURNING} --grid model.beta 0 0.0125 0.125 1 4 {SEEDS}",
            f"word-problem {WORDS} --model.layer relu-rnn {SEEDS}",
        ),
    ),
    "s5": SweepGroup(
        "The word problem of S5 (120 elements), width 256, trained at length 8",
        (
            f"word-problem --task.group S5 {WORDS} {TURNING} --model.width 256 --training.steps 16384"
            " --training.batch-size 512 --training.evaluate-every 1000 --training.select-by loss --grid model.beta 4",
        ),
    ),
    "selective-copy": SweepGroup(
        "Selective Copy, six symbols in 40 steps",
        (
            f"{COPY} {SELECTIVE} --grid model.beta 0 0.0125 0.125 {SEEDS}",
            f"{COPY} {SELECTIVE} --model.gate 'SoftplusGate()' --grid model.beta 0 0.125",
            f"{COPY} --model.layer hawk --grid training.seed 0",
            f"{COPY} --model.layer gru --grid training.seed 0",
        ),
    ),
    "copy-memory": SweepGroup(
        "Copy Memory, 64 steps",
        (f"{MEMORY} --grid model.beta 0.125 0", f"{MEMORY} --model.layer gru --grid training.seed 0"),
    ),
    "images": SweepGroup(
        "CIFAR-10 pixel by pixel, 16 × 16, 4 000 images",
        (
            f"{IMAGES} --model.width 64 --model.state-size 128 --model.spectrum 'S4DInv()'"
            " --model.input-projection 'Expand()' --training.learning-rate 0.01 --grid model.beta 0 0.0125"
            " --grid training.seed 0 1",
            f"{IMAGES} --model.layer gru --model.width 64 --grid training.seed 0",
        ),
    ),
    "text": SweepGroup(
        "Characters of tiny Shakespeare, a million parameters",
        (
            f"{TEXT} --model.width 306 {FAST} --grid model.beta 0.125",
            f"{TEXT} --model.layer gru --model.width 246 --grid training.seed 0",
            f"{TEXT} --model.layer lstm --model.width 220 --grid training.seed 0",
            f"{TEXT} --model.width 306 {FAST} --grid model.beta 0",
            f"{TEXT} --model.width 308 --grid model.beta 0.125",
        ),
    ),
    "forecast": SweepGroup(
        "The next sample of Lorenz-63",
        (
            f"{LORENZ} --model.width 64 --grid model.beta 0 0.125 1",
            f"{LORENZ} --model.layer gru --model.width 50 --grid training.seed 0",
            f"{LORENZ} --model.layer lstm --model.width 45 --grid training.seed 0",
        ),
    ),
}


def make_command(name: str, sweep: str, output: pathlib.Path) -> list[str]:
    """Return the words of an `adptnet sweep`.

    Args:
        name: Name of the experiment.
        sweep: Arguments of `adptnet sweep`.
        output: The folder of all runs.
    """
    task, *flags = shlex.split(sweep)
    return ["adptnet", "sweep", task, "--model.preset", "paper", *flags, "--output", str(output / name)]


def list_finished(name: str, output: pathlib.Path) -> list[pathlib.Path]:
    """Return the folders of the runs that have finished.

    Args:
        name: Name of the experiment.
        output: The folder of all runs.
    """
    return sorted(path for path in (output / name).glob("*") if training.read_result(path))


def get_cell(experiment: training.Experiment) -> Any:
    """Return the spec of the cell in the blocks, or of the layer if it has no cell.

    Args:
        experiment: The settings of a run.
    """
    layer = experiment.block.layer
    return getattr(layer, "cell", layer)


def make_rows(name: str, output: pathlib.Path) -> list[dict[str, Any]]:
    """Return a row for each run that has finished.

    Args:
        name: Name of the experiment.
        output: The folder of all runs.
    """
    found = []
    for folder in list_finished(name, output):
        result, experiment = training.read_result(folder), read_experiment(folder)
        assert result is not None
        numbers = {length: scores[result["metric"]] for length, scores in result["test"].items()}
        if isinstance(experiment.task, Forecast):
            numbers["horizon"] = experiment.task.horizon(load_model(folder)).mean
        found.append(
            {
                "experiment": name,
                "layer": describe_cell(get_cell(experiment)),
                "seed": experiment.training.seed,
                "metric": result["metric"],
                "scores": numbers,
                "parameters": result["parameters"],
                "config": json.loads(experiment.to_json()),
            }
        )
    return found


def describe_cell(cell: Any) -> str:
    """Return its name, β, and whether it has a gate.

    Args:
        cell: The spec of a cell or layer.
    """
    if isinstance(cell, ADPTSpec):
        return f"ADPTNet, β = {cell.beta:g}" + (", gate" if cell.gate else "")
    return type(cell).__name__


def render_table(title: str, rows: list[dict[str, Any]]) -> str:
    """Return a table with the mean over seeds of every score, and the scores of the seeds in brackets.

    Args:
        title: Heading of the table.
        rows: Rows of one experiment, at least one.
    """
    columns = list(rows[0]["scores"])
    metric = rows[0]["metric"]
    head = [f"{metric} at {column}" if column.isdigit() else column for column in columns]
    lines = [f"### {title}", "", "| layer | parameters | " + " | ".join(head) + " |"]
    lines.append("| --- " * (len(head) + 2) + "|")
    for layer in sorted({row["layer"] for row in rows}):
        same = sorted((row for row in rows if row["layer"] == layer), key=lambda row: row["seed"])
        cells = [format_scores([row["scores"][column] for row in same], metric) for column in columns]
        lines.append(f"| {layer} | {same[0]['parameters']:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def format_scores(values: list[float], metric: str) -> str:
    """Return the mean of scores as text, and the scores in brackets if there are several.

    Args:
        values: The scores, one per seed.
        metric: Name of the metric; accuracies are printed in percent.
    """
    scale, digits = (100, 1) if metric == "accuracy" else (1, 3)
    each = [f"{scale * value:.{digits}f}" for value in values]
    mean = f"{scale * statistics.mean(values):.{digits}f}"
    return mean if len(each) == 1 else f"{mean} ({', '.join(each)})"


def measure_step_times(experiment: training.Experiment, repeats: int = 5) -> tuple[float, float]:
    """Return the CPU seconds of a training step with and without the kernels: the least of interleaved repeats.

    Args:
        experiment: The settings of a run.
        repeats: Number of counted steps per backend.

    Returns:
        Seconds with the kernels and without.
    """
    task, settings = experiment.task, experiment.training
    model = experiment.model.build()
    optimizer = torch.optim.AdamW(model.parameters())
    least = {"cpu": math.inf, "reference": math.inf}
    for step in range(repeats + 1):  # the first one is not counted
        for backend in least:
            os.environ["ADPTNET_BACKEND"] = backend
            batch = task.training_batch(step, settings.batch_size, settings.seed)
            start = time.process_time()
            task.loss(model(batch.inputs)[0], batch.targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step:
                least[backend] = min(least[backend], time.process_time() - start)
    return least["cpu"], least["reference"]


def format_step_times(name: str, output: pathlib.Path) -> str:
    """Return the times of a training step of the run with the largest β, as a line of a table.

    Args:
        name: Name of the experiment.
        output: The folder of all runs.
    """
    every = [read_experiment(folder) for folder in list_finished(name, output)]
    ours = [experiment for experiment in every if isinstance(get_cell(experiment), ADPTSpec)]
    experiment = max(ours, key=lambda each: get_cell(each).beta)
    kernel, loop = (1e3 * seconds for seconds in measure_step_times(experiment))
    return f"| {name} | {describe_cell(get_cell(experiment))} | {kernel:.0f} | {loop:.0f} | {loop / kernel:.1f} |"


def main() -> None:
    """Run the sweeps and write rows and tables, as the arguments of the process say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(EXPERIMENTS) + "; all if none is given")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/learning"), help="folder of the runs")
    parser.add_argument("--commands", action="store_true", help="print the commands and run nothing")
    parser.add_argument("--tables", action="store_true", help="only write the tables of the runs that have finished")
    parser.add_argument("--times", action="store_true", help="time a training step with and without the kernels")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(EXPERIMENTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. Known: {', '.join(EXPERIMENTS)}")
    if arguments.times:
        torch.set_num_threads(1)
        print("| experiment | layer | kernels, ms | eager loop, ms | ratio |\n| --- | --- | --- | --- | --- |")
        for name in arguments.names or EXPERIMENTS:
            print(format_step_times(name, arguments.output), flush=True)
        return
    for name in arguments.names or EXPERIMENTS:
        for sweep in EXPERIMENTS[name].sweeps:
            words = make_command(name, sweep, arguments.output)
            if arguments.commands:
                print(shlex.join(words))
            elif not arguments.tables:
                subprocess.run([sys.executable, "-m", *words], check=True)
    if not arguments.commands:
        found = {name: make_rows(name, arguments.output) for name in EXPERIMENTS}
        lines = "".join(
            json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n" for each in found.values() for row in each
        )
        files.write_atomic(RESULTS / "learning.jsonl", lines.encode())
        tables = [render_table(EXPERIMENTS[name].title, each) for name, each in found.items() if each]
        files.write_atomic(RESULTS / "learning.md", "\n".join(tables).encode())
        print("\n".join(tables))


if __name__ == "__main__":
    main()
