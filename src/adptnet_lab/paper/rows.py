"""Storage of rows: one JSON line per finished point, flushed to disk before the next point starts.

    ROWS/SCALE/fig-time_ablation.jsonl              rows of one machine
    ROWS/SCALE/fig-time_ablation.jsonl.gz           the same, compressed; read only
    ROWS/SCALE/fig-time_ablation.2-of-4.jsonl       rows of one shard of several
    ROWS/SCALE/unfinished/                          checkpoints of points in progress, which may take hours
    ROWS/SCALE/networks/                            trained networks, with --keep-networks; rows name their file

All files of a result are read together, so shards are merged by copying them into one folder. If two rows belong to
the same point, the first counts. A line that is not JSON is skipped with a warning, and its point runs again. The last
line of a file may be incomplete, because a process was killed or is writing; it is skipped without a warning.
"""

import contextlib
import gzip
import hashlib
import io
import json
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adptnet._io.files import append_lines, read_regular
from adptnet._io.json_values import from_json_value, to_json_value
from adptnet._io.untrusted import LimitedReader, parse_json

from .recipe import SCALES, GridPoint, Row, Rows, Scale, Subset, change_settings, is_in_subset
from .registry import PaperResult, ReproductionError, load_results

__all__ = ["DEFAULT_FOLDER", "RowStore", "RowWarning", "StoredRows", "open_row_store", "point_key", "to_row_value"]

DEFAULT_FOLDER = Path("runs/paper")  # where rows are written unless another folder is given
COMMITTED_FOLDERS = (Path("results"), Path(__file__).parents[3] / "results")  # relative to a clone, and of this clone

_DIGITS = 9  # the rest is rounding error
_FIELDS = {"label": str, "scale": str, "settings": dict, "seed": int, "recipe": int, "numbers": dict, "time": dict}


def point_key(point: GridPoint) -> str:
    """Return the text that identifies a point among those of its result, scale and recipe version.

    Args:
        point: The point.
    """
    return json.dumps([to_row_value(point.settings), point.seed], sort_keys=True)


def to_row_value(value: Any) -> Any:
    """Return a value as JSON can hold it: tensors as lists, floats to nine digits, infinities and NaN as text.

    Args:
        value: Numbers, text, tensors, and mappings and lists of them.
    """
    return to_json_value(value, digits=_DIGITS)


class RowWarning(UserWarning):
    """Lines of a file of rows that cannot be read."""


class StoredRows(NamedTuple):
    """The finished points of a result at one scale.

    Attributes:
        rows: Their rows, in the order of the points.
        left: Number of points without a row.
        gaps: Number of settings without a row for any seed. A test needs every setting, not every seed.
    """

    rows: Rows
    left: int
    gaps: int


