"""Results as files: one JSON file for each benchmark, in a folder for one machine.

A file holds the benchmark and its cases, one case per line, and in each case one list per side:

    {"version": 2, "benchmark": "widths", ..., "machines": [...], "columns": ["side", "threads", ...], "cases": [
    {"size": {"batch": 1, ...}, "repeats": 627, "machine": 0, "sides": [["forward, 50", 1, ...], ...], ...}
    ]}

Of the timed samples only the smallest, the median and the number (`repeats`) are kept. Version 1 had all samples, and
the machine in every case; it can still be read. A file has the name of its benchmark, which older files call "subject".
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adptnet._io.files import write_atomic
from adptnet._io.json_values import from_json_value, to_json_value
from adptnet.errors import DataError

from .benchmark import Size
from .goals import GoalVerdict, Measurements
from .machine import MachineLoad
from .timing import Samples

__all__ = ["describe_case", "merge_cases", "read_results", "write_results"]

VERSION = 2
CLOCKS = ("cpu", "wall")
DIGITS = 9  # significant digits of every number
COLUMNS = ("side", "threads", "calls", "scale", "cpu least", "cpu median", "wall least", "wall median")


def describe_case(
    size: Size,
    measurements: Measurements,
    verdicts: Sequence[GoalVerdict],
    skipped: dict[str, str],
    load: MachineLoad,
    machine: dict[str, Any],
    **how: Any,
) -> dict[str, Any]:
    """Return everything that is recorded of one case, as a dictionary for `write_results`.

    Args:
        size: The size.
        measurements: The times and the other numbers.
        verdicts: The verdicts on the goals.
        skipped: The sides that were not run, and why.
        load: The load of the machine.
        machine: The machine and the versions.
        **how: How it was measured: `fast`, `repeats`.
    """
    return {
        "size": size._asdict(),
        **how,
        "machine": machine,
        "neighbours": asdict(load),
        "sides": [
            {
                "side": name,
                "threads": threads,
                "calls": timing.calls,
                "scale": timing.scale,
                "cpu": _summarize(timing.cpu),
                "wall": _summarize(timing.wall),
            }
            for (name, threads), timing in measurements.times.items()
        ],
        "numbers": dict(measurements.numbers),
        "skipped": dict(skipped),
        "verdicts": [verdict._asdict() for verdict in verdicts],
    }


def _summarize(samples: Samples) -> dict[str, Any]:
    return {"least": samples.least, "median": samples.median}


def merge_cases(old: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cases with one more, without those of the same size and those of another machine or version.

    Args:
        old: The cases so far.
        new: The case to add.
    """
    kept = [case for case in old if case["machine"] == new["machine"] and case["size"] != new["size"]]
    return [*kept, new]


def write_results(
    folder: Path, benchmark: str, about: str, cases: Sequence[dict[str, Any]], refused: str | None = None
) -> Path:
    """Write the file of a benchmark and return its path.

    Args:
        folder: The folder of the results.
        benchmark: The name of the benchmark.
        about: What it compares.
        cases: The cases.
        refused: Why the benchmark was not measured; None if it was.
    """
    path = folder / f"{benchmark}.json"
    machines: list[dict[str, Any]] = []
    lines = []
    for case in cases:
        if case["machine"] not in machines:
            machines.append(case["machine"])
        sides = [_flatten_side(side) for side in case["sides"]]
        lines.append(_encode({**case, "machine": machines.index(case["machine"]), "sides": sides}))
    head = {"version": VERSION, "benchmark": benchmark, "about": about, "refused": refused}
    head |= {"machines": machines, "columns": COLUMNS}
    body = ",\n".join(lines)
    write_atomic(path, f'{_encode(head)[:-1]},"cases":[\n{body}\n]}}\n'.encode())
    return path


def _flatten_side(side: dict[str, Any]) -> list[Any]:
    """Return the values of a side in the order of `COLUMNS`."""
    values = {**side, **{f"{clock} {name}": side[clock][name] for clock in CLOCKS for name in side[clock]}}
    return [values[name] for name in COLUMNS]


def _unflatten_side(columns: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """Return the side whose values `_flatten_side` returned."""
    named = dict(zip(columns, values, strict=True))
    clocks = {clock: {name: named.pop(f"{clock} {name}") for name in ("least", "median")} for clock in CLOCKS}
    return {**named, **clocks}


def _encode(value: Any) -> str:
    return json.dumps(to_json_value(value, digits=DIGITS), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def read_results(folder: Path, benchmark: str) -> dict[str, Any] | None:
    """Return the content of the file of a benchmark; None if there is no file.

    Args:
        folder: The folder of the results.
        benchmark: The name of the benchmark.

    Returns:
        `benchmark`, `about`, `refused` and `cases`, which are as `describe_case` made them.

    Raises:
        DataError: The file is not a result of `adptnet bench`.
    """
    path = folder / f"{benchmark}.json"
    if not path.exists():
        return None
    try:
        content: dict[str, Any] = from_json_value(json.loads(path.read_text()))
        version = content.pop("version")
        content["benchmark"] = benchmark
        content.pop("subject", None)
        if version == 1:
            for case in content["cases"]:
                _discard_samples(case)
        elif version == VERSION:
            machines, columns = content.pop("machines"), content.pop("columns")
            for case in content["cases"]:
                case["machine"] = machines[case["machine"]]
                case["sides"] = [_unflatten_side(columns, values) for values in case["sides"]]
        else:
            raise ValueError(f"version {version}")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise DataError(f"{path} is not a result of adptnet bench. Move it away, or pass another --output.") from None
    return content


def _discard_samples(case: dict[str, Any]) -> None:
    """Remove the samples from a case of version 1."""
    for side in case["sides"]:
        for clock in CLOCKS:
            del side[clock]["every"]
