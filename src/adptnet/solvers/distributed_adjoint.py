"""The gradient of a solve over ranks: g_t = J'_{t+1} g_{t+1} + dL/dx_t, with each rank holding its chunk of g.

As `adjoints.Implicit` solves it on one rank: J' is applied exactly, the solver's transition only makes it parallel.
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
from ..ops.tolerance import HALF_LIFE
from .adjoints import PATIENCE, Implicit, Progress, gradient_tolerance
from .fixed_point import default_rtol
from .parallel import full_precision
from .ranks import Line
from .system import System, stretch
from .transitions import Transition

__all__ = ["Search", "attach"]


class Search(NamedTuple):
    """What the search for g needs of the solve."""

    cell: Cell
    line: Line
    linearise: Callable[[Cell, System, Tensor, Line], Transition]
    adjoint: Implicit


def attach(search: Search, system: System, states: Tensor, final: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """The chunk of the states, and the last state of all, with their gradient.

    Args:
        search: How g is found.
        system: The equations of this rank, in tensors that may carry a graph.
        states: That solve them, without one.
        final: The last state of the last rank.
        token: Of this solve, the same on all ranks.
    """
    length = stretch(states)
    values = []
    for start, drive in zip(range(0, system.steps, length), system.givens[0].split(length, 1), strict=True):
        part = dataclasses.replace(system.between(states, start, start + length), givens=(drive,))
        inside = states[:, start : start + length]
        values.append(checkpoint(_evaluated, part, inside, use_reentrant=False, preserve_rng_state=False))
        values[-1].untyped_storage().resize_(0)  # only its graph is needed; the numbers are those of `states`
    with torch.no_grad():
        step = search.cell.stepper()
    givens, initial, fresh = (system.givens[0].detach(),), system.initial.detach(), system.fresh.detach()
    constant = dataclasses.replace(system, step=step, givens=givens, initial=initial, fresh=fresh)
    # A rank all of whose own is constant has to take part in backward as well: for the others' sake.
    alive = torch.zeros((), requires_grad=True)
    attached: tuple[Tensor, Tensor] = _Attach.apply(  # type: ignore[no-untyped-call]
        states, final, alive, _Backward(search, constant, token), *values
    )
    return attached


def _evaluated(system: System, states: Tensor) -> Tensor:
    return system.step(system.entering(states), *system.givens)


class _Attach(torch.autograd.Function):
    """The identity on `states` and `final`; backwards, g goes on to f at the states, the last inputs."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, final: Tensor, alive: Tensor, backward: "_Backward", *values: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.backward_pass = backward
        ctx.lengths = [part.shape[1] for part in values]
        ctx.save_for_backward(states)
        return states.view_as(states), final.view_as(final)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise IncompatibleError(
                "TimeParallel has no second derivatives. Drop create_graph=True, or solve on one rank."
            )
        (states,) = ctx.saved_tensors
        with full_precision():
            found = ctx.backward_pass.solve(states, *gradients)
        return None, None, None, None, *found.split(ctx.lengths, 1)


