"""The door of every solver: inputs are checked and brought into one form, once."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..cells.base import ADPTState, Cell, positions
from ..errors import InputError
from ..ops._torch_state import has_values
from ..recurrence.spectra.base import compute_dtype
from .adjoints import Adjoint
from .base import Solution, Solver
from .fixed_point import History
from .system import System

__all__ = ["Problem", "check_cell", "check_dtype", "check_lengths", "check_not_nested", "pose", "valid"]


class Problem(NamedTuple):
    """A sequence to solve, in one form: batched, in the cell's dtype, padding silenced."""

    drive: Tensor  # (batch, time, features)
    state: Tensor  # (batch, state_size), entering the first step
    fresh: Tensor  # (batch, state_size), entering a step with a reset
    reset: Tensor | None  # (batch, time)
    lengths: Tensor | None  # (batch,)
    valid: Tensor | None  # (batch, time): whether a step is before the end
    position: Tensor  # (batch,), of the step after the end of each sequence
    batched: bool

    @property
    def steps(self) -> int:
        return self.drive.shape[-2]

    def masked(self, states: Tensor) -> Tensor:
        """The states, zero past the end of each sequence."""
        return states if self.valid is None else torch.where(self.valid.unsqueeze(-1), states, 0.0)

    def held(self, states: Tensor) -> Tensor:
        """The states, past the end of each sequence its last one."""
        if self.lengths is None:
            return states
        last = torch.arange(self.steps, device=states.device).minimum(self.lengths.unsqueeze(-1) - 1)
        return states.gather(1, last.unsqueeze(-1).expand_as(states))

    def system(self, cell: Cell) -> System:
        """The equations of these steps of `cell`."""
        return System(cell.stepper(), (self.drive,), self.state, self.fresh, self.reset, self.lengths, fused=cell.scan)

    def final(self, states: Tensor) -> Tensor:
        """The state at the true end of each sequence, in memory of its own."""
        if not self.steps:
            return self.state.clone()
        if self.lengths is None:
            return states[:, -1].clone()
        last = (self.lengths - 1)[:, None, None].expand(-1, 1, states.shape[-1])
        return states.gather(1, last).squeeze(1)

    def solution(
        self,
        solver: Solver,
        states: Tensor,
        *,
        results: Tensor,
        iterations: Tensor,
        residual: Tensor,
        converged_steps: Tensor,
        history: History | None = None,
    ) -> Solution:
        """The answer to a caller, in the form of the question."""
        final, states = self.final(states), self.masked(states)
        return Solution(
            states=states if self.batched else states.squeeze(0),
            final=final if self.batched else final.squeeze(0),
            position=self.position if self.batched else self.position.squeeze(0),
            results=results,
            iterations=iterations,
            residual=residual,
            converged_steps=converged_steps,
            solver=solver,
            history=history,
        )


def pose(
    cell: Cell,
    inputs: Tensor,
    state: Tensor | ADPTState | None,
    lengths: Tensor | None,
    reset: Tensor | None,
    adjoint: Adjoint | None,
) -> Problem:
    """Checks what a solver was given and brings it into one form."""
    check_cell(cell)
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
    dtype = check_dtype(inputs, cell)
    batched = inputs.dim() == 3
    reset = None if reset is None else torch.as_tensor(reset)
    if not batched:
        inputs = inputs.unsqueeze(0)
        reset = reset.unsqueeze(0) if reset is not None and reset.dim() == 1 else reset
        lengths = None if lengths is None else torch.as_tensor(lengths).reshape(-1)
    batch, steps = inputs.shape[:2]
    lengths = check_lengths(lengths, batch, steps, inputs.device)
    reset = _check_reset(reset, batch, steps)
    start = torch.zeros(1, dtype=torch.int64, device=inputs.device)  # of all
    given = state.state if isinstance(state, ADPTState) else state
    entering = _entering(cell, given, batch, dtype, inputs.device)
    if isinstance(state, ADPTState):
        start = _check_position(state.position, batch, inputs.device)
    before_end = None
    if lengths is not None:  # what is in the padding must not matter, not even to gradients: the last step stands in
        before_end = valid(lengths, steps)
        last = torch.minimum(torch.arange(steps, device=inputs.device), lengths.unsqueeze(-1) - 1)
        inputs = inputs.gather(1, last.unsqueeze(-1).expand_as(inputs))
        reset = None if reset is None else reset.gather(1, last)
        cell = cell.gathered(last)
    every = positions(start, steps, reset).expand(batch, steps)
    drive = cell.prepare(inputs.to(dtype), every)
    fresh = cell.initial_state(batch, device=inputs.device, dtype=dtype)
    after = _position_after(start.expand(batch), every, lengths)
    return Problem(drive, entering, fresh, reset, lengths, before_end, after, batched)


