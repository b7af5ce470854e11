"""The interface between cells and solvers: `step` is required; the other methods make solvers faster."""

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._dtype import compute_dtype
from .._typing import Device, DType, Matrix, Position, Positions, Vector
from ..errors import IncompatibleError, InputError
from ..ops._backends import REFERENCE, Backend, note_run, record_runs
from ..ops.adpt_step import Pass
from ..recurrence.conjugates import Conjugate, nearest_blocks
from ..recurrence.spectra import BlockDiagonal
from ..spec import ModuleSpec, check_size

if TYPE_CHECKING:  # solvers import cells; only `solvers.transitions` is used the other way
    from ..solvers.transitions import Transition

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


_DIFFERENTIATED = Backend(
    REFERENCE,
    "torch.func differentiates the step, one derivative for each state dimension.",
    "Use a solver without Jacobians, solvers.ConvDEER() or solvers.ForwardDEER(), if the cell has one that suits.",
)


class Cell(nn.Module, abc.ABC):
    """Base class of the cells: one step of a recurrence.

    The state is one flat tensor (..., state_size), batched over leading dimensions. Only `step` is required. The other
    methods have defaults, and a cell overrides those for which it has a faster or more precise form.
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

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function equal to `step`, with everything that is constant along a sequence evaluated once."""
        return self.step

    def scan(
        self,
        drive: Tensor,
        state: Tensor,
        *,
        reset: Tensor | None = None,
        lengths: Tensor | None = None,
        lean: bool = False,
    ) -> Tensor | None:
        """Run all steps in one operation, if there is one that is faster than a loop over `step`.

        Args:
            drive: The result of `prepare`, (batch, time, features).
            state: The state before the first step, (batch, state_size).
            reset: (batch, time) bool; where True, the step starts from the initial state.
            lengths: (batch,); states past the end are zero.
            lean: Save only the states for the backward pass, and recompute the rest.

        Returns:
            The states after each step, (batch, time, state_size); None if there is no such operation.
        """
        note_run("forward", self._explain_no_scan(), log=False)
        return None

    def _explain_no_scan(self) -> Backend:
        return Backend(REFERENCE, f"{type(self).__name__} has no fused operation for all steps.")

    @torch.no_grad()
    def choose_scan(self, device: torch.device | str) -> Backend:
        """Return the program by which `scan` runs all steps on a device, or the reference if it returns None.

        The default runs `scan` for one step on the device of the parameters. For another type of device it returns
        the reference.

        Args:
            device: The device, which need not be present.
        """
        name = type(self).__name__
        if getattr(self.scan, "__func__", None) is Cell.scan:
            return self._explain_no_scan()
        if self.input_size is None or self.dtype is None or self.device is None:
            reason = f"{name} does not say its input size, dtype or device, so its scan() cannot be tried."
            return Backend(REFERENCE, reason)
        if torch.device(device).type != self.device.type:
            return Backend(REFERENCE, f"{name} is on {self.device}, not on {device}.")
        position = torch.zeros(1, 1, dtype=torch.int64, device=device)
        drive = self.prepare(torch.zeros(1, 1, self.input_size, dtype=self.dtype, device=device), position)
        with record_runs():  # this trial is not part of the call that an outer context records
            states = self.scan(drive, self.initial_state(1, device=device))
        if states is None:
            return Backend(REFERENCE, f"scan() of {name} returned None.")
        return Backend("scan", f"{name} has a scan() of its own.")

    def eigenvalues(self) -> BlockDiagonal | None:
        """Return Λ̄ if the cell has a constant spectrum, None otherwise. Conv-DEER uses it as the transition."""
        return None

    def conjugate(self, state: Vector, drive: Tensor) -> Conjugate | None:
        """Return M at `state` if the step is M x + drive, None otherwise. Forward-DEER and Koopman-DEER use it.

        Args:
            state: (..., state_size).
            drive: (..., features).
        """
        return None

    def output(self, state: Tensor) -> Tensor:
        """Return the output of the cell for a state: the state itself, unless it holds more than the output.

        Args:
            state: (..., state_size).

        Returns:
            (..., output_size).
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

    def linear_transition(self, drive: Tensor) -> "Transition | None":
        """Return the transition of the linear part of the step, which does not depend on the state: for Conv-DEER.

        Args:
            drive: (batch, time, features).

        Returns:
            The transition; None if the cell has no linear part.
        """
        lambda_bar = self.eigenvalues()
        from ..solvers.transitions import DiagonalTransition

        return None if lambda_bar is None else DiagonalTransition(lambda_bar)

    def forward_transition(self, state: Vector, drive: Tensor) -> "Transition | None":
        """Return the (block) diagonal of M (eq:diag_M) as a transition: for Forward-DEER.

        Args:
            state: (batch, time, state_size).
            drive: (batch, time, features).

        Returns:
            The transition; None if the step is not M x + drive.
        """
        conjugate = self.conjugate(state, drive)
        from ..solvers.transitions import DiagonalTransition

        return None if conjugate is None else DiagonalTransition(conjugate.blocks())

    def jacobian(self, state: Vector, drive: Tensor) -> Matrix:
        """Return the derivative of `step` with respect to the state.

        Args:
            state: (..., state_size).
            drive: (..., features).

        Returns:
            (..., state_size, state_size).

        Raises:
            InputError: `torch.func` cannot differentiate the step; the message says what to change.
        """
        note_run("jacobian", _DIFFERENTIATED, log=False)
        step = self.stepper()
        flat_state, flat_drive = state.reshape(-1, state.shape[-1]), drive.reshape(-1, drive.shape[-1])
        try:
            flat: Tensor = torch.func.vmap(torch.func.jacfwd(step))(flat_state, flat_drive)
        except (RuntimeError, NotImplementedError) as error:
            raise _explain_vmap(error) from error
        return flat.reshape(*state.shape, state.shape[-1])

    def jacobian_chunks(self, states: Tensor, drive: Tensor) -> Callable[[int, int], Tensor]:
        """Return a function that computes Jacobians for a range of steps at a time, to limit memory.

        Args:
            states: The state before each step, (batch, time, n).
            drive: (batch, time, features).

        Returns:
            A function of `start` and `stop` that returns the Jacobians of steps start … stop - 1, (batch, ·, n, n).
        """
        return lambda start, stop: self.jacobian(states[:, start:stop], drive[:, start:stop])

    def jacobian_blocks(self, state: Vector, drive: Tensor) -> BlockDiagonal:
        """Return the diagonal of `jacobian`; for complex pairs the nearest a + ib of each 2-by-2 block.

        Args:
            state: (..., state_size).
            drive: (..., features).
        """
        lambda_bar = self.eigenvalues()
        return nearest_blocks(self.jacobian(state, drive), lambda_bar is not None and lambda_bar.imag is not None)

    def make_newton_pass(self, state: Tensor, drive: Tensor, *, diagonal: bool) -> Callable[..., Pass] | None:
        """Return a fused operation for one Newton iteration over a sequence, if there is one.

        Args:
            state: A state like those it will be called with, for shape, dtype and device.
            drive: A drive like those it will be called with.
            diagonal: Use the transition diag M; Λ̄ if False.

        Returns:
            The operation, see `ops.adpt_step`; None if there is none.
        """
        reason = f"{type(self).__name__} has no kernel for a Newton iteration."
        note_run("iteration", Backend(REFERENCE, reason), log=False)
        return None

    def radius(self, state: Vector, drive: Tensor, fresh: Vector, reset: Tensor | None) -> Tensor | None:
        """Return the radius of a ball that provably contains the state after each step.

        Args:
            state: The state before the first step, (batch, state_size).
            drive: (batch, time, features).
            fresh: The initial state that enters at a reset, (batch, state_size).
            reset: (batch, time) bool, or None.

        Returns:
            (batch, time); None if no bound is known.
        """
        return None

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


def _explain_vmap(error: Exception) -> Exception:
    """Return an `InputError` that says what `torch.func` does not support in a step; `error` itself if unrelated."""
    reason = next(iter(str(error).strip().splitlines()), "")
    if "data-dependent control flow" in str(error):
        return InputError(
            "the Jacobian of the step cannot be vectorised, because the step has data-dependent control flow: if, "
            "while, .item(), boolean indexing or one_hot without num_classes. Use torch.where(condition, a, b), or a "
            "solver without Jacobians: solvers.Jacobi()."
        )
    if "random operation" in str(error):
        return InputError(
            "the step is random: dropout in training mode, or noise drawn in the step. Call .eval() on it, or draw the "
            "noise beforehand and pass it as input."
        )
    if "vmap" in str(error) or "functorch" in str(error) or isinstance(error, NotImplementedError):
        return InputError(
            f"torch.func cannot compute the Jacobian of this step ({reason}). Use functions that torch.func supports, "
            "give the cell a method jacobian(state, drive), or use a solver without Jacobians: solvers.Jacobi()."
        )
    return error


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
