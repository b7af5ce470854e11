"""The recurrence whose M is Λ̄ itself, because nothing rotates or β is fixed at zero: a diagonal scan.

For GPUs, where `linear_scan` has a kernel for any state size, real and complex. The kernel for CPUs has its own way.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ..linear_scan import linear_scan
from .form import Constants, Form

__all__ = ["backward", "covers", "forward"]


def covers(form: Form, *, slow: bool) -> bool:
    """Whether M is Λ̄ at every step; `slow` says whether there is a slow memory, which is another recurrence."""
    return (form.linear or not form.turns) and not form.beta_given and not slow


def forward(
    drive: Tensor, state: Tensor, constants: Constants, form: Form, reset: Tensor | None, lengths: Tensor | None
) -> Tensor:
    """Return all states, (batch, time, n)."""
    size = constants.real.shape[0]
    states = _scan(constants.real, constants.imag, drive[..., :size], state, reset, reverse=False)
    return states if lengths is None else torch.where(_ended(states, lengths), 0.0, states)


def backward(
    gradient: Tensor,
    states: Tensor,
    state: Tensor,
    constants: Constants,
    form: Form,
    reset: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Constants]:
    """Return the derivatives with respect to the drive, the initial state and each of the constants."""
    steps, size = states.shape[1:]
    real, imag = constants.real, constants.imag
    before = torch.cat((state.unsqueeze(1), states), 1)[:, :steps]
    following = None
    if reset is not None:
        before = torch.where(reset.unsqueeze(-1), 0.0, before)
        following = functional.pad(reset[:, 1:], (0, 1))[:, :steps]
    if lengths is not None:
        ended = _ended(states, lengths)
        gradient, before = torch.where(ended, 0.0, gradient), torch.where(ended, 0.0, before)
    minus = None if imag is None else -imag
    reached = _scan(real, minus, gradient, None, following, reverse=True)
    to_state = torch.zeros_like(state)
    if steps:
        to_state = real * reached[:, 0] if minus is None else real * reached[:, 0] + minus * _quarter(reached[:, 0])
        if reset is not None:
            to_state = torch.where(reset[:, :1], 0.0, to_state)
    to_drive = functional.pad(reached, (0, size * (2 if form.given else 0)))
    # Directions change nothing, so that K, V and β have derivatives of zero.
    rest = [None if part is None else torch.zeros_like(part) for part in constants[2:]]
    to_imag = None if imag is None else (reached * _quarter(before)).sum((0, 1))
    return to_drive, to_state, Constants((reached * before).sum((0, 1)), to_imag, *rest)


def _scan(
    real: Tensor, imag: Tensor | None, offset: Tensor, initial: Tensor | None, reset: Tensor | None, *, reverse: bool
) -> Tensor:
    if imag is None:
        return linear_scan(real, offset, initial, reset=reset, reverse=reverse)
    factors = torch.complex(real[::2], imag[::2])
    start = None if initial is None else _pairs(initial)
    states = linear_scan(factors, _pairs(offset), start, reset=reset, reverse=reverse)
    return torch.view_as_real(states).flatten(-2)


def _pairs(values: Tensor) -> Tensor:
    return torch.view_as_complex(values.unflatten(-1, (-1, 2)).contiguous())


def _quarter(values: Tensor) -> Tensor:
    """Each pair (a, b) as (-b, a)."""
    first, second = values.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((-second, first), -1).flatten(-2)


def _ended(states: Tensor, lengths: Tensor) -> Tensor:
    return (torch.arange(states.shape[1], device=states.device) >= lengths.unsqueeze(-1)).unsqueeze(-1)
