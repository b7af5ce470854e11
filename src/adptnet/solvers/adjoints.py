"""Adjoints: methods of differentiating a solve. They differ in memory and time, not in the gradient."""

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
from ..ops._backends import Backend
from ..ops._torch_state import separate_views
from ..ops.tolerance import Tolerance, largest, recent_scale
from .convergence_test import Contraction, allowed_drift, default_rtol, rounding_excess
from .system import Loop, System, chunk_length
from .transitions import Transition

__all__ = ["Adjoint", "Checkpointed", "Implicit", "Unrolled"]

PATIENCE = 3  # rises of the residual in a row after which the iterations for a gradient stop


class Adjoint(abc.ABC):  # noqa: B024 - the two kinds below share no method, only their place in a call
    """Base class of adjoints, the methods of differentiating a solve."""


class LoopAdjoint(Adjoint):
    """Base class of adjoints that differentiate through a loop, over time or over iterations."""

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
        length = chunk_length(states)
        # split, not slices: the gradient of a slice is as large as the whole tensor
        chunks = zip(*(tensor.split(length, 1) for tensor in system.step_inputs), strict=True)
        values = []
        for start, step_inputs in zip(range(0, system.steps, length), chunks, strict=True):
            part = dataclasses.replace(system.slice_steps(states, start, start + length), step_inputs=step_inputs)
            inside = states[:, start : start + length]
            values.append(checkpoint(_evaluate_step, part, inside, use_reentrant=False, preserve_rng_state=False))
            values[-1].untyped_storage().resize_(0)  # only the graph is needed; the values are those of `states`
        has_initial_gradient = system.initial.requires_grad or system.reset_state.requires_grad
        with torch.no_grad():
            detached = system.detach(cell.stepper())
        backward = _Backward(self, cell, detached, linearize, block, has_initial_gradient)
        attached: Tensor = _Attach.apply(  # type: ignore[no-untyped-call]
            states, backward, system.step_inputs[0], system.initial, system.reset_state, *cell.parameters(), *values
        )
        return attached

    def __repr__(self) -> str:
        given = {"rtol": self.rtol, "max_iterations": self.max_iterations}
        return f"Implicit({', '.join(f'{name}={value}' for name, value in given.items() if value is not None)})"


def _evaluate_step(system: System, states: Tensor) -> Tensor:
    return system.step(system.entering_states(states), *system.step_inputs).clone()  # a step may return its argument


class _Attach(torch.autograd.Function):
    """The identity on `states`. Backward solves for g, and returns it as the gradient of f at the states (the last
    inputs)."""

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
        states, drive, initial, reset_state, *parameters = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: double backward
            every = ctx.backward_pass.differentiable_gradient(gradient, drive, initial, reset_state, parameters)
            return None, None, *every, *[None] * len(ctx.lengths)
        g = ctx.backward_pass.solve(gradient, states)
        return None, None, *[None] * (3 + len(parameters)), *g.split(ctx.lengths, 1)


def gradient_tolerance(g: Tensor, rtol: float, cut: Tensor | None, later: Tensor | None = None) -> Tensor:
    """Return the tolerance of the residual of g in each channel, (batch, time, n).

    Args:
        g: (batch, time, n).
        rtol: Relative to the recent scale of the channel, from the last step backwards, and from each reset.
        cut: (batch, time) bool, whether a step is the last before a reset.
        later: (batch, n), the recent scale of g after the last step.
    """
    ends = None if cut is None else cut.flip(1)
    return recent_scale(g.flip(1), ends, later).flip(1).mul_(rtol).add_(torch.finfo(g.dtype).tiny)