class RowStore:
    """A folder of rows.

    Args:
        folder: The folder.
        shard: Index of this shard (1 for the first) and the number of shards.
        changes: Settings that replace those of every point, from `--set`.
    """

    def __init__(self, folder: Path, shard: tuple[int, int] = (1, 1), changes: Mapping[str, Any] | None = None):
        self.folder = folder
        self.shard = shard
        self.changes = changes or {}

    def points(self, result: PaperResult, scale: Scale) -> list[GridPoint]:
        """Return the points of a result.

        Args:
            result: The result.
            scale: The scale.
        """
        return change_settings(result.recipe.points(scale), self.changes)

    def path(self, result: PaperResult, scale: Scale) -> Path:
        """Return the file that this process appends to.

        Args:
            result: The result.
            scale: The scale.
        """
        number, count = self.shard
        part = f".{number}-of-{count}" if count > 1 else ""
        return self.folder / scale / f"{_file_stem(result.name)}{part}.jsonl"

    @property
    def is_empty(self) -> bool:
        """Whether the folder holds no file of rows, of any result and scale."""
        return not any(path for scale in SCALES for path in self.folder.glob(f"{scale}/*.jsonl*"))

    def prepare(self, scale: Scale) -> None:
        """Create the folder of a scale and check that it is writable, before hours of work rather than after.

        Args:
            scale: The scale.

        Raises:
            ReproductionError: The folder cannot be written to.
        """
        try:
            (self.folder / scale).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder / scale).close()
        except OSError as error:
            raise ReproductionError(
                f"rows cannot be written to {self.folder / scale}: {error.strerror}. Choose another folder with --rows."
            ) from None

    def add(self, result: PaperResult, scale: Scale, row: Mapping[str, Any]) -> None:
        """Append one row and wait until it is on disk.

        Args:
            result: The result.
            scale: The scale.
            row: The fields of the row.
        """
        path = self.path(result, scale)
        path.parent.mkdir(parents=True, exist_ok=True)
        line = (json.dumps(to_row_value(row), allow_nan=False) + "\n").encode()
        with path.open("ab+", buffering=0) as file:
            with contextlib.suppress(OSError, ImportError):  # without locks (or on Windows) each shard has its own file
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            append_lines(file, line)

    def checkpoint_folder(self, result: PaperResult, scale: Scale, point: GridPoint) -> Path:
        """Return the folder for the checkpoints of a point in progress.

        Args:
            result: The result.
            scale: The scale.
            point: The point.
        """
        return self.folder / scale / "unfinished" / _make_hash(result, point)

    def network_file(self, result: PaperResult, scale: Scale, point: GridPoint) -> Path:
        """Return the file of the trained network of a point, for `adptnet.load`.

        Args:
            result: The result.
            scale: The scale.
            point: The point.
        """
        return self.folder / scale / "networks" / f"{_file_stem(result.name)}-{_make_hash(result, point)}.safetensors"

    def delete_checkpoints(self, result: PaperResult, scale: Scale, point: GridPoint) -> None:
        """Delete the checkpoint folder of a point, if there is one.

        Args:
            result: The result.
            scale: The scale.
            point: The point.
        """
        folder = self.checkpoint_folder(result, scale, point)
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # not there, or not empty
            folder.parent.rmdir()

    def read_lines(self, result: PaperResult, scale: Scale) -> dict[str, dict[str, Any]]:
        """Return the stored rows of the current recipe version, by the key of their point.

        Args:
            result: The result.
            scale: The scale.

        Raises:
            ReproductionError: A file cannot be read, or contains a line that is not a row of this result and scale.
        """
        rows: dict[str, dict[str, Any]] = {}
        source = result.recipe.source or result.name
        for name in (source, *result.recipe.borrows):
            version = load_results()[name].recipe.version
            for place, row in self._read_files(name, scale):
                _check_row(row, name, scale, place)
                if row["recipe"] == version:
                    rows.setdefault(json.dumps([row["settings"], row["seed"]], sort_keys=True), row)
        return rows

    def _read_files(self, name: str, scale: Scale) -> Iterator[tuple[str, Any]]:
        """Yield the lines of every file of a result, each with its position."""
        names = (f"{_file_stem(name)}{part}.jsonl{packed}" for part in ("", ".*-of-*") for packed in ("", ".gz"))
        for path in sorted(path for pattern in names for path in (self.folder / scale).glob(pattern)):
            for number, row in _complete_lines(path):
                yield f"{path}, line {number}", row

    def read_rows(self, result: PaperResult, scale: Scale, subset: Subset | None = None) -> StoredRows:
        """Read the rows of a result.

        Args:
            result: The result.
            scale: The scale.
            subset: The points to read; all of them if not given.
        """
        lines = self.read_lines(result, scale)
        points = [point for point in self.points(result, scale) if is_in_subset(point.settings, subset or {})]
        if result.recipe.rank is not None:
            points = _highest_complete(points, result.recipe.rank, lines)
        done = [lines[point_key(point)] for point in points if point_key(point) in lines]
        rows = [
            Row(row["settings"], row["seed"], from_json_value(row["numbers"]), from_json_value(row["time"]), scale)
            for row in done
        ]
        return StoredRows(Rows(rows), len(points) - len(done), len(_find_gaps(points, lines)))


