"""Diagnosis of a loss that is not finite: the part of the model where it came from."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adptnet.errors import AdptnetError

from ..tasks import Batch, Task

__all__ = ["Diagnosis", "TrainingDiverged", "diagnose"]


class TrainingDiverged(AdptnetError, RuntimeError):
    """The loss or its gradient was not finite."""


class Diagnosis(NamedTuple):
    """The first place where NaN or infinity was found."""

    loss: float
    weights: tuple[str, ...]  # parameters that were not finite before the step
    module: str | None  # the first module whose output was not finite
    gradients: tuple[str, ...]  # parameters whose gradient was not finite

    def __str__(self) -> str:
        if self.weights:
            return f"the weights {_list_names(self.weights)} were not finite before the step"
        if self.module is not None:
            return f"the first output that was not finite was that of {self.module}"
        if self.gradients:
            return f"outputs were finite, the gradients of {_list_names(self.gradients)} were not"
        return "it did not happen again when the batch was run by itself"


def diagnose(model: nn.Module, task: Task, batch: Batch) -> Diagnosis:
    """Run `batch` forward and backward once more and locate the first value that is not finite.

    Args:
        model: The model, in training mode. Its gradients are cleared.
        task: Defines the loss.
        batch: The batch whose loss was not finite, on the device of the model.
    """
    weights = tuple(name for name, parameter in model.named_parameters() if not _is_finite(parameter))
    first: list[str] = []
    hooks = []
    for name, module in model.named_modules():

        def check_output(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            if not first and not all(_is_finite(tensor) for tensor in _list_tensors(output)):
                first.append(name or type(module).__name__)

        hooks.append(module.register_forward_hook(check_output))
    try:
        model.zero_grad(set_to_none=True)
        loss = task.loss(model(batch.inputs, lengths=batch.lengths)[0], batch.targets)
        if torch.isfinite(loss):
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    named = list(model.named_parameters())
    gradients = tuple(name for name, each in named if each.grad is not None and not _is_finite(each.grad))
    model.zero_grad(set_to_none=True)
    return Diagnosis(loss.item(), weights, first[0] if first else None, gradients)


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach()).all())


def _list_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _list_tensors(item)] if isinstance(value, tuple | list) else []


def _list_names(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
