"""The numbers of a run as JSON lines: each step, each evaluation, never twice."""

import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adptnet._io.files import append_lines, read_regular, write_whole
from adptnet.errors import CheckpointError

from .store import CheckpointWarning

__all__ = ["Kept", "Metrics", "plain", "read_lines", "read_metrics", "restored"]


class Line(NamedTuple):
    """A line of a metrics file."""

    number: int  # from 1
    text: bytes
    content: dict[str, Any] | None  # None if it is not a JSON object with a step


class Kept(NamedTuple):
    """What a checkpoint keeps of the metrics."""

    sha256: str | None = None  # of the file
    waiting: Sequence[str] = ()  # lines that are not in it yet


class Metrics:
    """Appends to a file of JSON lines, each with a step, and waits for the disk about once a second.

    A line that did not reach the disk belongs to a step that a resumed run does again. On a full disk lines wait in
    memory until there is room, and in the checkpoints, so that a resumed run has them. The file stays open: if it is
    removed or replaced, the run puts it back.
    """

    def __init__(self, path: Path, step: int = 0, seconds: float = 1.0, kept: Kept | None = None):
        """Begin after `step`: lines of later steps are dropped, and damaged ones moved to a file beside this one.

        Args:
            path: The file.
            step: The last step to keep.
            seconds: How long lines may wait before they are written.
            kept: What `to_keep` returned when the checkpoint of this step was written.
        """
        self.path = path
        self._seconds = seconds
        self._written = time.monotonic()
        self._waiting: list[str] = []
        kept = kept or Kept()
        waiting = [line.encode() for line in kept.waiting]
        lines = [line for line in read_lines(path) if line.text + b"\n" not in waiting]
        damaged = [line for line in lines if line.content is None]
        past = [line for line in lines if line.content is not None and line.content["step"] <= step]
        content = b"".join(line.text + b"\n" for line in past)
        if damaged or kept.sha256 not in (None, hashlib.sha256(content).hexdigest()):
            what = (
                f"{path} is not as it was at step {step}, when the checkpoint was written: lines were changed, added "
                "or removed since."
            )
            aside = path.with_name(f"{path.name}.damaged")
            stay = {line.number for line in past}
            moved = b"".join(line.text + b"\n" for line in lines if line.number not in stay)
            if moved:
                with open(
                    aside, "ab+", buffering=0
                ) as file:  # lines of later steps, too: the step may be what is wrong
                    append_lines(file, moved)
            where = f"; others are now in {aside.name}." if moved else "."
            _warn(f"{_name_lines(path, damaged) if damaged else what} Lines up to step {step} stay as they are{where}")
        content += b"".join(waiting)
        write_whole(path, content)
        self._open(content)

    def _open(self, content: bytes) -> None:
        self._file = open(self.path, "r+b", buffering=0)  # noqa: SIM115 - closed by `close`
        self._sum = hashlib.sha256(content)

    def add(self, **numbers: Any) -> None:
        self._waiting.append(json.dumps(plain(numbers), allow_nan=False) + "\n")

    @property
    def due(self) -> bool:
        """Whether lines have waited long enough to be written."""
        return time.monotonic() - self._written > self._seconds

    def flush(self) -> bool:
        """Write everything so far to the disk; return whether it is there. If not, a warning says why."""
        self._written = time.monotonic()
        if not self._waiting:
            return True
        try:
            self._put_back()
            self._sum.update(append_lines(self._file, "".join(self._waiting).encode()))
        except OSError as error:
            _warn(f"{self.path} could not be written ({error.strerror}); {len(self._waiting)} lines wait for room.")
            return False
        self._waiting.clear()
        return True

    def to_keep(self) -> Kept:
        return Kept(self._sum.hexdigest(), tuple(self._waiting))

    def close(self) -> None:
        self._file.close()

    def _put_back(self) -> None:
        """Write the file once more, from the one that is open, if it was removed or replaced."""
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno())):
                return
        except FileNotFoundError:
            done = "was removed during the run, and is written again"
        else:
            aside = self.path.with_name(f"{self.path.name}.replaced")
            os.replace(self.path, aside)
            done = f"was replaced during the run. What took its place is now {aside.name}, and it is written again"
        self._file.seek(0)
        content = self._file.read() or b""
        write_whole(self.path, content)
        self._file.close()
        self._open(content)
        _warn(f"{self.path} {done}.")


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a metrics file, damaged ones too, without a last one that a kill has cut short."""
    try:
        *whole, last = read_regular(path).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from None
    lines = [Line(number, text, _parse(text)) for number, text in enumerate(whole, 1) if text.strip()]
    end = Line(len(whole) + 1, last, _parse(last))
    return lines if end.content is None else [*lines, end]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file. Damaged ones are left out and named in a warning.

    A last line that a kill has cut short is left out quietly: a resumed run writes it again.
    """
    lines = read_lines(path)
    damaged = [line for line in lines if line.content is None]
    if damaged:
        _warn(f"{_name_lines(path, damaged)} They are left out here.")
    return [line.content for line in lines if line.content is not None]


def _parse(text: bytes) -> dict[str, Any] | None:
    """Return the object that a line holds, or None if it is not one with a step."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, or not even text
        return None
    step = content.get("step") if isinstance(content, dict) else None
    return content if isinstance(step, int) and not isinstance(step, bool) else None


def _name_lines(path: Path, lines: list[Line]) -> str:
    """Return the beginning of a sentence on damaged lines."""
    numbers = ", ".join(str(line.number) for line in lines[:10]) + (", …" if len(lines) > 10 else "")
    return f"{path} is damaged: {len(lines)} of its lines cannot be read (number {numbers})."


def _warn(message: str) -> None:
    warnings.warn(message, CheckpointWarning, stacklevel=3)


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
