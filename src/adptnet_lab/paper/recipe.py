"""What a recipe is: points to run, one row of numbers from each, a figure, a table and a test for each claim.

A recipe is one file in `recipes/` with a mapping `RECIPES` from the name of a result to its `Recipe`. It is found
there; nothing else has to know of it.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from adptnet.spec import Spec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "MARKS",
    "SCALES",
    "Check",
    "Finding",
    "Outcome",
    "Part",
    "Point",
    "Recipe",
    "Row",
    "Rows",
    "Scale",
    "Table",
    "Verdict",
    "belongs",
]

Scale = Literal["smoke", "laptop", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "laptop", "paper")

Part = Mapping[str, Sequence[Any]]  # some of the points: the values that settings may have


def belongs(settings: Mapping[str, Any], part: Part) -> bool:
    """Whether a point with these settings is one of `part`."""
    return all(key in settings and settings[key] in values for key, values in part.items())


@dataclasses.dataclass(frozen=True)
class Point:
    """One run: its settings, which with the seed determine its numbers."""

    settings: Mapping[str, Any]  # JSON: numbers, text, lists
    seed: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.settings.items()) + f", seed {self.seed}"


class Finding(NamedTuple):
    """What a run found."""

    numbers: dict[str, Any]  # the same for the same point, always; tensors are stored as lists
    spec: Spec | None = None  # of the model
    times: Mapping[str, Any] = {}  # measured times, which are never the same


class Row(NamedTuple):
    """A finished point."""

    settings: Mapping[str, Any]
    seed: int
    numbers: Mapping[str, Any]
    time: Mapping[str, Any]
    scale: Scale


class Rows(Sequence[Row]):
    """The rows of one result at one scale, in the order of its points."""

    def __init__(self, rows: Sequence[Row]):
        self._rows = list(rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def where(self, **settings: Any) -> "Rows":
        """The rows with these settings."""
        return Rows([row for row in self if all(row.settings.get(key) == value for key, value in settings.items())])

    def groups(self, *keys: str) -> dict[tuple[Any, ...], "Rows"]:
        """The rows by their values of these settings, in order of appearance."""
        found: dict[tuple[Any, ...], list[Row]] = {}
        for row in self:
            found.setdefault(tuple(row.settings[key] for key in keys), []).append(row)
        return {values: Rows(rows) for values, rows in found.items()}

    def values(self, key: str) -> list[Any]:
        """The different values of one setting, in order of appearance."""
        return list(dict.fromkeys(row.settings[key] for row in self if key in row.settings))

    def numbers(self, key: str) -> list[Any]:
        """One number of every row."""
        return [row.numbers[key] for row in self]


class Outcome(enum.StrEnum):
    """What can be said of a claim."""

    HOLDS = "holds"
    FAILS = "fails"
    NOT_TESTABLE = "not testable at this scale"
    NOT_RUN = "not run"


MARKS = {Outcome.HOLDS: "✓", Outcome.FAILS: "✗", Outcome.NOT_TESTABLE: "–", Outcome.NOT_RUN: "·"}


class Verdict(NamedTuple):
    """An outcome with the numbers behind it."""

    outcome: Outcome
    why: str

    @classmethod
    def of(cls, holds: bool, why: str, because: str = "") -> "Verdict":
        """`because` is the reason that we know for a claim that fails, and is said of no other."""
        if holds:
            return cls(Outcome.HOLDS, why)
        return cls(Outcome.FAILS, f"{why}: {because}" if because else why)


@dataclasses.dataclass(frozen=True)
class Check:
    """The test of a claim. Its docstring is the test in words, as the report shows it."""

    test: Callable[[Rows], Verdict]
    smallest: Scale = "smoke"  # below this scale the claim cannot be tested
    part: Part = dataclasses.field(default_factory=dict)  # the points it takes, if they are not all

    @property
    def words(self) -> str:
        return " ".join((self.test.__doc__ or "").split())


class Table(NamedTuple):
    """Our numbers, in the form of a table."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a result is computed and judged.

    Attributes:
        version: Raised when a change of the code moves numbers: rows of another version do not count as done.
        points: What there is to run at a scale.
        run: One point. It runs on one thread, with the global generator seeded by the point and `dtype` the default.
        figures: What to draw from the rows, by caption.
        table: Our numbers beside the paper's.
        checks: The test of each claim, by the id of the claim.
        cost: How long all points of a scale take, on one core.
        source: The name of another result whose rows these are, where two figures show one experiment.
        largest: A setting of which one value is enough, where few have time for the largest: the points of the
            largest value that is complete are the result.
        lacks: What has to be here for a scale and is not, such as files of data, and what to do; None if nothing is.
    """

    version: int
    points: Callable[[Scale], list[Point]]
    run: Callable[[Point], Finding]
    checks: Mapping[str, Check]
    figures: Mapping[str, Callable[[Rows], "Figure"]] = dataclasses.field(default_factory=dict)
    table: Callable[[Rows], Table] | None = None
    cost: Mapping[Scale, str] = dataclasses.field(default_factory=dict)
    source: str | None = None
    dtype: torch.dtype = torch.float64
    largest: str | None = None
    lacks: Callable[[Scale], str | None] = lambda scale: None