def _position_after(start: Tensor, every: Tensor, lengths: Tensor | None) -> Tensor:
    if not every.shape[1]:
        return start.clone()
    return 1 + (every[:, -1] if lengths is None else every.gather(1, lengths.unsqueeze(-1) - 1).squeeze(-1))


def check_not_nested(inputs: object) -> None:
    """Raise `InputError` on a nested tensor, with the padded form to pass instead."""
    if isinstance(inputs, Tensor) and inputs.is_nested:
        raise InputError(
            "x is a nested tensor; sequences of different lengths are passed padded, with their lengths: "
            "torch.nested.to_padded_tensor(x, 0.0), lengths=torch.tensor([len(row) for row in x.unbind()])."
        )


def check_cell(cell: Cell) -> None:
    """Says how to make a cell of what is none."""
    if not isinstance(cell, Cell):
        raise InputError(
            f"a solver runs a cell; this is {type(cell).__name__}. Pass layer.cell of a layer, cells.from_torch(cell) "
            "for a torch.nn cell, or cells.from_function(step, state_size) for a function."
        )


def check_dtype(inputs: Tensor, cell: Cell) -> torch.dtype:
    """The dtype of the state for these inputs, or an error if they do not fit the cell."""
    if not inputs.is_floating_point():
        raise InputError(f"inputs are {inputs.dtype}; a recurrence needs floating point. Pass inputs.float().")
    dtype = cell.dtype or compute_dtype(inputs.dtype)
    if torch.promote_types(inputs.dtype, dtype) != dtype:
        raise InputError(
            f"inputs are {inputs.dtype} but the cell computes in {dtype}: digits would be lost. "
            f"Call .to({inputs.dtype}) on the layer, or pass inputs.to({dtype})."
        )
    return dtype


def _entering(cell: Cell, state: Tensor | None, batch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if state is None:
        return cell.initial_state(batch, device=device, dtype=dtype)
    if state.dtype != dtype:
        raise InputError(
            f"the state is {state.dtype} but the cell computes in {dtype}. Pass state.to({dtype}); a state is kept in "
            "at least float32, whatever the inputs are."
        )
    if state.device != device:
        raise InputError(f"the state is on {state.device}, the inputs are on {device}. Pass state.to({str(device)!r}).")
    state = state.unsqueeze(0) if state.dim() == 1 else state
    if state.shape != (batch, cell.state_size):
        raise InputError(
            f"the state has shape {tuple(state.shape)}; {batch} sequences and a state of {cell.state_size} need "
            f"{(batch, cell.state_size)}. Start one with initial_state({batch})."
        )
    return state


def _check_position(position: Tensor, batch: int, device: torch.device) -> Tensor:
    if position.dtype != torch.int64 or position.numel() != batch:
        raise InputError(
            f"the state's position is {position.dtype} of shape {tuple(position.shape)}; {batch} sequences need int64 "
            f"of shape {(batch,)}. Pass the ADPTState an earlier call returned."
        )
    return position.reshape(-1).to(device)


def valid(lengths: Tensor, steps: int) -> Tensor:
    """(batch, time): whether a step is before the end of its sequence."""
    return torch.arange(steps, device=lengths.device) < lengths.unsqueeze(-1)


def check_lengths(lengths: Tensor | None, batch: int, steps: int, device: torch.device) -> Tensor | None:
    """Lengths as int64 on `device`, or an error that names the first wrong one."""
    if lengths is None:
        return None
    lengths = torch.as_tensor(lengths)
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise InputError(f"lengths are {lengths.dtype}; they count steps. Pass lengths.long().")
    lengths = lengths.to(device=device, dtype=torch.int64)
    if lengths.shape != (batch,):
        raise InputError(f"lengths have shape {tuple(lengths.shape)}; {batch} sequences need {(batch,)}.")
    wrong = (lengths < 1) | (lengths > steps)
    if has_values(wrong) and bool(wrong.any()):
        i = int(wrong.nonzero()[0, 0])
        raise InputError(
            f"lengths[{i}] = {int(lengths[i])}; a length is from 1 to the padded length {steps}. "
            + ("Drop empty sequences from the batch." if int(lengths[i]) < 1 else "Pad the inputs to the longest.")
        )
    return lengths


def _check_reset(reset: Tensor | None, batch: int, steps: int) -> Tensor | None:
    if reset is None:
        return None
    if reset.dtype != torch.bool or reset.shape != (batch, steps):
        raise InputError(
            f"reset is {reset.dtype} of shape {tuple(reset.shape)}; it must be torch.bool of shape {(batch, steps)}, "
            "True where a sequence begins. Pass reset.bool()."
        )
    return reset
