"""In-context recall: pairs of key and value, and the value of a key that came before."""

import abc

import torch

from adptnet.errors import SpecError
from adptnet.spec import spec

from ..base import IGNORED, Batch, Split
from .base import MadTask, first_occurrence

__all__ = ["MadInContextRecall", "MadNoisyRecall"]


class _Recall(MadTask, abc.ABC):
    """Pairs whose value a key keeps throughout a sequence, and at the end a pair that was shown before."""

    multi_query: bool

    @property
    @abc.abstractmethod
    def _noise(self) -> tuple[float, int]:
        """Share of the pairs that are noise, and the number of noise tokens."""

    @property
    def _ordinary(self) -> int:
        """Keys and values."""
        return self.vocabulary - self._noise[1] - (0 if self.multi_query else 1)

    @property
    def chance(self) -> float:
        return 1 / (self._ordinary - self._ordinary // 2)

    @property
    def shortest(self) -> int:
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
            noisy.scatter_(1, torch.randint(pairs, (size, 1), generator=generator), False)  # one pair at least
            tokens = torch.randint(
                self._ordinary, self._ordinary + noise_vocabulary, (size, pairs, 2), generator=generator
            )
            shown = torch.where(noisy.unsqueeze(-1), tokens, shown)

        met = torch.zeros(size, kinds + 1).scatter_(1, torch.where(noisy, kinds, keys), 1.0)[:, :kinds]
        probe = (met * (1 - torch.rand(size, kinds, generator=generator))).argmax(-1, keepdim=True)
        prefix = probe.new_full((size, 0 if self.multi_query else 1), self.vocabulary - 1)
        final = value_of.gather(1, probe)
        sequence = torch.cat((shown.flatten(1), prefix, probe, final), 1)
        if split == "train":
            return Batch(sequence[:, :-1], sequence[:, 1:])

        index = torch.arange(pairs).expand(size, -1)
        again = (first_occurrence(torch.where(noisy, kinds + index, keys)) < index) & self.multi_query
        asked = torch.full_like(shown, IGNORED)
        asked[..., 1] = torch.where(again, shown[..., 1], IGNORED)
        silent = torch.full_like(torch.cat((prefix, probe), 1), IGNORED)
        targets = torch.cat((asked.flatten(1), silent, final), 1)
        return Batch(sequence[:, :-1], targets[:, 1:])


@spec
class MadInContextRecall(_Recall):
    """Pairs of key and value; in the test the value is due wherever a key comes again.

    Training asks for the next token everywhere, also where it cannot be known.

    Attributes:
        vocabulary: Half keys, half values.
        length: Of the whole sequence; a model sees one step less.
        training_sequences, test_sequences, seed: Of the fixed sets.
        multi_query: Whether every repeated key counts, or only the last, behind a token of its own.
    """

    vocabulary: int = 16
    length: int = 128
    training_sequences: int = 12_800
    test_sequences: int = 1_280
    seed: int = 12345
    multi_query: bool = True

    def __post_init__(self) -> None:
        self.need(3, "keys and values")
        MadTask.__post_init__(self)

    @property
    def _noise(self) -> tuple[float, int]:
        return 0.0, 0


@spec
class MadNoisyRecall(_Recall):
    """In-context recall with some of the pairs replaced by two noise tokens, at which nothing is due in the test.

    Attributes:
        vocabulary: Keys and values in equal parts, then `noise_vocabulary` noise tokens.
        length, training_sequences, test_sequences, seed, multi_query: As for `MadInContextRecall`.
        noise: Share of the pairs.
        noise_vocabulary: How many of the tokens are noise.
    """

    vocabulary: int = 32
    length: int = 128
    training_sequences: int = 12_800
    test_sequences: int = 1_280
    seed: int = 12345
    multi_query: bool = True
    noise: float = 0.2
    noise_vocabulary: int = 16

    def __post_init__(self) -> None:
        self.check_noise(self.noise, self.noise_vocabulary)
        self.need(3 + self.noise_vocabulary, "keys, values and noise")
        MadTask.__post_init__(self)

    @property
    def _noise(self) -> tuple[float, int]:
        return self.noise, self.noise_vocabulary
