"""From the movement of the basilar membrane to spikes: Meddis' hair cells, then bushy cells, sample by sample."""

import numpy as np
import numpy.typing as npt

__all__ = ["BushyCells", "HairCells"]

Floats = npt.NDArray[np.floating]

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
        dt, q, c, w = self.dt, self.ready, self.cleft, self.taken
        open_ = np.maximum(velocity + PERMEABLE, 0)
        release = RELEASE * dt * open_ / (open_ + SATURATION)
        found = np.empty_like(release)
        ejected, moved = np.empty_like(q), np.empty_like(q)
        kept = 1 - (LOSS + REUPTAKE) * dt
        for released, out in zip(release, found, strict=True):
            np.multiply(released, q, out=ejected)
            np.subtract(FULL, q, out=moved)
            np.maximum(moved, 0, out=moved)
            moved *= REPLENISH * dt
            q += moved
            q -= ejected
            np.multiply(w, REPROCESS * dt, out=moved)
            q += moved
            w -= moved
            np.multiply(c, REUPTAKE * dt, out=moved)
            w += moved
            c *= kept
            c += ejected
            np.maximum(c, 0, out=c)
            out[:] = c
        found *= FIRING * dt
        return found


class BushyCells:
    """A bushy cell for each channel, a leaky integrate-and-fire neuron that hears 40 fibres, each silent 1 ms a spike.

    Fibres that fire with probability p at a sample are those that a Poisson number of arrows with mean -40 ln(1 - p), shot
    at random, hit at least once: no array over all fibres is drawn.
    """

    def __init__(self, channels: int, dt: float, generator: np.random.Generator):
        self.dt = dt
        self.generator = generator
        self.rest = max(1, round(REFRACTORY / dt))
        self.now = 0
        self.fibre_ready = np.zeros(channels * FIBRES, np.int64)
        self.ready = np.zeros(channels, np.int64)
        self.current = np.zeros(channels)
        self.membrane = np.zeros(channels)
        self.channels = channels

    def spikes(self, probability: Floats) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Samples, counted from the first call, and channels of the spikes that (time, channels) of `probability` bring."""
        arrows, ends = self._arrows(probability)
        mark = np.empty(self.channels * FIBRES, np.int64)
        decay, fade = np.exp(-self.dt / MEMBRANE), np.exp(-self.dt / SYNAPSE)
        v, current, charge = self.membrane, self.current, np.empty(self.channels)
        when: list[npt.NDArray[np.int64]] = []
        where: list[npt.NDArray[np.int64]] = []
        start = 0
        for end in ends:
            fired = np.flatnonzero(v >= 1)
            v *= decay
            if fired.size:
                when.append(np.full(fired.size, self.now - 1))
                where.append(fired)
                v[fired] = 0.0
                self.ready[fired] = self.now + self.rest
            current *= fade
            hit = arrows[start:end]
            hit = hit[self.fibre_ready[hit] <= self.now]
            order = np.arange(hit.size)
            mark[hit] = order
            hit = hit[mark[hit] == order]  # a fibre that is hit twice fires once
            self.fibre_ready[hit] = self.now + self.rest
            current += np.bincount(hit // FIBRES, minlength=self.channels)
            np.multiply(current, WEIGHT * self.dt, out=charge)
            charge[self.ready > self.now] = 0.0
            v += charge
            np.minimum(v, 1, out=v)
            start = end
            self.now += 1
        empty = np.zeros(0, np.int64)
        return np.concatenate([empty, *when]), np.concatenate([empty, *where])

    def _arrows(self, probability: Floats) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The fibres that are shot at, one sample after another, and where each sample's end."""
        mean = -FIBRES * np.log1p(-np.minimum(probability, 1 - 1e-9))
        counts = self.generator.poisson(mean)
        channel = np.repeat(np.tile(np.arange(self.channels), len(counts)), counts.ravel())
        fibre = self.generator.integers(FIBRES, size=channel.size)
        return channel * FIBRES + fibre, np.cumsum(counts.sum(1))
