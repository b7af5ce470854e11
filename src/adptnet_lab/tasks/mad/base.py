"""What the tasks of the suite share: fixed sets, noise, and an accuracy over classes."""

import torch
from torch import Tensor

from adptnet.errors import SpecError
from adptnet.spec import check_fraction, check_size

from ..base import IGNORED, Scores
from ..generated import GeneratedTask
from ..scores import macro_accuracy

__all__ = ["MadTask", "first_occurrence"]


class MadTask(GeneratedTask):
    """A task of the suite: `vocabulary` counts the special tokens, which come last.

    The accuracy is the mean over classes of the share that is right, of one batch; scores of batches are averaged.
    The suite takes the test set for choosing weights too, so score the last ones.
    """

    vocabulary: int

    def __post_init__(self) -> None:
        check_size(self, vocabulary=self.vocabulary)
        if not self.vocabulary <= 2**15:
            raise SpecError(f"{type(self).__name__}(vocabulary={self.vocabulary}): at most {2**15}.")
        GeneratedTask.__post_init__(self)

    def check_noise(self, noise: float, noise_vocabulary: int) -> None:
        check_fraction(self, below="at 1 nothing but noise would be left", noise=noise)
        if isinstance(noise_vocabulary, bool) or not isinstance(noise_vocabulary, int) or noise_vocabulary < 0:
            raise SpecError(
                f"{type(self).__name__}(noise_vocabulary={noise_vocabulary!r}): must be a whole number from 0."
            )
        if noise and not noise_vocabulary:
            raise SpecError(
                f"{type(self).__name__}(noise={noise}, noise_vocabulary=0): noise needs tokens. "
                f"Pass noise_vocabulary=16 and vocabulary={self.vocabulary + 16}."
            )

    def need(self, tokens: int, what: str) -> None:
        """Raises unless the vocabulary has `tokens` tokens."""
        if self.vocabulary < tokens:
            raise SpecError(f"{type(self).__name__}(vocabulary={self.vocabulary}): {what} need {tokens} at least.")

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        predictions = outputs.argmax(-1)
        counted = targets != IGNORED
        return {
            "accuracy": macro_accuracy(predictions, targets),
            "plain_accuracy": float((predictions == targets)[counted].double().mean()),
        }


def first_occurrence(codes: Tensor) -> Tensor:
    """For each number of a row, the index at which that number first stands in the row: (batch, n) int64."""
    ordered, order = codes.sort(dim=-1, stable=True)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    index = torch.arange(codes.shape[1]).expand_as(codes)
    first = order.gather(1, torch.where(begins, index, 0).cummax(-1).values)
    return torch.empty_like(order).scatter_(1, order, first)
