"""Gradient of a solve over ranks: g_t = J'_{t+1} g_{t+1} + dL/dx_t, where each rank holds its chunk of g.

The method is that of `adjoints.Implicit` on one rank: J' is applied exactly, and the transition of the solver makes the
iteration parallel over time.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..cells.base import Cell
from ..errors import DistributedError, IncompatibleError
from .adjoints import PATIENCE, Implicit, Progress, gradient_tolerance
from .convergence_test import default_rtol
from .parallel import full_precision
from .ranks import RankedTimeAxis
from .system import System, chunk_length
from .transitions import Transition

__all__ = ["AdjointContext", "attach"]


class AdjointContext(NamedTuple):
    """Data that the backward pass needs from the forward solve."""

    cell: Cell
    axis: RankedTimeAxis
    linearize: Callable[[Cell, System, Tensor], Transition]
    adjoint: Implicit


def attach(context: AdjointContext, system: System, states: Tensor, final: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """Return `states` and `final` with their gradient.

    Args:
        context: The cell, the ranks, the linearization and the tolerances.
        system: The equations of this rank, in tensors that may carry a graph.
        states: (batch, time, n), the solution on this rank, without a graph.
        final: (batch, n), the last state of the last rank.
        token: A number that identifies this solve, the same on all ranks.
    """
    length = chunk_length(states)
    values = []
    for start, drive in zip(range(0, system.steps, length), system.step_inputs[0].split(length, 1), strict=True):
        part = dataclasses.replace(system.slice_steps(states, start, start + length), step_inputs=(drive,))
        inside = states[:, start : start + length]
        values.append(checkpoint(_evaluate_step, part, inside, use_reentrant=False, preserve_rng_state=False))
        values[-1].untyped_storage().resize_(0)  # only the graph is needed; the values are those of `states`
    with torch.no_grad():
        step = context.cell.stepper()
    # Every rank must take part in backward, even if nothing on it requires a gradient.
    participate = torch.zeros((), requires_grad=True)
    attached: tuple[Tensor, Tensor] = _Attach.apply(  # type: ignore[no-untyped-call]
        states, final, participate, _Backward(context, system.detach(step), token), *values
    )
    return attached


def _evaluate_step(system: System, states: Tensor) -> Tensor:
    return system.step(system.entering_states(states), *system.step_inputs)


class _Attach(torch.autograd.Function):
    """The identity on `states` and `final`. Backward passes g on to f at the states, the last inputs."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, final: Tensor, participate: Tensor, backward: "_Backward", *values: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.backward_pass = backward
        ctx.lengths = [part.shape[1] for part in values]
        ctx.save_for_backward(states)
        return states.view_as(states), final.view_as(final)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise IncompatibleError(
                "TimeParallel does not support double backward. Drop create_graph=True, or solve on one rank."
            )
        (states,) = ctx.saved_tensors
        with full_precision():
            g = ctx.backward_pass.solve(states, *gradients)
        return None, None, None, None, *g.split(ctx.lengths, 1)


