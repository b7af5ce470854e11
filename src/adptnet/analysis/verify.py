"""Comparison of a layer with its slow dense reference in float64, and of the solvers of any cell with a loop."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..cells import Cell
from ..errors import IncompatibleError, InputError
from ..nn.adpt_layer import ADPTNet
from ..nn.layer import RecurrentLayer
from ..solvers import DEER, ConvDEER, ForwardDEER, Jacobi, KoopmanDEER, Picard, QuasiDEER, Sequential, Solver
from ..solvers.problem import resolve_system
from .definition import define_step

__all__ = ["Verification", "verify"]

PARALLEL = (DEER, QuasiDEER, ForwardDEER, ConvDEER, KoopmanDEER, Jacobi, Picard)


class Verification(NamedTuple):
    """Errors of a layer or a solver relative to the reference: largest difference over largest value, by quantity."""

    errors: dict[str, float]
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether every error is within the tolerance (NaN is not)."""
        return all(error <= self.tolerance for error in self.errors.values())

    def __str__(self) -> str:
        rows = [f"  {error:9.2e}  {name}" for name, error in sorted(self.errors.items(), key=lambda kv: -kv[1])]
        if "outputs" in self.errors:
            verdict = "The layer agrees with its reference" if self.ok else "The layer DIFFERS from its reference"
        else:
            verdict = "The solvers agree with a plain loop" if self.ok else "The solvers DIFFER from a plain loop"
        return "\n".join([f"{verdict} (tolerance {self.tolerance:.1e}):", *rows])


@torch.enable_grad()
def verify(
    layer: nn.Module, x: Tensor, *, solver: Solver | None = None, tolerance: float | None = None
) -> Verification:
    """Compare an ADPTNet with its definition, or the parallel solvers of any other cell with a plain loop.

    Outputs, or states, and the gradients of all parameters and of `x` are compared. The reference of an ADPTNet forms Q
    by its definition (`matrix_exp`, or the linear solve of the Cayley map) and M = Q Λ̄ Q' as a dense matrix at every
    step, in float64. It costs O(n³) per step: use a short sequence and a small state. The loop of a cell runs
    `cell.step` sequentially in the dtype of `x` and is differentiated by autograd.

    Args:
        layer: An ADPTNet; or a custom cell, a `Recurrent` layer or an `nn.GRU` or another recurrent module of torch,
            whose cell is compared.
        x: (batch, time, width), or as a layer that is not batch first takes it.
        solver: The solver to compare; by default the layer's own, and for a cell every parallel solver that fits it.
        tolerance: Largest relative error that counts as agreement; by default from the dtype and the length.

    Returns:
        The errors by name. `.ok` is True if all are within the tolerance; printing lists them, largest first.

    Raises:
        IncompatibleError: `layer` is neither a layer nor a cell.
        InputError: `x` has the wrong shape or dtype.
    """
    if isinstance(layer, nn.RNNCellBase | nn.RNNBase):
        layer, x, _, _ = resolve_system(layer, x, None, None)
    if not isinstance(layer, (RecurrentLayer, Cell)):
        raise IncompatibleError(
            f"verify compares an ADPTNet with its reference, or the solvers of a Cell with a loop; got "
            f"{type(layer).__name__}. A cell is made by cells.from_torch or cells.from_function."
        )
    if x.dim() != 3 or not x.is_floating_point():
        width = layer.width if isinstance(layer, RecurrentLayer) else layer.input_size or "features"
        raise InputError(f"verify takes (batch, time, {width}); got shape {tuple(x.shape)}, {x.dtype}.")
    if isinstance(layer, Cell):
        return _verify_solvers(layer, x, solver, tolerance)
    layer.check(x)
    x = (x if layer.batch_first else x.transpose(0, 1)).to(layer.cell.dtype or x.dtype)
    if not isinstance(layer, ADPTNet):
        return _verify_solvers(layer.cell, x, solver, tolerance)
    weights = _weights(x)
    slow = copy.deepcopy(layer).double()
    expected = _values_and_gradients(slow, x.double(), weights, None)
    actual = _values_and_gradients(layer, x, weights.to(x.dtype), solver or layer.solver)
    errors = _errors(actual, expected, "outputs")
    if tolerance is None:
        stored = max(torch.finfo(p.dtype).eps for p in layer.parameters())  # gradients are rounded to it
        tolerance = max(_tolerance(x), 4 * stored)
    return Verification(errors, tolerance)


