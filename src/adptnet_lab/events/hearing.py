"""From the movement of the basilar membrane to spikes: Meddis' hair cells, then bushy cells, sample by sample."""

import numpy as np
import numpy.typing as npt

__all__ = ["BushyCells", "HairCells"]

Floats = npt.NDArray[np.floating]
Indices = npt.NDArray[np.int64]

REPLENISH, RELEASE, LOSS, REUPTAKE, REPROCESS = 5.05, 2000.0, 2500.0, 6580.0, 66.3  # y, g, l, r, x of Meddis, 1/s
PERMEABLE, SATURATION, FIRING, FULL = 5.0, 300.0, 50_000.0, 1.0  # A, B, h, M
FIBRES = 40
WEIGHT = 13_000 / FIBRES
MEMBRANE, SYNAPSE, REFRACTORY = 1e-3, 0.5e-3, 1e-3  # time constants of the bushy cells, and the rest after a spike


class HairCells:
    """The transmitter of each channel: q ready to be released, c in the cleft, w taken up again. It starts at rest."""

    def __init__(self, channels: int, dt: float):
        self.dt = dt
        released = RELEASE * PERMEABLE / (PERMEABLE + SATURATION)
        cleft = FULL * REPLENISH * released / (LOSS * released + REPLENISH * (LOSS + REUPTAKE))
        self.cleft = np.full(channels, cleft)
        self.ready = np.full(channels, cleft * (LOSS + REUPTAKE) / released)
        self.taken = np.full(channels, cleft * REUPTAKE / REPROCESS)

    def probabilities(self, velocity: Floats) -> Floats:
        """That a fibre fires, at each sample: (time, channels) to the same."""
        dt, q, c = self.dt, self.ready.astype(velocity.dtype), self.cleft.astype(velocity.dtype)
        returned = (REPROCESS * dt * self.taken).astype(velocity.dtype)  # what comes back at the next sample
        open_ = np.maximum(velocity + PERMEABLE, 0)
        release = RELEASE * dt * open_ / (open_ + SATURATION)
        found: Floats = np.empty_like(release)
        ejected, moved = np.empty_like(q), np.empty_like(q)
        kept, staying, caught = (
            np.asarray(number, velocity.dtype)
            for number in (1 - (LOSS + REUPTAKE) * dt, 1 - REPROCESS * dt, REPROCESS * dt * REUPTAKE * dt)
        )
        refilled = np.asarray(REPLENISH * dt, velocity.dtype)
        for released, cleft in zip(release, found, strict=True):
            np.multiply(released, q, out=ejected)
            np.subtract(FULL, q, out=moved)
            np.maximum(moved, 0, out=moved)
            moved *= refilled
            moved -= ejected
            moved += returned
            q += moved
            returned *= staying
            np.multiply(c, caught, out=moved)
            returned += moved
            np.multiply(c, kept, out=cleft)
            cleft += ejected
            np.maximum(cleft, 0, out=cleft)
            c = cleft
        self.ready, self.cleft, self.taken = q, c.copy(), returned / (REPROCESS * dt)
        found *= FIRING * dt
        return found


