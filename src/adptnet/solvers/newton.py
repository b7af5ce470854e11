"""Newton's method along time: s ← scan(A, f(s) - A s), with A and its damping as objects."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cells.base import Cell
from ..errors import IncompatibleError, InputError
from ..ops.linear_scan import linear_scan
from ..ops.tolerance import Tolerance
from .damping import Damping, Proximal, Undamped
from .fixed_point import Iterate, default_rtol, solve
from .linearisations import (
    ConjugateDiagonal,
    FullJacobian,
    Identity,
    JacobianDiagonal,
    Linear,
    Linearisation,
    MeanConjugate,
    MeanRotation,
    Nothing,
)
from .parallel import Parallel, Search, completed
from .passes import passes
from .policies import Finish, Policy
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
    """Finds all steps together, from a guess that is made better until every step is within tolerance.

    Whatever the linearisation, the states are those of `Sequential` to the tolerance, or the result says that they are
    not. Undamped (or with `Scale`) and run by a scan, the first k steps are exact after k iterations.

    Args:
        linearisation: What stands for the derivative of the step.
        damping: What holds an iteration back; nothing if not given.
        atol, rtol: A step is right when |f(s_{t-1}) - s_t| <= atol + rtol · scale in every channel, the scale being the
            largest |f| of that channel in recent steps (see `adptnet.ops.tolerance`). If not given, atol is 0 and rtol
            follows from the dtype.
        max_iterations: The length if not given (at least 100), which suffices undamped.
        patience: Give a sequence up when its residual has risen this many times in a row and is above the guess's;
            None to go on.
        fixed_iterations: Do exactly these many for every sequence, whatever the residual: no value decides what is
            run, as `torch.compile` wants it.
        tiles: Sweep over tiles of so many steps, one after another: the guess of a tile is moved by what the tile
            before it has just been corrected by (Gauss and Seidel). Far fewer iterations where many are needed, but no
            longer parallel in time: for one core and its cache. For undamped Conv- and Forward-DEER, real spectra.
        on_failure: What becomes of sequences that did not converge.
        check: Call the step of a cell from outside this package on a few rows first, and raise `InputError` if it
            couples rows, is random, or keeps a state of its own.
    """

    def __init__(
        self,
        linearisation: Linearisation,
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
        _check(Linearisation, "solvers.linearisations.JacobianDiagonal()", linearisation=linearisation)
        _check(Policy, "solvers.Finish()", on_failure=on_failure)
        if damping is not None:
            _check(Damping, "solvers.Scale(0.99)", damping=damping)
        for name, value in {"atol": atol, "rtol": 0.0 if rtol is None else rtol}.items():
            if not (isinstance(value, (int, float)) and 0 <= value < float("inf")):
                raise InputError(f"{linearisation.solver}({name}={value!r}): must be a finite number from 0.")
        counts = {"max_iterations": max_iterations, "patience": patience, "fixed_iterations": fixed_iterations}
        counts["tiles"] = tiles
        for name, count in counts.items():
            if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
                raise InputError(f"{linearisation.solver}({name}={count!r}): must be a whole number from 1, or None.")
        if fixed_iterations is not None and max_iterations is not None:
            raise InputError(f"{linearisation.solver}: pass one of max_iterations= and fixed_iterations=.")
        self.linearisation = linearisation
        self.damping = damping or Undamped()
        self.atol = atol
        self.rtol = rtol
        self.max_iterations = max_iterations
        self.patience = patience
        self.fixed_iterations = fixed_iterations
        self.tiles = tiles
        self.on_failure = on_failure
        self.check = check

    @property
    def fixed(self) -> int | None:
        return self.fixed_iterations

    def search(self, cell: Cell, system: System, guess: Tensor | None) -> Search:
        system = self._with_radius(cell, system)
        fixed = self.fixed_iterations
        found = solve(
            system,
            self.guess(cell, system) if guess is None else guess,
            lambda part, rows, first, entering: self.linearisation.transition(cell, part, entering),
            self.damping.update,
            self.tolerance(system.initial.dtype),
            max_iterations=fixed or self.max_iterations or max(system.steps, 100),
            patience=None if fixed else self.patience,
            strength=self.damping.begin(system.initial),
            adapt=self.damping.adapt,
            least=fixed or 1,
            measure=passes(cell, system, self.linearisation, self.damping, self.tiles),
        )
        return completed(system, found, self.on_failure, self)

    def linearise(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        return self.linearisation.transition(cell, system, entering)

    def iterate(self, cell: Cell, system: System, guess: Tensor | None, count: int) -> Tensor:
        system = self._with_radius(cell, system)
        with torch.no_grad():
            states = self.guess(cell, system) if guess is None else guess
            strength = self.damping.begin(states)
        previous: Tensor | None = None
        for _ in range(count):
            after = self._updated(cell, system, states, strength)
            with torch.no_grad():
                change = (after - states).abs().amax((1, 2))
                strength = strength if previous is None else self.damping.adapt(strength, change, previous)
            states, previous = after, change
        return states

    def _updated(self, cell: Cell, system: System, states: Tensor, strength: Tensor) -> Tensor:
        entering = system.entering(states)
        with torch.no_grad():  # at the solution A does not matter, so neither does its derivative
            transition = self.linearisation.transition(cell, system, entering)
        at = Iterate(states, entering, system.evaluate(entering))
        return self.damping.update(transition, system, at, strength)

    def guess(self, cell: Cell, system: System) -> Tensor:
        """Where to start: the states of the linear part of the cell; its initial state for cells that have none."""
        shape = (*system.givens[0].shape[:2], cell.state_size)
        transition = cell.linear_transition(system.givens[0])
        if transition is None:
            return system.fresh.unsqueeze(1).expand(shape).clone()
        return transition.scan(system.evaluate(system.initial.new_zeros(shape)), system.initial, system.reset)

    def tolerance(self, dtype: torch.dtype) -> Tolerance:
        return Tolerance(self.atol, default_rtol(dtype) if self.rtol is None else self.rtol)

    def _with_radius(self, cell: Cell, system: System) -> System:
        if not isinstance(self.damping, Proximal):
            return system
        with torch.no_grad():
            radius = cell.radius(system.initial, system.givens[0], system.fresh, system.reset)
        if radius is None:
            raise IncompatibleError(
                f"Proximal needs a cell whose state provably stays in a ball; none is known for this "
                f"{type(cell).__name__}. Use solvers.Scale(0.99) or solvers.Adaptive()."
            )
        return dataclasses.replace(system, radius=radius)

    def __repr__(self) -> str:
        given = self.linearisation.options()
        given += ["mean=MeanRotation"] if isinstance(self.linearisation, MeanRotation) else []
        given += [] if isinstance(self.damping, Undamped) else [repr(self.damping)]
        shown = ("atol", "rtol", "max_iterations", "fixed_iterations", "tiles")
        chosen = {name: value for name, value in vars(self).items() if name in shown and value is not None}
        given += [f"{name}={value}" for name, value in chosen.items() if (name, value) != ("atol", 0.0)]
        given += [] if self.patience == PATIENCE else [f"patience={self.patience}"]
        given += [] if self.check else ["check=False"]
        given += [] if isinstance(self.on_failure, Finish) else [f"on_failure={self.on_failure!r}"]
        return f"{self.linearisation.solver}({', '.join(given)})"


def _check(kind: type, example: str, **given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, kind):
            raise InputError(f"{name}={value!r}: must be a {kind.__name__} object. Pass {name}={example}.")


def DEER(damping: Damping | None = None, **options: Any) -> Newton:
    """Newton with the full Jacobian: fewest iterations, n² numbers for each step. `options` are those of `Newton`."""
    return Newton(FullJacobian(), damping, **options)


def QuasiDEER(damping: Damping | None = None, *, probes: int | None = None, **options: Any) -> Newton:
    """Newton with the diagonal of the Jacobian: any cell. `probes` estimates it from that many random signs."""
    return Newton(JacobianDiagonal(probes), damping, **options)


def ForwardDEER(damping: Damping | None = None, **options: Any) -> Newton:
    """Newton with the diagonal of M (eq:diag_M): no derivative, O(n). For ADPT cells."""
    return Newton(ConjugateDiagonal(), damping, **options)


def ConvDEER(damping: Damping | None = None, *, by: Callable[..., Tensor] = linear_scan, **options: Any) -> Newton:
    """Newton with Λ̄ itself: no derivative, nothing to compute. For ADPT cells.

    `by=ops.lti_convolution` runs it by FFT.
    """
    return Newton(Linear(by), damping, **options)


def KoopmanDEER(
    damping: Damping | None = None,
    *,
    mean: type[MeanConjugate] | type[MeanRotation] = MeanConjugate,
    means: int = 1,
    **options: Any,
) -> Newton:
    """Newton with one matrix for all time, a mean over the guess: no derivative.

    `means` of them for as many stretches of time; `mean=solvers.linearisations.MeanRotation` for the paper's form.
    """
    if mean not in (MeanConjugate, MeanRotation):
        raise InputError(
            f"KoopmanDEER(mean={mean!r}): must be the class MeanConjugate or MeanRotation of solvers.linearisations."
        )
    return Newton(mean(means), damping, **options)


def Jacobi(damping: Damping | None = None, **options: Any) -> Newton:
    """s ← f(s)."""
    return Newton(Nothing(), damping, **options)


def Picard(damping: Damping | None = None, **options: Any) -> Newton:
    """Newton with A = I."""
    return Newton(Identity(), damping, **options)
