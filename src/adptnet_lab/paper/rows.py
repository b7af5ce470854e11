"""Rows: one JSON line for each finished point, on disk before the next point begins.

    ROWS/SCALE/fig-time_ablation.jsonl              of one machine
    ROWS/SCALE/fig-time_ablation.2-of-4.jsonl       of one share of several
    ROWS/SCALE/unfinished/                          checkpoints of points in progress, which may take hours

All files of a result are read together, so shares are joined by copying them into one folder; of two rows of one point
the first counts. A line that a killed process left unfinished is skipped, and its point runs again.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from adptnet._io.files import append_lines, read_regular
from adptnet._io.untrusted import parse_json

from .recipe import SCALES, Part, Point, Row, Rows, Scale, belongs
from .registry import ReproductionError, Result

__all__ = ["WRITTEN", "Shelf", "choose_shelf", "key", "plain"]

WRITTEN = Path("runs/paper")  # where rows are written unless another folder is given
SHIPPED = (Path("results"), Path(__file__).parents[3] / "results")  # in a clone: from its root, and from anywhere else

_DIGITS = 9  # more would be rounding
_SPECIAL = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_FIELDS = {"label": str, "scale": str, "settings": dict, "seed": int, "recipe": int, "numbers": dict, "time": dict}


def key(point: Point) -> str:
    """What tells a point from the others of its result, scale and recipe."""
    return json.dumps([plain(point.settings), point.seed], sort_keys=True)


def plain(value: Any) -> Any:
    """Tensors as lists, numbers to nine digits, infinities and NaN as text: what JSON can hold."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else str(value)
    return value


def _read(value: Any) -> Any:
    """What `plain` wrote, with infinities as numbers again."""
    if isinstance(value, dict):
        return {name: _read(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_read(item) for item in value]
    return _SPECIAL.get(value, value) if isinstance(value, str) else value


class Shelf:
    """Where the rows of a reproduction are kept."""

    def __init__(self, folder: Path, share: tuple[int, int] = (1, 1)):
        self.folder = folder
        self.share = share

    def path(self, result: Result, scale: Scale) -> Path:
        """The file that this process adds to."""
        number, count = self.share
        part = f".{number}-of-{count}" if count > 1 else ""
        return self.folder / scale / f"{_stem(result)}{part}.jsonl"

    @property
    def empty(self) -> bool:
        """Whether there is no file of rows, of any result and scale."""
        return not any(path for scale in SCALES for path in self.folder.glob(f"{scale}/*.jsonl"))

    def prepare(self, scale: Scale) -> None:
        """Makes the folder of a scale and writes a file there: an error comes before hours of work, not after."""
        try:
            (self.folder / scale).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder / scale).close()
        except OSError as error:
            raise ReproductionError(
                f"rows cannot be written to {self.folder / scale}: {error.strerror}. Choose another folder by --rows."
            ) from None

    def add(self, result: Result, scale: Scale, row: Mapping[str, Any]) -> None:
        """Appends one line and waits until it is on disk."""
        path = self.path(result, scale)
        path.parent.mkdir(parents=True, exist_ok=True)
        line = (json.dumps(plain(row), allow_nan=False) + "\n").encode()
        with path.open("ab+", buffering=0) as file:
            with contextlib.suppress(OSError):  # a file system without locks: shares have files of their own
                fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            append_lines(file, line)

    def unfinished(self, result: Result, scale: Scale, point: Point) -> Path:
        """A folder for what a point has done so far."""
        told = json.dumps([result.name, result.recipe.version, key(point)])
        return self.folder / scale / "unfinished" / hashlib.sha256(told.encode()).hexdigest()[:16]

    def forget(self, result: Result, scale: Scale, point: Point) -> None:
        """Takes that folder away, if there is one."""
        shutil.rmtree(self.unfinished(result, scale, point), ignore_errors=True)
        with contextlib.suppress(OSError):  # not there, or not empty
            self.unfinished(result, scale, point).parent.rmdir()

    def lines(self, result: Result, scale: Scale) -> dict[str, dict[str, Any]]:
        """The whole rows of the current recipe, by the key of their point."""
        source = result.recipe.source or result.name
        found: dict[str, dict[str, Any]] = {}
        folder = self.folder / scale
        stem = source.replace(":", "-")
        for path in sorted([*folder.glob(f"{stem}.jsonl"), *folder.glob(f"{stem}.*-of-*.jsonl")]):
            for place, row in _whole_lines(path):
                _check(row, source, scale, f"{path}, line {place}")
                if row["recipe"] == result.recipe.version:
                    found.setdefault(json.dumps([row["settings"], row["seed"]], sort_keys=True), row)
        return found

    def rows(self, result: Result, scale: Scale, part: Part | None = None) -> tuple[Rows, int]:
        """The rows of the points there are at this scale, all or those of `part`, and how many points have none."""
        lines = self.lines(result, scale)
        points = [point for point in result.recipe.points(scale) if belongs(point.settings, part or {})]
        if result.recipe.largest is not None:
            points = _largest(points, result.recipe.largest, lines)
        done = [lines[key(point)] for point in points if key(point) in lines]
        rows = [Row(row["settings"], row["seed"], _read(row["numbers"]), _read(row["time"]), scale) for row in done]
        return Rows(rows), len(points) - len(done)


def choose_shelf(folder: Path | None) -> Shelf:
    """Return the rows to read: those of `folder`; otherwise one's own if there are any, or those of the repository."""
    if folder is not None:
        return Shelf(folder)
    shelves = [Shelf(place) for place in (WRITTEN, *SHIPPED)]
    return next((shelf for shelf in shelves if not shelf.empty), shelves[0])


def _largest(points: Sequence[Point], setting: str, lines: Collection[str]) -> list[Point]:
    """Those with the largest value of a setting that all have a line; with the fewest missing if there is none."""
    values = sorted({point.settings[setting] for point in points}, reverse=True)
    groups = [[point for point in points if point.settings[setting] == value] for value in values]
    return min(groups, key=lambda group: sum(key(point) not in lines for point in group), default=[])


def _whole_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """What the lines of a file say, by number, without those that were cut off."""
    try:
        lines = read_regular(path).splitlines()
    except OSError as error:
        raise ReproductionError(f"{path} cannot be read: {error.strerror}.") from None
    for number, text in enumerate(lines, 1):
        try:
            row = parse_json(text)
        except ValueError:
            continue
        yield number, row


def _check(row: Any, label: str, scale: Scale, place: str) -> None:
    """Raises ReproductionError if this is not a row of the result and scale that its file is for."""
    if not isinstance(row, dict):
        raise ReproductionError(f"{place}: not a row, which is a JSON object. Take the line out.")
    wrong = [n for n, kind in _FIELDS.items() if not isinstance(row.get(n), kind) or isinstance(row[n], bool)]
    if wrong:
        raise ReproductionError(f"{place}: not a row of `adptnet reproduce`: no {', '.join(wrong)}. Take the line out.")
    if (row["label"], row["scale"]) != (label, scale):
        raise ReproductionError(
            f"{place}: a row of {row['label']} at the scale {row['scale']}, but the file is for {label} at the scale "
            f"{scale}. Keep rows in the file and folder they were written to."
        )


def _stem(result: Result) -> str:
    return result.name.replace(":", "-")
