"""Parallel in time over processes: each rank of a `torch.distributed` group holds a chunk of the sequence.

The loop is that of `Newton`, written for what an iteration adds to the states: δ_t = A_t δ_{t-1} + f(s_{t-1}) - s_t.
In each iteration a rank tells the others what its steps make of the δ that enters them, its last state, and how far
from right it is. All ranks so know the same and take the same branch.
"""

import dataclasses
import math
import secrets
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..cells.base import ADPTState, Cell, positions
from ..errors import DistributedError, IncompatibleError, InputError, NotConverged
from ..ops.tolerance import remembered_scale
from .adjoints import Adjoint, Implicit
from .base import Result, Solution, Solver, finite_steps
from .damping import Adaptive, Scale, Undamped
from .distributed_adjoint import Search, attach
from .fixed_point import Contraction, Found, History, allowed_drift, measured, rounding_excess
from .linearisations import MeanConjugate, MeanRotation, in_eigenbasis, mean_matrix
from .newton import Newton
from .parallel import full_precision, transformed
from .policies import Finish, Raise
from .problem import Problem, check_dtype, pose
from .ranks import Line, Ranks
from .rowwise import check_step
from .system import System
from .transitions import Dense, Transition

__all__ = ["TimeParallel", "sum_gradients"]


class _Look(NamedTuple):
    """Where an iteration stands, on this rank."""

    system: System  # with the state that enters this rank
    transition: Transition
    missing: Tensor  # (batch, time, n), f of what enters each step, less its state
    move: Tensor  # (batch, time, n), what the undamped iteration would add
    excess: Tensor  # (batch, time), the residual in tolerances
    shift: Tensor  # (batch, time), the move in tolerances
    residual: Tensor  # (batch, time)

    def part(self, rows: Tensor) -> "_Look":
        """Of the sequences `rows`."""
        system = self.system.part(rows, 0, self.system.initial.index_select(0, rows))
        return _Look(system, self.transition.part(rows, 0), *(every.index_select(0, rows) for every in self[2:]))


