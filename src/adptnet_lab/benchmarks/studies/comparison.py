"""ADPTNet against other layers: one block, equal parameter counts, a tuned learning rate and several seeds.

    python -m adptnet_lab.benchmarks.studies.comparison --list            # the points, and which have a row
    python -m adptnet_lab.benchmarks.studies.comparison                   # all of them; about 40 core-hours
    python -m adptnet_lab.benchmarks.studies.comparison --task s3 --model gru preset --seed 0 --rate 3e-3
    python -m adptnet_lab.benchmarks.studies.comparison --tables          # the tables of the rows so far

Every model stands in a `SwiGLUBlockSpec` of the width that gives it the parameter count of the task, within 3 %. For
each task and model all learning rates are run with the first seed; the one with the best validation score is run with
the other seeds. Test scores are of the weights with the best validation score, and choose nothing. A row is appended
after every run, and a run that was interrupted resumes, so the same command continues an interrupted study.

CIFAR-10 and tiny Shakespeare are found by `adptnet data`; the other files are looked for in the folder ADPTNET_DATA. A
task whose files are missing is skipped with a message.
"""

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adptnet import presets
from adptnet._io.files import append_lines
from adptnet.cells import ADPTSpec
from adptnet.errors import DataError, InputError
from adptnet.nn import GatedSpec, LayerSpec, SwiGLUBlockSpec
from adptnet_lab import tasks, training
from adptnet_lab.baselines import baseline, count_parameters, match_parameters
from adptnet_lab.tasks.download import data_folders

