"""Classification of event recordings as frames: spoken words, or digits seen by an event camera."""

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from adptnet._io.cache import cache_folder
from adptnet.errors import DataError, IncompatibleError, InputError, SpecError
from adptnet.spec import check_fraction, check_kind, check_seed, check_size, spec

from ..events import Augmentation, Bins, EventDataset, SpikeFile, collate, find_split, open_archive
from ..events.archives import FrameFile
from ..events.dataset import Example
from .base import Batch, FiniteTask, Scores, Split
from .download import data_folders

__all__ = ["EventFrames"]

PUBLISHED: dict[str, dict[Split, Any]] = {
    "shd": {"train": "shd_train", "test": "shd_test"},
    "ssc": {"train": "ssc_train", "validation": "ssc_valid", "test": "ssc_test"},
}


@spec
class EventFrames(FiniteTask):
    """Classification of recordings from frames of event counts, with one label per recording.

    Attributes:
        path: "shd" or "ssc", whose files are searched for in the folder named by ADPTNET_DATA; or a file: an .h5 in
            their layout, or an npz with `label` and either `frames` or the events of a camera. A relative path that
            does not exist is searched for in that folder, too.
        validation_path: A separate file for validation. Without it, recordings of `path` are held out.
        test_path: A separate file for the test. Without it, `test_speakers` of `path`, or what its `is_test` marks.
        test_speakers: The speakers of `path` that are reserved for the test.
        validation: Fraction of the remaining speakers that is held out for validation, rounded up; of the recordings if
            the file names no speakers.
        split_seed: Seed of that choice.
        bins: How events are binned into frames. Frames of an npz are used unchanged.
        merge: How many frames, and how many features of a frame, are summed into one.
        masked: Mask the frames after the last event of a recording. Networks for SHD and SSC usually do not.
        augmentations: Random changes to the events of training recordings, applied in order.
        cached: Keep the frames of an event file in the cache folder (one byte per count), instead of binning the events
            at every use. Does not apply to training recordings that are augmented.
    """

    path: str = "ssc"
    validation_path: str | None = None
    test_path: str | None = None
    test_speakers: tuple[int, ...] = ()
    validation: float = 0.1
    split_seed: int = 42
    bins: Bins = Bins()
    merge: tuple[int, int] = (1, 1)
    masked: bool = True
    augmentations: tuple[Augmentation, ...] = ()
    cached: bool = True

    head: ClassVar[Literal["token", "last", "mean"]] = "mean"

    def __post_init__(self) -> None:
        if isinstance(self.augmentations, Augmentation):
            object.__setattr__(self, "augmentations", (self.augmentations,))
        for name in ("path", "validation_path", "test_path"):
            value = getattr(self, name)
            if not (value is None and name != "path") and (not isinstance(value, str) or not value):
                raise SpecError(f"EventFrames({name}={value!r}): pass 'shd', 'ssc' or the path of a file, as text.")
        if self.path in PUBLISHED and (self.test_path or self.validation_path or self.test_speakers):
            raise IncompatibleError(
                f"EventFrames(path={self.path!r}) has its own splits. Drop test_path, validation_path, test_speakers."
            )
        if self.path in (self.test_path, self.validation_path):
            raise IncompatibleError(
                f"EventFrames(path={self.path!r}): the same file is used for training and for evaluation."
            )
        if self.test_path is not None and self.test_speakers:
            raise IncompatibleError(
                "EventFrames: test_path and test_speakers both define the test set. Pass one of them."
            )
        check_fraction(self, below="at 1 nothing would be left to train on", validation=self.validation)
        check_seed(self, split_seed=self.split_seed)
        check_kind(self, Bins, "events.Bins()", bins=self.bins)
        if len(self.merge) != 2:
            raise SpecError(
                f"EventFrames(merge={self.merge}): pass the numbers of frames and of features: merge=(2, 1)."
            )
        for number in self.merge:
            check_size(self, merge=number)
        for change in self.augmentations:
            check_kind(self, Augmentation, "(events.Drop(0.1),)", augmentations=change)

    @property
    def length(self) -> int:
        """Number of frames per recording, after merging."""
        return self._shape[0]

    @property
    def input_size(self) -> int:
        return self._shape[1]

    @property
    def step_seconds(self) -> float:
        """Duration of a frame after merging, according to `bins`."""
        return round(self.merge[0] * self.bins.duration / self.bins.steps, 12)

    @property
    def output_size(self) -> int:
        """Number of classes."""
        sources = [_open_source(self, split) for split in ("train", "test")]
        return max(max(len(source.words), int(source.labels.max()) + 1) for source in sources)

    @property
    def chance(self) -> float:
        return 1 / self.output_size

    def size(self, split: Split) -> int:
        return len(_split_indices(self, split))

    def examples(self, split: Split, indices: Tensor, *, length: int | None = None) -> Batch:
        if length is not None and length != self.length:
            raise InputError(f"length={length}: these recordings have {self.length} frames. Choose bins= or merge=.")
        return self._batch(_open_source(self, split).dataset, _split_indices(self, split)[indices])

    def training_batch(self, step: int, size: int, seed: int) -> Batch:
        if not self.augmentations:
            return super().training_batch(step, size, seed)
        augmented = _open_source(self, "train", augmented=True).dataset
        assert isinstance(augmented, EventDataset)
        augmented.seed, augmented.epoch = seed, step  # the draws are a function of seed, step and recording
        return self._batch(augmented, _split_indices(self, "train")[self.training_indices(step, size, seed)])

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        return {"accuracy": float((outputs.argmax(-1) == targets).double().mean())}

    @property
    def _shape(self) -> tuple[int, int]:
        frames = _open_source(self, "train").dataset[0].frames
        for name, size, merged in zip(("frames", "features"), frames.shape, self.merge, strict=True):
            if size % merged:
                most = next(n for n in range(merged, 0, -1) if size % n == 0)
                raise InputError(f"merge={self.merge}: {merged} does not divide {size} {name}. Pass {most} instead.")
        return frames.shape[0] // self.merge[0], frames.shape[1] // self.merge[1]

    def _batch(self, dataset: Dataset[Example], indices: Tensor) -> Batch:
        batch = collate([dataset[i] for i in indices.tolist()])
        (steps, features), (together, pooled) = self._shape, self.merge
        if batch.frames.shape[1:] != (steps * together, features * pooled):
            raise DataError(
                f"a recording has {tuple(batch.frames.shape[1:])} frames and features, those of {self.path} have "
                f"{(steps * together, features * pooled)}. Make both files with the same bins."
            )
        frames = batch.frames.reshape(len(indices), steps, together, features, pooled).sum((2, 4))
        lengths = -(-batch.lengths // together)
        return Batch(frames.to(torch.get_default_dtype()), batch.labels, lengths if self.masked else None)


class _Source(NamedTuple):
    """The recordings of one file."""

    dataset: Dataset[Example]
    labels: np.ndarray
    speakers: np.ndarray | None
    is_test: np.ndarray | None
    words: Sequence[str]


def _open_source(task: EventFrames, split: Split, *, augmented: bool = False) -> _Source:
    """Return the file that holds the recordings of a split, possibly with those of other splits."""
    path = _find_path(task, split)
    cached = task.cached and not augmented
    return _open_file(path, task.bins, task.augmentations if augmented else (), cached)


def _find_path(task: EventFrames, split: Split) -> Path:
    if task.path in PUBLISHED:
        files = PUBLISHED[task.path]
        return _find_published(files.get(split, files["train"]))
    own = {"train": None, "validation": task.validation_path, "test": task.test_path}[split]
    return _find_file(Path(own or task.path))


def _find_file(path: Path) -> Path:
    """Return `path`, or the file of this name in the data folders if `path` is relative and does not exist."""
    if path.is_absolute() or path.exists():
        return path
    return next((folder / path for folder in data_folders() if (folder / path).is_file()), path)


def _find_published(name: Any) -> Path:
    places = data_folders()
    for folder in places:
        if any((folder / f"{name}.h5{suffix}").exists() for suffix in ("", ".zip", ".gz")):
            try:
                return find_split(folder, name)
            except InputError as error:
                raise DataError(
                    f"{error} To use a file that differs on purpose, pass its path: --task.path FILE."
                ) from None
    raise DataError(
        f"{name}.h5 is not in {' or '.join(map(str, places))}. Download https://zenkelab.org/datasets/{name}.h5.zip "
        "(CC BY 4.0) into a folder and set ADPTNET_DATA to that folder, or pass the path of a file: --task.path FILE."
    )


@functools.lru_cache(maxsize=8)
def _open_file(path: Path, bins: Bins, augmentations: tuple[Augmentation, ...], cached: bool) -> _Source:
    if not path.is_file():
        raise DataError(f"there is no file {path}. Pass 'shd', 'ssc', an .h5 file in their layout, or an npz.")
    if path.suffix == ".npz":
        file: Any = open_archive(path)
    elif path.suffix in (".h5", ".hdf5"):
        file = SpikeFile(path, channels=bins.channels)
    else:
        raise DataError(f"{path}: recordings are in .h5 files in the layout of SHD and SSC, or in an npz.")
    speakers = file.speakers if file.speakers is not None and len(file.speakers) else None
    metadata = file.labels, speakers, getattr(file, "is_test", None), getattr(file, "words", ())
    if not len(file):
        raise DataError(f"{path} holds no recordings.")
    if isinstance(file, FrameFile):
        if augmentations:
            raise IncompatibleError(f"{path} holds frames; augmentations apply to events. Drop augmentations.")
        return _Source(file, *metadata)
    cache = _cache_path(path, bins) if cached else None
    return _Source(EventDataset(file, bins, augmentations=augmentations, cache=cache), *metadata)


def _cache_path(path: Path, bins: Bins) -> Path:
    """Return the path of the cached frames of a file; its name depends on the file and the bins."""
    status = path.stat()
    identity = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {bins.to_json()}"
    folder = cache_folder() / "frames"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.npy"


@functools.lru_cache(maxsize=16)
def _split_indices(task: EventFrames, split: Split) -> Tensor:
    """Return the indices of the recordings of a split in its file."""
    source = _open_source(task, split)
    everything = np.arange(len(source.labels))
    if _find_path(task, split) != _find_path(task, "train"):
        return torch.from_numpy(everything)
    in_test = _mark_test(task, source)
    if not in_test.any() and _find_path(task, "test") == _find_path(task, "train"):  # raise before training starts
        raise DataError(
            f"EventFrames(path={task.path!r}): the test set is not defined. Pass test_path='FILE', or "
            f"test_speakers=(…){_describe_speakers(source)}."
        )
    if split == "test":
        return torch.from_numpy(everything[in_test])
    own_validation = _find_path(task, "validation") != _find_path(task, "train")
    held_out = np.zeros_like(in_test) if own_validation else _mark_validation(task, source, in_test)
    chosen = everything[held_out if split == "validation" else ~in_test & ~held_out]
    if not chosen.size:
        raise DataError(
            f"EventFrames(path={task.path!r}, validation={task.validation}): no recording is left for {split}."
        )
    return torch.from_numpy(chosen)


def _mark_test(task: EventFrames, source: _Source) -> np.ndarray:
    """Return a mask of the recordings of the training file that belong to the test set."""
    if task.test_speakers:
        speakers = np.zeros(0) if source.speakers is None else source.speakers
        unknown = sorted(set(task.test_speakers) - set(speakers.tolist()))
        if unknown:
            raise DataError(
                f"EventFrames(test_speakers=…): {task.path} has no speaker {unknown[0]}{_describe_speakers(source)}."
            )
        return np.isin(speakers, task.test_speakers)
    marked = source.is_test if task.test_path is None else None
    return np.zeros(len(source.labels), bool) if marked is None else marked


def _describe_speakers(source: _Source) -> str:
    if source.speakers is None:
        return "; it names no speakers"
    known = np.unique(source.speakers)
    return f"; its speakers are {known.min()} to {known.max()}"


def _mark_validation(task: EventFrames, source: _Source, in_test: np.ndarray) -> np.ndarray:
    """Return a mask of the recordings held out for validation: all of some speakers, if speakers are known."""
    groups = np.arange(len(in_test)) if source.speakers is None else source.speakers
    known = np.unique(groups[~in_test])
    count = int(np.ceil(task.validation * len(known)))
    held_out = np.random.default_rng(task.split_seed).permutation(known)[:count]
    marked: np.ndarray = np.isin(groups, held_out) & ~in_test
    return marked