class TimeParallel(Solver):
    """`newton` with the time axis split over the ranks of a process group, in the order of the ranks.

    Each rank calls it with its own chunk of the inputs, of any length from 1, and gets its chunk of the states; `guess`
    and `reset` are of the chunk too. `state` is what enters the first step of rank 0; the other ranks may leave it out.
    All else in the solution is of the whole sequence and the same on all ranks, `final` included.

    The gradient is that of the sum of the losses of all ranks. Every rank calls backward; one without a loss of its own
    calls `(0 * solution.states).sum().backward()`. For parameters each rank has its own part of the gradient, and
    `sum_gradients` adds the parts up.

    Args:
        newton: The solver, undamped or with `Scale` or `Adaptive`.
        group: The process group; all ranks if not given.
    """

    def __init__(self, newton: Newton, group: dist.ProcessGroup | None = None):
        if not isinstance(newton, Newton):
            raise InputError(f"TimeParallel({newton!r}): needs one of the Newton solvers. Pass solvers.ConvDEER().")
        if not isinstance(newton.damping, (Undamped, Scale, Adaptive)):
            raise IncompatibleError(
                f"TimeParallel({newton!r}): {newton.damping!r} does not work over ranks. "
                "Use no damping, solvers.Scale(0.99) or solvers.Adaptive()."
            )
        mean = newton.linearisation
        if isinstance(mean, MeanRotation) or (isinstance(mean, MeanConjugate) and mean.means > 1):
            raise IncompatibleError(
                f"TimeParallel({newton!r}): over ranks there is one mean of M for all time. Pass solvers.KoopmanDEER()."
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
            with ranks.together() as known:
                _refuse(lengths, adjoint)
                known.own = self._note(cell, inputs, state, guess, reset, adjoint)
            _compare(known.every)
            line = Line(ranks, [each["steps"] for each in known.every])
            with ranks.together() as wanted:
                starting = _starting(cell, inputs, state, known.every[: ranks.here])
                problem = pose(cell, inputs, starting, None, reset, adjoint)
                guess = _chunk_of_guess(guess, problem)
                system = problem.system(cell)
                if self.newton.check:
                    check_step(cell, system)
                wanted.own = system.part(None, 0, system.initial, 1).run().requires_grad
            with torch.no_grad():
                constant = _detached(system)
                results, found = self._completed(constant, self._search(cell, constant, guess, line), line)
                ends = ranks.gathered(found.states[:, -1])
            states, final = found.states, ends[-1]
            position = _position(known.every).to(inputs.device)
            if not states.numel():
                states = system.run()  # no numbers, but a graph
            elif any(wanted.every):
                search = Search(cell, line, self.linearise, adjoint if isinstance(adjoint, Implicit) else Implicit())
                token = known.every[0]["token"]
                states, final = attach(search, line.entered(system, ends), states, final, token)
        return Solution(
            states=states if problem.batched else states.squeeze(0),
            final=final if problem.batched else final.squeeze(0),
            position=position if problem.batched else position.squeeze(0),
            results=results,
            iterations=found.iterations,
            residual=found.residual,
            converged_steps=found.converged_steps,
            solver=self,
            history=found.history,
        )

    def _note(
        self,
        cell: Cell,
        inputs: Tensor,
        state: Tensor | ADPTState | None,
        guess: Tensor | None,
        reset: Tensor | None,
        adjoint: Adjoint | None,
    ) -> dict[str, Any]:
        """What the ranks must agree on, and what they must know of each other, before anything is solved."""
        if inputs.dim() not in (2, 3) or not inputs.shape[-2]:
            raise InputError(
                f"inputs have shape {tuple(inputs.shape)}; each rank needs a chunk (batch, time, features) or "
                "(time, features) of one step or more. Use fewer ranks for a sequence this short."
            )
        newton = self.newton
        batch, steps = 1 if inputs.dim() == 2 else inputs.shape[0], inputs.shape[-2]
        fresh_for = [-1] * batch  # steps since the last reset of the chunk
        if reset is not None and (marks := torch.as_tensor(reset)).numel() == batch * steps:
            marks = marks.reshape(batch, steps).bool()
            since = positions(torch.zeros(batch, dtype=torch.int64, device=marks.device), steps, marks)[:, -1] + 1
            fresh_for = torch.where(marks.any(1), since, -1).tolist()
        weights = [parameter.detach().double().sum() for parameter in cell.parameters()]
        return {
            "agree": {
                "a batch of": batch,
                "a state of size": cell.state_size,
                "the dtype": str(check_dtype(inputs, cell)),
                "the cell": f"{type(cell).__name__} of {len(weights)} parameters",
                "the solver": f"{newton!r}, patience={newton.patience}, on_failure={newton.on_failure!r}",
                "the adjoint": repr(adjoint),
                "gradients": torch.is_grad_enabled(),
                "a guess": guess is not None,
            },
            "weights": torch.stack(weights).tolist() if weights else [],
            "steps": steps,
            "fresh for": fresh_for,
            "position": state.position.reshape(-1).tolist() if isinstance(state, ADPTState) else [0] * batch,
            "token": secrets.randbits(62),
        }

    def linearise(self, cell: Cell, system: System, entering: Tensor, line: Line) -> Transition:
        """The transition of the steps of this rank."""
        linearisation = self.newton.linearisation
        if not isinstance(linearisation, MeanConjugate):
            return linearisation.transition(cell, system, entering)
        weight = torch.full_like(entering[..., :1], 1 / line.total)
        own, symmetric = mean_matrix(cell, entering, system.givens[0], weight)
        mean = line.ranks.summed(own)
        return in_eigenbasis(mean) if symmetric else Dense(mean.unsqueeze(1))

    def _guess(self, cell: Cell, system: System, line: Line) -> Tensor:
        transition = cell.linear_transition(system.givens[0])
        if transition is None:
            return self.newton.guess(cell, system)
        offset = system.evaluate(system.initial.new_zeros((*system.givens[0].shape[:2], cell.state_size)))
        return line.ranks.scan(transition, offset, system.initial, system.reset)

    def _search(self, cell: Cell, system: System, guess: Tensor | None, line: Line) -> Found:
        """The loop of `fixed_point.solve`. Sequences are dropped when they have converged, steps are not: there is
        always a rank that has all of its own still to do, and the others would wait for it.
        """
        newton, fixed = self.newton, self.newton.fixed_iterations
        states = self._guess(cell, system, line) if guess is None else guess.clone()
        if not len(states):
            none = torch.zeros(0, dtype=torch.int64, device=states.device)
            history = History(states.new_zeros(1, 0), none.new_zeros(1, 0))
            return Found(states, none.bool(), none.bool(), none.bool(), none, states.new_zeros(0), none, history)
        least, patience = fixed or 1, math.inf if fixed or newton.patience is None else newton.patience
        drift = allowed_drift(newton.tolerance(states.dtype), line.total, states.dtype)
        now = self._look(cell, system, states, line)
        contraction = Contraction(now.excess, rounding_excess(newton.tolerance(states.dtype), states.dtype))
        worst, reached = line.summed_up(now.residual, (now.excess <= 1) & (now.shift <= drift))
        converged, rising = (torch.zeros_like(reached, dtype=torch.bool) for _ in range(2))
        finite = torch.ones_like(converged)
        iterations, residual = torch.zeros_like(reached), worst.clone()
        residuals, prefixes = [worst], [reached.clone()]
        rows, current = torch.arange(len(states), device=states.device), states
        first, rises, strength = worst, torch.zeros_like(reached), newton.damping.begin(states)
        for iteration in range(1, (fixed or newton.max_iterations or max(line.total, 100)) + 1):
            if not len(rows):
                break
            previous = worst
            current = current + self._change(now, strength, line)
            now = self._look(cell, now.system, current, line)
            contraction.update(now.excess)
            right = (now.excess <= 1) & (contraction.error(now.shift, line.total) <= drift)
            worst, prefix = line.summed_up(now.residual, right)
            strength = newton.damping.adapt(strength, worst, previous)
            rises = torch.where(worst > previous, rises + 1, 0)
            given_up = (rises >= patience) & (worst > first)
            done = prefix == line.total
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
        return Found(states, converged, finite, rising, iterations, residual, reached, history)

    def _look(self, cell: Cell, system: System, states: Tensor, line: Line) -> _Look:
        """Return where the states are. The excess of a step is at least that of all ranks before."""
        ranks, tolerance = line.ranks, self.newton.tolerance(states.dtype)
        system = line.entered(system, ranks.gathered(states[:, -1]))
        recent = line.recent_scale(remembered_scale(states, system.reset), system.reset)
        system = dataclasses.replace(system, recent=recent)
        residual = measured(system, states, tolerance)
        transition = self.linearise(cell, system, residual.entering, line)
        missing = residual.values - states
        move = ranks.scan(transition, missing.clone(), torch.zeros_like(system.initial), system.reset)
        shift = (move.abs() / residual.allowed).amax(-1)
        excess = line.prefix_maximum(residual.excess)
        return _Look(system, transition, missing, move, excess, shift, residual.size)

    def _change(self, now: _Look, strength: Tensor, line: Line) -> Tensor:
        """What the iteration adds to the states."""
        damping = self.newton.damping
        if isinstance(damping, Undamped):
            return now.move
        factor = damping.scale if isinstance(damping, Scale) else 1 - strength[:, None, None]
        none = torch.zeros_like(now.system.initial)
        return line.ranks.scan(now.transition.scaled(factor), now.missing, none, now.system.reset)

    def _completed(self, system: System, found: Found, line: Line) -> tuple[Tensor, Found]:
        """What was found, after the policy of the solver: the same branch on every rank."""
        failed = ~found.converged
        results = torch.where(failed, int(Result.NOT_CONVERGED), int(Result.CONVERGED))
        results = torch.where(failed & (found.rising | ~found.finite), int(Result.DIVERGED), results)
        if not bool(failed.any()):
            return results, found
        policy = self.newton.on_failure
        if isinstance(policy, Raise):
            kinds = ", ".join(sorted({Result(int(result)).name for result in results[failed]}))
            raise NotConverged(
                f"{self} stopped after {int(found.iterations.max())} iterations ({kinds}): residual "
                f"{float(found.residual[failed].max()):.1e} in {int(failed.sum())} of {len(failed)} sequences; steps "
                f"before {int(found.converged_steps[failed].min())} of {line.total} have converged. Raise "
                "max_iterations, damp with solvers.Scale(0.99), or pass on_failure=solvers.Finish()."
            )
        if isinstance(policy, Finish):
            _finish(system, found, line)
            results = torch.where(failed, int(Result.FINISHED), results)
        finite = line.prefix(finite_steps(found.states))
        broken = failed & (finite < line.total)
        results = torch.where(broken, int(Result.NON_FINITE), results)
        if isinstance(policy, Finish):
            system = line.entered(system, line.ranks.gathered(found.states[:, -1]))
            residual = measured(system, found.states, self.newton.tolerance(found.states.dtype))
            worst, _ = line.summed_up(residual.size, residual.excess <= 1)
            found = found._replace(
                residual=torch.where(broken, torch.nan, torch.where(failed, worst, found.residual)),
                converged_steps=torch.where(failed, finite, found.converged_steps),
            )
        return results, found

    def __repr__(self) -> str:
        return f"TimeParallel({self.newton})"


def _finish(system: System, found: Found, line: Line) -> None:
    """Completes what did not converge step by step, rank after rank, each from the last state of the one before."""
    ranks, rows = line.ranks, (~found.converged).nonzero().squeeze(-1)
    begin, stop = int(found.converged_steps[rows].min()), 0
    last = system.initial.index_select(0, rows)
    for rank, length in enumerate(line.lengths):
        stop += length
        if rank == ranks.here and stop > begin:
            start = max(0, begin - (stop - length))
            before = found.states[rows, start - 1] if start else last
            found.states[rows, start:] = system.part(rows, start, before).run()
        last = ranks.told(found.states[rows, -1], rank)


def _detached(system: System) -> System:
    (drive,) = system.givens
    return dataclasses.replace(
        system, givens=(drive.detach(),), initial=system.initial.detach(), fresh=system.fresh.detach()
    )


def _refuse(lengths: Tensor | None, adjoint: Adjoint | None) -> None:
    if lengths is not None:
        raise IncompatibleError(
            "TimeParallel takes no lengths=: all sequences end with the last rank. Pad them, and take the states of "
            "each up to its own end."
        )
    if adjoint is not None and not isinstance(adjoint, Implicit):
        raise IncompatibleError(f"TimeParallel differentiates by adjoints.Implicit(); got {adjoint!r}. Drop adjoint=.")
    if transformed() or torch.compiler.is_compiling():
        raise IncompatibleError(
            "TimeParallel runs eagerly and in reverse mode: call it outside torch.compile, torch.func and forward mode."
        )


def _compare(notes: list[dict[str, Any]]) -> None:
    for rank, note in enumerate(notes):
        for name, value in note["agree"].items():
            if value != notes[0]["agree"][name]:
                raise DistributedError(
                    f"the ranks differ: {name} {notes[0]['agree'][name]} on rank 0, but {value} on rank {rank}. "
                    "Every rank needs the same of all but its chunk of time."
                )
        for one, other in zip(notes[0]["weights"], note["weights"], strict=True):
            if not math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6) and not math.isnan(one):
                raise DistributedError(
                    f"the parameters of the cell on rank {rank} are not those on rank 0. Call torch.manual_seed(0) "
                    "before building it, or send them: for p in cell.parameters(): "
                    "torch.distributed.broadcast(p.data, 0)."
                )


