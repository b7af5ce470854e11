"""Solvers and adjoints by name: solver="deer", adjoint="implicit"."""

from typing import Any

from .._choices import choose
from ..errors import InputError
from .adjoints import Adjoint, Checkpointed, Implicit, Unrolled
from .auto import Auto
from .base import Solver
from .newton import DEER, ConvDEER, ForwardDEER, Jacobi, KoopmanDEER, Picard, QuasiDEER
from .sequential import Sequential

__all__ = ["as_adjoint", "as_solver"]

_SOLVERS = (Sequential, Auto, DEER, QuasiDEER, ForwardDEER, ConvDEER, KoopmanDEER, Jacobi, Picard)
_ADJOINTS = (Implicit, Unrolled, Checkpointed)


def as_solver(solver: Any) -> Solver:
    """Return a solver, which may be given by its name.

    Args:
        solver: A solver, or text such as "deer" or "quasi-deer".

    Raises:
        SpecError: There is no solver of this name; the message lists the names.
        InputError: It is neither a solver nor text.
    """
    if isinstance(solver, str):
        return choose(solver, {kind.__name__: kind for kind in _SOLVERS}, "solver")
    if not isinstance(solver, Solver):
        known = [kind.__name__ for kind in _SOLVERS if kind is solver]
        raise InputError(
            f"solver={solver!r}: must be a solver object. Pass solver=solvers.{(*known, 'Sequential')[0]}()."
        )
    return solver


def as_adjoint(adjoint: Any) -> Adjoint | None:
    """Return a method of differentiation, which may be given by its name; None for the solver's default.

    Args:
        adjoint: An adjoint, text such as "implicit", or None.

    Raises:
        SpecError: There is no adjoint of this name; the message lists the names.
        InputError: It is neither an adjoint nor text.
    """
    if isinstance(adjoint, str):
        return choose(adjoint, {kind.__name__: kind for kind in _ADJOINTS}, "adjoint")
    if adjoint is not None and not isinstance(adjoint, Adjoint):
        raise InputError(f"adjoint={adjoint!r}: must be an Adjoint object. Pass adjoint=adjoints.Implicit().")
    return adjoint
