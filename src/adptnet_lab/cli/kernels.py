"""`adptnet kernels`: compile the kernels ahead of their first use, or show what executes each operation."""

from dataclasses import dataclass
from typing import Literal

from tyro.conf import Positional

from adptnet.ops import _backends, _build

__all__ = ["Kernels", "run"]


@dataclass(frozen=True)
class Kernels:
    """Compile the kernels ahead of their first use, or show what executes each operation."""

    action: Positional[Literal["build", "show"]] = "show"
    """Action: compile all kernels, or show the backend of each operation."""


def run(options: Kernels) -> None:
    """Print the file of each kernel that was compiled, or the backend of each operation.

    Args:
        options: The options.
    """
    if options.action == "build":
        for path in _build.build_all():
            print(path)
        return
    for operation, backend in _backends.backends().items():
        print(f"{operation}: {backend}")
