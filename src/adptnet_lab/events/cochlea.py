"""A cochlea: from sound to spikes of 700 channels in the manner of SHD and SSC (Cramer et al. 2020)."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from adptnet.errors import InputError

from .basilar import transfer
from .hearing import BushyCells, HairCells
from .stream import Events

__all__ = ["Cochlea", "Listening"]

Sound = npt.NDArray[np.float64]
WHOLE = 2.0  # seconds of sound that are filtered at once; what is longer goes through in pieces
STRETCH = 500  # samples that the nerve is simulated at a time: their numbers stay in the cache
PIECE, LEAD = 0.75, 0.25  # seconds of a piece, and of silence before it: this membrane answers ahead of the sound


@dataclasses.dataclass(frozen=True)
class Cochlea:
    """Basilar membrane, hair cells and bushy cells; the membrane runs at half of `rate`.

    The first sound takes some seconds, in which the membrane's response is computed; then about a quarter to a half of
    the sound's length.

    Args:
        rate: Samples a second that it hears. Sounds at another rate are resampled.
        channels: Places along the membrane; channel 0 is the highest frequency.
        loudness: The root mean square that a sound is brought to; 0.3 is right for networks trained on SSC. Of
            silence come only spontaneous spikes.
        ramp: Seconds of fading in and out; None fades over the whole sound, as the program lauscher does.
    """

    rate: int = 16_000
    channels: int = 700
    loudness: float = 0.3
    ramp: float | None = 0.03

    def __post_init__(self) -> None:
        if not isinstance(self.rate, (int, np.integer)) or not 8000 <= self.rate <= 192_000:
            raise InputError(
                f"Cochlea(rate={self.rate}): hair cells need 8000 samples a second or more, at most 192000, a whole "
                "number."
            )
        if not isinstance(self.channels, (int, np.integer)) or self.channels < 2 or self.channels * 40 > 2**16:
            raise InputError(f"Cochlea(channels={self.channels}): must be a whole number from 2 to 1638.")
        if not 0 < self.loudness < math.inf or (self.ramp is not None and not self.ramp >= 0):
            raise InputError(
                f"Cochlea(loudness={self.loudness}, ramp={self.ramp}): loudness is above 0, ramp from 0 or None."
            )

    @property
    def dt(self) -> float:
        """Seconds between samples of membrane and nerve."""
        return 1 / (self.rate // 2)

    def velocity(self, sound: npt.ArrayLike, rate: int | None = None) -> Sound:
        """Of each channel, (channels, samples // 2 + 1), in double precision, as the program lauscher has it.

        The half of a spectrum with its last frequency makes one sample more than half of the sound's.
        """
        conditioned = self._conditioned(sound, rate)
        spectrum = np.fft.fft(conditioned)[: len(conditioned) // 2 + 1]
        moved: Sound = np.fft.ifft(transfer(len(conditioned), self.rate, self.channels, False) * spectrum).real
        return moved

    def probabilities(self, sound: npt.ArrayLike, rate: int | None = None) -> npt.NDArray[np.floating]:
        """That a nerve fibre of each channel fires at each sample, (channels, samples // 2 + 1): nothing random."""
        velocity = np.ascontiguousarray(self.velocity(sound, rate).T)
        return HairCells(self.channels, self.dt).probabilities(velocity).T

    def __call__(self, sound: npt.ArrayLike, rate: int | None = None, *, seed: int = 0) -> Events:
        """The spikes of a sound. The same seed gives the same spikes.

        Args:
            sound: Samples of one channel; whole numbers are fine.
            rate: Samples a second; the cochlea's own if not given.
            seed: Of the nerve fibres.
        """
        conditioned = self._conditioned(sound, rate)
        return _Nerve(self, seed).spikes(self._moving(conditioned))

    def listen(self, *, level: float, piece: float = PIECE, seed: int = 0) -> "Listening":
        """An ear for sound that comes in chunks, at `rate`.

        Args:
            level: The root mean square of the sound, which is not known while it comes; samples are scaled by
                loudness / level. There is no fading in or out.
            piece: Seconds that are filtered at once. Spikes are certain a quarter of a second after the end of a piece.
            seed: Of the nerve fibres.
        """
        return Listening(self, level, piece, seed)

    def _conditioned(self, sound: npt.ArrayLike, rate: int | None) -> Sound:
        samples = np.asarray(sound)
        if samples.ndim != 1:
            raise InputError(
                f"a sound is one row of samples; got shape {samples.shape}. For stereo pass sound.mean(-1)."
            )
        samples = samples.astype(np.float64)
        if samples.size < 64:
            raise InputError(f"a sound of {samples.size} samples is too short to hear; 64 at least.")
        if not np.isfinite(samples).all():
            raise InputError("the sound holds NaN or infinity.")
        if rate is not None and rate != self.rate:
            samples = _resampled(samples, rate, self.rate)
        level = math.sqrt(float((samples**2).mean()))
        samples = samples * (self.loudness / level) if level > 0 else samples
        half = len(samples) // 2
        fade = half if self.ramp is None else min(half, round(self.ramp * self.rate))
        window = np.hanning(2 * fade)
        samples[:fade] *= window[:fade]
        samples[len(samples) - fade :] *= window[fade:]
        return samples

    def _moving(self, sound: Sound) -> Iterator[npt.NDArray[np.float32]]:
        """The velocity, (time, channels), a stretch after another."""
        if len(sound) <= WHOLE * self.rate:
            grid = self.rate // 4  # sounds of about the same length share a response
            yield self.padded(sound, -(-len(sound) // grid) * grid)[: (len(sound) + 1) // 2]
            return
        pieces = _Pieces(self, PIECE)
        yield from pieces.add(sound)
        yield from pieces.end()

    def padded(self, sound: Sound, least: int) -> npt.NDArray[np.float32]:
        """The velocity of a sound followed by silence, (time, channels), at exactly half of the rate."""
        half = int(_fft().next_fast_len(-(-least // 2)))
        spectrum = np.fft.fft(sound, 2 * half)[:half].astype(np.complex64)
        response = transfer(2 * half, self.rate, self.channels, True)[:, :half]
        return np.ascontiguousarray(_fft().ifft(response * spectrum, axis=-1, overwrite_x=True).real.T)


class _Pieces:
    """The velocity, (time, channels), of sound that comes bit by bit: piece by piece, however it is cut into chunks."""

    def __init__(self, cochlea: Cochlea, seconds: float):
        self.cochlea = cochlea
        self.piece, self.lead = (2 * round(length * cochlea.rate / 2) for length in (seconds, LEAD))
        self.sound: Sound = np.zeros(0)
        self.moved = np.zeros((0, cochlea.channels), np.float32)  # its end waits for what the next piece adds

    def add(self, sound: Sound) -> Iterator[npt.NDArray[np.float32]]:
        self.sound = np.concatenate((self.sound, sound))
        while len(self.sound) >= self.piece:
            yield self._next(self.piece)

    def end(self) -> Iterator[npt.NDArray[np.float32]]:
        if len(self.sound):
            yield self._next(len(self.sound))
        yield self.moved

    def _next(self, samples: int) -> npt.NDArray[np.float32]:
        """What is certain once the next `samples` are heard."""
        part = np.pad(self.sound[:samples], (self.lead, 0))
        self.sound = self.sound[samples:]
        moved = self.cochlea.padded(part, self.lead + self.piece)[: (len(part) + 1) // 2]
        ahead = self.lead // 2
        early = min(ahead, len(self.moved))
        self.moved[len(self.moved) - early :] += moved[ahead - early : ahead]
        waiting = np.concatenate((self.moved, moved[ahead:]))
        certain, self.moved = np.split(waiting, [max(0, len(waiting) - ahead)])
        return certain


class _Nerve:
    """Hair cells and bushy cells, which remember what they heard."""

    def __init__(self, cochlea: Cochlea, seed: int):
        self.dt = cochlea.dt
        self.hair = HairCells(cochlea.channels, cochlea.dt)
        if seed < 0:
            raise InputError(f"seed={seed}: a seed is a whole number from 0.")
        self.bushy = BushyCells(cochlea.channels, cochlea.dt, np.random.default_rng(seed))
        self.waiting = np.zeros((0, cochlea.channels), np.float32)

    def spikes(self, moving: Iterable[npt.NDArray[np.float32]], *, ended: bool = True) -> Events:
        """The spikes of a membrane that moves; what is left of a stretch waits unless the sound has `ended`."""
        parts: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        for moved in moving:
            self.waiting = np.concatenate((self.waiting, moved))
            while len(self.waiting) >= STRETCH:
                parts.append(self._heard(STRETCH))
        if ended and len(self.waiting):
            parts.append(self._heard(len(self.waiting)))
        if not parts:
            return Events(np.zeros(0), np.zeros(0, np.int64))
        when, where = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return Events(when * self.dt, where)

    def _heard(self, samples: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        moved, self.waiting = self.waiting[:samples], self.waiting[samples:]
        return self.bushy.spikes(self.hair.probabilities(moved))


class Listening:
    """A cochlea that hears sound as it comes. How the sound is cut into chunks does not change a spike."""

    def __init__(self, cochlea: Cochlea, level: float, piece: float, seed: int):
        if not (math.isfinite(level) and level > 0):
            raise InputError(f"listen(level={level}): the root mean square of the sound, above 0.")
        if not 0.05 <= piece <= WHOLE:
            raise InputError(f"listen(piece={piece}): from 0.05 to {WHOLE:g} seconds.")
        self._scale = cochlea.loudness / level
        self._pieces = _Pieces(cochlea, piece)
        self._nerve = _Nerve(cochlea, seed)
        self._ended = False

    @property
    def heard(self) -> float:
        """Seconds from the beginning up to which all spikes are out."""
        return max(0, self._nerve.bushy.now - 1) * self._nerve.dt

    def __call__(self, chunk: npt.ArrayLike) -> Events:
        """The spikes that have become certain with these samples; times are from the beginning of the sound."""
        samples = np.asarray(chunk, np.float64)
        if self._ended:
            raise InputError("the sound has ended. Call cochlea.listen(...) for another.")
        if samples.ndim != 1 or not np.isfinite(samples).all():
            raise InputError(f"a chunk is one row of finite samples; got shape {samples.shape}.")
        return self._nerve.spikes(self._pieces.add(samples * self._scale), ended=False)

    def end(self) -> Events:
        """The last spikes."""
        self._ended = True
        return self._nerve.spikes(self._pieces.end())


def _fft() -> Any:
    try:
        from scipy import fft
    except ImportError:
        raise InputError("the cochlea needs scipy: pip install 'adptnet[events]'.") from None
    return fft


def _resampled(samples: Sound, given: int, wanted: int) -> Sound:
    if not 1000 <= given < math.inf or given != int(given):
        raise InputError(
            f"a rate of {given} samples a second is no sound's; it is a whole number from 1000. Pass the recording's."
        )
    from scipy import signal

    common = math.gcd(int(given), wanted)
    resampled: Sound = signal.resample_poly(samples, wanted // common, int(given) // common)
    return resampled
