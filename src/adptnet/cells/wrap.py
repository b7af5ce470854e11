"""Wrappers that make a cell of a `torch.nn` cell, or of any function of state and input."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .._typing import Positions, Vector
from ..errors import IncompatibleError
from ..spec import check_size
from .base import Cell

__all__ = ["FunctionCell", "TorchCell", "from_function", "from_torch"]


def from_torch(cell: nn.RNNCellBase) -> Cell:
    """Wrap a `torch.nn.RNNCell`, `GRUCell` or `LSTMCell` as a cell.

    Args:
        cell: The module. The state of an `LSTMCell` is the concatenation of h and c.

    Raises:
        IncompatibleError: `cell` is not one of the three.
    """
    if not isinstance(cell, (nn.RNNCell, nn.GRUCell, nn.LSTMCell)):
        raise IncompatibleError(
            f"from_torch takes an nn.RNNCell, nn.GRUCell or nn.LSTMCell; got {type(cell).__name__}. "
            "For anything else: cells.from_function(lambda state, input: ..., state_size=n)."
        )
    return TorchCell(cell)


class TorchCell(Cell):
    """A cell of `torch.nn`.

    Args:
        cell: The module.
    """

    def __init__(self, cell: nn.RNNCell | nn.GRUCell | nn.LSTMCell):
        super().__init__()
        self.cell = cell
        self.input_size = cell.input_size
        self.state_size = cell.hidden_size * (2 if isinstance(cell, nn.LSTMCell) else 1)
        self.output_size = cell.hidden_size

    def prepare(self, inputs: Tensor, position: Positions) -> Tensor:
        _check_precision(self)
        return inputs

    def step(self, state: Vector, drive: Tensor) -> Vector:
        flat, inputs = state.reshape(-1, state.shape[-1]), drive.reshape(-1, drive.shape[-1])
        if isinstance(self.cell, nn.LSTMCell):
            hidden, memory = flat.chunk(2, -1)
            flat = torch.cat(self.cell(inputs, (hidden.contiguous(), memory.contiguous())), -1)
        else:
            flat = self.cell(inputs, flat)
        return flat.reshape(state.shape)

    def output(self, state: Tensor) -> Tensor:
        return state[..., : self.cell.hidden_size]


def from_function(function: Callable[[Tensor, Tensor], Tensor], state_size: int, input_size: int | None = None) -> Cell:
    """Wrap any `function(state, input) -> state` as a cell.

    Args:
        function: Called with (rows, state_size) and (rows, features), where rows are sequences, steps or both; it must
            treat each row independently. If it is an `nn.Module`, its parameters are those of the cell.
        state_size: State dimension.
        input_size: Features of the input; None if any number is accepted.

    Raises:
        IncompatibleError: `function` is not callable, or is an `nn.RNNCellBase`, whose arguments are in another order.
    """
    if not callable(function):
        raise IncompatibleError(f"from_function({function!r}): needs a function of state and input.")
    if isinstance(function, nn.RNNCellBase):
        raise IncompatibleError(
            f"from_function calls function(state, input); {type(function).__name__} takes (input, state). "
            "Use cells.from_torch(cell)."
        )
    cell = FunctionCell(function, state_size, input_size)
    check_size(cell, state_size=state_size, **({} if input_size is None else {"input_size": input_size}))
    return cell


def _check_precision(cell: Cell) -> None:
    """Raise `IncompatibleError` if a parameter has half precision."""
    for name, parameter in cell.named_parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            raise IncompatibleError(
                f"{name} is {parameter.dtype}; a wrapped cell runs in the dtype of its weights, and a state needs at "
                "least float32. Call .float() on the cell."
            )


class FunctionCell(Cell):
    """A cell whose step is a user's function.

    Args:
        function: A function of state and input.
        state_size: State dimension.
        input_size: Features of the input; None if any number is accepted.
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], state_size: int, input_size: int | None):
        super().__init__()
        self.function = function
        self.input_size = input_size
        self.state_size = state_size

    def prepare(self, inputs: Tensor, position: Positions) -> Tensor:
        _check_precision(self)
        return inputs

    def step(self, state: Tensor, drive: Tensor) -> Tensor:
        if state.dim() == 2:
            return self.function(state, drive)
        # the function may index dimensions by number, so it always gets two
        flat, inputs = state.reshape(-1, state.shape[-1]), drive.reshape(-1, drive.shape[-1])
        after = self.function(flat, inputs)
        return after.reshape(state.shape) if isinstance(after, Tensor) and after.shape == flat.shape else after
