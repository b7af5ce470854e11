"""Spiking Speech Commands: SpikingADPTNet beside SiLIF (sec:ssc).

The files of the data set are the user's, `ssc_train.h5`, `ssc_valid.h5` and `ssc_test.h5`, and are used at the scale
paper alone. Below it the networks have their full size where parameters are counted, and small ones learn made-up
words, each a pattern of channels in time.
"""

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from adptnet.errors import InputError
from adptnet.nn import SpikingModelSpec, silif_for_speech, spiking_adpt_for_speech
from adptnet.spec import spec

from ...baselines import parameter_count
from ...events import Bins, EventDataset, Events, SpikeFile, collate, find
from ...tasks.base import Batch, FiniteTask, Scores, Split
from ...tasks.download import folders
from ...training import Adam, ReduceOnPlateau, TrainConfig
from ..recipe import Check, Finding, Point, Recipe, Rows, Scale, Table, Verdict
from ..scoring import bars, by_setting, mean_accuracy, scored

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, SILIF = "SpikingADPTNet", "SiLIF"
FILES: dict[Split, Literal["ssc_train", "ssc_valid", "ssc_test"]] = {
    "train": "ssc_train",
    "validation": "ssc_valid",
    "test": "ssc_test",
}
COUNTS = {512: 355_689, 2048: 1_069_481}  # the paper's
BEST_BEFORE = 82.42  # DelRec, of the rows that the paper quotes
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"words": 2, "channels": 20, "recordings": 16, "steps": 8, "batch": 8, "epochs": 1},
    "laptop": {"words": 10, "channels": 140, "recordings": 400, "steps": 50, "batch": 40, "epochs": 8},
    "paper": {"words": 35, "channels": 700, "recordings": None, "steps": 300, "batch": 256, "epochs": 100},
}


