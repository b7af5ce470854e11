"""Wrappers that turn a `torch.nn` cell, or any function of state and input, into a cell."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .._typing import Matrix, Positions, Vector
from ..errors import IncompatibleError
from ..ops._backends import REFERENCE, TRANSFORMED, Backend, note_run
from ..ops._torch_state import has_dispatch_mode, is_transformed
from ..recurrence.projections.base import is_hooked
from ..recurrence.spectra import BlockDiagonal
from ..spec import check_size
from .base import Cell
from .dispatch import explain_replaced
from .structure import Structure, differentiate
from .torch_jacobian import compute_jacobian, compute_jacobian_diagonal
from .torch_scan import run_layer

__all__ = ["FunctionCell", "TorchCell", "from_function", "from_torch"]

_STOCK = (nn.RNNCell, nn.GRUCell, nn.LSTMCell)
_LAYER = Backend("torch", "the layer of torch.nn for this cell runs all steps.")
_NOT_CPU = Backend(
    REFERENCE, "the layers of torch.nn are used on CPUs only.", "Solve in parallel: solvers.QuasiDEER()."
)
_TRACED = Backend(REFERENCE, "a compiler or a dispatch mode observes every operation.")
_CHECKPOINTED = Backend(
    REFERENCE,
    "the layers of torch.nn cannot recompute segments, as the adjoint Checkpointed requires.",
    "Use adjoint=adjoints.Unrolled() if the memory suffices.",
)
_MODIFIED = Backend(
    REFERENCE,
    "the module has hooks, parametrizations or a class of its own, and is called at every step.",
    "Remove the hooks, or use nn.RNNCell, nn.GRUCell or nn.LSTMCell itself.",
)


def from_torch(cell: nn.RNNCellBase) -> Cell:
    """Wrap a `torch.nn.RNNCell`, `GRUCell` or `LSTMCell` as a cell.

    Args:
        cell: The module. The state of an `LSTMCell` is the concatenation of h and c.

    Raises:
        IncompatibleError: `cell` is not one of the three.
    """
    if not isinstance(cell, _STOCK):
        raise IncompatibleError(
            f"from_torch takes an nn.RNNCell, nn.GRUCell or nn.LSTMCell; got {type(cell).__name__}. "
            "For anything else: cells.from_function(lambda state, input: ..., state_size=n)."
        )
    return TorchCell(cell)


class TorchCell(Cell):
    """A cell of `torch.nn`.

    Jacobians are computed in closed form and sequential runs by torch's own layer, unless the module is of a subclass,
    parametrized or hooked: then every step calls it.

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

    def structure(self) -> Structure:
        known = Structure(scan=self.scan, choose_scan=self.choose_scan)
        return known._replace(jacobian=self.jacobian, jacobian_blocks=self.jacobian_blocks)

    def scan(
        self,
        drive: Tensor,
        state: Tensor,
        *,
        reset: Tensor | None = None,
        lengths: Tensor | None = None,
        lean: bool = False,
    ) -> Tensor | None:
        """Run all steps by the layer of `torch.nn`; see `Structure.scan`."""
        tensors = (drive, state, *self.cell.parameters())
        recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        backend = self.choose_scan(drive.device)
        if recorded and lean:
            backend = _CHECKPOINTED
        elif has_dispatch_mode():
            backend = _TRACED
        elif is_transformed(*tensors):
            backend = TRANSFORMED
        note_run("forward", backend, log=False)
        if not backend.is_kernel or not drive.numel():
            return None
        return run_layer(self.cell, drive, state, reset, lengths)

    def choose_scan(self, device: torch.device | str) -> Backend:
        """Return the program of `scan`; see `Structure.choose_scan`."""
        if torch.device(device).type != "cpu":
            return _NOT_CPU
        if self._is_stock() and not is_transformed(*self.cell.parameters()):
            return _LAYER
        return explain_replaced(self, TorchCell) or _MODIFIED

    def jacobian(self, state: Vector, drive: Tensor) -> Matrix:
        """Return the derivative of the step with respect to the state, (..., state_size, state_size).

        Args:
            state: (..., state_size).
            drive: (..., features).
        """
        if not self._is_stock():
            return differentiate(self.step, state, drive)
        return compute_jacobian(self.cell, state, drive)

    def jacobian_blocks(self, state: Vector, drive: Tensor) -> BlockDiagonal:
        """Return the diagonal of `jacobian`.

        Args:
            state: (..., state_size).
            drive: (..., features).
        """
        if not self._is_stock():
            return BlockDiagonal(self.jacobian(state, drive).diagonal(dim1=-2, dim2=-1))
        return BlockDiagonal(compute_jacobian_diagonal(self.cell, state, drive))

    def output(self, state: Tensor) -> Tensor:
        return state[..., : self.cell.hidden_size]

    def _is_stock(self) -> bool:
        """Return whether a step is that of the class in `torch.nn`, so that the module need not be called."""
        cell = self.cell
        if type(cell) not in _STOCK or is_hooked(cell) or cell._forward_pre_hooks:
            return False
        if isinstance(cell, nn.RNNCell) and cell.nonlinearity not in ("tanh", "relu"):
            return False
        return explain_replaced(self, TorchCell) is None


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
