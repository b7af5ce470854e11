"""The backward pass of `adjoints.Implicit`: solve g_t = J'_{t+1} g_{t+1} + dL/dx_t, in parallel over time."""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..cells.base import Cell
from ..cells.structure import make_step
from ..errors import IncompatibleError
from ..ops import _buffers, _gpu
from ..ops._torch_state import separate_views
from ..ops.adpt_step import DevicePass
from ..ops.tolerance import largest, recent_scale
from .convergence_test import default_rtol, measure_rate
from .gradient_tolerance import GradientProgress, GradientTolerance, largest_ratio
from .rounding import PROBES, accumulate, limit_accumulated, random_signs, select, split_rows
from .system import System, chunk_length
from .time_axis import mark_before_reset
from .transitions import Transition

if TYPE_CHECKING:
    from .adjoints import Implicit

__all__ = ["Backward"]

PATIENCE = 3  # rises of the residual in a row after which the iterations for a gradient stop
MARGIN = 8  # how many times its measured size the rounding error of a residual may be


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
        adjoint: "Implicit",
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
        tolerance = GradientTolerance(rtol, part, entering, self.has_initial_gradient)
        del entering  # as large as the states
        buffer = known.clone(memory_format=torch.contiguous_format)
        g.copy_(scan_back(buffer))
        limits = torch.empty_like(buffer)
        rises, previous = 0, math.inf
        progress = GradientProgress(rtol, axis, g)
        for _ in range(iterations):
            later = None
            if axis.is_split:
                leaving = self._leaving_gradient(part, states, g)
                later = axis.receive_from_later(leaving, g, tolerance.weigh(g), part.reset)
            residual = torch.sub(known[:, :left], g[:, :left], out=buffer[:, :left])
            self._pull_back(part, states, g, slice(1, min(left + 1, part.steps)), residual)
            if later is not None:
                residual[:, -1:] += later.gradient
            size, allowed = largest(residual), tolerance.allowed(g, later, limits[:, :left])
            own_excess = largest_ratio(residual, allowed)
            suspected = progress.mark_stagnating(own_excess.flip(1)).flip(1)
            cancelling, whole = tolerance.find_cancelling(g, size, suspected)
            reported = torch.cat((size.amax().reshape(1), cancelling.any(1).to(size)))
            excess, reported = axis.later_maximum(own_excess, reported)
            worst, *has_cancelling = reported.tolist()
            if any(has_cancelling):
                rows = reported[1:].nonzero().squeeze(-1)
                self._allow_rounding(part, states, known, g, whole, cancelling, rows, allowed)
                excess, _ = axis.later_maximum(largest_ratio(residual, allowed), reported[:0])
            rises = rises + 1 if worst > previous else 0
            previous = worst
            if rises == PATIENCE or not math.isfinite(worst):
                break
            one_sign = progress.sum_one_sign(residual, allowed, excess)
            move = scan_back(residual)
            g[:, :left] += move
            progress.update(excess.flip(1))
            change = largest_ratio(move, allowed)
            error = progress.error(excess.flip(1), change.flip(1)).flip(1)
            drifting = (excess <= 1).all(1) & ~(error <= progress.slack).all(1) & error.isfinite().all(1)
            count, flags = axis.count_trailing((error <= progress.slack).all(0), drifting.long())
            if bool(flags.any()):
                for rows in split_rows(flags.nonzero().squeeze(-1), total * g.shape[2]):
                    raised = self._raise_accumulated(part, states, known, g, allowed, rows, rtol, progress.slack)
                    size = largest_ratio(move.index_select(0, rows), raised)
                    explained = progress.error(excess.index_select(0, rows).flip(1), size.flip(1), rows).flip(1)
                    error[rows] = torch.where(drifting[rows].unsqueeze(-1), explained, error[rows])
                    change[rows] = torch.where(drifting[rows].unsqueeze(-1), size, change[rows])
                    del raised
                count, _ = axis.count_trailing((error <= progress.slack).all(0), flags[:0])
            del move
            count = progress.count_not_drifting(
                count, excess.flip(1), change.flip(1), one_sign, lambda: self._measure_rate(part, states, g, scan_back)
            )
            if axis.is_split:
                unconverged = total - count
            else:
                progress.drop(count)
                unconverged = left = left - count
            if not unconverged:
                break
        return unconverged

    def _measure_rate(self, part: System, states: Tensor, g: Tensor, scan_back: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the rate at which the iteration contracts an error of g, (batch,)."""

        def advance(error: Tensor) -> Tensor:
            offset = error.neg()
            self._pull_back_all(part, states, error, part.steps, offset)
            return error + scan_back(offset)

        scale = recent_scale(g, mark_before_reset(part.reset), reverse=True, half_life=math.inf)
        return measure_rate(advance, scale, part.axis.maximum, reverse=True)

    def _allow_rounding(
        self,
        part: System,
        states: Tensor,
        known: Tensor,
        g: Tensor,
        whole: Tensor,
        cancelling: Tensor,
        rows: Tensor,
        allowed: Tensor,
    ) -> None:
        """Raise the tolerances of cancelling steps of the sequences `rows` to the rounding error, in place."""
        for at in split_rows(rows, part.axis.total(part.steps) * g.shape[2]):
            some, inside, outer, of = self._select(part, at, states, known, g)
            rounding = self._rounding(some, inside, outer, of)[:, : allowed.shape[1]].mul_(MARGIN)
            torch.minimum(rounding, whole[at], out=rounding).masked_fill_(~cancelling[at].unsqueeze(-1), 0.0)
            allowed[at] = torch.maximum(allowed[at], rounding)

    def _raise_accumulated(
        self,
        part: System,
        states: Tensor,
        known: Tensor,
        g: Tensor,
        allowed: Tensor,
        rows: Tensor,
        rtol: float,
        drift: float,
    ) -> Tensor:
        """Return the tolerances of the sequences `rows`, raised to accumulated rounding errors."""
        left = allowed.shape[1]
        some, inside, outer, of = self._select(part, rows, states, known, g)
        raised = limit_accumulated(*self._accumulated(some, inside, outer, of, left), rtol, drift).div_(drift)
        return torch.maximum(allowed.index_select(0, rows), raised, out=raised)

    def _select(self, part: System, rows: Tensor, *tensors: Tensor) -> tuple[Any, ...]:
        """Return the system and (batch, time, n) tensors of the sequences `rows`."""
        return select(part, rows), *(each.index_select(0, rows) for each in tensors)

    def _rounding(self, part: System, states: Tensor, known: Tensor, g: Tensor) -> Tensor:
        """Return the residual that the rounding of g, of the states and of dL/dx alone may cause, (batch, time, n)."""
        eps = torch.finfo(g.dtype).eps
        pulled, rounding = torch.zeros_like(g), torch.zeros_like(g)
        self._pull_back_all(part, states, g, part.steps, pulled)
        for seed in range(PROBES):
            factor, found = random_signs(g, seed, reverse=True).mul_(eps).add_(1), pulled.neg()
            self._pull_back_all(part, states * factor, g * factor, part.steps, found)
            torch.maximum(rounding, found.abs_(), out=rounding)
            del factor, found
        return rounding.add_(known.abs().mul_(eps))

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
