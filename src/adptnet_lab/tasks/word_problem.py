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

    The reported accuracy is the mean over the last min(10, length) positions. The paper does not define its accuracy;
    this is the definition of the public code for this task (docs/explanation/deviations.md, point 19). `scores` also
    returns the accuracy at the last position ("last_token"), over all positions, over whole sequences and at each
    position.

    Attributes:
        group: A finite group by name, for example "S5", "A5", "Z60" or "S3xZ2"; `tasks.product_table` has the syntax.
            Also a product table as text (`tasks.format_product_table`).
        length: Elements per sequence.
        identity: Probability with which an element is replaced by the identity. The paper's table calls it p and sets
            it to 0.
    """

    group: str = "S3"
    length: int = 8
    identity: float = 0.0

    def __post_init__(self) -> None:
        shared_product_table(self.group)  # raises InputError if the group is unknown
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
            raise InputError(f"WordProblem.batch(size={size}, length={length}): both must be at least 1.")
        table = shared_product_table(self.group)
        inputs = torch.randint(self.vocabulary, (size, length), generator=generator)
        if self.identity:
            inputs[torch.rand(size, length, generator=generator) < self.identity] = 0  # element 0 is the identity
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
