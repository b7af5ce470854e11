"""Memorisation: facts stored in the weights, not in the sequence."""

import functools

import numpy as np
import torch
from torch import Tensor

from adptnet.spec import spec

from ..base import IGNORED, Batch, Split
from .base import MadTask, StandardMadTask

__all__ = ["MadMemorisation"]


@spec
class MadMemorisation(StandardMadTask):
    """Keys, each followed by an insert token whose target is the key's value. Values never appear in the inputs.

    Half of the tokens are keys and half are values. `seed` fixes the pairs, which are the same in training and test.
    The last token of the vocabulary is the insert token; the noise tokens are directly before it.

    Attributes:
        vocabulary: Number of tokens; V of them, without noise, make ⌊(V-1)/2⌋ facts.
        length: Steps, two per fact.
        training_sequences: Size of the fixed training set.
        test_sequences: Size of the fixed validation set, and of the fixed test set.
        seed: Seed of the sets and of the facts.
        noise: Probability that a fact is replaced by two noise tokens without a target; one per sequence never is.
        noise_vocabulary: Number of noise tokens.
    """

    vocabulary: int = 256
    length: int = 32
    training_sequences: int = 256
    noise: float = 0.0
    noise_vocabulary: int = 0

    def __post_init__(self) -> None:
        self.check_noise(self.noise, self.noise_vocabulary)
        self.check_vocabulary(3 + self.noise_vocabulary, "a key, a value, the insert token and noise")
        MadTask.__post_init__(self)

    @property
    def minimum_length(self) -> int:
        return 2

    @property
    def facts(self) -> int:
        """Number of pairs of key and value."""
        return (self.vocabulary - 1 - self.noise_vocabulary) // 2

    @property
    def chance(self) -> float:
        return 1 / self.facts

    @property
    def ceiling(self) -> float:
        """Expected fraction of the facts that occur in training, an upper limit of the accuracy."""
        draws = self.training_sequences * (self.length // 2) * (1 - self.noise)
        return float(1 - (1 - 1 / self.facts) ** draws)

    def values(self) -> Tensor:
        """Return the value of each key, (facts,)."""
        return _draw_values(self.vocabulary - 1 - self.noise_vocabulary, self.seed)

    def draw(self, size: int, generator: torch.Generator, *, length: int, split: Split = "train") -> Batch:
        pairs = length // 2
        keys = torch.randint(self.facts, (size, pairs), generator=generator)
        inputs = torch.stack((keys, torch.full_like(keys, self.vocabulary - 1)), -1)
        targets = torch.stack((torch.full_like(keys, IGNORED), self.values()[keys]), -1)
        if self.noise:
            noisy = torch.rand(size, pairs, generator=generator) < self.noise
            spared = torch.randint(pairs, (size, 1), generator=generator)
            noisy.scatter_(1, spared, False)
            lowest = self.vocabulary - 1 - self.noise_vocabulary
            tokens = torch.randint(lowest, self.vocabulary - 1, inputs.shape, generator=generator)
            inputs = torch.where(noisy.unsqueeze(-1), tokens, inputs)
            targets = torch.where(noisy.unsqueeze(-1), IGNORED, targets)
        return Batch(inputs.flatten(1), targets.flatten(1))


@functools.lru_cache(maxsize=8)
def _draw_values(ordinary: int, seed: int) -> Tensor:
    """Shuffle keys and values with one generator and pair them in that order; a surplus value is dropped."""
    generator = np.random.default_rng(seed)
    keys, values = list(range(ordinary // 2)), list(range(ordinary // 2, ordinary))
    generator.shuffle(keys)
    generator.shuffle(values)
    value_of = torch.empty(len(keys), dtype=torch.int64)
    value_of[torch.tensor(keys)] = torch.tensor(values[: len(keys)])
    return value_of
