"""Recordings as a dataset of frames, and how they become a batch."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from adptnet._io.files import drafted, write_whole
from adptnet._io.untrusted import parse_json
from adptnet.errors import InputError

from .augment import Augmentation
from .stream import Bins, Events

__all__ = ["EventBatch", "EventDataset", "collate"]


class Example(NamedTuple):
    """One recording."""

    frames: Tensor  # (steps, features) uint8
    label: int
    length: int  # frames up to its last event


class EventBatch(NamedTuple):
    """Recordings side by side."""

    frames: Tensor  # (batch, steps, features) float32
    labels: Tensor  # (batch,) int64
    lengths: Tensor  # (batch,) int64, frames up to each last event
    mask: Tensor  # (batch, steps) bool, before the end


class EventDataset(Dataset[Example]):
    """Frames of recordings: a `SpikeFile`, or any sequence of (events, label).

    Args:
        recordings: Where they come from.
        bins: How they become frames.
        augmentations: Applied in order, for training; none by default.
        seed: Of the augmentations, with the recording's number and the `epoch` that `set_epoch` says.
        cache: A file, ending in .npy, for the frames of all recordings: made at the first use, then read. Not with
            augmentations.
    """

    def __init__(
        self,
        recordings: Sequence[tuple[Events, int]] | Any,
        bins: Bins,
        *,
        augmentations: Sequence[Augmentation] = (),
        seed: int = 0,
        cache: str | Path | None = None,
    ):
        if cache is not None and augmentations:
            raise InputError("cache= keeps the same frames for good; augmentations= change them. Drop one of the two.")
        if cache is not None and Path(cache).suffix != ".npy":
            raise InputError(f"cache={str(cache)!r}: the frames are a NumPy file. Pass a name that ends in .npy.")
        if cache is not None and not Path(cache).parent.is_dir():
            raise InputError(f"cache={str(cache)!r}: there is no folder {Path(cache).parent}. Make it first.")
        self.recordings = recordings
        self.bins = bins
        self.augmentations = tuple(augmentations)
        self.seed = seed
        self.epoch = 0
        self.cache = None if cache is None else Path(cache)
        self._frames: np.memmap[Any, np.dtype[np.uint8]] | None = None
        if self.cache is not None:
            self._prepare(self.cache)

    def set_epoch(self, epoch: int) -> None:
        """Draws other augmentations."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.recordings)

    def __getitem__(self, index: int) -> Example:
        if self.cache is not None:
            return self._cached(index)
        events, label = self.recordings[index]
        if self.augmentations:
            generator = np.random.default_rng([self.seed, self.epoch, index % len(self)])
            for change in self.augmentations:
                events = change(events, self.bins.channels, generator)
        return Example(torch.from_numpy(self._counted(events, index)), label, self.bins.length(events))

    def _counted(self, events: Events, index: int) -> npt.NDArray[np.uint8]:
        try:
            return self.bins.frames(events)
        except InputError as error:
            raise InputError(f"recording {index}: {error}") from None

    def _cached(self, index: int) -> Example:
        assert self.cache is not None
        if self._frames is None:
            try:
                self._frames = np.load(self.cache, mmap_mode="r")
            except Exception as error:  # of a damaged header numpy raises what ast and struct do, too
                raise InputError(f"{self.cache} cannot be read: {error}. Delete it; it is made again.") from None
        assert self._frames is not None
        expected = (len(self), self.bins.steps, self.bins.features)
        if self._frames.dtype != np.uint8 or self._frames.shape != expected:
            found, self._frames = f"{self._frames.dtype} of shape {self._frames.shape}", None
            raise InputError(f"{self.cache} holds {found}, not uint8 of {expected}. Delete it; it is made again.")
        return Example(torch.from_numpy(self._frames[index].copy()), self._labels[index], self._lengths[index])

    def _prepare(self, cache: Path) -> None:
        note = cache.with_name(cache.name + ".json")
        source = {"bins": self.bins.to_json(), "recordings": len(self), "file": _fingerprint(self.recordings)}
        if cache.exists() and note.exists():
            kept = _noted(note, len(self))
            if kept["source"] != source:
                raise InputError(
                    f"{cache} holds frames of other recordings or bins. Delete both, or pass another name."
                )
        else:
            labels, lengths = [], []
            with drafted(cache) as draft:
                shape = (len(self), self.bins.steps, self.bins.features)
                frames = np.lib.format.open_memmap(draft, mode="w+", dtype=np.uint8, shape=shape)
                for i in range(len(self)):
                    events, label = self.recordings[i]
                    frames[i] = self._counted(events, i)
                    labels.append(int(label))
                    lengths.append(self.bins.length(events))
                frames.flush()
                del frames
            kept = {"source": source, "labels": labels, "lengths": lengths}
            write_whole(note, json.dumps(kept).encode())
        self._labels, self._lengths = kept["labels"], kept["lengths"]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_frames": None}


def _noted(note: Path, count: int) -> Any:
    """Return what is noted beside a cache: its source, and a label and a length for each of `count` recordings."""
    try:
        kept = parse_json(note.read_bytes())
    except (ValueError, OSError):
        kept = None
    if not isinstance(kept, dict) or "source" not in kept:
        raise InputError(f"{note} cannot be read. Delete it; it is made again.")
    for name in ("labels", "lengths"):
        values = kept.get(name)
        if not isinstance(values, list) or len(values) != count or not all(type(v) is int and v >= 0 for v in values):
            raise InputError(f"{note} has no {name} of {count} recordings. Delete it; it is made again.")
    return kept


def _fingerprint(recordings: Any) -> list[Any]:
    """What tells recordings from others: name, size and date of their file, or a digest of those in memory."""
    path = getattr(recordings, "path", None)
    if path is not None:
        status = Path(path).stat()
        return [Path(path).name, status.st_size, status.st_mtime_ns]
    digest = hashlib.sha256()
    for i in range(len(recordings)):
        events, label = recordings[i]
        digest.update(f"{len(events.times)} {label} ".encode())
        for part in events:
            digest.update(np.ascontiguousarray(part).tobytes())
    return [digest.hexdigest()]


def collate(examples: Sequence[Example]) -> EventBatch:
    """Examples as a batch: `DataLoader(dataset, collate_fn=events.collate)`."""
    frames = torch.stack([example.frames for example in examples]).float()
    lengths = torch.tensor([example.length for example in examples])
    mask = torch.arange(frames.shape[1]) < lengths.unsqueeze(-1)
    return EventBatch(frames, torch.tensor([example.label for example in examples]), lengths, mask)
