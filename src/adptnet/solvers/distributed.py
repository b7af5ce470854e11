"""Parallel-in-time solving over processes: each rank of a `torch.distributed` group holds a chunk of the sequence.

The loop is that of `Newton`, over a `RankedTimeAxis`. In each iteration a rank sends the affine map from the state that
enters its chunk to the state that leaves it, its last state, and its residual. All ranks then have the same information
and take the same branch.
"""

import dataclasses
import functools
import math
import secrets
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._validate import check_dtype
from ..cells.base import ADPTState, Cell, count_positions
from ..errors import DistributedError, IncompatibleError, InputError
from .adjoints import Adjoint, Implicit
from .base import Solution, Solver
from .distributed_adjoint import attach
from .gradient_solve import Backward
from .newton import Newton
from .parallel import check_guess, full_precision, is_transform_active
from .problem import make_problem, resolve_system
from .ranks import RankedTimeAxis, Ranks
from .step_check import check_step

__all__ = ["TimeParallel", "sum_gradients"]


class TimeParallel(Solver):
    """Newton solver with the time axis split over the ranks of a process group, in the order of the ranks.

    Each rank calls it with its own chunk of the inputs, of at least one step, and gets its chunk of the states. `guess`
    and `reset` are also those of the chunk. `state` is the state that enters the first step of rank 0; the other ranks
    may omit it. Everything else in the solution, including `final`, describes the whole sequence and is the same on all
    ranks.

    The gradient is that of the sum of the losses of all ranks. Every rank must call backward; a rank without a loss of
    its own calls `(0 * solution.states).sum().backward()`. Each rank computes its own part of the gradient of the
    parameters, and `sum_gradients` adds the parts.

    Args:
        newton: The solver, undamped or with `Scale` or `Adaptive`.
        group: The process group; all ranks if not given.
    """

    def __init__(self, newton: Newton, group: dist.ProcessGroup | None = None):
        if not isinstance(newton, Newton):
            raise InputError(f"TimeParallel({newton!r}): needs one of the Newton solvers. Pass solvers.ConvDEER().")
        if not newton.damping.supports_ranks:
            raise IncompatibleError(
                f"TimeParallel({newton!r}): {newton.damping!r} is not implemented over several ranks. "
                "Use no damping, solvers.Scale(0.99) or solvers.Adaptive()."
            )
        if not newton.linearization.supports_ranks:
            raise IncompatibleError(
                f"TimeParallel({newton!r}): over several ranks only one mean of M or J for all steps is implemented. "
                "Pass solvers.KoopmanDEER()."
            )
        self.newton = newton
        self.group = group

    def __call__(
        self,
        cell: nn.Module,
        inputs: Tensor,
        state: Any = None,
        *,
        guess: Tensor | None = None,
        lengths: Tensor | None = None,
        reset: Tensor | None = None,
        adjoint: Adjoint | None = None,
    ) -> Solution:
        cell, inputs, state, reset = resolve_system(cell, inputs, state, reset)
        ranks = Ranks(self.group)
        with torch.autocast(inputs.device.type, enabled=False), full_precision():
            with ranks.synchronize_errors() as calls:
                _check_supported(lengths, adjoint)
                calls.own = self._describe_call(cell, inputs, state, guess, reset, adjoint)
            _check_agreement(calls.every)
            axis = RankedTimeAxis(ranks, [call["steps"] for call in calls.every])
            with ranks.synchronize_errors() as needs_gradient:
                entering = _entering_state(cell, inputs, state, calls.every[: ranks.rank])
                problem = make_problem(cell, inputs, entering, None, reset, adjoint)
                guess = check_guess(guess, problem)
                system = dataclasses.replace(problem.make_system(cell), axis=axis)
                if self.newton.check:
                    check_step(cell, system)
                needs_gradient.own = system.part(None, 0, system.initial, 1).run().requires_grad
            with torch.no_grad():
                solved = self.newton.solve_system(cell, system.detach(), guess)
                ends = ranks.all_gather(solved.states[:, -1])
            states, final, outcome = solved.states, ends[-1], solved.outcome
            position = _position_after(calls.every).to(inputs.device)
            if not states.numel():
                states = system.run()  # empty, but with a graph
            elif any(needs_gradient.every):
                implicit = adjoint if isinstance(adjoint, Implicit) else Implicit()
                if axis.rank:
                    system = dataclasses.replace(system, initial=ends[axis.rank - 1])
                backward = Backward(implicit, cell, system, functools.partial(self.newton.linearize, cell))
                states, final = attach(backward, ranks, system, states, final, calls.every[0]["token"])
        return Solution(
            states=states if problem.batched else states.squeeze(0),
            final=final if problem.batched else final.squeeze(0),
            position=position if problem.batched else position.squeeze(0),
            results=solved.results,
            iterations=outcome.iterations,
            residual=outcome.residual,
            converged_steps=outcome.converged_steps,
            solver=self,
            cell=cell,
            history=outcome.history,
        )

    def _describe_call(
        self,
        cell: Cell,
        inputs: Tensor,
        state: Tensor | ADPTState | None,
        guess: Tensor | None,
        reset: Tensor | None,
        adjoint: Adjoint | None,
    ) -> dict[str, Any]:
        """Return the arguments that the ranks must agree on, and those of each rank that all must know."""
        if inputs.dim() not in (2, 3) or not inputs.shape[-2]:
            raise InputError(
                f"inputs have shape {tuple(inputs.shape)}; each rank needs a chunk (batch, time, features) or "
                "(time, features) of one step or more. Use fewer ranks for a sequence this short."
            )
        newton = self.newton
        batch, steps = 1 if inputs.dim() == 2 else inputs.shape[0], inputs.shape[-2]
        since_reset = [-1] * batch  # steps from the last reset of the chunk to its end; -1 without a reset
        if reset is not None and (marks := torch.as_tensor(reset)).numel() == batch * steps:
            marks = marks.reshape(batch, steps).bool()
            since = count_positions(torch.zeros(batch, dtype=torch.int64, device=marks.device), steps, marks)[:, -1] + 1
            since_reset = torch.where(marks.any(1), since, -1).tolist()
        weights = [parameter.detach().double().sum() for parameter in cell.parameters()]
        return {
            "agree": {
                "a batch of": batch,
                "a state of size": cell.state_size,
                "the dtype": str(check_dtype(inputs, cell.dtype)),
                "the cell": f"{type(cell).__name__} of {len(weights)} parameters",
                "the solver": f"{newton!r}, patience={newton.patience}, on_failure={newton.on_failure!r}",
                "the adjoint": repr(adjoint),
                "gradients": torch.is_grad_enabled(),
                "a guess": guess is not None,
            },
            "weights": torch.stack(weights).tolist() if weights else [],
            "steps": steps,
            "steps since reset": since_reset,
            "position": state.position.reshape(-1).tolist() if isinstance(state, ADPTState) else [0] * batch,
            "token": secrets.randbits(62),
        }

    def __repr__(self) -> str:
        return f"TimeParallel({self.newton})"


