"""Optimisers, and parameter groups that honour what parameters ask for."""

import abc
from typing import Any

import torch

from adptnet.errors import SpecError
from adptnet.spec import Spec, check_fraction, check_positive, spec

__all__ = ["Adam", "AdamW", "OptimiserSpec", "RMSprop"]


class OptimiserSpec(Spec, abc.ABC):
    """A torch optimiser and its settings, learning rate and weight decay left out: those come with the groups."""

    @abc.abstractmethod
    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer: ...


def _check_adam(owner: Any) -> None:
    check_positive(owner, epsilon=owner.epsilon)
    if len(owner.betas) != 2:
        raise SpecError(f"{type(owner).__name__}(betas={owner.betas}): Adam has two, e.g. (0.9, 0.95).")
    for value in owner.betas:
        check_fraction(owner, below="at 1 Adam would never forget", betas=value)


@spec
class Adam(OptimiserSpec):
    """Adam; its weight decay is the one inside the gradient."""

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _check_adam(self)

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adam(groups, betas=self.betas, eps=self.epsilon)


@spec
class AdamW(OptimiserSpec):
    """Adam with decoupled weight decay; `fused` takes torch's one kernel for all parameters."""

    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    fused: bool = False

    def __post_init__(self) -> None:
        _check_adam(self)

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, betas=self.betas, eps=self.epsilon, fused=self.fused or None)


@spec
class RMSprop(OptimiserSpec):
    """RMSprop; `smoothing` is torch's alpha."""

    smoothing: float = 0.99
    momentum: float = 0.0
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        check_positive(self, epsilon=self.epsilon)
        check_fraction(self, below="at 1 nothing would be forgotten", smoothing=self.smoothing, momentum=self.momentum)

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(groups, alpha=self.smoothing, momentum=self.momentum, eps=self.epsilon)
