"""Recognise words in streaming sound: chunks of sound through the cochlea and a spiking network, frame by frame.

Prints the likeliest words every tenth of a second, and checks that the chunks give the scores of the whole sound.
Without arguments it first trains a network on four gliding tones, in about a minute on one core, and plays three:

    python examples/live_words.py
    python examples/live_words.py word.wav --weights silif_ssc.npz     # a SiLIF network of Spiking Speech Commands
    python examples/live_words.py word.wav --run runs/words            # a network of `adptnet train event-frames`

For a network of a run, the binning and merging of frames are read from the settings of the run.
"""

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adptnet.errors import InputError
from adptnet.integrations.silif import from_silif
from adptnet.nn import SpikingModel, SpikingModelSpec, spiking_adpt_for_speech
from adptnet_lab import tasks, training
from adptnet_lab.cli import run_and_exit_code
from adptnet_lab.events import Bins, Cochlea, Events, PixelFile, SpikeFile, open_archive, read_wav
from adptnet_lab.training import load_model, read_experiment

RATE = 16_000
LONGEST = 60  # longest sound, in seconds
TONES = {"rise": (300, 1200), "fall": (1200, 300), "low": (300, 300), "high": (1200, 1200)}


@dataclasses.dataclass(frozen=True)
class Frames:
    """Frames as those of `tasks.EventFrames(bins=, merge=)`, continued for as long as the sound lasts."""

    bins: Bins
    merge: tuple[int, int] = (1, 1)  # numbers of frames and of features that are summed into one

    @property
    def seconds(self) -> float:
        """Duration of a frame."""
        steps = self.bins.steps - 1 if self.bins.rule == "silif" else self.bins.steps
        return self.merge[0] * self.bins.duration / steps

    @property
    def features(self) -> int:
        return self.bins.features // self.merge[1]

    def indices(self, times: np.ndarray) -> np.ndarray:
        """Return the frame of each time, by the task's rule, extended beyond the end of its recordings."""
        bins = self.bins
        if bins.rule == "silif":
            edges = np.linspace(0, bins.duration, bins.steps)
            repeats = range(1, int(times.max(initial=0.0) // bins.duration) + 1)
            index = np.digitize(times, np.concatenate((edges, *(edges[1:] + n * bins.duration for n in repeats))))
        else:
            index = np.floor(times * bins.steps / bins.duration).astype(np.int64)
        return index // self.merge[0]

    def at(self, time: float) -> int:
        return int(self.indices(np.asarray([time]))[0])

    def counts(self, events: Events, start: int, stop: int) -> Tensor:
        """Return the counts of the frames from `start` to before `stop`, (frames, features)."""
        feature = events.units // (self.bins.pool * self.merge[1])
        place = (self.indices(events.times) - start) * self.features + feature
        counts = np.bincount(place, minlength=(stop - start) * self.features)
        return torch.from_numpy(counts.reshape(-1, self.features)).to(torch.get_default_dtype())


class LiveRecogniser:
    """Probabilities of words in sound that arrives in chunks: cochlea, frames, `model.step`."""

    def __init__(self, model: SpikingModel, cochlea: Cochlea, frames: Frames, level: float):
        self.model, self.frames = model, frames
        self.ear = cochlea.listen(level=level, piece=0.1)
        self.pending = Events.of([], np.zeros(0, int))
        self.steps = 0  # frames that the network has processed
        self.state = None

    def __call__(self, chunk: np.ndarray) -> Tensor:
        """Return the probabilities, (frames, words), at every frame that this chunk completes."""
        events = self.ear(chunk)
        return self._step(events, self.frames.at(self.ear.complete_until))

    def end(self) -> Tensor:
        events = self.ear.end()
        return self._step(events, self.frames.at(self.ear.complete_until) + 1)

    @torch.no_grad()
    def _step(self, events: Events, complete: int) -> Tensor:
        both = join_events(self.pending, events)
        now = self.frames.indices(both.times) < complete
        self.pending = Events(both.times[~now], both.units[~now])
        frames = self.frames.counts(Events(both.times[now], both.units[now]), self.steps, complete)
        self.steps = complete
        steps = []
        for frame in frames:
            probabilities, self.state = self.model.step(frame.unsqueeze(0), self.state)
            steps.append(probabilities)
        return torch.cat(steps) if steps else torch.zeros(0, self.model.spec.output_size)


def join_events(*parts: Events) -> Events:
    return Events(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


@torch.no_grad()
def score_whole(model: SpikingModel, cochlea: Cochlea, frames: Frames, level: float, sound: np.ndarray) -> Tensor:
    """Return the scores of the whole sound by one call of the network: the sum of the probabilities over time."""
    ear = cochlea.listen(level=level, piece=0.1)
    events = join_events(ear(sound), ear.end())
    scores: Tensor = model(frames.counts(events, 0, frames.at(ear.complete_until) + 1).unsqueeze(0))[0]
    return scores[0]


def main(
    wav: Path | None = None,
    *,
    weights: Path | None = None,
    run: Path | None = None,
    chunk: float = 0.05,
    channels: int = 70,
    sounds: int = 48,
    steps: int = 60,
    played: Sequence[str] = ("rise", "low", "fall"),
) -> tuple[list[str], Tensor]:
    """Stream a sound in chunks of `chunk` seconds; return the printed words, and all probabilities over time."""
    if not chunk >= 1 / RATE:
        raise InputError(f"--chunk {chunk:g}: seconds per chunk must be at least one sample. Pass 0.05.")
    torch.manual_seed(0)
    if weights is None and run is None:
        cochlea, frames = Cochlea(RATE, channels), Frames(Bins(250, 1.0, channels, pool=1))
        model, words = train_on_tones(cochlea, frames.bins, sounds, steps)
    elif weights is not None:
        cochlea, frames = Cochlea(RATE), Frames(Bins.of_silif(4))
        model, words = from_silif(weights), DIGITS
    else:
        assert run is not None
        model, words, frames = load_run(run)
        cochlea = Cochlea(RATE, frames.bins.channels)
    print(f"frames of {1000 * frames.seconds:.3g} ms, {frames.features} features")
    sound = synthesise(np.random.default_rng(100), played) if wav is None else read_sound(wav)
    level = float(np.sqrt((sound**2).mean()))
    live, outputs = LiveRecogniser(model, cochlea, frames, level), []
    words_over_time: list[str] = []
    for number, part in enumerate(iterate_chunks(sound, round(chunk * RATE))):
        outputs.append(live(part) if part is not None else live.end())
        if live.steps and (part is None or number % max(1, round(0.1 / chunk)) == 0):
            recent = torch.cat(outputs)[-max(1, round(0.1 / frames.seconds)) :].mean(0)  # the last tenth of a second
            best = recent.topk(min(3, len(recent)))
            shown = ", ".join(
                f"{describe_word(words, i)} {p:4.0%}" for p, i in zip(*map(Tensor.tolist, best), strict=True)
            )
            print(f"{live.steps * frames.seconds:5.2f} s  {shown}")
            words_over_time.append(describe_word(words, int(recent.argmax())))
    probabilities = torch.cat(outputs)
    difference = (probabilities.sum(0) - score_whole(model, cochlea, frames, level, sound)).abs().max()
    print(f"{len(probabilities)} frames; their sum is the score of the whole sound, to {difference:.0e}.")
    return words_over_time, probabilities


def iterate_chunks(sound: np.ndarray, size: int) -> Iterator[np.ndarray | None]:
    """Yield chunks of `size` samples as a microphone would, then None."""
    for start in range(0, len(sound), size):
        yield sound[start : start + size]
    yield None


def read_sound(path: Path) -> np.ndarray:
    sound, rate = read_wav(path, mix=True)
    if len(sound) > (LONGEST - 1) * rate:
        raise InputError(f"{path} has {len(sound) / rate:.0f} s; this example takes at most {LONGEST - 1} s.")
    if not sound.any():
        raise InputError(f"{path} is silent. Pass a sound.")
    if rate != RATE:
        from scipy import signal

        sound = signal.resample_poly(sound, RATE, rate)
    return sound


# Networks: of a run, or trained here.

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def describe_word(words: Sequence[str], number: int) -> str:
    return words[number] if number < len(words) else f"word {number}"


def load_run(run: Path) -> tuple[SpikingModel, Sequence[str], Frames]:
    """Return the network of a run, its words if they are known, and the frames that it was trained on."""
    experiment, model = read_experiment(run), load_model(run)
    if not isinstance(model, SpikingModel) or not isinstance(experiment.task, tasks.EventFrames):
        raise InputError(
            f"{run} does not hold a spiking network for event frames. Train one: adptnet train event-frames "
            "--model.layer silif-network."
        )
    task, path = experiment.task, Path(experiment.task.path)
    frames = Frames(task.bins, task.merge)
    if path.suffix == ".npz":
        check_archive(path, frames.bins)
    if frames.features != model.spec.input_size:
        raise InputError(
            f"{run} has a network of {model.spec.input_size} features; {task.bins} merged by {task.merge} gives "
            f"{frames.features}. Pass the folder of a run whose settings were not changed."
        )
    words = SpikeFile(path, channels=task.bins.channels).words if path.suffix == ".h5" and path.exists() else ()
    return model.eval(), words, frames


def check_archive(path: Path, bins: Bins) -> None:
    """Raise `InputError` if frames like those of the archive cannot be made from sound; an npz does not say how."""
    if not path.exists():
        raise InputError(
            f"the run was trained on the frames of {path}, which does not exist, so their duration is unknown. Run "
            "this where the file is."
        )
    archive = open_archive(path)
    if isinstance(archive, PixelFile):
        raise InputError(f"the run was trained on {path}, events of a camera; a network for sound is needed.")
    shape = archive.frames.shape[1:]
    if shape != (bins.steps, bins.features):
        raise InputError(
            f"the run was trained on {path}, frames of shape {shape}, which {bins} does not make: their duration is "
            f"unknown. Train with the bins that made them: --task.bins 'Bins(steps={shape[0]}, duration=..., ...)'."
        )


def synthesise(generator: np.random.Generator, names: Sequence[str]) -> np.ndarray:
    """Return gliding tones of 0.6 s, each at a random pitch, with noise and pauses."""
    parts = [np.zeros(RATE // 10)]
    for word in names:
        low, high = TONES[word]
        voice = generator.uniform(0.8, 1.25)
        frequency = voice * np.geomspace(low, high, round(0.6 * RATE))
        tone = np.sin(2 * np.pi * np.cumsum(frequency) / RATE) * np.hanning(len(frequency))
        parts += [tone, np.zeros(round(generator.uniform(0.1, 0.3) * RATE))]
    sound = np.concatenate(parts)
    return sound + 0.01 * generator.standard_normal(len(sound))


def train_on_tones(cochlea: Cochlea, bins: Bins, sounds: int, steps: int) -> tuple[SpikingModel, Sequence[str]]:
    """Train a small SpikingADPTNet on the four tones, through the cochlea and the trainer."""
    generator, frames, labels = np.random.default_rng(0), [], []
    print(f"training on {', '.join(TONES)} ...", flush=True)
    for number in range(sounds):
        label = number % 4
        sound = synthesise(generator, [list(TONES)[label]])[:RATE]
        events = cochlea(np.pad(sound, (0, RATE - len(sound))), seed=number)
        frames.append(bins.frames(events))
        labels.append(label)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tones.npz"
        np.savez(path, frames=np.stack(frames), label=np.asarray(labels), is_test=np.arange(sounds) < sounds // 6)
        task = tasks.EventFrames(str(path), validation=0.2, masked=False)
        network: SpikingModelSpec = spiking_adpt_for_speech(32, input_size=1, output_size=1, beta=0.125, dropout=0.1)
        model = task.spiking_model(network).build()
        for layer in [*(layer.currents for layer in model.layers), model.decoder]:
            layer.norm.norm.momentum = 0.2  # there are few batches
        settings = training.TrainConfig(steps=steps, batch_size=min(16, sounds // 2), learning_rate=1e-2, clip=1.0)
        training.train(model, task, settings)
        scores = training.evaluate(model, task, (None,))[bins.steps]
    print(f"accuracy on test tones: {scores['accuracy']:.0%}")
    return model.eval(), tuple(TONES)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wav", nargs="?", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--chunk", type=float, default=0.05, help="seconds")
    arguments = parser.parse_args()
    sys.exit(
        run_and_exit_code(
            lambda: main(arguments.wav, weights=arguments.weights, run=arguments.run, chunk=arguments.chunk)
        )
    )
