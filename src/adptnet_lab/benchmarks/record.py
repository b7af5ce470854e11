"""Results as files: one JSON file for each subject, a folder of them for a machine."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adptnet.errors import DataError

from ..training import write_json
from .goals import Found, Verdict
from .machine import Neighbours
from .subject import Size
from .timing import Spent

__all__ = ["merged", "read", "row", "write"]

VERSION = 1


def row(
    size: Size,
    found: Found,
    verdicts: Sequence[Verdict],
    skipped: dict[str, str],
    neighbours: Neighbours,
    machine: dict[str, Any],
    **how: Any,
) -> dict[str, Any]:
    """All there is to know about one case: numbers, and what stands beside them."""
    return {
        "size": size._asdict(),
        **how,
        "machine": machine,
        "neighbours": asdict(neighbours),
        "sides": [
            {
                "side": name,
                "threads": threads,
                "calls": timed.calls,
                "scale": timed.scale,
                "cpu": _spent(timed.cpu),
                "wall": _spent(timed.wall),
            }
            for (name, threads), timed in found.times.items()
        ],
        "numbers": dict(found.numbers),
        "skipped": dict(skipped),
        "verdicts": [verdict._asdict() for verdict in verdicts],
    }


def _spent(spent: Spent) -> dict[str, Any]:
    return {"least": spent.least, "median": spent.median, "every": list(spent.every)}


def merged(old: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Cases with one more. Another one of the same size is replaced, and so are those of another machine or version."""
    kept = [case for case in old if case["machine"] == new["machine"] and case["size"] != new["size"]]
    return [*kept, new]


def write(folder: Path, subject: str, about: str, cases: Sequence[dict[str, Any]], refused: str | None = None) -> Path:
    path = folder / f"{subject}.json"
    content = {"version": VERSION, "subject": subject, "about": about, "refused": refused, "cases": list(cases)}
    write_json(path, content)
    return path


def read(folder: Path, subject: str) -> dict[str, Any] | None:
    """What was measured before; None if nothing was."""
    path = folder / f"{subject}.json"
    if not path.exists():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        assert found["version"] == VERSION
    except (ValueError, KeyError, TypeError, AssertionError):
        raise DataError(f"{path} is not a result of adptnet bench. Move it away, or pass another --output.") from None
    return found
