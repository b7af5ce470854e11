"""Tasks by the names that the command line uses."""

from adptnet.errors import InputError
from adptnet.spec import nearest

from .base import Task
from .copy_memory import CopyMemory
from .event_frames import EventFrames
from .forecast import Forecast
from .mad import (
    MadCompression,
    MadFuzzyRecall,
    MadInContextRecall,
    MadMemorisation,
    MadNoisyRecall,
    MadSelectiveCopying,
)
from .parity import Parity
from .selective_copy import SelectiveCopy
from .sequential_image import SequentialImage
from .text import Text
from .word_problem import WordProblem

__all__ = ["TASKS", "named"]

TASKS: dict[str, type[Task]] = {
    "copy-memory": CopyMemory,
    "selective-copy": SelectiveCopy,
    "word-problem": WordProblem,
    "parity": Parity,
    "mad-memorisation": MadMemorisation,
    "mad-selective-copying": MadSelectiveCopying,
    "mad-compression": MadCompression,
    "mad-in-context-recall": MadInContextRecall,
    "mad-noisy-recall": MadNoisyRecall,
    "mad-fuzzy-recall": MadFuzzyRecall,
    "sequential-image": SequentialImage,
    "event-frames": EventFrames,
    "text": Text,
    "forecast": Forecast,
}


def named(name: str) -> type[Task]:
    """The task of that name: `named("word-problem")("S5", length=16)`."""
    if name not in TASKS:
        raise InputError(f"there is no task {name!r}.{nearest(str(name), TASKS)}")
    return TASKS[name]
