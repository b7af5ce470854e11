"""The gradients of the drive in one compiled call, against operations of torch and autograd."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from adptnet.ops.adpt_layer import reference
from adptnet.ops.adpt_layer.cpu import compute_drive_gradients
from adptnet.ops.adpt_layer.form import GateValues, GateWeights, LayerWeights


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize(
    ("batch", "steps", "width", "size"),
    [(1, 1, 5, 7), (3, 4, 8, 6), (2, 16, 1, 17), (1, 1, None, 7), (3, 4, None, 6), (41, 16, None, 17)],
)
def test_the_gradients_of_the_drive_are_those_of_autograd(batch, steps, width, size, rank, biased):
    """Without a width there is no input projection."""
    projected, width = width is not None, size if width is None else width
    leaves = {"x": torch.randn(batch, steps, width), "gain": torch.randn(size)}
    if projected:
        leaves["weight"] = torch.randn(size, width)
    if projected and biased:
        leaves["bias"] = torch.randn(size)
    if rank:
        leaves |= {"down": torch.randn(rank, size) / size, "up": torch.randn(size, rank), "shift": torch.randn(size)}
    leaves = {name: nn.Parameter(value) for name, value in leaves.items()}
    u = leaves["x"].reshape(-1, width)
    u = functional.linear(u, leaves["weight"], leaves.get("bias")) if projected else u
    gate, values = None, None
    gated = u
    if rank:
        hidden = u @ leaves["down"].t()
        logits = hidden @ leaves["up"].t() + leaves["shift"]
        gate = GateWeights(leaves["down"].detach(), leaves["up"].detach(), leaves["shift"].detach())
        values = GateValues(u.detach(), hidden.detach(), logits.detach())
        gated = functional.softplus(logits) * u
    drive = (leaves["gain"] * gated).view(batch, steps, size)
    to_drive = torch.randn_like(drive)
    expected = dict(zip(leaves, torch.autograd.grad(drive, list(leaves.values()), to_drive), strict=True))
    at = {name: value.detach() for name, value in leaves.items()}
    weights = LayerWeights(at.get("weight"), at.get("bias"), (), (), None, None, gate)
    for compute in (reference.drive_gradients, compute_drive_gradients):
        for needs_x in (True, False):
            found = compute(to_drive, at["x"], at["gain"], weights, values, needs_x=needs_x)
            assert (found.x is not None) == needs_x
            named = {"gain": found.gain, "weight": found.weight, "x": found.x, "bias": found.bias}
            named |= dict(zip(("down", "up", "shift"), found.gate, strict=False))
            for name, gradient in named.items():
                if gradient is not None:
                    assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)
            assert {name for name, value in named.items() if value is not None} == expected.keys() - (
                set() if needs_x else {"x"}
            )
