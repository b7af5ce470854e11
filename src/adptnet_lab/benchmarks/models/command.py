"""`adptnet benchmark`: train any model from token ids to logits on a suite of tasks, beside known models."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional

from adptnet._io.files import write_atomic
from adptnet.errors import InputError
from adptnet.spec import suggest_name

from .factory import ModelSource, find_factory
from .known import KNOWN, find_known
from .page import render_page
from .rows import COMMITTED, append_row, choose_rate, merge_rows, read_rows
from .suites import BUDGETS, SUITES, Budget, BudgetName, SuiteName
from .training import build, train_and_test

__all__ = ["Benchmark", "run"]


@dataclass(frozen=True)
class Benchmark:
    """Train any model from token ids to logits on a suite of tasks, and write a table beside known models.

    A model is a function in a module or a file, module:make_model, that is called with the vocabulary and returns a
    torch module from ids (batch, time) to logits (batch, time, vocabulary). It may also have parameters called
    output_size, length (longest sequence of the test) and parameters (count of the known models). Runs that have a
    row in the folder are not repeated.
    """

    models: Positional[tuple[str, ...]] = ()
    """module:make_model or file.py:make_model, or known models by name; without any, only the page is written."""
    suite: tuple[SuiteName, ...] = ("state-tracking",)
    """Suites to run."""
    budget: BudgetName = "small"
    """Steps, sizes, learning rates and seeds. Scores are compared within a budget only."""
    tasks: tuple[str, ...] = ()
    """Tasks of the suites; all if none are given. --list shows them."""
    seeds: tuple[int, ...] = ()
    """Seeds; those of the budget if none are given."""
    steps: int | None = None
    """Optimizer steps other than those of the budget, to try a model. Known models have no rows with them."""
    output: Path = Path("runs/benchmark")
    """Folder of rows.jsonl and page.md."""
    list: Annotated[bool, tyro.conf.arg(help="Show suites, budgets and known models, and run nothing.")] = False


def run(options: Benchmark) -> None:
    """Run what has no row yet, write the page and print it.

    Args:
        options: The options.

    Raises:
        InputError: A model, task or number is not valid.
    """
    if options.list:
        print(_describe())
        return
    budget, label = _choose_budget(options)
    path = options.output / "rows.jsonl"
    rows = read_rows(path)
    for name, suite, task in _list_points(options):
        source = find_known(name, SUITES[suite]) if name in KNOWN else find_factory(name)
        for rate, seed in _plan(source, suite, task, budget, label, rows):
            row = {**train_and_test(source, suite, task, budget, rate, seed), "budget": label}
            append_row(path, row)
            rows.append(row)
            print(f"{suite}, {task}, {name}, rate {rate:g}, seed {seed}: {_summarize(row)}", flush=True)
    own = [name for name in dict.fromkeys(row["model"] for row in rows) if name not in KNOWN]
    shown = merge_rows(rows, read_rows(COMMITTED))
    page = render_page(shown, options.suite, [*options.models, *own])
    options.output.mkdir(parents=True, exist_ok=True)
    write_atomic(options.output / "page.md", (page + "\n").encode())
    print(page)
    print(f"wrote {options.output / 'page.md'}")


def _choose_budget(options: Benchmark) -> tuple[Budget, dict[str, Any]]:
    """Return the budget and its description in rows."""
    budget, name = BUDGETS[options.budget], str(options.budget)
    if options.steps is not None:
        if options.steps < 1:
            raise InputError(f"--steps {options.steps}: an integer >= 1.")
        budget, name = dataclasses.replace(budget, steps=options.steps), f"{name}, {options.steps} steps"
    if options.seeds:
        if min(options.seeds) < 0:
            raise InputError(f"--seeds {min(options.seeds)}: integers >= 0.")
        budget = dataclasses.replace(budget, seeds=tuple(dict.fromkeys(options.seeds)))
    label = {
        "name": name,
        "steps": budget.steps,
        "batch_size": budget.batch_size,
        "rates": [*budget.rates],
        "evaluation_size": budget.evaluation_size,
    }
    return budget, label


def _list_points(options: Benchmark) -> Iterator[tuple[str, SuiteName, str]]:
    """Yield model, suite and task, after a check of all of them."""
    known = [task for suite in options.suite for task in SUITES[suite].tasks]
    for task in options.tasks:
        if task not in known:
            raise InputError(f"{' and '.join(options.suite)} has no task {task!r}.{suggest_name(task, known)}")
    for name in options.models:
        if name not in KNOWN:
            if ":" not in name:
                raise InputError(f"{name!r} is not a known model; write module:make_model.{suggest_name(name, KNOWN)}")
            find_factory(name)
    for suite in dict.fromkeys(options.suite):
        for task in SUITES[suite].tasks:
            if not options.tasks or task in options.tasks:
                yield from ((name, suite, task) for name in dict.fromkeys(options.models))


def _plan(
    source: ModelSource, suite: SuiteName, task: str, budget: Budget, label: dict[str, Any], rows: list[dict[str, Any]]
) -> Iterator[tuple[float, int]]:
    """Yield rates and seeds without a row: all rates with the first seed, then the best of them with the others."""
    _, fingerprint = build(source, suite, task, budget.seeds[0])
    point = {"suite": suite, "task": task, "model": source.name, "fingerprint": fingerprint, "budget": label}

    def find(seed: int) -> list[dict[str, Any]]:
        return [row for row in rows if row["seed"] == seed and all(row[key] == value for key, value in point.items())]

    first = budget.seeds[0]
    yield from ((rate, first) for rate in budget.rates if rate not in {row["rate"] for row in find(first)})
    best = choose_rate(find(first))
    for seed in budget.seeds[1:]:
        if best not in {row["rate"] for row in find(seed)}:
            yield best, seed


def _summarize(row: dict[str, Any]) -> str:
    if not row["test"]:
        return f"diverged ({row['diverged']})"
    scores = ", ".join(f"×{factor} {100 * score:.1f}" for factor, score in row["test"].items())
    return f"{row['metric']} {scores} %, {row['seconds']:.0f} CPU s"


def _describe() -> str:
    lines = []
    for name, suite in SUITES.items():
        lines += [f"suite {name}: {suite.about}", *(f"  {task}: {spec}" for task, spec in suite.tasks.items())]
    for label, budget in BUDGETS.items():
        lines.append(
            f"budget {label}: {budget.steps} steps of {budget.batch_size}, rates {budget.rates}, seeds {budget.seeds}"
        )
    return "\n".join([*lines, f"known models: {', '.join(KNOWN)}"])
