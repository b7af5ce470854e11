"""Copy Memory: ten symbols, a long silence, and the ten symbols again (fig:copy_memory)."""

from typing import Literal

import torch
from torch import Tensor

from adptnet.errors import SpecError
from adptnet.spec import spec

from .base import IGNORED, Batch, Scores, Split
from .generated import GeneratedTask
from .scores import recall_scores

__all__ = ["CopyMemory"]

SYMBOLS = 10  # to remember, and steps to recall them in
MARKER = 9


@spec
class CopyMemory(GeneratedTask):
    """Ten symbols from 1 to 8, zeros, eleven markers 9; the symbols are due over the last ten.

    Loss and accuracy are over the last ten steps alone: over all of them, silence would already score 84 % at 64
    steps. 10 000 fixed sequences, as in the sources that the paper builds on.

    Attributes:
        length: Steps in all: 64, 128 and 1024 in the paper.
        encoding: Tokens, or as in those sources the numbers 0 to 9 in one channel.
        training_sequences, test_sequences, seed: Of the fixed sets.
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
    def shortest(self) -> int:
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
