"""Any function of state and input as a cell."""

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._typing import Device, DType, Positions
from .._validate import check_precision
from ..errors import IncompatibleError
from ..spec import check_size
from .base import Cell
from .prepare_check import check_prepare
from .tree import Layout

__all__ = ["FunctionCell", "from_function"]


def from_function(
    function: Callable[..., Any],
    state_size: int | None = None,
    input_size: int | None = None,
    *,
    state: Any = None,
    prepare: Callable[[Tensor], Any] | None = None,
) -> Cell:
    """Wrap any `function(state, input) -> state` as a cell.

    A state of several tensors is a tuple, a dictionary or any other pytree:
    `from_function(step, state={"h": 64, "c": 64})`. Solvers see one flat tensor; `cell.unravel(solution.states)`
    returns the states in the structure of the function, and `state=` of a call takes either form.

    Parameters that depend on the input, but not on the state, are computed for all steps in parallel by `prepare`.

    Args:
        function: Called with the state and the input of (rows, features), where rows are sequences, steps or both; it
            must treat each row independently. If it is an `nn.Module` or a method of one, its parameters are those of
            the cell.
        state_size: State dimension, if the state is one tensor (rows, state_size).
        input_size: Features of the input; None if any number is accepted.
        state: In place of `state_size`, a pytree with the size of each tensor; or with a tensor as the initial state of
            one sequence, of any shape. The initial state is zero where a size is given.
        prepare: Called with the inputs of all steps, (batch, time, input_size); returns a tensor (batch, time, ...) or
            a pytree of them, of which `function` gets the rows as its second argument. Each step must depend on its own
            input only, which is tested with random inputs. Needs `input_size`.

    Raises:
        InputError: `prepare` couples steps or sequences.
        IncompatibleError: `function` is not callable, or is an `nn.RNNCellBase`, whose arguments are in another order.
    """
    if not callable(function):
        raise IncompatibleError(f"from_function({function!r}): needs a function of state and input.")
    if isinstance(function, nn.RNNCellBase | nn.RNNBase):
        raise IncompatibleError(
            f"from_function calls function(state, input); {type(function).__name__} takes (input, state). "
            "Use cells.from_torch(cell)."
        )
    if (state_size is None) == (state is None):
        raise IncompatibleError(
            "from_function needs the size of the state: pass state_size=64 for one tensor, or a pytree of sizes, "
            'state={"h": 64, "c": 64}.'
        )
    if prepare is not None and input_size is None:
        raise IncompatibleError("from_function(prepare=...) needs the features of the input. Pass input_size=.")
    return FunctionCell(function, state_size if state is None else state, input_size, prepare=prepare)


class FunctionCell(Cell):
    """A cell whose step is a user's function.

    Args:
        function: A function of state and input.
        state: The sizes of the state; see `from_function`.
        input_size: Features of the input; None if any number is accepted.
        prepare: A function of the inputs of all steps, or None; see `from_function`.
        output_size: Features of the output, the first part of the flat state; None for the whole state.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        state: Any,
        input_size: int | None = None,
        *,
        prepare: Callable[[Tensor], Any] | None = None,
        output_size: int | None = None,
    ):
        super().__init__()
        if input_size is not None:
            check_size(self, input_size=input_size)
        self.function = function
        self.preparation = prepare
        owners = [part.__self__ for part in (function, prepare) if inspect.ismethod(part)]
        modules = dict.fromkeys(owner for owner in owners if isinstance(owner, nn.Module))
        if modules:
            self.owners = nn.ModuleList(modules)
        self.layout: Layout | None = None  # of the state; None if it is one tensor (rows, state_size)
        if isinstance(state, int):
            check_size(self, state_size=state)
            self.state_size = state
        else:
            self.layout, initial = Layout.of_template(self, state)
            self.state_size = self.layout.size
            self.register_buffer("initial", initial)
        self.input_size = input_size
        self.output_size = output_size
        self.prepared: Layout | None = None
        if prepare is not None and input_size is not None:
            like = next((p for p in self.parameters() if p.is_floating_point()), torch.empty(0))
            with torch.no_grad():
                values = prepare(torch.zeros(1, 1, input_size, dtype=like.dtype, device=like.device))
            self.prepared = Layout.of_values(values, 2)
            check_prepare(self, prepare, input_size, like)

    def initial_state(self, batch: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        start: Any = getattr(self, "initial", None)
        if start is None:
            return super().initial_state(batch, device=device, dtype=dtype)
        return (
            cast(Tensor, start)
            .to(device=device or self.device or start.device, dtype=dtype or self.dtype)
            .repeat(batch, 1)
        )

    def prepare(self, inputs: Tensor, position: Positions) -> Tensor:
        check_precision(self)
        if self.preparation is None or self.prepared is None:
            return inputs
        batched = inputs.reshape(-1, *inputs.shape[-2:])
        drive = self.prepared.ravel(self.preparation(batched), batched.shape[:-1])
        return drive.reshape(*inputs.shape[:-1], drive.shape[-1])

    def step(self, state: Tensor, drive: Tensor) -> Tensor:
        flat, inputs = state, drive
        if state.dim() != 2:  # the function may index dimensions by number, so it always gets two
            flat, inputs = state.reshape(-1, state.shape[-1]), drive.reshape(-1, drive.shape[-1])
        given = inputs if self.prepared is None else self.prepared.unravel(inputs)
        if self.layout is not None:
            after = self.layout.ravel(self.function(self.layout.unravel(flat), given), flat.shape[:1])
        else:
            after = self.function(flat, given)
        return after.reshape(state.shape) if isinstance(after, Tensor) and after.shape == flat.shape else after

    def output(self, state: Tensor) -> Tensor:
        return state if self.output_size is None else state[..., : self.output_size]

    def ravel(self, state: Any) -> Tensor:
        """Return a state in the structure of the function as a flat tensor; see `Cell.ravel`.

        Args:
            state: The pytree, with tensors (batch, ...) or without batch; or flat already.
        """
        if self.layout is None or (isinstance(state, Tensor) and not self.layout.is_tensor):
            return super().ravel(state)
        if isinstance(state, Tensor) and state.dim() < 3 and state.shape[-1:] == (self.state_size,):
            return state
        return self.layout.ravel(state, None)

    def unravel(self, state: Tensor) -> Any:
        """Return flat states in the structure of the function.

        Args:
            state: (..., state_size).
        """
        return state if self.layout is None else self.layout.unravel(state)
