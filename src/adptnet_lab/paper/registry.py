"""Every table and figure of the paper by its label: the result it belongs to, what is claimed, how it is checked."""

import dataclasses
import functools
import importlib
import pkgutil
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from adptnet.errors import AdptnetError
from adptnet.spec import nearest

from . import recipes
from .recipe import Recipe

__all__ = ["Claim", "Label", "ReproductionError", "Result", "find", "labels", "results"]


class ReproductionError(AdptnetError, ValueError):
    """A label that is not the paper's, or one that cannot be run."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement of the paper, in our words."""

    id: str
    says: str


@dataclasses.dataclass(frozen=True)
class Label:
    """A label of the paper: of results, or of a table that sets up or quotes others."""

    name: str
    results: tuple[str, ...] = ()
    configuration: str = ""  # what it sets up
    literature: str = ""  # whose numbers it quotes

    @property
    def kind(self) -> str:
        return "result" if self.results else "configuration" if self.configuration else "literature"


@dataclasses.dataclass(frozen=True)
class Result:
    """What the paper shows under one or several labels, and how we check it.

    Attributes:
        name: Its main label.
        title: What it shows.
        section: Where in the paper.
        claims: What the paper says of it.
        setup: The paper's set-up.
        numbers: The paper's numbers: a mapping, or `columns` and `rows` of a table.
        assumptions: What we assumed where the paper is silent.
        deviations: Points of docs/explanation/deviations.md that bear on it.
        labels: All labels that show it.
        recipe: How we compute it.
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
def labels() -> Mapping[str, Label]:
    """Every label, in the order of the paper."""
    listed = tomllib.loads(resources.files(__package__).joinpath("labels.toml").read_text("utf-8"))
    return {
        name: Label(name, tuple(entry.get("results", [])), entry.get("configuration", ""), entry.get("literature", ""))
        for name, entry in listed.items()
    }


@functools.cache
def results() -> Mapping[str, Result]:
    """Every result by its name, in the order of the paper."""
    described: dict[str, dict[str, Any]] = {}
    for page in sorted(resources.files(__package__).joinpath("results").iterdir(), key=lambda page: page.name):
        described |= tomllib.loads(page.read_text("utf-8"))
    found = _recipes()
    order = dict.fromkeys(name for label in labels().values() for name in label.results)
    return {name: _result(name, described[name], found[name]) for name in order}


def find(names: Sequence[str]) -> list[Result]:
    """The results that show the given labels; all of them if none is given.

    Raises:
        ReproductionError: A name is not a label of the paper, or only sets up or quotes others.
    """
    if not names:
        return list(results().values())
    found: dict[str, Result] = {}
    for name in names:
        if name not in labels():
            raise ReproductionError(
                f"{name!r} is not a label of the paper.{nearest(name, labels())} "
                "`adptnet reproduce --list` shows all of them."
            )
        label = labels()[name]
        if label.kind != "result":
            why = "sets up other results" if label.configuration else "quotes the numbers of others"
            raise ReproductionError(
                f"{name} {why}: {label.configuration or label.literature}. There is nothing to run."
            )
        found |= {result: results()[result] for result in label.results}
    return list(found.values())


def _result(name: str, entry: dict[str, Any], recipe: Recipe) -> Result:
    return Result(
        name,
        entry["title"],
        entry["section"],
        tuple(Claim(**claim) for claim in entry.get("claims", [])),
        entry.get("setup", ""),
        entry.get("numbers", {}),
        tuple(entry.get("assumptions", [])),
        tuple(entry.get("deviations", [])),
        tuple(label.name for label in labels().values() if name in label.results),
        recipe,
    )


def _recipes() -> dict[str, Recipe]:
    """What the files in `recipes/` bring."""
    found: dict[str, Recipe] = {}
    for module in pkgutil.iter_modules(recipes.__path__):
        brought = importlib.import_module(f"{recipes.__name__}.{module.name}").RECIPES
        twice = found.keys() & brought.keys()
        if twice:
            raise ReproductionError(f"two recipes for {sorted(twice)[0]}, the second in {module.name}.py.")
        found |= brought
    return found
