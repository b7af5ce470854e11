"""Tasks: seeded generators that carry their loss window, metric and chance level."""

from .base import Batch, FiniteTask, Scores, Task
from .groups import product_table
from .word_problem import WordProblem

__all__ = ["Batch", "FiniteTask", "Scores", "Task", "WordProblem", "product_table"]
