"""The run-time type checker of the test suite: it looks at functions that state shapes, and leaves the others alone.

What is wrong in a spec must reach the spec's own checks, whose messages are tested.
"""

import inspect

import jaxtyping
from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is welcome where a float is asked for


def checker(function):
    hints = getattr(function, "__annotations__", {}).values()
    states_shapes = any(inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray) for hint in hints)
    return checked(function) if states_shapes else function
