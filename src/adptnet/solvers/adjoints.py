"""Adjoints: methods of differentiating a solve. They differ in memory and time, not in the gradient."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..cells.base import Cell
from ..errors import InputError
from ..ops._backends import Backend
from .gradient_solve import Backward
from .system import Loop, System, chunk_length
from .transitions import Transition

__all__ = ["Adjoint", "Checkpointed", "Implicit", "Unrolled", "evaluate_steps"]


class Adjoint(abc.ABC):  # noqa: B024 - the two kinds below share no method, only their place in a call
    """Base class of adjoints, the methods of differentiating a solve."""


class LoopAdjoint(Adjoint):
    """Base class of adjoints that differentiate through a loop, over time or over iterations.

    Attributes:
        allows_fused_scan: Whether an operation for all steps, with its own backward, may replace the loop over time.
        recomputes: Whether only states are stored, and all else is recomputed in the backward pass.
    """

    allows_fused_scan: ClassVar[bool] = False
    recomputes: ClassVar[bool] = False

    @abc.abstractmethod
    def run(self, loop: Loop, state: Tensor, steps: int) -> Tensor:
        """Return the states (batch, time, n) of a loop over time.

        Args:
            loop: The loop.
            state: (batch, n), the initial state.
            steps: The number of steps.
        """

    @abc.abstractmethod
    def call(self, function: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
        """Run one iteration.

        Args:
            function: The iteration, from states to states.
            states: (batch, time, n).
        """


class Unrolled(LoopAdjoint):
    """Back-propagation through every step. Memory grows with the length.

    With a solver that iterates, it back-propagates through every iteration, each of which stores its activations for
    all steps. Derivatives converge later than states, so more iterations are run than the states alone need.
    """

    allows_fused_scan = True

    def run(self, loop: Loop, state: Tensor, steps: int) -> Tensor:
        return loop(state, state, 0, steps)[0]

    def call(self, function: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
        return function(states)

    def __repr__(self) -> str:
        return "Unrolled()"


class Checkpointed(LoopAdjoint):
    """Store only the states, and recompute each segment (or iteration) in the backward pass.

    Args:
        segment_length: The number of steps per segment; the square root of the length if not given.
    """

    allows_fused_scan = True
    recomputes = True

    def __init__(self, segment_length: int | None = None):
        if segment_length is not None and (not isinstance(segment_length, int) or segment_length < 1):
            raise InputError(f"Checkpointed(segment_length={segment_length}): must be an integer >= 1.")
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

    def call(self, function: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
        result: Tensor = checkpoint(function, states, use_reentrant=False)
        return result

    def __repr__(self) -> str:
        return f"Checkpointed(segment_length={self.segment_length})"


class Implicit(Adjoint):
    """Solve for the gradient at the solution: g_t = J'_{t+1} g_{t+1} + dL/dx_t.

    Nothing of the forward iterations is stored. J' is applied exactly, by the derivative of the step itself, so the
    gradient is that of back-propagation through time for every transition of the solver. The transition only makes the
    iteration for g parallel over time. Steps that do not converge are computed sequentially.

    Double backward and forward mode run sequentially over time.

    Args:
        rtol: Tolerance of the residual of g in each channel, relative to the largest |g| of that channel in this step
            and the next ones (see `adptnet.ops.tolerance`, with time running backwards); chosen by dtype if not given.
        max_iterations: The maximum number of iterations, after which the rest is computed sequentially; the length if
            not given, 0 to compute all of it sequentially.
    """

    def __init__(self, *, rtol: float | None = None, max_iterations: int | None = None):
        if rtol is not None and not rtol >= 0:
            raise InputError(f"Implicit(rtol={rtol!r}): must be a number >= 0.")
        if max_iterations is not None and (not isinstance(max_iterations, int) or max_iterations < 0):
            raise InputError(f"Implicit(max_iterations={max_iterations!r}): must be an integer >= 0.")
        self.rtol = rtol
        self.max_iterations = max_iterations

    @property
    def backend(self) -> Backend:
        """The program of the backward pass."""
        return Backend("implicit", f"the adjoint is {self}.")

    def attach(
        self,
        cell: Cell,
        system: System,
        states: Tensor,
        linearize: Callable[[System, Tensor], Transition] | None,
        block: int | None = None,
    ) -> Tensor:
        """Return `states`, which solve `system`, with their gradient.

        Args:
            cell: The cell of the system.
            system: The equations, in tensors that may carry a graph.
            states: (batch, time, n), the solution, without a graph.
            linearize: Returns the transition of a part of the system from its entering states; if None, the gradient is
                computed sequentially.
            block: The number of steps that are solved at a time; all if not given.
        """
        if not torch.is_grad_enabled():
            return states
        if not states.numel():
            return system.run()
        if not system.slice_steps(states, 0, 1).run().requires_grad:
            return states
        values = evaluate_steps(system, states)
        backward = Backward(self, cell, system, linearize, block)
        attached: Tensor = _Attach.apply(  # type: ignore[no-untyped-call]
            states, backward, system.step_inputs[0], system.initial, system.reset_state, *cell.parameters(), *values
        )
        return attached

    def __repr__(self) -> str:
        given = {"rtol": self.rtol, "max_iterations": self.max_iterations}
        return f"Implicit({', '.join(f'{name}={value}' for name, value in given.items() if value is not None)})"


def evaluate_steps(system: System, states: Tensor) -> list[Tensor]:
    """Return f at the states, in chunks of time, each of which recomputes its activations in the backward pass.

    Only the graphs of the results may be used: their values are freed, since they are those of `states`.

    Args:
        system: The equations, in tensors that may carry a graph.
        states: (batch, time, n), the solution, without a graph.
    """
    length = chunk_length(states)
    # split, not slices: the gradient of a slice is as large as the whole tensor
    chunks = zip(*(tensor.split(length, 1) for tensor in system.step_inputs), strict=True)
    values = []
    for start, step_inputs in zip(range(0, system.steps, length), chunks, strict=True):
        part = dataclasses.replace(system.slice_steps(states, start, start + length), step_inputs=step_inputs)
        inside = states[:, start : start + length]
        values.append(checkpoint(_evaluate_step, part, inside, use_reentrant=False, preserve_rng_state=False))
        values[-1].untyped_storage().resize_(0)
    return values


def _evaluate_step(system: System, states: Tensor) -> Tensor:
    return system.step(system.entering_states(states), *system.step_inputs).clone()  # a step may return its argument


class _Attach(torch.autograd.Function):
    """The identity on `states`. Backward solves for g, and returns it as the gradient of f at the states (the last
    inputs)."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, backward: Backward, *inputs: Tensor) -> Tensor:
        ctx.backward_pass = backward
        count = 3 + len(list(backward.cell.parameters()))
        ctx.lengths = [values.shape[1] for values in inputs[count:]]
        ctx.save_for_backward(states, *inputs[:count])
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        states, drive, initial, reset_state, *parameters = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: double backward
            every = ctx.backward_pass.differentiable_gradient(gradient, drive, initial, reset_state, parameters)
            return None, None, *every, *[None] * len(ctx.lengths)
        g = ctx.backward_pass.solve(gradient, states)
        return None, None, *[None] * (3 + len(parameters)), *g.split(ctx.lengths, 1)
