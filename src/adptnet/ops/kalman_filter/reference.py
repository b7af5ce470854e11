"""The filter behind a trust region: a linear recurrence that is pulled towards given states.

Of s_t = A_t s_{t-1} + b_t + noise of variance 1, `observed` shows s_t with noise of variance 1/strength. The filtered
means are what is returned. With strength 0 they are the plain scan; with a large one they stay at `observed`.
"""

import torch
from torch import Tensor

from .._linalg import solve

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
    """Filtered means for a diagonal transition, real or complex.

    Args:
        transition: (n,) or anything that broadcasts to `offset`.
        offset: (..., time, n).
        observed: (..., time, n).
        strength: (..., 1), at least 0: the inverse variance of what is observed.
        initial: (..., n), known exactly.
        reset: (..., time) bool. True at t: nothing enters step t; no NaN or infinity passes.
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
        spread = factor.abs().square() * variance + 1
        gain = strength * spread / (1 + strength * spread)
        mean = predicted + gain * (observed[..., t, :] - predicted)
        variance = spread / (1 + strength * spread)
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
    """As `diagonal_filter`, for a transition (..., time or 1, n, n)."""
    matrices = torch.broadcast_to(transition, (*offset.shape, offset.shape[-1]))
    if reset is not None:
        matrices = torch.where(reset[..., None, None], 0, matrices)
    eye = torch.eye(offset.shape[-1], dtype=offset.dtype, device=offset.device)
    pull = strength.unsqueeze(-1)
    mean, variance = initial.unsqueeze(-1), torch.zeros_like(eye)
    means: list[Tensor] = []
    for t in range(offset.shape[-2]):
        matrix = matrices[..., t, :, :]
        if reset is not None:
            mean, variance = (torch.where(reset[..., t, None, None], 0, part) for part in (mean, variance))
        predicted = matrix @ mean + offset[..., t, :].unsqueeze(-1)
        spread = matrix @ variance @ matrix.mT + eye
        variance = solve(eye + pull * spread, spread)
        mean = predicted + pull * variance @ (observed[..., t, :].unsqueeze(-1) - predicted)
        means.append(mean.squeeze(-1))
    return torch.stack(means, -2) if means else offset.clone()
