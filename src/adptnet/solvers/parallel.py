"""What the solvers share that are parallel in time: from inputs to a search, from what it found to a solution."""

import abc
import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from ..cells.base import ADPTState, Cell
from ..errors import InputError, NonFiniteError, NotConverged
from ..ops import _buffers
from ..ops.tolerance import Tolerance
from .adjoints import Adjoint, Implicit, LoopAdjoint, Unrolled
from .base import Result, Solution, Solver, finite_steps
from .fixed_point import Found, History, Iterate, default_rtol, measured, newton_update, solve
from .policies import Finish, Policy, Raise, Return
from .problem import Problem, pose
from .rowwise import check_step
from .system import System
from .transitions import Transition

__all__ = ["Parallel", "Search"]


class Search(NamedTuple):
    """What a search found, after its policy."""

    states: Tensor
    results: Tensor  # (batch,), a `Result` each
    found: Found


class Parallel(Solver):
    """A solver that finds all steps together. Subclasses say how to search, and how to linearise for the gradient."""

    on_failure: Policy
    check: bool

    @property
    @abc.abstractmethod
    def fixed(self) -> int | None:
        """The number of iterations, where it is fixed."""

    @abc.abstractmethod
    def tolerance(self, dtype: torch.dtype) -> Tolerance:
        """When a step is right, for states of `dtype`."""

    @abc.abstractmethod
    def search(self, cell: Cell, system: System, guess: Tensor | None) -> Search:
        """States that solve the system, without a graph, its failures dealt with."""

    @abc.abstractmethod
    def linearise(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        """The transition at what enters each step."""

    @abc.abstractmethod
    def iterate(self, cell: Cell, system: System, guess: Tensor | None, count: int) -> Tensor:
        """`count` iterations from `guess` and nothing else, so that they can be compiled."""

    def block(self, steps: int) -> int | None:
        """Steps that are solved at a time; None for all."""
        return None

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
        if torch.compiler.is_compiling():
            with torch.autocast(inputs.device.type, enabled=False):
                return self._compiled(cell, pose(cell, inputs, state, lengths, reset, adjoint), guess)
        if torch.is_inference_mode_enabled():  # a Jacobian is made of derivatives, which need their graph
            with torch.inference_mode(False), torch.no_grad():
                plain = {"guess": None if guess is None else guess.clone(), "lengths": lengths, "reset": reset}
                return self(cell, inputs.clone(), _plain(state), adjoint=adjoint, **plain)
        with torch.autocast(inputs.device.type, enabled=False), full_precision():
            problem = pose(cell, inputs, state, lengths, reset, adjoint)
            guess = _check_guess(guess, problem)
            system = problem.system(cell)
            if transformed():
                return _stepwise(self, problem, system)
            if self.check:
                check_step(cell, system)
            with torch.no_grad():
                search = self.search(cell, _detached(cell, problem), guess)
                _buffers.clear()  # what iterations used is not needed again soon, and is as large as the states
            states = self._attached(cell, problem, system, search, adjoint or Implicit())
        found = search.found
        return problem.solution(
            self,
            states,
            results=search.results,
            iterations=found.iterations,
            residual=found.residual,
            converged_steps=found.converged_steps,
            history=found.history,
        )

    def _compiled(self, cell: Cell, problem: Problem, guess: Tensor | None) -> Solution:
        """A fixed number of iterations, differentiated as they are."""
        if self.fixed is None or not isinstance(self.on_failure, Return):
            raise InputError(
                f"{self} decides by values what to run, which torch.compile cannot follow. Pass fixed_iterations=8, "
                "on_failure=solvers.Return() to the solver, and look at solution.results."
            )
        system = problem.system(cell)
        states = self.iterate(cell, system, guess, self.fixed)
        with torch.no_grad():
            residual, excess = measured(system, states, self.tolerance(states.dtype))[2:4]
            right = excess <= 1
            prefix = right.long().cumprod(-1).sum(-1)
            steps = torch.full_like(prefix, problem.steps) if problem.lengths is None else problem.lengths
            results = torch.where(right.all(-1), int(Result.CONVERGED), int(Result.NOT_CONVERGED))
            results = torch.where(residual.isfinite().all(-1), results, int(Result.NON_FINITE))
        return problem.solution(
            self,
            states,
            results=results,
            iterations=torch.full_like(prefix, self.fixed),
            residual=residual.amax(-1),
            converged_steps=torch.minimum(prefix, steps),
        )

    def _attached(
        self,
        cell: Cell,
        problem: Problem,
        system: System,
        search: Search,
        adjoint: Adjoint,
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return search.states
        if isinstance(adjoint, Implicit):
            clean = problem.held(search.states)
            return adjoint.attach(
                cell,
                system,
                clean,
                lambda part, entering: self.linearise(cell, part, entering),
                self.block(problem.steps),
            )
        assert isinstance(adjoint, LoopAdjoint)
        if not search.states.numel():
            return system.run()
        with torch.no_grad():
            found = problem.held(search.states)
            count = self._derivative_iterations(cell, _detached(cell, problem), found)
        states = None if count is None else self._iterated(cell, system, found, 2 * count, adjoint)
        if states is None or not _close(states, found, default_rtol(states.dtype)):
            return adjoint.run(system.loop(), problem.state, problem.steps)
        return states

    def _iterated(self, cell: Cell, system: System, found: Tensor, count: int, adjoint: LoopAdjoint) -> Tensor:
        """Iterations that stay at the states that were found, where each brings derivatives closer: undamped."""

        def one(states: Tensor) -> Tensor:
            entering = system.entering(states)
            with torch.no_grad():  # at the solution A does not matter, so neither does its derivative
                transition = self.linearise(cell, system, entering)
            return newton_update(transition, system, Iterate(states, entering, system.evaluate(entering)))

        states = found
        for _ in range(count):
            states = adjoint.call(one, states)
        return states

    def _derivative_iterations(self, cell: Cell, system: System, states: Tensor) -> int | None:
        """How many iterations derivatives need once the states are right, found on one of random direction.

        Second derivatives need as many again. None if iterations do not bring them closer.
        """
        entering = system.entering(states)
        transition = self.linearise(cell, system, entering)

        def along(tangent: Tensor, point: Tensor, drive: Tensor, pushed: Tensor) -> Tensor:
            moved: Tensor = torch.func.jvp(lambda state: system.step(state, drive), (point,), (tangent,))[1]
            return moved + pushed

        pushed = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states)
        none = torch.zeros_like(system.initial)
        linear = System(along, (entering, *system.givens, pushed), none, none, system.reset, system.lengths)
        found = solve(
            linear,
            torch.zeros_like(states),
            lambda part, rows, start, point: transition.part(rows, start),
            lambda at, part, tangents, _: newton_update(at, part, tangents),
            Tolerance(0.0, default_rtol(states.dtype)),
            max_iterations=system.steps,
            patience=3,
            strength=torch.zeros_like(system.initial[:, 0]),
            adapt=lambda strength, *_: strength,
        )
        return int(found.iterations.max()) if bool(found.converged.all()) else None


def _close(states: Tensor, found: Tensor, rtol: float) -> bool:
    """Whether iterating further has left every sequence where it was."""
    with torch.no_grad():
        moved, size = ((part.abs().amax((1, 2))) for part in (states - found, found))
        return bool((moved <= 64 * rtol * size).all())


def _plain(state: Tensor | ADPTState | None) -> Tensor | ADPTState | None:
    """The same numbers in tensors that autograd can use."""
    if isinstance(state, ADPTState):
        return ADPTState(state.state.clone(), state.position.clone())
    return None if state is None else state.clone()


def _detached(cell: Cell, problem: Problem) -> System:
    drive, initial, fresh = (part.detach() for part in (problem.drive, problem.state, problem.fresh))
    return dataclasses.replace(problem.system(cell), givens=(drive,), initial=initial, fresh=fresh)


def transformed() -> bool:
    """Whether a transform of `torch.func`, or forward mode, is in force: values cannot then decide what is run."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def _stepwise(solver: Solver, problem: Problem, system: System) -> Solution:
    """The steps one after another, in plain operations that any transform understands."""
    states = Unrolled().run(system.loop(), problem.state, problem.steps)
    batch = problem.state.shape[0]
    zeros = torch.zeros(batch, dtype=torch.int64, device=states.device)
    steps = zeros + problem.steps if problem.lengths is None else problem.lengths
    return problem.solution(
        solver,
        states,
        results=zeros + int(Result.FINISHED),
        iterations=zeros,
        residual=torch.zeros(batch, dtype=states.dtype, device=states.device),
        converged_steps=steps,
    )


class full_precision:
    """Matrix products in their full precision, TF32 off, while it lasts."""

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        if self.before != "highest":
            torch.set_float32_matmul_precision("highest")

    def __exit__(self, *exception: object) -> None:
        if self.before != "highest":
            torch.set_float32_matmul_precision(self.before)


def _check_guess(guess: Tensor | None, problem: Problem) -> Tensor | None:
    if guess is None:
        return None
    if not isinstance(guess, Tensor):
        raise InputError(f"the guess is {type(guess).__name__}; it must be a tensor. Pass solution.states.")
    shape = (problem.state.shape[0], problem.steps, problem.state.shape[1])
    guess = guess.unsqueeze(0) if guess.dim() == 2 and not problem.batched else guess
    if guess.shape != shape:
        raise InputError(
            f"the guess has shape {tuple(guess.shape)}; the states to find are {shape}. "
            "Pass the states of an earlier Solution."
        )
    return guess.detach().to(problem.state)


def completed(system: System, found: Found, policy: Policy, solver: Solver) -> Search:
    """What a search found, after its policy."""
    failed = ~found.converged
    results = torch.where(found.converged, int(Result.CONVERGED), int(Result.NOT_CONVERGED))
    results = torch.where(failed & found.rising, int(Result.DIVERGED), results)
    results = torch.where(failed & ~found.finite, int(Result.DIVERGED), results)
    if not bool(failed.any()):
        return Search(found.states, results, found)
    if isinstance(policy, Raise):
        _refuse_non_finite(system)
        raise NotConverged(_message(solver, found, results))
    if isinstance(policy, Finish):
        return _finished(system, found, results)
    broken = failed & (_finite(system, found.states) < found.states.shape[1])
    return Search(found.states, torch.where(broken, int(Result.NON_FINITE), results), found)


def _finite(system: System, states: Tensor) -> Tensor:
    valid = system.valid
    return finite_steps(states if valid is None else torch.where(valid.unsqueeze(-1), states, 0.0))


def _finished(system: System, found: Found, results: Tensor) -> Search:
    rows = (~found.converged).nonzero().squeeze(-1)
    start = int(found.converged_steps[rows].min())
    states, steps = found.states, found.states.shape[1]
    if start < steps:
        before = states[rows, start - 1] if start else system.initial.index_select(0, rows)
        states[rows, start:] = system.part(rows, start, before).run()
    results = results.index_fill(0, rows, int(Result.FINISHED))
    finite = _finite(system, states)
    right = finite == steps
    lengths = torch.full_like(finite, steps) if system.lengths is None else system.lengths
    finished = torch.where(~found.converged, torch.minimum(finite, lengths), found.converged_steps)
    results = torch.where(~found.converged & ~right, int(Result.NON_FINITE), results)
    residual = torch.where(~found.converged & ~right, torch.nan, found.residual)
    residual[rows] = torch.where(right[rows], _residual(system, rows, states), residual[rows])
    return Search(states, results, found._replace(residual=residual, converged_steps=finished))


def _residual(system: System, rows: Tensor, states: Tensor) -> Tensor:
    part = system.part(rows, 0, system.initial.index_select(0, rows))
    chosen = states.index_select(0, rows)
    distance = (part.evaluate(part.entering(chosen)) - chosen).abs().amax(-1)
    valid = part.valid
    return (distance if valid is None else torch.where(valid, distance, 0.0)).amax(-1)


def _refuse_non_finite(system: System) -> None:
    """Names what no solver can mend."""
    broken = ~system.givens[0].isfinite().all(-1)
    valid = system.valid
    broken = broken if valid is None else broken & valid
    if bool(broken.any()):
        sequence, step = broken.nonzero()[0].tolist()
        raise NonFiniteError(
            f"what drives sequence {sequence} is not finite at step {step}: NaN or infinity in the inputs, or inputs "
            "so large that they overflow. Mend or drop them; no solver can."
        )


def _message(solver: Solver, found: Found, results: Tensor) -> str:
    failed = (~found.converged).nonzero().squeeze(-1).tolist()
    shown = ", ".join(map(str, failed[:8])) + (", …" if len(failed) > 8 else "")
    kinds = sorted({Result(int(results[i])).name for i in failed})
    steps = found.states.shape[1]
    return (
        f"{solver} stopped after {int(found.iterations.max())} iterations ({', '.join(kinds)}): residual "
        f"{float(found.residual[failed].max()):.1e} in {len(failed)} of {len(found.converged)} sequences ({shown}); "
        f"steps before {int(found.converged_steps[failed].min())} of {steps} have converged. Wrap it in "
        "solvers.BlockWise(..., num_blocks=8), damp it with solvers.Adaptive(), raise max_iterations (or patience, if "
        "it was given up), or pass on_failure=solvers.Finish()."
    )


def joined(parts: list[Search]) -> Search:
    """Of searches of one block after another, one of the whole. Iterations are the most any block took."""
    states = torch.cat([part.states for part in parts], 1)
    found = [part.found for part in parts]
    complete = torch.ones_like(found[0].converged)
    reached = torch.zeros_like(found[0].converged_steps)
    for part, each in zip(parts, found, strict=True):
        reached = torch.where(complete, reached + each.converged_steps, reached)
        complete = complete & (part.results <= int(Result.FINISHED))
    longest = max(len(each.history.residual) for each in found)
    residuals = torch.stack([_padded(each.history.residual, longest) for each in found]).amax(0)
    prefixes = torch.zeros_like(found[0].history.converged_steps[:1]).repeat(longest, 1)
    unbroken = torch.ones_like(prefixes, dtype=torch.bool)  # whether all blocks before are right after so many each
    for each in found:
        prefix = _padded(each.history.converged_steps, longest)
        prefixes += torch.where(unbroken, prefix, 0)
        unbroken &= prefix == torch.where(each.converged, each.converged_steps, -1)
    whole = Found(
        states,
        torch.stack([each.converged for each in found]).all(0),
        torch.stack([each.finite for each in found]).all(0),
        torch.stack([each.rising for each in found]).any(0),
        torch.stack([each.iterations for each in found]).amax(0),
        torch.stack([each.residual for each in found]).amax(0),
        reached,
        History(residuals, prefixes),
    )
    return Search(states, torch.stack([part.results for part in parts]).amax(0), whole)


def _padded(values: Tensor, length: int) -> Tensor:
    missing = length - len(values)
    return torch.cat((values, values[-1:].expand(missing, -1))) if missing else values
