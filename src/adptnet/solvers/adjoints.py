"""Adjoints: methods of differentiating a solve. They differ in memory and time, not in the gradient."""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..cells.base import Cell
from ..cells.structure import make_step
from ..errors import IncompatibleError, InputError
from ..ops import _buffers, _gpu
from ..ops._backends import Backend
from ..ops._torch_state import separate_views
from ..ops.adpt_step import DevicePass
from ..ops.tolerance import Tolerance, largest, recent_scale, running_maximum_
from .convergence_test import Contraction, allowed_drift, default_rtol, rounding_excess
from .rounding import PROBES, WORKING_SET, accumulate, limit_accumulated, random_signs, select, split_rows
from .system import Loop, System, chunk_length
from .time_axis import mark_before_reset
from .transitions import Transition

__all__ = ["Adjoint", "Backward", "Checkpointed", "Implicit", "Unrolled", "evaluate_steps"]

PATIENCE = 3  # rises of the residual in a row after which the iterations for a gradient stop
MARGIN = 8  # how many times its measured size the rounding error of a residual may be


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
    def forward(ctx: Any, states: Tensor, backward: "Backward", *inputs: Tensor) -> Tensor:
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


class _GradientTolerance:
    """Tolerance of g in a block, strict enough for the gradients that are computed from g.

    The gradient of a parameter is a sum over time of g times the state or the input of a step. An error of g at a step
    with a large state is multiplied by that state, so g_t times the size of the state is compared with its largest
    value in this step and the later ones. The gradient of an initial state is J'g of one step alone, which is compared
    with g of that step.

    Args:
        rtol: The relative tolerance.
        part: The system of the block, or of the chunk of this process.
        entering: (batch, time, n), the states that enter its steps.
        has_initial_gradient: Whether the initial state or the reset state requires a gradient.
    """

    UNIFORM = 16.0  # if the size of the states varies by less, the recent scale of g is strict enough

    def __init__(self, rtol: float, part: System, entering: Tensor, has_initial_gradient: bool):
        self.rtol, self.axis, self.reset = rtol, part.axis, part.reset
        # (batch, time, 1), the size of the state and the input of each step; None if it is about the same for all
        self.magnitude: Tensor | None = torch.maximum(largest(entering), largest(part.step_inputs[0])).unsqueeze(-1)
        self.magnitude.clamp_(min=torch.finfo(entering.dtype).tiny)
        needed = self.magnitude.new_tensor(float(has_initial_gradient))
        bounds = self.axis.maximum(torch.stack((self.magnitude.amax(), -self.magnitude.amin(), needed)))
        if bool(bounds[0] <= self.UNIFORM * -bounds[1]):
            self.magnitude = None
        self.starts: Tensor | None = None  # (batch, time, 1) bool: whether an initial or reset state enters the step
        if bool(bounds[2]):
            starts = torch.zeros_like(entering[..., :1], dtype=torch.bool)
            self.starts = starts if part.reset is None else part.reset.unsqueeze(-1).clone()
            if self.axis.rank == 0:
                self.starts[:, 0] = True

    def allowed(self, g: Tensor, left: int) -> Tensor:
        """Return the tolerance of the residual of the first `left` steps, (batch, left, n).

        Args:
            g: (batch, time, n).
            left: The number of leading steps that have not converged.
        """
        least = torch.finfo(g.dtype).tiny
        cut, later = mark_before_reset(self.reset), self.axis.later_scale(g, self.reset)
        scale = recent_scale(g, cut, later, reverse=True)
        allowed = scale.mul_(self.rtol).add_(least)[:, :left]
        if self.magnitude is not None:
            weighted = self.axis.later_maximum(running_maximum_(g.abs().mul_(self.magnitude), reverse=True))
            weighted = weighted[:, :left].div_(self.magnitude[:, :left])
            torch.minimum(allowed, weighted.mul_(self.rtol).add_(least), out=allowed)
            del weighted
        if self.starts is not None:
            alone = g[:, :left].abs().mul_(self.rtol).add_(least)
            allowed = torch.where(self.starts[:, :left], torch.minimum(allowed, alone), allowed)
        return allowed

    def find_cancelling(self, g: Tensor, size: Tensor, suspected: Tensor) -> tuple[Tensor, Tensor]:
        """Return the steps that are within tolerance as a whole, as all after them are, in suspected sequences.

        Args:
            g: (batch, time, n).
            size: (batch, left), the largest residual of each step.
            suspected: (batch, left) bool, whether the residual of a step may be a rounding error.

        Returns:
            (batch, left) bool, False for sequences without a suspected step; and (batch, left, 1), the residual allowed
            relative to the largest entry of the step.
        """
        entries = largest(g)
        entries[:, :-1] = torch.maximum(entries[:, :-1], entries[:, 1:])
        whole = entries[:, : size.shape[1]].mul_(self.rtol).add_(torch.finfo(g.dtype).tiny)
        settled = (size <= whole).flip(1).cumprod(1).flip(1).bool()
        return settled & (settled & suspected).any(1, keepdim=True), whole.unsqueeze(-1)


