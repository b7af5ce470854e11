"""Gradient flossing (Engelken, 2023), the paper's main comparator: train the exponents of any recurrent network."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..cells import ADPTState
from ..errors import InputError, NonFiniteError
from .lyapunov import lyapunov_exponents

__all__ = ["gradient_flossing_loss"]


def gradient_flossing_loss(
    system: Any,
    inputs: Tensor | None,
    targets: float | Sequence[float] | Tensor = 0.0,
    *,
    state: Tensor | ADPTState | None = None,
    steps: int | None = None,
    transient: int | None = None,
) -> Tensor:
    """Return the mean squared distance of the leading exponents from `targets`, a loss to minimize.

    An ADPTNet does not need it: its exponents are prescribed by its eigenvalues, up to the bounds of
    `certificate(layer)`.

    Args:
        system: A layer, a cell or a function, as for `lyapunov_exponents`.
        inputs: (batch, time, features), or (time, features) for one sequence; None for an autonomous system.
        targets: Target values of the largest exponents, in any order; one number for the largest exponent alone.
        state: Initial states.
        steps: Number of steps, for a system without inputs.
        transient: Initial steps that are not averaged; see `lyapunov_exponents`.

    Returns:
        A scalar; 0 where every exponent is at its target in every sequence.

    Raises:
        InputError: Targets are empty or not finite.
        NonFiniteError: An exponent with a target is minus infinity.
    """
    values = torch.as_tensor(targets).detach().reshape(-1)
    if not values.numel() or not bool(values.isfinite().all()):
        raise InputError(f"targets={targets!r}: targets are finite numbers, e.g. targets=[0.0, -0.1].")
    spectrum = lyapunov_exponents(system, inputs, state=state, steps=steps, count=values.numel(), transient=transient)
    lost = spectrum.exponents.detach().isneginf().reshape(-1, values.numel()).any(0)
    if bool(lost.any()):
        raise NonFiniteError(
            f"exponent {int(lost.nonzero()[0, 0]) + 1} is minus infinity: Jacobians are singular, as with a ReLU, "
            f"so the loss has no finite gradient. Pass at most {int((~lost).sum())} targets."
        )
    sorted_targets = values.to(spectrum.exponents).sort(descending=True).values
    return (spectrum.exponents - sorted_targets).square().mean()
