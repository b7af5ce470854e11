"""Marks on parameters that an optimiser should treat differently."""

from typing import Any

from torch import nn

__all__ = ["NoDecay"]


class NoDecay(nn.Module):
    """A module whose own parameters ask for no weight decay, under the two names in use among state-space models.

    `training.param_groups` honours the marks. They are set again wherever torch makes new parameters: when a module
    is copied, and when weights are assigned from a file.
    """

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        _mark(param)
        super().register_parameter(name, param)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for parameter in self.parameters(recurse=False):
            _mark(parameter)


def _mark(parameter: nn.Parameter | None) -> None:
    if parameter is not None:
        parameter._no_weight_decay = True  # type: ignore[attr-defined]
        parameter._optim = {"weight_decay": 0.0}  # type: ignore[attr-defined]