def open_row_store(folder: Path | None, changes: Mapping[str, Any] | None = None) -> RowStore:
    """Return the rows to read.

    Args:
        folder: Their folder. If not given: the user's own rows in `DEFAULT_FOLDER` if there are any, otherwise the rows
            that are committed to the repository.
        changes: Settings that replace those of every point.
    """
    if folder is not None:
        return RowStore(folder, changes=changes)
    stores = [RowStore(folder, changes=changes) for folder in (DEFAULT_FOLDER, *COMMITTED_FOLDERS)]
    return next((store for store in stores if not store.is_empty), stores[0])


def _find_gaps(points: Sequence[GridPoint], lines: Collection[str]) -> set[str]:
    """Return the settings, as text, for which no seed has a row."""
    seen: dict[str, bool] = {}
    for point in points:
        settings = json.dumps(to_row_value(point.settings), sort_keys=True)
        seen[settings] = seen.get(settings, False) or point_key(point) in lines
    return {settings for settings, found in seen.items() if not found}


def _highest_complete(
    points: Sequence[GridPoint], rank: Callable[[Mapping[str, Any]], Any], lines: Collection[str]
) -> list[GridPoint]:
    """Return the points of the highest rank whose settings all have a row, or else of the rank that lacks fewest."""
    ranks = sorted({rank(point.settings) for point in points}, reverse=True)
    groups = [[point for point in points if rank(point.settings) == each] for each in ranks]
    return min(groups, key=lambda group: len(_find_gaps(group, lines)), default=[])


def _complete_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the content of each line of JSON with its number; warn of other lines, except an incomplete last one."""
    try:
        content = read_regular(path)
        if path.suffix == ".gz":
            content = _unpack(content)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ReproductionError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    damaged = []
    for number, text in enumerate(content.splitlines(keepends=True), 1):
        try:
            row = parse_json(text)
        except ValueError:
            if text.strip() and text.endswith(b"\n"):
                damaged.append(number)
            continue
        yield number, row
    if damaged:
        numbers = ", ".join(map(str, damaged[:10])) + (", …" if len(damaged) > 10 else "")
        warnings.warn(
            f"{path}: {len(damaged)} lines are not JSON and are skipped (number {numbers}). Their points run again. "
            "Delete these lines.",
            RowWarning,
            stacklevel=2,
        )


def _unpack(content: bytes) -> bytes:
    """Decompress a gzip file, up to the size limit for files of unknown origin."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
        return io.BufferedReader(LimitedReader(stream, len(content))).read()


def _check_row(row: Any, label: str, scale: Scale, place: str) -> None:
    """Raise ReproductionError if `row` is not a row of the result and scale that its file is for."""
    if not isinstance(row, dict):
        raise ReproductionError(f"{place}: not a row, which is a JSON object. Delete the line.")
    wrong = [n for n, kind in _FIELDS.items() if not isinstance(row.get(n), kind) or isinstance(row[n], bool)]
    if wrong:
        raise ReproductionError(f"{place}: not a row of `adptnet reproduce`: no {', '.join(wrong)}. Delete the line.")
    if (row["label"], row["scale"]) != (label, scale):
        raise ReproductionError(
            f"{place}: a row of {row['label']} at the scale {row['scale']}, but the file is for {label} at the scale "
            f"{scale}. Keep rows in the file and folder they were written to."
        )


def _make_hash(result: PaperResult, point: GridPoint) -> str:
    """Return a short text that identifies a point of a recipe version."""
    identity = json.dumps([result.name, result.recipe.version, point_key(point)])
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _file_stem(name: str) -> str:
    return name.replace(":", "-")
