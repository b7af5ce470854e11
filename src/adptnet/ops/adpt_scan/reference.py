"""The ADPT recurrence as an eager loop: the specification of `adpt_scan`, for any device, dtype and gradient order."""

import torch
from torch import Tensor
from torch.nn import functional

from .._unit_vectors import fix_dot_product, spike, unit
from ..plane_rotation import cayley, exponential, plane_rotation
from .form import DEFAULT_FORM, Constants, Form, RetractionKind, Source

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
    size = constants.real.shape[0]
    states: list[Tensor] = []
    for t in range(drive.shape[1]):
        if reset is not None:
            state = torch.where(reset[:, t, None], 0.0, state)
        fast, slow = state[..., :size], state[..., size:]
        u, *rest = drive[:, t].split([size, *[size] * (2 * form.directions_in_drive), *[1] * form.beta_in_drive], -1)
        if constants.feed_real is not None:
            u = u + _multiply(constants.feed_real, constants.feed_imag, slow)
        following = _step(fast, u, rest, constants, form)
        if constants.decay is not None and constants.charge is not None:
            following = torch.cat((following, constants.decay * slow + constants.charge * following), -1)
        if lengths is not None:
            ended = t >= lengths[:, None]
            states.append(torch.where(ended, 0.0, following))
            state = torch.where(ended, state, following)
        else:
            states.append(following)
            state = following
    return torch.stack(states, 1) if states else state.unsqueeze(1)[:, :0]


def _step(x: Tensor, u: Tensor, rest: list[Tensor], constants: Constants, form: Form) -> Tensor:
    if not form.rotates:
        return _multiply(constants.real, constants.imag, x) + u
    heads = (form.heads, -1)
    real = constants.real.unflatten(-1, heads)
    imag = None if constants.imag is None else constants.imag.unflatten(-1, heads)
    x, u = x.unflatten(-1, heads), u.unflatten(-1, heads)
    if form.directions_in_drive:
        key, value = (part.unflatten(-1, heads) for part in rest[:2])
    else:
        assert constants.weight is not None
        projected = torch.einsum("bhi,hpji->pbhj", _apply_source(x, form), constants.weight)
        if constants.bias is not None:
            projected = projected + constants.bias.transpose(0, 1).unsqueeze(1)
        key, value = projected
    key, value = unit(key), unit(value)
    if form.norm_epsilon is not None:
        assert constants.norm_weight is not None
        assert constants.norm_bias is not None
        key, value = (
            unit(functional.layer_norm(part, part.shape[-1:], weight, bias, form.norm_epsilon))
            for part, weight, bias in zip((key, value), constants.norm_weight, constants.norm_bias, strict=True)
        )
    if form.dot is not None:
        key = fix_dot_product(key, value, form.dot)
    if form.beta_in_drive:
        beta = rest[-1].unsqueeze(-2)
    else:
        assert constants.beta is not None
        beta = constants.beta.unsqueeze(-1)
    if form.retraction in (RetractionKind.TAYLOR_ONE, RetractionKind.TAYLOR_TWO):
        return (_taylor(x, key, value, beta, real, imag, form) + u).flatten(-2)
    coefficients = exponential if form.retraction == RetractionKind.EXPONENTIAL else cayley
    rotation = plane_rotation(key, value, beta, coefficients)
    scaled = _multiply(real, imag, rotation.apply_transposed(x))
    following = rotation.apply(scaled + u) if form.rotation_aware else rotation.apply(scaled) + u
    return following.flatten(-2)


def _taylor(
    x: Tensor, key: Tensor, value: Tensor, beta: Tensor, real: Tensor, imag: Tensor | None, form: Form
) -> Tensor:
    """Return Λ̄x + β[S, Λ̄]x, plus ½β²[S, [S, Λ̄]]x at order two."""

    def skew(y: Tensor) -> Tensor:
        return key * (value * y).sum(-1, keepdim=True) - value * (key * y).sum(-1, keepdim=True)

    Lx, Sx = _multiply(real, imag, x), skew(x)
    LSx = _multiply(real, imag, Sx)
    first = skew(Lx) - LSx  # [S, Λ̄]x
    if form.retraction == RetractionKind.TAYLOR_ONE:
        return Lx + beta * first
    second = skew(first) - (skew(LSx) - _multiply(real, imag, skew(Sx)))
    return Lx + beta * first + beta * beta / 2 * second


def _apply_source(x: Tensor, form: Form) -> Tensor:
    if form.source == Source.SPIKES:
        return spike(x - form.spike_threshold)
    return x.relu() if form.source == Source.RELU else x


def _multiply(real: Tensor, imag: Tensor | None, x: Tensor) -> Tensor:
    if imag is None:
        return real * x
    pairs = x.unflatten(-1, (-1, 2))
    return real * x + imag * torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
