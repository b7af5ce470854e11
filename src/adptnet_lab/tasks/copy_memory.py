"""Copy Memory: recall ten symbols after a long delay (fig:copy_memory)."""

from typing import Literal

import torch
from torch import Tensor

from adptnet.errors import SpecError
from adptnet.spec import spec

from .base import IGNORED, Batch, Scores, Split
from .generated import GeneratedTask
from .scores import recall_scores

__all__ = ["CopyMemory"]

SYMBOLS = 10  # symbols to remember, and steps in which to recall them
MARKER = 9


@spec
class CopyMemory(GeneratedTask):
    """Ten symbols from 1 to 8, then zeros, then eleven markers 9; the last ten steps must repeat the symbols.

    Loss and accuracy cover the last ten steps alone: over all steps, always predicting zero would already score 84 %
    at 64 steps. There are 10 000 fixed training sequences, as in the sources that the paper builds on.

    Attributes:
        length: Steps per sequence: 64, 128 and 1024 in the paper.
        encoding: "tokens", or "scalar" as in those sources: the numbers 0 to 9 in one channel.
        training_sequences: Size of the fixed training set.
        test_sequences: Size of the fixed validation set, and of the fixed test set.
        seed: Seed of the sets.
    """

    length: int = 64
    encoding: Literal["tokens", "scalar"] = "tokens"
    training_sequences: int = 10_000
    test_sequences: int = 1_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.encoding not in ("tokens", "scalar"):
            raise SpecError(f'CopyMemory(encoding={self.encoding!r}): pass encoding="tokens" or encoding="scalar".')
        GeneratedTask.__post_init__(self)

    @property
    def minimum_length(self) -> int:
        return 2 * SYMBOLS + 1

    @property
    def vocabulary(self) -> int | None:
        return MARKER + 1 if self.encoding == "tokens" else None

    @property
    def input_size(self) -> int | None:
        return None if self.encoding == "tokens" else 1

    @property
    def output_size(self) -> int:
        return MARKER + 1

    @property
    def chance(self) -> float:
        return 1 / 8

    def draw(self, size: int, generator: torch.Generator, *, length: int, split: Split = "train") -> Batch:
        symbols = torch.randint(1, MARKER, (size, SYMBOLS), generator=generator)
        inputs = torch.zeros(size, length, dtype=torch.int64)
        inputs[:, :SYMBOLS] = symbols
        inputs[:, -SYMBOLS - 1 :] = MARKER
        targets = torch.full_like(inputs, IGNORED)
        targets[:, -SYMBOLS:] = symbols
        if self.encoding == "scalar":
            inputs = inputs.unsqueeze(-1).to(torch.get_default_dtype())
        return Batch(inputs, targets)

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        return recall_scores(outputs, targets)
