"""Compare an input-driven phase and planes of the whole state with their absence: small runs at one width and rate.

    python -m adptnet_lab.benchmarks.studies.ingredients                             # all; about an hour of CPU time
    python -m adptnet_lab.benchmarks.studies.ingredients --task s3 --seed 0 1
    python -m adptnet_lab.benchmarks.studies.ingredients --tables

The models of a task differ in one ingredient each, and stand in the same SwiGLU blocks of the same width, not at equal
parameter counts: a phase adds weights, planes of the whole state add none. One rate for all, not tuned, and few steps:
the rows show directions, not results at convergence. A row is appended after each run, and the runs that have one are
left out.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adptnet import presets
from adptnet._io.files import append_lines
from adptnet.nn import GatedSpec, LayerSpec, SwiGLUBlockSpec
from adptnet.recurrence.directions import FromWholeState
from adptnet.recurrence.drive import InputPhase
from adptnet_lab import tasks, training

from .comparison import TRAINING, format_interval, read_rows

__all__ = ["PROBLEMS", "main", "run"]

ROWS = Path("results/benchmarks/ingredients.jsonl")
BLOCK_SIZE = 8  # state dimensions of a head, for planes of the whole state


class Problem(NamedTuple):
    """A task with its models and the size of a run."""

    task: tasks.Task
    models: Mapping[str, SwiGLUBlockSpec]
    depth: int
    steps: int
    batch_size: int
    rate: float
    lengths: tuple[int, ...] = ()


def _change(block: SwiGLUBlockSpec, **axes: Any) -> SwiGLUBlockSpec:
    """Return a block whose cell has other axes."""
    layer = block.layer
    if isinstance(layer, GatedSpec):
        cell = dataclasses.replace(layer.layer.cell, **axes)
        return dataclasses.replace(block, layer=dataclasses.replace(layer, layer=LayerSpec(cell)))
    assert isinstance(layer, LayerSpec)
    return dataclasses.replace(block, layer=dataclasses.replace(layer, cell=dataclasses.replace(layer.cell, **axes)))


def _with_planes(block: SwiGLUBlockSpec, softness: float, **axes: Any) -> SwiGLUBlockSpec:
    heads = block.layer.width // BLOCK_SIZE
    return _change(block, beta=1.0, direction=FromWholeState(heads=heads, softness=softness), **axes)


def _make_tracking(width: int) -> dict[str, SwiGLUBlockSpec]:
    block = presets.tracking(width)
    return {
        "β = 4, one plane": _change(block, beta=4.0),
        "β = 1, one plane": _change(block, beta=1.0),
        "planes, ε = 0": _with_planes(block, 0.0),
        "planes, ε = 0.1": _with_planes(block, 0.1),
        "planes, ε = 0.5": _with_planes(block, 0.5),
        "planes, ε = 0, phase": _with_planes(block, 0.0, phase=InputPhase(0.01)),
        "planes, ε = 0.1, phase": _with_planes(block, 0.1, phase=InputPhase(0.01)),
        "β = 4, one plane, phase": _change(block, beta=4.0, phase=InputPhase(0.01)),
        "β = 0, phase": _change(block, beta=0.0, phase=InputPhase(0.01)),
    }


def _with_phase(blocks: Mapping[str, SwiGLUBlockSpec], std: float) -> dict[str, SwiGLUBlockSpec]:
    """Return each block with and without a phase."""
    phased = {f"{name}, phase": _change(block, phase=InputPhase(std)) for name, block in blocks.items()}
    return {**blocks, **phased}


_RECALL = {"recall": presets.recall(32), "general": presets.general(32), "memory": presets.memory(32)}

PROBLEMS: dict[str, Callable[[], Problem]] = {
    "s3": lambda: Problem(tasks.WordProblem("S3", 8), _make_tracking(48), 1, 700, 128, 4e-3, (8, 16, 32)),
    "selective-copy": lambda: Problem(
        tasks.SelectiveCopy(length=40, symbols=6, vocabulary=8), _with_phase(_RECALL, 0.5), 2, 1200, 64, 4e-3
    ),
    "lorenz63": lambda: Problem(
        tasks.Forecast("lorenz63", noise=0.005), _with_phase({"forecast": presets.forecast(48)}, 0.5), 2, 400, 16, 4e-3
    ),
}


def run(name: str, model: str, seed: int, folder: Path, *, steps: int | None = None) -> dict[str, Any]:
    """Train one model and return its row.

    Args:
        name: The task.
        model: The model.
        seed: The seed.
        folder: The folder of all runs.
        steps: Number of training steps, to test the program; those of the task if None.
    """
    problem = PROBLEMS[name]()
    task = problem.task
    steps = problem.steps if steps is None else steps
    config = dataclasses.replace(
        TRAINING,
        learning_rate=problem.rate,
        seed=seed,
        lengths=problem.lengths,
        steps=steps,
        batch_size=problem.batch_size,
        evaluate_every=max(1, steps // 4),
        evaluation_size=512,
        evaluation_batch=256,
    )
    experiment = training.Experiment(task, task.model(problem.models[model], problem.depth), config)
    own, start = folder / f"{name}-{experiment.digest}", time.process_time()
    result = training.run(experiment, own, resume=True)
    row = {"task": name, "model": model, "seed": seed, "metric": task.metric, "parameters": result["parameters"]}
    row["test"] = {str(length): scores[task.metric] for length, scores in result["test"].items()}
    if isinstance(task, tasks.Forecast):
        row["horizon"] = task.horizon(training.load_model(own)).mean
    return {**row, "cpu_seconds": round(time.process_time() - start, 1)}


def format_table(rows: Sequence[dict[str, Any]], name: str) -> str:
    """Return the test scores of a task, mean and 95 % interval over the seeds.

    Args:
        rows: The rows so far.
        name: The task.
    """
    own = [row for row in rows if row["task"] == name]
    lines = [
        f"### {name}",
        "",
        "| model | parameters | seeds | score | horizon | CPU seconds |",
        "| --- |" + " --- |" * 5,
    ]
    for model in dict.fromkeys(row["model"] for row in own):
        same = [row for row in own if row["model"] == model]
        scale = 100 if same[0]["metric"] == "accuracy" else 1
        scores = [
            f"{length}: {format_interval([row['test'][length] for row in same], scale)}" for length in same[0]["test"]
        ]
        horizon = format_interval([row["horizon"] for row in same]) if "horizon" in same[0] else ""
        seconds = max(row["cpu_seconds"] for row in same)
        cells = (model, f"{same[0]['parameters']:,}", len(same), ", ".join(scores), horizon, f"{seconds:.0f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the models that have no row, as the arguments say, and print the tables.

    Args:
        arguments: Those of the command line by default.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), help="these tasks alone")
    parser.add_argument("--model", nargs="+", help="these models alone")
    parser.add_argument("--seed", nargs="+", type=int, default=[0, 1, 2], help="these seeds alone")
    parser.add_argument("--steps", type=int, help="training steps, to test the program")
    parser.add_argument("--rows", type=Path, default=ROWS, help="the file of the rows")
    parser.add_argument("--runs", type=Path, default=Path("runs/ingredients"), help="folder of the runs")
    parser.add_argument("--tables", action="store_true", help="print the tables of the rows so far")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for seed in [] if options.tables else options.seed:
        for name in options.task:
            for model in options.model or PROBLEMS[name]().models:
                done = {(row["task"], row["model"], row["seed"]) for row in read_rows(options.rows)}
                if (name, model, seed) in done:
                    continue
                row = run(name, model, seed, options.runs, steps=options.steps)
                options.rows.parent.mkdir(parents=True, exist_ok=True)
                with options.rows.open("ab+", buffering=0) as file:
                    append_lines(file, (json.dumps(row, ensure_ascii=False) + "\n").encode())
                print(row, flush=True)
    for name in options.task:
        print(format_table(read_rows(options.rows), name))


if __name__ == "__main__":
    main()
