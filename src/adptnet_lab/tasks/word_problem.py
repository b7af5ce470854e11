"""The word problem: the running product of random elements of a group (sec:state_tracking_results)."""

import torch
from torch import Tensor

from adptnet.errors import InputError
from adptnet.spec import check_fraction, check_size, spec

from .base import Batch, Scores, Task
from .groups import shared_product_table

__all__ = ["WordProblem"]


@spec
class WordProblem(Task):
    """Running product of elements drawn uniformly from `group`: the target at step t is y_t = y_{t-1}·x_t.

    The reported accuracy is the mean over the last min(10, length) positions, which is what the paper's numbers imply
    (docs/explanation/deviations.md). `scores` also returns the accuracy of the last position, of all positions, of
    whole sequences and of each position.

    Attributes:
        group: "S3", "A5", "Z60", "D4", "Q8", a direct product "S3xZ2", or a product table as text
            (`tasks.format_product_table`).
        length: Elements per sequence.
        identity: Probability with which an element is replaced by the identity; p in the paper's table, 0 there.
    """

    group: str = "S3"
    length: int = 8
    identity: float = 0.0

    def __post_init__(self) -> None:
        shared_product_table(self.group)
        check_size(self, length=self.length)
        check_fraction(self, below="at 1 every product would be the identity", identity=self.identity)

    @property
    def vocabulary(self) -> int:
        return len(shared_product_table(self.group))

    @property
    def chance(self) -> float:
        return 1 / self.vocabulary

    def batch(self, size: int, generator: torch.Generator, *, length: int | None = None) -> Batch:
        length = self.length if length is None else length
        if size < 1 or length < 1:
            raise InputError(f"a batch of {size} sequences of {length} steps: both must be at least 1.")
        table = shared_product_table(self.group)
        inputs = torch.randint(self.vocabulary, (size, length), generator=generator)
        if self.identity:
            inputs[torch.rand(size, length, generator=generator) < self.identity] = 0
        targets = inputs.clone()
        for t in range(1, length):
            targets[:, t] = table[targets[:, t - 1], inputs[:, t]]
        return Batch(inputs, targets)

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        correct = (outputs.argmax(-1) == targets).double()
        return {
            "accuracy": float(correct[:, -10:].mean()),
            "last_token": float(correct[:, -1].mean()),
            "all_positions": float(correct.mean()),
            "whole_sequence": float(correct.prod(-1).mean()),
            "per_position": correct.mean(0).tolist(),
        }
