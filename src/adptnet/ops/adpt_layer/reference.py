"""The reference of `adpt_layer` in PyTorch operations."""

import torch
from torch import Tensor
from torch.nn import functional

from ..adpt_scan import Constants, Form
from ..adpt_scan.reference import adpt_scan
from .form import LayerVectors, LayerWeights

__all__ = ["adpt_layer"]


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