def _starting(
    cell: Cell, inputs: Tensor, state: Tensor | ADPTState | None, before: list[dict[str, Any]]
) -> Tensor | ADPTState | None:
    """What enters this rank as far as it is known: the position, and on rank 0, which none is before, the state."""
    if not before:
        return state
    batch = before[0]["agree"]["a batch of"]
    if len(before[0]["position"]) != batch:
        return None  # rank 0 says what is wrong with it
    unknown = cell.initial_state(batch, device=inputs.device, dtype=check_dtype(inputs, cell))
    return ADPTState(unknown, _position(before).to(inputs.device))


def _position(notes: list[dict[str, Any]]) -> Tensor:
    """Where the step after the chunks of these ranks is."""
    position = torch.tensor(notes[0]["position"], dtype=torch.int64)
    for note in notes:
        fresh_for = torch.tensor(note["fresh for"], dtype=torch.int64)
        position = torch.where(fresh_for >= 0, fresh_for, position + note["steps"])
    return position


def _chunk_of_guess(guess: Tensor | None, problem: Problem) -> Tensor | None:
    if guess is None:
        return None
    guess = guess.unsqueeze(0) if guess.dim() == 2 and not problem.batched else guess
    shape = (problem.state.shape[0], problem.steps, problem.state.shape[1])
    if guess.shape != shape:
        raise InputError(
            f"the guess has shape {tuple(guess.shape)}; the states of this rank are {shape}. "
            "Pass the states of an earlier Solution of this rank."
        )
    return guess.detach().to(problem.state)


def sum_gradients(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Adds up the gradients of all ranks, in place: after backward, before the optimiser's step.

    A parameter without a gradient counts as zero.
    """
    ranks = Ranks(group)
    for parameter in module.parameters():
        if parameter.requires_grad:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = ranks.summed(own)
