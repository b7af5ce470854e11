"""Augmentations of events for training. None is applied by default."""

import abc

import numpy as np

from adptnet.errors import SpecError
from adptnet.spec import Spec, check_fraction, check_nonnegative, spec

from .stream import Events

__all__ = ["Augmentation", "ChannelShift", "Drop", "TimeJitter"]


class Augmentation(Spec, abc.ABC):
    """Base class of the augmentations: a random change to the events of a recording."""

    @abc.abstractmethod
    def __call__(self, events: Events, channels: int, generator: np.random.Generator) -> Events:
        """Return the changed events.

        Args:
            events: The events of a recording.
            channels: Number of units; changed units stay below it.
            generator: Source of randomness.
        """


@spec
class Drop(Augmentation):
    """Removal of each event with a given probability."""

    probability: float = 0.1

    def __post_init__(self) -> None:
        check_fraction(self, below="at 1 nothing would be left", probability=self.probability)

    def __call__(self, events: Events, channels: int, generator: np.random.Generator) -> Events:
        kept = generator.random(events.times.size) >= self.probability
        return Events(events.times[kept], events.units[kept])


@spec
class TimeJitter(Augmentation):
    """Shift of each event by normally distributed seconds; times stay at or above zero."""

    std: float = 0.002

    def __post_init__(self) -> None:
        check_nonnegative(self, std=self.std)

    def __call__(self, events: Events, channels: int, generator: np.random.Generator) -> Events:
        shifted = events.times + self.std * generator.standard_normal(events.times.size)
        return Events(np.maximum(shifted, 0.0), events.units)


@spec
class ChannelShift(Augmentation):
    """Shift of all events by the same number of units, at most `most` either way, as another voice would cause.

    Events that leave the range of units are dropped.
    """

    most: int = 20

    def __post_init__(self) -> None:
        if not isinstance(self.most, int) or self.most < 0:
            raise SpecError(f"ChannelShift(most={self.most!r}): must be an integer >= 0.")

    def __call__(self, events: Events, channels: int, generator: np.random.Generator) -> Events:
        units = events.units + generator.integers(-self.most, self.most + 1)
        inside = (units >= 0) & (units < channels)
        return Events(events.times[inside], units[inside])
