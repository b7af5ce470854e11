"""MAD's selective copying: recall tokens that are separated by blanks."""

import torch

from adptnet.errors import SpecError
from adptnet.spec import check_size, spec

from ..base import IGNORED, Batch, Split
from .base import MadTask

__all__ = ["MadSelectiveCopying"]


@spec
class MadSelectiveCopying(MadTask):
    """Tokens separated by blanks, a copy token, then blanks at which the tokens must be recalled in order.

    Every blank precedes one of the tokens, each equally likely, so gaps hardly vary (13.9 ± 3.6 at 256 steps) and the
    last token is immediately followed by the copy token. `tasks.SelectiveCopy` places its symbols uniformly instead.

    Attributes:
        vocabulary: Number of tokens; the last is the copy token, the one before it the blank.
        length: Steps per sequence.
        tokens_to_copy: Number of tokens to recall.
        training_sequences: Size of the fixed training set.
        test_sequences: Size of the fixed validation set, and of the fixed test set.
        seed: Seed of the sets.
    """

    vocabulary: int = 16
    length: int = 256
    tokens_to_copy: int = 16
    training_sequences: int = 12_800
    test_sequences: int = 1_280
    seed: int = 12345

    def __post_init__(self) -> None:
        check_size(self, tokens_to_copy=self.tokens_to_copy)
        self.check_vocabulary(3, "blank, copy token and something to copy")
        MadTask.__post_init__(self)

    @property
    def minimum_length(self) -> int:
        return 2 * self.tokens_to_copy + 2

    def check_length(self, length: int) -> None:
        if length < self.minimum_length:
            raise SpecError(
                f"MadSelectiveCopying(length={length}, tokens_to_copy={self.tokens_to_copy}): a blank and the copy "
                f"token are needed besides {2 * self.tokens_to_copy} steps. Pass length={self.minimum_length} or more."
            )

    @property
    def chance(self) -> float:
        return 1 / (self.vocabulary - 2)

    def draw(self, size: int, generator: torch.Generator, *, length: int, split: Split = "train") -> Batch:
        count = self.tokens_to_copy
        blanks = length - 2 * count - 1
        blank, copy = self.vocabulary - 2, self.vocabulary - 1
        tokens = torch.randint(blank, (size, count), generator=generator)
        slots = torch.randint(count, (size, blanks), generator=generator)
        before = torch.zeros(size, count, dtype=torch.int64).scatter_add_(1, slots, torch.ones_like(slots))
        positions = (before + 1).cumsum(-1) - 1
        inputs = torch.full((size, length), blank)
        inputs.scatter_(1, positions, tokens)
        inputs[:, -count - 1] = copy
        targets = torch.full_like(inputs, IGNORED)
        targets[:, -count:] = tokens
        return Batch(inputs, targets)
