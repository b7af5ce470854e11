"""What is measured together, and the sizes it is measured at."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from adptnet.errors import InputError

from .goals import Goal
from .timing import Side

__all__ = ["SIX", "Case", "Size", "Subject", "parsed"]


class Size(NamedTuple):
    """Sequences, steps of each, and numbers in the state."""

    batch: int
    steps: int
    state: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.steps} x {self.state}"

    @property
    def numbers(self) -> int:
        """In a trajectory."""
        return self.batch * self.steps * self.state


# From one long and narrow sequence to many short and wide ones.
SIX = tuple(
    Size(*size)
    for size in [(1, 16384, 64), (8, 1024, 128), (64, 1024, 128), (64, 128, 256), (512, 8, 512), (16, 4096, 256)]
)


def parsed(text: str) -> Size:
    """A size as it is typed: 8,1024,128."""
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or min(numbers) < 1:
        raise InputError(f"--sizes {text}: a size is batch,steps,state, whole numbers from 1, such as 8,1024,128.")
    return Size(*numbers)


@dataclass(frozen=True)
class Case:
    """The sides of one size, which are timed in turn, and what is expected of them."""

    sides: Sequence[Side] = ()
    goals: Sequence[Goal] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)  # measured otherwise than by a clock
    skipped: Mapping[str, str] = field(default_factory=dict)  # sides that cannot be run here, and why


@dataclass(frozen=True)
class Subject:
    """A question to ask of this machine.

    Attributes:
        about: What is compared with what.
        sizes: What it is asked at.
        quick: What it is asked at with --fast.
        operations: Whose answers must be right for its times to mean anything.
        case: The sides of a size; with `fast` without those that take minutes.
        threads: Numbers of threads that make sense; every number that is asked for if None.
    """

    about: str
    sizes: tuple[Size, ...]
    quick: tuple[Size, ...]
    operations: tuple[str, ...]
    case: Callable[[Size, bool], Case]
    threads: tuple[int, ...] | None = None
