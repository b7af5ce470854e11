"""The settings of the MAD suite: a baseline for each task, and variations of one field at a time."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from adptnet.errors import InputError
from adptnet.spec import suggest_name

from .base import MadTask
from .compression import MadCompression
from .fuzzy import MadFuzzyRecall
from .memorisation import MadMemorisation
from .recall import MadInContextRecall, MadNoisyRecall
from .selective_copying import MadSelectiveCopying

__all__ = ["MAD_OPTIMIZERS", "mad_score", "mad_settings"]

_FEWER = (6400, 3200, 1600, 800)
_LONGER = (256, 512, 1024)
_CHANGES: Mapping[str, tuple[MadTask, Mapping[str, Sequence[float]]]] = {
    "memorisation": (MadMemorisation(), {"vocabulary": (512, 1024, 2048, 4096, 8192)}),
    "selective-copying": (
        MadSelectiveCopying(),
        {
            "vocabulary": (32, 64, 128),
            "length": (512, 1024),
            "training_sequences": _FEWER,
            "tokens_to_copy": (32, 64, 96),
        },
    ),
    "compression": (
        MadCompression(),
        {"vocabulary": (32, 64, 128), "length": (64, 128, 256), "training_sequences": _FEWER},
    ),
    "in-context-recall": (
        MadInContextRecall(),
        {"vocabulary": (32, 64, 128), "length": _LONGER, "training_sequences": _FEWER},
    ),
    "fuzzy-recall": (
        MadFuzzyRecall(),
        {"vocabulary": (32, 64, 128), "length": _LONGER, "training_sequences": _FEWER},
    ),
    "noisy-recall": (
        MadNoisyRecall(),
        {
            "vocabulary": (48, 80, 144),
            "length": _LONGER,
            "training_sequences": _FEWER,
            "noise": (0.4, 0.6, 0.8),
        },
    ),
}

# Every setting is trained with each of these, by AdamW with batches of 128, 200 epochs and a constant learning rate.
MAD_OPTIMIZERS = tuple(
    {"learning_rate": rate, "weight_decay": decay} for rate, decay in itertools.product((1e-4, 5e-4, 1e-3), (0.0, 0.1))
)


def mad_settings(name: str) -> tuple[MadTask, ...]:
    """Return every setting of one task of the suite, the baseline first. All six tasks together have 66.

    Args:
        name: "memorisation", "selective-copying", "compression", "in-context-recall", "fuzzy-recall", "noisy-recall".

    Raises:
        InputError: There is no such task.
    """
    if name not in _CHANGES:
        raise InputError(f"MAD has no task {name!r}.{suggest_name(str(name), _CHANGES)}")
    baseline, changes = _CHANGES[name]
    varied = [dataclasses.replace(baseline, **{field: value}) for field, values in changes.items() for value in values]
    return (baseline, *varied)


def mad_score(accuracies: Sequence[Sequence[float]]) -> float:
    """Return the score of a task: the best accuracy over the optimizers of each setting, averaged over the settings.

    Args:
        accuracies: For each setting, the accuracies of its runs.
    """
    if not accuracies or not all(accuracies):
        raise InputError("a score needs at least one accuracy for each setting.")
    return sum(max(runs) for runs in accuracies) / len(accuracies)