class _Backward:
    """Backward pass on this rank: solves for g."""

    def __init__(self, context: AdjointContext, system: System, token: int):
        self.context = context
        self.system = system
        self.token = token
        self.axis = context.axis
        self.ranks = context.axis.ranks
        self.is_last = self.ranks.rank == self.ranks.size - 1

    def solve(self, states: Tensor, gradient: Tensor, final_gradient: Tensor) -> Tensor:
        """Return g of this rank, from dL/dx of its states and of the final state."""
        token = torch.tensor(self.token, device=states.device)
        if any(int(other) != self.token for other in self.ranks.all_gather(token)):
            raise DistributedError(
                "the ranks call backward through different solves. Call backward on every rank once per loss, through "
                "the same solve; on a rank without a loss: (0 * solution.states).sum().backward()."
            )
        known = gradient.clone()
        total = self.ranks.all_sum(final_gradient)  # each rank may have a loss of the final state
        if self.is_last:
            known[:, -1] += total
        g, left = self._iterate(states, known)
        if left:
            self._finish(states, known, g, left)
        return g

    def _iterate(self, states: Tensor, known: Tensor) -> tuple[Tensor, int]:
        """Iterate for g. Return it, and the number of leading steps of all ranks that have not converged."""
        context, ranks, reset = self.context, self.ranks, self.system.reset
        total, adjoint = self.axis.total(self.system.steps), context.adjoint
        max_iterations, rtol = adjoint.max_iterations, adjoint.rtol
        if max_iterations == 0:
            return known.clone(), total
        rtol = default_rtol(known.dtype) if rtol is None else rtol
        transition = context.linearize(context.cell, self.system, self.system.entering_states(states))
        g = ranks.scan_back(transition, known.clone(), reset)
        cut = _is_before_reset(reset)
        rises, previous, left = 0, math.inf, total
        progress = Progress(rtol, total, g.dtype)
        for _ in range(total if max_iterations is None else max_iterations):
            pulled = self._pull_back(states, g, 0)
            after = self.axis.receive_from_next(pulled[:, 0])
            residual = known - g + torch.cat((pulled[:, 1:], after[:, None]), 1)
            later = self.axis.later_scale(gradient_tolerance(g, 1.0, cut)[:, 0], reset)
            allowed = gradient_tolerance(g, rtol, cut, later)
            worst = float(self.axis.maximum(residual.abs().amax() if residual.numel() else residual.new_zeros(())))
            excess = self.axis.later_maximum((residual.abs() / allowed).amax(-1))
            move = ranks.scan_back(transition, residual, reset)
            g += move
            shift = (move.abs() / allowed).amax(-1)
            right = progress.is_converged(excess.flip(1), shift.flip(1)).flip(1).all(0)
            left = total - self.axis.count_trailing(right)
            rises = rises + 1 if worst > previous else 0
            previous = worst
            if not left or rises == PATIENCE or not math.isfinite(worst):
                break
        return g, left

    def _finish(self, states: Tensor, known: Tensor, g: Tensor, left: int) -> None:
        """Compute g of the first `left` steps sequentially in reverse, one rank after another, in place."""
        stop, incoming = self.axis.total(self.system.steps), torch.zeros_like(known[:, 0])
        for rank, length in reversed(list(enumerate(self.axis.lengths(self.system.steps)))):
            stop -= length
            if rank == self.ranks.rank:
                for t in reversed(range(max(0, min(length, left - stop)))):
                    g[:, t] = known[:, t]
                    g[:, t] += incoming if t + 1 == length else self._pull_back(states, g, t + 1, t + 2)[:, 0]
                incoming = self._pull_back(states, g, 0, 1)[:, 0]
            incoming = self.ranks.broadcast(incoming, rank)

    def _pull_back(self, states: Tensor, g: Tensor, start: int, stop: int | None = None) -> Tensor:
        """Return J'_t g_t for steps `start` to `stop`, the gradient that each passes back; zero at a reset."""
        stop, length = self.system.steps if stop is None else stop, chunk_length(states)
        pieces = []
        for first in range(start, stop, length):
            at = slice(first, min(first + length, stop))
            here = self.system.slice_steps(states, at.start, at.stop)
            with torch.enable_grad():
                point = here.entering_states(states[:, at]).detach().requires_grad_()
                values = here.step(point, *here.step_inputs)
                (pulled,) = torch.autograd.grad(values, point, g[:, at], materialize_grads=True)
            pieces.append(pulled if here.reset is None else pulled.masked_fill(here.reset.unsqueeze(-1), 0.0))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _is_before_reset(reset: Tensor | None) -> Tensor | None:
    """Return whether each step is the last before a reset; False for the last step, which the next rank handles."""
    return None if reset is None else torch.cat((reset[:, 1:], torch.zeros_like(reset[:, :1])), 1)
