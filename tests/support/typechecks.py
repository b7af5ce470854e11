"""The run-time type checker of the test suite. It checks only functions whose signatures state shapes.

Wrong values in a spec must reach the spec's own checks, whose messages are tested. All other functions stay as they
are: the wrapper of jaxtyping costs more than many of them, and those that are defined inside a call would be wrapped
anew in each.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

__all__ = ["checker", "install_checker"]

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))  # accept an int where a float is annotated
wrap_in_checks = jaxtyping.jaxtyped


def install_checker(*packages: str) -> jaxtyping._import_hook.ImportHookManager:
    """Check shapes in packages that are imported from now on."""
    jaxtyping.jaxtyped = check_where_shapes_are_stated
    return jaxtyping.install_import_hook(packages, "support.typechecks.checker")


def check_where_shapes_are_stated(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return the decorator that the import hook applies to every function and class."""

    def decorate(found: Any) -> Any:
        return wrap_in_checks(found, typechecker=typechecker) if states_shapes(found) else found

    return decorate


def states_shapes(function: Any) -> bool:
    """Return whether an argument or the result is annotated with a shape."""
    hints = getattr(function, "__annotations__", {}).values()
    return any(inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray) for hint in hints)
