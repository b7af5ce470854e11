"""metrics.jsonl of a run: one JSON line per step and per evaluation, none of them twice."""

import hashlib
import json
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adptnet._io.files import append_lines, read_regular, write_atomic
from adptnet._io.json_values import to_json_value
from adptnet.errors import CheckpointError

from .checkpoint_store import CheckpointWarning

__all__ = ["MetricsFile", "MetricsState", "read_lines", "read_metrics"]


class Line(NamedTuple):
    """A line of a metrics file."""

    number: int  # from 1
    text: bytes
    content: dict[str, Any] | None  # None if it is not a JSON object with a step


class MetricsState(NamedTuple):
    """The state of a metrics file that a checkpoint stores."""

    sha256: str | None = None  # of the file
    waiting: Sequence[str] = ()  # lines that are not in the file yet


class MetricsFile:
    """A file of JSON lines, each with a step, to which lines are appended about once a second.

    A line that did not reach the disk belongs to a step that a resumed run repeats. On a full disk lines wait in memory
    until there is room, and in the checkpoints, so that a resumed run has them. The file stays open: if it is removed
    or replaced, it is written again.
    """

    def __init__(self, path: Path, step: int = 0, seconds: float = 1.0, state: MetricsState | None = None):
        """Continue after `step`: drop the lines of later steps and move damaged ones to a file beside this one.

        Args:
            path: The file.
            step: The last step to keep.
            seconds: The longest time that lines wait before they are written.
            state: The value of `get_state` when the checkpoint of this step was written.
        """
        self.path = path
        self._seconds = seconds
        self._written = time.monotonic()
        self._waiting: list[str] = []
        state = state or MetricsState()
        waiting = [line.encode() for line in state.waiting]
        lines = [line for line in read_lines(path) if line.text + b"\n" not in waiting]
        damaged = [line for line in lines if line.content is None]
        past = [line for line in lines if line.content is not None and line.content["step"] <= step]
        content = b"".join(line.text + b"\n" for line in past)
        if damaged or state.sha256 not in (None, hashlib.sha256(content).hexdigest()):
            change = (
                f"{path} is not as it was at step {step}, when the checkpoint was written: lines were changed, added "
                "or removed since then."
            )
            aside = path.with_name(f"{path.name}.damaged")
            stay = {line.number for line in past}
            moved = b"".join(line.text + b"\n" for line in lines if line.number not in stay)
            if moved:  # with the lines of later steps, since the step may be what is damaged
                with open(aside, "ab+", buffering=0) as file:
                    append_lines(file, moved)
            what = _describe_damage(path, damaged) if damaged else change
            where = f"; others are now in {aside.name}." if moved else "."
            _warn(f"{what} Lines up to step {step} stay as they are{where}")
        content += b"".join(waiting)
        _sum_path(path).unlink(missing_ok=True)
        write_atomic(path, content)
        self._open(content)

    def _open(self, content: bytes) -> None:
        self._file = open(self.path, "r+b", buffering=0)  # noqa: SIM115 - closed by `close`
        self._sum = hashlib.sha256(content)

    def add(self, **numbers: Any) -> None:
        """Add a line, which must have a `step`. It is written by the next `flush`.

        Args:
            **numbers: Values of the line by name, among them `step`.
        """
        self._waiting.append(json.dumps(to_json_value(numbers), allow_nan=False) + "\n")

    @property
    def is_due(self) -> bool:
        """Whether lines have waited long enough to be written."""
        return time.monotonic() - self._written > self._seconds

    def flush(self) -> bool:
        """Write all lines to the disk and return whether that worked. If not, warn of the reason."""
        self._written = time.monotonic()
        if not self._waiting:
            return True
        try:
            self._restore_file()
            self._sum.update(append_lines(self._file, "".join(self._waiting).encode()))
        except OSError as error:
            _warn(f"{self.path} could not be written ({error.strerror}); {len(self._waiting)} lines wait for room.")
            return False
        self._waiting.clear()
        return True

    def get_state(self) -> MetricsState:
        """Return the state to store in a checkpoint."""
        return MetricsState(self._sum.hexdigest(), tuple(self._waiting))

    def write_sum(self) -> None:
        """Write the SHA-256 of the finished file beside it, as `sha256sum` does."""
        write_atomic(_sum_path(self.path), f"{self._sum.hexdigest()}  {self.path.name}\n".encode())

    def close(self) -> None:
        """Close the file, without writing pending lines."""
        self._file.close()

    def _restore_file(self) -> None:
        """Write the file again, from the one that is open, if it was removed or replaced."""
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno())):
                return
        except FileNotFoundError:
            done = "was removed during the run, and is written again"
        else:
            aside = self.path.with_name(f"{self.path.name}.replaced")
            os.replace(self.path, aside)
            done = f"was replaced during the run. The replacement is now {aside.name}, and the file is written again"
        self._file.seek(0)
        content = self._file.read() or b""
        write_atomic(self.path, content)
        self._file.close()
        self._open(content)
        _warn(f"{self.path} {done}.")


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a metrics file, damaged ones too, except an incomplete last line of a killed process.

    Args:
        path: The metrics.jsonl of a run.
    """
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
    """Return the lines of a metrics file, each as a dictionary with a `step`.

    Damaged lines are left out and reported in a warning, as is any change after the end of the run. An incomplete last
    line, left by a killed process, is left out without one, because a resumed run writes it again.

    Args:
        path: The metrics.jsonl of a run.
    """
    lines = read_lines(path)
    damaged = [line for line in lines if line.content is None]
    if damaged:
        _warn(f"{_describe_damage(path, damaged)} They are left out here.")
    elif _is_changed(path):
        _warn(f"{path} is not as it was when the run finished: its SHA-256 is not that in {_sum_path(path).name}.")
    return [line.content for line in lines if line.content is not None]


def _sum_path(path: Path) -> Path:
    """Return the path of the SHA-256 of the metrics file of a finished run."""
    return path.with_suffix(".sha256")


def _is_changed(path: Path) -> bool:
    """Return whether the metrics file of a finished run has another SHA-256 than at the end of the run."""
    try:
        expected = read_regular(_sum_path(path)).split(b" ")[0]
    except OSError:  # an unfinished run, or one from before the file existed
        return False
    return not path.exists() or hashlib.sha256(read_regular(path)).hexdigest().encode() != expected


def _parse(text: bytes) -> dict[str, Any] | None:
    """Return the object that a line holds, or None if it is not one with a step."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, or not even text
        return None
    step = content.get("step") if isinstance(content, dict) else None
    return content if isinstance(step, int) and not isinstance(step, bool) else None


def _describe_damage(path: Path, lines: list[Line]) -> str:
    """Return a sentence on damaged lines."""
    numbers = ", ".join(str(line.number) for line in lines[:10]) + (", …" if len(lines) > 10 else "")
    return f"{path} is damaged: {len(lines)} of its lines cannot be read (number {numbers})."


def _warn(message: str) -> None:
    warnings.warn(message, CheckpointWarning, stacklevel=3)
