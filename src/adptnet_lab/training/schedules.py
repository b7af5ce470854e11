"""Schedules: the learning rate of a step, as a fraction of the peak. A function of the step: a run can go on."""

import abc
import math

from adptnet.errors import SpecError
from adptnet.spec import Spec, check_fraction, check_size, spec

__all__ = ["Constant", "Cosine", "Linear", "ReduceOnPlateau", "Schedule"]


class Schedule(Spec, abc.ABC):
    """A learning rate over the steps of a run.

    Every member has `warmup`, the fraction of the steps over which the rate rises from zero along a line.
    """

    warmup: float

    def __post_init__(self) -> None:
        check_fraction(self, below="at 1 the learning rate would never reach its peak", warmup=self.warmup)

    def rate(self, step: int, steps: int, plateaus: int = 0) -> float:
        """The rate of `step`, counted from 0, in a run of `steps`, after so many plateaus."""
        rising = round(self.warmup * steps)
        if step < rising:
            return step / rising
        return self.after((step - rising) / max(1, steps - rising), plateaus)

    @abc.abstractmethod
    def after(self, passed: float, plateaus: int) -> float:
        """The rate when the fraction `passed` of the steps after the warm-up is done."""


@spec
class Constant(Schedule):
    """The peak, from the warm-up on."""

    warmup: float = 0.0

    def after(self, passed: float, plateaus: int) -> float:
        return 1.0


@spec
class Linear(Schedule):
    """From the peak to zero along a line (appendix:s5_training_config)."""

    warmup: float = 0.1

    def after(self, passed: float, plateaus: int) -> float:
        return 1 - passed


@spec
class Cosine(Schedule):
    """From the peak to `floor`, a fraction of it, along half a cosine."""

    warmup: float = 0.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction(self, below="at 1 nothing would fall", floor=self.floor)

    def after(self, passed: float, plateaus: int) -> float:
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * passed)) / 2


@spec
class ReduceOnPlateau(Schedule):
    """Times `factor` whenever more than `patience` evaluations in a row brought nothing better."""

    warmup: float = 0.0
    factor: float = 0.7
    patience: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(self, patience=self.patience)
        if not 0 < self.factor < 1:
            raise SpecError(f"ReduceOnPlateau(factor={self.factor!r}): must be between 0 and 1, e.g. 0.7.")

    def after(self, passed: float, plateaus: int) -> float:
        return self.factor**plateaus
