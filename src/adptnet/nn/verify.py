"""A layer against its slow reference: dense matrices by their definitions, float64, one step after another."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..cells import ADPTCell
from ..errors import IncompatibleError
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
    layer.check(x)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x.device)
    slow = copy.deepcopy(layer).double()
    expected = _values_and_gradients(slow, x.double(), weights, None)
    found = _values_and_gradients(layer, x, weights.to(x.dtype), solver or layer.solver)
    errors = {name: _error(found[name], expected[name]) for name in expected}
    unit = torch.finfo(x.dtype).eps
    return Verification(errors, 1000 * unit * max(1, x.shape[-2]) if tolerance is None else tolerance)


def _values_and_gradients(layer: ADPTNet, x: Tensor, weights: Tensor, solver: Solver | None) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    outputs = _reference(layer, x) if solver is None else layer(x, solver=solver)[0]
    named = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad((outputs * weights).sum(), [x, *named.values()], allow_unused=True)
    names = ["gradient of x", *(f"gradient of {name}" for name in named)]
    found = {name: torch.zeros(()) if g is None else g for name, g in zip(names, gradients, strict=True)}
    return {"outputs": outputs.detach(), **found}


def _reference(layer: ADPTNet, x: Tensor) -> Tensor:
    cell = layer.cell
    assert isinstance(cell, ADPTCell)
    drive = cell.prepare(x, torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device))
    state = torch.zeros(*x.shape[:-2], cell.state_size, dtype=x.dtype, device=x.device)
    states = []
    for t in range(x.shape[-2]):
        state = (cell.define_conjugate(state) @ state.unsqueeze(-1)).squeeze(-1) + drive[..., t, :]
        states.append(state)
    trajectory = torch.stack(states, -2)
    readout: nn.Module | None = layer.readout
    return trajectory if readout is None else readout(trajectory)


def _error(found: Tensor, expected: Tensor) -> float:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    difference = (found.double() - expected).abs().max() if expected.numel() else torch.zeros(())
    return float(difference) / scale if scale > 0 else float(difference)
