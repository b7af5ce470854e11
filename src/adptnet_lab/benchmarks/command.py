"""`adptnet bench`: what things take on this machine, beside the machine, and whether that is what was expected."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tyro.conf import Positional

from adptnet._io.files import write_whole
from adptnet.analysis import plot
from adptnet.errors import AdptnetError, InputError, WrongResultError
from adptnet.spec import nearest

from . import checks, machine, picture, record, report
from .goals import Found, judged
from .subject import Size, Subject, parsed
from .subjects import SUBJECTS
from .timing import interleaved

__all__ = ["Bench", "run"]

REPEATS, FAST_REPEATS = 7, 3
SECONDS = 20.0  # of a size: longer than most of what disturbs a shared machine


@dataclass(frozen=True)
class Bench:
    """Measure CPU and wall time of operations, layers and solvers in turn, and hold them to stated goals.

    Every operation is first compared with its reference, values and gradients; one that is wrong is refused, and the
    others go on. Results are JSON and Markdown for each subject and a picture; what is in the folder already, of this
    machine and these versions, stays.
    """

    subjects: Positional[tuple[str, ...]] = ()
    """What to measure; all if none is named. --list shows them."""
    list: bool = False
    """Show the subjects, and measure nothing."""
    fast: bool = False
    """Small sizes, three repeats, nothing that takes minutes: a look, not a result."""
    sizes: tuple[str, ...] = ()
    """Sizes to measure at, batch,steps,state each (8,1024,128), instead of the subject's own."""
    repeats: int | None = None
    """Times that each side is run; if not given 7, and more until 20 seconds have passed; 3 with --fast."""
    threads: tuple[int, ...] = (1, 2)
    """Numbers of threads to measure with."""
    output: Path = Path("runs/bench")
    """Folder of the results."""


def run(options: Bench) -> None:
    """Measures, writes and prints; raises if an operation was wrong."""
    if options.list:
        for name, subject in SUBJECTS.items():
            print(f"{name}: {subject.about}\n  sizes {'; '.join(map(str, subject.sizes))}")
        return
    chosen = {name: _subject(name) for name in options.subjects or SUBJECTS}
    sizes = [parsed(size) for size in options.sizes]
    if (options.repeats is not None and options.repeats < 1) or not options.threads or min(options.threads) < 1:
        raise InputError(f"--repeats {options.repeats} --threads {options.threads}: both are whole numbers from 1.")
    options.output.mkdir(parents=True, exist_ok=True)
    facts = machine.facts()  # once: a result that is written may itself change the state of the repository
    refused: dict[str, str] = {}
    verdicts: dict[str, str | None] = {}  # on operations: each is looked at once
    for name, subject in chosen.items():
        print(f"{name}: {subject.about}", flush=True)
        for operation in subject.operations:
            if operation not in verdicts:
                verdicts[operation] = checks.missing(operation) or checks.red(operation)
        why = "; ".join(f"{name}: {verdicts[name]}" for name in subject.operations if verdicts[name])
        if why:
            print(f"  refused: {why}", flush=True)
            refused[name] = why
            record.write(options.output, name, subject.about, [], refused=why)
            _written(options.output, name)
            continue
        for size in sizes or (subject.quick if options.fast else subject.sizes):
            _measured(name, subject, size, options, facts)
    for path in _summarised(options.output):
        print(f"wrote {path}")
    if refused:
        raise WrongResultError("refused: " + "; ".join(f"{name}: {why}" for name, why in refused.items()))


def _subject(name: str) -> Subject:
    if name not in SUBJECTS:
        raise InputError(f"there is no subject {name!r}.{nearest(name, SUBJECTS)}")
    return SUBJECTS[name]


def _measured(name: str, subject: Subject, size: Size, options: Bench, facts: dict[str, Any]) -> None:
    """One case, written as soon as it is there."""
    threads = [count for count in options.threads if subject.threads is None or count in subject.threads]
    repeats = options.repeats or (FAST_REPEATS if options.fast else REPEATS)
    seconds = 0.0 if options.repeats or options.fast else SECONDS
    with machine.watched() as neighbours, _single_precision():
        case = subject.case(size, options.fast)
        times = interleaved(case.sides, repeats=repeats, seconds=seconds, threads=threads or [1])
    found = Found(times, case.numbers)
    verdicts = judged(case.goals, found, neighbours.others)
    how = {"fast": options.fast, "repeats": max((len(spent.cpu.every) for spent in times.values()), default=repeats)}
    row = record.row(size, found, verdicts, dict(case.skipped), neighbours, facts, **how)
    before = record.read(options.output, name)
    record.write(options.output, name, subject.about, record.merged(before["cases"] if before else [], row))
    _written(options.output, name)
    print(report.line(size, row["verdicts"]), flush=True)


@contextmanager
def _single_precision() -> Iterator[None]:
    """float32 wherever nothing else is said."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _written(folder: Path, name: str) -> None:
    found = record.read(folder, name)
    assert found is not None
    write_whole(folder / f"{name}.md", (report.page(found) + "\n").encode())


def _summarised(folder: Path) -> list[Path]:
    """The page and the picture of all that is in the folder."""
    results: list[dict[str, Any]] = [found for name in SUBJECTS if (found := record.read(folder, name)) is not None]
    page = folder / "summary.md"
    write_whole(page, (report.summary(results) + "\n").encode())
    try:
        return [page, *plot.save(picture.drawn(results), folder / "summary")]
    except AdptnetError as error:
        print(f"no picture: {error}")
        return [page]
