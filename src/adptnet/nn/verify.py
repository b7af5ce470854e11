"""A layer against its slow reference: dense matrices by their definitions, float64, one step after another."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..cells import ADPTCell, CoupledCell, StatefulCell
from ..errors import IncompatibleError, InputError
from ..solvers import Solver
from .layer import ADPTNet

__all__ = ["Verification", "verify"]


class Verification(NamedTuple):
    """How far a layer is from its reference: largest difference over largest reference value, for each quantity."""

    errors: dict[str, float]
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether every error is within the tolerance (NaN is not)."""
        return all(error <= self.tolerance for error in self.errors.values())

    def __str__(self) -> str:
        rows = [f"  {error:9.2e}  {name}" for name, error in sorted(self.errors.items(), key=lambda kv: -kv[1])]
        verdict = "agrees with" if self.ok else "DIFFERS from"
        return "\n".join([f"The layer {verdict} its reference (tolerance {self.tolerance:.1e}):", *rows])


@torch.enable_grad()
def verify(layer: ADPTNet, x: Tensor, *, solver: Solver | None = None, tolerance: float | None = None) -> Verification:
    """Compares outputs and the gradients of all parameters and of `x` with the slow reference.

    The reference forms Q by its definition (`matrix_exp`, or the linear solve of the Cayley map) and M = Q Λ̄ Q' as
    a dense matrix at every step, in float64. It costs O(n³) a step: use a short, narrow sample.

    Args:
        layer: Any ADPTNet.
        x: (batch, time, width).
        solver: What to compare; the layer's own by default.
        tolerance: Largest relative error that counts as agreement; by default from the layer's dtype and the length.

    Returns:
        The errors by name; `.ok` says whether all are within tolerance, and printing shows them worst first.
    """
    if not isinstance(layer, ADPTNet):
        raise IncompatibleError(f"verify compares an ADPTNet with its reference; got {type(layer).__name__}.")
    if x.dim() != 3:
        raise InputError(f"verify takes (batch, time, {layer.width}); got shape {tuple(x.shape)}.")
    layer.check(x)
    x = (x if layer.batch_first else x.transpose(0, 1)).to(layer.cell.dtype)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x.device)
    slow = copy.deepcopy(layer).double()
    expected = _values_and_gradients(slow, x.double(), weights, None)
    found = _values_and_gradients(layer, x, weights.to(x.dtype), solver or layer.solver)
    # A gradient far below the others is held to a ten-thousandth of them: its own digits are their rounding.
    floor = 1e-4 * max(
        float(value.abs().max()) for name, value in expected.items() if name != "outputs" and value.numel()
    )
    errors = {name: _error(found[name], expected[name], 0.0 if name == "outputs" else floor) for name in expected}
    if tolerance is None:
        stored = max(torch.finfo(p.dtype).eps for p in layer.parameters())  # gradients are rounded to it
        tolerance = max(1000 * torch.finfo(x.dtype).eps * max(32, x.shape[-2]), 4 * stored)
    return Verification(errors, tolerance)


def _values_and_gradients(layer: ADPTNet, x: Tensor, weights: Tensor, solver: Solver | None) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    if solver is None:
        outputs = _reference(layer, x)
    elif layer.batch_first:
        outputs = layer(x, solver=solver)[0]
    else:
        outputs = layer(x.transpose(0, 1), solver=solver)[0].transpose(0, 1)
    named = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad((outputs * weights).sum(), [x, *named.values()], allow_unused=True)
    names = ["gradient of x", *(f"gradient of {name}" for name in named)]
    found = {name: torch.zeros(()) if g is None else g for name, g in zip(names, gradients, strict=True)}
    return {"outputs": outputs.detach(), **found}


def _reference(layer: ADPTNet, x: Tensor) -> Tensor:
    cell = layer.cell
    assert isinstance(cell, (ADPTCell, CoupledCell, StatefulCell))
    batch, steps = x.shape[:2]
    drive = cell.prepare(x, torch.arange(steps, device=x.device).expand(batch, steps))
    state = cell.initial_state(batch)
    states = []
    for t in range(x.shape[-2]):
        state = cell.define_step(state, drive[..., t, :])
        states.append(state)
    trajectory = cell.output(torch.stack(states, -2))
    readout: nn.Module | None = layer.readout
    return trajectory if readout is None else readout(trajectory)


def _error(found: Tensor, expected: Tensor, floor: float) -> float:
    scale = max(float(expected.abs().max()), floor) if expected.numel() else 0.0
    difference = (found.double() - expected).abs().max() if expected.numel() else torch.zeros(())
    return float(difference) / scale if scale > 0 else float(difference)
