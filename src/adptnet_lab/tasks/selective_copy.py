"""Selective Copy: recall symbols scattered among noise, in order (sec:selective_copy_results)."""

from typing import Literal

import torch
from torch import Tensor

from adptnet.errors import InputError, SpecError
from adptnet.spec import check_size, spec

from .base import IGNORED, Batch, Scores, Task
from .scores import recall_scores

__all__ = ["SELECTIVE_COPY_SETTINGS", "SelectiveCopy"]


@spec
class SelectiveCopy(Task):
    """`symbols` symbols among noise tokens, then as many markers, at which the symbols must be recalled in order.

    Token 0 is noise and `vocabulary` - 1 is the marker; the symbols are drawn from the other `vocabulary` - 2. The
    placement is that of S4's data set, whose sizes match the paper's (10 000 fresh sequences per epoch, 1 000 for
    evaluation). MAD places the symbols differently.

    Attributes:
        length: Steps per sequence, or steps of noise, according to `length_of`.
        symbols: Number of symbols to recall.
        vocabulary: Number of tokens, including noise and marker.
        variable: Place the symbols at random positions; if False, at the beginning, as in Copy Memory.
        length_of: What `length` counts. The paper does not say; its tables fit "sequence".
    """

    length: int = 128
    symbols: int = 16
    vocabulary: int = 16
    variable: bool = True
    length_of: Literal["sequence", "noise"] = "sequence"

    def __post_init__(self) -> None:
        check_size(self, length=self.length, symbols=self.symbols, vocabulary=self.vocabulary)
        if self.length_of not in ("sequence", "noise"):
            raise SpecError(f'SelectiveCopy(length_of={self.length_of!r}): pass "sequence" or "noise".')
        if self.vocabulary < 3:
            raise SpecError(f"SelectiveCopy(vocabulary={self.vocabulary}): noise, marker and a symbol need at least 3.")
        self._noise(self.length)

    @property
    def chance(self) -> float:
        return 1 / (self.vocabulary - 2)

    def _noise(self, length: int) -> int:
        """Return the steps of noise before the markers."""
        noise = length - 2 * self.symbols if self.length_of == "sequence" else length
        if noise < 0:
            raise SpecError(
                f"SelectiveCopy(length={length}, symbols={self.symbols}): {self.symbols} symbols and as many markers "
                f"need {2 * self.symbols} steps. Pass length={2 * self.symbols} or more, or fewer symbols."
            )
        return noise

    def batch(self, size: int, generator: torch.Generator, *, length: int | None = None) -> Batch:
        before = self._noise(self.length if length is None else length) + self.symbols
        if size < 1:
            raise InputError(f"a batch of {size} sequences: it must be at least 1.")
        symbols = torch.randint(1, self.vocabulary - 1, (size, self.symbols), generator=generator)
        if self.variable:
            order = torch.rand(size, before, generator=generator)
            positions = order.topk(self.symbols, -1, sorted=False).indices.sort(-1).values
        else:
            positions = torch.arange(self.symbols).expand(size, -1)
        inputs = torch.zeros(size, before + self.symbols, dtype=torch.int64)
        inputs.scatter_(1, positions, symbols)
        inputs[:, before:] = self.vocabulary - 1
        targets = torch.full_like(inputs, IGNORED)
        targets[:, before:] = symbols
        return Batch(inputs, targets)

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        return recall_scores(outputs, targets)


SELECTIVE_COPY_SETTINGS = {
    "linear": SelectiveCopy(length=1024),  # the table of LinearADPTNet
    "non-linear": SelectiveCopy(length=128),  # the table of ADPTNet
    "twin": SelectiveCopy(length=128),  # to compare with the next one,
    "twin-copy": SelectiveCopy(length=128, variable=False),  # which has nothing to select
    "laptop": SelectiveCopy(length=40, symbols=6, vocabulary=8),
}
