"""Registry of the paper's labels: the result each belongs to, the claims, and the recipe that tests them."""

import dataclasses
import functools
import importlib
import pkgutil
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Literal

from adptnet.errors import AdptnetError
from adptnet.spec import suggest_name

from . import recipes
from .recipe import Recipe

__all__ = [
    "Claim",
    "Headline",
    "Label",
    "PaperResult",
    "ReproductionError",
    "find_results",
    "load_headlines",
    "load_labels",
    "load_results",
]


class ReproductionError(AdptnetError, ValueError):
    """A label that is not in the paper, a result that cannot be run, or rows that cannot be read or written."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement of the paper, in our words.

    Attributes:
        id: Its name within the result.
        says: The statement.
        kind: "paper" for a claim of the paper; "reading" for our reading of a figure or sentence; "ours" for an
            addition of ours; "check" for a statement that cannot fail unless the code is wrong. Only the first kind is
            counted as a claim of the paper.
        cause: Known cause of a failure: "paper" (the statement is wrong, with a proof or a counterexample), "ours" (our
            set-up or program differs) or "scale" (a reduced size).
        because: The cause in words.
    """

    id: str
    says: str
    kind: Literal["paper", "reading", "ours", "check"] = "paper"
    cause: Literal["", "paper", "ours", "scale"] = ""
    because: str = ""


@dataclasses.dataclass(frozen=True)
class Headline:
    """A statement of the abstract, with the claims that decide it.

    Attributes:
        id: Its name.
        says: The sentence, in our words.
        paper: The paper's numbers.
        claims: The claims on which it rests, as (result, claim).
        ours: Our numbers beside the paper's, with `{0.interval}` for the number that decides the first claim.
        run: What was run for it.
        found: What came out, in sentences with the same placeholders; also `{0.why}`, `{0.outcome}` and `{0.runs}`.
        open: What remains open.
    """

    id: str
    says: str
    paper: str
    claims: tuple[tuple[str, str], ...]
    ours: str
    run: str
    found: str
    open: str


@dataclasses.dataclass(frozen=True)
class Label:
    """A label of the paper.

    Attributes:
        name: The label.
        results: Names of the results that it shows.
        configuration: For a table of settings: what it configures.
        literature: For a table of quoted numbers: whose they are.
    """

    name: str
    results: tuple[str, ...] = ()
    configuration: str = ""
    literature: str = ""

    @property
    def kind(self) -> str:
        """Kind of the label: result, configuration or literature."""
        return "result" if self.results else "configuration" if self.configuration else "literature"


@dataclasses.dataclass(frozen=True)
class PaperResult:
    """A result that the paper shows under one or several labels, and the recipe that checks it.

    Attributes:
        name: Main label.
        title: What the result shows.
        section: Section of the paper.
        claims: Claims that the paper makes about it.
        setup: Set-up of the paper.
        numbers: Numbers of the paper: a mapping, or the `columns` and `rows` of a table. Where our table has the same
            columns, `keys` names those that identify a row, and the report prints both side by side.
        assumptions: Choices that we made where the paper does not specify one.
        deviations: Relevant points of docs/explanation/deviations.md.
        labels: All labels that show it.
        recipe: Our computation of it.
    """

    name: str
    title: str
    section: str
    claims: tuple[Claim, ...]
    setup: str
    numbers: Mapping[str, Any]
    assumptions: tuple[str, ...]
    deviations: tuple[int, ...]
    labels: tuple[str, ...]
    recipe: Recipe


@functools.cache
def load_labels() -> Mapping[str, Label]:
    """Return every label by name, in the order of the paper."""
    entries = tomllib.loads(resources.files(__package__).joinpath("labels.toml").read_text("utf-8"))
    return {
        name: Label(name, tuple(entry.get("results", [])), entry.get("configuration", ""), entry.get("literature", ""))
        for name, entry in entries.items()
    }


@functools.cache
def load_results() -> Mapping[str, PaperResult]:
    """Return every result by name, in the order of the paper."""
    entries: dict[str, dict[str, Any]] = {}
    for page in sorted(resources.files(__package__).joinpath("claims").iterdir(), key=lambda page: page.name):
        entries |= tomllib.loads(page.read_text("utf-8"))
    known_recipes = _load_recipes()
    order = dict.fromkeys(name for label in load_labels().values() for name in label.results)
    return {name: _make_result(name, entries[name], known_recipes[name]) for name in order}


@functools.cache
def load_headlines() -> tuple[Headline, ...]:
    """Return the statements of the abstract."""
    entries = tomllib.loads(resources.files(__package__).joinpath("abstract.toml").read_text("utf-8"))
    return tuple(
        Headline(
            name,
            entry["says"],
            entry["paper"],
            tuple(_split_reference(text) for text in entry["claims"]),
            entry["ours"],
            entry["run"],
            entry["found"],
            entry["open"],
        )
        for name, entry in entries.items()
    )


def _split_reference(text: str) -> tuple[str, str]:
    result, _, claim = text.rpartition("/")
    return result, claim


def find_results(names: Sequence[str]) -> list[PaperResult]:
    """Return the results that the given labels show.

    Args:
        names: Labels; all results are returned if there are none.

    Raises:
        ReproductionError: A name is not a label of the paper, or labels a table of settings or of quoted numbers.
    """
    if not names:
        return list(load_results().values())
    found: dict[str, PaperResult] = {}
    for name in names:
        if name not in load_labels():
            raise ReproductionError(
                f"{name!r} is not a label of the paper.{suggest_name(name, load_labels())} "
                "`adptnet reproduce --list` prints all labels."
            )
        label = load_labels()[name]
        if label.kind != "result":
            kind = "is a table of settings" if label.configuration else "quotes numbers of the literature"
            raise ReproductionError(
                f"{name} {kind}: {label.configuration or label.literature}. There is nothing to run."
            )
        found |= {result: load_results()[result] for result in label.results}
    return list(found.values())


def _make_result(name: str, entry: dict[str, Any], recipe: Recipe) -> PaperResult:
    return PaperResult(
        name,
        entry["title"],
        entry["section"],
        tuple(Claim(**claim) for claim in entry.get("claims", [])),
        entry.get("setup", ""),
        entry.get("numbers", {}),
        tuple(entry.get("assumptions", [])),
        tuple(entry.get("deviations", [])),
        tuple(label.name for label in load_labels().values() if name in label.results),
        recipe,
    )


def _load_recipes() -> dict[str, Recipe]:
    """Import every file in `recipes/` and collect its recipes."""
    collected: dict[str, Recipe] = {}
    for module in pkgutil.iter_modules(recipes.__path__):
        own = importlib.import_module(f"{recipes.__name__}.{module.name}").RECIPES
        duplicates = collected.keys() & own.keys()
        if duplicates:
            raise ReproductionError(f"two recipes for {sorted(duplicates)[0]}, the second in {module.name}.py.")
        collected |= own
    return collected
