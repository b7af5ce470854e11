"""The diagonal linear recurrence x_t = a_t x_{t-1} + b_t, sequentially: the specification of `linear_scan`."""

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
    """Return the states of a diagonal linear recurrence.

    Args:
        transition: (n,) if it is the same at every step, or any shape that broadcasts to `offset`. Complex numbers
            represent pairs of the state.
        offset: (..., time, n).
        initial: (..., n), the state before the first step; zero by default.
        reset: (..., time) bool. Where True, the state before the step is set to zero: x_t = b_t. A NaN or an infinity
            in x_{t-1} or a_t does not pass a reset, nor does one in the gradient of x_t.
        reverse: Run from the last step to the first: x_t = a_t x_{t+1} + b_t.
        overwrite: Allow the states to overwrite `offset`, which saves memory; the reference never does.

    Returns:
        (..., time, n).
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
