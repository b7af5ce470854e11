"""Spike functions with surrogate gradients (surrogate_grad).

A spike function takes the membrane potential minus its threshold. The forward pass is a step function; the backward
pass uses the derivative of a smooth function. A cell also accepts any other such callable, e.g. snnTorch's surrogates;
its spec then cannot be written to JSON.
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
    """Base class of the spike functions, which are specs and callable."""

    @abc.abstractmethod
    def __call__(self, above: Tensor) -> Tensor:
        """Return spikes, 0 or 1 in the dtype of `above`.

        Args:
            above: The membrane potential minus its threshold.
        """


class _Step(SpikeFunction):
    """Base class of the step functions: 1 at or above the threshold (spike_fn), or only above it if `strict`.

    Attributes:
        strict: Fire only above the threshold, not at it, as SiLIF's code does.
    """

    strict: bool

    @abc.abstractmethod
    def smooth(self, above: Tensor) -> Tensor:
        """Return a smooth function of `above` whose derivative is the surrogate gradient."""

    def __call__(self, above: Tensor) -> Tensor:
        smooth = self.smooth(above)
        fired = above > 0 if self.strict else above >= 0
        return fired.to(above.dtype) + (smooth - smooth.detach())


@spec
class Boxcar(_Step):
    """Surrogate derivative 1 within 1/2 of the threshold, 0 elsewhere: that of the paper and of SiLIF.

    Attributes:
        strict: Fire only above the threshold, not at it.
    """

    strict: bool = False

    def smooth(self, above: Tensor) -> Tensor:
        return above.clamp(-0.5, 0.5)


@spec
class Triangle(_Step):
    """Surrogate derivative max(0, 1 - |x|).

    Attributes:
        strict: Fire only above the threshold, not at it.
    """

    strict: bool = False

    def smooth(self, above: Tensor) -> Tensor:
        near = above.clamp(-1.0, 1.0)
        return near - near * near.abs() / 2


@spec
class ATan(_Step):
    """Surrogate derivative (α/2) / (1 + (π α x / 2)²), snnTorch's `atan`.

    Attributes:
        alpha: α.
        strict: Fire only above the threshold, not at it.
    """

    alpha: float = 2.0
    strict: bool = False

    def __post_init__(self) -> None:
        check_positive(self, alpha=self.alpha)

    def smooth(self, above: Tensor) -> Tensor:
        return (math.pi / 2 * self.alpha * above).atan() / math.pi


@spec
class FastSigmoid(_Step):
    """Surrogate derivative 1 / (1 + slope |x|)², snnTorch's `fast_sigmoid`.

    Attributes:
        slope: Steepness of the surrogate.
        strict: Fire only above the threshold, not at it.
    """

    slope: float = 25.0
    strict: bool = False

    def __post_init__(self) -> None:
        check_positive(self, slope=self.slope)

    def smooth(self, above: Tensor) -> Tensor:
        return above / (1 + self.slope * above.abs())


@spec
class Sigmoid(SpikeFunction):
    """1 / (1 + exp(-slope x)) in the forward pass too: the smoothed threshold of fixed-point training.

    Attributes:
        slope: Steepness of the threshold.
    """

    slope: float = 5.0

    def __post_init__(self) -> None:
        check_positive(self, slope=self.slope)

    def __call__(self, above: Tensor) -> Tensor:
        return (self.slope * above).sigmoid()


def check_spike(owner: object, spike: Any) -> None:
    """Raise `SpecError` if `spike` is not callable, or is a class that was not instantiated.

    Args:
        owner: The spec that has the field, for the message.
        spike: The value.
    """
    if isinstance(spike, type) or not callable(spike):
        hint = f"{spike.__name__}()" if isinstance(spike, type) else "cells.Boxcar()"
        raise SpecError(
            f"{type(owner).__name__}(spike={spike!r}): spike must be a function of the membrane minus its threshold. "
            f"Pass spike={hint}."
        )
