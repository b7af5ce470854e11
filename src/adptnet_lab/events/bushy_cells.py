"""Bushy cells: leaky integrate-and-fire neurons driven by simulated auditory-nerve fibres."""

import numpy as np
import numpy.typing as npt

__all__ = ["BushyCells"]

Floats = npt.NDArray[np.floating]
Indices = npt.NDArray[np.int64]

FIBRES = 40
WEIGHT = 13_000 / FIBRES
MEMBRANE, SYNAPSE, REFRACTORY = 1e-3, 0.5e-3, 1e-3  # time constants and refractory period of the bushy cells, s


class BushyCells:
    """One bushy cell per channel: a leaky integrate-and-fire neuron driven by 40 fibres with a refractory time of 1 ms.

    Each of the 40 fibres fires with probability p at a sample. Instead of one draw per fibre, a Poisson number of hits
    with mean -40 ln(1 - p) is distributed uniformly over the fibres: a fibre that is hit at least once fires.

    Args:
        channels: Number of cells.
        dt: Seconds per sample.
        generator: Source of randomness.
    """

    def __init__(self, channels: int, dt: float, generator: np.random.Generator):
        self.channels = channels
        self.dt = dt
        self.generator = generator
        self.refractory = max(1, round(REFRACTORY / dt))
        self.now = 0
        self.fibre_ready = np.zeros(channels * FIBRES, np.int64)
        self.ready = np.zeros(channels, np.int32)
        self.current = np.zeros(channels, np.float32)
        self.membrane = np.zeros(channels, np.float32)

    def spikes(self, probability: Floats) -> tuple[Indices, Indices]:
        """Return the samples and the channels of the spikes, and advance the state.

        Args:
            probability: Firing probability of a fibre, (time, channels).

        Returns:
            Sample, counted from the first call, and channel of each spike.
        """
        input_counts = self.count_firing_fibres(probability)
        decay, fade = np.float32(np.exp(-self.dt / MEMBRANE)), np.float32(np.exp(-self.dt / SYNAPSE))
        weight = np.float32(WEIGHT * self.dt)
        v, current, ready = self.membrane, self.current, self.ready
        charge, resting = np.empty_like(v), np.empty(self.channels, bool)
        fired = np.empty(probability.shape, bool)
        now = start = self.now
        for above, fibres in zip(fired, input_counts, strict=True):
            np.greater_equal(v, 1, out=above)
            v *= decay
            v[above] = 0.0
            ready[above] = now + self.refractory
            current *= fade
            current += fibres
            np.multiply(current, weight, out=charge)
            np.greater(ready, now, out=resting)
            charge[resting] = 0.0
            v += charge
            np.minimum(v, 1, out=v)
            now += 1
        self.now = now
        when, where = np.nonzero(fired)
        return when + (start - 1), where

    def count_firing_fibres(self, probability: Floats) -> npt.NDArray[np.float32]:
        """Return how many fibres of each channel fire at each sample, outside their refractory time.

        Args:
            probability: Firing probability of a fibre, (time, channels).
        """
        cells, fibre = self._draw_hits(probability)
        order = np.argsort(fibre, kind="stable")
        cells, fibre = cells[order], fibre[order]  # grouped by fibre, each in time order
        time = (cells // self.channels + self.now).astype(np.int64)
        first = np.ones(fibre.size, bool)
        first[1:] = fibre[1:] != fibre[:-1]
        soon = np.zeros(fibre.size, bool)
        soon[1:] = time[1:] - time[:-1] < self.refractory
        soon &= ~first
        last = time.copy()  # at each hit, when the fibre last fired
        fires = ~soon
        early = np.flatnonzero(first & (time < self.fibre_ready[fibre]))
        fires[early], last[early] = False, self.fibre_ready[fibre[early]] - self.refractory
        head = np.maximum.accumulate(np.where(soon, 0, np.arange(fibre.size)))
        place = np.flatnonzero(soon)
        rank = place - head[place]
        for r in range(1, int(rank.max(initial=0)) + 1):
            at = place[rank == r]
            fires[at] = time[at] >= last[at - 1] + self.refractory
            last[at] = np.where(fires[at], time[at], last[at - 1])
        ends = np.flatnonzero(np.append(first[1:], True)) if fibre.size else np.zeros(0, np.int64)
        self.fibre_ready[fibre[ends]] = last[ends] + self.refractory
        counts = np.bincount(cells[fires], minlength=probability.size).astype(np.float32)
        return counts.reshape(probability.shape)

    def _draw_hits(self, probability: Floats) -> tuple[Indices, npt.NDArray[np.uint16]]:
        """Return the flattened (time, channel) index and the fibre of every hit, in order and without duplicates."""
        mean = np.log(1 - np.minimum(probability, 0.9), dtype=np.float32).ravel()
        mean *= -FIBRES
        draw = self.generator.random(mean.size, dtype=np.float32)
        term = np.exp(-mean)
        cells = np.flatnonzero(draw > term)
        counts = np.ones(cells.size, np.int64)
        more, below = np.arange(cells.size), term[cells]
        mean, draw, term = mean[cells], draw[cells], below
        for k in range(1, 256):  # invert the Poisson CDF for the cells that have not reached their draw
            term = term * mean / np.float32(k)
            below = below + term
            # The float32 terms sum to slightly less than 1, so also stop where they become negligible.
            left = np.flatnonzero((draw > below) & ((mean > k) | (term > 1e-7)))
            if not left.size:
                break
            more, mean, draw, term, below = more[left], mean[left], draw[left], term[left], below[left]
            counts[more] += 1
        cells = np.repeat(cells, counts)
        fibre = (cells % self.channels * FIBRES).astype(np.uint16)
        fibre += self.generator.integers(FIBRES, size=cells.size, dtype=np.uint8)
        duplicate = np.zeros(cells.size, bool)
        for lag in range(1, int(counts.max(initial=1))):
            duplicate[lag:] |= (cells[lag:] == cells[:-lag]) & (fibre[lag:] == fibre[:-lag])
        return (cells[~duplicate], fibre[~duplicate]) if duplicate.any() else (cells, fibre)
