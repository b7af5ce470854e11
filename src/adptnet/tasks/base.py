"""What a task is: batches, a loss and a score."""

import abc
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..spec import Spec

__all__ = ["IGNORED", "Batch", "Task"]

IGNORED = -100  # a target that neither loss nor score counts


class Batch(NamedTuple):
    """Tokens in and the target at every step."""

    inputs: Tensor  # (batch, time) int64
    targets: Tensor  # (batch, time) int64, IGNORED outside the loss window


class Task(Spec, abc.ABC):
    """A generator of sequences, with its own loss window, metric and chance level."""

    @property
    @abc.abstractmethod
    def vocabulary(self) -> int:
        """Number of tokens in."""

    @property
    @abc.abstractmethod
    def chance(self) -> float:
        """The score of a blind guess."""

    @abc.abstractmethod
    def batch(self, size: int, generator: torch.Generator, *, length: int | None = None) -> Batch:
        """`size` fresh sequences of `length` steps; of the task's own length if not given."""

    @abc.abstractmethod
    def scores(self, predictions: Tensor, targets: Tensor) -> dict[str, float | list[float]]:
        """Scores of predicted tokens, (batch, time). "accuracy" is the one the paper reports."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over the loss window."""
        return functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED)
