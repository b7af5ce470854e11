"""The Kalman filter of a linear recurrence whose states are observed: the specification of `kalman_filter`.

The state follows s_t = A_t s_{t-1} + b_t + noise of variance 1, and `observed` is s_t + noise of variance 1/strength.
The filters return the filtered means. With strength 0 these are the states of the scan; with a large strength they
approach `observed`.
"""

import torch
from torch import Tensor

from .._linalg import solve_linear

__all__ = ["diagonal_filter", "matrix_filter"]


def diagonal_filter(
    transition: Tensor,
    offset: Tensor,
    observed: Tensor,
    strength: Tensor,
    initial: Tensor,
    *,
    reset: Tensor | None = None,
) -> Tensor:
    """Return the filtered means for a diagonal transition, real or complex.

    Args:
        transition: (n,) or any shape that broadcasts to `offset`.
        offset: (..., time, n).
        observed: (..., time, n).
        strength: (..., 1), at least 0: the inverse variance of the observations.
        initial: (..., n), known exactly.
        reset: (..., time) bool. Where True, the state before the step is set to zero; no NaN or infinity passes.

    Returns:
        (..., time, n).
    """
    factors = torch.broadcast_to(transition, offset.shape)
    if reset is not None:
        factors = torch.where(reset.unsqueeze(-1), 0, factors)
    mean, variance = initial, torch.zeros_like(initial.real)
    means: list[Tensor] = []
    for t in range(offset.shape[-2]):
        factor = factors[..., t, :]
        if reset is not None:  # a factor of zero would keep a NaN
            mean, variance = (torch.where(reset[..., t, None], 0, part) for part in (mean, variance))
        predicted = factor * mean + offset[..., t, :]
        predicted_variance = factor.abs().square() * variance + 1
        gain = strength * predicted_variance / (1 + strength * predicted_variance)
        mean = predicted + gain * (observed[..., t, :] - predicted)
        variance = predicted_variance / (1 + strength * predicted_variance)
        means.append(mean)
    return torch.stack(means, -2) if means else offset.clone()


def matrix_filter(
    transition: Tensor,
    offset: Tensor,
    observed: Tensor,
    strength: Tensor,
    initial: Tensor,
    *,
    reset: Tensor | None = None,
) -> Tensor:
    """Return the filtered means for a dense transition.

    Args:
        transition: (..., time or 1, n, n).
        offset, observed, strength, initial, reset: As in `diagonal_filter`.

    Returns:
        (..., time, n).
    """
    matrices = torch.broadcast_to(transition, (*offset.shape, offset.shape[-1]))
    if reset is not None:
        matrices = torch.where(reset[..., None, None], 0, matrices)
    eye = torch.eye(offset.shape[-1], dtype=offset.dtype, device=offset.device)
    weight = strength.unsqueeze(-1)
    mean, variance = initial.unsqueeze(-1), torch.zeros_like(eye)
    means: list[Tensor] = []
    for t in range(offset.shape[-2]):
        matrix = matrices[..., t, :, :]
        if reset is not None:
            mean, variance = (torch.where(reset[..., t, None, None], 0, part) for part in (mean, variance))
        predicted = matrix @ mean + offset[..., t, :].unsqueeze(-1)
        predicted_variance = matrix @ variance @ matrix.mT + eye
        variance = solve_linear(eye + weight * predicted_variance, predicted_variance)
        mean = predicted + weight * variance @ (observed[..., t, :].unsqueeze(-1) - predicted)
        means.append(mean.squeeze(-1))
    return torch.stack(means, -2) if means else offset.clone()
