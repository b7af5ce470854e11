"""Optimisers, and parameter groups that honour what parameters ask for."""

import abc
from typing import Any

import torch
from torch import nn

from ..errors import SpecError
from ..marks import NoDecay
from ..spec import Spec, check_fraction, check_positive, spec

__all__ = ["Adam", "AdamW", "OptimiserSpec", "RMSprop", "param_groups"]


def param_groups(model: nn.Module, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Return parameter groups for any torch optimizer, with weight decay for matrices only.

    Spectra, free gains and a trainable β get none, because it would pull timescales towards one step; nor do vectors
    and single numbers: biases, and the weights of norms. A parameter's `_optim` dictionary overrides all of this.

    Args:
        model: Any module; parameters that do not learn are left out.
        lr: Learning rate of every group.
        weight_decay: Of the matrices.
    """
    groups: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
    seen: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            # By their module as well: where torch replaces parameters, as in sharding, marks on them are lost.
            decay = 0.0 if parameter.dim() < 2 or isinstance(module, NoDecay) else weight_decay
            settings = {"lr": lr, "weight_decay": decay, **getattr(parameter, "_optim", {})}
            group = groups.setdefault(tuple(sorted(settings.items())), {"params": [], **settings})
            group["params"].append(parameter)
    return list(groups.values())


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
