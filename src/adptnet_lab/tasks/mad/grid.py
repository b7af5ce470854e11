"""The settings of the suite, as data: a baseline for each task, and one change at a time."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from adptnet.errors import InputError
from adptnet.spec import nearest

from .base import MadTask
from .compression import MadCompression
from .fuzzy import MadFuzzyRecall
from .memorisation import MadMemorisation
from .recall import MadInContextRecall, MadNoisyRecall
from .selective_copying import MadSelectiveCopying

__all__ = ["MAD_OPTIMISERS", "mad_score", "mad_settings"]

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

# Every setting is trained with each of these; AdamW, batches of 128, 200 epochs, a constant learning rate.
MAD_OPTIMISERS = tuple(
    {"learning_rate": rate, "weight_decay": decay} for rate, decay in itertools.product((1e-4, 5e-4, 1e-3), (0.0, 0.1))
)


def mad_settings(name: str) -> tuple[MadTask, ...]:
    """Every setting of one task of the suite, the baseline first: 66 over all six.

    Args:
        name: "memorisation", "selective-copying", "compression", "in-context-recall", "fuzzy-recall", "noisy-recall".
    """
    if name not in _CHANGES:
        raise InputError(f"MAD has no task {name!r}.{nearest(str(name), _CHANGES)}")
    baseline, changes = _CHANGES[name]
    varied = [dataclasses.replace(baseline, **{field: value}) for field, values in changes.items() for value in values]
    return (baseline, *varied)


def mad_score(accuracies: Sequence[Sequence[float]]) -> float:
    """A task's score: the best of the optimisers for each setting, averaged over the settings."""
    if not accuracies or not all(accuracies):
        raise InputError("a score needs at least one accuracy for each setting.")
    return sum(max(of_setting) for of_setting in accuracies) / len(accuracies)