def _verify_solvers(cell: Cell, x: Tensor, solver: Solver | None, tolerance: float | None) -> Verification:
    """Compare solvers with a loop of `cell.step`."""

    def run_loop(x: Tensor) -> Tensor:
        state = cell.initial_state(len(x), device=x.device, dtype=x.dtype)
        drive = cell.prepare(x, torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]))
        states = []
        for t in range(x.shape[1]):
            state = cell.step(state, drive[:, t])
            states.append(state)
        return torch.stack(states, 1)

    def solve_by(method: Solver) -> Callable[[Tensor], Tensor]:
        return lambda x: method(cell, x).states

    x = x.to(cell.dtype or x.dtype)
    with torch.no_grad():
        states = Sequential()(cell, x).states  # checks shapes and dtypes
    if not states.numel():
        raise InputError(f"verify compares at least one step of one sequence; got shape {tuple(x.shape)}.")
    weights = _weights(states).to(x.dtype)
    expected = _states_and_gradients(cell, run_loop, x, weights)
    errors = {}
    for method in [kind() for kind in PARALLEL] if solver is None else [solver]:
        try:
            actual = _states_and_gradients(cell, solve_by(method), x, weights)
        except IncompatibleError:
            if solver is not None:
                raise
            continue  # not every solver fits every cell
        errors.update({f"{method}: {name}": error for name, error in _errors(actual, expected, "states").items()})
    return Verification(errors, _tolerance(x) if tolerance is None else tolerance)


def _weights(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x.device)


def _tolerance(x: Tensor) -> float:
    return 1000 * torch.finfo(x.dtype).eps * max(32, x.shape[-2])


def _errors(actual: dict[str, Tensor], expected: dict[str, Tensor], values: str) -> dict[str, float]:
    """Return relative errors by name."""
    # A gradient far smaller than the others is compared at 1e-4 of their scale: its own digits are rounding errors.
    gradients = [value.abs().max() for name, value in expected.items() if name != values and value.numel()]
    floor = 1e-4 * max(map(float, gradients), default=0.0)
    return {name: _error(actual[name], expected[name], 0.0 if name == values else floor) for name in expected}


def _states_and_gradients(cell: Cell, run: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    states = run(x)
    return {"states": states.detach(), **_gradients(cell, (states * weights).sum(), x)}


def _values_and_gradients(layer: ADPTNet, x: Tensor, weights: Tensor, solver: Solver | None) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    if solver is None:
        outputs = _reference(layer, x)
    elif layer.batch_first:
        outputs = layer(x, solver=solver)[0]
    else:
        outputs = layer(x.transpose(0, 1), solver=solver)[0].transpose(0, 1)
    return {"outputs": outputs.detach(), **_gradients(layer, (outputs * weights).sum(), x)}


def _gradients(module: nn.Module, loss: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Return the gradients of `x` and of every trainable parameter; zero where the loss does not depend on it."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, [x, *named.values()], allow_unused=True)
    names = ["gradient of x", *(f"gradient of {name}" for name in named)]
    return {name: torch.zeros(()) if g is None else g for name, g in zip(names, gradients, strict=True)}


def _reference(layer: ADPTNet, x: Tensor) -> Tensor:
    cell = layer.cell
    batch, steps = x.shape[:2]
    drive = cell.prepare(x, torch.arange(steps, device=x.device).expand(batch, steps))
    state = cell.initial_state(batch)
    states = []
    for t in range(x.shape[-2]):
        state = define_step(cell, state, drive[..., t, :])
        states.append(state)
    trajectory = cell.output(torch.stack(states, -2))
    readout: nn.Module | None = layer.readout
    return trajectory if readout is None else readout(trajectory)


def _error(found: Tensor, expected: Tensor, floor: float) -> float:
    scale = max(float(expected.abs().max()), floor) if expected.numel() else 0.0
    difference = (found.double() - expected).abs().max() if expected.numel() else torch.zeros(())
    return float(difference) / scale if scale > 0 else float(difference)
