"""Cochlea model: converts sound to spikes of 700 channels, as for SHD and SSC (Cramer et al. 2020)."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from adptnet.errors import InputError

from .basilar_membrane import compute_transfer_function
from .bushy_cells import BushyCells
from .hair_cells import HairCells
from .stream import Events

__all__ = ["Cochlea", "CochleaStream"]

Sound = npt.NDArray[np.float64]
WHOLE = 2.0  # longest sound, in seconds, that is filtered by one FFT; longer sounds are filtered in pieces
BLOCK = 500  # samples per block of the nerve simulation, whose arrays then stay in the CPU cache
PIECE, LEAD = 0.75, 0.25  # seconds per piece, and of silence before it: the membrane model is not causal


@dataclasses.dataclass(frozen=True)
class Cochlea:
    """Basilar membrane, hair cells and bushy cells; the membrane is simulated at half of `rate`.

    The first sound takes some seconds, in which the transfer function of the membrane is computed. Further sounds take
    about a quarter to a half of their duration.

    Args:
        rate: Samples per second of the simulation. Sounds at another rate are resampled.
        channels: Places along the membrane; channel 0 is the highest frequency.
        loudness: Root mean square to which sounds are scaled; 0.3 suits networks trained on SSC. Silence yields only
            spontaneous spikes.
        ramp: Seconds of fading in and out; None fades over the whole sound, as in lauscher (the code of Cramer et al.).
    """

    rate: int = 16_000
    channels: int = 700
    loudness: float = 0.3
    ramp: float | None = 0.03

    def __post_init__(self) -> None:
        if not isinstance(self.rate, (int, np.integer)) or not 8000 <= self.rate <= 192_000:
            raise InputError(f"Cochlea(rate={self.rate}): must be an integer from 8000 to 192000 samples per second.")
        if not isinstance(self.channels, (int, np.integer)) or self.channels < 2 or self.channels * 40 > 2**16:
            raise InputError(f"Cochlea(channels={self.channels}): must be an integer from 2 to 1638.")
        if not 0 < self.loudness < math.inf or (self.ramp is not None and not self.ramp >= 0):
            raise InputError(
                f"Cochlea(loudness={self.loudness}, ramp={self.ramp}): loudness must be above 0, ramp at least 0."
            )

    @property
    def dt(self) -> float:
        """Seconds per sample of membrane and nerve."""
        return 1 / (self.rate // 2)

    def velocity(self, sound: npt.ArrayLike, rate: int | None = None) -> Sound:
        """Return the velocity of the membrane, (channels, samples // 2 + 1), in float64, as lauscher computes it.

        The one-sided spectrum includes the Nyquist frequency, hence one sample more than half of the sound's.

        Args:
            sound: Samples of one channel.
            rate: Samples per second; the cochlea's own by default.
        """
        conditioned = self._condition(sound, rate)
        spectrum = np.fft.fft(conditioned)[: len(conditioned) // 2 + 1]
        transfer = compute_transfer_function(len(conditioned), self.rate, self.channels, False)
        velocity: Sound = np.fft.ifft(transfer * spectrum).real
        return velocity

    def probabilities(self, sound: npt.ArrayLike, rate: int | None = None) -> npt.NDArray[np.floating]:
        """Return the probability that a nerve fibre fires, (channels, samples // 2 + 1). Nothing here is random.

        Args:
            sound: Samples of one channel.
            rate: Samples per second; the cochlea's own by default.
        """
        velocity = np.ascontiguousarray(self.velocity(sound, rate).T)
        return HairCells(self.channels, self.dt).probabilities(velocity).T

    def __call__(self, sound: npt.ArrayLike, rate: int | None = None, *, seed: int = 0) -> Events:
        """Return the spikes of a sound. The same seed gives the same spikes.

        Args:
            sound: Samples of one channel, integer or floating point.
            rate: Samples per second; the cochlea's own by default.
            seed: Seed of the nerve fibres.

        Raises:
            InputError: The sound is not one-dimensional, too short or not finite.
        """
        conditioned = self._condition(sound, rate)
        return _Nerve(self, seed).spikes(self.filter_blocks(conditioned))

    def listen(self, *, level: float, piece: float = PIECE, seed: int = 0) -> "CochleaStream":
        """Return a stream that converts sound at `rate` chunk by chunk.

        Args:
            level: Root mean square of the whole sound, which a stream cannot measure; samples are scaled by
                loudness / level. There is no fading in or out.
            piece: Seconds per filtered piece. Spikes are final a quarter of a second after the end of a piece.
            seed: Seed of the nerve fibres.
        """
        return CochleaStream(self, level, piece, seed)

    def _condition(self, sound: npt.ArrayLike, rate: int | None) -> Sound:
        """Validate a sound, resample it, scale it to `loudness`, and fade it in and out."""
        samples = np.asarray(sound)
        if samples.ndim != 1:
            raise InputError(
                f"a sound is a one-dimensional array; got shape {samples.shape}. For stereo pass sound.mean(-1)."
            )
        samples = samples.astype(np.float64)
        if samples.size < 64:
            raise InputError(f"a sound of {samples.size} samples is too short; it needs at least 64.")
        if not np.isfinite(samples).all():
            raise InputError("the sound contains NaN or infinity.")
        if rate is not None and rate != self.rate:
            samples = _resample(samples, rate, self.rate)
        level = math.sqrt(float((samples**2).mean()))
        samples = samples * (self.loudness / level) if level > 0 else samples
        half = len(samples) // 2
        fade = half if self.ramp is None else min(half, round(self.ramp * self.rate))
        window = np.hanning(2 * fade)
        samples[:fade] *= window[:fade]
        samples[len(samples) - fade :] *= window[fade:]
        return samples

    def filter_blocks(self, sound: Sound) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the velocity of the membrane, (time, channels), in consecutive blocks.

        Args:
            sound: Conditioned samples at `rate`.
        """
        if len(sound) <= WHOLE * self.rate:
            grid = self.rate // 4  # sounds of similar length share a transfer function
            yield self.filter_padded(sound, -(-len(sound) // grid) * grid)[: (len(sound) + 1) // 2]
            return
        pieces = _PieceFilter(self, PIECE)
        yield from pieces.add(sound)
        yield from pieces.end()

    def filter_padded(self, sound: Sound, least: int) -> npt.NDArray[np.float32]:
        """Return the velocity of the membrane for a zero-padded sound, (time, channels), at exactly half of the rate.

        Args:
            sound: Conditioned samples at `rate`.
            least: Smallest length to pad to.
        """
        half = int(_import_fft().next_fast_len(-(-least // 2)))
        spectrum = np.fft.fft(sound, 2 * half)[:half].astype(np.complex64)
        response = compute_transfer_function(2 * half, self.rate, self.channels, True)[:, :half]
        return np.ascontiguousarray(_import_fft().ifft(response * spectrum, axis=-1, overwrite_x=True).real.T)


class _PieceFilter:
    """Overlap-add filter: membrane velocity, (time, channels), of a sound that arrives in chunks of any size."""

    def __init__(self, cochlea: Cochlea, seconds: float):
        self.cochlea = cochlea
        self.piece, self.lead = (2 * round(length * cochlea.rate / 2) for length in (seconds, LEAD))
        self.sound: Sound = np.zeros(0)
        self.velocity = np.zeros((0, cochlea.channels), np.float32)  # its end still overlaps the next piece

    def add(self, sound: Sound) -> Iterator[npt.NDArray[np.float32]]:
        self.sound = np.concatenate((self.sound, sound))
        while len(self.sound) >= self.piece:
            yield self._next(self.piece)

    def end(self) -> Iterator[npt.NDArray[np.float32]]:
        if len(self.sound):
            yield self._next(len(self.sound))
        yield self.velocity

    def _next(self, samples: int) -> npt.NDArray[np.float32]:
        """Return the velocity that is final once the next `samples` have been filtered."""
        part = np.pad(self.sound[:samples], (self.lead, 0))
        self.sound = self.sound[samples:]
        velocity = self.cochlea.filter_padded(part, self.lead + self.piece)[: (len(part) + 1) // 2]
        ahead = self.lead // 2
        early = min(ahead, len(self.velocity))
        self.velocity[len(self.velocity) - early :] += velocity[ahead - early : ahead]
        pending = np.concatenate((self.velocity, velocity[ahead:]))
        final, self.velocity = np.split(pending, [max(0, len(pending) - ahead)])
        return final


class _Nerve:
    """Hair cells and bushy cells with their state."""

    def __init__(self, cochlea: Cochlea, seed: int):
        self.dt = cochlea.dt
        self.hair = HairCells(cochlea.channels, cochlea.dt)
        if seed < 0:
            raise InputError(f"seed={seed}: a seed must be an integer >= 0.")
        self.bushy = BushyCells(cochlea.channels, cochlea.dt, np.random.default_rng(seed))
        self.pending = np.zeros((0, cochlea.channels), np.float32)

    def spikes(self, blocks: Iterable[npt.NDArray[np.float32]], *, ended: bool = True) -> Events:
        """Return the spikes for blocks of velocity; unless `ended`, an incomplete block is kept for the next call."""
        parts: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        for velocity in blocks:
            self.pending = np.concatenate((self.pending, velocity))
            while len(self.pending) >= BLOCK:
                parts.append(self._simulate(BLOCK))
        if ended and len(self.pending):
            parts.append(self._simulate(len(self.pending)))
        if not parts:
            return Events(np.zeros(0), np.zeros(0, np.int64))
        when, where = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return Events(when * self.dt, where)

    def _simulate(self, samples: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        velocity, self.pending = self.pending[:samples], self.pending[samples:]
        return self.bushy.spikes(self.hair.probabilities(velocity))


class CochleaStream:
    """Conversion of sound to spikes chunk by chunk; make one with `Cochlea.listen`.

    The spikes do not depend on how the sound is divided into chunks.

    Args:
        cochlea: The cochlea.
        level: Root mean square of the whole sound.
        piece: Seconds per filtered piece.
        seed: Seed of the nerve fibres.

    Raises:
        InputError: `level` or `piece` is out of range.
    """

    def __init__(self, cochlea: Cochlea, level: float, piece: float, seed: int):
        if not (math.isfinite(level) and level > 0):
            raise InputError(f"listen(level={level}): pass the root mean square of the sound, above 0.")
        if not 0.05 <= piece <= WHOLE:
            raise InputError(f"listen(piece={piece}): must be from 0.05 to {WHOLE:g} seconds.")
        self._scale = cochlea.loudness / level
        self._pieces = _PieceFilter(cochlea, piece)
        self._nerve = _Nerve(cochlea, seed)
        self._ended = False

    @property
    def complete_until(self) -> float:
        """Time, in seconds from the beginning, before which all spikes have been returned."""
        return max(0, self._nerve.bushy.now - 1) * self._nerve.dt

    def __call__(self, chunk: npt.ArrayLike) -> Events:
        """Return the spikes that have become final with these samples.

        Args:
            chunk: Samples at the cochlea's rate, any number of them.

        Returns:
            Spikes with times in seconds from the beginning of the sound.
        """
        samples = np.asarray(chunk, np.float64)
        if self._ended:
            raise InputError("the sound has ended. Call cochlea.listen(...) for another.")
        if samples.ndim != 1 or not np.isfinite(samples).all():
            raise InputError(f"a chunk is a one-dimensional array of finite samples; got shape {samples.shape}.")
        return self._nerve.spikes(self._pieces.add(samples * self._scale), ended=False)

    def end(self) -> Events:
        """End the sound and return the remaining spikes."""
        self._ended = True
        return self._nerve.spikes(self._pieces.end())


def _import_fft() -> Any:
    try:
        from scipy import fft
    except ImportError:
        raise InputError("the cochlea needs scipy: pip install 'adptnet[events]'.") from None
    return fft


def _resample(samples: Sound, rate: int, new_rate: int) -> Sound:
    if not 1000 <= rate < math.inf or rate != int(rate):
        raise InputError(f"rate={rate}: samples per second are an integer >= 1000. Pass the rate of the recording.")
    from scipy import signal

    common = math.gcd(int(rate), new_rate)
    resampled: Sound = signal.resample_poly(samples, new_rate // common, int(rate) // common)
    return resampled
