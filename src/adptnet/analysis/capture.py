"""What the layers of a model meet."""

from typing import Any

import torch
from torch import Tensor, nn

from ..nn.layer import RecurrentLayer
from ..nn.model import evaluating

__all__ = ["captured"]


def captured(model: nn.Module, inputs: Tensor) -> dict[str, tuple[RecurrentLayer, Tensor]]:
    """Each recurrent layer of `model` by name, with what enters it when the model is given `inputs`."""
    met: dict[str, tuple[RecurrentLayer, Tensor]] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, RecurrentLayer):

            def remember(layer: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                assert isinstance(layer, RecurrentLayer)
                met[name or type(layer).__name__] = (layer, (args[0] if args else kwargs["x"]).detach())

            hooks.append(module.register_forward_pre_hook(remember, with_kwargs=True))
    try:
        with torch.no_grad(), evaluating(model):
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return met
