"""The recurrence x_t = A_t x_{t-1} + b_t with dense matrices, sequentially: the specification of `matrix_scan`."""

import torch
from torch import Tensor

__all__ = ["matrix_scan"]


def matrix_scan(
    transition: Tensor,
    offset: Tensor,
    initial: Tensor | None = None,
    *,
    reset: Tensor | None = None,
    reverse: bool = False,
) -> Tensor:
    """Return the states of a linear recurrence.

    Args:
        transition: (..., time, n, n), or (..., 1, n, n) if it is the same at every step.
        offset: (..., time, n).
        initial: (..., n), the state before the first step; zero by default.
        reset: (..., time) bool. Where True, the state before the step is set to zero, so x_t = b_t; no NaN or infinity
            passes a reset.
        reverse: Run from the last step to the first: x_t = A_t x_{t+1} + b_t.

    Returns:
        (..., time, n).
    """
    steps = offset.shape[-2]
    matrices = torch.broadcast_to(transition, (*offset.shape, offset.shape[-1]))
    if reset is not None:
        matrices = torch.where(reset[..., None, None], 0, matrices)
    if not steps:
        return offset.clone()
    state = torch.zeros_like(offset[..., 0, :]) if initial is None else initial
    states: list[Tensor] = []
    for t in reversed(range(steps)) if reverse else range(steps):
        if reset is not None:
            state = torch.where(reset[..., t, None], 0, state)  # a matrix of zeros would keep a NaN
        state = (matrices[..., t, :, :] @ state.unsqueeze(-1)).squeeze(-1) + offset[..., t, :]
        states.append(state)
    return torch.stack(states[::-1] if reverse else states, -2)
