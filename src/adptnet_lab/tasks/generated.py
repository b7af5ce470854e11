"""Fixed sets of random sequences, regenerated from their seed instead of stored."""

import abc
import functools

import torch
from torch import Tensor

from adptnet.errors import InputError, SpecError
from adptnet.spec import check_seed, check_size

from .base import Batch, FiniteTask, Split, make_generator

__all__ = ["GeneratedTask"]

CHUNK = 256  # sequences per draw


class GeneratedTask(FiniteTask):
    """Base class of tasks with a fixed set of random sequences.

    The seed determines every sequence, and a smaller set is a prefix of a larger one.
    """

    length: int
    training_sequences: int
    test_sequences: int
    seed: int

    def __post_init__(self) -> None:
        check_size(
            self,
            length=self.length,
            training_sequences=self.training_sequences,
            test_sequences=self.test_sequences,
        )
        check_seed(self, seed=self.seed)
        self.check_length(self.length)

    def check_length(self, length: int) -> None:
        """Raise `SpecError` if a sequence cannot have `length` steps.

        Args:
            length: Steps per sequence.
        """
        if length < self.minimum_length:
            raise SpecError(
                f"{type(self).__name__}(length={length}): a sequence needs at least {self.minimum_length} steps."
            )

    @property
    def minimum_length(self) -> int:
        """Smallest possible number of steps."""
        return 1

    @abc.abstractmethod
    def draw(self, size: int, generator: torch.Generator, *, length: int, split: Split = "train") -> Batch:
        """Draw `size` sequences of `length` steps.

        Args:
            size: Number of sequences.
            generator: Source of randomness.
            length: Steps per sequence.
            split: The targets may depend on it.
        """

    def size(self, split: Split) -> int:
        return self.training_sequences if split == "train" else self.test_sequences

    def examples(self, split: Split, indices: Tensor, *, length: int | None = None) -> Batch:
        total = self.size(split)
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < total:
            raise InputError(
                f"indices from {int(indices.min())} to {int(indices.max())}: the {split} set has {total} sequences."
            )
        inputs, targets = _draw_split(self, split, self.length if length is None else length)
        chosen = inputs[indices]
        kind = torch.get_default_dtype() if chosen.is_floating_point() else torch.int64
        return Batch(chosen.to(kind), targets[indices].long())


@functools.lru_cache(maxsize=4)
def _draw_split(task: GeneratedTask, split: Split, length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a whole split; tokens are int16, which holds every vocabulary here."""
    task.check_length(length)
    generator = make_generator(task.seed, ("train", "validation", "test").index(split))
    parts = [
        task.draw(CHUNK, generator, length=length, split=split) for _ in range(0, task.size(split), CHUNK)
    ]  # whole chunks, so that the number of sequences does not change their content
    inputs = torch.cat([part.inputs if part.inputs.is_floating_point() else part.inputs.short() for part in parts])
    targets = torch.cat([part.targets.short() for part in parts])
    return inputs[: task.size(split)], targets[: task.size(split)]
