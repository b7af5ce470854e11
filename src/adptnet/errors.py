"""Errors and warnings of adptnet.

Each message says what was given, what is needed and what to type. Every error class also derives from the built-in
exception that fits, so that `except ValueError` works.
"""

__all__ = [
    "AdptnetError",
    "BackendWarning",
    "BuildError",
    "CheckpointError",
    "DataError",
    "DistributedError",
    "IncompatibleError",
    "InputError",
    "NonFiniteError",
    "NotConverged",
    "NotConvergedWarning",
    "SpecError",
    "WeightDecayWarning",
    "WrongResultError",
]


_LONGEST = 4000  # characters of a message, which may show a value of any size


class AdptnetError(Exception):
    """Base class of all errors that adptnet raises. The middle of a very long message is left out."""

    def __init__(self, *args: object):
        super().__init__(*(_shorten(arg) if isinstance(arg, str) else arg for arg in args))


def _shorten(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]} … ({len(text) - 2 * half:,} characters left out) … {text[-half:]}"


class InputError(AdptnetError, ValueError):
    """A tensor of the wrong shape, dtype or range was given to a layer, a solver or a task."""


class NonFiniteError(InputError):
    """NaN or infinity where a finite value is needed."""


class NotConverged(AdptnetError, ArithmeticError):
    """A solver with the policy `Raise` did not reach its tolerance."""


class NotConvergedWarning(UserWarning):
    """A layer uses states of a solver with the policy `Return` that did not converge to its tolerance."""


class IncompatibleError(AdptnetError, ValueError):
    """Components that are valid on their own but do not fit together."""


class SpecError(AdptnetError, ValueError):
    """A specification that cannot be built or read."""


class CheckpointError(AdptnetError, ValueError):
    """A file that is not a complete adptnet checkpoint."""


class DataError(AdptnetError, ValueError):
    """A data file that is missing, incomplete or not what it should be."""


class BuildError(AdptnetError, RuntimeError):
    """A kernel could not be compiled."""


class BackendWarning(UserWarning):
    """A slower implementation is used than this machine supports."""


class WeightDecayWarning(UserWarning):
    """An optimizer decays parameters for which zero has no meaning, such as the logarithms of timescales."""


class DistributedError(AdptnetError, RuntimeError):
    """The ranks of a process group disagree: one is missing, has failed, or got different arguments."""


class WrongResultError(AdptnetError, ArithmeticError):
    """A fast implementation disagrees with its reference."""
