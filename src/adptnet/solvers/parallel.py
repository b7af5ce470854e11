"""Base class of the parallel-in-time solvers: input handling, failure policies and attaching gradients."""

import abc
from typing import Any

import torch
from torch import Tensor, nn

from ..cells.base import ADPTState, Cell
from ..errors import InputError
from ..ops import _buffers
from ..ops._backends import note_run
from ..ops.tolerance import Tolerance
from .adjoints import Adjoint, Implicit, LoopAdjoint, Unrolled
from .base import Result, Solution, Solver
from .convergence_test import default_rtol
from .damping import Undamped
from .fixed_point import History, IterationResult, Limits, UpdateRule, solve
from .iterates import Iterate, measure_residual, newton_update
from .policies import Policy, SystemSolution
from .problem import Problem, make_problem, resolve_system
from .step_check import check_step
from .system import System
from .transitions import Transition

__all__ = [
    "Parallel",
    "check_guess",
    "full_precision",
    "is_transform_active",
    "join_blocks",
]


class Parallel(Solver):
    """Base class of solvers that are parallel in time.

    A subclass defines how to solve a system, and the transition that its gradient is computed with.

    Attributes:
        on_failure: The failure policy.
        check: Whether to test the step of a user's cell before the solve.
        fixed_iterations: The number of iterations if it is fixed; None if the residual decides.
    """

    on_failure: Policy
    check: bool
    fixed_iterations: int | None

    @abc.abstractmethod
    def tolerance(self, dtype: torch.dtype) -> Tolerance:
        """Return the tolerance of a converged step.

        Args:
            dtype: The dtype of the states.
        """

    @abc.abstractmethod
    def solve_system(self, cell: Cell, system: System, guess: Tensor | None) -> SystemSolution:
        """Solve the system without an autograd graph, and apply the failure policy.

        Args:
            cell: The cell of the system.
            system: The equations.
            guess: (batch, time, n), the states to start from; the solver's default if None.
        """

    @abc.abstractmethod
    def linearize(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        """Return the transition A of an iteration.

        Args:
            cell: The cell of the system.
            system: The equations.
            entering: (batch, time, n), the states that enter the steps.
        """

    @abc.abstractmethod
    def iterate(self, cell: Cell, system: System, guess: Tensor | None, count: int) -> Tensor:
        """Run `count` iterations without data-dependent control flow, so that they can be compiled.

        Args:
            cell: The cell of the system.
            system: The equations.
            guess: (batch, time, n), the states to start from; the solver's default if None.
            count: The number of iterations.
        """

    def steps_per_block(self, steps: int) -> int | None:
        """Return the number of steps that are solved at a time; None for all.

        Args:
            steps: The length of the sequences.
        """
        return None

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
        if torch.compiler.is_compiling():
            with torch.autocast(inputs.device.type, enabled=False):
                return self._solve_compiled(cell, make_problem(cell, inputs, state, lengths, reset, adjoint), guess)
        if torch.is_inference_mode_enabled():  # the Jacobian is computed by autograd, which needs normal tensors
            with torch.inference_mode(False), torch.no_grad():
                options = {"guess": None if guess is None else guess.clone(), "lengths": lengths, "reset": reset}
                return self(cell, inputs.clone(), _clone_state(state), adjoint=adjoint, **options)
        with torch.autocast(inputs.device.type, enabled=False), full_precision():
            problem = make_problem(cell, inputs, state, lengths, reset, adjoint)
            guess = check_guess(guess, problem)
            system = problem.make_system(cell)
            if is_transform_active():
                return _solve_sequentially(self, cell, problem, system)
            if self.check:
                check_step(cell, system)
            with torch.no_grad():
                solved = self.solve_system(cell, problem.make_system(cell).detach(), guess)
                _buffers.clear()  # the buffers of the iterations are as large as the states and not needed soon
            states = self._attach_gradient(cell, problem, system, solved.states, adjoint or Implicit())
        outcome = solved.outcome
        return problem.make_solution(
            self,
            cell,
            states,
            results=solved.results,
            iterations=outcome.iterations,
            residual=outcome.residual,
            converged_steps=outcome.converged_steps,
            history=outcome.history,
        )

    def _solve_compiled(self, cell: Cell, problem: Problem, guess: Tensor | None) -> Solution:
        """Run a fixed number of iterations. Autograd differentiates through them."""
        if self.fixed_iterations is None or not self.on_failure.returns_iterate:
            raise InputError(
                f"{self} has data-dependent control flow, which torch.compile cannot trace. Pass fixed_iterations=8, "
                "on_failure=solvers.Return() to the solver, and check solution.results."
            )
        system = problem.make_system(cell)
        states = self.iterate(cell, system, guess, self.fixed_iterations)
        with torch.no_grad():
            residual, excess = measure_residual(system, states, self.tolerance(states.dtype))[2:4]
            right = excess <= 1
            prefix = right.long().cumprod(-1).sum(-1)
            steps = torch.full_like(prefix, problem.steps) if problem.lengths is None else problem.lengths
            results = torch.where(right.all(-1), int(Result.CONVERGED), int(Result.NOT_CONVERGED))
            results = torch.where(residual.isfinite().all(-1), results, int(Result.NON_FINITE))
        return problem.make_solution(
            self,
            cell,
            states,
            results=results,
            iterations=torch.full_like(prefix, self.fixed_iterations),
            residual=residual.amax(-1),
            converged_steps=torch.minimum(prefix, steps),
        )

    def _attach_gradient(
        self, cell: Cell, problem: Problem, system: System, solved: Tensor, adjoint: Adjoint
    ) -> Tensor:
        """Return the states `solved` with the gradient that `adjoint` defines."""
        if not torch.is_grad_enabled():
            return solved
        if isinstance(adjoint, Implicit):
            note_run("backward", adjoint.backend)
            return adjoint.attach(
                cell,
                system,
                problem.repeat_last_state(solved),
                lambda part, entering: self.linearize(cell, part, entering),
                self.steps_per_block(problem.steps),
            )
        assert isinstance(adjoint, LoopAdjoint)
        if not solved.numel():
            return system.run()
        with torch.no_grad():
            solved = problem.repeat_last_state(solved)
            count = self._count_derivative_iterations(cell, problem.make_system(cell).detach(), solved)
        states = None if count is None else self._iterate_at_solution(cell, system, solved, 2 * count, adjoint)
        if states is None or not _is_close(states, solved, default_rtol(states.dtype)):
            return adjoint.run(system.make_loop(), problem.state, problem.steps)
        return states

    def _iterate_at_solution(
        self, cell: Cell, system: System, solved: Tensor, count: int, adjoint: LoopAdjoint
    ) -> Tensor:
        """Run undamped iterations from the solution. The states stay the same; their derivatives converge."""

        def iterate_once(states: Tensor) -> Tensor:
            entering = system.entering_states(states)
            with torch.no_grad():  # at the solution the update does not depend on A, so neither does its derivative
                transition = self.linearize(cell, system, entering)
            return newton_update(transition, system, Iterate(states, entering, system.evaluate(entering)))

        states = solved
        for _ in range(count):
            states = adjoint.call(iterate_once, states)
        return states

    def _count_derivative_iterations(self, cell: Cell, system: System, states: Tensor) -> int | None:
        """Return the number of iterations that first derivatives need at the solution; None if they do not converge.

        It is measured on the derivative along one random direction. Second derivatives need as many again.
        """
        entering = system.entering_states(states)
        transition = self.linearize(cell, system, entering)

        def tangent_step(tangent: Tensor, point: Tensor, drive: Tensor, push: Tensor) -> Tensor:
            product: Tensor = torch.func.jvp(lambda state: system.step(state, drive), (point,), (tangent,))[1]
            return product + push

        push = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states)
        zero = torch.zeros_like(system.initial)
        tangent_system = System(
            tangent_step, (entering, *system.step_inputs, push), zero, zero, system.reset, system.lengths
        )
        rule = UpdateRule(lambda part, rows, start, point: transition.part(rows, start), Undamped())
        tolerance = Tolerance(0.0, default_rtol(states.dtype))
        outcome = solve(tangent_system, torch.zeros_like(states), rule, tolerance, Limits(system.steps, patience=3))
        return int(outcome.iterations.max()) if bool(outcome.converged.all()) else None


