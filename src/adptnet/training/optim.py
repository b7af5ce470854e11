"""Parameter groups that honour what parameters ask for."""

from typing import Any

from torch import nn

__all__ = ["param_groups"]


def param_groups(model: nn.Module, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Groups for any torch optimiser; a parameter's `_optim` dictionary overrides `lr` and `weight_decay` for it.

    Spectra, free gains and a trainable β ask for no weight decay: it would pull timescales towards one step.
    """
    groups: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        settings = {"lr": lr, "weight_decay": weight_decay, **getattr(parameter, "_optim", {})}
        group = groups.setdefault(tuple(sorted(settings.items())), {"params": [], **settings})
        group["params"].append(parameter)
    return list(groups.values())
