"""Policies: what becomes of the sequences that an iteration did not solve."""

import abc

__all__ = ["Finish", "Policy", "Raise", "Return"]


class Policy(abc.ABC):  # noqa: B024 - solvers ask which it is
    """What to do with a sequence that has not converged."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Finish(Policy):
    """Completes it step by step from where it is right: always exact. The result says FINISHED."""


class Raise(Policy):
    """Raises `errors.NotConverged`."""


class Return(Policy):
    """Hands it back as it is. The result says what it is; look at it."""