class _Backward:
    """The search for g on this rank."""

    def __init__(self, search: Search, system: System, token: int):
        self.search = search
        self.system = system
        self.token = token
        self.line = search.line
        self.ranks = search.line.ranks
        self.is_last = self.ranks.here == self.ranks.count - 1

    def solve(self, states: Tensor, gradient: Tensor, final_gradient: Tensor) -> Tensor:
        """g from dL/dx."""
        token = torch.tensor(self.token, device=states.device)
        if any(int(other) != self.token for other in self.ranks.gathered(token)):
            raise DistributedError(
                "the ranks go backward through different solves. Call backward on every rank once for each loss, of "
                "the same graph; on one without a loss: (0 * solution.states).sum().backward()."
            )
        known = gradient.clone()
        handed = self.ranks.summed(final_gradient)  # the ranks may each have a loss of the final state
        if self.is_last:
            known[:, -1] += handed
        g, left = self._iterated(states, known)
        if left:
            self._finish(states, known, g, left)
        return g

    def _iterated(self, states: Tensor, known: Tensor) -> tuple[Tensor, int]:
        """g by iterations, and how many steps of the whole, counted from the first, are not known to be right."""
        search, ranks, reset = self.search, self.ranks, self.system.reset
        total, most, rtol = self.line.total, search.adjoint.max_iterations, search.adjoint.rtol
        if most == 0:
            return known.clone(), total
        rtol = default_rtol(known.dtype) if rtol is None else rtol
        transition = search.linearise(search.cell, self.system, self.system.entering(states), self.line)
        g = ranks.scan_back(transition, known.clone(), reset)
        cut = _before_reset(reset)
        rises, previous, left = 0, math.inf, total
        progress = Progress(rtol, total, g.dtype)
        for _ in range(total if most is None else most):
            pulled = self._pulled(states, g, 0)
            edges = ranks.gathered(pulled[:, 0])
            after = torch.zeros_like(edges[0]) if self.is_last else edges[ranks.here + 1]
            residual = known - g + torch.cat((pulled[:, 1:], after[:, None]), 1)
            allowed = gradient_tolerance(g, rtol, cut, self._later_scale(g, reset))
            off, excess = residual.abs().amax(-1), (residual.abs() / allowed).amax(-1)
            move = ranks.scan_back(transition, residual, reset)
            g += move
            shift = (move.abs() / allowed).amax(-1)
            right = progress.right(self._raised(excess).flip(1), shift.flip(1)).flip(1).all(0)
            worst, left = self._agreed(off, right)
            rises = rises + 1 if worst > previous else 0
            previous = worst
            if not left or rises == PATIENCE or not math.isfinite(worst):
                break
        return g, left

    def _raised(self, excess: Tensor) -> Tensor:
        """Return `excess` (batch, time) raised to the largest of the ranks after."""
        every = self.ranks.gathered(excess.nan_to_num(torch.inf, torch.inf).amax(-1, keepdim=True))
        later = every[self.ranks.here + 1 :]
        return torch.maximum(excess, torch.stack(later).amax(0)) if later else excess

    def _later_scale(self, g: Tensor, reset: Tensor | None) -> Tensor:
        """Return the recent scale of g (batch, n) after this rank, from that at the first step of each rank."""
        fresh = g.new_zeros(len(g), 1) if reset is None else reset.any(1, keepdim=True).to(g)
        first = g.new_zeros(len(g), 1) if reset is None else reset[:, :1].to(g)
        own = gradient_tolerance(g, 1.0, _before_reset(reset))[:, 0]
        scale = torch.zeros_like(own)
        every = self.ranks.gathered(torch.cat((own, fresh, first), -1))
        for length, message in list(zip(self.line.lengths, every, strict=True))[: self.ranks.here : -1]:
            size, ends, starts = message[:, :-2], message[:, -2:-1] > 0, message[:, -1:] > 0
            scale = torch.maximum(size, torch.where(ends, 0.0, scale * 0.5 ** (length / HALF_LIFE)))
            scale = torch.where(starts, 0.0, scale)  # nothing is handed back from a step with a reset
        return scale

    def _agreed(self, residual: Tensor, right: Tensor) -> tuple[float, int]:
        """Of all ranks, the largest residual, and how many steps, counted from the first, are not known to be right."""
        trailing = right.flip(0).long().cumprod(0).sum()
        worst = residual.amax() if residual.numel() else residual.new_zeros(())
        every = torch.stack(self.ranks.gathered(torch.stack((worst.double(), trailing.double()))))
        left = self.line.total
        for length, count in zip(reversed(self.line.lengths), reversed(every[:, 1].long().tolist()), strict=True):
            left -= count
            if count < length:
                break
        return float(every[:, 0].amax()), left

    def _finish(self, states: Tensor, known: Tensor, g: Tensor, left: int) -> None:
        """Does the first `left` steps one after another, rank after rank, from the last of them to the first."""
        stop, handed = self.line.total, torch.zeros_like(known[:, 0])
        for rank, length in reversed(list(enumerate(self.line.lengths))):
            stop -= length
            if rank == self.ranks.here:
                for t in reversed(range(max(0, min(length, left - stop)))):
                    g[:, t] = known[:, t]
                    g[:, t] += handed if t + 1 == length else self._pulled(states, g, t + 1, t + 2)[:, 0]
                handed = self._pulled(states, g, 0, 1)[:, 0]
            handed = self.ranks.told(handed, rank)

    def _pulled(self, states: Tensor, g: Tensor, start: int, stop: int | None = None) -> Tensor:
        """J'_t g_t for steps `start` to `stop`: what each hands back to the step before it, nothing at a reset."""
        stop, length = self.system.steps if stop is None else stop, stretch(states)
        pieces = []
        for first in range(start, stop, length):
            at = slice(first, min(first + length, stop))
            here = self.system.between(states, at.start, at.stop)
            with torch.enable_grad():
                point = here.entering(states[:, at]).detach().requires_grad_()
                values = here.step(point, *here.givens)
                (pulled,) = torch.autograd.grad(values, point, g[:, at], materialize_grads=True)
            pieces.append(pulled if here.reset is None else pulled.masked_fill(here.reset.unsqueeze(-1), 0.0))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _before_reset(reset: Tensor | None) -> Tensor | None:
    """Return whether each step is the last before a reset; of the last step of the rank, the next rank says so."""
    return None if reset is None else torch.cat((reset[:, 1:], torch.zeros_like(reset[:, :1])), 1)
