"""Adjoints: how a solved sequence is differentiated. They change memory and time, never the gradient."""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..cells.base import Cell
from ..errors import IncompatibleError, InputError
from ..ops import _buffers
from ..ops._torch_state import apart
from ..ops.tolerance import Tolerance, recent_scale
from .fixed_point import Contraction, allowed_drift, default_rtol, rounding_excess
from .system import Loop, System, stretch
from .transitions import Transition

__all__ = ["Adjoint", "Checkpointed", "Implicit", "Unrolled"]

PATIENCE = 3  # rises of the residual in a row after which the iterations for a gradient give up


class Adjoint(abc.ABC):  # noqa: B024 - the two kinds below share no method, only their place in a call
    """How what was computed is differentiated."""


class LoopAdjoint(Adjoint):
    """An adjoint that runs a loop, over time or over iterations, so that it can be differentiated."""

    @abc.abstractmethod
    def run(self, loop: Loop, state: Tensor, steps: int) -> Tensor:
        """All states of `loop` from `state` over `steps` steps."""

    @abc.abstractmethod
    def call(self, function: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
        """One iteration."""


class Unrolled(LoopAdjoint):
    """Back-propagation through every step. Keeps what each step needs: memory grows with the length.

    With a solver that iterates, through every iteration, each of which keeps what it needs for all steps. Derivatives
    converge later than states, so more iterations are run than the states alone would take.
    """

    def run(self, loop: Loop, state: Tensor, steps: int) -> Tensor:
        return loop(state, state, 0, steps)[0]

    def call(self, function: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
        return function(states)

    def __repr__(self) -> str:
        return "Unrolled()"


class Checkpointed(LoopAdjoint):
    """Keeps only the states, and runs each segment (or iteration) again when its gradient is needed.

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

    def call(self, function: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
        result: Tensor = checkpoint(function, states, use_reentrant=False)
        return result

    def __repr__(self) -> str:
        return f"Checkpointed(segment_length={self.segment_length})"


class Implicit(Adjoint):
    """Solves for the gradient at the states that were found: g_t = J'_{t+1} g_{t+1} + dL/dx_t.

    Nothing of the search for the states is kept. J' is applied exactly, by the derivative of the step itself, so the
    gradient is that of back-propagation through time whatever transition the solver used; that transition only makes
    the search for g parallel. What does not converge is finished step by step.

    Second derivatives run step by step through time; so does forward mode.

    Args:
        rtol: Residual of g in each channel, relative to the largest |g| of that channel in this step and the next ones
            (see `adptnet.ops.tolerance`, with time running backwards); from the dtype if not given.
        max_iterations: After these the rest is done step by step; the length if not given, 0 for all of it.
    """

    def __init__(self, *, rtol: float | None = None, max_iterations: int | None = None):
        if rtol is not None and not rtol >= 0:
            raise InputError(f"Implicit(rtol={rtol!r}): must be a number from 0.")
        if max_iterations is not None and (not isinstance(max_iterations, int) or max_iterations < 0):
            raise InputError(f"Implicit(max_iterations={max_iterations!r}): must be a whole number from 0.")
        self.rtol = rtol
        self.max_iterations = max_iterations

    def attach(
        self,
        cell: Cell,
        system: System,
        states: Tensor,
        linearise: Callable[[System, Tensor], Transition] | None,
        block: int | None = None,
    ) -> Tensor:
        """`states`, which solve `system`, with their gradient.

        Args:
            cell: Whose step it is.
            system: The equations, in tensors that may carry a graph.
            states: (batch, time, n), without one.
            linearise: The transition of a stretch of the system at what enters its steps; step by step if None.
            block: Steps that are solved at a time; all if not given.
        """
        if not torch.is_grad_enabled():
            return states
        if not states.numel():
            return system.run()
        if not system.between(states, 0, 1).run().requires_grad:
            return states
        length = stretch(states)
        # split, not slices: the gradient of a slice is as large as the whole
        givens = zip(*(given.split(length, 1) for given in system.givens), strict=True)
        values = []
        for start, given in zip(range(0, system.steps, length), givens, strict=True):
            part = dataclasses.replace(system.between(states, start, start + length), givens=given)
            inside = states[:, start : start + length]
            values.append(checkpoint(_evaluated, part, inside, use_reentrant=False, preserve_rng_state=False))
            values[-1].untyped_storage().resize_(0)  # only its graph is needed; the numbers are those of `states`
        backward = _Backward(self, cell, _detached(cell, system), linearise, block)
        attached: Tensor = _Attach.apply(  # type: ignore[no-untyped-call]
            states, backward, system.givens[0], system.initial, system.fresh, *cell.parameters(), *values
        )
        return attached

    def __repr__(self) -> str:
        given = {"rtol": self.rtol, "max_iterations": self.max_iterations}
        return f"Implicit({', '.join(f'{name}={value}' for name, value in given.items() if value is not None)})"


def _evaluated(system: System, states: Tensor) -> Tensor:
    return system.step(system.entering(states), *system.givens).clone()  # a step may hand back what it was given


def _detached(cell: Cell, system: System) -> System:
    with torch.no_grad():
        step = cell.stepper()
    givens = tuple(given.detach() for given in system.givens)
    return System(step, givens, system.initial.detach(), system.fresh.detach(), system.reset, system.lengths)


class _Attach(torch.autograd.Function):
    """The identity on `states`; backwards, from dL/dx_t to g_t, which goes on to f at the states, the last inputs."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, backward: "_Backward", *inputs: Tensor) -> Tensor:
        ctx.backward_pass = backward
        count = 3 + len(list(backward.cell.parameters()))
        ctx.lengths = [values.shape[1] for values in inputs[count:]]
        ctx.save_for_backward(states, *inputs[:count])
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        states, drive, initial, fresh, *parameters = ctx.saved_tensors
        if torch.is_grad_enabled():  # a graph of the gradient is asked for
            every = ctx.backward_pass.twice(gradient, drive, initial, fresh, parameters)
            return None, None, *every, *[None] * len(ctx.lengths)
        found = ctx.backward_pass.solve(gradient, states)
        return None, None, *[None] * (3 + len(parameters)), *found.split(ctx.lengths, 1)


def gradient_tolerance(g: Tensor, rtol: float, cut: Tensor | None, later: Tensor | None = None) -> Tensor:
    """Return the largest residual of each channel of g, (batch, time, n).

    Args:
        g: (batch, time, n).
        rtol: Relative to the recent scale of the channel, counted from the last step, and from each reset.
        cut: (batch, time), whether a step is the last before a reset.
        later: (batch, n), the largest |g| after the last step.
    """
    ends = None if cut is None else cut.flip(1)
    return recent_scale(g.flip(1), ends, later).flip(1).mul_(rtol).add_(torch.finfo(g.dtype).tiny)


class Progress:
    """Decides how many steps of g are right. Its tensors are (batch, steps left), from the last step to the first."""

    def __init__(self, rtol: float, steps: int, dtype: torch.dtype):
        self.steps = steps
        self.drift = allowed_drift(Tolerance(0.0, rtol), steps, dtype)
        self.rounding = rounding_excess(Tolerance(0.0, rtol), dtype)
        self.contraction: Contraction | None = None

    def right(self, excess: Tensor, move: Tensor) -> Tensor:
        """Return whether each step is right, from its residual and its move in tolerances."""
        if self.contraction is None:  # how fast the residual falls is not known yet
            self.contraction = Contraction(excess, self.rounding)
            return (excess <= self.rounding) & (move <= self.drift)
        self.contraction.update(excess)
        return (excess <= 1) & (self.contraction.error(move, self.steps) <= self.drift)

    def settled(self, excess: Tensor, move: Tensor) -> int:
        """Return how many steps have become right in all sequences, and leave them out from now on."""
        count = int(self.right(excess, move).all(0).long().cumprod(0).sum())
        assert self.contraction is not None
        self.contraction = self.contraction.part(None, count)
        return count


class _Backward:
    """The search for g, with all it needs of the solve."""

    def __init__(
        self,
        adjoint: Implicit,
        cell: Cell,
        system: System,
        linearise: Callable[[System, Tensor], Transition] | None,
        block: int | None,
    ):
        self.adjoint = adjoint
        self.cell = cell
        self.system = system
        self.linearise = linearise
        self.block = block or max(1, system.steps)

    def solve(self, gradient: Tensor, states: Tensor) -> Tensor:
        """g from dL/dx, block after block from the last to the first."""
        steps = self.system.steps
        relative = default_rtol(states.dtype) if self.adjoint.rtol is None else self.adjoint.rtol
        known = gradient.clone() if self.block < steps else gradient  # dL/dx, and what the block after hands back
        found = torch.empty_like(gradient)
        for start in reversed(range(0, steps, self.block)):
            stop = min(start + self.block, steps)
            part, inside = self.system.between(states, start, stop), states[:, start:stop]
            self._solve_block(part, inside, known[:, start:stop], found[:, start:stop], relative)
            if start:
                self._hand_back(part, inside, found[:, start:stop], slice(0, 1), known[:, start - 1 : start])
        _buffers.clear()  # of the iterations
        return found

    def _solve_block(self, part: System, states: Tensor, known: Tensor, g: Tensor, rtol: float) -> None:
        """Fills g. Steps that the iterations leave are done one after another, from the last of them to the first."""
        left = self._iterate(part, states, known, g, rtol)
        for t in reversed(range(left)):
            g[:, t] = known[:, t]
            if t + 1 < part.steps:
                self._hand_back(part, states, g, slice(t + 1, t + 2), g[:, t : t + 1])

    def _iterate(self, part: System, states: Tensor, known: Tensor, g: Tensor, rtol: float) -> int:
        """Fills g by iterations. Returns how many steps, counted from the first, are not known to be right."""
        steps = left = part.steps
        iterations = steps if self.adjoint.max_iterations is None else self.adjoint.max_iterations
        if self.linearise is None or not iterations:
            return steps
        with torch.no_grad():
            backward = self.linearise(part, part.entering(states)).backward()
        cut = None if part.reset is None else part.reset.roll(-1, 1)  # whether nothing is handed back to a step
        none = torch.zeros_like(part.initial)
        buffer = known.clone(memory_format=torch.contiguous_format)
        g.copy_(backward.scan(buffer, none, cut, reverse=True))
        rises, previous = 0, math.inf
        progress = Progress(rtol, steps, g.dtype)
        for _ in range(iterations):
            residual = torch.sub(known[:, :left], g[:, :left], out=buffer[:, :left])
            self._hand_back(part, states, g, slice(1, min(left + 1, steps)), residual)
            allowed = gradient_tolerance(g, rtol, cut)[:, :left]
            size, excess = residual.abs().amax(-1), (residual.abs() / allowed).amax(-1)
            worst = float(size.amax())
            rises = rises + 1 if worst > previous else 0
            previous = worst
            if rises == PATIENCE or not math.isfinite(worst):
                break
            resets = None if cut is None else cut[:, :left]
            move = backward.part(None, 0, left).scan(residual, none, resets, reverse=True)
            g[:, :left] += move
            settled = progress.settled(excess.flip(1), (move.abs_() / allowed).amax(-1).flip(1))
            left -= settled
            if not left:
                break
        return left

    def _hand_back(self, part: System, states: Tensor, g: Tensor, times: slice, to: Tensor) -> None:
        """Adds J'_t g_t, for t in `times`, to the state before each: to `to`, unless another state entered."""
        length = stretch(states)
        for start in range(times.start, times.stop, length):
            at = slice(start, min(start + length, times.stop))
            here = part.between(states, at.start, at.stop)
            with torch.enable_grad():
                point = here.entering(states[:, at]).detach().requires_grad_()
                values = here.step(point, *here.givens)
                if not values.requires_grad:
                    continue  # a step that does not look at the state
                (pulled,) = torch.autograd.grad(values, point, g[:, at], materialize_grads=True)
            if part.reset is not None:
                pulled = pulled.masked_fill(part.reset[:, at].unsqueeze(-1), 0.0)
            to[:, start - times.start : at.stop - times.start] += pulled

    def twice(
        self, gradient: Tensor, drive: Tensor, initial: Tensor, fresh: Tensor, parameters: list[Tensor]
    ) -> Iterator[Tensor | None]:
        """The gradient with a graph of its own, by back-propagation through time."""
        self._refuse_captured()
        names = [f"cell.{name}" for name, _ in self.cell.named_parameters()]
        inputs = apart((drive, initial, fresh, *parameters))
        with torch.enable_grad():
            states = torch.func.functional_call(
                _Steps(self.cell), dict(zip(names, inputs[3:], strict=True)), (self.system, *inputs[:3])
            )
            wanted = [value for value in inputs if value.requires_grad]
            found = iter(torch.autograd.grad(states, wanted, gradient, create_graph=True, allow_unused=True))
        return (next(found) if value.requires_grad else None for value in inputs)

    def _refuse_captured(self) -> None:
        with torch.enable_grad():
            constant = {f"cell.{name}": value.detach() for name, value in self.cell.named_parameters()}
            system = self.system.part(None, 0, self.system.initial, 1)
            inputs = (system, system.givens[0], system.initial, system.fresh)
            captured = torch.func.functional_call(_Steps(self.cell), constant, inputs).requires_grad
        if captured:
            raise IncompatibleError(
                "second derivatives by Implicit need every trainable tensor to be a parameter of the cell; this step "
                "uses one from outside. Make it a parameter of an nn.Module and give that to cells.from_function, or "
                "pass adjoint=adjoints.Unrolled()."
            )


class _Steps(nn.Module):
    """All states of a system, step by step, with other tensors in the place of its own."""

    def __init__(self, cell: Cell):
        super().__init__()
        self.cell = cell

    def forward(self, system: System, drive: Tensor, initial: Tensor, fresh: Tensor) -> Tensor:
        replaced = System(self.cell.stepper(), (drive,), initial, fresh, system.reset, system.lengths)
        return replaced.run()