@spec
class SpokenWords(FiniteTask):
    """Words as events, in frames of 4 ms: those of Spiking Speech Commands, or made-up ones.

    Attributes:
        steps: Frames; 300 over 1.2 s, by SiLIF's rule, for the data set.
        channels: Of the events; five are summed into one number of a frame.
        words: How many.
        recordings: So many made-up ones to train on, half as many to be scored on; None for the data set.
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
        return len(_frames(self, split))

    def examples(self, split: Split, indices: Tensor, *, length: int | None = None) -> Batch:
        data = _frames(self, split)
        frames, labels, _, _ = collate([data[i] for i in indices.tolist()])
        return Batch(frames.to(torch.get_default_dtype()), labels)

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        return {"accuracy": float((outputs.argmax(-1) == targets).double().mean())}


@functools.lru_cache(maxsize=4)
def _frames(task: SpokenWords, split: Split) -> EventDataset:
    if task.recordings is not None:
        bins = Bins(task.steps, 0.004 * task.steps, channels=task.channels)
        return EventDataset(_made_up(task, split), bins)
    file = find(_folder(), FILES[split])
    return EventDataset(SpikeFile(file), Bins.of_silif(4), cache=file.with_suffix(".frames.npy"))


def _made_up(task: SpokenWords, split: Split) -> list[tuple[Events, int]]:
    """Recordings of words: each is its own path through the channels, blurred, among stray events."""
    assert task.recordings is not None
    count = task.recordings if split == "train" else task.recordings // 2
    generator = np.random.default_rng([1, ("train", "validation", "test").index(split)])
    paths = np.random.default_rng(0).uniform(0.1, 0.9, (task.words, 4))  # where each word is at four times
    duration = 0.004 * task.steps
    found = []
    for number in range(count):
        word = number % task.words
        places = generator.uniform(0, 1, 4 * task.steps)
        heights = np.interp(places, np.linspace(0, 1, 4), paths[word]) + generator.normal(0, 0.05, places.size)
        stray = generator.uniform(0, 1, places.size) < 0.2
        heights = np.where(stray, generator.uniform(0, 1, places.size), heights)
        units = np.clip(heights * task.channels, 0, task.channels - 1).astype(int)
        found.append((Events.of(0.999 * duration * places, units), word))
    return found


def _folder() -> Path:
    """Where the files of the data set are."""
    for folder in folders():
        for path in sorted(folder.rglob(f"{FILES['train']}.h5*")):
            return path.parent
    wanted, places = ", ".join(f"{name}.h5" for name in FILES.values()), " and ".join(map(str, folders()))
    raise InputError(
        f"{wanted} (or .zip, .gz) are not in {places}. "
        "Download them from https://zenkelab.org/datasets (CC BY 4.0) into a folder and set ADPTNET_DATA to it."
    )


def _lacks(scale: Scale) -> str | None:
    if scale != "paper":
        return None
    try:
        folder = _folder()
        for name in FILES.values():
            find(folder, name, verify=False)
    except InputError as error:
        return str(error)
    return None


def _points(scale: Scale) -> list[Point]:
    sizes = SIZES[scale]
    kinds: list[tuple[str, int, int]] = [(OURS, 512, 1), (OURS, 2048, 4), (SILIF, 512, 1)]  # as the paper has them
    if scale != "paper":
        kinds = [(OURS, 64, 2), (SILIF, 64, 2)] if scale == "laptop" else [(OURS, 8, 1), (SILIF, 8, 1)]
    return [
        Point({"model": model, "width": width, **sizes}, seed) for model, width, seeds in kinds for seed in range(seeds)
    ]


def _network(settings: Any, task: SpokenWords) -> SpikingModelSpec:
    build = spiking_adpt_for_speech if settings["model"] == OURS else silif_for_speech
    sizes = {"input_size": task.input_size, "output_size": task.output_size}
    network = build(settings["width"], **sizes, dropout=0.5, dt=0.004)
    return network if task.recordings is None else dataclasses.replace(network, momentum=0.2)  # few batches


def _run(point: Point) -> Finding:
    settings = point.settings
    task = SpokenWords(*(settings[key] for key in ("steps", "channels", "words", "recordings")))
    network = _network(settings, task)
    epoch = -(-task.size("train") // settings["batch"])
    config = TrainConfig(
        steps=settings["epochs"] * epoch,
        batch_size=settings["batch"],
        learning_rate=0.01,
        optimiser=Adam(),
        schedule=ReduceOnPlateau(factor=0.7, patience=10),
        clip=None,
        seed=point.seed,
        evaluate_every=epoch,
        evaluation_size=task.size("validation"),
        evaluation_batch=settings["batch"],
    )
    numbers = scored(network, task, config, sequences=task.size("test"), batch=settings["batch"]).numbers
    full = {str(width): parameter_count(spiking_adpt_for_speech(width)) for width in COUNTS}
    return Finding({**numbers, "full size": full}, network)


def _parameters(rows: Rows) -> Verdict:
    """The networks of widths 512 and 2048 have exactly these numbers of parameters."""
    found = rows[0].numbers["full size"]
    return Verdict.of(found == {str(width): count for width, count in COUNTS.items()}, f"by width {found}")


def _learns(rows: Rows) -> Verdict:
    """On made-up words the mean accuracy of both networks is above three times chance."""
    found = {model: mean_accuracy(some) for (model,), some in rows.groups("model").items()}
    chance = rows[0].numbers["chance"]
    words = ", ".join(f"{model} {value:.1f}" for model, value in found.items())
    return Verdict.of(min(found.values()) > 3 * chance, f"{words} %, chance {chance:.0f} %")


def _small(rows: Rows) -> Verdict:
    """The accuracy at width 512 is above 82.03 %."""
    found = mean_accuracy(rows.where(model=OURS, width=512))
    return Verdict.of(found > 82.03, f"{found:.2f} %")


def _large(rows: Rows) -> Verdict:
    """The mean accuracy at width 2048 is within 0.3 of 83.56 %, or above it, and more than 1 above 82.42 %."""
    found = mean_accuracy(rows.where(model=OURS, width=2048))
    return Verdict.of(found >= 83.56 - 0.3 and found > BEST_BEFORE + 1, f"{found:.2f} %")


def _table(rows: Rows) -> Table:
    return by_setting(rows, {"model": "Model", "width": "State Size"})


def _draw(rows: Rows) -> "Figure":
    return bars(rows, "model", panels="width")


RECIPES = {
    "table:ssc_results": Recipe(
        version=1,
        points=_points,
        run=_run,
        checks={
            "parameters": Check(_parameters),
            "learns": Check(_learns, "laptop", {"width": [8, 64]}),
            "small": Check(_small, "paper", {"model": [OURS], "width": [512]}),
            "large": Check(_large, "paper", {"model": [OURS], "width": [2048]}),
        },
        figures={"Accuracy (points: runs)": _draw},
        table=_table,
        cost={"smoke": "1 s", "laptop": "30 s", "paper": "a GPU for a week"},
        dtype=torch.float32,
        lacks=_lacks,
    ),
}
