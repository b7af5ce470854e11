"""Rows: one JSON line per training run, appended when the run has ended."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from adptnet._io.files import append_lines, read_regular
from adptnet._io.untrusted import parse_json

__all__ = ["COMMITTED", "append_row", "choose_rate", "merge_rows", "read_rows"]

COMMITTED = Path(__file__).with_name("rows.jsonl")  # of the known models

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "suite": str,
    "task": str,
    "model": str,
    "fingerprint": str,
    "budget": dict,
    "rate": float,
    "seed": int,
    "parameters": int,
    "metric": str,
    "chance": float,
    "validation": (float, type(None)),  # None if training diverged
    "test": dict,
    "seconds": float,
}
_LARGEST = 2**26  # bytes of a file of rows


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; lines that are incomplete or of another form are left out.

    Args:
        path: The file; it need not exist.
    """
    rows = []
    for line in read_regular(path, _LARGEST).splitlines() if path.exists() else []:
        try:
            row = parse_json(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in _FIELDS.items()):
            rows.append(row)
    return rows


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a row to a file and sync it to disk.

    Args:
        path: The file; it is created with its folder.
        row: The row.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+", buffering=0) as file:
        append_lines(file, (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode())


def merge_rows(*groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of all groups. Of rows of the same run the first counts.

    Args:
        *groups: Rows.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in (row for group in groups for row in group):
        names = ("suite", "task", "model", "fingerprint", "budget", "rate", "seed")
        found.setdefault(json.dumps([row[name] for name in names], sort_keys=True), row)
    return list(found.values())


def choose_rate(rows: Sequence[dict[str, Any]]) -> float:
    """Return the learning rate with the best validation score.

    Args:
        rows: Rows of one task, model and seed. In these suites a higher score is better.
    """
    best = max(rows, key=lambda row: -math.inf if row["validation"] is None else row["validation"])
    rate: float = best["rate"]
    return rate
