"""Inner hair cells: Meddis' model of transmitter release, from membrane velocity to firing probability."""

import numpy as np
import numpy.typing as npt

__all__ = ["HairCells"]

Floats = npt.NDArray[np.floating]

REPLENISH, RELEASE, LOSS, REUPTAKE, REPROCESS = 5.05, 2000.0, 2500.0, 6580.0, 66.3  # y, g, l, r, x of Meddis, 1/s
PERMEABLE, SATURATION, FIRING, FULL = 5.0, 300.0, 50_000.0, 1.0  # A, B, h, M


class HairCells:
    """Transmitter in the hair cell of each channel: q available, c in the cleft, w being reprocessed. Starts at rest.

    Args:
        channels: Number of hair cells.
        dt: Seconds per sample.
    """

    def __init__(self, channels: int, dt: float):
        self.dt = dt
        released = RELEASE * PERMEABLE / (PERMEABLE + SATURATION)
        cleft = FULL * REPLENISH * released / (LOSS * released + REPLENISH * (LOSS + REUPTAKE))
        self.cleft = np.full(channels, cleft)
        self.ready = np.full(channels, cleft * (LOSS + REUPTAKE) / released)
        self.taken = np.full(channels, cleft * REUPTAKE / REPROCESS)

    def probabilities(self, velocity: Floats) -> Floats:
        """Return the probability that a nerve fibre fires at each sample, and advance the state.

        Args:
            velocity: Membrane velocity, (time, channels).

        Returns:
            (time, channels).
        """
        dt, q, c = self.dt, self.ready.astype(velocity.dtype), self.cleft.astype(velocity.dtype)
        returned = (REPROCESS * dt * self.taken).astype(velocity.dtype)  # transmitter returned at the next sample
        stimulus = np.maximum(velocity + PERMEABLE, 0)
        release = RELEASE * dt * stimulus / (stimulus + SATURATION)
        cleft_levels: Floats = np.empty_like(release)
        ejected, change = np.empty_like(q), np.empty_like(q)
        remaining, unprocessed, recaptured = (
            np.asarray(number, velocity.dtype)
            for number in (1 - (LOSS + REUPTAKE) * dt, 1 - REPROCESS * dt, REPROCESS * dt * REUPTAKE * dt)
        )
        replenished = np.asarray(REPLENISH * dt, velocity.dtype)
        for released, cleft in zip(release, cleft_levels, strict=True):
            np.multiply(released, q, out=ejected)
            np.subtract(FULL, q, out=change)
            np.maximum(change, 0, out=change)
            change *= replenished
            change -= ejected
            change += returned
            q += change
            returned *= unprocessed
            np.multiply(c, recaptured, out=change)
            returned += change
            np.multiply(c, remaining, out=cleft)
            cleft += ejected
            np.maximum(cleft, 0, out=cleft)
            c = cleft
        self.ready, self.cleft, self.taken = q, c.copy(), returned / (REPROCESS * dt)
        cleft_levels *= FIRING * dt
        return cleft_levels