ROWS = Path("results/benchmarks/comparison.jsonl")
RATES = (1e-3, 3e-3, 1e-2)
SEEDS = (0, 1, 2)
TOLERANCE = 0.03  # largest relative difference of parameter counts
T_QUANTILES = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # of 95 % confidence, by the number of seeds
TRAINING = training.TrainConfig(
    optimizer=training.AdamW(betas=(0.9, 0.99)),
    weight_decay=0.01,
    decay_directions=False,
    schedule=training.Cosine(warmup=0.05),
    clip=1.0,
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One task of the study.

    Attributes:
        kind: One of nine kinds of task.
        make: Makes the task; raises `DataError` if its file is missing.
        parameters: Parameter count of every model.
        preset: Name of the preset for this kind of task.
        steps, batch_size: Size of a run.
        depth: Number of blocks.
        lengths: Lengths of the test; the task's own if empty. The first selects the weights.
        evaluation_size: Sequences of an evaluation.
    """

    kind: str
    make: Callable[[], tasks.Task]
    parameters: int
    preset: str
    steps: int
    batch_size: int
    depth: int = 2
    lengths: tuple[int, ...] = ()
    evaluation_size: int = 1000


def _find(name: str) -> str:
    """Return the path of a file in the data folders."""
    for folder in data_folders():
        if (folder / name).is_file():
            return str(folder / name)
    raise DataError(f"{name} is not in {' or '.join(map(str, data_folders()))}. Set ADPTNET_DATA to its folder.")


def _spoken_digits() -> tasks.Task:
    path = _find("audiomnist_cochlea_frames.npz")
    return tasks.EventFrames(path, test_speakers=tuple(range(46, 61)), validation=0.2, merge=(5, 1), masked=False)


def _images(name: str, side: int) -> Callable[[], tasks.Task]:
    def make() -> tasks.Task:
        data = name if name == "cifar10" else _find(name)
        return tasks.SequentialImage(data, side=side, training_images=4000, test_images=1000)

    return make


def _forecast(system: str) -> Problem:
    make = lambda: tasks.Forecast(system, noise=0.005)  # noqa: E731
    return Problem("forecast", make, 44_500, "forecast", 2000, 16, evaluation_size=256)


def _copy(length: int) -> Problem:
    return Problem("copy memory", lambda: tasks.CopyMemory(length), 50_000, "memory", 4000, 64, depth=1)


PROBLEMS = {
    "text": Problem("text", lambda: tasks.Text(length=128), 103_000, "text", 2000, 16, evaluation_size=256),
    "text-wikitext": Problem(
        "text", lambda: tasks.Text(_find("wikitext2_valid.txt"), 128, "bytes"), 120_000, "text", 2000, 16,
        evaluation_size=256,
    ),
    "selective-copy": Problem(
        "selective copy", lambda: tasks.SelectiveCopy(length=40, symbols=6, vocabulary=8), 44_500, "recall", 3000, 64
    ),
    "s3": Problem("S3", lambda: tasks.WordProblem("S3", 8), 22_900, "tracking", 2000, 128, 1, (8, 16, 32)),
    "s5": Problem("S5", lambda: tasks.WordProblem("S5", 8), 120_000, "tracking", 4000, 128, 1, (8, 16)),
    "parity": Problem("parity", lambda: tasks.Parity(40), 26_500, "tracking", 3000, 128, 1, (40, 80)),
    "copy-64": _copy(64),
    "copy-200": _copy(200),
    "lorenz63": _forecast("lorenz63"),
    "rossler": _forecast("rossler"),
    "mackey-glass": _forecast("mackey-glass"),
    "cifar": Problem("images", _images("cifar10", 16), 44_500, "signals", 1500, 50),
    "fashion": Problem("images", _images("fashion_mnist.npz", 14), 44_500, "signals", 1500, 50),
    "spoken-digits": Problem("spoken digits", _spoken_digits, 40_000, "general", 1000, 54),
}  # fmt: skip


def _with_unit(layer: Any) -> SwiGLUBlockSpec:
    return SwiGLUBlockSpec(layer, expansion=2)


def _without_rotation(block: Any) -> Any:
    """Return the block of a preset with β = 0: the same layer, whose recurrence is linear."""
    layer = block.layer
    if isinstance(layer, GatedSpec):
        inner = dataclasses.replace(layer.layer, cell=dataclasses.replace(layer.layer.cell, beta=0.0))
        return dataclasses.replace(block, layer=dataclasses.replace(layer, layer=inner))
    assert isinstance(layer, LayerSpec)
    assert isinstance(layer.cell, ADPTSpec)
    return dataclasses.replace(block, layer=dataclasses.replace(layer, cell=dataclasses.replace(layer.cell, beta=0.0)))


def _baseline(name: str) -> Callable[[int, str], Any]:
    return lambda width, preset: _with_unit(baseline(name, width))


MODELS: dict[str, Callable[[int, str], Any]] = {
    "preset": lambda width, preset: presets.PRESETS[preset](width),
    "preset, β = 0": lambda width, preset: _without_rotation(presets.PRESETS[preset](width)),
    "default": lambda width, preset: presets.general(width),
    "default, β = 0": lambda width, preset: _without_rotation(presets.general(width)),
    "gru": _baseline("gru"),
    "gated gru": lambda width, preset: _with_unit(GatedSpec(baseline("gru", width), width)),  # type: ignore[arg-type]
    "lstm": _baseline("lstm"),
    "relu-rnn": _baseline("relu-rnn"),
    "s4d": _baseline("s4d"),
    "hawk": _baseline("hawk"),
    "mamba": _baseline("mamba"),
    "gated-delta-net": _baseline("gated-delta-net"),
    "attention": _baseline("attention"),
}


class Point(NamedTuple):
    """One run of the study."""

    task: str
    model: str
    rate: float
    seed: int


def match_width(make: Callable[[int], Any], parameters: int) -> Any:
    """Return the spec whose parameter count is within `TOLERANCE` of `parameters`.

    Among the widths that qualify, multiples of 4 come first and then even ones, which heads and vector units prefer.

    Args:
        make: Makes the spec of a model of a width.
        parameters: The parameter count.

    Raises:
        InputError: No width qualifies.
    """
    near = match_parameters(make, parameters, multiple_of=4).block.width
    found: list[tuple[int, int]] = []
    for width in range(max(1, near - 24), near + 25):
        try:
            count = count_parameters(make(width))
        except ValueError:  # not every layer can have every width
            continue
        if abs(count - parameters) <= TOLERANCE * parameters:
            found.append((width, count))
    if not found:
        raise InputError(f"no width gives {parameters:,} parameters within {TOLERANCE:.0%}. Choose another count.")
    rank = {0: 0, 2: 1}
    width = min(found, key=lambda each: (rank.get(each[0] % 4, 2), abs(each[1] - parameters)))[0]
    return make(width)


def make_experiment(point: Point, *, smoke: bool = False) -> training.Experiment:
    """Return the experiment of a point.

    Args:
        point: The point.
        smoke: Whether to make it tiny, to test the program.
    """
    problem = PROBLEMS[point.task]
    task = problem.make()
    spec = match_width(
        lambda width: task.model(MODELS[point.model](width, problem.preset), problem.depth), problem.parameters
    )
    steps, batch_size, evaluation_size = problem.steps, problem.batch_size, problem.evaluation_size
    if smoke:
        steps, batch_size, evaluation_size = 2, 4, 8
    config = dataclasses.replace(
        TRAINING,
        learning_rate=point.rate,
        seed=point.seed,
        lengths=problem.lengths,
        steps=steps,
        batch_size=batch_size,
        evaluate_every=max(1, steps // 10),
        evaluation_size=evaluation_size,
        evaluation_batch=min(256, evaluation_size),
    )
    return training.Experiment(task, spec, config)


def list_points(rows: Sequence[dict[str, Any]], chosen: argparse.Namespace) -> Iterator[Point]:
    """Yield the points of the study in order: all rates of the first seed, then the best of them for the other seeds.

    A point of another seed appears when all rates of the first seed have a row.

    Args:
        rows: The rows so far.
        chosen: Lists `task`, `model`, `rate` and `seed` that select points; None selects all.
    """
    for name in chosen.task or PROBLEMS:
        for model in chosen.model or MODELS:
            if chosen.rate and chosen.seed:
                yield from (Point(name, model, rate, seed) for rate in chosen.rate for seed in chosen.seed)
                continue
            rates = chosen.rate or RATES
            seeds = chosen.seed or SEEDS
            first = [row for row in rows if (row["task"], row["model"], row["seed"]) == (name, model, SEEDS[0])]
            yield from (Point(name, model, rate, SEEDS[0]) for rate in rates if SEEDS[0] in seeds)
            tuned = [row for row in first if row["rate"] in rates]
            if {row["rate"] for row in tuned} >= set(rates):
                best = choose_rate(tuned)
                yield from (Point(name, model, best, seed) for seed in seeds if seed != SEEDS[0])


def choose_rate(rows: Sequence[dict[str, Any]]) -> float:
    """Return the learning rate with the best validation score.

    Args:
        rows: Rows of one task, model and seed.
    """
    sign = -1 if rows[0]["lower_is_better"] else 1
    best = max(rows, key=lambda row: sign * row["validation"] if math.isfinite(row["validation"]) else -math.inf)
    rate: float = best["rate"]
    return rate


def run(point: Point, folder: Path, *, smoke: bool = False) -> dict[str, Any]:
    """Run one point, or resume it, and return its row.

    Args:
        point: The point.
        folder: The folder of all runs.
        smoke: Whether to make it tiny, to test the program.
    """
    experiment = make_experiment(point, smoke=smoke)
    task, settings = experiment.task, experiment.training
    own = folder / f"{point.task}-{experiment.digest}"
    row: dict[str, Any] = {**point._asdict(), "metric": task.metric, "chance": task.chance}
    row["lower_is_better"] = task.metric in task.lower_is_better
    try:
        result = training.run(experiment, own, resume=True)
    except training.TrainingDiverged as error:
        worst = math.inf if row["lower_is_better"] else -math.inf
        return {**row, "validation": worst, "test": {}, "diverged": str(error)[:200], "config": _to_json(experiment)}
    model = training.load_model(own)
    length = settings.lengths[0] if settings.lengths else None
    count, batch_size = settings.evaluation_size, settings.evaluation_batch
    validation = training.evaluate(model, task, [length], split="validation", size=count, batch_size=batch_size)
    row["validation"] = next(iter(validation.values()))[task.metric]
    row["test"] = {length: scores[task.metric] for length, scores in result["test"].items()}
    if isinstance(task, tasks.Forecast) and not smoke:
        row["horizon"] = task.horizon(model).mean
    row["parameters"] = result["parameters"]
    row["step_ms"] = 1e3 * measure_step(model, task, settings)
    row["seconds"] = result["seconds"]
    return {**row, "config": _to_json(experiment)}


def measure_step(model: torch.nn.Module, task: tasks.Task, settings: training.TrainConfig, repeats: int = 5) -> float:
    """Return the CPU seconds of a forward and backward pass: the least of several repeats.

    Args:
        model: The model.
        task: The task.
        settings: Provides the batch size.
        repeats: Number of repeats.
    """
    model.train()
    least = math.inf
    for step in range(repeats):
        batch = task.training_batch(step, settings.batch_size, settings.seed)
        start = time.process_time()
        task.loss(model(batch.inputs, lengths=batch.lengths)[0], batch.targets).backward()
        least = min(least, time.process_time() - start)
    return least


def _to_json(experiment: training.Experiment) -> Any:
    return json.loads(experiment.to_json())["spec"]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, without lines that were cut off.

    Args:
        path: The file; it need not exist.
    """
    rows = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def format_tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table for each task: test scores of the chosen rate, mean and 95 % interval over the seeds.

    Args:
        rows: The rows so far.
    """
    lines: list[str] = []
    for name in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == name]
        metric, percent = own[0]["metric"], own[0]["metric"] == "accuracy"
        lines += [f"### {name}", "", f"| model | parameters | rate | seeds | {metric} | ms a step |"]
        lines.append("| --- | --- | --- | --- | --- | --- |")
        for model in dict.fromkeys(row["model"] for row in own):
            same = [row for row in own if row["model"] == model]
            rate = choose_rate([row for row in same if row["seed"] == same[0]["seed"]])
            done = [row for row in same if row["rate"] == rate and row["test"]]
            if not done:
                lines.append(f"| {model} | | {rate:g} | 0 | diverged | |")
                continue
            scores = {
                length: format_interval([row["test"][length] for row in done], 100 if percent else 1)
                for length in done[0]["test"]
            }
            shown = ", ".join(f"{length}: {text}" for length, text in scores.items())
            times = min(row["step_ms"] for row in done)
            lines.append(f"| {model} | {done[0]['parameters']:,} | {rate:g} | {len(done)} | {shown} | {times:.0f} |")
        lines.append("")
    return "\n".join(lines)


def format_interval(values: Sequence[float], scale: float = 1.0) -> str:
    """Return the mean of values with half of its 95 % confidence interval, by Student's t; the value if there is one.

    Args:
        values: One for each seed.
        scale: Factor of the printed numbers, 100 for percent.
    """
    digits = 1 if scale > 1 else 4
    mean = f"{scale * statistics.fmean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    half = T_QUANTILES.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean} ± {scale * half:.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the points that have no row, as the arguments say, and print the tables.

    Args:
        arguments: Those of the command line by default.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=PROBLEMS, help="these tasks alone")
    parser.add_argument("--model", nargs="+", choices=MODELS, help="these models alone")
    parser.add_argument("--rate", nargs="+", type=float, help="these learning rates instead of the grid")
    parser.add_argument("--seed", nargs="+", type=int, help="these seeds alone")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--rows", type=Path, default=ROWS, help="the file of the rows")
    parser.add_argument("--runs", type=Path, default=Path("runs/comparison"), help="folder of the runs")
    parser.add_argument("--smoke", action="store_true", help="tiny runs, to test the program")
    parser.add_argument("--list", action="store_true", help="print the points and whether they have a row")
    parser.add_argument("--tables", action="store_true", help="print the tables of the rows so far")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start, skipped = time.monotonic(), set()
    while not options.tables:
        rows = read_rows(options.rows)
        done = {Point(*(row[name] for name in Point._fields)) for row in rows}
        points = list(list_points(rows, options))
        if options.list:
            print("\n".join(f"{'done' if point in done else 'open'}  {point}" for point in points))
            return
        left = [point for point in points if point not in done and point not in skipped]
        if not left or time.monotonic() - start > 60 * options.minutes:
            break
        try:
            row = run(left[0], options.runs, smoke=options.smoke)
        except (DataError, InputError) as error:
            skipped.add(left[0])
            print(f"{left[0]} is skipped: {error}", flush=True)
            continue
        options.rows.parent.mkdir(parents=True, exist_ok=True)
        with options.rows.open("ab+", buffering=0) as file:
            append_lines(file, (json.dumps(row, ensure_ascii=False) + "\n").encode())
        print({name: value for name, value in row.items() if name != "config"}, flush=True)
    print(format_tables(read_rows(options.rows)))


if __name__ == "__main__":
    main()
