"""Specs of the optimizers."""

import abc
from typing import Any

import torch

from adptnet.errors import SpecError
from adptnet.spec import Spec, check_fraction, check_positive, spec

__all__ = ["Adam", "AdamW", "OptimizerSpec", "RMSprop"]


class OptimizerSpec(Spec, abc.ABC):
    """Base class of optimizer specs. Learning rate and weight decay belong to the parameter groups, not to the spec."""

    @abc.abstractmethod
    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the optimizer of `groups`, parameter groups with their `lr` and `weight_decay`.

        Args:
            groups: Parameter groups with their `lr` and `weight_decay`.
        """


def _check_adam(owner: Any) -> None:
    check_positive(owner, epsilon=owner.epsilon)
    if len(owner.betas) != 2:
        raise SpecError(f"{type(owner).__name__}(betas={owner.betas}): Adam has two, e.g. (0.9, 0.95).")
    for value in owner.betas:
        check_fraction(owner, below="at 1 Adam would never forget", betas=value)


@spec
class Adam(OptimizerSpec):
    """Adam, whose weight decay is L2 regularisation added to the gradient.

    Attributes:
        betas: Decay rates of the two moments.
        epsilon: Added to the denominator; torch's eps.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _check_adam(self)

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adam(groups, betas=self.betas, eps=self.epsilon)


@spec
class AdamW(OptimizerSpec):
    """Adam with decoupled weight decay.

    Attributes:
        betas: Decay rates of the two moments.
        epsilon: Added to the denominator; torch's eps.
        fused: Whether to use torch's fused kernel, one for all parameters.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    fused: bool = False

    def __post_init__(self) -> None:
        _check_adam(self)

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, betas=self.betas, eps=self.epsilon, fused=self.fused or None)


@spec
class RMSprop(OptimizerSpec):
    """RMSprop.

    Attributes:
        smoothing: Decay rate of the mean square; torch's alpha.
        momentum: Momentum factor.
        epsilon: Added to the denominator; torch's eps.
    """

    smoothing: float = 0.99
    momentum: float = 0.0
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        check_positive(self, epsilon=self.epsilon)
        check_fraction(self, below="at 1 nothing would be forgotten", smoothing=self.smoothing, momentum=self.momentum)

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(groups, alpha=self.smoothing, momentum=self.momentum, eps=self.epsilon)
