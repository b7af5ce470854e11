"""Multi-query associative recall (MQAR): several keys of one sequence are queried again later in it."""

import torch

from adptnet.errors import InputError, SpecError
from adptnet.spec import check_positive, check_size, spec

from .base import IGNORED, Batch, Scores, Task
from .scores import recall_scores

__all__ = ["MultiQueryRecall"]


@spec
class MultiQueryRecall(Task):
    """Key-value pairs, then every key once more among random tokens; the target at a repeated key is its value.

    A sequence begins with `pairs` pairs of distinct keys and distinct values. Each key then occurs once more, at step
    2·pairs + 2(d − 1), where the distances d of the keys differ and are drawn with weights d^(power − 1): a small
    `power` favours early queries. Random tokens fill the other steps (Arora et al., 2023, "Zoology").

    Attributes:
        vocabulary: Number of tokens: the first half are keys, the others are values.
        pairs: Key-value pairs of a sequence, each of which is queried once.
        length: Steps of a sequence.
        power: Exponent of the distances' distribution; 1 makes it uniform.
    """

    vocabulary: int = 64
    pairs: int = 8
    length: int = 64
    power: float = 0.01

    def __post_init__(self) -> None:
        check_size(self, vocabulary=self.vocabulary, pairs=self.pairs, length=self.length)
        check_positive(self, power=self.power)
        if self.vocabulary // 2 < self.pairs + 1:
            raise SpecError(
                f"MultiQueryRecall(vocabulary={self.vocabulary}, pairs={self.pairs}): keys are distinct and token 0 is "
                f"none of them. Pass vocabulary={2 * self.pairs + 2} or more."
            )
        self._check_length(self.length)

    def _check_length(self, length: int) -> None:
        if length < 4 * self.pairs:
            raise SpecError(
                f"MultiQueryRecall(length={length}, pairs={self.pairs}): pairs and queries need "
                f"length={4 * self.pairs} or more."
            )

    @property
    def chance(self) -> float:
        return 1 / (self.vocabulary - self.vocabulary // 2)

    def batch(self, size: int, generator: torch.Generator, *, length: int | None = None) -> Batch:
        length = self.length if length is None else length
        if size < 1:
            raise InputError(f"MultiQueryRecall.batch(size={size}): must be at least 1.")
        self._check_length(length)
        half, context = self.vocabulary // 2, 2 * self.pairs
        keys = 1 + torch.rand(size, half - 1, generator=generator).argsort(-1)[:, : self.pairs]
        values = half + torch.rand(size, self.vocabulary - half, generator=generator).argsort(-1)[:, : self.pairs]
        distance = torch.arange(1, (length - context) // 2 + 1, dtype=torch.float64)
        weights = distance ** (self.power - 1)
        slots = torch.multinomial(weights.expand(size, -1), self.pairs, generator=generator)
        queries = context + 2 * slots
        inputs = torch.randint(self.vocabulary, (size, length), generator=generator)
        inputs[:, 0:context:2], inputs[:, 1:context:2] = keys, values
        inputs.scatter_(1, queries, keys)
        targets = torch.full_like(inputs, IGNORED).scatter_(1, queries, values)
        return Batch(inputs, targets)

    def scores(self, outputs: torch.Tensor, targets: torch.Tensor) -> Scores:
        return recall_scores(outputs, targets)
