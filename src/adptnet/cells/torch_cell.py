"""The modules `nn.RNNCell`, `nn.GRUCell`, `nn.LSTMCell`, `nn.RNN`, `nn.GRU` and `nn.LSTM` as cells."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .._typing import Matrix, Positions, Vector
from .._validate import check_precision
from ..errors import IncompatibleError, InputError
from ..ops._backends import REFERENCE, TRANSFORMED, Backend, note_run
from ..ops._torch_state import has_dispatch_mode, is_transformed
from ..recurrence.projections.base import is_hooked
from ..recurrence.spectra import BlockDiagonal
from .base import Cell
from .dispatch import explain_replaced
from .structure import Structure, differentiate
from .torch_jacobian import compute_jacobian, compute_jacobian_diagonal
from .torch_scan import run_layer
from .torch_weights import LayerWeights, advance, list_layers

__all__ = ["CELLS", "TorchCell", "check_whole", "describe"]

CELLS = (nn.RNNCell, nn.GRUCell, nn.LSTMCell)
_WHOLE = (nn.RNN, nn.GRU, nn.LSTM)
_STOCK = (*CELLS, *_WHOLE)
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


class TorchCell(Cell):
    """A cell of `torch.nn`, or all layers of an `nn.RNN`, `nn.GRU` or `nn.LSTM` as one cell.

    Jacobians are computed in closed form and sequential runs by torch's own layer, unless the module is of a subclass,
    parametrized or hooked: then every step calls it. The state holds h of each layer, in an LSTM h and c of each.

    Args:
        cell: The module.
    """

    def __init__(self, cell: nn.RNNCellBase | nn.RNNBase):
        super().__init__()
        self.cell = cell
        self.is_whole = isinstance(cell, nn.RNNBase)
        self.has_memory = isinstance(cell, nn.LSTMCell | nn.LSTM)
        self.num_layers: int = cell.num_layers if isinstance(cell, nn.RNNBase) else 1
        self.input_size = cell.input_size
        self.output_size: int = cell.hidden_size
        self.state_size = self.num_layers * cell.hidden_size * (2 if self.has_memory else 1)

    def prepare(self, inputs: Tensor, position: Positions) -> Tensor:
        check_precision(self)
        if isinstance(self.cell, nn.RNNBase) and self.cell.dropout and self.cell.training and self.num_layers > 1:
            raise IncompatibleError(
                f"the dropout={self.cell.dropout} between the layers of this nn.{type(self.cell).__name__} is random, "
                "and a cell must not be. Call .eval() on it, or set its attribute dropout to 0."
            )
        return inputs

    def step(self, state: Vector, drive: Tensor) -> Vector:
        if self.is_whole:
            return _advance_all(list_layers(self.cell), state, drive)
        flat, inputs = state.reshape(-1, state.shape[-1]), drive.reshape(-1, drive.shape[-1])
        if self.has_memory:
            hidden, memory = flat.chunk(2, -1)
            flat = torch.cat(self.cell(inputs, (hidden.contiguous(), memory.contiguous())), -1)
        else:
            flat = self.cell(inputs, flat)
        return flat.reshape(state.shape)

    def ravel(self, state: Any) -> Tensor:
        """Return the hidden state of the module as a flat tensor; see `Cell.ravel`.

        Args:
            state: h, or (h, c) of an LSTM, (batch, n) for a cell and (layers, batch, n) for a whole module; or flat.
        """
        if isinstance(state, Tensor):
            if state.dim() in (1, 2) and state.shape[-1] == self.state_size:
                return state
            parts: tuple[Any, ...] = (state,)
        else:
            parts = tuple(state) if isinstance(state, tuple | list) else ()
        sizes = (self.num_layers,) if self.is_whole else ()
        if len(parts) != 1 + self.has_memory or not all(_fits(part, sizes, self.output_size) for part in parts):
            shape = ", ".join(map(str, (*sizes, "batch", self.output_size)))
            raise InputError(
                f"the state is {' and '.join(map(describe, parts)) or describe(state)}; "
                f"nn.{type(self.cell).__name__} takes {'a pair of ' if self.has_memory else ''}({shape}), or the flat "
                f"(batch, {self.state_size}) that a solver returns."
            )
        joined = torch.cat(tuple(parts), -1)
        return joined.movedim(0, -2).flatten(-2) if self.is_whole else joined

    def unravel(self, state: Tensor) -> Any:
        """Return flat states as the module returns them: h, or (h, c) of an LSTM.

        Args:
            state: (..., state_size).

        Returns:
            Tensors (..., hidden_size) for a cell, and (layers, ..., hidden_size) for a whole module.
        """
        if self.is_whole:
            state = state.unflatten(-1, (self.num_layers, -1)).movedim(-2, 0)
        return tuple(state.chunk(2, -1)) if self.has_memory else state

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
        found, inputs = [], drive
        layers = list_layers(self.cell)
        for layer, entering in zip(layers, state.chunk(len(layers), -1), strict=True):
            found.append(run_layer(layer, inputs, entering, reset, lengths))
            inputs = found[-1][..., : layer.hidden_size]
        return torch.cat(found, -1) if len(found) > 1 else found[0]

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
        if not self._has_closed_form():
            return differentiate(self.step, state, drive)
        return compute_jacobian(list_layers(self.cell), state, drive)

    def jacobian_blocks(self, state: Vector, drive: Tensor) -> BlockDiagonal:
        """Return the diagonal of `jacobian`.

        Args:
            state: (..., state_size).
            drive: (..., features).
        """
        if not self._has_closed_form():
            return BlockDiagonal(self.jacobian(state, drive).diagonal(dim1=-2, dim2=-1))
        return BlockDiagonal(compute_jacobian_diagonal(list_layers(self.cell), state, drive))

    def output(self, state: Tensor) -> Tensor:
        start = state.shape[-1] - self.state_size // self.num_layers  # of the last layer
        return state[..., start : start + self.output_size]

    def _has_closed_form(self) -> bool:
        """Return whether the step is that of the weights, which may be parametrized in a whole module."""
        return self._is_stock() or (self.is_whole and explain_replaced(self, TorchCell) is None)

    def _is_stock(self) -> bool:
        """Return whether a step is that of the class in `torch.nn`, so that the module need not be called."""
        cell = self.cell
        if type(cell) not in _STOCK or is_hooked(cell) or cell._forward_pre_hooks:
            return False
        if isinstance(cell, nn.RNNCell) and cell.nonlinearity not in ("tanh", "relu"):
            return False
        return explain_replaced(self, TorchCell) is None


def _advance_all(layers: list[LayerWeights], state: Tensor, inputs: Tensor) -> Tensor:
    """Return the next states of all layers, each on the new h of the one below."""
    following = []
    for layer, own in zip(layers, state.chunk(len(layers), -1), strict=True):
        following.append(advance(layer, own, inputs))
        inputs = following[-1][..., : layer.hidden_size]
    return torch.cat(following, -1)


def check_whole(module: nn.RNNBase) -> None:
    """Raise `IncompatibleError` unless the steps of an `nn.RNN`, `nn.GRU` or `nn.LSTM` are those of its weights.

    Args:
        module: The module.
    """
    name = f"nn.{type(module).__name__}"
    if module.bidirectional:
        raise IncompatibleError(
            f"a bidirectional {name} needs the whole sequence and has no step. Wrap a {name} of one direction, and use "
            "it on x and on x.flip(1); or use nn.ADPTRNN(..., bidirectional=True) or Bidirectional(layer)."
        )
    if module.proj_size:
        raise IncompatibleError(
            f"{name}(proj_size={module.proj_size}) has projections between its steps. Build it without proj_size=."
        )
    base = type(module).__mro__[1 if parametrize.is_parametrized(module) else 0]
    if base not in _WHOLE or is_hooked(module) or module._forward_pre_hooks:
        raise IncompatibleError(
            f"{name} is a subclass of a module of torch.nn or has hooks, which a single step does not run. Pass an "
            "nn.RNN, nn.GRU or nn.LSTM itself, or write one step as a function: cells.from_function(step, state=...)."
        )


def _fits(part: Any, layers: tuple[int, ...], size: int) -> bool:
    """Return whether a hidden state is (*layers, batch, size), or (*layers, size) for one sequence."""
    if not isinstance(part, Tensor) or part.dim() not in (len(layers) + 1, len(layers) + 2):
        return False
    return part.shape[-1] == size and tuple(part.shape[: len(layers)]) == layers


def describe(value: Any) -> str:
    """Return a description of a value for an error message.

    Args:
        value: What a user or a module of the user passed.
    """
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
