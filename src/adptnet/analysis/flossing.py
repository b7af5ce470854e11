"""Gradient flossing: train the exponents of any recurrent network (Engelken, 2023), the paper's main comparator."""

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
    """The mean squared distance of the leading exponents from `targets`, to be minimised.

    An ADPTNet needs none of this: its exponents are prescribed by its eigenvalues, within `certificate(layer)`.

    Args:
        system: A layer, a cell or a function, as for `lyapunov_exponents`.
        inputs: Likewise.
        targets: What the largest exponents should be, as many as should be trained; one number for the largest alone.
            The order does not matter.
        state: Where trajectories start.
        steps: How many steps, for a system without inputs.
        transient: Steps that do not count; see `lyapunov_exponents`.

    Returns:
        One number; 0 where every exponent is at its target in every sequence.
    """
    wanted = torch.as_tensor(targets).detach().reshape(-1)
    if not wanted.numel() or not bool(wanted.isfinite().all()):
        raise InputError(f"targets={targets!r}: exponents to reach are finite numbers, e.g. targets=[0.0, -0.1].")
    spectrum = lyapunov_exponents(system, inputs, state=state, steps=steps, count=wanted.numel(), transient=transient)
    lost = spectrum.exponents.detach().isneginf().reshape(-1, wanted.numel()).any(0)
    if bool(lost.any()):
        raise NonFiniteError(
            f"exponent {int(lost.nonzero()[0, 0]) + 1} is minus infinity: Jacobians are singular, as of a ReLU, and "
            f"nothing leads from there to a target. Pass at most {int((~lost).sum())} targets."
        )
    sorted_targets = wanted.to(spectrum.exponents).sort(descending=True).values
    return (spectrum.exponents - sorted_targets).square().mean()
