"""The settings of a training run, under the names the paper's tables use."""

from ..errors import SpecError
from ..spec import Spec, check_fraction, check_nonnegative, check_positive, check_seed, check_size, spec

__all__ = ["TrainConfig"]


@spec
class TrainConfig(Spec):
    """AdamW with gradient clipping and a linear schedule (appendix:s5_training_config); defaults for a laptop.

    Attributes:
        steps: Optimiser steps.
        batch_size: Fresh sequences a step.
        learning_rate: The peak, reached after the warm-up and falling to zero along a line.
        weight_decay: For all but the parameters marked otherwise.
        betas: Adam's.
        epsilon: Adam's.
        clip: Largest gradient norm; None for no clipping.
        warmup: Fraction of the steps over which the learning rate rises from zero.
        seed: Of data and dropout.
    """

    steps: int = 1500
    batch_size: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    clip: float | None = 0.25
    warmup: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        check_size(self, steps=self.steps, batch_size=self.batch_size)
        check_positive(self, learning_rate=self.learning_rate, epsilon=self.epsilon)
        check_nonnegative(self, weight_decay=self.weight_decay)
        check_seed(self, seed=self.seed)
        check_fraction(self, below="at 1 the learning rate would never fall", warmup=self.warmup)
        if self.clip is not None:
            check_positive(self, clip=self.clip)
        if len(self.betas) != 2:
            raise SpecError(f"TrainConfig(betas={self.betas}): Adam has two, e.g. (0.9, 0.95).")
        for value in self.betas:
            check_fraction(self, below="at 1 Adam would never forget", betas=value)

    def rate(self, step: int) -> float:
        """The learning rate of `step`, counted from 0, as a fraction of the peak."""
        rising = round(self.warmup * self.steps)
        if step < rising:
            return step / rising
        return (self.steps - step) / max(1, self.steps - rising)
