"""Validation and normalization of the arguments of every solver."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._validate import check_dtype, check_lengths, check_not_nested, check_reset, make_validity_mask
from ..cells.base import ADPTState, Cell, count_positions
from ..cells.structure import make_step
from ..cells.wrap import as_cell, is_time_first
from ..errors import InputError
from .adjoints import Adjoint
from .base import Solution, Solver
from .fixed_point import History
from .system import System
from .time_axis import ONE_PROCESS

__all__ = ["Problem", "Trajectory", "make_problem", "resolve_system"]


class Trajectory(NamedTuple):
    """The fields of a `Solution` that say nothing of how the solve went."""

    states: Tensor  # (batch, time, state_size)
    final: Tensor  # (batch, state_size)
    position: Tensor  # (batch,)


class Problem(NamedTuple):
    """A normalized problem: batched, in the dtype of the cell, with the padding replaced by the last step."""

    drive: Tensor  # (batch, time, features)
    state: Tensor  # (batch, state_size), the state that enters the first step
    reset_state: Tensor  # (batch, state_size), the state that enters a step with a reset
    reset: Tensor | None  # (batch, time)
    lengths: Tensor | None  # (batch,)
    valid: Tensor | None  # (batch, time): whether a step is before the end of its sequence
    position: Tensor  # (batch,), the position of the step after the end of each sequence
    batched: bool  # whether the inputs had a batch dimension

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.drive.shape[-2]

    def zero_padding(self, states: Tensor) -> Tensor:
        """Return the states with zeros past the end of each sequence.

        Args:
            states: (batch, time, state_size).
        """
        return states if self.valid is None else torch.where(self.valid.unsqueeze(-1), states, 0.0)

    def repeat_last_state(self, states: Tensor) -> Tensor:
        """Return the states with the last state of each sequence repeated past its end.

        Args:
            states: (batch, time, state_size).
        """
        if self.lengths is None:
            return states
        last = torch.arange(self.steps, device=states.device).minimum(self.lengths.unsqueeze(-1) - 1)
        return states.gather(1, last.unsqueeze(-1).expand_as(states))

    def make_system(self, cell: Cell) -> System:
        """Return the equations of these steps of `cell`.

        Args:
            cell: The cell.
        """
        return System(
            make_step(cell),
            (self.drive,),
            self.state,
            self.reset_state,
            self.reset,
            self.lengths,
            fused_scan=cell.structure().scan,
            axis=ONE_PROCESS,  # explicit, because torch.compile cannot trace a default that is an object
        )

    def final_state(self, states: Tensor) -> Tensor:
        """Return a copy of the state at the true end of each sequence.

        Args:
            states: (batch, time, state_size).

        Returns:
            (batch, state_size).
        """
        if not self.steps:
            return self.state.clone()
        if self.lengths is None:
            return states[:, -1].clone()
        last = (self.lengths - 1)[:, None, None].expand(-1, 1, states.shape[-1])
        return states.gather(1, last).squeeze(1)

    def make_trajectory(self, states: Tensor) -> "Trajectory":
        """Return the states as a `Solution` has them, without a batch dimension if the inputs had none.

        Args:
            states: (batch, time, state_size).
        """
        found = self.zero_padding(states), self.final_state(states), self.position
        return Trajectory(*(found if self.batched else (values.squeeze(0) for values in found)))

    def make_solution(
        self,
        solver: Solver,
        cell: Cell,
        states: Tensor,
        *,
        results: Tensor,
        iterations: Tensor,
        residual: Tensor,
        converged_steps: Tensor,
        history: History | None = None,
    ) -> Solution:
        """Return the `Solution`, without a batch dimension if the inputs had none.

        Args:
            solver: The solver that was used.
            cell: The cell.
            states: (batch, time, state_size).
            results: (batch,) int64, one `Result` per sequence.
            iterations: (batch,) int64, the number of iterations.
            residual: (batch,), max |f(s_{t-1}) - s_t|.
            converged_steps: (batch,) int64, the number of leading steps that have converged.
            history: The residuals of each iteration; None for solvers that do not iterate.
        """
        return Solution(
            **self.make_trajectory(states)._asdict(),
            results=results,
            iterations=iterations,
            residual=residual,
            converged_steps=converged_steps,
            solver=solver,
            cell=cell,
            history=history,
        )


def make_problem(
    cell: Cell,
    inputs: Tensor,
    state: Tensor | ADPTState | None,
    lengths: Tensor | None,
    reset: Tensor | None,
    adjoint: Adjoint | None,
) -> Problem:
    """Validate the arguments of a solver and normalize them.

    Args:
        cell: The cell.
        inputs: (batch, time, features) or (time, features).
        state: The state that enters the first step; the cell's initial state if None.
        lengths: (batch,) true lengths.
        reset: (batch, time) bool.
        adjoint: The method of differentiation.

    Raises:
        InputError: If an argument has the wrong type, shape, dtype or device.
    """
    if adjoint is not None and not isinstance(adjoint, Adjoint):
        raise InputError(f"adjoint={adjoint!r}: must be an Adjoint object. Pass adjoint=adjoints.Implicit().")
    if not isinstance(inputs, Tensor):
        raise InputError(f"inputs are {type(inputs).__name__}; a solver needs a tensor (batch, time, features).")
    check_not_nested(inputs)
    if inputs.dim() not in (2, 3):
        raise InputError(
            f"inputs have shape {tuple(inputs.shape)}; a solver needs (batch, time, features) or (time, features)."
        )
    if cell.input_size is not None and inputs.shape[-1] != cell.input_size:
        raise InputError(
            f"inputs have {inputs.shape[-1]} features (shape {tuple(inputs.shape)}), but {type(cell).__name__} takes "
            f"{cell.input_size}. Build the cell with width={inputs.shape[-1]}, or project the inputs first."
        )
    dtype = check_dtype(inputs, cell.dtype)
    batched = inputs.dim() == 3
    reset = None if reset is None else torch.as_tensor(reset)
    if not batched:
        inputs = inputs.unsqueeze(0)
        reset = reset.unsqueeze(0) if reset is not None and reset.dim() == 1 else reset
        lengths = None if lengths is None else torch.as_tensor(lengths).reshape(-1)
    batch, steps = inputs.shape[:2]
    lengths = check_lengths(lengths, batch, steps, inputs.device)
    reset = check_reset(reset, batch, steps)
    start = torch.zeros(1, dtype=torch.int64, device=inputs.device)  # for all sequences
    given = state.state if isinstance(state, ADPTState) else state
    entering = _check_state(cell, given, batch, dtype, inputs.device)
    if isinstance(state, ADPTState):
        start = _check_position(state.position, batch, inputs.device)
    valid = None
    if lengths is not None:  # repeat the last step in the padding, whose values must not affect states or gradients
        valid = make_validity_mask(lengths, steps)
        last = torch.minimum(torch.arange(steps, device=inputs.device), lengths.unsqueeze(-1) - 1)
        inputs = inputs.gather(1, last.unsqueeze(-1).expand_as(inputs))
        reset = None if reset is None else reset.gather(1, last)
        cell = cell.reindex_arguments(last)
    positions = count_positions(start, steps, reset).expand(batch, steps)
    drive = cell.prepare(inputs.to(dtype), positions)
    reset_state = cell.initial_state(batch, device=inputs.device, dtype=dtype)
    after = _position_after(start.expand(batch), positions, lengths)
    return Problem(drive, entering, reset_state, reset, lengths, valid, after, batched)


def _position_after(start: Tensor, positions: Tensor, lengths: Tensor | None) -> Tensor:
    """Return the position of the step after the end of each sequence, (batch,)."""
    if not positions.shape[1]:
        return start.clone()
    return 1 + (positions[:, -1] if lengths is None else positions.gather(1, lengths.unsqueeze(-1) - 1).squeeze(-1))


def resolve_system(
    system: object, inputs: Tensor, state: Any, reset: Tensor | None
) -> tuple[Cell, Tensor, Tensor | ADPTState | None, Tensor | None]:
    """Return the cell of a layer or of a module of `torch.nn`, inputs and resets batch first, and a flat state.

    Args:
        system: A cell; or a layer or module, which may take (time, batch, features).
        inputs: (batch, time, features), or as `system` takes them.
        state: The state that enters the first step, flat or in the structure of the module or function in the cell.
        reset: (batch, time) bool, laid out as the inputs.

    Raises:
        InputError: `system` has no cell, or the state has another structure.
    """
    cell = as_cell(system)
    if state is not None and not isinstance(state, ADPTState):
        state = cell.ravel(state)
    if is_time_first(system) and isinstance(inputs, Tensor) and inputs.dim() == 3:
        return cell, inputs.transpose(0, 1), state, None if reset is None else torch.as_tensor(reset).transpose(0, 1)
    return cell, inputs, state, reset


def _check_state(cell: Cell, state: Tensor | None, batch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the state that enters the first step, (batch, state_size); the cell's initial state if None."""
    if state is None:
        return cell.initial_state(batch, device=device, dtype=dtype)
    if state.dtype != dtype:
        raise InputError(
            f"the state is {state.dtype} but the cell computes in {dtype}. Pass state.to({dtype}); the state is at "
            "least float32, whatever the dtype of the inputs."
        )
    if state.device != device:
        raise InputError(f"the state is on {state.device}, the inputs are on {device}. Pass state.to({str(device)!r}).")
    state = state.unsqueeze(0) if state.dim() == 1 else state
    if state.shape != (batch, cell.state_size):
        raise InputError(
            f"the state has shape {tuple(state.shape)}; {batch} sequences with state size {cell.state_size} need "
            f"{(batch, cell.state_size)}. Make one with initial_state({batch})."
        )
    return state


def _check_position(position: Tensor, batch: int, device: torch.device) -> Tensor:
    """Return the position of the first step, (batch,), on `device`."""
    if position.dtype != torch.int64 or position.numel() != batch:
        raise InputError(
            f"the state's position is {position.dtype} of shape {tuple(position.shape)}; {batch} sequences need int64 "
            f"of shape {(batch,)}. Pass the ADPTState that an earlier call returned."
        )
    return position.reshape(-1).to(device)
