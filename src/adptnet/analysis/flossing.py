"""Gradient flossing (Engelken, 2023): a loss that drives the Lyapunov exponents of a network to target values.

It works for any recurrent network, and is the main baseline of the ADPTNet paper.
"""

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
    """Return the mean squared difference between the k largest Lyapunov exponents and the k `targets`.

    It is a loss to minimize. An ADPTNet with a small β rarely needs it: its exponents stay near ln |λ̄|, within the
    bounds of `certificate(layer)`.

    Args:
        system: A layer, a cell or a function, as for `lyapunov_exponents`.
        inputs: (batch, time, features), or (time, features) for one sequence; None for an autonomous system.
        targets: Target values of the k largest exponents, in any order; one number for the largest exponent only.
        state: Initial states.
        steps: Number of steps, for a system without inputs.
        transient: Number of initial steps to discard; see `lyapunov_exponents`.

    Returns:
        A scalar; 0 where every exponent is at its target in every sequence.

    Raises:
        InputError: Targets are empty or not finite.
        NonFiniteError: An exponent with a target is -inf.
    """
    values = torch.as_tensor(targets).detach().reshape(-1)
    if not values.numel() or not bool(values.isfinite().all()):
        raise InputError(f"targets={targets!r}: must be one or more finite numbers, e.g. targets=[0.0, -0.1].")
    spectrum = lyapunov_exponents(system, inputs, state=state, steps=steps, count=values.numel(), transient=transient)
    is_minus_infinity = spectrum.exponents.detach().isneginf().reshape(-1, values.numel()).any(0)
    if bool(is_minus_infinity.any()):
        finite = int((~is_minus_infinity).sum())  # exponents are in descending order
        advice = (
            f"Pass at most {finite} target{'s' * (finite > 1)}."
            if finite
            else "No exponent is finite, so gradient flossing does not apply to this system."
        )
        raise NonFiniteError(
            f"Lyapunov exponent {finite + 1} (from the largest) is -inf: Jacobians are singular, as with a ReLU, so "
            f"the loss has no finite gradient. {advice}"
        )
    sorted_targets = values.to(spectrum.exponents).sort(descending=True).values
    return (spectrum.exponents - sorted_targets).square().mean()
