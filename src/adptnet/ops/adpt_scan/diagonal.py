"""The recurrence without a rotation (M = Λ̄, or β fixed at zero) as a diagonal scan.

Used on GPUs, where `linear_scan` has a kernel for any state dimension, real and complex. The CPU kernel handles this
case itself.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ..linear_scan import linear_scan
from .form import Constants, Form
from .launch import find_unknown

__all__ = ["backward", "find_states_before", "forward", "is_diagonal"]


def is_diagonal(form: Form, *, slow: bool) -> bool:
    """Return whether M is Λ̄ at every step, without a phase, and the state has no other part.

    Args:
        form: The form of the recurrence.
        slow: Whether there is a slow memory, which makes it another recurrence.
    """
    is_constant = (form.linear or not form.rotates) and not (form.beta_in_drive or form.phased)
    return is_constant and not slow and find_unknown(form) is None


def find_states_before(states: Tensor, state: Tensor, reset: Tensor | None) -> Tensor:
    """Return the state before each step, which is zero where there is a reset, (batch, time, width).

    Args:
        states: (batch, time, width), the states after the steps.
        state, reset: As in `adpt_scan`.
    """
    before = torch.cat((state.unsqueeze(1), states), 1)[:, : states.shape[1]]
    return before if reset is None else torch.where(reset.unsqueeze(-1), 0.0, before)


def forward(
    drive: Tensor,
    state: Tensor,
    constants: Constants,
    form: Form,
    reset: Tensor | None,
    lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Return all states, (batch, time, n), and an empty tensor, because nothing is saved.

    Args:
        drive, state, constants, form, reset, lengths, save: As in `triton.forward`.
    """
    size = constants.real.shape[0]
    states = _scan(constants.real, constants.imag, drive[..., :size], state, reset, reverse=False)
    states = states if lengths is None else torch.where(_past_end(states, lengths), 0.0, states)
    return states, drive.new_empty(0)


def backward(
    gradient: Tensor,
    states: Tensor,
    projections: Tensor,
    drive: Tensor,
    state: Tensor,
    constants: Constants,
    form: Form,
    reset: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Constants]:
    """Return the gradients of the drive, the initial state and each of the constants.

    Args:
        gradient: With respect to the states.
        states, projections: The results of `forward`.
        drive, state, constants, form, reset, lengths: As in `adpt_scan`.
    """
    steps, size = states.shape[1:]
    real, imag = constants.real, constants.imag
    before = find_states_before(states, state, reset)
    following = None
    if reset is not None:
        following = functional.pad(reset[:, 1:], (0, 1))[:, :steps]
    if lengths is not None:
        ended = _past_end(states, lengths)
        gradient, before = torch.where(ended, 0.0, gradient), torch.where(ended, 0.0, before)
    conjugate = None if imag is None else -imag
    adjoint = _scan(real, conjugate, gradient, None, following, reverse=True)
    to_state = torch.zeros_like(state)
    if steps:
        first = adjoint[:, 0]
        to_state = real * first if conjugate is None else real * first + conjugate * _multiply_by_i(first)
        if reset is not None:
            to_state = torch.where(reset[:, :1], 0.0, to_state)
    to_drive = functional.pad(adjoint, (0, size * (2 if form.directions_in_drive else 0)))
    # The directions have no effect: the gradients of K, V and β are zero.
    rest = [None if part is None else torch.zeros_like(part) for part in constants[2:]]
    to_imag = None if imag is None else (adjoint * _multiply_by_i(before)).sum((0, 1))
    return to_drive, to_state, Constants((adjoint * before).sum((0, 1)), to_imag, *rest)


def _scan(
    real: Tensor, imag: Tensor | None, offset: Tensor, initial: Tensor | None, reset: Tensor | None, *, reverse: bool
) -> Tensor:
    if imag is None:
        return linear_scan(real, offset, initial, reset=reset, reverse=reverse)
    factors = torch.complex(real[::2], imag[::2])
    start = None if initial is None else _as_complex(initial)
    states = linear_scan(factors, _as_complex(offset), start, reset=reset, reverse=reverse)
    return torch.view_as_real(states).flatten(-2)


def _as_complex(values: Tensor) -> Tensor:
    return torch.view_as_complex(values.unflatten(-1, (-1, 2)).contiguous())


def _multiply_by_i(values: Tensor) -> Tensor:
    """Return each pair (a, b) as (-b, a)."""
    first, second = values.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((-second, first), -1).flatten(-2)


def _past_end(states: Tensor, lengths: Tensor) -> Tensor:
    return (torch.arange(states.shape[1], device=states.device) >= lengths.unsqueeze(-1)).unsqueeze(-1)
