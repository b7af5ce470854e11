"""Adjoints: how a solved sequence is differentiated. They change memory and time, never the gradient."""

import abc
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .errors import InputError

__all__ = ["Adjoint", "Checkpointed", "Unrolled"]

# From the last state, the state that entered it, and steps [start, stop), to the states of these steps,
# (batch, stop - start, n), and the state that entered the last.
Loop = Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]


class Adjoint(abc.ABC):
    """How a loop over time is run so that it can be differentiated."""

    @abc.abstractmethod
    def run(self, loop: Loop, state: Tensor, steps: int) -> Tensor:
        """All states of `loop` from `state` over `steps` steps."""


class Unrolled(Adjoint):
    """Back-propagation through every step. Keeps what each step needs: memory grows with the length."""

    def run(self, loop: Loop, state: Tensor, steps: int) -> Tensor:
        return loop(state, state, 0, steps)[0]

    def __repr__(self) -> str:
        return "Unrolled()"


class Checkpointed(Adjoint):
    """Keeps only the states, and runs each segment again when its gradient is needed.

    Args:
        segment_length: Steps that are held in memory at a time; the square root of the length if not given.
    """

    def __init__(self, segment_length: int | None = None):
        if segment_length is not None and (not isinstance(segment_length, int) or segment_length < 1):
            raise InputError(f"Checkpointed(segment_length={segment_length}): must be a whole number from 1.")
        self.segment_length = segment_length

    def run(self, loop: Loop, state: Tensor, steps: int) -> Tensor:
        length = self.segment_length or max(1, math.isqrt(steps))
        segments: list[Tensor] = []
        entering = state
        for start in range(0, steps, length):
            stop = min(start + length, steps)
            states, entering = checkpoint(loop, state, entering, start, stop, use_reentrant=False)
            segments.append(states)
            state = states[..., -1, :]
        return torch.cat(segments, -2) if segments else loop(state, entering, 0, 0)[0]

    def __repr__(self) -> str:
        return f"Checkpointed(segment_length={self.segment_length})"
