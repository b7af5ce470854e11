"""A benchmark: the functions that it compares, the goals on their times, and the sizes at which they are timed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from adptnet.errors import InputError

from .goals import Goal
from .timing import Side

__all__ = ["STANDARD_SIZES", "Benchmark", "Case", "Size", "parse_size"]


class Size(NamedTuple):
    """The shape of a trajectory: batch, time and state dimension."""

    batch: int
    steps: int
    state: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.steps} x {self.state}"

    @property
    def elements(self) -> int:
        """The number of elements of a trajectory."""
        return self.batch * self.steps * self.state


# From one long, narrow sequence to many short, wide ones; last, a large batch of long, wide ones.
STANDARD_SIZES = tuple(
    Size(*size)
    for size in [(1, 16384, 64), (8, 1024, 128), (64, 1024, 128), (64, 128, 256), (512, 8, 512), (16, 4096, 256)]
)


def parse_size(text: str) -> Size:
    """Parse a size written as batch,steps,state, such as 8,1024,128.

    Args:
        text: The size as text.

    Raises:
        InputError: The text is not three integers >= 1.
    """
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or min(numbers) < 1:
        raise InputError(f"--sizes {text}: a size is batch,steps,state, integers >= 1, such as 8,1024,128.")
    return Size(*numbers)


@dataclass(frozen=True)
class Case:
    """A benchmark at one size, with the tensors allocated: the functions to time and the goals on their times.

    Attributes:
        sides: The functions to time in turn.
        goals: Bounds on ratios of their times, or on `numbers`.
        numbers: Measured values other than times, such as bytes, errors and iteration counts, by name.
        skipped: Sides that cannot be run here, and why.
    """

    sides: Sequence[Side] = ()
    goals: Sequence[Goal] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Benchmark:
    """One entry of the suite, such as `rotations`: a comparison of functions (`Side`) that is timed at several sizes.

    Attributes:
        about: One sentence that says what is compared with what.
        sizes: The sizes to measure at.
        fast_sizes: The sizes to measure at with --fast.
        operations: Operations that are checked against their references first; if a check fails, nothing is timed.
        make_case: Function of a size and `fast` that returns the case; if `fast` is True, functions that take minutes
            are left out.
        threads: Thread counts this benchmark supports; None for any. If none of the requested ones is supported, one
            thread is used.
    """

    about: str
    sizes: tuple[Size, ...]
    fast_sizes: tuple[Size, ...]
    operations: tuple[str, ...]
    make_case: Callable[[Size, bool], Case]
    threads: tuple[int, ...] | None = None
