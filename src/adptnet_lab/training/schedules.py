"""Specs of learning-rate schedules. A rate is a function of the step alone, so that a run can be resumed anywhere."""

import abc
import math

from adptnet.errors import SpecError
from adptnet.spec import Spec, check_fraction, check_size, spec

__all__ = ["Constant", "Cosine", "Linear", "ReduceOnPlateau", "Schedule"]


class Schedule(Spec, abc.ABC):
    """Base class of schedules: the learning rate of every step, as a fraction of its peak.

    Attributes:
        warmup: Fraction of the steps over which the rate rises linearly from zero.
    """

    warmup: float

    def __post_init__(self) -> None:
        check_fraction(self, below="at 1 the learning rate would never reach its peak", warmup=self.warmup)

    def rate(self, step: int, steps: int, plateaus: int = 0) -> float:
        """Return the rate of a step, as a fraction of the peak.

        Args:
            step: The index of the step; 0 is the first.
            steps: The number of steps of the run.
            plateaus: How often the score has stopped improving.
        """
        rising = round(self.warmup * steps)
        if step < rising:
            return step / rising
        return self.rate_after_warmup((step - rising) / max(1, steps - rising), plateaus)

    @abc.abstractmethod
    def rate_after_warmup(self, progress: float, plateaus: int) -> float:
        """Return the rate when the fraction `progress` of the steps after the warm-up is done.

        Args:
            progress: The fraction of the steps after the warm-up that are done.
            plateaus: How often the score has stopped improving.
        """


@spec
class Constant(Schedule):
    """The peak rate after the warm-up."""

    warmup: float = 0.0

    def rate_after_warmup(self, progress: float, plateaus: int) -> float:
        return 1.0


@spec
class Linear(Schedule):
    """A linear decrease from the peak to zero (appendix:s5_training_config)."""

    warmup: float = 0.1

    def rate_after_warmup(self, progress: float, plateaus: int) -> float:
        return 1 - progress


@spec
class Cosine(Schedule):
    """A decrease from the peak along half a cosine.

    Attributes:
        floor: The last rate, as a fraction of the peak.
    """

    warmup: float = 0.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction(self, below="at 1 nothing would fall", floor=self.floor)

    def rate_after_warmup(self, progress: float, plateaus: int) -> float:
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2


@spec
class ReduceOnPlateau(Schedule):
    """A decrease by a factor whenever the score on validation data has stopped improving.

    Attributes:
        factor: The factor on the rate.
        patience: Evaluations in a row without improvement that are tolerated.
    """

    warmup: float = 0.0
    factor: float = 0.7
    patience: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(self, patience=self.patience)
        if not 0 < self.factor < 1:
            raise SpecError(f"ReduceOnPlateau(factor={self.factor!r}): must be between 0 and 1, e.g. 0.7.")

    def rate_after_warmup(self, progress: float, plateaus: int) -> float:
        return self.factor**plateaus
