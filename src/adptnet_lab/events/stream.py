"""Events in memory, and their binning into frames."""

from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from adptnet.errors import InputError, SpecError
from adptnet.spec import Spec, check_positive, check_size, spec, suggest_name

__all__ = ["Bins", "Events", "to_int64"]

BinRule = Literal["floor", "silif"]
Late = Literal["drop", "clamp", "raise"]


def to_int64(values: npt.ArrayLike, what: str, *, hint: str = "") -> npt.NDArray[np.int64]:
    """Return `values` as int64, after checking that they are integers >= 0 that fit.

    Args:
        values: The numbers.
        what: Their name in an error message.
        hint: Text to append to the message if the type is wrong.
    """
    array = np.asarray(values)
    if not array.size:
        return np.zeros(array.shape, np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"{what} are {array.dtype}; they must be integers >= 0.{hint}")
    if array.min() < 0 or array.max() >= 2**63:
        raise InputError(
            f"{what} are {array.dtype} from {array.min()} to {array.max()}; they must be integers >= 0 "
            "that fit into 63 bits."
        )
    return array.astype(np.int64)


class Events(NamedTuple):
    """Events of one recording: times in seconds, and the unit of each. Frames do not depend on their order."""

    times: npt.NDArray[np.float64]
    units: npt.NDArray[np.int64]

    @staticmethod
    def of(
        times: npt.ArrayLike, units: npt.ArrayLike, *, channels: int | None = None, where: str = "events"
    ) -> "Events":
        """Return events from arrays, after validating them.

        Args:
            times: Seconds, finite and not negative, in any order.
            units: The unit of each event.
            channels: Number of units; units must be below it.
            where: Name of the events in error messages.

        Raises:
            InputError: The lengths differ, a time is negative or not finite, or a unit is out of range.
        """
        t, u = np.asarray(times), np.asarray(units)
        if t.size and not (np.issubdtype(t.dtype, np.floating) or np.issubdtype(t.dtype, np.integer)):
            raise InputError(f"{where}: times are {t.dtype}; they must be numbers, in seconds.")
        t = t.astype(np.float64)  # float16 resolves 0.5 ms at 1 s, too little for arithmetic
        if t.ndim != 1 or u.shape != t.shape:
            raise InputError(f"{where}: {t.shape} times and {u.shape} units; there must be one unit for each time.")
        if u.size and not np.issubdtype(u.dtype, np.integer):
            raise InputError(f"{where}: units are {u.dtype}; they must be integers. Pass units.astype(int).")
        if u.size and u.max() >= 2**63:
            raise InputError(f"{where}: units go up to {u.max()}; they must fit into 63 bits.")
        u = u.astype(np.int64)
        if not np.isfinite(t).all() or (t < 0).any():
            bad = int(np.flatnonzero(~(np.isfinite(t) & (t >= 0)))[0])
            raise InputError(f"{where}: times[{bad}] = {t[bad]}; times must be finite and at least 0, in seconds.")
        if u.size and (u.min() < 0 or (channels is not None and u.max() >= channels)):
            bad = int(np.flatnonzero((u < 0) | (u >= (channels or np.inf)))[0])
            raise InputError(
                f"{where}: units[{bad}] = {u[bad]}; units range from 0"
                + (f" to {channels - 1}. Pass Bins(channels=...) if there are more." if channels else ".")
            )
        return Events(t, u)

    def sort_by_time(self) -> "Events":
        """Return the events in time order."""
        order = np.argsort(self.times, kind="stable")
        return Events(self.times[order], self.units[order])


