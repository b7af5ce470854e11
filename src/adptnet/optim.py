"""Parameters without weight decay: how they are marked, and parameter groups that respect the marks."""

import functools
import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .errors import WeightDecayWarning

__all__ = ["DirectionOnly", "NoDecay", "param_groups"]


class NoDecay(nn.Module):
    """A module whose own parameters are marked as exempt from weight decay.

    The marks are the two attributes in use among state-space models, `_no_weight_decay` and `_optim`. `param_groups`
    respects them; an optimizer that decays marked parameters warns at its first step. The marks are set again wherever
    torch makes new parameters: when a module is copied, and when weights are assigned from a file.
    """

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        _mark(param)
        super().register_parameter(name, param)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for parameter in self.parameters(recurse=False):
            _mark(parameter)


class DirectionOnly(nn.Module):
    """A module whose parameters act by their direction alone: K and V, whose products are normalized to unit length.

    Weight decay does not regularize such parameters. It only shrinks them, which raises their effective learning rate.
    """


def param_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, *, decay_directions: bool = False
) -> list[dict[str, Any]]:
    """Return parameter groups for any torch optimizer, with weight decay for matrices only.

    Spectra, free gains and a trainable β are exempt, because decay would pull timescales towards one step. So are K and
    V, of which only the direction counts, and vectors and scalars, such as biases and the weights of norms. A
    parameter's `_optim` dictionary takes precedence.

    Args:
        model: Any module; parameters with `requires_grad=False` are left out.
        lr: Learning rate of every group.
        weight_decay: Weight decay of the matrices.
        decay_directions: Whether K and V decay too, as in the runs of the paper's reproduction.
    """
    groups: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
    seen: set[int] = set()
    owners = [] if decay_directions else [module for module in model.modules() if isinstance(module, DirectionOnly)]
    exempt = {id(parameter) for module in owners for parameter in module.parameters()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            # Check the module too: where torch replaces parameters, as in sharding, their marks are lost.
            is_exempt = parameter.dim() < 2 or id(parameter) in exempt or isinstance(module, NoDecay)
            decay = 0.0 if is_exempt else weight_decay
            settings = {"lr": lr, "weight_decay": decay, **getattr(parameter, "_optim", {})}
            group = groups.setdefault(tuple(sorted(settings.items())), {"params": [], **settings})
            group["params"].append(parameter)
    return list(groups.values())


def _mark(parameter: nn.Parameter | None) -> None:
    if parameter is not None:
        parameter._no_weight_decay = True  # type: ignore[attr-defined]
        parameter._optim = {"weight_decay": 0.0}  # type: ignore[attr-defined]
        _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_warn_of_decay)


_seen: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def _warn_of_decay(optimizer: Optimizer, *_: Any) -> None:
    """Warn at the first step of an optimizer that decays marked parameters."""
    if torch.compiler.is_compiling() or optimizer in _seen:
        return
    groups = [group for group in optimizer.param_groups if group.get("weight_decay") and group.get("lr")]
    decayed = [p for group in groups for p in group["params"] if p.requires_grad and p.grad is not None]
    count = sum(getattr(p, "_no_weight_decay", False) for p in decayed)
    if count:
        _seen.add(optimizer)
        kind = type(optimizer).__name__
        warnings.warn(
            f"{kind} applies weight decay to {count} parameters that are marked as exempt (timescales, gains, β). "
            "Decay pulls every timescale towards one step. Pass "
            f"{kind}(adptnet.optim.param_groups(model, lr=..., weight_decay=...)) or {kind}(..., weight_decay=0).",
            WeightDecayWarning,
            stacklevel=3,
        )
