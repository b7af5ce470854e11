"""Micro-batches: a batch split over processes and gradient accumulation, and hidden states carried between batches."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from adptnet.errors import IncompatibleError
from adptnet.nn.model import evaluation_mode

from ..tasks import Batch
from ..tasks.base import IGNORED
from .strategy import Strategy

__all__ = ["CarriedStates", "split_batch"]


def split_batch(batch: Batch, strategy: Strategy, accumulation: int) -> Iterator[tuple[Batch, float]]:
    """Yield the micro-batches of this process, each with its weight in the loss.

    The weights of all processes sum to one, so that the loss is the mean over the targets of the whole batch.

    Args:
        batch: The batch of all processes.
        strategy: The processes.
        accumulation: The number of micro-batches of each process.

    Raises:
        IncompatibleError: The batch has fewer sequences than there are micro-batches.
    """
    pieces = strategy.world_size * accumulation
    if len(batch.inputs) < pieces:
        raise IncompatibleError(
            f"a batch of {len(batch.inputs)} cannot be cut into {pieces} parts ({strategy.world_size} processes, "
            f"accumulation {accumulation}). Raise batch_size or lower accumulation."
        )
    total = _count_targets(batch.targets)
    names = [name for name in ("inputs", "targets", "lengths") if getattr(batch, name) is not None]
    split = {name: getattr(batch, name).tensor_split(pieces) for name in names}
    for piece in range(strategy.rank * accumulation, (strategy.rank + 1) * accumulation):
        part = batch._replace(**{name: parts[piece] for name, parts in split.items()})
        yield part, _count_targets(part.targets) / max(1, total)


def _count_targets(targets: Tensor) -> int:
    """Return the number of targets that the mean of a loss is over."""
    return targets.numel() if targets.is_floating_point() else int((targets != IGNORED).sum())


class CarriedStates:
    """Final hidden states of the micro-batches of one step, detached, for the next step to start from.

    Used where sequences continue from one batch to the next (`Batch.continues`): truncated back-propagation through
    time.

    Args:
        model: The model whose states are carried.
        enabled: Whether the batches of the task continue; if not, nothing is kept.
    """

    def __init__(self, model: nn.Module, enabled: bool):
        self._model = model
        self._enabled = enabled
        self._leaves: dict[int, list[Tensor]] = {}
        self._structure: Any = None

    def initial_states(self, part: int, batch: Batch) -> Any:
        """Return the states that a micro-batch starts from; None for the model's own initial states.

        Args:
            part: The number of the micro-batch within its step.
            batch: The micro-batch.
        """
        if not self._enabled or not batch.continues or part not in self._leaves:
            return None
        if self._structure is None:  # the leaves were read from a checkpoint
            with torch.no_grad(), torch.random.fork_rng(devices=[]), evaluation_mode(self._model):
                self._structure = pytree.tree_structure(self._model(batch.inputs, lengths=batch.lengths)[1])
        leaves = [leaf.to(batch.inputs.device) for leaf in self._leaves[part]]
        return pytree.tree_unflatten(leaves, self._structure)

    def keep(self, part: int, states: Any) -> None:
        """Keep the final states of micro-batch `part`.

        Args:
            part: The number of the micro-batch within its step.
            states: The states that the model returned.
        """
        if self._enabled:
            leaves, self._structure = pytree.tree_flatten(states)
            self._leaves[part] = [leaf.detach() for leaf in leaves]

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all states by name, on the CPU, for a checkpoint."""
        return {
            f"{part}.{place}": leaf.cpu() for part, leaves in self._leaves.items() for place, leaf in enumerate(leaves)
        }

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore the states that `to_tensors` returned.

        Args:
            tensors: The states, by name.
        """
        self._leaves, self._structure = {}, None
        for name in sorted(tensors, key=lambda name: [int(number) for number in name.split(".")]):
            self._leaves.setdefault(int(name.split(".")[0]), []).append(tensors[name])
