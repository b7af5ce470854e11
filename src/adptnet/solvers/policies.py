"""Failure policies: how a solver handles sequences that did not converge."""

import abc

__all__ = ["Finish", "Policy", "Raise", "Return"]


class Policy(abc.ABC):  # noqa: B024 - solvers test for the subclass
    """Base class of failure policies."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Finish(Policy):
    """Compute the steps that did not converge sequentially: always exact. The result is `FINISHED`."""


class Raise(Policy):
    """Raise `errors.NotConverged`."""


class Return(Policy):
    """Return the last iterate as it is. Check `Solution.results`."""
