"""Newton's method over time: s ← scan(A, f(s) - A s), for a choice of linearization A and of damping."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ..cells.base import Cell
from ..cells.structure import make_linear_transition
from ..errors import IncompatibleError, InputError
from ..ops.adpt_step import DevicePass
from ..ops.linear_scan import linear_scan
from ..ops.tolerance import Tolerance
from .convergence_test import default_rtol
from .damping import Damping, Undamped
from .fixed_point import Limits, UpdateRule, solve
from .fused_pass import find_newton_pass, make_measure
from .iterates import Iterate
from .linearizations import (
    ConjugateDiagonal,
    FullJacobian,
    IdentityMatrix,
    JacobianDiagonal,
    Linearization,
    LinearPart,
    MeanConjugate,
    MeanJacobian,
    MeanRotation,
    ZeroMatrix,
)
from .parallel import Parallel
from .policies import Finish, Policy, SystemSolution
from .system import System
from .transitions import Transition

__all__ = [
    "DEER",
    "ConvDEER",
    "ForwardDEER",
    "Jacobi",
    "KoopmanDEER",
    "Newton",
    "Picard",
    "QuasiDEER",
]

PATIENCE = 3


class Newton(Parallel):
    """Parallel-in-time solver that iterates on all states until every step is within tolerance.

    For every linearization, the states equal those of `Sequential` to the tolerance, or the result reports that they do
    not. Without damping (or with `Scale`), and unless `by=lti_convolution`, the first k steps are exact after k
    iterations.

    Args:
        linearization: The matrix A that approximates the Jacobian of the step.
        damping: The damping of the iteration; none if not given.
        atol: Absolute tolerance. A step has converged when |f(s_{t-1}) - s_t| <= atol + rtol · scale in every channel
            (state dimension). The scale is the largest |f| of that channel in recent steps (see
            `adptnet.ops.tolerance`).
        rtol: Relative tolerance; chosen by dtype if not given.
        max_iterations: The maximum number of iterations; by default the length (at least 100), which suffices without
            damping.
        patience: Stop iterating a sequence when its residual has risen this many times in a row and is above that of
            the initial guess; None to continue.
        fixed_iterations: Run exactly this many iterations for every sequence, whatever the residual. The control flow
            then does not depend on values, as `torch.compile` requires.
        tiles: Number of steps per tile of a sequential Gauss-Seidel sweep: before f is evaluated in a tile, the
            correction at the last step of the previous tile is propagated into it by Λ̄. This takes far fewer iterations
            where many are needed, but is no longer parallel in time: it is meant for one core and its cache. Only for
            undamped Conv- and Forward-DEER and real spectra.
        on_failure: The policy for sequences that did not converge.
        check: If the cell runs user code, call its step on a small batch first, and raise `InputError` if the sequences
            of a batch affect each other, or if the step is random or keeps a state of its own.
    """

    def __init__(
        self,
        linearization: Linearization,
        damping: Damping | None = None,
        *,
        atol: float = 0.0,
        rtol: float | None = None,
        max_iterations: int | None = None,
        patience: int | None = PATIENCE,
        fixed_iterations: int | None = None,
        tiles: int | None = None,
        on_failure: Policy = Finish(),
        check: bool = True,
    ):
        _check(Linearization, "solvers.linearizations.JacobianDiagonal()", linearization=linearization)
        _check(Policy, "solvers.Finish()", on_failure=on_failure)
        if damping is not None:
            _check(Damping, "solvers.Scale(0.99)", damping=damping)
        for name, value in {"atol": atol, "rtol": 0.0 if rtol is None else rtol}.items():
            if not (isinstance(value, (int, float)) and 0 <= value < float("inf")):
                raise InputError(f"{linearization.solver_name}({name}={value!r}): must be a finite number >= 0.")
        counts = {"max_iterations": max_iterations, "patience": patience, "fixed_iterations": fixed_iterations}
        counts["tiles"] = tiles
        for name, count in counts.items():
            if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
                raise InputError(f"{linearization.solver_name}({name}={count!r}): must be an integer >= 1, or None.")
        if fixed_iterations is not None and max_iterations is not None:
            raise InputError(f"{linearization.solver_name}: pass one of max_iterations= and fixed_iterations=.")
        self.linearization = linearization
        self.damping = damping or Undamped()
        self.atol = atol
        self.rtol = rtol
        self.max_iterations = max_iterations
        self.patience = patience
        self.fixed_iterations = fixed_iterations
        self.tiles = tiles
        self.on_failure = on_failure
        self.check = check

    def solve_system(self, cell: Cell, system: System, guess: Tensor | None) -> SystemSolution:
        system = self._with_radius(cell, system)
        guess = self.initial_guess(cell, system) if guess is None else guess
        newton_pass = find_newton_pass(cell, system, self.linearization, self.damping, self.tiles)
        rule = UpdateRule(
            lambda part, rows, start, entering: self.linearization.transition(cell, part, entering),
            self.damping,
            make_measure(newton_pass, cell, self.linearization, self.tiles),
            newton_pass.iterate if isinstance(newton_pass, DevicePass) else None,
        )
        outcome = solve(system, guess, rule, self.tolerance(system.initial.dtype), self._limits(system))
        return self.on_failure.apply(system, outcome, self)

    def _limits(self, system: System) -> Limits:
        if self.fixed_iterations is not None:
            return Limits(self.fixed_iterations, least=self.fixed_iterations)
        return Limits(self.max_iterations or max(system.axis.total(system.steps), 100), patience=self.patience)

    def linearize(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        return self.linearization.transition(cell, system, entering)

    def iterate(self, cell: Cell, system: System, guess: Tensor | None, count: int) -> Tensor:
        system = self._with_radius(cell, system)
        with torch.no_grad():
            states = self.initial_guess(cell, system) if guess is None else guess
            strength = self.damping.begin(states)
        previous: Tensor | None = None
        for _ in range(count):
            after = self._update(cell, system, states, strength)
            with torch.no_grad():
                change = (after - states).abs().amax((1, 2))
                strength = strength if previous is None else self.damping.adapt(strength, change, previous)
            states, previous = after, change
        return states

    def _update(self, cell: Cell, system: System, states: Tensor, strength: Tensor) -> Tensor:
        """Return the next iterate."""
        entering = system.entering_states(states)
        with torch.no_grad():  # at the solution the update does not depend on A, so neither does its derivative
            transition = self.linearization.transition(cell, system, entering)
        at = Iterate(states, entering, system.evaluate(entering))
        return self.damping.update(transition, system, at, strength)

    def initial_guess(self, cell: Cell, system: System) -> Tensor:
        """Return the default initial guess, (batch, time, n).

        It is the solution of the linear part of the cell, or the initial state at all steps if the cell has no linear
        part.

        Args:
            cell: The cell of the system.
            system: The equations.
        """
        shape = (*system.step_inputs[0].shape[:2], cell.state_size)
        transition = make_linear_transition(cell, system.step_inputs[0])
        if transition is None:
            return system.reset_state.unsqueeze(1).expand(shape).clone()
        offset = system.evaluate(system.initial.new_zeros(shape))
        return system.axis.scan(transition, offset, system.initial, system.reset)

    def tolerance(self, dtype: torch.dtype) -> Tolerance:
        return Tolerance(self.atol, default_rtol(dtype) if self.rtol is None else self.rtol)

    def _with_radius(self, cell: Cell, system: System) -> System:
        """Add the radius if the damping needs it."""
        if not self.damping.needs_radius:
            return system
        bound, radius = cell.structure().radius, None
        if bound is not None:
            with torch.no_grad():
                radius = bound(system.initial, system.step_inputs[0], system.reset_state, system.reset)
        if radius is None:
            raise IncompatibleError(
                f"{type(self.damping).__name__} needs a cell whose state provably stays in a ball; none is known for "
                f"this {type(cell).__name__}. Use solvers.Scale(0.99) or solvers.Adaptive()."
            )
        return dataclasses.replace(system, radius=radius)

    def __repr__(self) -> str:
        given = self.linearization.solver_options()
        given += [] if isinstance(self.damping, Undamped) else [repr(self.damping)]
        shown = ("atol", "rtol", "max_iterations", "fixed_iterations", "tiles")
        chosen = {name: value for name, value in vars(self).items() if name in shown and value is not None}
        given += [f"{name}={value}" for name, value in chosen.items() if (name, value) != ("atol", 0.0)]
        given += [] if self.patience == PATIENCE else [f"patience={self.patience}"]
        given += [] if self.check else ["check=False"]
        given += [] if isinstance(self.on_failure, Finish) else [f"on_failure={self.on_failure!r}"]
        return f"{self.linearization.solver_name}({', '.join(given)})"


def _check(kind: type, example: str, **given: object) -> None:
    """Raise `InputError` if an argument is not an instance of `kind`."""
    for name, value in given.items():
        if not isinstance(value, kind):
            raise InputError(f"{name}={value!r}: must be a {kind.__name__} object. Pass {name}={example}.")


def DEER(damping: Damping | None = None, **options: Any) -> Newton:
    """Return a Newton solver with the full Jacobian: fewest iterations, n² matrix entries per step.

    Args:
        damping: The damping; none if not given.
        options: Further arguments of `Newton`.
    """
    return Newton(FullJacobian(), damping, **options)


def QuasiDEER(damping: Damping | None = None, *, probes: int | None = None, **options: Any) -> Newton:
    """Return a Newton solver with the diagonal of the Jacobian. It works with every cell.

    Args:
        damping: The damping; none if not given.
        probes: Estimate the diagonal from this many random sign vectors; exact if not given.
        options: Further arguments of `Newton`.
    """
    return Newton(JacobianDiagonal(probes), damping, **options)


def ForwardDEER(damping: Damping | None = None, **options: Any) -> Newton:
    """Return a Newton solver with the diagonal of M (eq:diag_M): no derivatives, O(n) per step. For ADPT cells.

    Args:
        damping: The damping; none if not given.
        options: Further arguments of `Newton`.
    """
    return Newton(ConjugateDiagonal(), damping, **options)


def ConvDEER(damping: Damping | None = None, *, by: Callable[..., Tensor] = linear_scan, **options: Any) -> Newton:
    """Return a Newton solver with the constant Λ̄: no derivatives, and nothing to compute per step. For ADPT cells.

    Args:
        damping: The damping; none if not given.
        by: The function that runs the linear recurrence: `linear_scan`, or `lti_convolution` for FFTs.
        options: Further arguments of `Newton`.
    """
    return Newton(LinearPart(by), damping, **options)


def KoopmanDEER(
    damping: Damping | None = None,
    *,
    mean: type[MeanConjugate] | type[MeanJacobian] | type[MeanRotation] = MeanConjugate,
    means: int | Literal["auto"] = 1,
    **options: Any,
) -> Newton:
    """Return a Newton solver with a matrix that is constant in time: the mean of M at the current iterate.

    Args:
        damping: The damping; none if not given.
        mean: The class of the mean, from `solvers.linearizations`. `MeanConjugate`, the mean of M, needs no
            derivatives. `MeanJacobian`, the mean of J, takes fewer iterations. `MeanRotation` is the form of the paper.
        means: The number of equal intervals of time, each with its own mean. "auto" chooses it by the number of steps
            that have not converged: an interval has 64 steps, or as many as the state has dimensions if that is more.
        options: Further arguments of `Newton`.
    """
    if mean not in (MeanConjugate, MeanJacobian, MeanRotation):
        raise InputError(
            f"KoopmanDEER(mean={mean!r}): must be the class MeanConjugate, MeanJacobian or MeanRotation of "
            "solvers.linearizations."
        )
    return Newton(mean(means), damping, **options)


def Jacobi(damping: Damping | None = None, **options: Any) -> Newton:
    """Return the solver with A = 0: s ← f(s).

    Args:
        damping: The damping; none if not given.
        options: Further arguments of `Newton`.
    """
    return Newton(ZeroMatrix(), damping, **options)


def Picard(damping: Damping | None = None, **options: Any) -> Newton:
    """Return the solver with A = I.

    Args:
        damping: The damping; none if not given.
        options: Further arguments of `Newton`.
    """
    return Newton(IdentityMatrix(), damping, **options)
