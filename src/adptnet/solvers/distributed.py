"""Parallel-in-time solving over processes: each rank of a `torch.distributed` group holds a chunk of the sequence.

The loop is that of `Newton`, written for the change of the states per iteration, δ_t = A_t δ_{t-1} + f(s_{t-1}) - s_t.
In each iteration a rank sends the affine map from the δ that enters its chunk to the δ that leaves it, its last state,
and its residual. All ranks then have the same information and take the same branch.
"""

import dataclasses
import math
import secrets
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._validate import check_dtype
from ..cells.base import ADPTState, Cell, count_positions
from ..errors import DistributedError, IncompatibleError, InputError, NotConverged
from ..ops.tolerance import remembered_scale
from .adjoints import Adjoint, Implicit
from .base import Result, Solution, Solver, count_finite_steps
from .damping import Adaptive, Scale, Undamped
from .distributed_adjoint import AdjointContext, attach
from .fixed_point import Contraction, History, IterationResult, allowed_drift, measure_residual, rounding_excess
from .linearizations import MeanConjugate, MeanRotation, compute_mean_matrix, diagonalize
from .newton import Newton
from .parallel import check_guess, full_precision, is_transform_active
from .policies import Finish, Raise
from .problem import make_problem
from .ranks import Ranks, TimeAxis
from .step_check import check_step
from .system import System
from .transitions import DenseTransition, Transition

__all__ = ["TimeParallel", "sum_gradients"]


class _RankIterate(NamedTuple):
    """An iterate on this rank, with its residual and its next change."""

    system: System  # with the state that enters this rank
    transition: Transition
    missing: Tensor  # (batch, time, n), f(s_{t-1}) - s_t
    move: Tensor  # (batch, time, n), the change that the undamped iteration would make
    excess: Tensor  # (batch, time), the residual in units of the tolerance
    shift: Tensor  # (batch, time), the change in units of the tolerance
    residual: Tensor  # (batch, time)

    def part(self, rows: Tensor) -> "_RankIterate":
        """Select the sequences `rows`."""
        system = self.system.part(rows, 0, self.system.initial.index_select(0, rows))
        return _RankIterate(system, self.transition.part(rows, 0), *(every.index_select(0, rows) for every in self[2:]))


