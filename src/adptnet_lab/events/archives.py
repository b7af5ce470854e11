"""Recordings in an npz file: frames of counts, or raw events of an event camera."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from adptnet._io.untrusted import read_npz
from adptnet.errors import InputError

from .aer import PixelEvents
from .dataset import Example
from .stream import Events, to_int64

__all__ = ["FrameFile", "PixelFile", "open_archive"]

EVENTS = ("x", "y", "p", "t_us", "lengths")
OPTIONAL = ("speaker", "is_test")


class FrameFile(Dataset[Example]):
    """Frames of an npz file: `frames` (recordings, steps, features) uint8, `label`, optional `speaker` and `is_test`.

    Args:
        path: The file, for error messages.
        arrays: Its arrays by name.
    """

    def __init__(self, path: Path, arrays: dict[str, npt.NDArray[Any]]):
        self.path = path
        self.frames = arrays["frames"]
        if self.frames.dtype != np.uint8 or self.frames.ndim != 3 or not self.frames.size:
            raise InputError(
                f"{path}: frames are {self.frames.dtype} of shape {self.frames.shape}; they must be counts, uint8 of "
                "shape (recordings, steps, features). Save frames.astype(np.uint8)."
            )
        self.labels, self.speakers, self.is_test = _read_metadata(path, arrays, len(self.frames))
        filled = np.asarray(self.frames.any(-1))
        last = self.frames.shape[1] - filled[:, ::-1].argmax(-1)  # one past the last non-empty frame
        self.lengths = np.where(filled.any(-1), last, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Example:
        return Example(torch.from_numpy(self.frames[index]), int(self.labels[index]), int(self.lengths[index]))


class PixelFile:
    """Events of a camera in an npz file: `x`, `y`, `p`, `t_us` of all recordings, concatenated; `lengths` and `label`.

    `file[i]` is (events, label), with width · height · 2 units.

    Args:
        path: The file, for error messages and caches.
        arrays: Its arrays by name.
        width: Columns of the camera.
        height: Rows of the camera.
    """

    def __init__(self, path: Path, arrays: dict[str, npt.NDArray[Any]], width: int = 34, height: int = 34):
        self.path = path
        self.width, self.height = width, height
        x, y, p, t, lengths = (arrays[name] for name in EVENTS)
        lengths = to_int64(lengths, f"{path}: lengths")
        total = sum(lengths.ravel().tolist())  # Python integers, which do not overflow
        if not x.shape == y.shape == p.shape == t.shape == (total,) or lengths.ndim != 1:
            raise InputError(
                f"{path}: {x.shape} x, {y.shape} y, {p.shape} p and {t.shape} t_us, and {lengths.shape} lengths that "
                f"sum to {total}; all must agree."
            )
        self._events = (x, y, p, t)
        self._ends = np.concatenate(([0], np.cumsum(lengths)))
        self.labels, self.speakers, self.is_test = _read_metadata(path, arrays, len(lengths))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Events, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no recording {index}: {self.path} has {len(self)}.")
        index %= len(self)
        own = slice(self._ends[index], self._ends[index + 1])
        pixels = PixelEvents(*(part[own] for part in self._events))
        return pixels.to_events(self.width, self.height), int(self.labels[index])


def open_archive(path: str | Path) -> FrameFile | PixelFile:
    """Return the recordings of an npz file; the names of its arrays determine the kind. Nothing is unpickled.

    Args:
        path: The file.

    Raises:
        InputError: No npz file, damaged, of another layout, or too large when unpacked (`adptnet._io.untrusted`).
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no file {path}.")
    if not zipfile.is_zipfile(path):
        raise InputError(
            f"{path} is not an npz file, or it is truncated. Save it with np.savez(path, frames=..., label=...)."
        )
    try:
        arrays, present = read_npz(path, ("frames", *EVENTS, "label", *OPTIONAL))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}. It may be truncated; download it again.") from None
    kind = next((names for names in (("frames",), EVENTS) if set(names) <= set(arrays)), None)
    if kind is None or "label" not in arrays:
        raise InputError(
            f"{path} has the arrays {', '.join(present) or 'none'}; it must have label, and frames or "
            f"{', '.join(EVENTS)}. Save it with np.savez(path, frames=..., label=...)."
        )
    return FrameFile(path, arrays) if kind == ("frames",) else PixelFile(path, arrays)


def _read_metadata(
    path: Path, arrays: dict[str, npt.NDArray[Any]], count: int
) -> tuple[npt.NDArray[np.int64], Any, Any]:
    """Return labels, speakers and test flags, one per recording; the last two are None if absent."""
    for name in ("label", *(name for name in OPTIONAL if name in arrays)):
        if arrays[name].shape != (count,):
            raise InputError(f"{path}: {name} has shape {arrays[name].shape}; there are {count} recordings.")
        if arrays[name].dtype.kind not in "iub" and name != "label":
            raise InputError(f"{path}: {name} is {arrays[name].dtype}; it must hold integers.")
    labels = to_int64(arrays["label"], f"{path}: labels")
    if not labels.size:
        raise InputError(f"{path} holds no recordings.")
    speakers, is_test = (arrays.get(name) for name in OPTIONAL)
    return labels, speakers, None if is_test is None else is_test.astype(bool)
