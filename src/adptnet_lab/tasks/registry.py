"""Tasks by their names on the command line."""

from adptnet.errors import InputError
from adptnet.spec import suggest_name

from .._own_objects import find_own
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
from .multi_query_recall import MultiQueryRecall
from .parity import Parity
from .selective_copy import SelectiveCopy
from .sequential_image import SequentialImage
from .text import Text
from .word_problem import WordProblem

__all__ = ["TASKS", "get_preset", "get_task"]

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
    "mqar": MultiQueryRecall,
    "sequential-image": SequentialImage,
    "event-frames": EventFrames,
    "text": Text,
    "forecast": Forecast,
}

_PRESETS: dict[type[Task], str] = {
    CopyMemory: "memory",
    SelectiveCopy: "recall",
    WordProblem: "tracking",
    Parity: "tracking",
    MultiQueryRecall: "recall",
    MadSelectiveCopying: "recall",
    MadInContextRecall: "recall",
    MadNoisyRecall: "recall",
    MadFuzzyRecall: "recall",
    SequentialImage: "signals",
    Text: "text",
    Forecast: "forecast",
}


def get_preset(task: Task) -> str:
    """Return the name of the preset in `adptnet.presets` that suits a task; "general" unless there is a better one.

    Args:
        task: The task.
    """
    return _PRESETS.get(type(task), "general")


def get_task(name: str) -> type[Task]:
    """Return the class of the task called `name`, e.g. `get_task("word-problem")("S5", length=16)`.

    Args:
        name: Name of the task; or of your own: "module:Name", or the name of an entry point in the group
            `adptnet.tasks`.

    Raises:
        InputError: There is none; the message suggests the nearest name.
    """
    if name in TASKS:
        return TASKS[name]
    own = find_own(name, "adptnet.tasks")
    if own is None:
        raise InputError(f"there is no task {name!r}.{suggest_name(str(name), TASKS)} One of your own: module:Name.")
    if not (isinstance(own, type) and issubclass(own, Task)):
        raise InputError(f"{name} is not a task. It must be a subclass of adptnet_lab.tasks.Task, marked with @spec.")
    return own