class _GradientTolerance:
    """Tolerance of g in a block, strict enough for the gradients that are computed from g.

    The gradient of a parameter is a sum over time of g times the state or the input of a step. An error of g at a step
    with a large state is multiplied by that state, so g_t times the size of the state is compared with its largest
    value in this step and the later ones. The gradient of an initial state is J'g of one step alone, which is compared
    with g of that step.

    Args:
        rtol: The relative tolerance.
        part: The system of the block.
        entering: (batch, time, n), the states that enter its steps.
        cut: (batch, time) bool, whether a step is the last before a reset.
        has_initial_gradient: Whether the initial state or the reset state requires a gradient.
    """

    UNIFORM = 16.0  # if the size of the states varies by less, the recent scale of g is strict enough

    def __init__(self, rtol: float, part: System, entering: Tensor, cut: Tensor | None, has_initial_gradient: bool):
        self.rtol, self.cut = rtol, cut
        # (batch, time, 1), the size of the state and the input of each step; None if it is about the same for all
        self.magnitude: Tensor | None = torch.maximum(largest(entering), largest(part.step_inputs[0])).unsqueeze(-1)
        self.magnitude.clamp_(min=torch.finfo(entering.dtype).tiny)
        if bool(self.magnitude.amax() <= self.UNIFORM * self.magnitude.amin()):
            self.magnitude = None
        self.starts: Tensor | None = None  # (batch, time, 1) bool: whether an initial or reset state enters the step
        if has_initial_gradient:
            starts = torch.zeros_like(entering[..., :1], dtype=torch.bool)
            self.starts = starts if part.reset is None else part.reset.unsqueeze(-1).clone()
            self.starts[:, 0] = True
        self.rounding: Tensor | None = None

    def allowed(self, g: Tensor, residual: Tensor, left: int, rounding: Callable[[], Tensor]) -> Tensor:
        """Return the tolerance of the residual of the first `left` steps, (batch, left, n).

        Args:
            g: (batch, time, n).
            residual: (batch, left, n), its absolute value.
            left: The number of leading steps that have not converged.
            rounding: Returns the rounding error of the residual. It is the smallest tolerance once all residuals are
                within the tolerance by the recent scale of g.
        """
        strict = recent = gradient_tolerance(g, self.rtol, self.cut)[:, :left]
        least = torch.finfo(g.dtype).tiny
        if self.magnitude is not None:
            weighted = (g.abs() * self.magnitude).flip(1).cummax(1).values.flip(1) / self.magnitude
            strict = torch.minimum(strict, weighted[:, :left].mul(self.rtol).add_(least))
        if self.starts is not None:
            alone = g[:, :left].abs().mul_(self.rtol).add_(least)
            strict = torch.where(self.starts[:, :left], torch.minimum(strict, alone), strict)
        if strict is recent:
            return recent
        if self.rounding is None and bool((residual <= recent).all() & (residual > strict).any()):
            self.rounding = rounding()
        return strict if self.rounding is None else torch.minimum(recent, strict.maximum(self.rounding[:, :left]))


class Progress:
    """Convergence test of g. Its tensors are (batch, remaining steps), from the last step to the first.

    Args:
        rtol: The relative tolerance of g.
        steps: The length of the sequence.
        dtype: The dtype of g.
    """

    def __init__(self, rtol: float, steps: int, dtype: torch.dtype):
        self.steps = steps
        self.drift = allowed_drift(Tolerance(0.0, rtol), steps, dtype)
        self.rounding = rounding_excess(Tolerance(0.0, rtol), dtype)
        self.contraction: Contraction | None = None

    def is_converged(self, excess: Tensor, move: Tensor) -> Tensor:
        """Return whether each step has converged, (batch, remaining steps).

        Args:
            excess: The residual of each step, in tolerances.
            move: The change of each step in the next iteration, in tolerances.
        """
        if self.contraction is None:  # the rate of convergence is not known yet
            self.contraction = Contraction(excess, self.rounding)
            return (excess <= self.rounding) & (move <= self.drift)
        self.contraction.update(excess)
        return (excess <= 1) & (self.contraction.error(move, self.steps) <= self.drift)

    def drop_converged(self, excess: Tensor, move: Tensor) -> int:
        """Return how many steps have newly converged in all sequences, and exclude them from now on.

        Args:
            excess: The residual of each step, in tolerances.
            move: The change of each step in the next iteration, in tolerances.
        """
        count = int(self.is_converged(excess, move).all(0).long().cumprod(0).sum())
        assert self.contraction is not None
        self.contraction = self.contraction.part(None, count)
        return count


