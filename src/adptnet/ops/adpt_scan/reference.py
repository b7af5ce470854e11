"""The ADPT recurrence as an eager loop: the specification of `adpt_scan`, for any device, dtype and gradient order."""

import torch
from torch import Tensor

from ...recurrence.step import step
from .._unit_vectors import fix_dot_product, unit
from .form import DEFAULT_FORM, Constants, Form
from .packing import unpack

__all__ = ["adpt_scan"]


def adpt_scan(
    drive: Tensor,
    state: Tensor,
    constants: Constants,
    form: Form = DEFAULT_FORM,
    *,
    reset: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Return all states of x_t = M x_{t-1} + drive_t, M = Q Λ̄ Q' with Q the rotation in the plane of key and value.

    Args:
        drive: (batch, time, features); see `Form` for the features that may follow the drive itself.
        state: (batch, width), the state before the first step; width is n, or 2n with a slow memory.
        constants: Λ̄, K, V, β and the slow memory.
        form: The form of the recurrence.
        reset: (batch, time) bool; where True, the state before the step is set to zero.
        lengths: (batch,); states past the end of a sequence are zero.

    Returns:
        (batch, time, width).
    """
    parameters = unpack(constants, form)
    drive = _normalize_directions(drive, constants.real.shape[0], form)
    states: list[Tensor] = []
    for t in range(drive.shape[1]):
        if reset is not None:
            state = torch.where(reset[:, t, None], 0.0, state)
        following = step(parameters, state, drive[:, t])
        if lengths is not None:
            ended = t >= lengths[:, None]
            states.append(torch.where(ended, 0.0, following))
            state = torch.where(ended, state, following)
        else:
            states.append(following)
            state = following
    return torch.stack(states, 1) if states else state.unsqueeze(1)[:, :0]


def _normalize_directions(drive: Tensor, size: int, form: Form) -> Tensor:
    """Return the drive with its key and value, if it has them, as unit vectors with the dot product of the form."""
    if not form.directions_in_drive:
        return drive
    count = 2 * form.planes
    u, vectors, rest = drive.split([size, count * size, drive.shape[-1] - (1 + count) * size], -1)
    if not form.rotates:
        return torch.cat((u, rest), -1)
    units = unit(vectors.unflatten(-1, (form.planes, 2, form.heads, -1)))
    key, value = units.unbind(-3)
    key = key if form.dot is None else fix_dot_product(key, value, form.dot)
    return torch.cat((u, torch.stack((key, value), -3).flatten(-4), rest), -1)