class TimeParallel(Solver):
    """Newton solver with the time axis split over the ranks of a process group, in the order of the ranks.

    Each rank calls it with its own chunk of the inputs, of any length from 1, and gets its chunk of the states. `guess`
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
        if not isinstance(newton.damping, (Undamped, Scale, Adaptive)):
            raise IncompatibleError(
                f"TimeParallel({newton!r}): {newton.damping!r} is not implemented over several ranks. "
                "Use no damping, solvers.Scale(0.99) or solvers.Adaptive()."
            )
        mean = newton.linearization
        if isinstance(mean, MeanRotation) or (isinstance(mean, MeanConjugate) and mean.means > 1):
            raise IncompatibleError(
                f"TimeParallel({newton!r}): over several ranks only one mean of M for all steps is implemented. Pass "
                "solvers.KoopmanDEER()."
            )
        self.newton = newton
        self.group = group

    def __call__(
        self,
        cell: Cell,
        inputs: Tensor,
        state: Tensor | ADPTState | None = None,
        *,
        guess: Tensor | None = None,
        lengths: Tensor | None = None,
        reset: Tensor | None = None,
        adjoint: Adjoint | None = None,
    ) -> Solution:
        ranks = Ranks(self.group)
        with torch.autocast(inputs.device.type, enabled=False), full_precision():
            with ranks.synchronize_errors() as calls:
                _check_supported(lengths, adjoint)
                calls.own = self._describe_call(cell, inputs, state, guess, reset, adjoint)
            _check_agreement(calls.every)
            axis = TimeAxis(ranks, [call["steps"] for call in calls.every])
            with ranks.synchronize_errors() as needs_gradient:
                entering = _entering_state(cell, inputs, state, calls.every[: ranks.rank])
                problem = make_problem(cell, inputs, entering, None, reset, adjoint)
                guess = check_guess(guess, problem)
                system = problem.make_system(cell)
                if self.newton.check:
                    check_step(cell, system)
                needs_gradient.own = system.part(None, 0, system.initial, 1).run().requires_grad
            with torch.no_grad():
                detached = system.detach()
                results, outcome = self._apply_policy(detached, self._iterate(cell, detached, guess, axis), axis)
                ends = ranks.all_gather(outcome.states[:, -1])
            states, final = outcome.states, ends[-1]
            position = _position_after(calls.every).to(inputs.device)
            if not states.numel():
                states = system.run()  # empty, but with a graph
            elif any(needs_gradient.every):
                implicit = adjoint if isinstance(adjoint, Implicit) else Implicit()
                context = AdjointContext(cell, axis, self.linearize, implicit)
                token = calls.every[0]["token"]
                states, final = attach(context, axis.with_entering_state(system, ends), states, final, token)
        return Solution(
            states=states if problem.batched else states.squeeze(0),
            final=final if problem.batched else final.squeeze(0),
            position=position if problem.batched else position.squeeze(0),
            results=results,
            iterations=outcome.iterations,
            residual=outcome.residual,
            converged_steps=outcome.converged_steps,
            solver=self,
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

    def linearize(self, cell: Cell, system: System, entering: Tensor, axis: TimeAxis) -> Transition:
        """Return the transition of the steps of this rank.

        Args:
            cell: The cell of the system.
            system: The equations of this rank.
            entering: (batch, time, n), the states that enter its steps.
            axis: The time axis over all ranks.
        """
        linearization = self.newton.linearization
        if not isinstance(linearization, MeanConjugate):
            return linearization.transition(cell, system, entering)
        weight = torch.full_like(entering[..., :1], 1 / axis.total)
        own, symmetric = compute_mean_matrix(cell, entering, system.step_inputs[0], weight)
        mean = axis.ranks.all_sum(own)
        return diagonalize(mean) if symmetric else DenseTransition(mean.unsqueeze(1))

    def _initial_guess(self, cell: Cell, system: System, axis: TimeAxis) -> Tensor:
        """Return the default guess of this rank: the solution of the linear part of the cell, if it has one."""
        transition = cell.linear_transition(system.step_inputs[0])
        if transition is None:
            return self.newton.initial_guess(cell, system)
        offset = system.evaluate(system.initial.new_zeros((*system.step_inputs[0].shape[:2], cell.state_size)))
        return axis.ranks.scan(transition, offset, system.initial, system.reset)

    def _iterate(self, cell: Cell, system: System, guess: Tensor | None, axis: TimeAxis) -> IterationResult:
        """Run the loop of `fixed_point.solve` over ranks.

        Sequences are dropped when they have converged. Steps are not: the last rank would still have all of its own to
        compute, and the others would wait for it.
        """
        newton, fixed = self.newton, self.newton.fixed_iterations
        states = self._initial_guess(cell, system, axis) if guess is None else guess.clone()
        if not len(states):
            empty = torch.zeros(0, dtype=torch.int64, device=states.device)
            history = History(states.new_zeros(1, 0), empty.new_zeros(1, 0))
            return IterationResult(
                states, empty.bool(), empty.bool(), empty.bool(), empty, states.new_zeros(0), empty, history
            )
        least, patience = fixed or 1, math.inf if fixed or newton.patience is None else newton.patience
        drift = allowed_drift(newton.tolerance(states.dtype), axis.total, states.dtype)
        now = self._evaluate(cell, system, states, axis)
        contraction = Contraction(now.excess, rounding_excess(newton.tolerance(states.dtype), states.dtype))
        worst, reached = axis.reduce_progress(now.residual, (now.excess <= 1) & (now.shift <= drift))
        converged, rising = (torch.zeros_like(reached, dtype=torch.bool) for _ in range(2))
        finite = torch.ones_like(converged)
        iterations, residual = torch.zeros_like(reached), worst.clone()
        residuals, prefixes = [worst], [reached.clone()]
        rows, current = torch.arange(len(states), device=states.device), states
        first, rises, strength = worst, torch.zeros_like(reached), newton.damping.begin(states)
        for iteration in range(1, (fixed or newton.max_iterations or max(axis.total, 100)) + 1):
            if not len(rows):
                break
            previous = worst
            current = current + self._compute_change(now, strength, axis)
            now = self._evaluate(cell, now.system, current, axis)
            contraction.update(now.excess)
            right = (now.excess <= 1) & (contraction.error(now.shift, axis.total) <= drift)
            worst, prefix = axis.reduce_progress(now.residual, right)
            strength = newton.damping.adapt(strength, worst, previous)
            rises = torch.where(worst > previous, rises + 1, 0)
            given_up = (rises >= patience) & (worst > first)
            done = prefix == axis.total
            states[rows], iterations[rows], residual[rows], reached[rows] = current, iteration, worst, prefix
            converged[rows], rising[rows], finite[rows] = done, given_up, worst.isfinite()
            residuals.append(residual.clone())
            prefixes.append(reached.clone())
            stop = ((done | given_up) if iteration >= least else torch.zeros_like(done)) | ~worst.isfinite()
            if bool(stop.any()):
                keep = (~stop).nonzero().squeeze(-1)
                rows, current, worst, first, rises, strength = (
                    every.index_select(0, keep) for every in (rows, current, worst, first, rises, strength)
                )
                now, contraction = now.part(keep), contraction.part(keep, 0)
        history = History(torch.stack(residuals), torch.stack(prefixes))
        return IterationResult(states, converged, finite, rising, iterations, residual, reached, history)

    def _evaluate(self, cell: Cell, system: System, states: Tensor, axis: TimeAxis) -> _RankIterate:
        """Evaluate an iterate. The excess of a step is at least the largest on all previous ranks."""
        ranks, tolerance = axis.ranks, self.newton.tolerance(states.dtype)
        system = axis.with_entering_state(system, ranks.all_gather(states[:, -1]))
        recent = axis.recent_scale(remembered_scale(states, system.reset), system.reset)
        system = dataclasses.replace(system, recent_scale=recent)
        residual = measure_residual(system, states, tolerance)
        transition = self.linearize(cell, system, residual.entering, axis)
        missing = residual.values - states
        move = ranks.scan(transition, missing.clone(), torch.zeros_like(system.initial), system.reset)
        shift = (move.abs() / residual.allowed).amax(-1)
        excess = axis.prefix_maximum(residual.excess)
        return _RankIterate(system, transition, missing, move, excess, shift, residual.size)

    def _compute_change(self, now: _RankIterate, strength: Tensor, axis: TimeAxis) -> Tensor:
        """Return the change of the states in this iteration, damped."""
        damping = self.newton.damping
        if isinstance(damping, Undamped):
            return now.move
        factor = damping.scale if isinstance(damping, Scale) else 1 - strength[:, None, None]
        zero = torch.zeros_like(now.system.initial)
        return axis.ranks.scan(now.transition.scale(factor), now.missing, zero, now.system.reset)

    def _apply_policy(self, system: System, outcome: IterationResult, axis: TimeAxis) -> tuple[Tensor, IterationResult]:
        """Apply the failure policy, by the same branch on every rank. Return the results and the final states."""
        failed = ~outcome.converged
        results = torch.where(failed, int(Result.NOT_CONVERGED), int(Result.CONVERGED))
        results = torch.where(failed & (outcome.rising | ~outcome.finite), int(Result.DIVERGED), results)
        if not bool(failed.any()):
            return results, outcome
        policy = self.newton.on_failure
        if isinstance(policy, Raise):
            kinds = ", ".join(sorted({Result(int(result)).name for result in results[failed]}))
            raise NotConverged(
                f"{self} stopped after {int(outcome.iterations.max())} iterations ({kinds}): residual "
                f"{float(outcome.residual[failed].max()):.1e} in {int(failed.sum())} of {len(failed)} sequences; steps "
                f"before {int(outcome.converged_steps[failed].min())} of {axis.total} have converged. Raise "
                "max_iterations, damp with solvers.Scale(0.99), or pass on_failure=solvers.Finish()."
            )
        if isinstance(policy, Finish):
            _finish(system, outcome, axis)
            results = torch.where(failed, int(Result.FINISHED), results)
        finite = axis.count_prefix(count_finite_steps(outcome.states))
        non_finite = failed & (finite < axis.total)
        results = torch.where(non_finite, int(Result.NON_FINITE), results)
        if isinstance(policy, Finish):
            system = axis.with_entering_state(system, axis.ranks.all_gather(outcome.states[:, -1]))
            residual = measure_residual(system, outcome.states, self.newton.tolerance(outcome.states.dtype))
            worst, _ = axis.reduce_progress(residual.size, residual.excess <= 1)
            outcome = outcome._replace(
                residual=torch.where(non_finite, torch.nan, torch.where(failed, worst, outcome.residual)),
                converged_steps=torch.where(failed, finite, outcome.converged_steps),
            )
        return results, outcome

    def __repr__(self) -> str:
        return f"TimeParallel({self.newton})"


def _finish(system: System, outcome: IterationResult, axis: TimeAxis) -> None:
    """Compute the sequences that did not converge sequentially, one rank after another, in place."""
    ranks, rows = axis.ranks, (~outcome.converged).nonzero().squeeze(-1)
    begin, stop = int(outcome.converged_steps[rows].min()), 0
    last = system.initial.index_select(0, rows)
    for rank, length in enumerate(axis.lengths):
        stop += length
        if rank == ranks.rank and stop > begin:
            start = max(0, begin - (stop - length))
            before = outcome.states[rows, start - 1] if start else last
            outcome.states[rows, start:] = system.part(rows, start, before).run()
        last = ranks.broadcast(outcome.states[rows, -1], rank)


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
