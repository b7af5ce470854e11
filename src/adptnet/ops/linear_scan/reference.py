"""x_t = a_t x_{t-1} + b_t, one step after another."""

import torch
from torch import Tensor

__all__ = ["linear_scan"]


def linear_scan(
    transition: Tensor,
    offset: Tensor,
    initial: Tensor | None = None,
    *,
    reset: Tensor | None = None,
    reverse: bool = False,
    overwrite: bool = False,
) -> Tensor:
    """The states of a diagonal linear recurrence.

    Args:
        transition: (n,) if it is the same at every step, or anything that broadcasts to `offset`. Complex numbers stand
            for pairs of the state.
        offset: (..., time, n).
        initial: (..., n) the state that enters the first step; zero if not given.
        reset: (..., time) bool. True at t: nothing enters step t, so that x_t = b_t, whatever came before: a NaN or an
            infinity in x_{t-1} or a_t does not pass a reset, nor does one in the gradient of x_t.
        reverse: Run from the last step to the first: x_t = a_t x_{t+1} + b_t.
        overwrite: The states may take the place of `offset`, which saves memory; here they do not.
    """
    steps = offset.shape[-2]
    factors = torch.broadcast_to(transition, offset.shape)
    if reset is not None:
        factors = torch.where(reset.unsqueeze(-1), 0, factors)
    if not steps:
        return offset.clone()
    state = torch.zeros_like(offset[..., 0, :]) if initial is None else initial
    states: list[Tensor] = []
    for t in reversed(range(steps)) if reverse else range(steps):
        if reset is not None:
            state = torch.where(reset[..., t, None], 0, state)  # a factor of zero would keep a NaN
        state = factors[..., t, :] * state + offset[..., t, :]
        states.append(state)
    return torch.stack(states[::-1] if reverse else states, -2)
