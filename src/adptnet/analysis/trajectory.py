"""Input handling of every analysis: a layer, a cell or a function becomes a `Trajectory`."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .._dtype import compute_dtype
from .._validate import check_finite
from ..cells import ADPTCell, ADPTState, Cell, Structure
from ..cells.wrap import as_cell, is_time_first
from ..errors import IncompatibleError, InputError, NonFiniteError
from ..nn.layer import RecurrentLayer
from ..solvers.problem import make_problem
from .scalar_program import record_program

__all__ = [
    "MapCell",
    "Trajectory",
    "describe",
    "list_parameters",
    "make_trajectory",
    "resolve_adpt_cell",
    "resolve_cell",
]


class Trajectory(NamedTuple):
    """A trajectory to analyze: a cell, the drive of every step, and the initial state."""

    cell: Cell
    drive: Tensor  # (batch, time, features)
    state: Tensor  # (batch, n)
    batched: bool

    @property
    def steps(self) -> int:
        return self.drive.shape[1]


class MapCell(Cell):
    """A cell that wraps a function of one state (n,), and of one input if the system is driven.

    Args:
        function: Maps (n,) to (n,); if driven, takes an input of one step as its second argument.
        state_size: State dimension n.
        driven: Whether `function` takes an input.
    """

    def __init__(self, function: Callable[..., Tensor], state_size: int, driven: bool):
        super().__init__()
        self.function = function
        self.state_size = state_size
        self.input_size = None
        self.driven = driven

    def step(self, state: Tensor, drive: Tensor) -> Tensor:
        if state.shape[:-1] == (1,):  # one trajectory: vmap would take several times as long as the function itself
            return self._call_checked(*(part[0] for part in ((state, drive) if self.driven else (state,)))).unsqueeze(0)
        return self._map_rows(self._call_checked, state, drive).reshape(state.shape)

    def structure(self) -> Structure:
        return Structure(jacobian=self.jacobian, scan=self.scan)

    def scan(
        self,
        drive: Tensor,
        state: Tensor,
        *,
        reset: Tensor | None = None,
        lengths: Tensor | None = None,
        lean: bool = False,
    ) -> Tensor | None:
        """Run one trajectory of a map of few dimensions as a program of Python numbers; see `Structure.scan`.

        The numbers are in float64 and are rounded to the dtype of the state at the end.
        """
        if torch.is_grad_enabled() or len(state) != 1 or reset is not None or lengths is not None or not state.is_cpu:
            return None
        rows = drive[0] if self.driven else drive[0, :, :0]
        program = record_program(self._call_checked, *((state[0], rows[0]) if self.driven else (state[0],)))
        if program is None:
            return None
        states = [state[0].tolist()]
        try:
            for row in rows.tolist():
                states.append(program(states[-1] + row))
        except (ArithmeticError, ValueError):  # torch continues with infinities, and Python does not
            return None
        return torch.tensor(states[1:], dtype=state.dtype).unsqueeze(0)

    def jacobian(self, state: Tensor, drive: Tensor) -> Tensor:
        """Return the derivative of each row with respect to its state; see `Structure.jacobian`."""
        matrices = self._map_rows(torch.func.jacfwd(self._call_checked), state, drive)
        # forward-mode differentiation of x[0] ** 2 in torch returns float64 even where x is float32
        return matrices.to(state.dtype).reshape(*state.shape, state.shape[-1])

    def _map_rows(self, function: Callable[..., Tensor], state: Tensor, drive: Tensor) -> Tensor:
        rows = [part.reshape(-1, part.shape[-1]) for part in ((state, drive) if self.driven else (state,))]
        try:
            results: Tensor = torch.func.vmap(function)(*rows)
        except RuntimeError as error:
            if not any(word in str(error) for word in ("vmap", "data pointer")):
                raise
            raise InputError(
                f"{describe(self.function)} cannot be vectorized and differentiated by torch.func "
                f"({str(error).split('. ')[0]}). Write it with tensor operations alone: torch.where for if, "
                "torch.stack for torch.tensor, no .item(), no .numpy() and no random numbers."
            ) from None
        return results

    def _call_checked(self, state: Tensor, *drive: Tensor) -> Tensor:
        following = self.function(state, *drive)
        if not isinstance(following, Tensor):
            raise InputError(
                f"{describe(self.function)} returned a {type(following).__name__}. It must return one tensor of "
                f"shape {tuple(state.shape)}, e.g. by torch.stack."
            )
        if following.shape != state.shape:
            raise InputError(
                f"{describe(self.function)} returned shape {tuple(following.shape)} for a state of shape "
                f"{tuple(state.shape)}. It must keep the shape."
            )
        return following


def describe(system: object) -> str:
    """Return the name of a system for messages.

    Args:
        system: A layer, a cell or a function.
    """
    return getattr(system, "__name__", type(system).__name__)


def list_parameters(cell: Cell) -> list[nn.Parameter] | None:
    """Return the parameters of a cell; None for a plain function, whose parameters cannot be listed.

    Args:
        cell: The cell.
    """
    is_opaque = any(not isinstance(getattr(part, "function", part), nn.Module) for part in cell.modules())
    return None if is_opaque else list(cell.parameters())


def resolve_cell(system: Any) -> Cell:
    """Return the cell of a layer, or the cell itself.

    Args:
        system: A layer, a cell, or a recurrent module of `torch.nn`.

    Raises:
        InputError: `system` is neither.
    """
    if not isinstance(system, RecurrentLayer | Cell | nn.RNNCellBase | nn.RNNBase):
        _reject_containers(system)
    return as_cell(system)


def resolve_adpt_cell(system: Any, purpose: str) -> ADPTCell:
    """Return the ADPT cell of `system`.

    Args:
        system: A layer or a cell.
        purpose: The name of the calling function, for the message.

    Raises:
        IncompatibleError: It is a cell of another kind.
    """
    cell = resolve_cell(system)
    if not isinstance(cell, ADPTCell):
        raise IncompatibleError(
            f"{purpose} needs the matrix M = QΛ̄Q' of an ADPT cell; {describe(cell)} has no M. Pass an ADPT layer or "
            "cell, without memory= or Stateful()."
        )
    return cell


def make_trajectory(
    system: Any, inputs: Tensor | None, state: Tensor | ADPTState | None = None, steps: int | None = None
) -> Trajectory:
    """Validate the arguments of an analysis and return the trajectory they describe.

    Args:
        system: A layer, a cell, a recurrent module of `torch.nn`, or a function of one state: f(state), or
            f(state, input) with inputs.
        inputs: (batch, time, features) or (time, features), as the layer takes them; None for an autonomous system.
        state: Initial states: (batch, n) or an `ADPTState`, or (n,) for all trajectories; the cell's initial state by
            default.
        steps: Number of steps. Required without inputs; otherwise the inputs are truncated to it.

    Raises:
        InputError: Arguments of the wrong type, shape, dtype or device.
        NonFiniteError: Inputs or state hold NaN or infinity.
    """
    _reject_containers(system)
    inputs = _to_batch_first(system, inputs)
    rows = state.state if isinstance(state, ADPTState) else state
    if rows is not None and not isinstance(rows, Tensor):
        raise InputError(f"the state is a {type(rows).__name__}; pass a tensor (n,) or (trajectories, n).")
    if isinstance(system, RecurrentLayer | Cell | nn.RNNCellBase | nn.RNNBase):
        cell = resolve_cell(system)
    else:
        cell = MapCell(system, _check_start(system, rows).shape[-1], driven=inputs is not None)
        _check_signature(system, cell.driven)
    inputs = _make_zero_inputs(cell, system, rows, steps) if inputs is None else _truncate(inputs, steps)
    _check_size(inputs, cell)
    _check_device(inputs, cell)
    if rows is not None and not isinstance(state, ADPTState) and rows.dim() == 1 and inputs.dim() == 3:
        state = rows = rows.expand(len(inputs), -1)  # the same initial state for every sequence
    several = rows is not None and rows.dim() == 2 and not (isinstance(state, ADPTState) and len(rows) == 1)
    if inputs.dim() == 2 and several:  # several trajectories with the same input
        assert rows is not None
        inputs = inputs.expand(rows.shape[0], *inputs.shape)
    _check_finite(inputs, rows)
    problem = make_problem(cell, inputs, state, None, None, None)
    return Trajectory(cell, problem.drive, problem.state, problem.batched)


def _reject_containers(system: Any) -> None:
    inner = [name for name, module in _modules(system) if isinstance(module, RecurrentLayer)]
    if inner and not isinstance(system, RecurrentLayer):
        raise InputError(
            f"a {describe(system)} holds {len(inner)} recurrent layers, each with dynamics of its own. Pass one, "
            f"model.get_submodule({inner[0]!r}), or save the model and run: adptnet analyze CHECKPOINT"
        )


def _modules(system: Any) -> list[tuple[str, nn.Module]]:
    return list(system.named_modules()) if isinstance(system, nn.Module) else []


def _to_batch_first(system: Any, inputs: Any) -> Tensor | None:
    """Return the inputs as (batch, time, features) or (time, features)."""
    if isinstance(inputs, PackedSequence):
        raise InputError(
            "exponents are averages over one window of steps, but packed sequences end at different steps. "
            "Pass one sequence at a time: inputs=x[i, :lengths[i]]."
        )
    if inputs is not None and not isinstance(inputs, Tensor):
        raise InputError(f"inputs are a {type(inputs).__name__}; pass a tensor (batch, time, features).")
    return inputs.transpose(0, 1) if is_time_first(system) and inputs is not None and inputs.dim() == 3 else inputs


def _check_start(system: Any, rows: Tensor | None) -> Tensor:
    if not callable(system):
        raise InputError(f"{system!r} is neither a layer, a cell nor a function of the state.")
    if rows is None or rows.dim() not in (1, 2):
        given = "None" if rows is None else f"shape {tuple(rows.shape)}"
        raise InputError(
            f"{describe(system)} is a plain function and needs an initial state; got state={given}. "
            "Pass state=torch.tensor([0.1, 0.1]), or (trajectories, n) for several."
        )
    return rows


def _check_signature(function: Callable[..., Any], driven: bool) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(*(("state", "input") if driven else ("state",)))
    except TypeError as error:
        called = "f(state, input), since there are inputs" if driven else "f(state), since there are no inputs"
        raise InputError(f"{describe(function)}{signature} is called as {called}: {error}.") from None


def _make_zero_inputs(cell: Cell, system: Any, rows: Tensor | None, steps: int | None) -> Tensor:
    """Return zero inputs for an autonomous system."""
    if steps is None or isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(
            f"steps={steps!r}: without inputs the number of steps is required, an integer >= 1. Pass inputs=x, or "
            "steps=10_000."
        )
    if rows is None:
        raise InputError(
            f"without inputs a {describe(system)} needs a state: its default initial state may be a fixed point. "
            f"Pass state=torch.randn({cell.state_size})."
        )
    features = 1 if isinstance(cell, MapCell) else cell.input_size  # a function of the state alone ignores them
    if features is None:
        raise InputError(
            f"{describe(system)} takes inputs of any size. Pass inputs= with as many features as it needs."
        )
    dtype = compute_dtype(rows.dtype) if cell.dtype is None else cell.dtype
    return torch.zeros(*rows.shape[:-1], steps, features, dtype=dtype, device=rows.device)


def _truncate(inputs: Tensor, steps: int | None) -> Tensor:
    if steps is None:
        return inputs
    if not isinstance(steps, int) or not 1 <= steps <= inputs.shape[-2]:
        raise InputError(f"steps={steps!r}, but the inputs have {inputs.shape[-2]}. Drop steps=, or pass more inputs.")
    return inputs[..., :steps, :]


def _check_size(inputs: Tensor, cell: Cell) -> None:
    if inputs.dim() in (2, 3) and 0 in inputs.shape[:-1]:
        raise InputError(
            f"there is nothing to analyze in {tuple(inputs.shape)}, (batch, time, features): no sequences, or no steps."
        )
    if cell.state_size == 0:
        raise InputError("the state has dimension 0. Pass state= with at least one entry.")


def _check_device(inputs: Tensor, cell: Cell) -> None:
    if cell.device is not None and cell.device != inputs.device:
        raise InputError(
            f"the inputs are on {inputs.device}, the cell is on {cell.device}. Pass inputs.to({str(cell.device)!r})."
        )


def _check_finite(inputs: Tensor, state: Tensor | None) -> None:
    if state is not None and not bool(state.isfinite().all()):
        raise NonFiniteError("the initial state holds NaN or infinity. Pass finite values.")
    finite = inputs.isfinite().all(-1)
    if inputs.dim() in (2, 3):
        advice = "If that is padding, remove it, one sequence at a time: inputs=x[i, :lengths[i]]."
        check_finite(finite, "the inputs are", advice)
