"""The run-time type checker of the test suite. It checks only functions whose signatures state shapes.

Wrong values in a spec must reach the spec's own checks, whose messages are tested.
"""

import inspect

import jaxtyping
from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # accept an int where a float is annotated


def checker(function):
    hints = getattr(function, "__annotations__", {}).values()
    states_shapes = any(inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray) for hint in hints)
    return checked(function) if states_shapes else function
