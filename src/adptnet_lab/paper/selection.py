"""Options of the command line that select or change points: `--only SETTING=VALUE,…` and `--set SETTING=VALUE`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .recipe import SCALES, GridPoint, Scale, Subset, is_in_subset
from .registry import PaperResult, ReproductionError

__all__ = ["is_selected", "parse_changes", "parse_only"]


def is_selected(point: GridPoint, subset: Subset) -> bool:
    """Return whether a point is selected; its seed counts as a setting.

    Args:
        point: The point.
        subset: From `parse_only`.
    """
    settings = {**point.settings, "seed": point.seed}
    return all(key in settings for key in subset) and is_in_subset(settings, subset)


def parse_only(arguments: Sequence[str], points: Sequence[GridPoint], scale: Scale) -> Subset:
    """Parse the arguments of `--only`. Every value must belong to some point.

    Args:
        arguments: `SETTING=VALUE,…` each.
        points: The points to select from.
        scale: Their scale, for errors.

    Raises:
        ReproductionError: An argument is malformed, or no point has the value.
    """
    described = [{**point.settings, "seed": point.seed} for point in points]
    subset: dict[str, list[Any]] = {}
    for text in arguments:
        name, values = _split(text, "--only")
        existing = [settings[name] for settings in described if name in settings]
        for value in values.split(","):
            readings = [_parse_value(value), value]  # 10 is a number in one recipe and a name in another
            if existing and not any(each in existing for each in readings):
                choices = dict.fromkeys(each if isinstance(each, str) else json.dumps(each) for each in existing)
                raise ReproductionError(
                    f"--only {name}={value}: no point at the scale {scale} has it. {name} is {', '.join(choices)}."
                )
            subset.setdefault(name, []).extend(readings)
    if not any(is_selected(point, subset) for point in points):
        known = sorted({name for settings in described for name in settings})
        raise ReproductionError(
            f"--only {' '.join(arguments)}: no point at the scale {scale} matches. Settings are {', '.join(known)}."
        )
    return subset


def parse_changes(arguments: Sequence[str], results: Sequence[PaperResult]) -> Mapping[str, Any]:
    """Parse the arguments of `--set`. The name must be a setting or an option of every chosen result.

    Args:
        arguments: `SETTING=VALUE` each. A value is JSON, or else text.
        results: The chosen results.

    Raises:
        ReproductionError: An argument is malformed, or a result does not have the setting.
    """
    changes: dict[str, Any] = {}
    for text in arguments:
        name, value = _split(text, "--set")
        for result in results:
            own = {key for scale in SCALES for point in result.recipe.points(scale) for key in point.settings}
            if name not in own | set(result.recipe.options):
                options = "; ".join(f"{key}: {use}" for key, use in result.recipe.options.items())
                raise ReproductionError(
                    f"--set {text}: {result.name} has no setting {name}. Settings are {', '.join(sorted(own))}"
                    + (f"; further options are {options}." if options else ".")
                )
        changes[name] = _parse_value(value)
    return changes


def _split(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ReproductionError(f"{option} {text}: must be SETTING=VALUE, for instance model=Hawk.")
    return name, value


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
