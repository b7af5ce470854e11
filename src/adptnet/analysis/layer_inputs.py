"""Recording of the inputs of the recurrent layers of a model."""

from typing import Any

import torch
from torch import Tensor, nn

from ..nn.layer import RecurrentLayer
from ..nn.model import evaluation_mode

__all__ = ["record_layer_inputs"]


def record_layer_inputs(model: nn.Module, inputs: Tensor) -> dict[str, tuple[RecurrentLayer, Tensor]]:
    """Run `model` once in evaluation mode and record the input of each recurrent layer of this package.

    Args:
        model: A module that contains recurrent layers of this package (`RecurrentLayer`). Others, such as `nn.GRU`, are
            not recorded.
        inputs: The inputs of the model.

    Returns:
        Each layer with its input, by its name in `model.named_modules()`; a model that is itself a recurrent layer is
        named by its class. A layer that is called several times has the input of its last call.
    """
    recorded: dict[str, tuple[RecurrentLayer, Tensor]] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, RecurrentLayer):

            def record(layer: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                assert isinstance(layer, RecurrentLayer)
                recorded[name or type(layer).__name__] = (layer, (args[0] if args else kwargs["x"]).detach())

            hooks.append(module.register_forward_pre_hook(record, with_kwargs=True))
    try:
        with torch.no_grad(), evaluation_mode(model):
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return recorded
