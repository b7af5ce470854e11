"""Base classes of the MAD tasks: common fields, checks of noise and vocabulary, accuracy over classes."""

import dataclasses

import torch
from torch import Tensor

from adptnet.errors import SpecError
from adptnet.spec import check_fraction, check_size

from ..base import IGNORED, Scores
from ..generated import GeneratedTask
from ..scores import macro_accuracy

__all__ = ["MadTask", "StandardMadTask", "find_first_occurrence"]


class MadTask(GeneratedTask):
    """Base class of the tasks of the suite. `vocabulary` includes the special tokens, which come last.

    The accuracy of a batch is the mean of the accuracies within each class; scores are averaged over batches. The suite
    also uses the test set to select weights, so score the final weights.
    """

    vocabulary: int

    def __post_init__(self) -> None:
        check_size(self, vocabulary=self.vocabulary)
        if not self.vocabulary <= 2**15:
            raise SpecError(f"{type(self).__name__}(vocabulary={self.vocabulary}): must be at most {2**15}.")
        GeneratedTask.__post_init__(self)

    def check_noise(self, noise: float, noise_vocabulary: int) -> None:
        """Raise `SpecError` unless `noise` is a fraction and has tokens to draw from.

        Args:
            noise: Fraction of the tokens that are noise.
            noise_vocabulary: Number of tokens reserved for noise.
        """
        check_fraction(self, below="at 1 nothing but noise would be left", noise=noise)
        if isinstance(noise_vocabulary, bool) or not isinstance(noise_vocabulary, int) or noise_vocabulary < 0:
            raise SpecError(f"{type(self).__name__}(noise_vocabulary={noise_vocabulary!r}): must be an integer >= 0.")
        if noise and not noise_vocabulary:
            raise SpecError(
                f"{type(self).__name__}(noise={noise}, noise_vocabulary=0): noise needs tokens. "
                f"Pass noise_vocabulary=16 and vocabulary={self.vocabulary + 16}."
            )

    def check_vocabulary(self, tokens: int, what: str) -> None:
        """Raise `SpecError` unless the vocabulary has at least `tokens` tokens, which `what` describes.

        Args:
            tokens: The smallest vocabulary.
            what: What needs it, for the message.
        """
        if self.vocabulary < tokens:
            raise SpecError(
                f"{type(self).__name__}(vocabulary={self.vocabulary}): {what} need at least {tokens} tokens."
            )

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        predictions = outputs.argmax(-1)
        counted = targets != IGNORED
        return {
            "accuracy": macro_accuracy(predictions, targets),
            "plain_accuracy": float((predictions == targets)[counted].double().mean()),
        }


@dataclasses.dataclass(frozen=True)
class StandardMadTask(MadTask):
    """Base class of the tasks that begin with these five fields, in this order."""

    vocabulary: int = 16
    length: int = 128
    training_sequences: int = 12_800
    test_sequences: int = 1_280
    seed: int = 12345


def find_first_occurrence(codes: Tensor) -> Tensor:
    """Return, for each entry of a row, the index of the first equal entry of that row.

    Args:
        codes: (batch, n) int64.
    """
    ordered, order = codes.sort(dim=-1, stable=True)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    index = torch.arange(codes.shape[1]).expand_as(codes)
    first = order.gather(1, torch.where(begins, index, 0).cummax(-1).values)
    return torch.empty_like(order).scatter_(1, order, first)
