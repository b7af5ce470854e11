"""The door of every solver: inputs are checked and brought into one form, once."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..cells.base import ADPTState, Cell, positions
from ..errors import InputError
from ..spectra.base import compute_dtype

__all__ = ["Problem", "check_dtype", "check_lengths", "pose", "valid"]


class Problem(NamedTuple):
    """A sequence to solve, in one form: batched, in the cell's dtype, padding silenced."""

    drive: Tensor  # (batch, time, features)
    state: Tensor  # (batch, state_size), entering the first step
    fresh: Tensor  # (batch, state_size), entering a step with a reset
    reset: Tensor | None  # (batch, time)
    lengths: Tensor | None  # (batch,)
    batched: bool

    @property
    def steps(self) -> int:
        return self.drive.shape[-2]

    def masked(self, states: Tensor) -> Tensor:
        """The states, zero past the end of each sequence."""
        if self.lengths is None:
            return states
        return torch.where(valid(self.lengths, self.steps).unsqueeze(-1), states, 0.0)

    def final(self, states: Tensor) -> Tensor:
        """The state at the true end of each sequence."""
        if not self.steps:
            return self.state
        if self.lengths is None:
            return states[:, -1]
        last = (self.lengths - 1)[:, None, None].expand(-1, 1, states.shape[-1])
        return states.gather(1, last).squeeze(1)


def pose(
    cell: Cell, inputs: Tensor, state: Tensor | ADPTState | None, lengths: Tensor | None, reset: Tensor | None
) -> Problem:
    """Checks what a solver was given and brings it into one form."""
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
    if not batched:
        inputs = inputs.unsqueeze(0)
        reset = reset.unsqueeze(0) if reset is not None and reset.dim() == 1 else reset
        lengths = None if lengths is None else torch.as_tensor(lengths).reshape(-1)
    batch, steps = inputs.shape[:2]
    lengths = check_lengths(lengths, batch, steps, inputs.device)
    reset = _check_reset(reset, batch, steps)
    start = torch.zeros(batch, dtype=torch.int64, device=inputs.device)
    if isinstance(state, ADPTState):
        state, start = state
        start = start.reshape(-1)
    entering = _entering(cell, state, batch, dtype, inputs.device)
    if lengths is not None:  # what is in the padding must not matter, not even to gradients
        inputs = torch.where(valid(lengths, steps).unsqueeze(-1), inputs, 0.0)
    drive = cell.prepare(inputs.to(dtype), positions(start, steps, reset))
    fresh = cell.initial_state(batch, device=inputs.device, dtype=dtype)
    return Problem(drive, entering, fresh, reset, lengths, batched)


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
    state = state.unsqueeze(0) if state.dim() == 1 else state
    if state.shape != (batch, cell.state_size):
        raise InputError(
            f"the state has shape {tuple(state.shape)}; {batch} sequences and a state of {cell.state_size} need "
            f"{(batch, cell.state_size)}. Start one with initial_state({batch})."
        )
    return state


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
    if lengths.shape != (batch,):
        raise InputError(f"lengths have shape {tuple(lengths.shape)}; {batch} sequences need {(batch,)}.")
    wrong = (lengths < 1) | (lengths > steps)
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0, 0])
        raise InputError(
            f"lengths[{i}] = {int(lengths[i])}; a length is from 1 to the padded length {steps}. "
            + ("Drop empty sequences from the batch." if int(lengths[i]) < 1 else "Pad the inputs to the longest.")
        )
    return lengths.to(device=device, dtype=torch.int64)


def _check_reset(reset: Tensor | None, batch: int, steps: int) -> Tensor | None:
    if reset is None:
        return None
    if reset.dtype != torch.bool or reset.shape != (batch, steps):
        raise InputError(
            f"reset is {reset.dtype} of shape {tuple(reset.shape)}; it must be torch.bool of shape {(batch, steps)}, "
            "True where a sequence begins. Pass reset.bool()."
        )
    return reset
