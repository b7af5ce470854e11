"""States handed from one batch to the next, where sequences go on (`Batch.continues`): truncated back-propagation."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from adptnet.nn.model import evaluating

from ..tasks import Batch

__all__ = ["Carried"]


class Carried:
    """The states that the parts of a step ended with, cut from their graph."""

    def __init__(self, model: nn.Module, wanted: bool):
        self._model = model
        self._wanted = wanted
        self._leaves: dict[int, list[Tensor]] = {}
        self._structure: Any = None

    def entering(self, part: int, batch: Batch) -> Any:
        """The states that part `part` of a step begins with; None for the initial ones."""
        if not self._wanted or not batch.continues or part not in self._leaves:
            return None
        if self._structure is None:  # the leaves come from a file
            with torch.no_grad(), torch.random.fork_rng(devices=[]), evaluating(self._model):
                self._structure = pytree.tree_structure(self._model(batch.inputs, lengths=batch.lengths)[1])
        leaves = [leaf.to(batch.inputs.device) for leaf in self._leaves[part]]
        return pytree.tree_unflatten(leaves, self._structure)

    def leave(self, part: int, states: Any) -> None:
        """Takes the states that part `part` ended with."""
        if self._wanted:
            leaves, self._structure = pytree.tree_flatten(states)
            self._leaves[part] = [leaf.detach() for leaf in leaves]

    def tensors(self) -> dict[str, Tensor]:
        """All of it, by names."""
        return {
            f"{part}.{place}": leaf.cpu() for part, leaves in self._leaves.items() for place, leaf in enumerate(leaves)
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Goes back to what `tensors` gave."""
        self._leaves, self._structure = {}, None
        for name in sorted(tensors, key=lambda name: [int(number) for number in name.split(".")]):
            self._leaves.setdefault(int(name.split(".")[0]), []).append(tensors[name])
