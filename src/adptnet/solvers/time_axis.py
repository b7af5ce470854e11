"""The time axis of a solve. Here all steps are in this process; `ranks.RankedTimeAxis` splits them over processes."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .system import System
    from .transitions import Transition

__all__ = ["ONE_PROCESS", "LaterSteps", "TimeAxis", "mark_before_reset"]


class LaterSteps(NamedTuple):
    """Values of the steps of later processes that an iteration for a gradient needs."""

    gradient: Tensor  # (batch, 1, n), the gradient that the next process passes back
    scale: Tensor  # (batch, n), the recent scale of g, with time running backwards
    weighted: Tensor | None  # (batch, n), the largest weighted |g|; None without weights


class TimeAxis:
    """The time axis of a solve in one process.

    Solvers and adjoints use the axis for everything that depends on steps of other processes, so that one loop serves
    both cases. "Chunk" means the consecutive steps of this process: here, all of them.

    Attributes:
        rank: The index of this process, in the order of time.
        is_split: Whether there are several processes.
    """

    rank: int = 0
    is_split: bool = False

    def lengths(self, steps: int) -> list[int]:
        """Return the number of steps of each process.

        Args:
            steps: The number of steps of this process.
        """
        return [steps]

    def total(self, steps: int) -> int:
        """Return the number of steps of all processes.

        Args:
            steps: The number of steps of this process.
        """
        return sum(self.lengths(steps))

    def scan(self, transition: "Transition", offset: Tensor, initial: Tensor, reset: Tensor | None) -> Tensor:
        """Run the recurrence x_t = A_t x_{t-1} + offset_t over all processes. Return the states of this one.

        Args:
            transition: A, of this process.
            offset: (batch, time, n), of this process. May be overwritten when gradients are disabled.
            initial: (batch, n), the state that enters the first step of all.
            reset: (batch, time) bool, of this process.
        """
        return transition.scan(offset, initial, reset)

    def entering(self, transition: "Transition", leaving: Tensor, reset: Tensor | None, steps: int) -> Tensor | None:
        """Return the state (batch, n) that enters this process in a recurrence which starts from zero in the first.

        None stands for zero, in the first process.

        Args:
            transition: A, of this process.
            leaving: (batch, n), the last state of this process if zero enters it.
            reset: (batch, time) bool, of this process.
            steps: The number of steps of this process.
        """
        return None

    def make_scan_back(self, transition: "Transition", reset: Tensor | None, steps: int) -> Callable[[Tensor], Tensor]:
        """Return a function that runs x_t = A'_{t+1} x_{t+1} + offset_t, and x_t = offset_t before a reset.

        The function takes the offset (batch, time, n) of this process, or of its leading steps, with zero after them,
        if there is one process. It may overwrite the offset.

        Args:
            transition: A of the forward recurrence, of this process.
            reset: (batch, time) bool, of this process.
            steps: The number of steps of this process.
        """
        backward, cut = transition.backward(), mark_before_reset(reset)

        def scan_back(offset: Tensor) -> Tensor:
            left = offset.shape[1]
            resets = None if cut is None else cut[:, :left]
            return backward.part(None, 0, left).scan(offset, torch.zeros_like(offset[:, 0]), resets, reverse=True)

        return scan_back

    def with_previous(self, system: "System", states: Tensor) -> "System":
        """Return the system of this process with the state and the recent scale that enter its first step.

        Args:
            system: The system of this process.
            states: (batch, time, n), the states of this process.
        """
        return system

    def receive_from_next(self, values: Tensor) -> Tensor:
        """Return `values` of the next process in time; zeros on the last.

        Args:
            values: Those of this process, of the same shape on all.
        """
        return torch.zeros_like(values)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over all processes.

        Args:
            values: Those of this process, of the same shape on all.
        """
        return values

    def broadcast(self, values: Tensor, source: int) -> Tensor:
        """Return `values` of the process `source`.

        Args:
            values: Those of this process, of the same shape on all.
            source: The rank that sends.
        """
        return values

    def earlier_maximum(self, values: Tensor, also: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maximum of `values` and their largest value in all earlier processes, and that of `also` in all.

        Args:
            values: (batch, time), of this process.
            also: (count,), of the same dtype and count in all processes, reduced as by `maximum`.
        """
        return values, also

    def later_maximum(self, values: Tensor, also: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maximum of `values` and their largest value in all later processes, and that of `also` in all.

        Args:
            values: (batch, time), of this process.
            also: (count,), of the same dtype and count in all processes, reduced as by `maximum`.
        """
        return values, also

    def receive_from_later(
        self, leaving: Tensor, values: Tensor, weighted: Tensor | None, reset: Tensor | None
    ) -> LaterSteps | None:
        """Return what later processes send in an iteration for a gradient; None if there is one process.

        Args:
            leaving: (batch, 1, n), the gradient that this process passes back.
            values: (batch, time, n), g of this process.
            weighted: (batch, n), the largest weighted |g| of this process; None without weights, in all processes.
            reset: (batch, time) bool, of this process.
        """
        return None

    def count_leading(self, holds: Tensor, also: Tensor) -> tuple[Tensor, Tensor]:
        """Return the length (batch,) of the prefix of all steps in which a property holds, and the maximum of `also`.

        Args:
            holds: (batch, time) bool, of this process.
            also: (count,) int64, of the same count in all processes, reduced as by `maximum`.
        """
        return holds.long().cumprod(-1).sum(-1), also

    def count_trailing(self, holds: Tensor, also: Tensor) -> tuple[int, Tensor]:
        """Return the length of the suffix of all steps in which a property holds, and the maximum of `also`.

        Args:
            holds: (time,) bool, of this process.
            also: (count,) int64, of the same count in all processes, reduced as by `maximum`.
        """
        return int(holds.flip(0).long().cumprod(0).sum()), also

    def maximum(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum of `values` over all processes. NaN is larger than every number.

        Args:
            values: Those of this process, of the same shape on all.
        """
        return values


ONE_PROCESS = TimeAxis()


def mark_before_reset(reset: Tensor | None) -> Tensor | None:
    """Return whether each step is the last before a reset, (batch, time); False for the last step of a process.

    Args:
        reset: (batch, time) bool.
    """
    return None if reset is None else torch.cat((reset[:, 1:], torch.zeros_like(reset[:, :1])), 1)
