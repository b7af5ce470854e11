"""What a cell owes a solver: one required method, and what it may add to be solved faster."""

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._typing import Device, DType, Matrix, Position, Positions, Vector
from ..errors import IncompatibleError, InputError
from ..ops.adpt_step import Pass
from ..recurrence.conjugates import Conjugate, nearest_blocks
from ..recurrence.spectra import BlockDiagonal
from ..recurrence.spectra.base import compute_dtype
from ..spec import ModuleSpec

if TYPE_CHECKING:  # solvers import cells; only `solvers.transitions` is used the other way
    from ..solvers.transitions import Transition

__all__ = ["ADPTState", "Cell", "CellSpec", "positions", "register_state", "select_rows"]


_State = TypeVar("_State", bound=type[tuple[Any, ...]])


def register_state(kind: _State) -> _State:
    """Register a named tuple as a state: `torch.load` reads it back, `torch.export.save` writes it.

    Both accept only the classes they were told of.
    """
    torch.serialization.add_safe_globals([kind])
    pytree._register_namedtuple(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")
    return kind


def select_rows(tensor: Tensor, rows: Any) -> Tensor:
    """Return the rows of a batched tensor, (batch, ...), at the indices or the boolean mask `rows`."""
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
    """What a layer carries from one call to the next. Nothing is stored in the module."""

    state: Tensor  # (batch, state_size), at least float32
    position: Tensor  # (batch,) int64, steps since the sequence began

    def detach(self) -> "ADPTState":
        """The same numbers, cut from the graph: for truncated back-propagation."""
        return ADPTState(self.state.detach(), self.position)

    def to(self, *target: Any, **options: Any) -> "ADPTState":
        """The same on another device, or with the state in another dtype; the arguments of `torch.Tensor.to`."""
        state = self.state.to(*target, **options)
        return ADPTState(state, self.position.to(state.device, non_blocking=options.get("non_blocking", False)))

    def select(self, rows: Any) -> "ADPTState":
        """The states of some sequences of the batch, in this order: for beam search, or as sequences end.

        Args:
            rows: Indices, which may repeat, a mask, or a slice.
        """
        if self.state.dim() < 2:
            raise InputError("this state is of one sequence and has no rows. Pass (batch, time, width) to the layer.")
        return ADPTState(select_rows(self.state, rows), select_rows(self.position, rows))


class Cell(nn.Module, abc.ABC):
    """One step of a recurrence. The state is one flat tensor (..., state_size), batched over leading dimensions."""

    input_size: int | None  # features of the input; None if any
    state_size: int
    output_size: int | None = None  # numbers of the state that are shown; None if all

    @abc.abstractmethod
    def step(self, state: Vector, drive: Tensor) -> Vector:
        """The next state. The only method a cell must have."""

    def prepare(self, inputs: Tensor, position: Positions) -> Tensor:
        """All that does not depend on the state, for every step at once: one flat tensor (..., time, features)."""
        return inputs

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        """`step`, with all that stays the same along a sequence evaluated once."""
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
        """All states at once, (batch, time, state_size), where there is a faster way than step by step; else None.

        Args:
            drive: What `prepare` made, (batch, time, features).
            state: Entering the first step.
            reset: (batch, time); where True the initial state enters.
            lengths: (batch,); states past the end are zero.
            lean: Keep no more than the states for the derivative.
        """
        return None

    @torch.no_grad()
    def scans(self, device: torch.device | str) -> bool:
        """Whether `scan` has a faster way on a device, which need not be here.

        Where a cell does not know, it is found out by a step on the device of its parameters; of another kind of device
        nothing is known, and the answer is no.
        """
        inherited = getattr(self.scan, "__func__", None) is Cell.scan
        if inherited or self.input_size is None or self.dtype is None or self.device is None:
            return False
        if torch.device(device).type != self.device.type:
            return False
        position = torch.zeros(1, 1, dtype=torch.int64, device=device)
        drive = self.prepare(torch.zeros(1, 1, self.input_size, dtype=self.dtype, device=device), position)
        return self.scan(drive, self.initial_state(1, device=device)) is not None

    def eigenvalues(self) -> BlockDiagonal | None:
        """Λ̄ if the cell has a constant spectrum: the transition of Conv-DEER."""
        return None

    def conjugate(self, state: Vector, drive: Tensor) -> Conjugate | None:
        """M at `state` if the step is M x + drive: Forward-DEER, Koopman-DEER, figures."""
        return None

    def output(self, state: Tensor) -> Tensor:
        """The part of the state that is shown to the next layer: all of it, unless it holds more than one thing."""
        return state

    def given(self, *, dt: Tensor | None = None, beta: Tensor | None = None) -> "Cell":
        """This cell with what one call gives it: steps of lengths `dt`, a `beta` for each sequence."""
        if dt is None and beta is None:
            return self
        what = "dt" if dt is not None else "beta"
        raise IncompatibleError(
            f"{type(self).__name__} takes no {what}=; an ADPTNet without memory= and Stateful() does. Drop {what}=."
        )

    def gathered(self, index: Tensor) -> "Cell":
        """This cell with what a call gave it for each step taken at `index` (batch, time) instead."""
        return self

    def linear_transition(self, drive: Tensor) -> "Transition | None":
        """The transition of the step without its non-linearity, which no state has to be known for: Conv-DEER."""
        lambda_bar = self.eigenvalues()
        from ..solvers.transitions import Diagonal

        return None if lambda_bar is None else Diagonal(lambda_bar)

    def forward_transition(self, state: Vector, drive: Tensor) -> "Transition | None":
        """The diagonal of M (eq:diag_M), in pairs where eigenvalues are: Forward-DEER."""
        conjugate = self.conjugate(state, drive)
        from ..solvers.transitions import Diagonal

        return None if conjugate is None else Diagonal(conjugate.blocks())

    def jacobian(self, state: Vector, drive: Tensor) -> Matrix:
        """The derivative of `step` with respect to the state."""
        step = self.stepper()
        flat_state, flat_drive = state.reshape(-1, state.shape[-1]), drive.reshape(-1, drive.shape[-1])
        try:
            flat: Tensor = torch.func.vmap(torch.func.jacfwd(step))(flat_state, flat_drive)
        except (RuntimeError, NotImplementedError) as error:
            raise _explain_vmap(error) from error
        return flat.reshape(*state.shape, state.shape[-1])

    def jacobians(self, states: Tensor, drive: Tensor) -> Callable[[int, int], Tensor]:
        """`jacobian` at (batch, time, n), to be called for the steps from one to before another."""
        return lambda start, stop: self.jacobian(states[:, start:stop], drive[:, start:stop])

    def jacobian_blocks(self, state: Vector, drive: Tensor) -> BlockDiagonal:
        """The diagonal of `jacobian`, in pairs where eigenvalues are."""
        lambda_bar = self.eigenvalues()
        return nearest_blocks(self.jacobian(state, drive), lambda_bar is not None and lambda_bar.imag is not None)

    def jacobian_diagonal(self, state: Vector, drive: Tensor) -> Vector:
        """The diagonal of `jacobian`, not its row sums."""
        return self.jacobian(state, drive).diagonal(dim1=-2, dim2=-1)

    def newton_pass(self, state: Tensor, drive: Tensor, *, diagonal: bool) -> Callable[..., Pass] | None:
        """A pass of Newton's method with A = Λ̄, or `diagonal` diag M, as one operation; None where there is none.

        `state` and `drive` are such as it would be called with, see `ops.adpt_step`.
        """
        return None

    def radius(self, state: Vector, drive: Tensor, fresh: Vector, reset: Tensor | None) -> Tensor | None:
        """A ball that provably holds each state of a sequence from `state`, (batch, time); None if none is known."""
        return None

    def initial_state(self, batch: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        """The state a sequence starts from, (batch, state_size): zeros."""
        return torch.zeros(batch, self.state_size, dtype=dtype or self.dtype, device=device or self.device)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the state: that of the parameters, but never below float32; None without parameters."""
        parameter = next((p for p in self.parameters() if p.is_floating_point()), None)
        return None if parameter is None else compute_dtype(parameter.dtype)

    @property
    def device(self) -> torch.device | None:
        parameter = next(self.parameters(), None)
        return None if parameter is None else parameter.device


def _explain_vmap(error: Exception) -> Exception:
    """Return an `InputError` for what a step does that `torch.func` cannot follow; `error` itself if it is another."""
    reason = next(iter(str(error).strip().splitlines()), "")
    if "data-dependent control flow" in str(error):
        return InputError(
            "the Jacobian of the step cannot be found for all rows at once, because the step reads a value: by if, "
            "while, .item(), boolean indexing or one_hot without num_classes. Use torch.where(condition, a, b), or a "
            "solver without Jacobians: solvers.Jacobi()."
        )
    if "random operation" in str(error):
        return InputError(
            "the step is random: dropout in training mode, or noise of its own. Call .eval() on it, or draw the noise "
            "beforehand and pass it as input."
        )
    if "vmap" in str(error) or "functorch" in str(error) or isinstance(error, NotImplementedError):
        return InputError(
            f"torch.func cannot find the Jacobian of this step ({reason}). Write the step in functions that torch.func "
            "knows, give the cell a method jacobian(state, drive), or use a solver without Jacobians: solvers.Jacobi()."
        )
    return error


def positions(start: Position, steps: int, reset: Tensor | None) -> Tensor:
    """How many steps each step is from the beginning of its sequence, (batch, time); a reset begins one.

    `start` is (batch,), or (1,) where it is the same for all; then the result is (1, time) if nothing is reset.
    """
    position = start.unsqueeze(-1) + torch.arange(steps, device=start.device)
    if reset is None:
        return position
    index = torch.arange(steps, device=start.device).expand(reset.shape)
    last_reset = torch.where(reset, index, -1).cummax(-1).values
    return torch.where(last_reset >= 0, index - last_reset, position)


class CellSpec(ModuleSpec):
    """The description of a cell."""

    width: int
