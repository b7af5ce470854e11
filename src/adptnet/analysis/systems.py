"""The door of every analysis: a layer, a cell or a plain function, brought into one form, once."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..cells import ADPTState, Cell, from_torch
from ..errors import InputError, NonFiniteError
from ..nn.layer import RecurrentLayer
from ..recurrence.spectra.base import compute_dtype
from ..solvers.problem import pose

__all__ = ["Analysable", "Posed", "cell_of", "describe", "parameters_of", "posed"]

# A layer, a cell, a cell of torch.nn, or a function: f(state, input) with inputs, f(state) without.
Analysable = RecurrentLayer | Cell | nn.Module | Callable[..., Tensor]


class Posed(NamedTuple):
    """A trajectory to analyse: a cell, the drive of every step, and the state it starts from."""

    cell: Cell
    drive: Tensor  # (batch, time, features)
    state: Tensor  # (batch, n)
    batched: bool

    @property
    def steps(self) -> int:
        return self.drive.shape[1]


class MapCell(Cell):
    """A plain function of one state (n,), and of one input if there is one, as a cell."""

    def __init__(self, function: Callable[..., Tensor], state_size: int, driven: bool):
        super().__init__()
        self.function = function
        self.state_size = state_size
        self.input_size = None
        self.driven = driven

    def step(self, state: Tensor, drive: Tensor) -> Tensor:
        return self._of_each(self._checked, state, drive).reshape(state.shape)

    def jacobian(self, state: Tensor, drive: Tensor) -> Tensor:
        matrices = self._of_each(torch.func.jacfwd(self._checked), state, drive)
        # torch's forward derivative of x[0] ** 2 is float64 also where x is float32
        return matrices.to(state.dtype).reshape(*state.shape, state.shape[-1])

    def _of_each(self, function: Callable[..., Tensor], state: Tensor, drive: Tensor) -> Tensor:
        rows = [part.reshape(-1, part.shape[-1]) for part in ((state, drive) if self.driven else (state,))]
        try:
            found: Tensor = torch.func.vmap(function)(*rows)
        except RuntimeError as error:
            if not any(word in str(error) for word in ("vmap", "data pointer")):
                raise
            raise InputError(
                f"{describe(self.function)} cannot be run for many states at once and differentiated by torch.func "
                f"({str(error).split('. ')[0]}). Write it with tensor operations alone: torch.where for if, "
                "torch.stack for torch.tensor, no .item(), no .numpy() and no random numbers."
            ) from None
        return found

    def _checked(self, state: Tensor, *drive: Tensor) -> Tensor:
        moved = self.function(state, *drive)
        if not isinstance(moved, Tensor):
            raise InputError(
                f"{describe(self.function)} made a {type(moved).__name__} of a state. It must return one tensor of "
                f"shape {tuple(state.shape)}, e.g. by torch.stack."
            )
        if moved.shape != state.shape:
            raise InputError(
                f"{describe(self.function)} made a state of shape {tuple(moved.shape)} of one of shape "
                f"{tuple(state.shape)}. It must keep the shape."
            )
        return moved


def describe(system: object) -> str:
    """What to call a system in a message."""
    return getattr(system, "__name__", type(system).__name__)


def parameters_of(cell: Cell) -> list[nn.Parameter] | None:
    """What a cell learns; None if it is a plain function, which may hold tensors that we cannot see."""
    plain = any(not isinstance(getattr(part, "function", part), nn.Module) for part in cell.modules())
    return None if plain else list(cell.parameters())


def cell_of(system: Any) -> Cell:
    """The cell of a layer, or the cell itself."""
    if isinstance(system, RecurrentLayer):
        return system.cell
    if isinstance(system, Cell):
        return system
    if isinstance(system, nn.RNNCellBase):
        return from_torch(system)
    _refuse_containers(system)
    raise InputError(
        f"a {describe(system)} is neither a layer nor a cell. Pass an adptnet.ADPTNet or Recurrent layer, a cell, or "
        "cells.from_function(step, state_size=n)."
    )


def posed(
    system: Any, inputs: Tensor | None, state: Tensor | ADPTState | None = None, steps: int | None = None
) -> Posed:
    """Checks what an analysis was given and brings it into one form.

    Args:
        system: A layer, a cell, a cell of `torch.nn`, or a function of one state: f(x), or f(x, input) with inputs.
        inputs: (batch, time, features) or (time, features), as the layer takes them; None for an autonomous system.
        state: Where the trajectories start, (batch, n) or an `ADPTState`, or (n,) for all of them; the cell's initial
            state if not given.
        steps: How many steps to take: needed without inputs, the first so many of them otherwise.
    """
    _refuse_containers(system)
    inputs = _laid_out(system, inputs)
    rows = state.state if isinstance(state, ADPTState) else state
    if rows is not None and not isinstance(rows, Tensor):
        raise InputError(f"the state is a {type(rows).__name__}; pass a tensor (n,) or (trajectories, n).")
    if isinstance(system, RecurrentLayer | Cell | nn.RNNCellBase):
        cell = cell_of(system)
    else:
        cell = MapCell(system, _start_of(system, rows).shape[-1], driven=inputs is not None)
        _check_signature(system, cell.driven)
    inputs = _undriven(cell, system, rows, steps) if inputs is None else _cut(inputs, steps)
    _check_size(inputs, cell)
    _check_device(inputs, cell)
    if rows is not None and not isinstance(state, ADPTState) and rows.dim() == 1 and inputs.dim() == 3:
        state = rows = rows.expand(len(inputs), -1)  # one start for every sequence
    several = rows is not None and rows.dim() == 2 and not (isinstance(state, ADPTState) and len(rows) == 1)
    if inputs.dim() == 2 and several:  # many trajectories under one input
        assert rows is not None
        inputs = inputs.expand(rows.shape[0], *inputs.shape)
    _check_finite(inputs, rows)
    problem = pose(cell, inputs, state, None, None, None)
    return Posed(cell, problem.drive, problem.state, problem.batched)


def _refuse_containers(system: Any) -> None:
    if isinstance(system, nn.RNNBase):
        raise InputError(
            f"nn.{describe(system)} runs whole sequences and has no single step to look at. Pass an nn.RNNCell, "
            "nn.GRUCell or nn.LSTMCell with the weights of one of its layers."
        )
    inner = [name for name, module in _modules(system) if isinstance(module, RecurrentLayer)]
    if inner and not isinstance(system, RecurrentLayer):
        raise InputError(
            f"a {describe(system)} holds {len(inner)} recurrent layers, each with dynamics of its own. Pass one, "
            f"model.get_submodule({inner[0]!r}), or save the model and run: adptnet analyse CHECKPOINT"
        )


def _modules(system: Any) -> list[tuple[str, nn.Module]]:
    return list(system.named_modules()) if isinstance(system, nn.Module) else []


def _laid_out(system: Any, inputs: Any) -> Tensor | None:
    """The inputs with the batch first."""
    if isinstance(inputs, PackedSequence):
        raise InputError(
            "exponents are averages over one window of steps, and packed sequences end at different ones. "
            "Pass one sequence at a time: inputs=x[i, :lengths[i]]."
        )
    if inputs is not None and not isinstance(inputs, Tensor):
        raise InputError(f"inputs are a {type(inputs).__name__}; pass a tensor (batch, time, features).")
    turned = isinstance(system, RecurrentLayer) and not system.batch_first
    return inputs.transpose(0, 1) if turned and inputs is not None and inputs.dim() == 3 else inputs


def _start_of(system: Any, rows: Tensor | None) -> Tensor:
    if not callable(system):
        raise InputError(f"{system!r} is neither a layer, a cell nor a function of the state.")
    if rows is None or rows.dim() not in (1, 2):
        given = "None" if rows is None else f"shape {tuple(rows.shape)}"
        raise InputError(
            f"{describe(system)} is a plain function, so its state has to be given; got state={given}. "
            "Pass state=torch.tensor([0.1, 0.1]), or (trajectories, n) for several."
        )
    return rows


def _check_signature(function: Callable[..., Any], driven: bool) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin need not tell
        return
    try:
        signature.bind(*(("state", "input") if driven else ("state",)))
    except TypeError as error:
        called = "f(state, input), since there are inputs" if driven else "f(state), since there are no inputs"
        raise InputError(f"{describe(function)}{signature} is called as {called}: {error}.") from None


def _undriven(cell: Cell, system: Any, rows: Tensor | None, steps: int | None) -> Tensor:
    """The inputs of a system without any: zeros."""
    if steps is None or isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(
            f"steps={steps!r}: without inputs the number of steps has to be given, an int from 1. Pass inputs=x, or "
            "steps=10_000."
        )
    if rows is None:
        raise InputError(
            f"without inputs a {describe(system)} has to start somewhere: its initial state may be a fixed point. "
            f"Pass state=torch.randn({cell.state_size})."
        )
    features = 1 if isinstance(cell, MapCell) else cell.input_size  # of a function of the state alone: not looked at
    if features is None:
        raise InputError(
            f"{describe(system)} takes inputs of any size. Pass inputs= with as many features as it needs."
        )
    dtype = compute_dtype(rows.dtype) if cell.dtype is None else cell.dtype
    return torch.zeros(*rows.shape[:-1], steps, features, dtype=dtype, device=rows.device)


def _cut(inputs: Tensor, steps: int | None) -> Tensor:
    if steps is None:
        return inputs
    if not isinstance(steps, int) or not 1 <= steps <= inputs.shape[-2]:
        raise InputError(f"steps={steps!r}, but the inputs have {inputs.shape[-2]}. Drop steps=, or pass more inputs.")
    return inputs[..., :steps, :]


def _check_size(inputs: Tensor, cell: Cell) -> None:
    if inputs.dim() in (2, 3) and 0 in inputs.shape[:-1]:
        raise InputError(
            f"there is nothing to analyse in {tuple(inputs.shape)}, (batch, time, features): no sequences, or no steps."
        )
    if cell.state_size == 0:
        raise InputError("the state has no numbers. Pass state= of at least one.")


def _check_device(inputs: Tensor, cell: Cell) -> None:
    if cell.device is not None and cell.device != inputs.device:
        raise InputError(
            f"the inputs are on {inputs.device}, the cell is on {cell.device}. Pass inputs.to({str(cell.device)!r})."
        )


def _check_finite(inputs: Tensor, state: Tensor | None) -> None:
    if state is not None and not bool(state.isfinite().all()):
        raise NonFiniteError("the state to start from holds NaN or infinity. Pass finite numbers.")
    finite = inputs.isfinite().all(-1)
    if inputs.dim() in (2, 3) and not bool(finite.all()):
        where = tuple(int(i) for i in (~finite).nonzero()[0])
        place = f"sequence {where[0]}, step {where[1]}" if len(where) == 2 else f"step {where[0]}"
        raise NonFiniteError(
            f"the inputs are not finite: first at {place}. If that is padding, cut it off, one sequence at a time: "
            "inputs=x[i, :lengths[i]]."
        )