class BushyCells:
    """A bushy cell for each channel, a leaky integrate-and-fire neuron that hears 40 fibres, each silent 1 ms a spike.

    Fibres that fire with probability p at a sample are those that are hit at least once by arrows shot at random, a
    Poisson number with mean -40 ln(1 - p): no array over all fibres is drawn.
    """

    def __init__(self, channels: int, dt: float, generator: np.random.Generator):
        self.channels = channels
        self.dt = dt
        self.generator = generator
        self.rest = max(1, round(REFRACTORY / dt))
        self.now = 0
        self.fibre_ready = np.zeros(channels * FIBRES, np.int64)
        self.ready = np.zeros(channels, np.int32)
        self.current = np.zeros(channels, np.float32)
        self.membrane = np.zeros(channels, np.float32)

    def spikes(self, probability: Floats) -> tuple[Indices, Indices]:
        """When and in which channels spikes come of (time, channels); samples are counted from the first call."""
        heard = self._heard(probability)
        decay, fade = np.float32(np.exp(-self.dt / MEMBRANE)), np.float32(np.exp(-self.dt / SYNAPSE))
        weight = np.float32(WEIGHT * self.dt)
        v, current, ready = self.membrane, self.current, self.ready
        charge, resting = np.empty_like(v), np.empty(self.channels, bool)
        fired = np.empty(probability.shape, bool)
        now = begun = self.now
        for above, fibres in zip(fired, heard, strict=True):
            np.greater_equal(v, 1, out=above)
            v *= decay
            v[above] = 0.0
            ready[above] = now + self.rest
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
        return when + (begun - 1), where

    def _heard(self, probability: Floats) -> npt.NDArray[np.float32]:
        """How many fibres of each channel fire at each sample."""
        cells, fibre = self._arrows(probability)
        order = np.argsort(fibre, kind="stable")
        cells, fibre = cells[order], fibre[order]  # one fibre after another, each in the order of time
        time = (cells // self.channels + self.now).astype(np.int64)
        first = np.ones(fibre.size, bool)
        first[1:] = fibre[1:] != fibre[:-1]
        soon = np.zeros(fibre.size, bool)
        soon[1:] = time[1:] - time[:-1] < self.rest
        soon &= ~first
        last = time.copy()  # when the fibre last fired, at each arrow
        fires = ~soon
        early = np.flatnonzero(first & (time < self.fibre_ready[fibre]))
        fires[early], last[early] = False, self.fibre_ready[fibre[early]] - self.rest
        head = np.maximum.accumulate(np.where(soon, 0, np.arange(fibre.size)))
        place = np.flatnonzero(soon)
        rank = place - head[place]
        for r in range(1, int(rank.max(initial=0)) + 1):
            at = place[rank == r]
            fires[at] = time[at] >= last[at - 1] + self.rest
            last[at] = np.where(fires[at], time[at], last[at - 1])
        ends = np.flatnonzero(np.append(first[1:], True)) if fibre.size else np.zeros(0, np.int64)
        self.fibre_ready[fibre[ends]] = last[ends] + self.rest
        counts = np.bincount(cells[fires], minlength=probability.size).astype(np.float32)
        return counts.reshape(probability.shape)

    def _arrows(self, probability: Floats) -> tuple[Indices, npt.NDArray[np.uint16]]:
        """Where (of time and channel, flattened, in order) and at which fibres of all there are shots, none twice."""
        mean = np.log(1 - np.minimum(probability, 0.9), dtype=np.float32).ravel()
        mean *= -FIBRES
        draw = self.generator.random(mean.size, dtype=np.float32)
        term = np.exp(-mean)
        cells = np.flatnonzero(draw > term)
        counts = np.ones(cells.size, np.int64)
        more, below = np.arange(cells.size), term[cells]
        mean, draw, term = mean[cells], draw[cells], below
        for k in range(1, 256):  # the Poisson distribution, from below, for those that have not reached their draw
            term = term * mean / np.float32(k)
            below = below + term
            left = np.flatnonzero((draw > below) & ((mean > k) | (term > 1e-7)))  # float32 adds up to a little below 1
            if not left.size:
                break
            more, mean, draw, term, below = more[left], mean[left], draw[left], term[left], below[left]
            counts[more] += 1
        cells = np.repeat(cells, counts)
        fibre = (cells % self.channels * FIBRES).astype(np.uint16)
        fibre += self.generator.integers(FIBRES, size=cells.size, dtype=np.uint8)
        again = np.zeros(cells.size, bool)
        for lag in range(1, int(counts.max(initial=1))):
            again[lag:] |= (cells[lag:] == cells[:-lag]) & (fibre[lag:] == fibre[:-lag])
        return (cells[~again], fibre[~again]) if again.any() else (cells, fibre)
