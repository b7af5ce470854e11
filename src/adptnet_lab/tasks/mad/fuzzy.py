"""Fuzzy in-context recall: keys and values are motifs of several tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from adptnet.errors import SpecError
from adptnet.spec import check_size, spec

from ..base import IGNORED, Batch, Split
from .base import MadTask, StandardMadTask, find_first_occurrence

__all__ = ["MadFuzzyRecall"]


class _Pairs(NamedTuple):
    """Pairs of motifs. A motif is a row of tokens, of which the first `key_size` or `value_size` count."""

    key: Tensor  # (batch, pairs, motif)
    key_size: Tensor  # (batch, pairs)
    value: Tensor
    value_size: Tensor

    def at(self, index: Tensor) -> "_Pairs":
        """Return the pairs at `index`, (batch, n)."""
        wide = index.unsqueeze(-1).expand(-1, -1, self.key.shape[-1])
        return _Pairs(
            self.key.gather(1, wide),
            self.key_size.gather(1, index),
            self.value.gather(1, wide),
            self.value_size.gather(1, index),
        )


@spec
class MadFuzzyRecall(StandardMadTask):
    """In-context recall with motifs of one to `motif` distinct tokens; in the test, keys have exactly `motif`.

    A probe pair occurs somewhere in the sequence and is queried at the end; sequences are padded on the left. In
    training the target is the next token everywhere; in the test it is the value of each repeated key. (The reference
    omits the probe from a few per cent of the sequences, whose last query then has no answer; here it always occurs.)

    Attributes:
        vocabulary: Number of tokens: half keys and half values, then noise tokens, then padding (the last token, or the
            one before the last without `multi_query`).
        length: Steps per sequence.
        training_sequences: Size of the fixed training set.
        test_sequences: Size of the fixed validation set, and of the fixed test set.
        seed: Seed of the sets.
        multi_query: If True, the value of every repeated key is scored; if False, only the value of the last key, which
            a special token precedes.
        motif: Largest number of tokens of a key or a value.
        noise: Probability that a pair is replaced by noise tokens; the probe pair never is.
        noise_vocabulary: Number of noise tokens.
    """

    multi_query: bool = True
    motif: int = 3
    noise: float = 0.0
    noise_vocabulary: int = 0

    def __post_init__(self) -> None:
        check_size(self, motif=self.motif)
        self.check_noise(self.noise, self.noise_vocabulary)
        special = 1 if self.multi_query else 2
        self.check_vocabulary(
            2 * self.motif + self.noise_vocabulary + special, f"motifs of {self.motif} distinct tokens"
        )
        MadTask.__post_init__(self)

    @property
    def minimum_length(self) -> int:
        return 4 * self.motif + 1

    def check_length(self, length: int) -> None:
        if length < self.minimum_length:
            raise SpecError(
                f"MadFuzzyRecall(length={length}, motif={self.motif}): a pair and its query need "
                f"length={self.minimum_length} or more."
            )

    @property
    def _key_value_tokens(self) -> int:
        return self.vocabulary - self.noise_vocabulary - (1 if self.multi_query else 2)

    @property
    def chance(self) -> float:
        return 1 / (self._key_value_tokens - self._key_value_tokens // 2)

    def draw(self, size: int, generator: torch.Generator, *, length: int, split: Split = "train") -> Batch:
        shortest_pair = 2 if split == "train" else self.motif + 1
        count = length // shortest_pair + 1
        drawn = self._draw_pairs(size, count + 1, generator, split)  # the probe first
        every = torch.arange(count + 1).expand(size, -1)
        noisy = torch.zeros(size, count + 1, dtype=torch.bool)
        if self.noise:
            noisy[:, 1:] = torch.rand(size, count, generator=generator) < self.noise

        # Each key takes the value of its first occurrence. The probe is at index 0 and so keeps its own.
        code = torch.where(noisy, -1 - every, self._encode_keys(drawn))
        origin = find_first_occurrence(code)
        pairs = drawn._replace(value=drawn.at(origin).value, value_size=drawn.at(origin).value_size)
        sizes = pairs.key_size + pairs.value_size
        if self.noise:
            highest = self._key_value_tokens + self.noise_vocabulary
            noise = torch.randint(self._key_value_tokens, highest, (2, *pairs.key.shape), generator=generator)
            pairs = pairs._replace(
                key=torch.where(noisy.unsqueeze(-1), noise[0], pairs.key),
                value=torch.where(noisy.unsqueeze(-1), noise[1], pairs.value),
            )

        # Position of the probe; it is not inserted if its key already occurs earlier by chance.
        probe_size = sizes[:, :1]
        limit = length - probe_size - 2 * self.motif
        start = sizes[:, 1:].cumsum(-1) - sizes[:, 1:]
        target = (torch.rand(size, 1, generator=generator) * (length - 2 * probe_size)).long()
        place = torch.minimum((start < target).sum(-1, keepdim=True), (start < limit).sum(-1, keepdim=True) - 1)
        present = ((code[:, 1:] == code[:, :1]) & (every[:, :-1] < place)).any(-1, keepdim=True)
        place = torch.where(present, count, place)
        slot = torch.where(every < place, every + 1, torch.where(every == place, 0, every))

        # The pairs in order, as many as fit, then the probe as the query.
        placed = pairs.at(slot)
        used = (placed.key_size + placed.value_size).cumsum(-1) - placed.key_size - placed.value_size < limit
        repeated = (find_first_occurrence(code.gather(1, slot)) < every) & self.multi_query
        probe = pairs.at(torch.zeros(size, 1, dtype=torch.int64))
        body, body_targets, body_used = self._flatten(placed, repeated, used)
        prefix = torch.full((size, 0 if self.multi_query else 1), self.vocabulary - 1)
        yes = torch.ones(size, 1, dtype=torch.bool)
        end, end_targets, end_used = self._flatten(probe, yes, yes)
        tokens = torch.cat((body, prefix, end), 1)
        scored = torch.cat((body_targets, torch.full_like(prefix, IGNORED), end_targets), 1)
        counts = torch.cat((body_used, torch.ones_like(prefix, dtype=torch.bool), end_used), 1)

        padding = self.vocabulary - (1 if self.multi_query else 2)
        sequence = _align_right(tokens, counts, length + 1, padding)
        targets = sequence if split == "train" else _align_right(scored, counts, length + 1, IGNORED)
        return Batch(sequence[:, :-1], targets[:, 1:])

    def _draw_pairs(self, size: int, count: int, generator: torch.Generator, split: Split) -> _Pairs:
        key_count, motif = self._key_value_tokens // 2, self.motif
        fewest = 1 if split == "train" else motif
        return _Pairs(
            _draw_distinct(key_count, motif, (size, count), generator),
            torch.randint(fewest, motif + 1, (size, count), generator=generator),
            key_count + _draw_distinct(self._key_value_tokens - key_count, motif, (size, count), generator),
            torch.randint(1, motif + 1, (size, count), generator=generator),
        )

    def _encode_keys(self, pairs: _Pairs) -> Tensor:
        """Return a non-negative integer for each key, equal for equal motifs."""
        step = torch.arange(self.motif)
        digits = torch.where(step < pairs.key_size.unsqueeze(-1), pairs.key + 1, 0)
        return (digits * (self._key_value_tokens + 1) ** step).sum(-1)

    def _flatten(self, pairs: _Pairs, repeated: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens of the pairs, their targets and which of them count, (batch, pairs · 2 · motif) each."""
        step = torch.arange(self.motif)
        tokens = torch.cat((pairs.key, pairs.value), -1)
        valid = torch.cat((step < pairs.key_size.unsqueeze(-1), step < pairs.value_size.unsqueeze(-1)), -1)
        pair_targets = torch.where(repeated.unsqueeze(-1), pairs.value, IGNORED)
        pair_targets = torch.cat((torch.full_like(pairs.key, IGNORED), pair_targets), -1)
        return tokens.flatten(1), pair_targets.flatten(1), (valid & used.unsqueeze(-1)).flatten(1)


def _draw_distinct(kinds: int, motif: int, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw `motif` distinct numbers below `kinds` uniformly, without replacement: (*shape, motif)."""
    chosen: list[Tensor] = []
    for i in range(motif):
        number = torch.randint(kinds - i, shape, generator=generator)  # rank among the numbers not yet taken
        for taken in torch.stack(chosen, -1).sort(-1).values.unbind(-1) if chosen else ():
            number = number + (number >= taken)
        chosen.append(number)
    return torch.stack(chosen, -1)


def _align_right(values: Tensor, valid: Tensor, width: int, padding: int) -> Tensor:
    """Move the valid values, in order, to the right end of rows of `width`."""
    count = valid.sum(-1, keepdim=True)
    place = torch.where(valid, width - count + valid.cumsum(-1) - 1, width)  # invalid values go to an extra column
    rows = torch.full((len(values), width + 1), padding, dtype=values.dtype)
    return rows.scatter_(1, place, values)[:, :width]
