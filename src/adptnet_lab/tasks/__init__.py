"""Tasks: reproducible sources of sequences, each with its loss, metric and chance level."""

from .base import Batch, FiniteTask, Scores, Task
from .copy_memory import CopyMemory
from .event_frames import EventFrames
from .forecast import Forecast, Horizon
from .generated import GeneratedTask
from .groups import format_product_table, product_table
from .mad import (
    MAD_OPTIMIZERS,
    MadCompression,
    MadFuzzyRecall,
    MadInContextRecall,
    MadMemorisation,
    MadNoisyRecall,
    MadSelectiveCopying,
    mad_score,
    mad_settings,
)
from .multi_query_recall import MultiQueryRecall
from .parity import Parity
from .registry import TASKS, get_preset, get_task
from .selective_copy import SELECTIVE_COPY_SETTINGS, SelectiveCopy
from .sequential_image import SequentialImage
from .text import Text
from .word_problem import WordProblem

__all__ = [
    "MAD_OPTIMIZERS",
    "SELECTIVE_COPY_SETTINGS",
    "TASKS",
    "Batch",
    "CopyMemory",
    "EventFrames",
    "FiniteTask",
    "Forecast",
    "GeneratedTask",
    "Horizon",
    "MadCompression",
    "MadFuzzyRecall",
    "MadInContextRecall",
    "MadMemorisation",
    "MadNoisyRecall",
    "MadSelectiveCopying",
    "MultiQueryRecall",
    "Parity",
    "Scores",
    "SelectiveCopy",
    "SequentialImage",
    "Task",
    "Text",
    "WordProblem",
    "format_product_table",
    "get_preset",
    "get_task",
    "mad_score",
    "mad_settings",
    "product_table",
]
