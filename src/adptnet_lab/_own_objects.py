"""Objects of a user's own on the command line: `module:Name`, or the name of an entry point of an installed package."""

import importlib
import importlib.metadata
import os
import sys
from typing import Any

from adptnet.errors import InputError

__all__ = ["find_own", "import_module"]


def find_own(name: str, *groups: str) -> Any:
    """Return the object that `module:Name` or an entry point names; None if `name` has no colon and is no entry point.

    Args:
        name: What was typed, such as "my_tasks:Echo". Modules in the current folder are found.
        groups: Groups of entry points, such as "adptnet.tasks".

    Raises:
        InputError: The module cannot be imported, or has no such object.
    """
    for group in groups:
        for entry in importlib.metadata.entry_points(group=group, name=name):
            return entry.load()
    module, colon, attribute = name.partition(":")
    if not colon:
        return None
    found = import_module(module)
    if not hasattr(found, attribute):
        raise InputError(f"{name}: the module {module} has no {attribute!r}. Pass module:Name, e.g. my_tasks:Echo.")
    return getattr(found, attribute)


def import_module(name: str) -> Any:
    """Import a module of a user's own, also from the current folder.

    Args:
        name: The dotted name of the module.

    Raises:
        InputError: It does not exist, or raises an error.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            reason = f"there is no module {name!r} in {os.getcwd()} or among the installed packages."
        raise InputError(f"the module {name!r} cannot be imported: {reason}") from error
