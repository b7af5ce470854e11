"""Spikes, and the derivatives that stand in for theirs (surrogate_grad).

A spike function takes the membrane above its threshold. Forward it is a step; backward it has the derivative of a
smooth function. A cell also takes any other callable of this kind, such as snnTorch's surrogates; it then has no JSON.
"""

import abc
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...errors import SpecError
from ...spec import Spec, check_positive, spec

__all__ = ["ATan", "Boxcar", "FastSigmoid", "Sigmoid", "Spike", "SpikeFunction", "Triangle", "check_spike"]

Spike = Callable[[Tensor], Tensor]


class SpikeFunction(Spec, abc.ABC):
    """The description of a spike function, and the function itself."""

    @abc.abstractmethod
    def __call__(self, above: Tensor) -> Tensor:
        """Spikes, 0 or 1 in the dtype of `above`, which is the membrane minus its threshold."""


class _Step(SpikeFunction):
    """1 from the threshold on (spike_fn); `strict` leaves out the threshold itself, as SiLIF's program does."""

    strict: bool

    @abc.abstractmethod
    def smooth(self, above: Tensor) -> Tensor:
        """A function whose derivative is the surrogate."""

    def __call__(self, above: Tensor) -> Tensor:
        smooth = self.smooth(above)
        fired = above > 0 if self.strict else above >= 0
        return fired.to(above.dtype) + (smooth - smooth.detach())


@spec
class Boxcar(_Step):
    """Derivative 1 within half of the threshold, 0 elsewhere: the paper's and SiLIF's."""

    strict: bool = False

    def smooth(self, above: Tensor) -> Tensor:
        return above.clamp(-0.5, 0.5)


@spec
class Triangle(_Step):
    """Derivative max(0, 1 - |x|)."""

    strict: bool = False

    def smooth(self, above: Tensor) -> Tensor:
        near = above.clamp(-1.0, 1.0)
        return near - near * near.abs() / 2


@spec
class ATan(_Step):
    """Derivative (α/2) / (1 + (π α x / 2)²), snnTorch's `atan`."""

    alpha: float = 2.0
    strict: bool = False

    def __post_init__(self) -> None:
        check_positive(self, alpha=self.alpha)

    def smooth(self, above: Tensor) -> Tensor:
        return (math.pi / 2 * self.alpha * above).atan() / math.pi


@spec
class FastSigmoid(_Step):
    """Derivative 1 / (1 + slope |x|)², snnTorch's `fast_sigmoid`."""

    slope: float = 25.0
    strict: bool = False

    def __post_init__(self) -> None:
        check_positive(self, slope=self.slope)

    def smooth(self, above: Tensor) -> Tensor:
        return above / (1 + self.slope * above.abs())


@spec
class Sigmoid(SpikeFunction):
    """No step at all but 1 / (1 + exp(-slope x)), forward too: the smoothed threshold of fixed-point training."""

    slope: float = 5.0

    def __post_init__(self) -> None:
        check_positive(self, slope=self.slope)

    def __call__(self, above: Tensor) -> Tensor:
        return (self.slope * above).sigmoid()


def check_spike(owner: object, spike: Any) -> None:
    """Raises unless `spike` can be called; a class is taken for a forgotten pair of brackets."""
    if isinstance(spike, type) or not callable(spike):
        hint = f"{spike.__name__}()" if isinstance(spike, type) else "cells.Boxcar()"
        raise SpecError(
            f"{type(owner).__name__}(spike={spike!r}): spike must be a function of the membrane above its threshold. "
            f"Pass spike={hint}."
        )
