"""Parity: whether the number of ones is odd."""

import torch
from torch import Tensor

from adptnet.errors import InputError, SpecError
from adptnet.spec import check_size, spec

from .base import IGNORED, Batch, Scores, Task
from .scores import recall_scores

__all__ = ["Parity"]


@spec
class Parity(Task):
    """Parity of a sequence of random bits, predicted at the last bit.

    Attributes:
        length: Largest number of bits of a training sequence.
        shortest: Smallest number of bits. The length of each training sequence is drawn uniformly from this range.
        every_step: Predict the running parity at every bit, which makes the task far easier to learn.
    """

    length: int = 40
    shortest: int = 3
    every_step: bool = False

    def __post_init__(self) -> None:
        check_size(self, length=self.length, shortest=self.shortest)
        if self.shortest > self.length:
            raise SpecError(
                f"Parity(length={self.length}, shortest={self.shortest}): shortest exceeds length. "
                f"Pass shortest={self.length} or less."
            )

    @property
    def vocabulary(self) -> int:
        return 2

    @property
    def chance(self) -> float:
        return 0.5

    def batch(self, size: int, generator: torch.Generator, *, length: int | None = None) -> Batch:
        longest = self.length if length is None else length
        if size < 1 or longest < 1:
            raise InputError(f"Parity.batch(size={size}, length={longest}): both must be at least 1.")
        shortest = self.shortest if length is None else length
        lengths = torch.randint(shortest, longest + 1, (size,), generator=generator)
        step = torch.arange(longest)
        inside = step < lengths.unsqueeze(-1)
        inputs = torch.randint(2, (size, longest), generator=generator) * inside
        counted = inside if self.every_step else step == lengths.unsqueeze(-1) - 1
        targets = torch.where(counted, inputs.cumsum(-1) % 2, IGNORED)
        return Batch(inputs, targets, lengths if shortest < longest else None)

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        return recall_scores(outputs, targets)
