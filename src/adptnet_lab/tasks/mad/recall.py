"""MAD in-context recall: predict the value of a key that occurred earlier in the sequence."""

import abc

import torch

from adptnet.errors import SpecError
from adptnet.spec import spec

from ..base import IGNORED, Batch, Split
from .base import MadTask, StandardMadTask, find_first_occurrence

__all__ = ["MadInContextRecall", "MadNoisyRecall"]


class _Recall(StandardMadTask, abc.ABC):
    """Base class of the recall tasks: a key has one value in a sequence, and the last pair repeats an earlier one."""

    multi_query: bool

    @property
    @abc.abstractmethod
    def _noise(self) -> tuple[float, int]:
        """Probability that a pair is replaced by noise tokens, and the number of noise tokens in the vocabulary."""

    @property
    def _key_value_tokens(self) -> int:
        """Number of tokens that are keys or values."""
        return self.vocabulary - self._noise[1] - (0 if self.multi_query else 1)

    @property
    def chance(self) -> float:
        return 1 / (self._key_value_tokens - self._key_value_tokens // 2)

    @property
    def minimum_length(self) -> int:
        return 4

    def check_length(self, length: int) -> None:
        MadTask.check_length(self, length)
        if length % 2:
            raise SpecError(
                f"{type(self).__name__}(length={length}): key-value pairs need an even length. Pass {length + 1}."
            )

    def draw(self, size: int, generator: torch.Generator, *, length: int, split: Split = "train") -> Batch:
        noise, noise_vocabulary = self._noise
        pairs, key_count = length // 2 - 1, self._key_value_tokens // 2
        keys = torch.randint(key_count, (size, pairs), generator=generator)
        value_of = torch.randint(key_count, self._key_value_tokens, (size, key_count), generator=generator)
        pair_tokens = torch.stack((keys, value_of.gather(1, keys)), -1)
        noisy = torch.zeros(size, pairs, dtype=torch.bool)
        if noise:
            noisy = torch.rand(size, pairs, generator=generator) < noise
            noisy.scatter_(1, torch.randint(pairs, (size, 1), generator=generator), False)  # keep at least one pair
            tokens = torch.randint(
                self._key_value_tokens, self._key_value_tokens + noise_vocabulary, (size, pairs, 2), generator=generator
            )
            pair_tokens = torch.where(noisy.unsqueeze(-1), tokens, pair_tokens)

        occurs = torch.zeros(size, key_count + 1).scatter_(1, torch.where(noisy, key_count, keys), 1.0)[:, :key_count]
        probe = (occurs * (1 - torch.rand(size, key_count, generator=generator))).argmax(-1, keepdim=True)
        prefix = probe.new_full((size, 0 if self.multi_query else 1), self.vocabulary - 1)
        final = value_of.gather(1, probe)
        sequence = torch.cat((pair_tokens.flatten(1), prefix, probe, final), 1)
        if split == "train":
            return Batch(sequence[:, :-1], sequence[:, 1:])

        index = torch.arange(pairs).expand(size, -1)
        repeated = (find_first_occurrence(torch.where(noisy, key_count + index, keys)) < index) & self.multi_query
        pair_targets = torch.full_like(pair_tokens, IGNORED)
        pair_targets[..., 1] = torch.where(repeated, pair_tokens[..., 1], IGNORED)
        ignored = torch.full_like(torch.cat((prefix, probe), 1), IGNORED)
        targets = torch.cat((pair_targets.flatten(1), ignored, final), 1)
        return Batch(sequence[:, :-1], targets[:, 1:])


@spec
class MadInContextRecall(_Recall):
    """Key-value pairs; in validation and test, the targets are the values of repeated keys.

    In training, the target of every step is the next token, even where it cannot be predicted.

    Attributes:
        vocabulary: Number of tokens: keys, then as many values (or one more), then the special token if `multi_query`
            is False.
        length: Number of tokens in the pairs, the last pair included. The model sees the sequence without its last
            token: length − 1 steps, or length steps if `multi_query` is False, because of the special token.
        training_sequences: Size of the fixed training set.
        test_sequences: Size of the fixed validation set, and of the fixed test set.
        seed: Seed of the sets.
        multi_query: If True, the value of every repeated key is scored; if False, only the value of the last key, which
            a special token precedes.
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
    """In-context recall with some pairs replaced by two noise tokens, which are not targets in validation and test.

    Attributes:
        vocabulary: Number of tokens: keys, then as many values (or one more), then `noise_vocabulary` noise tokens,
            then the special token if `multi_query` is False.
        length: Number of tokens in the pairs, the last pair included. The model sees the sequence without its last
            token: length − 1 steps, or length steps if `multi_query` is False, because of the special token.
        training_sequences: Size of the fixed training set.
        test_sequences: Size of the fixed validation set, and of the fixed test set.
        seed: Seed of the sets.
        multi_query: If True, the value of every repeated key is scored; if False, only the value of the last key, which
            a special token precedes.
        noise: Probability that a pair is replaced by noise tokens; one random pair of each sequence is always kept.
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
