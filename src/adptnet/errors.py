"""The errors this library raises on purpose.

Each message says what was given, what was needed and what to type. Every class is also the built-in that fits,
so `except ValueError` keeps working.
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


class AdptnetError(Exception):
    """Base of every error raised on purpose by adptnet."""


class InputError(AdptnetError, ValueError):
    """A tensor of the wrong shape, dtype or range was given to a layer, a solver or a task."""


class NonFiniteError(InputError):
    """NaN or infinity where a number was needed."""


class NotConverged(AdptnetError, ArithmeticError):
    """A solver with the policy `Raise` did not reach its tolerance."""


class NotConvergedWarning(UserWarning):
    """A layer went on with states that its solver, with the policy `Return`, did not find to its tolerance."""


class IncompatibleError(AdptnetError, ValueError):
    """Parts that are each fine but do not fit together."""


class SpecError(AdptnetError, ValueError):
    """A specification that cannot be built or read."""


class CheckpointError(AdptnetError, ValueError):
    """A file that is not a complete adptnet checkpoint."""


class DataError(AdptnetError, ValueError):
    """A data file that is missing, incomplete or not what it should be."""


class BuildError(AdptnetError, RuntimeError):
    """A kernel could not be compiled."""


class BackendWarning(UserWarning):
    """Something runs, but not as fast as it could on this machine."""


class WeightDecayWarning(UserWarning):
    """An optimizer decays parameters for which zero has no meaning, such as the logarithms of timescales."""


class DistributedError(AdptnetError, RuntimeError):
    """The ranks of a process group do not work together: one is gone, has failed, or was given something else."""


class WrongResultError(AdptnetError, ArithmeticError):
    """A fast program gave another answer than its reference."""
