"""Spoken words as events: Spiking Speech Commands, or synthetic words for runs without the data set."""

import functools
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from adptnet.errors import InputError
from adptnet.spec import spec

from ...events import Bins, EventDataset, Events, SpikeFile, collate, find_split
from ...tasks.base import Batch, FiniteTask, Scores, Split
from ...tasks.download import data_folders

__all__ = ["SpokenWords", "describe_missing_files"]

FILES: dict[Split, Literal["ssc_train", "ssc_valid", "ssc_test"]] = {
    "train": "ssc_train",
    "validation": "ssc_valid",
    "test": "ssc_test",
}


@spec
class SpokenWords(FiniteTask):
    """Classification of words given as events, in frames of 4 ms.

    Attributes:
        steps: Number of frames; 300 over 1.2 s, by SiLIF's rule, for the data set.
        channels: Number of event channels; five are summed into one feature of a frame.
        words: Number of classes.
        recordings: Number of synthetic training recordings, with half as many for scoring; None for the data set.
    """

    steps: int = 300
    channels: int = 700
    words: int = 35
    recordings: int | None = None

    @property
    def input_size(self) -> int:
        return self.channels // 5

    @property
    def output_size(self) -> int:
        return self.words

    @property
    def chance(self) -> float:
        return 1 / self.words

    def size(self, split: Split) -> int:
        return len(_load_frames(self, split))

    def examples(self, split: Split, indices: Tensor, *, length: int | None = None) -> Batch:
        data = _load_frames(self, split)
        frames, labels, _, _ = collate([data[i] for i in indices.tolist()])
        return Batch(frames.to(torch.get_default_dtype()), labels)

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        return {"accuracy": float((outputs.argmax(-1) == targets).double().mean())}


@functools.lru_cache(maxsize=4)
def _load_frames(task: SpokenWords, split: Split) -> EventDataset:
    if task.recordings is not None:
        bins = Bins(task.steps, 0.004 * task.steps, channels=task.channels)
        return EventDataset(_generate_words(task, split), bins)
    file = find_split(_find_folder(), FILES[split])
    return EventDataset(SpikeFile(file), Bins.of_silif(4), cache=file.with_suffix(".frames.npy"))


def _generate_words(task: SpokenWords, split: Split) -> list[tuple[Events, int]]:
    """Generate recordings. Each word is a path through the channels over time, with jitter and noise events."""
    assert task.recordings is not None
    count = task.recordings if split == "train" else task.recordings // 2
    generator = np.random.default_rng([1, ("train", "validation", "test").index(split)])
    paths = np.random.default_rng(0).uniform(0.1, 0.9, (task.words, 4))  # relative channel of each word at four times
    duration = 0.004 * task.steps
    recordings = []
    for number in range(count):
        word = number % task.words
        times = generator.uniform(0, 1, 4 * task.steps)
        heights = np.interp(times, np.linspace(0, 1, 4), paths[word]) + generator.normal(0, 0.05, times.size)
        noise = generator.uniform(0, 1, times.size) < 0.2
        heights = np.where(noise, generator.uniform(0, 1, times.size), heights)
        units = np.clip(heights * task.channels, 0, task.channels - 1).astype(int)
        recordings.append((Events.of(0.999 * duration * times, units), word))
    return recordings


def describe_missing_files() -> str | None:
    """Return which files of the data set are missing and how to get them; None if all are there."""
    try:
        folder = _find_folder()
        for name in FILES.values():
            find_split(folder, name, verify=False)
    except InputError as error:
        return str(error)
    return None


def _find_folder() -> Path:
    """Return the folder with the files of the data set."""
    for folder in data_folders():
        for path in sorted(folder.rglob(f"{FILES['train']}.h5*")):
            return path.parent
    names, places = ", ".join(f"{name}.h5" for name in FILES.values()), " and ".join(map(str, data_folders()))
    raise InputError(
        f"{names} (or .zip, .gz) are not in {places}. "
        "Download them from https://zenkelab.org/datasets (CC BY 4.0) into a folder and set ADPTNET_DATA to it."
    )
