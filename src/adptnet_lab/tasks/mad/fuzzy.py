"""Fuzzy in-context recall: keys and values are motifs of several tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from adptnet.errors import SpecError
from adptnet.spec import check_size, spec

from ..base import IGNORED, Batch, Split
from .base import MadTask, first_occurrence

__all__ = ["MadFuzzyRecall"]


class _Pairs(NamedTuple):
    """Pairs of motifs, each a row of tokens of which the first so many count."""

    key: Tensor  # (batch, pairs, motif)
    key_size: Tensor  # (batch, pairs)
    value: Tensor
    value_size: Tensor

    def at(self, index: Tensor) -> "_Pairs":
        """The pairs at `index`, (batch, n)."""
        wide = index.unsqueeze(-1).expand(-1, -1, self.key.shape[-1])
        return _Pairs(
            self.key.gather(1, wide),
            self.key_size.gather(1, index),
            self.value.gather(1, wide),
            self.value_size.gather(1, index),
        )


@spec
class MadFuzzyRecall(MadTask):
    """In-context recall with motifs of one to `motif` distinct tokens; keys have all of them in the test.

    A probe pair is shown somewhere and asked for at the end; sequences are padded on the left. In training the next
    token is due everywhere; in the test the value of each key that comes again. (The reference leaves the probe out of
    a few sequences in a hundred, whose last question then has no answer; here it is always shown.)

    Attributes:
        vocabulary: Half keys, half values, then noise tokens, then padding (the last; with `multi_query` off the one
            before the last).
        length: Steps.
        training_sequences, test_sequences, seed: Of the fixed sets.
        multi_query: Whether every repeated key counts, or only the last, behind a token of its own.
        motif: Most tokens of a key or a value.
        noise: Share of the pairs replaced by noise tokens.
        noise_vocabulary: How many of the tokens are noise.
    """

    vocabulary: int = 16
    length: int = 128
    training_sequences: int = 12_800
    test_sequences: int = 1_280
    seed: int = 12345
    multi_query: bool = True
    motif: int = 3
    noise: float = 0.0
    noise_vocabulary: int = 0

    def __post_init__(self) -> None:
        check_size(self, motif=self.motif)
        self.check_noise(self.noise, self.noise_vocabulary)
        special = 1 if self.multi_query else 2
        self.need(2 * self.motif + self.noise_vocabulary + special, f"motifs of {self.motif} distinct tokens")
        MadTask.__post_init__(self)

    @property
    def shortest(self) -> int:
        return 4 * self.motif + 1

    def check_length(self, length: int) -> None:
        if length < self.shortest:
            raise SpecError(
                f"MadFuzzyRecall(length={length}, motif={self.motif}): a pair shown and asked for needs "
                f"length={self.shortest} or more."
            )

    @property
    def _ordinary(self) -> int:
        return self.vocabulary - self.noise_vocabulary - (1 if self.multi_query else 2)

    @property
    def chance(self) -> float:
        return 1 / (self._ordinary - self._ordinary // 2)

    def draw(self, size: int, generator: torch.Generator, *, length: int, split: Split = "train") -> Batch:
        shortest_pair = 2 if split == "train" else self.motif + 1
        count = length // shortest_pair + 1
        drawn = self._pairs(size, count + 1, generator, split)  # the probe first
        every = torch.arange(count + 1).expand(size, -1)
        noisy = torch.zeros(size, count + 1, dtype=torch.bool)
        if self.noise:
            noisy[:, 1:] = torch.rand(size, count, generator=generator) < self.noise

        # A key keeps the value it came with first; the probe stands at 0 and so wins.
        code = torch.where(noisy, -1 - every, self._code(drawn))
        origin = first_occurrence(code)
        pairs = drawn._replace(value=drawn.at(origin).value, value_size=drawn.at(origin).value_size)
        sizes = pairs.key_size + pairs.value_size
        if self.noise:
            highest = self._ordinary + self.noise_vocabulary
            noise = torch.randint(self._ordinary, highest, (2, *pairs.key.shape), generator=generator)
            pairs = pairs._replace(
                key=torch.where(noisy.unsqueeze(-1), noise[0], pairs.key),
                value=torch.where(noisy.unsqueeze(-1), noise[1], pairs.value),
            )

        # Where the probe goes in, unless its key comes up by itself before.
        probe_size = sizes[:, :1]
        limit = length - probe_size - 2 * self.motif
        start = sizes[:, 1:].cumsum(-1) - sizes[:, 1:]
        wanted = (torch.rand(size, 1, generator=generator) * (length - 2 * probe_size)).long()
        place = torch.minimum((start < wanted).sum(-1, keepdim=True), (start < limit).sum(-1, keepdim=True) - 1)
        unasked = ((code[:, 1:] == code[:, :1]) & (every[:, :-1] < place)).any(-1, keepdim=True)
        place = torch.where(unasked, count, place)
        slot = torch.where(every < place, every + 1, torch.where(every == place, 0, every))

        # In their order, as many as fit, and the probe once more.
        laid = pairs.at(slot)
        used = (laid.key_size + laid.value_size).cumsum(-1) - laid.key_size - laid.value_size < limit
        again = (first_occurrence(code.gather(1, slot)) < every) & self.multi_query
        probe = pairs.at(torch.zeros(size, 1, dtype=torch.int64))
        body, body_asked, body_used = self._tokens(laid, again, used)
        prefix = torch.full((size, 0 if self.multi_query else 1), self.vocabulary - 1)
        yes = torch.ones(size, 1, dtype=torch.bool)
        end, end_asked, end_used = self._tokens(probe, yes, yes)
        tokens = torch.cat((body, prefix, end), 1)
        asked = torch.cat((body_asked, torch.full_like(prefix, IGNORED), end_asked), 1)
        counts = torch.cat((body_used, torch.ones_like(prefix, dtype=torch.bool), end_used), 1)

        padding = self.vocabulary - (1 if self.multi_query else 2)
        sequence = _right_aligned(tokens, counts, length + 1, padding)
        targets = sequence if split == "train" else _right_aligned(asked, counts, length + 1, IGNORED)
        return Batch(sequence[:, :-1], targets[:, 1:])

    def _pairs(self, size: int, count: int, generator: torch.Generator, split: Split) -> _Pairs:
        kinds, motif = self._ordinary // 2, self.motif
        fewest = 1 if split == "train" else motif
        return _Pairs(
            _distinct(kinds, motif, (size, count), generator),
            torch.randint(fewest, motif + 1, (size, count), generator=generator),
            kinds + _distinct(self._ordinary - kinds, motif, (size, count), generator),
            torch.randint(1, motif + 1, (size, count), generator=generator),
        )

    def _code(self, pairs: _Pairs) -> Tensor:
        """A number for each key motif, from 0."""
        step = torch.arange(self.motif)
        digits = torch.where(step < pairs.key_size.unsqueeze(-1), pairs.key + 1, 0)
        return (digits * (self._ordinary + 1) ** step).sum(-1)

    def _tokens(self, pairs: _Pairs, again: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of the pairs, what is asked at each, and which are there at all: (batch, pairs · 2 · motif)."""
        step = torch.arange(self.motif)
        tokens = torch.cat((pairs.key, pairs.value), -1)
        there = torch.cat((step < pairs.key_size.unsqueeze(-1), step < pairs.value_size.unsqueeze(-1)), -1)
        asked = torch.where(again.unsqueeze(-1), pairs.value, IGNORED)
        asked = torch.cat((torch.full_like(pairs.key, IGNORED), asked), -1)
        return tokens.flatten(1), asked.flatten(1), (there & used.unsqueeze(-1)).flatten(1)


def _distinct(kinds: int, motif: int, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """`motif` different numbers below `kinds`, in an order where every one is as likely: (*shape, motif)."""
    chosen: list[Tensor] = []
    for i in range(motif):
        number = torch.randint(kinds - i, shape, generator=generator)  # among those that are left
        for taken in torch.stack(chosen, -1).sort(-1).values.unbind(-1) if chosen else ():
            number = number + (number >= taken)
        chosen.append(number)
    return torch.stack(chosen, -1)


def _right_aligned(values: Tensor, there: Tensor, width: int, padding: int) -> Tensor:
    """The values that are there, in their order, at the right end of rows of `width`."""
    count = there.sum(-1, keepdim=True)
    place = torch.where(there, width - count + there.cumsum(-1) - 1, width)  # what is not there goes past the end
    rows = torch.full((len(values), width + 1), padding, dtype=values.dtype)
    return rows.scatter_(1, place, values)[:, :width]