class _Progress:
    """Convergence test of g. Its tensors are (batch, remaining steps), from the last step to the first.

    Args:
        rtol: The relative tolerance of g.
        steps: The length of the sequence, in all processes.
        dtype: The dtype of g.
    """

    def __init__(self, rtol: float, steps: int, dtype: torch.dtype):
        self.steps = steps
        self.drift = allowed_drift(Tolerance(0.0, rtol), steps, dtype)
        self.rounding = rounding_excess(Tolerance(0.0, rtol), dtype)
        self.contraction: Contraction | None = None
        self.is_rate_known = False

    def mark_stagnating(self, excess: Tensor) -> Tensor:
        """Return whether the residual of each step may be a rounding error, (batch, remaining steps).

        Args:
            excess: The residual of each step, in tolerances.
        """
        if self.contraction is None:
            return torch.zeros_like(excess, dtype=torch.bool)
        return self.contraction.mark_stagnating(excess)

    def update(self, excess: Tensor) -> None:
        """Update the rate of convergence.

        Args:
            excess: The residual of each step, in tolerances.
        """
        if self.contraction is None:
            self.contraction = Contraction(excess, self.rounding)
        else:
            self.contraction.update(excess)
            self.is_rate_known = True

    def error(self, excess: Tensor, move: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the estimated error of each step, (batch, remaining steps); infinity if its residual is too large.

        Args:
            excess: The residual of each step, in tolerances.
            move: The change of each step in the next iteration, in tolerances.
            rows: The sequences that they belong to; None for all.
        """
        assert self.contraction is not None
        error = self.contraction.part(rows, 0).error(move, self.steps)
        return torch.where(excess <= (1 if self.is_rate_known else self.rounding), error, torch.inf)

    def drop(self, count: int) -> None:
        """Exclude steps that have converged in all sequences.

        Args:
            count: The number of steps, from the last.
        """
        assert self.contraction is not None
        self.contraction = self.contraction.part(None, count)


def _largest_ratio(values: Tensor, limits: Tensor) -> Tensor:
    """Return the largest |values| / limits of each step, (batch, time), computed for a few sequences at a time.

    Args:
        values, limits: (batch, time, n).
    """
    rows = max(1, WORKING_SET // max(1, values[:1].numel()))
    return torch.cat([(a / b).abs_().amax(-1) for a, b in zip(values.split(rows), limits.split(rows), strict=True)])


class Backward:
    """Backward pass: solves for g, over the time axis of the system.

    Args:
        adjoint: The tolerance and the maximum number of iterations.
        cell: The cell of the system.
        system: The equations, in tensors that may carry a graph.
        linearize, block: As in `Implicit.attach`; over several processes there are no blocks.
    """

    def __init__(
        self,
        adjoint: Implicit,
        cell: Cell,
        system: System,
        linearize: Callable[[System, Tensor], Transition] | None,
        block: int | None = None,
    ):
        self.adjoint = adjoint
        self.cell = cell
        self.linearize = linearize
        self.block = block or max(1, system.steps)
        self.has_initial_gradient = system.initial.requires_grad or system.reset_state.requires_grad
        with torch.no_grad():
            self.system = system.detach(make_step(cell))
            self.device_pass = _find_device_pass(cell, self.system)

    def solve(self, gradient: Tensor, states: Tensor) -> Tensor:
        """Return g from dL/dx, solved block by block from the last to the first.

        Args:
            gradient: dL/dx, (batch, time, n), of this process.
            states: (batch, time, n), of this process.
        """
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
        if not left:
            return
        axis, stop = part.axis, part.axis.total(part.steps)
        incoming = torch.zeros_like(known[:, :1])  # the gradient from the next process
        for rank, length in reversed(list(enumerate(axis.lengths(part.steps)))):
            stop -= length
            if rank == axis.rank:
                for t in reversed(range(max(0, min(length, left - stop)))):
                    g[:, t] = known[:, t]
                    if t + 1 < length:
                        self._pull_back(part, states, g, slice(t + 1, t + 2), g[:, t : t + 1])
                    else:
                        g[:, t:] += incoming
                incoming = self._leaving_gradient(part, states, g)
            incoming = axis.broadcast(incoming, rank)

    def _iterate(self, part: System, states: Tensor, known: Tensor, g: Tensor, rtol: float) -> int:
        """Fill g of a block by iterations. Return the number of leading steps, of all processes, not yet converged.

        One process drops the steps that have converged. Several keep all of theirs, because every process must take
        part in each iteration.
        """
        axis, left = part.axis, part.steps  # left: the leading steps of this process that are iterated
        unconverged = total = axis.total(part.steps)
        iterations = total if self.adjoint.max_iterations is None else self.adjoint.max_iterations
        if self.linearize is None or not iterations:
            return total
        entering = part.entering_states(states)
        with torch.no_grad():
            scan_back = axis.make_scan_back(self.linearize(part, entering), part.reset, part.steps)
        buffer = known.clone(memory_format=torch.contiguous_format)
        g.copy_(scan_back(buffer))
        rises, previous = 0, math.inf
        progress = _Progress(rtol, total, g.dtype)
        tolerance = _GradientTolerance(rtol, part, entering, self.has_initial_gradient)
        del entering  # as large as the states
        for _ in range(iterations):
            residual = torch.sub(known[:, :left], g[:, :left], out=buffer[:, :left])
            self._pull_back_all(part, states, g, left, residual)
            size, allowed = largest(residual), tolerance.allowed(g, left)
            excess = _largest_ratio(residual, allowed)
            suspected = progress.mark_stagnating(excess.flip(1)).flip(1)
            cancelling, whole = tolerance.find_cancelling(g, size, suspected)
            worst, any_cancelling = axis.maximum(torch.stack((size.amax(), cancelling.any().to(size)))).tolist()
            if any_cancelling:
                rounding = self._rounding(part, states, known, g)[:, :left].mul_(MARGIN)
                torch.minimum(rounding, whole, out=rounding).masked_fill_(~cancelling.unsqueeze(-1), 0.0)
                torch.maximum(allowed, rounding, out=allowed)
                del rounding
                excess = _largest_ratio(residual, allowed)
            excess = axis.later_maximum(excess)
            rises = rises + 1 if worst > previous else 0
            previous = worst
            if rises == PATIENCE or not math.isfinite(worst):
                break
            move = scan_back(residual)
            g[:, :left] += move
            progress.update(excess.flip(1))
            error = progress.error(excess.flip(1), _largest_ratio(move, allowed).flip(1)).flip(1)
            drifting = (excess <= 1).all(1) & ~(error <= progress.drift).all(1) & error.isfinite().all(1)
            for rows in split_rows(axis.maximum(drifting.to(torch.uint8)).nonzero().squeeze(-1), total * g.shape[2]):
                some, (inside, outer, of) = (
                    select(part, rows),
                    (each.index_select(0, rows) for each in (states, known, g)),
                )
                raised = limit_accumulated(*self._accumulated(some, inside, outer, of, left), rtol, progress.drift)
                raised = torch.maximum(allowed.index_select(0, rows), raised.div_(progress.drift))
                size = _largest_ratio(move.index_select(0, rows), raised)
                explained = progress.error(excess.index_select(0, rows).flip(1), size.flip(1), rows).flip(1)
                error[rows] = torch.where(drifting[rows].unsqueeze(-1), explained, error[rows])
            count = axis.count_trailing((error <= progress.drift).all(0))
            if axis.is_split:
                unconverged = total - count
            else:
                progress.drop(count)
                unconverged = left = left - count
            if not unconverged:
                break
        return unconverged

    def _rounding(self, part: System, states: Tensor, known: Tensor, g: Tensor) -> Tensor:
        """Return the residual that the rounding of g, of the states and of dL/dx alone may cause, (batch, time, n)."""
        eps, rounding = torch.finfo(g.dtype).eps, torch.empty_like(g)
        every = torch.arange(len(g), device=g.device)
        for rows in split_rows(every, part.axis.total(part.steps) * g.shape[2]):
            some, at, of = select(part, rows), states.index_select(0, rows), g.index_select(0, rows)
            pulled, change = torch.zeros_like(of), known.index_select(0, rows).abs().mul_(eps)
            largest_change = torch.zeros_like(of)
            self._pull_back_all(some, at, of, part.steps, pulled)
            for seed in range(PROBES):
                factor, found = random_signs(of, seed, reverse=True).mul_(eps).add_(1), pulled.neg()
                self._pull_back_all(some, at * factor, of * factor, part.steps, found)
                torch.maximum(largest_change, found.abs_(), out=largest_change)
            rounding[rows] = change.add_(largest_change)
        return rounding

    def _accumulated(self, part: System, states: Tensor, known: Tensor, g: Tensor, left: int) -> tuple[Tensor, Tensor]:
        """Return the recent scale of accumulated rounding errors, and the largest |g| since the last reset."""
        assert self.linearize is not None
        rounding, cut = self._rounding(part, states, known, g)[:, :left], mark_before_reset(part.reset)
        with torch.no_grad():
            transition = self.linearize(part, part.entering_states(states))
        total = accumulate(rounding, part.axis.make_scan_back(transition, part.reset, part.steps), reverse=True)
        del rounding
        total = recent_scale(total, None if cut is None else cut[:, :left], reverse=True)
        return total, recent_scale(g, cut, reverse=True, half_life=math.inf)[:, :left]

    def _pull_back_all(self, part: System, states: Tensor, g: Tensor, left: int, to: Tensor) -> None:
        """Add J'_{t+1} g_{t+1} to `to` for the first `left` steps t, also that of the next process."""
        self._pull_back(part, states, g, slice(1, min(left + 1, part.steps)), to)
        if part.axis.is_split:
            to[:, -1:] += part.axis.receive_from_next(self._leaving_gradient(part, states, g))

    def _leaving_gradient(self, part: System, states: Tensor, g: Tensor) -> Tensor:
        """Return J'g of the first step, the gradient that this process passes to the previous one, (batch, 1, n)."""
        leaving = torch.zeros_like(g[:, :1])
        if part.axis.is_split:
            self._pull_back(part, states, g, slice(0, 1), leaving)
        return leaving

    def _pull_back(self, part: System, states: Tensor, g: Tensor, times: slice, to: Tensor) -> None:
        """Add J'_t g_t for t in `times`, the gradient that each step passes back, to `to`; nothing at a reset."""
        length = chunk_length(states)
        for start in range(times.start, times.stop, length):
            at = slice(start, min(start + length, times.stop))
            here = part.slice_steps(states, at.start, at.stop)
            pulled = self._differentiate_steps(here, here.entering_states(states[:, at]), g[:, at])
            if pulled is None:
                continue  # a step that does not depend on the state
            if part.reset is not None:
                pulled = pulled.masked_fill(part.reset[:, at].unsqueeze(-1), 0.0)
            to[:, start - times.start : at.stop - times.start] += pulled

    def _differentiate_steps(self, part: System, entering: Tensor, g: Tensor) -> Tensor | None:
        """Return J'g of every step, by a kernel if there is one; None if no step depends on the state."""
        if self.device_pass is not None:
            return self.device_pass.pull_back(entering, part.step_inputs[0], g)
        with torch.enable_grad():
            point = entering.detach().requires_grad_()
            values = part.step(point, *part.step_inputs)
            if not values.requires_grad:
                return None
            (pulled,) = torch.autograd.grad(values, point, g, materialize_grads=True)
        return pulled

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


def _find_device_pass(cell: Cell, system: System) -> DevicePass | None:
    """Return the kernels for the step of a cell on a GPU; None if there are none."""
    make_pass = cell.structure().newton_pass
    if make_pass is None or not _gpu.is_gpu(system.initial.device) or len(system.step_inputs) != 1:
        return None
    found = make_pass(system.initial, system.step_inputs[0], diagonal=False)
    return found if isinstance(found, DevicePass) else None


class _SequentialRun(nn.Module):
    """Sequential run of a system whose tensors are passed as arguments."""

    def __init__(self, cell: Cell):
        super().__init__()
        self.cell = cell

    def forward(self, system: System, drive: Tensor, initial: Tensor, reset_state: Tensor) -> Tensor:
        replaced = System(make_step(self.cell), (drive,), initial, reset_state, system.reset, system.lengths)
        return replaced.run()