def _check_supported(lengths: Tensor | None, adjoint: Adjoint | None) -> None:
    """Raise `IncompatibleError` for options that `TimeParallel` does not support."""
    if lengths is not None:
        raise IncompatibleError(
            "TimeParallel takes no lengths=: all sequences end with the last rank. Pad them, and use the states of "
            "each sequence up to its own end."
        )
    if adjoint is not None and not isinstance(adjoint, Implicit):
        raise IncompatibleError(f"TimeParallel differentiates by adjoints.Implicit(); got {adjoint!r}. Drop adjoint=.")
    if is_transform_active() or torch.compiler.is_compiling():
        raise IncompatibleError(
            "TimeParallel runs eagerly and in reverse mode: call it outside torch.compile, torch.func and forward mode."
        )


def _check_agreement(calls: list[dict[str, Any]]) -> None:
    """Raise `DistributedError` if the ranks were called with different arguments."""
    for rank, call in enumerate(calls):
        for name, value in call["agree"].items():
            if value != calls[0]["agree"][name]:
                raise DistributedError(
                    f"the ranks differ: {name} {calls[0]['agree'][name]} on rank 0, but {value} on rank {rank}. "
                    "All ranks need the same arguments, except for their chunks of time."
                )
        for one, other in zip(calls[0]["weights"], call["weights"], strict=True):
            if not math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6) and not math.isnan(one):
                raise DistributedError(
                    f"the parameters of the cell on rank {rank} are not those on rank 0. Call torch.manual_seed(0) "
                    "before building it, or broadcast them: for p in cell.parameters(): "
                    "torch.distributed.broadcast(p.data, 0)."
                )


def _entering_state(
    cell: Cell, inputs: Tensor, state: Tensor | ADPTState | None, before: list[dict[str, Any]]
) -> Tensor | ADPTState | None:
    """Return the state that enters this rank, as far as it is known before the solve.

    On rank 0 that is `state`. On other ranks it is only the position, with the initial state as a placeholder.
    """
    if not before:
        return state
    batch = before[0]["agree"]["a batch of"]
    if len(before[0]["position"]) != batch:
        return None  # rank 0 raises the error
    placeholder = cell.initial_state(batch, device=inputs.device, dtype=check_dtype(inputs, cell.dtype))
    return ADPTState(placeholder, _position_after(before).to(inputs.device))


def _position_after(calls: list[dict[str, Any]]) -> Tensor:
    """Return the position of the step after the chunks of these ranks, (batch,)."""
    position = torch.tensor(calls[0]["position"], dtype=torch.int64)
    for call in calls:
        since_reset = torch.tensor(call["steps since reset"], dtype=torch.int64)
        position = torch.where(since_reset >= 0, since_reset, position + call["steps"])
    return position


def sum_gradients(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Sum the gradients of all ranks, in place. Call it after backward and before the step of the optimizer.

    A missing gradient counts as zero.

    Args:
        module: The module whose parameters have the gradients.
        group: The process group; all ranks if not given.
    """
    ranks = Ranks(group)
    for parameter in module.parameters():
        if parameter.requires_grad:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = ranks.all_sum(own)
