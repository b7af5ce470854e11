"""The interface between cells and solvers: `step` is required; a `Structure` makes solvers faster."""

import abc
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._dtype import compute_dtype
from .._typing import Device, DType, Position, Positions, Vector
from ..errors import IncompatibleError, InputError
from ..spec import ModuleSpec, check_size
from .structure import Structure

__all__ = ["ADPTState", "Cell", "CellSpec", "SizedCellSpec", "count_positions", "register_state", "select_rows"]


_State = TypeVar("_State", bound=type[tuple[Any, ...]])


def register_state(kind: _State) -> _State:
    """Register a named tuple as a state, so that `torch.load` and `torch.export.save` accept it.

    Args:
        kind: The class. Usable as a decorator.

    Returns:
        `kind` itself.
    """
    torch.serialization.add_safe_globals([kind])
    pytree._register_namedtuple(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")
    return kind


def select_rows(tensor: Tensor, rows: Any) -> Tensor:
    """Return some rows of a batched tensor.

    Args:
        tensor: (batch, ...).
        rows: Indices, which may repeat, a boolean mask, or a slice.

    Raises:
        InputError: `rows` is not one-dimensional, or not of integers or booleans.
    """
    if isinstance(rows, slice):
        return tensor[rows]
    index = torch.as_tensor(rows, device=tensor.device)
    index = index if index.numel() else index.long()
    if index.dim() != 1 or index.is_floating_point() or index.is_complex():
        raise InputError(
            f"rows are {index.dtype} of shape {tuple(index.shape)}; they must be indices or a mask of one dimension, "
            "e.g. state.select([0, 0, 2])."
        )
    return tensor[index]


@register_state
class ADPTState(NamedTuple):
    """The hidden state that a layer returns and takes at the next call. The module itself stores no state."""

    state: Tensor  # (batch, state_size), at least float32
    position: Tensor  # (batch,) int64, steps since the sequence began

    def detach(self) -> "ADPTState":
        """Return the state detached from the autograd graph, for truncated back-propagation."""
        return ADPTState(self.state.detach(), self.position)

    def to(self, *target: Any, **options: Any) -> "ADPTState":
        """Return the state on another device or in another dtype (`position` keeps its dtype).

        Args:
            *target: Positional arguments of `torch.Tensor.to`.
            **options: Keyword arguments of `torch.Tensor.to`.
        """
        state = self.state.to(*target, **options)
        return ADPTState(state, self.position.to(state.device, non_blocking=options.get("non_blocking", False)))

    def select(self, rows: Any) -> "ADPTState":
        """Return the states of some sequences of the batch, e.g. for beam search or to drop sequences that ended.

        Args:
            rows: Indices, which may repeat, a mask, or a slice.

        Raises:
            InputError: The state has no batch dimension.
        """
        if self.state.dim() < 2:
            raise InputError(
                "this state is of one sequence and has no batch dimension. Pass (batch, time, width) to the layer."
            )
        return ADPTState(select_rows(self.state, rows), select_rows(self.position, rows))


class Cell(nn.Module, abc.ABC):
    """Base class of the cells: one step of a recurrence.

    The state is one flat tensor (..., state_size), batched over leading dimensions. Only `step` is required;
    `structure` returns faster or more precise forms of the step, if there are any.
    """

    input_size: int | None  # features of the input; None if any number is accepted
    state_size: int
    output_size: int | None = None  # features of `output`; None if it is the whole state

    @abc.abstractmethod
    def step(self, state: Vector, drive: Tensor) -> Vector:
        """Return the next state.

        Args:
            state: (..., state_size).
            drive: One step of the tensor that `prepare` returns, (..., features).

        Returns:
            (..., state_size).
        """

    def prepare(self, inputs: Tensor, position: Positions) -> Tensor:
        """Compute everything that does not depend on the state, for all steps in parallel.

        Args:
            inputs: (..., time, input_size).
            position: Steps since the sequence began, (..., time).

        Returns:
            The drive, (..., time, features): whatever `step` takes beside the state, in one flat tensor.
        """
        return inputs

    def structure(self) -> Structure:
        """Return what is known of the step, for solvers and analyses; nothing by default."""
        return Structure()

    def output(self, state: Tensor) -> Tensor:
        """Return the output of the cell for a state: the state itself, unless it holds more than the output.

        Args:
            state: (..., state_size).

        Returns:
            (..., output_size).
        """
        return state

    def ravel(self, state: Any) -> Tensor:
        """Return a state as the flat tensor that `step` takes, e.g. from the pair (h, c) of an LSTM.

        Args:
            state: The state of one sequence or of a batch, in the structure that `unravel` returns, or flat already.

        Returns:
            (..., state_size).

        Raises:
            InputError: `state` has another structure.
        """
        if not isinstance(state, Tensor):
            raise InputError(
                f"the state is a {type(state).__name__}; {type(self).__name__} takes a tensor "
                f"(batch, {self.state_size}), or the ADPTState that an earlier call returned."
            )
        return state

    def unravel(self, state: Tensor) -> Any:
        """Return flat states in the structure of the wrapped module or function; the inverse of `ravel`.

        Args:
            state: (..., state_size), such as `solution.states`.

        Returns:
            `state` itself, unless the wrapped module or function has several tensors as its state.
        """
        return state

    def with_arguments(self, *, dt: Tensor | None = None, beta: Tensor | None = None) -> "Cell":
        """Return this cell with the arguments of one call.

        Args:
            dt: The length of each step in units of the regular step, (batch, time).
            beta: β for each sequence, (batch,).

        Returns:
            This cell itself if both are None; otherwise a cell that adds them to the drive.

        Raises:
            IncompatibleError: The cell does not take the argument.
        """
        if dt is None and beta is None:
            return self
        name = "dt" if dt is not None else "beta"
        raise IncompatibleError(
            f"{type(self).__name__} takes no {name}=; an ADPTNet without memory= and Stateful() does. Drop {name}=."
        )

    def reindex_arguments(self, index: Tensor) -> "Cell":
        """Return this cell with its per-step arguments (`dt`) re-indexed in time.

        Args:
            index: (batch, time) int64; step t takes the argument of step `index[:, t]`.
        """
        return self

    def initial_state(self, batch: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        """Return the state from which a sequence starts: zeros by default.

        Args:
            batch: Number of sequences.
            device: Device of the state; that of the parameters if None.
            dtype: Dtype of the state; that of the cell if None.

        Returns:
            (batch, state_size).
        """
        return torch.zeros(batch, self.state_size, dtype=dtype or self.dtype, device=device or self.device)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the state: that of the parameters, but at least float32; None without parameters."""
        parameter = next((p for p in self.parameters() if p.is_floating_point()), None)
        return None if parameter is None else compute_dtype(parameter.dtype)

    @property
    def device(self) -> torch.device | None:
        """The device of the parameters; None without parameters."""
        parameter = next(self.parameters(), None)
        return None if parameter is None else parameter.device


def count_positions(start: Position, steps: int, reset: Tensor | None) -> Tensor:
    """Return the number of steps since the beginning of the sequence, for each step.

    Args:
        start: Position of the first step: (batch,), or (1,) if it is the same for all sequences.
        steps: Number of steps.
        reset: (batch, steps) bool, True where a sequence begins; None if there are no resets.

    Returns:
        (batch, steps); (1, steps) for a `start` of shape (1,) without resets.
    """
    position = start.unsqueeze(-1) + torch.arange(steps, device=start.device)
    if reset is None:
        return position
    index = torch.arange(steps, device=start.device).expand(reset.shape)
    last_reset = torch.where(reset, index, -1).cummax(-1).values
    return torch.where(last_reset >= 0, index - last_reset, position)


class CellSpec(ModuleSpec):
    """Base class of the specs of a cell.

    Attributes:
        width: Features of the input.
    """

    width: int


class SizedCellSpec(CellSpec):
    """Base class of the specs with only a width and a state size.

    Attributes:
        width: Features of the input.
        state_size: State dimension; `width` if None.
    """

    state_size: int | None

    def __post_init__(self) -> None:
        if self.state_size is None:
            object.__setattr__(self, "state_size", self.width)
        check_size(self, width=self.width, state_size=self.size)

    @property
    def size(self) -> int:
        """The state dimension."""
        return self.width if self.state_size is None else self.state_size
