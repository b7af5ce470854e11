"""Given sets of sequences that are drawn again when they are needed, rather than stored."""

import abc
import functools

import torch
from torch import Tensor

from adptnet.errors import InputError, SpecError
from adptnet.spec import check_seed, check_size

from .base import Batch, FiniteTask, Split, generator_for

__all__ = ["GeneratedTask"]

CHUNK = 256  # sequences drawn at once


class GeneratedTask(FiniteTask):
    """A fixed set of random sequences. Its seed decides every one; a smaller set is the beginning of a larger one."""

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
        """Raises if there are no sequences of `length` steps."""
        if length < self.shortest:
            raise SpecError(f"{type(self).__name__}(length={length}): a sequence needs at least {self.shortest} steps.")

    @property
    def shortest(self) -> int:
        """Steps that a sequence needs at least."""
        return 1

    @abc.abstractmethod
    def draw(self, size: int, generator: torch.Generator, *, length: int, split: Split = "train") -> Batch:
        """`size` sequences of `length` steps; what is asked of a model may depend on the split."""

    def size(self, split: Split) -> int:
        return self.training_sequences if split == "train" else self.test_sequences

    def examples(self, split: Split, indices: Tensor, *, length: int | None = None) -> Batch:
        total = self.size(split)
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < total:
            raise InputError(f"sequences {int(indices.min())} to {int(indices.max())} of {total} in the {split} set.")
        inputs, targets = _whole(self, split, self.length if length is None else length)
        chosen = inputs[indices]
        kind = torch.get_default_dtype() if chosen.is_floating_point() else torch.int64
        return Batch(chosen.to(kind), targets[indices].long())


@functools.lru_cache(maxsize=4)
def _whole(task: GeneratedTask, split: Split, length: int) -> tuple[Tensor, Tensor]:
    """The whole set, tokens in the fewest bytes that hold any vocabulary here."""
    task.check_length(length)
    generator = generator_for(task.seed, ("train", "validation", "test").index(split))
    parts = [
        task.draw(CHUNK, generator, length=length, split=split) for _ in range(0, task.size(split), CHUNK)
    ]  # whole chunks, so that the number of sequences does not change what is in them
    inputs = torch.cat([part.inputs if part.inputs.is_floating_point() else part.inputs.short() for part in parts])
    targets = torch.cat([part.targets.short() for part in parts])
    return inputs[: task.size(split)], targets[: task.size(split)]
