"""In-context recall: the value of a key that occurred earlier in the sequence."""

import abc

import torch

from adptnet.errors import SpecError
from adptnet.spec import spec

from ..base import IGNORED, Batch, Split
from .base import MadTask, StandardMadTask, find_first_occurrence

__all__ = ["MadInContextRecall", "MadNoisyRecall"]


class _Recall(StandardMadTask, abc.ABC):
    """Base class of the recall tasks: each key keeps its value within a sequence, and the last pair is a repetition."""

    multi_query: bool

    @property
    @abc.abstractmethod
    def _noise(self) -> tuple[float, int]:
        """Fraction of the pairs that are noise, and the number of noise tokens."""

    @property
    def _ordinary(self) -> int:
        """Number of keys and values."""
        return self.vocabulary - self._noise[1] - (0 if self.multi_query else 1)

    @property
    def chance(self) -> float:
        return 1 / (self._ordinary - self._ordinary // 2)

    @property
    def minimum_length(self) -> int:
        return 4

    def check_length(self, length: int) -> None:
        MadTask.check_length(self, length)
        if length % 2:
            raise SpecError(f"{type(self).__name__}(length={length}): pairs need an even length. Pass {length + 1}.")

    def draw(self, size: int, generator: torch.Generator, *, length: int, split: Split = "train") -> Batch:
        noise, noise_vocabulary = self._noise
        pairs, kinds = length // 2 - 1, self._ordinary // 2
        keys = torch.randint(kinds, (size, pairs), generator=generator)
        value_of = torch.randint(kinds, self._ordinary, (size, kinds), generator=generator)
        shown = torch.stack((keys, value_of.gather(1, keys)), -1)
        noisy = torch.zeros(size, pairs, dtype=torch.bool)
        if noise:
            noisy = torch.rand(size, pairs, generator=generator) < noise
            noisy.scatter_(1, torch.randint(pairs, (size, 1), generator=generator), False)  # keep at least one pair
            tokens = torch.randint(
                self._ordinary, self._ordinary + noise_vocabulary, (size, pairs, 2), generator=generator
            )
            shown = torch.where(noisy.unsqueeze(-1), tokens, shown)

        occurs = torch.zeros(size, kinds + 1).scatter_(1, torch.where(noisy, kinds, keys), 1.0)[:, :kinds]
        probe = (occurs * (1 - torch.rand(size, kinds, generator=generator))).argmax(-1, keepdim=True)
        prefix = probe.new_full((size, 0 if self.multi_query else 1), self.vocabulary - 1)
        final = value_of.gather(1, probe)
        sequence = torch.cat((shown.flatten(1), prefix, probe, final), 1)
        if split == "train":
            return Batch(sequence[:, :-1], sequence[:, 1:])

        index = torch.arange(pairs).expand(size, -1)
        repeated = (find_first_occurrence(torch.where(noisy, kinds + index, keys)) < index) & self.multi_query
        due = torch.full_like(shown, IGNORED)
        due[..., 1] = torch.where(repeated, shown[..., 1], IGNORED)
        silent = torch.full_like(torch.cat((prefix, probe), 1), IGNORED)
        targets = torch.cat((due.flatten(1), silent, final), 1)
        return Batch(sequence[:, :-1], targets[:, 1:])


@spec
class MadInContextRecall(_Recall):
    """Pairs of key and value; in the test the target is the value wherever a key is repeated.

    In training the target is the next token everywhere, also where it is unpredictable.

    Attributes:
        vocabulary: Number of tokens, half keys and half values.
        length: Length of the whole sequence; a model sees one step less.
        training_sequences: Number of training sequences, a fixed set.
        test_sequences: Number of validation and of test sequences, fixed sets.
        seed: Seed of the sets.
        multi_query: Count every repeated key, or only the last one, which then follows a special token.
    """

    multi_query: bool = True

    def __post_init__(self) -> None:
        self.check_vocabulary(3, "keys and values")
        MadTask.__post_init__(self)

    @property
    def _noise(self) -> tuple[float, int]:
        return 0.0, 0


@spec
class MadNoisyRecall(_Recall):
    """In-context recall with some of the pairs replaced by two noise tokens, which have no target in the test.

    Attributes:
        vocabulary: Number of tokens: keys and values in equal parts, then `noise_vocabulary` noise tokens.
        length: Length of the whole sequence; a model sees one step less.
        training_sequences: Number of training sequences, a fixed set.
        test_sequences: Number of validation and of test sequences, fixed sets.
        seed: Seed of the sets.
        multi_query: Count every repeated key, or only the last one, which then follows a special token.
        noise: Fraction of the pairs replaced by noise.
        noise_vocabulary: Number of noise tokens.
    """

    vocabulary: int = 32
    multi_query: bool = True
    noise: float = 0.2
    noise_vocabulary: int = 16

    def __post_init__(self) -> None:
        self.check_noise(self.noise, self.noise_vocabulary)
        self.check_vocabulary(3 + self.noise_vocabulary, "keys, values and noise")
        MadTask.__post_init__(self)

    @property
    def _noise(self) -> tuple[float, int]:
        return self.noise, self.noise_vocabulary
