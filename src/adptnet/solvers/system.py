"""The equations of a batch of sequences: s_t = f_t(s_{t-1}), evaluated all at once or step by step."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.tolerance import remembered_scale

__all__ = ["Loop", "System", "stretch"]

WORKING_SET = 2**15  # numbers of state that are evaluated at a time on a CPU: more would leave its caches
LARGE_WORKING_SET = 2**26  # on any other device


# From the last state, the state that entered it, and steps [start, stop), to the states of these steps,
# (batch, stop - start, n), and the state that entered the last.
Loop = Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True)
class System:
    """The equations s_t = f_t(s_{t-1}) of a batch of sequences, whose right sides are evaluated all at once."""

    step: Callable[..., Tensor]  # f, of the states that enter and of `givens`
    givens: tuple[Tensor, ...]  # each (batch, time, ...)
    initial: Tensor  # (batch, n), what enters the first step
    fresh: Tensor  # (batch, n), what enters a step with a reset
    reset: Tensor | None = None  # (batch, time)
    lengths: Tensor | None = None  # (batch,)
    radius: Tensor | None = None  # (batch, time), a ball that holds each state
    fused: Callable[..., Tensor | None] | None = None  # all states in one operation, where there is one
    whole: int | None = None  # steps of the whole sequence, of which these are a block
    recent: Tensor | None = None  # (batch, n), the recent scale of the states before the first step, for tolerances

    @property
    def steps(self) -> int:
        return self.givens[0].shape[1]

    @property
    def valid(self) -> Tensor | None:
        """(batch, time): whether a step is before the end of its sequence."""
        if self.lengths is None:
            return None
        return torch.arange(self.steps, device=self.lengths.device) < self.lengths.unsqueeze(-1)

    def entering(self, states: Tensor) -> Tensor:
        """The state that enters each step; past the end of a sequence its last step is done again."""
        if not self.steps:
            return states
        before = torch.cat((self.initial.unsqueeze(1), states[:, :-1]), 1)
        if self.reset is not None:
            before = torch.where(self.reset.unsqueeze(-1), self.fresh.unsqueeze(1), before)
        if self.lengths is not None:
            last = torch.arange(self.steps, device=states.device).minimum(self.lengths.unsqueeze(-1) - 1).clamp(min=0)
            before = before.gather(1, last.unsqueeze(-1).expand_as(before))
        return before

    def between(self, states: Tensor, start: int, stop: int) -> "System":
        """Of steps `start` to `stop`, whose first is entered by the state before it."""
        return self.part(None, start, states[:, start - 1] if start else self.initial, stop)

    def recent_after(self, states: Tensor, steps: int) -> Tensor | None:
        """Return the recent scale of each channel after the first `steps` steps, (batch, n)."""
        if not steps:
            return self.recent
        return remembered_scale(states[:, :steps], None if self.reset is None else self.reset[:, :steps], self.recent)

    def evaluate(self, entering: Tensor) -> Tensor:
        """f of the states that enter, a part of the time at a time."""
        length = stretch(entering)
        pieces = zip(entering.split(length, 1), *(given.split(length, 1) for given in self.givens), strict=True)
        if torch.is_grad_enabled() or not self.steps:
            version = _version(entering)
            values = [self.step(*piece) for piece in pieces]
            _check_kept(entering[:, :length], values[0], version)
            return values[0] if len(values) == 1 else torch.cat(values, 1)
        every = torch.empty_like(entering)
        for piece, into in zip(pieces, every.split(length, 1), strict=True):
            version = _version(piece[0])
            values_of = self.step(*piece)
            _check_kept(piece[0], values_of, version)
            into.copy_(values_of)
        return every

    def part(self, rows: Tensor | None, start: int, initial: Tensor, stop: int | None = None) -> "System":
        """Of the sequences `rows` (all if None), steps `start` to `stop`, the first of which `initial` enters."""

        def picked(values: Tensor) -> Tensor:
            return values if rows is None else values.index_select(0, rows)

        def later(values: Tensor | None) -> Tensor | None:
            return None if values is None else picked(values[:, start:stop])

        return System(
            self.step,
            tuple(picked(given[:, start:stop]) for given in self.givens),
            initial,
            picked(self.fresh),
            later(self.reset),
            None if self.lengths is None else picked(self.lengths) - start,
            later(self.radius),
            self.fused,
        )

    def loop(self) -> Loop:
        """The steps one after another."""
        givens = [given.unbind(1) for given in self.givens]
        resets = None if self.reset is None else self.reset.unsqueeze(-1).unbind(1)
        valid = None if self.lengths is None else self.valid
        valids = None if valid is None else valid.unsqueeze(-1).unbind(1)

        def loop(state: Tensor, entering: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
            states: list[Tensor] = []
            for t in range(start, stop):
                # Past the end of a sequence its last step is done again: nothing new, and no NaN, can arise there.
                entering = state if valids is None else torch.where(valids[t], state, entering)
                if resets is not None:
                    entering = torch.where(resets[t], self.fresh, entering)
                version = _version(entering) if t == start else None
                state = self.step(entering, *(given[t] for given in givens))
                if t == start:
                    _check_kept(entering, state, version)
                states.append(state)
            none = state.unsqueeze(1)[:, :0]
            return torch.stack(states, 1) if states else self.step(none, *(g[:, :0] for g in self.givens)), entering

        return loop

    def run(self) -> Tensor:
        """All states, step by step: (batch, time, n)."""
        if self.fused is not None and not torch.is_grad_enabled():
            states = self.fused(self.givens[0], self.initial, reset=self.reset, lengths=self.lengths)
            if states is not None:
                return states
        return self.loop()(self.initial, self.initial, 0, self.steps)[0]


def _version(state: Tensor) -> int | None:
    """How often the tensor has been written to; None where that is not counted."""
    return None if torch.compiler.is_compiling() or state.is_inference() else state._version


def _check_kept(before: Tensor, after: Tensor, version: int | None) -> None:
    if not isinstance(after, Tensor):
        raise InputError(
            f"the step of the cell returned {type(after).__name__}; it must return the next state, one tensor."
        )
    if version is not None and before._version != version:
        raise InputError(
            "the step of the cell wrote into the state that it was given. It must leave it and return a new tensor: "
            "state * 0.5 and not state.mul_(0.5)."
        )
    if after.shape != before.shape or after.dtype != before.dtype:
        given, made = (f"{tuple(state.shape)}, {state.dtype}" for state in (before, after))
        raise InputError(
            f"the step of the cell made a state of shape {made} of one of shape {given}. "
            "It must keep both, for any leading dimensions."
        )


def stretch(states: Tensor) -> int:
    """How many steps of such states (batch, time, n) to work on at a time."""
    numbers = WORKING_SET if states.device.type == "cpu" else LARGE_WORKING_SET
    return max(16, numbers // max(1, states.shape[0] * states.shape[2]))
