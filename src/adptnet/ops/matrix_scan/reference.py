"""x_t = A_t x_{t-1} + b_t with matrices, one step after another."""

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
    """The states of a linear recurrence.

    Args:
        transition: (..., time, n, n), or (..., 1, n, n) if it is the same at every step.
        offset: (..., time, n).
        initial: (..., n) the state that enters the first step; zero if not given.
        reset: (..., time) bool. True at t: nothing enters step t, so that x_t = b_t; no NaN or infinity passes.
        reverse: Run from the last step to the first: x_t = A_t x_{t+1} + b_t.
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
