"""Tasks: seeded generators that carry their loss window, metric and chance level."""

from .base import Batch, FiniteTask, Scores, Task
from .groups import product_table
from .word_problem import WordProblem

TASKS: dict[str, type[Task]] = {"word-problem": WordProblem}
"""Every task by the name it has on the command line."""

__all__ = ["TASKS", "Batch", "FiniteTask", "Scores", "Task", "WordProblem", "product_table"]
