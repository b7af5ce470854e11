"""Words from sound as it comes: chunks through the cochlea and a spiking network, one step for every frame.

Prints the likeliest words every tenth of a second, and checks that the chunks gave what the whole sound gives. Without
arguments it first learns four words of its own, gliding tones, in about a minute on one core, and hears three of them:

    python examples/live_words.py
    python examples/live_words.py word.wav --weights silif_ssc.npz     # a SiLIF network of Spiking Speech Commands
    python examples/live_words.py word.wav --run runs/words            # a network of `adptnet train event-frames`
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adptnet import tasks, training
from adptnet.cli import ended
from adptnet.errors import InputError
from adptnet.events import Bins, Cochlea, Events, SpikeFile, read_wav
from adptnet.integrations.silif import from_silif
from adptnet.nn import SpikingModel, SpikingModelSpec, spiking_adpt_for_speech
from adptnet.training.runs import read_experiment, trained

RATE = 16_000
LONGEST = 60  # seconds of a sound
TONES = {"rise": (300, 1200), "fall": (1200, 300), "low": (300, 300), "high": (1200, 1200)}


class Live:
    """The probabilities of words in sound that comes in chunks: cochlea, frames, `model.step`."""

    def __init__(self, model: SpikingModel, cochlea: Cochlea, bins: Bins, level: float):
        self.model, self.bins = model, bins
        self.ear = cochlea.listen(level=level, piece=0.1)
        self.waiting = Events.of([], np.zeros(0, int))
        self.frames = 0  # that have gone through the network
        self.state = None

    def __call__(self, chunk: np.ndarray) -> Tensor:
        """Probabilities (frames, words) at every frame that is complete with this chunk."""
        return self._stepped(self.ear(chunk), int(self.ear.heard * self.bins.steps / self.bins.duration))

    def end(self) -> Tensor:
        last = self.ear.end()
        return self._stepped(last, int(self.bins.indices(np.asarray([self.ear.heard]))[0]) + 1)

    @torch.no_grad()
    def _stepped(self, events: Events, complete: int) -> Tensor:
        both = Events(*(np.concatenate(pair) for pair in zip(self.waiting, events, strict=True)))
        now = self.bins.indices(both.times) < complete
        self.waiting = Events(both.times[~now], both.units[~now])
        frames = counted(Events(both.times[now], both.units[now]), self.bins, self.frames, complete)
        self.frames = complete
        steps = []
        for frame in frames:
            probabilities, self.state = self.model.step(frame.unsqueeze(0), self.state)
            steps.append(probabilities)
        return torch.cat(steps) if steps else torch.zeros(0, self.model.spec.output_size)


def counted(events: Events, bins: Bins, start: int, stop: int) -> Tensor:
    """The frames from `start` to before `stop`."""
    place = (bins.indices(events.times) - start) * bins.features + events.units // bins.pool
    counts = np.bincount(place, minlength=(stop - start) * bins.features)
    return torch.from_numpy(counts.reshape(-1, bins.features)).to(torch.get_default_dtype())


@torch.no_grad()
def whole(model: SpikingModel, cochlea: Cochlea, bins: Bins, level: float, sound: np.ndarray) -> Tensor:
    """The scores of the whole sound in one call of the network: the sum of the probabilities over time."""
    ear = cochlea.listen(level=level, piece=0.1)
    parts = (ear(sound), ear.end())
    events = Events(*(np.concatenate(pair) for pair in zip(*parts, strict=True)))
    frames = counted(events, bins, 0, int(bins.indices(np.asarray([ear.heard]))[0]) + 1)
    scores: Tensor = model(frames.unsqueeze(0))[0]
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
    said: Sequence[str] = ("rise", "low", "fall"),
) -> tuple[list[str], Tensor]:
    """Streams a sound in chunks of `chunk` seconds; returns what was heard last, and all probabilities over time."""
    if not chunk >= 1 / RATE:
        raise InputError(f"--chunk {chunk:g}: seconds of a chunk, at least one sample: 0.05.")
    torch.manual_seed(0)
    if weights is None and run is None:
        cochlea, bins = Cochlea(RATE, channels), Bins(250 * LONGEST, LONGEST, channels, pool=1)
        model, words = taught(cochlea, sounds, steps)
    else:
        cochlea, bins = Cochlea(RATE), Bins(250 * LONGEST, LONGEST)
        model, words = (from_silif(weights), DIGITS) if weights is not None else of_run(run)
    sound = spoken(np.random.default_rng(100), said) if wav is None else loaded(wav)
    level = float(np.sqrt((sound**2).mean()))
    live, seen = Live(model, cochlea, bins, level), []
    heard: list[str] = []
    for number, part in enumerate(chunks(sound, round(chunk * RATE))):
        seen.append(live(part) if part is not None else live.end())
        if live.frames and (part is None or number % max(1, round(0.1 / chunk)) == 0):
            recent = torch.cat(seen)[-25:].mean(0)  # of the last tenth of a second
            best = recent.topk(min(3, len(recent)))
            shown = ", ".join(f"{name(words, i)} {p:4.0%}" for p, i in zip(*map(Tensor.tolist, best), strict=True))
            print(f"{live.frames * bins.duration / bins.steps:5.2f} s  {shown}")
            heard.append(name(words, int(recent.argmax())))
    probabilities = torch.cat(seen)
    apart = (probabilities.sum(0) - whole(model, cochlea, bins, level, sound)).abs().max()
    print(f"{len(probabilities)} frames; their sum is the score of the whole sound, to {apart:.0e}.")
    return heard, probabilities


def chunks(sound: np.ndarray, size: int) -> Iterator[np.ndarray | None]:
    """As a microphone would hand them over; None at the end."""
    for start in range(0, len(sound), size):
        yield sound[start : start + size]
    yield None


def loaded(path: Path) -> np.ndarray:
    sound, rate = read_wav(path, mix=True)
    if len(sound) > (LONGEST - 1) * rate:
        raise InputError(f"{path} has {len(sound) / rate:.0f} s; this example hears {LONGEST - 1} s at most.")
    if not sound.any():
        raise InputError(f"{path} is silent; a sound is needed.")
    if rate != RATE:
        from scipy import signal

        sound = signal.resample_poly(sound, RATE, rate)
    return sound


# A network: a trained one, or one that learns words of its own.

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def name(words: Sequence[str], number: int) -> str:
    return words[number] if number < len(words) else f"word {number}"


def of_run(run: Path) -> tuple[SpikingModel, Sequence[str]]:
    experiment, model = read_experiment(run), trained(run)
    if not isinstance(model, SpikingModel) or model.spec.input_size != 140:
        raise InputError(
            f"{run} holds no spiking network of 140 features, 700 channels by fives. Train one with Bins()."
        )
    path = Path(experiment.task.path) if isinstance(experiment.task, tasks.EventFrames) else Path()
    return model.eval(), SpikeFile(path).words if path.suffix == ".h5" and path.exists() else ()


def spoken(generator: np.random.Generator, names: Sequence[str]) -> np.ndarray:
    """Gliding tones of 0.6 s in another voice each time, with noise and pauses."""
    parts = [np.zeros(RATE // 10)]
    for word in names:
        low, high = TONES[word]
        voice = generator.uniform(0.8, 1.25)
        frequency = voice * np.geomspace(low, high, round(0.6 * RATE))
        tone = np.sin(2 * np.pi * np.cumsum(frequency) / RATE) * np.hanning(len(frequency))
        parts += [tone, np.zeros(round(generator.uniform(0.1, 0.3) * RATE))]
    sound = np.concatenate(parts)
    return sound + 0.01 * generator.standard_normal(len(sound))


def taught(cochlea: Cochlea, sounds: int, steps: int) -> tuple[SpikingModel, Sequence[str]]:
    """A small SpikingADPTNet that has learnt the four tones, through the cochlea and the trainer."""
    generator, frames, labels = np.random.default_rng(0), [], []
    print(f"learning {', '.join(TONES)} ...", flush=True)
    for number in range(sounds):
        label = number % 4
        sound = spoken(generator, [list(TONES)[label]])[:RATE]
        events = cochlea(np.pad(sound, (0, RATE - len(sound))), seed=number)
        frames.append(Bins(250, 1.0, cochlea.channels, pool=1).frames(events))
        labels.append(label)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tones.npz"
        np.savez(path, frames=np.stack(frames), label=np.asarray(labels), is_test=np.arange(sounds) < sounds // 6)
        task = tasks.EventFrames(str(path), validation=0.2, masked=False)
        network: SpikingModelSpec = spiking_adpt_for_speech(32, input_size=1, output_size=1, beta=0.125, dropout=0.1)
        model = task.spiking_model(network).build()
        for layer in [*(layer.currents for layer in model.layers), model.decoder]:
            layer.norm.norm.momentum = 0.2  # few batches
        settings = training.TrainConfig(steps=steps, batch_size=min(16, sounds // 2), learning_rate=1e-2, clip=1.0)
        training.train(model, task, settings)
        scores = training.evaluate(model, task, (None,))[250]
    print(f"accuracy on tones it has not heard: {scores['accuracy']:.0%}")
    return model.eval(), tuple(TONES)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wav", nargs="?", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--chunk", type=float, default=0.05, help="seconds")
    given = parser.parse_args()
    sys.exit(ended(lambda: main(given.wav, weights=given.weights, run=given.run, chunk=given.chunk)))