def _is_close(states: Tensor, solved: Tensor, rtol: float) -> bool:
    """Return whether further iterations have left every sequence at its solution."""
    with torch.no_grad():
        difference, size = ((part.abs().amax((1, 2))) for part in (states - solved, solved))
        return bool((difference <= 64 * rtol * size).all())


def _clone_state(state: Tensor | ADPTState | None) -> Tensor | ADPTState | None:
    """Copy an inference tensor into a normal one, which autograd can use."""
    if isinstance(state, ADPTState):
        return ADPTState(state.state.clone(), state.position.clone())
    return None if state is None else state.clone()


def is_transform_active() -> bool:
    """Return whether a `torch.func` transform or forward-mode AD is active, where control flow cannot read values."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def _solve_sequentially(solver: Solver, cell: Cell, problem: Problem, system: System) -> Solution:
    """Solve sequentially, in operations that every transform supports."""
    states = Unrolled().run(system.make_loop(), problem.state, problem.steps)
    batch = problem.state.shape[0]
    zeros = torch.zeros(batch, dtype=torch.int64, device=states.device)
    steps = zeros + problem.steps if problem.lengths is None else problem.lengths
    return problem.make_solution(
        solver,
        cell,
        states,
        results=zeros + int(Result.FINISHED),
        iterations=zeros,
        residual=torch.zeros(batch, dtype=states.dtype, device=states.device),
        converged_steps=steps,
    )


class full_precision:
    """Context manager that computes float32 matrix products in full precision, without TF32 and bfloat16.

    The precision is read by backend: `torch.get_float32_matmul_precision()` warns in torch 2.9, and raises an error in
    programs that have set the precision by backend.
    """

    def __enter__(self) -> None:
        mkldnn: Any = torch.backends.mkldnn
        found = [(products, products.fp32_precision) for products in (torch.backends.cuda.matmul, mkldnn.matmul)]
        self.reduced = [(products, precision) for products, precision in found if precision not in ("none", "ieee")]
        self.before: str | None = None
        if self.reduced:
            try:
                self.before = torch.get_float32_matmul_precision()
                torch.set_float32_matmul_precision("highest")
            except RuntimeError:  # the precision has been set by backend
                for products, _ in self.reduced:
                    products.fp32_precision = "ieee"

    def __exit__(self, *exception: object) -> None:
        if self.before is not None:
            torch.set_float32_matmul_precision(self.before)
        for products, precision in self.reduced:
            if products.fp32_precision != precision:
                products.fp32_precision = precision


def check_guess(guess: Tensor | None, problem: Problem) -> Tensor | None:
    """Return the guess, batched and in the dtype of the states, or raise `InputError`.

    Args:
        guess: (batch, time, state_size), or (time, state_size) for one sequence without a batch dimension.
        problem: The problem to solve.
    """
    if guess is None:
        return None
    if not isinstance(guess, Tensor):
        raise InputError(f"the guess is {type(guess).__name__}; it must be a tensor. Pass solution.states.")
    shape = (problem.state.shape[0], problem.steps, problem.state.shape[1])
    guess = guess.unsqueeze(0) if guess.dim() == 2 and not problem.batched else guess
    if guess.shape != shape:
        raise InputError(
            f"the guess has shape {tuple(guess.shape)}; the states have shape {shape}. "
            "Pass the states of an earlier Solution of the same shape."
        )
    return guess.detach().to(problem.state)


def join_blocks(parts: list[SystemSolution]) -> SystemSolution:
    """Join the solutions of consecutive blocks. The number of iterations is the maximum over the blocks.

    Args:
        parts: The solutions of the blocks, in the order of time.
    """
    states = torch.cat([part.states for part in parts], 1)
    outcomes = [part.outcome for part in parts]
    complete = torch.ones_like(outcomes[0].converged)
    reached = torch.zeros_like(outcomes[0].converged_steps)
    for part, each in zip(parts, outcomes, strict=True):
        reached = torch.where(complete, reached + each.converged_steps, reached)
        complete = complete & (part.results <= int(Result.FINISHED))
    longest = max(len(each.history.residual) for each in outcomes)
    residuals = torch.stack([_pad_history(each.history.residual, longest) for each in outcomes]).amax(0)
    prefixes = torch.zeros_like(outcomes[0].history.converged_steps[:1]).repeat(longest, 1)
    unbroken = torch.ones_like(prefixes, dtype=torch.bool)  # whether all blocks before have converged by that iteration
    for each in outcomes:
        prefix = _pad_history(each.history.converged_steps, longest)
        prefixes += torch.where(unbroken, prefix, 0)
        unbroken &= prefix == torch.where(each.converged, each.converged_steps, -1)
    whole = IterationResult(
        states,
        torch.stack([each.converged for each in outcomes]).all(0),
        torch.stack([each.finite for each in outcomes]).all(0),
        torch.stack([each.rising for each in outcomes]).any(0),
        torch.stack([each.iterations for each in outcomes]).amax(0),
        torch.stack([each.residual for each in outcomes]).amax(0),
        reached,
        History(residuals, prefixes),
    )
    return SystemSolution(states, torch.stack([part.results for part in parts]).amax(0), whole)


def _pad_history(values: Tensor, length: int) -> Tensor:
    """Repeat the last row of `values` up to `length` rows."""
    missing = length - len(values)
    return torch.cat((values, values[-1:].expand(missing, -1))) if missing else values
