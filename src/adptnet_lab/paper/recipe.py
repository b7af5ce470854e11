"""Building blocks of a recipe: grid points, one row of numbers per point, figures, a table, and a test per claim.

A recipe is a file in `recipes/` with a mapping `RECIPES` from the name of a result to its `Recipe`. Every file in that
folder is imported; recipes are not registered anywhere else.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from adptnet.spec import Spec

from .verdicts import ClaimVerdict, Scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "SCALES",
    "Check",
    "GridPoint",
    "Recipe",
    "Row",
    "Rows",
    "RunOutput",
    "Scale",
    "Subset",
    "Table",
    "change_settings",
    "is_in_subset",
    "use_complete_seeds",
]

SCALES: tuple[Scale, ...] = ("smoke", "laptop", "paper")

Subset = Mapping[str, Sequence[Any]]  # selects points by the values that their settings may have


def is_in_subset(settings: Mapping[str, Any], subset: Subset) -> bool:
    """Return whether a point belongs to a subset.

    Args:
        settings: Settings of the point.
        subset: The subset; every point belongs to an empty mapping. None among the values also matches points that do
            not have the setting.
    """
    return all(settings.get(key) in values for key, values in subset.items())


@dataclasses.dataclass(frozen=True)
class GridPoint:
    """One run of an experiment. Settings and seed determine its numbers."""

    settings: Mapping[str, Any]  # JSON: numbers, text, lists
    seed: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.settings.items()) + f", seed {self.seed}"


def change_settings(points: Sequence[GridPoint], changes: Mapping[str, Any]) -> list[GridPoint]:
    """Return the points with some settings replaced, each once.

    Args:
        points: The points.
        changes: New values of settings.
    """
    changed = [GridPoint({**point.settings, **changes}, point.seed) for point in points]
    return [point for place, point in enumerate(changed) if point not in changed[:place]] if changes else list(points)


class RunOutput(NamedTuple):
    """The output of one run."""

    numbers: dict[str, Any]  # reproducible: the same for every run of the same point; tensors are stored as lists
    spec: Spec | None = None  # of the model
    times: Mapping[str, Any] = {}  # measured times, which differ between runs


class Row(NamedTuple):
    """The stored output of a finished point."""

    settings: Mapping[str, Any]
    seed: int
    numbers: Mapping[str, Any]
    time: Mapping[str, Any]
    scale: Scale


class Rows(Sequence[Row]):
    """The rows of one result at one scale, in the order of its points.

    Args:
        rows: The rows.
    """

    def __init__(self, rows: Sequence[Row]):
        self._rows = list(rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def where(self, **settings: Any) -> "Rows":
        """Return the rows with the given settings.

        Args:
            **settings: Values of settings.
        """
        return Rows([row for row in self if all(row.settings.get(key) == value for key, value in settings.items())])

    def groups(self, *keys: str) -> dict[tuple[Any, ...], "Rows"]:
        """Group the rows by their values of some settings, in order of appearance.

        Args:
            *keys: The settings.
        """
        grouped: dict[tuple[Any, ...], list[Row]] = {}
        for row in self:
            grouped.setdefault(tuple(row.settings[key] for key in keys), []).append(row)
        return {values: Rows(rows) for values, rows in grouped.items()}

    def values(self, key: str) -> list[Any]:
        """Return the distinct values of one setting, in order of appearance.

        Args:
            key: The setting.
        """
        return list(dict.fromkeys(row.settings[key] for row in self if key in row.settings))

    def numbers(self, key: str) -> list[Any]:
        """Return one of the numbers of every row.

        Args:
            key: Name of the number.
        """
        return [row.numbers[key] for row in self]


def use_complete_seeds(test: Callable[[Rows], ClaimVerdict]) -> Callable[[Rows], ClaimVerdict]:
    """Give a test only the rows of seeds that have been run with every setting, so that it can pair them.

    Args:
        test: The test.
    """

    @functools.wraps(test)
    def test_complete(rows: Rows) -> ClaimVerdict:
        counts = Counter(row.seed for row in rows)
        return test(Rows([row for row in rows if counts[row.seed] == max(counts.values())]))

    return test_complete


@dataclasses.dataclass(frozen=True)
class Check:
    """The test of a claim. The docstring of `test` states the criterion, and the report prints it.

    Attributes:
        test: Decides the claim from the rows.
        smallest_scale: Below this scale the claim is not testable.
        subset: The points that the test needs; all of them if empty.
        reason: Why smaller scales cannot test the claim.
        reads: The points whose rows the test is given, if they exist; those of `subset` if empty.
    """

    test: Callable[[Rows], ClaimVerdict]
    smallest_scale: Scale = "smoke"
    subset: Subset = dataclasses.field(default_factory=dict)
    reason: str = ""
    reads: Subset = dataclasses.field(default_factory=dict)

    @property
    def description(self) -> str:
        """The criterion in words."""
        return " ".join((self.test.__doc__ or "").split())


class Table(NamedTuple):
    """A table of the report."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Computation and tests of one result.

    Attributes:
        version: Incremented when a change of the code changes numbers. Rows of another version are ignored.
        points: Returns the points to run at a scale.
        run: Runs one point. It runs on one thread, with `dtype` as default dtype and the global generator seeded with
            the seed of the point.
        checks: The test of each claim, by claim id.
        figures: Functions that draw a figure from the rows, by caption.
        table: Makes the table of our numbers that is printed beside the paper's.
        cost: How long all points of a scale take on one core.
        source: Name of the result whose rows are used, where two results show one experiment.
        borrows: Names of results whose rows are used for points that have the same settings there.
        dtype: Default dtype of a run.
        rank: Rank of a point by its settings, where several versions of an experiment exist, such as lengths of which
            few people can afford the largest. The result uses only the points of the highest rank that is complete.
        reduction: Returns by how much points of the scale `paper` are smaller than the paper's, in words; empty if they
            have its size. Verdicts on smaller ones count as those of a reduced scale.
        options: Settings that points do not have but `--set` may add, with what they do.
        find_missing_data: Returns which data files a scale needs and lacks, and how to get them; None if nothing is
            missing.
    """

    version: int
    points: Callable[[Scale], list[GridPoint]]
    run: Callable[[GridPoint], RunOutput]
    checks: Mapping[str, Check]
    figures: Mapping[str, Callable[[Rows], "Figure"]] = dataclasses.field(default_factory=dict)
    table: Callable[[Rows], Table] | None = None
    cost: Mapping[Scale, str] = dataclasses.field(default_factory=dict)
    source: str | None = None
    borrows: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64
    rank: Callable[[Mapping[str, Any]], Any] | None = None
    reduction: Callable[[Mapping[str, Any]], str] = lambda settings: ""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    find_missing_data: Callable[[Scale], str | None] = lambda scale: None
