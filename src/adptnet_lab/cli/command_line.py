"""The flags of `adptnet train` that describe an experiment."""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from adptnet.errors import AdptnetError
from adptnet.nn.presets import PRESETS
from adptnet.spec import Spec

from ..tasks import TASKS, Task
from ..training import Experiment
from .draft import Draft, default_draft, draft_from_experiment
from .layer_names import known_layers, known_networks
from .spec_flags import apply_flags, read_values

__all__ = ["make_command"]

ATTEMPTS = 8  # drafts whose flags are parsed again


def make_command(experiment: Experiment) -> list[str] | None:
    """Return the words of the shortest `adptnet train` command found that gives `experiment`.

    The flags are parsed again, so the command gives an equal experiment.

    Args:
        experiment: The experiment.

    Returns:
        The words; None if no flags give this experiment (`adptnet train --config FILE` always does).
    """
    base = default_draft(type(experiment.task)())
    start = ["adptnet", "train", _name_task(experiment.task)]
    for flags in sorted(_candidates(experiment, base), key=len)[:ATTEMPTS]:
        with contextlib.suppress(AdptnetError, SystemExit), contextlib.redirect_stderr(io.StringIO()):
            if apply_flags(base, flags) == experiment:
                return [*start, *flags]
    return None


def _name_task(task: Task) -> str:
    kind = type(task)
    return next((name for name, known in TASKS.items() if known is kind), f"{kind.__module__}:{kind.__name__}")


def _candidates(experiment: Experiment, base: Draft) -> Iterator[list[str]]:
    """Yield the flags that turn each preset, alone and with each layer, into the experiment."""
    target = draft_from_experiment(experiment)
    wanted = read_values(target)
    task = _make_differences("task", read_values(base)["task"], wanted["task"])
    width = None if target.width == base.width else target.width
    chosen = [] if width is None else ["--model.width", str(width)]
    base = base.with_task(experiment.task)
    for preset in (None, *PRESETS):
        for layer in (None, *known_layers(), *known_networks()):
            try:
                draft = base.with_preset(preset, width)
                draft = draft.with_layer(layer, None if draft.preset else width)
            except AdptnetError:  # not every layer can have every width
                continue
            found = read_values(draft)
            if found["model"].keys() != wanted["model"].keys():
                continue
            flags = [*task, *(("--model.preset", preset) if preset else ())]
            flags += [*(("--model.layer", layer) if layer else ()), *chosen]
            flags += _make_differences("model", {**found["model"], "width": target.width}, wanted["model"])
            yield [*flags, *_make_differences("training", found["training"], wanted["training"])]


def _make_differences(group: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the flags that change the values `before` to `after`."""
    flags: list[str] = []
    for name, value in after.items():
        if before[name] != value:
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{group}.{flag}" if value else f"--{group}.no-{flag}")
            else:
                flags += [f"--{group}.{flag}", *_write_value(value)]
    return flags


def _write_value(value: Any) -> list[str]:
    """Return the words that a flag takes for a value."""
    if isinstance(value, tuple) and not any(isinstance(item, Spec) for item in value):
        return [str(item) for item in value]
    return [value if isinstance(value, str) else repr(value)]
