"""The recurrence of a batch as a system of equations s_t = f_t(s_{t-1}), evaluated in parallel or sequentially."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from .._validate import make_validity_mask
from ..errors import InputError
from ..ops import _gpu
from ..ops.tolerance import remembered_scale
from .time_axis import ONE_PROCESS, TimeAxis

__all__ = ["Loop", "System", "chunk_length"]

WORKING_SET = 2**15  # state elements that are evaluated at a time on a CPU: more would not fit in its caches
LARGE_WORKING_SET = 2**26  # the same on any other device


# A loop over steps [start, stop). Arguments: the state before `start`, the state that entered that step, start, stop.
# Returns the states (batch, stop - start, n) and the state that entered the last step.
Loop = Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True)
class System:
    """The equations s_t = f_t(s_{t-1}) of a batch of sequences.

    The state that "enters" step t is the argument of f_t: the previous state, or the reset state if t has a reset.

    Attributes:
        step: The function f of the entering states and the tensors of `step_inputs`.
        step_inputs: The inputs of f, each (batch, time, ...).
        initial: (batch, n), the state that enters the first step.
        reset_state: (batch, n), the state that enters a step with a reset.
        reset: (batch, time) bool.
        lengths: (batch,) true lengths of padded sequences.
        radius: (batch, time), the radius of a ball that contains each state.
        fused_scan: Computes all states in one operation; returns None where the operation does not apply.
        total_steps: The number of steps of the whole sequence if this system is one block of it.
        recent_scale: (batch, n), the recent scale of the states before the first step, for tolerances.
        axis: The time axis, of which these may be the steps of one process.
    """

    step: Callable[..., Tensor]
    step_inputs: tuple[Tensor, ...]
    initial: Tensor
    reset_state: Tensor
    reset: Tensor | None = None
    lengths: Tensor | None = None
    radius: Tensor | None = None
    fused_scan: Callable[..., Tensor | None] | None = None
    total_steps: int | None = None
    recent_scale: Tensor | None = None
    axis: TimeAxis = ONE_PROCESS

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.step_inputs[0].shape[1]

    @property
    def valid(self) -> Tensor | None:
        """Mask (batch, time) of the steps before the end of each sequence; None without lengths."""
        return None if self.lengths is None else make_validity_mask(self.lengths, self.steps)

    def entering_states(self, states: Tensor) -> Tensor:
        """Return the state that enters each step, (batch, time, n).

        Past the end of a sequence its last step is repeated.

        Args:
            states: (batch, time, n), the state after each step.
        """
        if not self.steps:
            return states
        before = torch.cat((self.initial.unsqueeze(1), states[:, :-1]), 1)
        if self.reset is not None:
            before = torch.where(self.reset.unsqueeze(-1), self.reset_state.unsqueeze(1), before)
        if self.lengths is not None:
            last = torch.arange(self.steps, device=states.device).minimum(self.lengths.unsqueeze(-1) - 1).clamp(min=0)
            before = before.gather(1, last.unsqueeze(-1).expand_as(before))
        return before

    def slice_steps(self, states: Tensor, start: int, stop: int) -> "System":
        """Return the system of steps `start` to `stop` of a known trajectory.

        Args:
            states: (batch, time, n), the states of this system.
            start: The first step; the state before it becomes the initial state.
            stop: The step after the last.
        """
        return self.part(None, start, states[:, start - 1] if start else self.initial, stop)

    def recent_scale_after(self, states: Tensor, steps: int) -> Tensor | None:
        """Return the recent scale of each channel after the first `steps` steps, (batch, n).

        Args:
            states: (batch, time, n), the states of this system.
            steps: How many of them to take.
        """
        if not steps:
            return self.recent_scale
        return remembered_scale(
            states[:, :steps], None if self.reset is None else self.reset[:, :steps], self.recent_scale
        )

    def evaluate(self, entering: Tensor) -> Tensor:
        """Evaluate f at the entering states of all steps, one chunk of time after another.

        Args:
            entering: (batch, time, n).

        Raises:
            InputError: If the step changes its argument in place, or returns another shape or dtype.
        """
        length = chunk_length(entering)
        pieces = zip(entering.split(length, 1), *(values.split(length, 1) for values in self.step_inputs), strict=True)
        if torch.is_grad_enabled() or not self.steps:
            version = _version(entering)
            values = [self.step(*piece) for piece in pieces]
            _check_step_result(entering[:, :length], values[0], version)
            return values[0] if len(values) == 1 else torch.cat(values, 1)
        every = torch.empty_like(entering)
        for piece, into in zip(pieces, every.split(length, 1), strict=True):
            version = _version(piece[0])
            values_of = self.step(*piece)
            _check_step_result(piece[0], values_of, version)
            into.copy_(values_of)
        return every

    def part(self, rows: Tensor | None, start: int, initial: Tensor, stop: int | None = None) -> "System":
        """Return the system of a part of the batch and of the time.

        Args:
            rows: Indices of the sequences; None for all.
            start: The first step.
            initial: (len(rows), n), the state that enters it.
            stop: The step after the last; None for the end.
        """

        def select(values: Tensor) -> Tensor:
            return values if rows is None else values.index_select(0, rows)

        def select_steps(values: Tensor | None) -> Tensor | None:
            return None if values is None else select(values[:, start:stop])

        return System(
            self.step,
            tuple(select(values[:, start:stop]) for values in self.step_inputs),
            initial,
            select(self.reset_state),
            select_steps(self.reset),
            None if self.lengths is None else select(self.lengths) - start,
            select_steps(self.radius),
            self.fused_scan,
            axis=self.axis,
        )

    def detach(self, step: Callable[..., Tensor] | None = None) -> "System":
        """Return a copy whose tensors carry no autograd graph.

        Args:
            step: Replaces `step`, if the constants that it holds carry a graph too.
        """
        return dataclasses.replace(
            self,
            step=self.step if step is None else step,
            step_inputs=tuple(values.detach() for values in self.step_inputs),
            initial=self.initial.detach(),
            reset_state=self.reset_state.detach(),
        )

    def make_loop(self) -> Loop:
        """Return a function that runs the steps sequentially."""
        step_inputs = [values.unbind(1) for values in self.step_inputs]
        resets = None if self.reset is None else self.reset.unsqueeze(-1).unbind(1)
        valid = self.valid
        valids = None if valid is None else valid.unsqueeze(-1).unbind(1)

        def loop(state: Tensor, entering: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
            states: list[Tensor] = []
            for t in range(start, stop):
                # Past the end of a sequence its last step is repeated, so that no new value, and no NaN, can arise.
                entering = state if valids is None else torch.where(valids[t], state, entering)
                if resets is not None:
                    entering = torch.where(resets[t], self.reset_state, entering)
                version = _version(entering) if t == start else None
                state = self.step(entering, *(values[t] for values in step_inputs))
                if t == start:
                    _check_step_result(entering, state, version)
                states.append(state)
            if not states:
                return self.step(state.unsqueeze(1)[:, :0], *(values[:, :0] for values in self.step_inputs)), entering
            return torch.stack(states, 1), entering

        return loop

    def run(self) -> Tensor:
        """Return all states (batch, time, n), computed sequentially."""
        if self.fused_scan is not None and not torch.is_grad_enabled():
            states = self.fused_scan(self.step_inputs[0], self.initial, reset=self.reset, lengths=self.lengths)
            if states is not None:
                return states
        return self.make_loop()(self.initial, self.initial, 0, self.steps)[0]


def _version(state: Tensor) -> int | None:
    """Return how often the tensor has been written to; None where torch does not count."""
    return None if torch.compiler.is_compiling() or state.is_inference() else state._version


def _check_step_result(before: Tensor, after: Tensor, version: int | None) -> None:
    """Raise `InputError` unless a step left its argument unchanged and returned a state of its shape and dtype."""
    if not isinstance(after, Tensor):
        raise InputError(
            f"the step of the cell returned {type(after).__name__}; it must return the next state, one tensor."
        )
    if version is not None and before._version != version:
        raise InputError(
            "the step of the cell wrote into the state that it was given. It must leave its argument unchanged and "
            "return a new tensor: state * 0.5 and not state.mul_(0.5)."
        )
    if after.shape != before.shape or after.dtype != before.dtype:
        given, returned = (f"({tuple(state.shape)}, {state.dtype})" for state in (before, after))
        raise InputError(
            f"the step of the cell was given a state of (shape, dtype) {given} and returned one of {returned}. "
            "It must keep both, for any leading dimensions."
        )


def chunk_length(states: Tensor) -> int:
    """Return how many steps of `states` (batch, time, n) to process at a time.

    Args:
        states: (batch, time, n).
    """
    elements = WORKING_SET if _gpu.is_cpu(states.device) else LARGE_WORKING_SET
    return max(16, elements // max(1, states.shape[0] * states.shape[2]))
