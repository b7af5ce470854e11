"""Text in place of an object for a common choice, such as solver="deer" or spectrum="linspace"."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from .errors import SpecError

__all__ = ["choose"]

T = TypeVar("T")
_IGNORED = str.maketrans("", "", "-_ ")


def choose(text: str, choices: Mapping[str, Callable[[], T]], name: str, owner: str = "") -> T:
    """Return the object that `text` names. Case, hyphens, underscores and spaces make no difference.

    Args:
        text: The name of a class, such as "quasi-deer" for QuasiDEER.
        choices: The classes by name.
        name: The argument, for the message, such as "solver".
        owner: The class or function that has the argument, for the message.

    Raises:
        SpecError: There is no such name (the message lists the choices), or the class has required arguments.
    """
    known = {_normalize(choice): choice for choice in choices}
    given = f"{owner}({name}={text!r})" if owner else f"{name}={text!r}"
    found = known.get(_normalize(text))
    if found is None:
        names = ", ".join(map(repr, sorted(known)))
        raise SpecError(f"{given} is unknown. Pass one of {names}, or an object such as {next(iter(choices))}().")
    try:
        return choices[found]()
    except TypeError:
        raise SpecError(f"{given}: {found} has required arguments. Pass {name}={found}(...).") from None


def _normalize(name: str) -> str:
    return name.translate(_IGNORED).lower()
