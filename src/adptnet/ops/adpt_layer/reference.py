"""The reference of `adpt_layer` in PyTorch operations."""

import torch
from torch import Tensor
from torch.nn import functional

from ..adpt_scan import Constants, Form
from ..adpt_scan.reference import adpt_scan
from .form import DriveGradients, GateValues, LayerVectors, LayerWeights

__all__ = ["adpt_layer", "drive_gradients"]


def adpt_layer(
    x: Tensor, state: Tensor, form: Form, weights: LayerWeights, vectors: LayerVectors
) -> tuple[Tensor, Tensor]:
    """Run a layer.

    Args:
        x: (batch, time, width).
        state: The state before the first step, (batch, n).
        form: The form of the recurrence.
        weights: The matrices.
        vectors: The evaluated vectors.

    Returns:
        The outputs, (batch, time, outputs), and the state after the last step.
    """
    u = x if weights.input_weight is None else functional.linear(x, weights.input_weight, weights.input_bias)
    if weights.gate is not None:
        gate = weights.gate
        u = u * functional.softplus(functional.linear(functional.linear(u, gate.down), gate.up, gate.bias))
    drive = vectors.gain_real * u
    if vectors.gain_imag is not None:
        drive = drive + vectors.gain_imag * torch.stack((-u[..., 1::2], u[..., ::2]), -1).flatten(-2)
    weight, bias = (
        torch.stack(parts).unflatten(0, (form.heads, 2)) if parts else None
        for parts in (weights.directions, weights.direction_biases)
    )
    constants = Constants(vectors.real, vectors.imag, weight, bias, vectors.beta)
    states = adpt_scan(drive, state, constants, form)
    final = states[:, -1] if states.shape[1] else state
    if weights.readout_weight is None:
        return states, final
    return functional.linear(states, weights.readout_weight, weights.readout_bias), final


def drive_gradients(
    to_drive: Tensor, x: Tensor, gain: Tensor, weights: LayerWeights, values: GateValues | None, *, needs_x: bool
) -> DriveGradients:
    """Return the gradients of the drive, as `compute_drive_gradients`, in operations that counters of FLOPs see.

    Args:
        to_drive, x, gain, weights, values, needs_x: As in `compute_drive_gradients`.
    """
    flat, rows = to_drive.reshape(-1, to_drive.shape[-1]), x.reshape(-1, x.shape[-1])
    matrix, bias, gate = weights.input_weight, weights.input_bias, weights.gate
    product = total = None
    to_gate: tuple[Tensor, ...] = ()
    if matrix is None and values is None:
        to_gain, to_u = (flat * rows).sum(0), flat * gain
    elif gate is None or values is None:
        assert matrix is not None
        product = flat.t() @ rows
        total = None if bias is None else flat.sum(0)
        to_gain = (product * matrix).sum(1)
        to_gain = to_gain if bias is None or total is None else to_gain + bias * total
        to_u = flat * gain
        product, total = product * gain.unsqueeze(-1), None if total is None else total * gain
    else:
        u, hidden, logits = values
        scaled, factor = flat * gain, functional.softplus(logits)
        to_gain = (flat * u * factor).sum(0)
        slope = scaled * u * torch.sigmoid(logits)
        to_hidden = slope @ gate.up
        to_u = scaled * factor + to_hidden @ gate.down
        to_gate = to_hidden.t() @ u, slope.t() @ hidden, slope.sum(0)
        product = None if matrix is None else to_u.t() @ rows
        total = None if bias is None else to_u.sum(0)
    to_x = (to_u if matrix is None else to_u @ matrix).view(x.shape) if needs_x else None
    return DriveGradients(to_x, to_gain, product, total, to_gate)
