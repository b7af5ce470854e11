"""Tasks: seeded generators that carry their loss window, metric and chance level."""

from .base import Batch, Task
from .groups import product_table
from .word_problem import WordProblem

__all__ = ["Batch", "Task", "WordProblem", "product_table"]
