"""`adptnet cochlea`: convert sound files to spikes in the layout of SHD and SSC."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from tyro.conf import Positional, arg

from adptnet.errors import InputError

from .._runtime import catch_stop_signals
from ..events import Cochlea, Events, read_wav, write_spikes

__all__ = ["Listen", "center_sound", "run"]

MOST = 40  # printed words


@dataclass(frozen=True)
class Listen:
    """Convert wav files to spikes of 700 channels, in an HDF5 file with the layout of SHD and SSC."""

    sounds: Positional[Path]
    """A wav file, or a folder whose wav files are converted, also those in subfolders."""
    output: Positional[Path]
    """The HDF5 file to write; it is created when all sounds are converted."""
    label_from: Literal["folder", "name"] = "folder"
    """Word of a file: the name of its folder, or the part of its own name before the first underscore. Labels number
    the words in alphabetical order."""
    seconds: float | None = None
    """Pad or cut each sound symmetrically to this length; unchanged if not given."""
    rate: int = 16_000
    """Sampling rate of the cochlea in Hz; other sounds are resampled."""
    loudness: float = 0.3
    """Root mean square to which each sound is scaled."""
    mix: bool = False
    """Average the channels of a sound that has several."""
    seed: int = 0
    """Seed of the nerve fibres; each file has its own stream."""
    overwrite: Annotated[bool, arg(aliases=["-f"])] = False
    """Replace a file that exists."""


def run(options: Listen) -> int:
    """Write the file and return the number of recordings.

    Args:
        options: The options.
    """
    files, words = _label(_find(options.sounds), options)
    if options.output.is_dir() or not options.output.parent.is_dir():
        raise InputError(
            f"{options.output} is a folder, or its folder does not exist. Pass the name of a file: out.h5."
        )
    if options.output.exists() and not options.overwrite:
        raise InputError(f"{options.output} exists. Pass another name, or --overwrite.")
    if options.seconds is not None and not 0 < options.seconds < math.inf:
        raise InputError(f"--seconds {options.seconds:g}: must be a positive length.")
    if options.seed < 0:
        raise InputError(f"--seed {options.seed}: must be an integer >= 0.")
    cochlea = Cochlea(rate=options.rate, loudness=options.loudness)
    if len(words) == 1 < len(files):
        _warn_of_one_word(options, files[0][0], words[0], len(files))
    with catch_stop_signals(interrupt=True):  # so that no temporary file is left behind
        count = write_spikes(options.output, _recordings(options, cochlea, files), words=words)
    shown = ", ".join(words[:MOST]) + (f" and {len(words) - MOST} more" if len(words) > MOST else "")
    print(f"{count} recordings, {len(words)} words ({shown}): {options.output}")
    return count


def _find(sounds: Path) -> list[Path]:
    """Return the wav files in a folder and its subfolders, or the one file."""
    if sounds.is_file():
        return [sounds]
    paths = sorted(path for path in sounds.rglob("*") if path.suffix.lower() == ".wav") if sounds.is_dir() else []
    if not paths:
        raise InputError(f"{sounds} is neither a wav file nor a folder with wav files.")
    return paths


def _label(paths: list[Path], options: Listen) -> tuple[list[tuple[Path, int]], list[str]]:
    """Return the files with their labels, and the words."""
    if options.label_from == "name":
        named = [path.stem.partition("_")[0] for path in paths]
    elif options.sounds.is_file():
        named = [path.stem for path in paths]
    else:
        named = [path.parent.resolve().name for path in paths]
    words = sorted(set(named))
    return [(path, words.index(word)) for path, word in zip(paths, named, strict=True)], words


def _warn_of_one_word(options: Listen, first: Path, word: str, count: int) -> None:
    """Print a warning that all recordings have the same label."""
    if options.label_from == "name":
        why = "the part of their names before the first underscore"
        fix = "Put the files of each word in a folder and pass --label-from folder"
    else:
        why = "the name of their folder"
        fix = (
            "Pass --label-from name to take the part of a file's name before its first underscore "
            f"({first.name!r} would be {first.stem.partition('_')[0]!r}), or put the files of each word in a folder"
        )
    print(
        f"warning: all {count} recordings have the label 0, the word {word!r}, {why}. {fix}.",
        file=sys.stderr,
        flush=True,
    )


def _recordings(options: Listen, cochlea: Cochlea, files: list[tuple[Path, int]]) -> Iterator[tuple[Events, int]]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("listening", total=len(files))
        for number, (path, label) in enumerate(files):
            sound, rate = read_wav(path, mix=options.mix)
            if options.seconds is not None:
                sound = center_sound(sound, round(options.seconds * rate))
            seed = int(np.random.SeedSequence([options.seed, number]).generate_state(1)[0])
            try:
                events = cochlea(sound, rate, seed=seed)
            except InputError as error:
                raise InputError(f"{path}: {error}") from None
            yield events, label
            progress.advance(bar)
            if not console.is_terminal and (number + 1) % max(1, len(files) // 10) == 0:
                print(f"{number + 1} of {len(files)}", flush=True)


def center_sound(sound: np.ndarray, samples: int) -> np.ndarray:
    """Pad or cut a sound symmetrically.

    Args:
        sound: The samples of a sound.
        samples: The number of samples to return.
    """
    extra = len(sound) - samples
    if extra >= 0:
        return sound[extra // 2 : extra // 2 + samples]
    before = -extra // 2
    return np.pad(sound, (before, -extra - before))
