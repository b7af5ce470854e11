"""Wrappers that turn a recurrent module of torch, or any function of state and input, into a cell."""

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from .._typing import Device, DType, Matrix, Positions, Vector
from ..errors import IncompatibleError, InputError
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
from .torch_weights import LayerWeights, advance, list_layers
from .tree import Layout

__all__ = ["FunctionCell", "TorchCell", "as_cell", "from_function", "from_torch", "is_time_first"]

_CELLS = (nn.RNNCell, nn.GRUCell, nn.LSTMCell)
_WHOLE = (nn.RNN, nn.GRU, nn.LSTM)
_STOCK = (*_CELLS, *_WHOLE)
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


def from_torch(module: nn.Module, *, state: Any = None, input_size: int | None = None) -> Cell:
    """Wrap a recurrent module as a cell, with the module's own parameters.

    - An `nn.RNNCell`, `nn.GRUCell` or `nn.LSTMCell`.
    - A whole `nn.RNN`, `nn.GRU` or `nn.LSTM`, in one direction: the states of all its layers are one state.
    - Any module with the signature of these cells, (input, hidden) -> hidden, where hidden is a tensor (batch, n) or a
      tuple of them, such as (h, c).

    The output is the hidden state h: of the last layer, and the first tensor of a tuple. The state is a flat tensor;
    `cell.unravel` returns it as torch does, and `state=` of a call takes either form.

    Args:
        module: The module.
        state: The sizes of the hidden state of a module that is not of torch, such as 64 or (64, 64). If not given, the
            module is called once, without a hidden state.
        input_size: Features of the input; the module's attribute `input_size` if not given.

    Raises:
        IncompatibleError: The module is bidirectional, has projections, or does not have the signature of a cell.
    """
    if isinstance(module, _CELLS):
        return TorchCell(module)
    if isinstance(module, nn.RNNBase):
        _check_whole(module)
        return TorchCell(module)
    if isinstance(module, Cell) or not isinstance(module, nn.Module):
        raise IncompatibleError(
            f"from_torch takes a module such as nn.GRUCell or nn.GRU; got {type(module).__name__}. "
            "For a function: cells.from_function(lambda state, input: ..., state_size=n)."
        )
    return _wrap_module(module, state, getattr(module, "input_size", None) if input_size is None else input_size)


def as_cell(system: object) -> Cell:
    """Return the cell of a layer, or of a module of `torch.nn`; a cell itself.

    Args:
        system: A cell, a layer with a cell, or an `nn.GRUCell`, `nn.GRU` or another recurrent module of torch.

    Raises:
        InputError: It is none of these; the message shows how to make a cell.
    """
    if isinstance(system, Cell):
        return system
    inner = getattr(system, "cell", None)
    if isinstance(system, nn.Module) and isinstance(inner, Cell):
        return inner
    if isinstance(system, nn.RNNCellBase | nn.RNNBase):
        return from_torch(system)
    raise InputError(
        f"a {getattr(system, '__name__', type(system).__name__)} is neither a layer nor a cell. Pass an ADPTNet or "
        "Recurrent layer, layer.cell, an nn.GRU or nn.GRUCell, cells.from_torch(module) for another module with the "
        "signature of nn.GRUCell, or cells.from_function(step, state_size=n) for a function."
    )


def is_time_first(system: object) -> bool:
    """Return whether a layer, or a recurrent module of torch, takes (time, batch, features).

    Args:
        system: A layer, a cell or a module.
    """
    return not isinstance(system, Cell) and getattr(system, "batch_first", True) is False


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
        _check_precision(self)
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
                f"the state is {' and '.join(map(_describe, parts)) or _describe(state)}; "
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


def _check_whole(module: nn.RNNBase) -> None:
    """Raise `IncompatibleError` unless the steps of an `nn.RNN`, `nn.GRU` or `nn.LSTM` are those of its weights."""
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


class _StateFirst(nn.Module):
    """A module with the signature of a torch cell, called as function(state, input)."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, state: Any, inputs: Tensor) -> Any:
        return self.module(inputs, state)


def _wrap_module(module: nn.Module, state: Any, input_size: int | None) -> Cell:
    name = type(module).__name__
    if state is None:
        if input_size is None:
            raise IncompatibleError(
                f"{name} has no attribute input_size. Pass input_size=, or the sizes of its hidden state: "
                "state=64 or state=(64, 64)."
            )
        state = _probe_state(module, input_size)
    first = next(iter(pytree.tree_leaves(state)), None)
    size = first.numel() if isinstance(first, Tensor) else first
    return FunctionCell(_StateFirst(module), state, input_size, output_size=size)


def _probe_state(module: nn.Module, input_size: int) -> Any:
    """Return the sizes of the hidden state that a module returns for one input of zeros."""
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    x = torch.zeros(1, input_size, dtype=like.dtype, device=like.device)
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            after = module(x)
            again = module(x, after)
    except Exception as error:
        raise IncompatibleError(
            f"from_torch called {type(module).__name__} on an input of shape {tuple(x.shape)}, then again with the "
            f"hidden state that it returned, and it raised {type(error).__name__}: {error}. Pass the sizes of the "
            "hidden state, e.g. state=64 or state=(64, 64), or write "
            "cells.from_function(lambda state, input: ..., state=...)."
        ) from error
    finally:
        for part, training in modes:
            part.training = training
    leaves, structure = pytree.tree_flatten(after)
    shapes = [getattr(leaf, "shape", None) for leaf in leaves]
    if (
        not leaves
        or structure != pytree.tree_structure(again)
        or not all(s and len(s) == 2 and s[0] == 1 for s in shapes)
    ):
        raise IncompatibleError(
            f"{type(module).__name__} returned {_describe(after)} for an input of shape {tuple(x.shape)}. A module "
            "with the signature of nn.GRUCell returns its next hidden state: a tensor (batch, n), or a tuple of them. "
            "Write cells.from_function(lambda state, input: ..., state=...) for another."
        )
    return pytree.tree_unflatten([leaf.shape[-1] for leaf in leaves], structure)


def _fits(part: Any, layers: tuple[int, ...], size: int) -> bool:
    """Return whether a hidden state is (*layers, batch, size), or (*layers, size) for one sequence."""
    if not isinstance(part, Tensor) or part.dim() not in (len(layers) + 1, len(layers) + 2):
        return False
    return part.shape[-1] == size and tuple(part.shape[: len(layers)]) == layers


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


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
            input only. Needs `input_size`.

    Raises:
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
        _check_precision(self)
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
