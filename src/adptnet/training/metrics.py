"""The numbers of a run as JSON lines: each step, each evaluation, never twice."""

import json
import math
import os
import time
import warnings
from pathlib import Path
from typing import Any

from ..files import write_whole
from .store import CheckpointWarning

__all__ = ["Metrics", "plain", "read_metrics", "restored"]


class Metrics:
    """Appends to a file of JSON lines, each with a step, and waits for the disk about once a second.

    A line that did not reach the disk belongs to a step that a resumed run does again. On a full disk lines wait in
    memory until there is room.
    """

    def __init__(self, path: Path, step: int = 0, seconds: float = 1.0):
        """Begins after `step`: what an earlier run wrote about later ones is dropped."""
        self.path = path
        self._seconds = seconds
        self._written = time.monotonic()
        self._waiting: list[str] = []
        lines = [json.dumps(line) + "\n" for line in read_metrics(path) if line["step"] <= step]
        write_whole(path, "".join(lines).encode())

    def add(self, **numbers: Any) -> None:
        self._waiting.append(json.dumps(plain(numbers), allow_nan=False) + "\n")
        if time.monotonic() - self._written > self._seconds:
            self.flush()

    def flush(self) -> None:
        """Everything so far is on disk afterwards, or a warning says that it is not."""
        self._written = time.monotonic()
        end = self.path.stat().st_size
        try:
            with open(self.path, "ab") as file:
                file.write("".join(self._waiting).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            with open(self.path, "rb+") as file:
                file.truncate(end)
            warnings.warn(f"{self.path} could not be written ({error.strerror}).", CheckpointWarning, stacklevel=2)
        else:
            self._waiting.clear()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that was cut short is left out."""
    lines = []
    for text in path.read_bytes().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:  # no JSON, or no text at all
            break
    return lines


def plain(value: Any) -> Any:
    """Numbers as JSON takes them: infinities and NaN as text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def restored(value: Any) -> Any:
    """What `plain` was given, names of infinities and NaN as numbers again."""
    if isinstance(value, dict):
        return {key: restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restored(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value
