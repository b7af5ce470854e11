"""Memorisation: facts that are in the weights, not in the sequence."""

import functools

import numpy as np
import torch
from torch import Tensor

from adptnet.spec import spec

from ..base import IGNORED, Batch, Split
from .base import MadTask

__all__ = ["MadMemorisation"]


@spec
class MadMemorisation(MadTask):
    """Keys, each followed by an insert token at which its value is due; no value is ever shown.

    Half of the tokens are keys and half are values, paired once by `seed`, in training as in the test. The last token
    is the insert token; noise tokens come before it.

    Attributes:
        vocabulary: Tokens in all; with V of them and no noise there are ⌊(V-1)/2⌋ facts.
        length: Steps, two a fact.
        training_sequences, test_sequences, seed: Of the fixed sets and of the facts.
        noise: Share of the facts replaced by two noise tokens, at which nothing is due.
        noise_vocabulary: How many of the tokens are noise.
    """

    vocabulary: int = 256
    length: int = 32
    training_sequences: int = 256
    test_sequences: int = 1_280
    seed: int = 12345
    noise: float = 0.0
    noise_vocabulary: int = 0

    def __post_init__(self) -> None:
        self.check_noise(self.noise, self.noise_vocabulary)
        self.need(3 + self.noise_vocabulary, "a key, a value, the insert token and noise")
        MadTask.__post_init__(self)

    @property
    def shortest(self) -> int:
        return 2

    @property
    def facts(self) -> int:
        return (self.vocabulary - 1 - self.noise_vocabulary) // 2

    @property
    def chance(self) -> float:
        return 1 / self.facts

    @property
    def ceiling(self) -> float:
        """The share of the facts that training shows, on average: no model can know the others."""
        draws = self.training_sequences * (self.length // 2) * (1 - self.noise)
        return float(1 - (1 - 1 / self.facts) ** draws)

    def values(self) -> Tensor:
        """The value of each key, (facts,)."""
        return _values(self.vocabulary - 1 - self.noise_vocabulary, self.seed)

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
def _values(ordinary: int, seed: int) -> Tensor:
    """Keys and values shuffled by one generator and paired in that order; a surplus value is left out."""
    generator = np.random.default_rng(seed)
    keys, values = list(range(ordinary // 2)), list(range(ordinary // 2, ordinary))
    generator.shuffle(keys)
    generator.shuffle(values)
    found = torch.empty(len(keys), dtype=torch.int64)
    found[torch.tensor(keys)] = torch.tensor(values[: len(keys)])
    return found