class _Backward:
    """Backward pass: solves for g."""

    def __init__(
        self,
        adjoint: Implicit,
        cell: Cell,
        system: System,
        linearize: Callable[[System, Tensor], Transition] | None,
        block: int | None,
        has_initial_gradient: bool,
    ):
        self.adjoint = adjoint
        self.cell = cell
        self.system = system
        self.linearize = linearize
        self.block = block or max(1, system.steps)
        self.has_initial_gradient = has_initial_gradient

    def solve(self, gradient: Tensor, states: Tensor) -> Tensor:
        """Return g from dL/dx, solved block by block from the last to the first."""
        steps = self.system.steps
        relative = default_rtol(states.dtype) if self.adjoint.rtol is None else self.adjoint.rtol
        known = gradient.clone() if self.block < steps else gradient  # dL/dx, plus the gradient from the next block
        g = torch.empty_like(gradient)
        for start in reversed(range(0, steps, self.block)):
            stop = min(start + self.block, steps)
            part, inside = self.system.slice_steps(states, start, stop), states[:, start:stop]
            self._solve_block(part, inside, known[:, start:stop], g[:, start:stop], relative)
            if start:
                self._pull_back(part, inside, g[:, start:stop], slice(0, 1), known[:, start - 1 : start])
        _buffers.clear()  # the buffers of the iterations
        return g

    def _solve_block(self, part: System, states: Tensor, known: Tensor, g: Tensor, rtol: float) -> None:
        """Fill g of a block. Steps that have not converged are computed sequentially, in reverse."""
        left = self._iterate(part, states, known, g, rtol)
        for t in reversed(range(left)):
            g[:, t] = known[:, t]
            if t + 1 < part.steps:
                self._pull_back(part, states, g, slice(t + 1, t + 2), g[:, t : t + 1])

    def _iterate(self, part: System, states: Tensor, known: Tensor, g: Tensor, rtol: float) -> int:
        """Fill g of a block by iterations. Return the number of leading steps that have not converged."""
        steps = left = part.steps
        iterations = steps if self.adjoint.max_iterations is None else self.adjoint.max_iterations
        if self.linearize is None or not iterations:
            return steps
        entering = part.entering_states(states)
        with torch.no_grad():
            backward = self.linearize(part, entering).backward()
        cut = None if part.reset is None else part.reset.roll(-1, 1)  # whether a step is the last before a reset
        zero = torch.zeros_like(part.initial)
        buffer = known.clone(memory_format=torch.contiguous_format)
        g.copy_(backward.scan(buffer, zero, cut, reverse=True))
        rises, previous = 0, math.inf
        progress = Progress(rtol, steps, g.dtype)
        tolerance = _GradientTolerance(rtol, part, entering, cut, self.has_initial_gradient)
        del entering  # as large as the states
        for _ in range(iterations):
            residual = torch.sub(known[:, :left], g[:, :left], out=buffer[:, :left])
            self._pull_back(part, states, g, slice(1, min(left + 1, steps)), residual)
            size = residual.abs()
            allowed = tolerance.allowed(g, size, left, lambda: self._rounding(part, states, known, g))
            excess, worst = (size / allowed).amax(-1), float(size.amax())
            del size
            rises = rises + 1 if worst > previous else 0
            previous = worst
            if rises == PATIENCE or not math.isfinite(worst):
                break
            resets = None if cut is None else cut[:, :left]
            move = backward.part(None, 0, left).scan(residual, zero, resets, reverse=True)
            g[:, :left] += move
            left -= progress.drop_converged(excess.flip(1), (move.abs_() / allowed).amax(-1).flip(1))
            if not left:
                break
        return left

    def _rounding(self, part: System, states: Tensor, known: Tensor, g: Tensor) -> Tensor:
        """Return the residual that the rounding of g and of dL/dx alone may cause, (batch, time, n)."""
        rounding = torch.finfo(g.dtype).eps
        generator = torch.Generator("cpu").manual_seed(0)
        signs = 2 * torch.randint(0, 2, g.shape, generator=generator, device="cpu").to(g) - 1
        change = torch.zeros_like(g)
        self._pull_back(part, states, rounding * signs * g, slice(1, part.steps), change[:, :-1])
        return 8 * (change.abs_() + rounding * known.abs())

    def _pull_back(self, part: System, states: Tensor, g: Tensor, times: slice, to: Tensor) -> None:
        """Add J'_t g_t for t in `times`, the gradient that each step passes back, to `to`; nothing at a reset."""
        length = chunk_length(states)
        for start in range(times.start, times.stop, length):
            at = slice(start, min(start + length, times.stop))
            here = part.slice_steps(states, at.start, at.stop)
            with torch.enable_grad():
                point = here.entering_states(states[:, at]).detach().requires_grad_()
                values = here.step(point, *here.step_inputs)
                if not values.requires_grad:
                    continue  # a step that does not depend on the state
                (pulled,) = torch.autograd.grad(values, point, g[:, at], materialize_grads=True)
            if part.reset is not None:
                pulled = pulled.masked_fill(part.reset[:, at].unsqueeze(-1), 0.0)
            to[:, start - times.start : at.stop - times.start] += pulled

    def differentiable_gradient(
        self, gradient: Tensor, drive: Tensor, initial: Tensor, reset_state: Tensor, parameters: list[Tensor]
    ) -> Iterator[Tensor | None]:
        """Return the gradient of each input with its own graph, by back-propagation through time."""
        self._check_no_captured_tensors()
        names = [f"cell.{name}" for name, _ in self.cell.named_parameters()]
        inputs = separate_views((drive, initial, reset_state, *parameters))
        with torch.enable_grad():
            states = torch.func.functional_call(
                _SequentialRun(self.cell), dict(zip(names, inputs[3:], strict=True)), (self.system, *inputs[:3])
            )
            leaves = [value for value in inputs if value.requires_grad]
            gradients = iter(torch.autograd.grad(states, leaves, gradient, create_graph=True, allow_unused=True))
        return (next(gradients) if value.requires_grad else None for value in inputs)

    def _check_no_captured_tensors(self) -> None:
        """Raise `IncompatibleError` if the step uses a trainable tensor that is not a parameter of the cell."""
        with torch.enable_grad():
            constant = {f"cell.{name}": value.detach() for name, value in self.cell.named_parameters()}
            system = self.system.part(None, 0, self.system.initial, 1)
            inputs = (system, system.step_inputs[0], system.initial, system.reset_state)
            has_captured = torch.func.functional_call(_SequentialRun(self.cell), constant, inputs).requires_grad
        if has_captured:
            raise IncompatibleError(
                "double backward through Implicit needs every trainable tensor to be a parameter of the cell; this "
                "step uses one from outside. Make it a parameter of an nn.Module and pass that to cells.from_function, "
                "or pass adjoint=adjoints.Unrolled()."
            )


class _SequentialRun(nn.Module):
    """Sequential run of a system whose tensors are passed as arguments."""

    def __init__(self, cell: Cell):
        super().__init__()
        self.cell = cell

    def forward(self, system: System, drive: Tensor, initial: Tensor, reset_state: Tensor) -> Tensor:
        replaced = System(self.cell.stepper(), (drive,), initial, reset_state, system.reset, system.lengths)
        return replaced.run()