@spec
class Bins(Spec):
    """Binning of events into frames of equal duration: counts, summed over neighbouring units.

    Attributes:
        steps: Number of frames.
        duration: Seconds that the frames span.
        channels: Number of units.
        pool: Neighbouring units that are summed into one feature.
        rule: "floor": frame ⌊t · steps / duration⌋; an event at exactly the end is in the last frame. "silif": the
            frame by `digitize(t, linspace(0, duration, steps))`, which SiLIF, sparch and others use: frames are longer
            by steps / (steps - 1), the first is always empty, and an event at the end or later is late.
        late: What to do with events after the end: "drop" them, "clamp" them into the last frame, or "raise". A
            recording whose events would all be dropped raises `InputError`.
    """

    steps: int = 250
    duration: float = 1.0
    channels: int = 700
    pool: int = 5
    rule: BinRule = "floor"
    late: Late = "drop"

    def __post_init__(self) -> None:
        check_size(self, steps=self.steps, channels=self.channels, pool=self.pool)
        check_positive(self, duration=self.duration)
        for name, choices in (("rule", BinRule), ("late", Late)):
            value = getattr(self, name)
            if value not in get_args(choices):
                raise SpecError(f"Bins({name}={value!r}) is unknown.{suggest_name(str(value), get_args(choices))}")
        if self.channels % self.pool:
            raise SpecError(f"Bins(channels={self.channels}, pool={self.pool}): pool must divide channels.")
        if self.rule == "silif" and self.steps < 2:
            raise SpecError("Bins(steps=1, rule='silif'): its first frame is always empty. Pass steps=2 or more.")

    @staticmethod
    def of_silif(milliseconds: Literal[4, 10] = 4) -> "Bins":
        """Return the binning of SiLIF on Spiking Speech Commands: 300 frames over 1.2 s, or 100 over 1 s.

        Args:
            milliseconds: Nominal duration of a frame.
        """
        if milliseconds not in (4, 10):
            raise SpecError(f"Bins.of_silif({milliseconds}): pass 4 or 10, in milliseconds.")
        return Bins(300, 1.2, rule="silif") if milliseconds == 4 else Bins(100, 1.0, rule="silif")

    @property
    def features(self) -> int:
        """Features per frame."""
        return self.channels // self.pool

    def indices(self, times: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return the frame of each event; `steps` for events that are late.

        Args:
            times: Times of the events in seconds.
        """
        if self.rule == "silif":
            return np.digitize(times, np.linspace(0, self.duration, self.steps)).astype(np.int64)
        index = np.minimum(np.floor(times * self.steps / self.duration), self.steps).astype(np.int64)
        return np.where(times == self.duration, self.steps - 1, index)

    def frames(self, events: Events) -> npt.NDArray[np.uint8]:
        """Return the counts of events, (steps, features).

        Args:
            events: Events of one recording.

        Raises:
            InputError: Events are invalid or late, or a count exceeds 255.
        """
        events = Events.of(*events, channels=self.channels)
        index, units = self.indices(events.times), events.units
        late = index >= self.steps
        if late.any():
            if self.late == "raise":
                latest = events.times.max()
                raise InputError(
                    f"{int(late.sum())} of {late.size} events come after {self.duration} s, the last at {latest:g} s. "
                    f"Pass Bins(duration={np.ceil(latest * 10) / 10 + 0.1:g}), or late='drop' or 'clamp'."
                )
            if self.late == "clamp":
                index = np.minimum(index, self.steps - 1)
            elif late.all():
                raise InputError(
                    f"all {late.size} events come after {self.duration} s, the first at {events.times.min():g} s: are "
                    "these seconds? Divide milliseconds by 1000, or pass a longer duration."
                )
            else:
                index, units = index[~late], units[~late]
        flat = np.bincount(index * self.features + units // self.pool, minlength=self.steps * self.features)
        if flat.size and flat.max() > 255:
            raise InputError(
                f"a bin holds {flat.max()} events; a frame counts to 255. Pass a larger steps= or a smaller pool=."
            )
        return flat.astype(np.uint8).reshape(self.steps, self.features)

    def length(self, events: Events) -> int:
        """Return the number of frames up to the last event that is not dropped, at least 1.

        Args:
            events: Events of one recording.
        """
        index = self.indices(events.times)
        index = np.minimum(index, self.steps - 1) if self.late == "clamp" else index[index < self.steps]
        return int(index.max()) + 1 if index.size else 1
