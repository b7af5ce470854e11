"""Recordings as a dataset of frames, and their collation into batches."""

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

from adptnet._io.files import replace_file, write_atomic
from adptnet._io.untrusted import parse_json
from adptnet.errors import InputError

from .augment import Augmentation
from .stream import Bins, Events

__all__ = ["EventBatch", "EventDataset", "collate"]


class Example(NamedTuple):
    """One recording."""

    frames: Tensor  # (steps, features) uint8
    label: int
    length: int  # frames up to the last event


class EventBatch(NamedTuple):
    """A batch of recordings."""

    frames: Tensor  # (batch, steps, features) float32
    labels: Tensor  # (batch,) int64
    lengths: Tensor  # (batch,) int64, frames up to the last event
    mask: Tensor  # (batch, steps) bool, True before the end


class EventDataset(Dataset[Example]):
    """Dataset of the frames of recordings.

    Args:
        recordings: A `SpikeFile`, or any sequence of (events, label).
        bins: How events are binned into frames.
        augmentations: Applied in order, for training; none by default.
        seed: Seed of the augmentations, together with the index of the recording and the epoch (`set_epoch`).
        cache: A file, ending in .npy, that keeps the frames of all recordings: written at the first use, then read.
            Cannot be combined with augmentations.
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
            raise InputError("cache= stores fixed frames; augmentations= change them. Drop one of the two.")
        if cache is not None and Path(cache).suffix != ".npy":
            raise InputError(f"cache={str(cache)!r}: must be a NumPy file. Pass a name that ends in .npy.")
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
            self._prepare_cache(self.cache)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which changes the random augmentations.

        Args:
            epoch: Number of the epoch.
        """
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.recordings)

    def __getitem__(self, index: int) -> Example:
        if self.cache is not None:
            return self._read_cached(index)
        events, label = self.recordings[index]
        if self.augmentations:
            generator = np.random.default_rng([self.seed, self.epoch, index % len(self)])
            for change in self.augmentations:
                events = change(events, self.bins.channels, generator)
        return Example(torch.from_numpy(self._bin(events, index)), label, self.bins.length(events))

    def _bin(self, events: Events, index: int) -> npt.NDArray[np.uint8]:
        try:
            return self.bins.frames(events)
        except InputError as error:
            raise InputError(f"recording {index}: {error}") from None

    def _read_cached(self, index: int) -> Example:
        assert self.cache is not None
        if self._frames is None:
            try:
                self._frames = np.load(self.cache, mmap_mode="r")
            except Exception as error:  # numpy also lets errors of ast and struct through for a damaged header
                raise InputError(f"{self.cache} cannot be read: {error}. Delete it; it will be made again.") from None
        assert self._frames is not None
        expected = (len(self), self.bins.steps, self.bins.features)
        if self._frames.dtype != np.uint8 or self._frames.shape != expected:
            found, self._frames = f"{self._frames.dtype} of shape {self._frames.shape}", None
            raise InputError(f"{self.cache} holds {found}, not uint8 of {expected}. Delete it; it will be made again.")
        return Example(torch.from_numpy(self._frames[index].copy()), self._labels[index], self._lengths[index])

    def _prepare_cache(self, cache: Path) -> None:
        metadata_path = cache.with_name(cache.name + ".json")
        source = {"bins": self.bins.to_json(), "recordings": len(self), "file": _fingerprint(self.recordings)}
        if cache.exists() and metadata_path.exists():
            metadata = _read_metadata(metadata_path, len(self))
            if metadata["source"] != source:
                raise InputError(
                    f"{cache} holds frames of other recordings or bins. Delete it and {metadata_path.name}, or pass "
                    "another name."
                )
        else:
            labels, lengths = [], []
            with replace_file(cache) as draft:
                shape = (len(self), self.bins.steps, self.bins.features)
                frames = np.lib.format.open_memmap(draft, mode="w+", dtype=np.uint8, shape=shape)
                for i in range(len(self)):
                    events, label = self.recordings[i]
                    frames[i] = self._bin(events, i)
                    labels.append(int(label))
                    lengths.append(self.bins.length(events))
                frames.flush()
                del frames
            metadata = {"source": source, "labels": labels, "lengths": lengths}
            write_atomic(metadata_path, json.dumps(metadata).encode())
        self._labels, self._lengths = metadata["labels"], metadata["lengths"]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_frames": None}


def _read_metadata(metadata_path: Path, count: int) -> Any:
    """Return the metadata of a cache: its source, and a label and a length for each of `count` recordings."""
    try:
        metadata = parse_json(metadata_path.read_bytes())
    except (ValueError, OSError):
        metadata = None
    if not isinstance(metadata, dict) or "source" not in metadata:
        raise InputError(f"{metadata_path} cannot be read. Delete it; it will be made again.")
    for name in ("labels", "lengths"):
        values = metadata.get(name)
        if not isinstance(values, list) or len(values) != count or not all(type(v) is int and v >= 0 for v in values):
            raise InputError(f"{metadata_path} has no {name} of {count} recordings. Delete it; it will be made again.")
    return metadata


def _fingerprint(recordings: Any) -> list[Any]:
    """Return what identifies recordings: name, size and date of their file, or a digest of those in memory."""
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
    """Collate examples into a batch, for `DataLoader(dataset, collate_fn=events.collate)`.

    Args:
        examples: Items of an `EventDataset`.
    """
    frames = torch.stack([example.frames for example in examples]).float()
    lengths = torch.tensor([example.length for example in examples])
    mask = torch.arange(frames.shape[1]) < lengths.unsqueeze(-1)
    return EventBatch(frames, torch.tensor([example.label for example in examples]), lengths, mask)
