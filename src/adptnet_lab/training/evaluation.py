"""Scores of a model on sequences that are set aside."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from adptnet.errors import InputError
from adptnet.nn.model import evaluating
from adptnet.spec import nearest

from ..tasks import Batch, Scores, Task
from ..tasks.base import Split
from .config import TrainConfig
from .places import Alone, Place

__all__ = ["evaluate", "score_of"]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    lengths: Sequence[int | None],
    *,
    split: Split = "test",
    size: int = 4096,
    batch_size: int = 512,
    seed: int = 1,
    place: Place | None = None,
) -> dict[int, Scores]:
    """Scores of `model`, and its loss, on `size` sequences of each length. The same seed draws the same sequences.

    Processes take batches in turn, unless each goes on where the one before ended. None as a length is the task's own.
    """
    place = place or Alone(next(model.parameters()).device)
    scores: dict[int, Scores] = {}
    with evaluating(model):
        for asked in lengths:
            parts: list[tuple[int, Scores, int]] = []
            length, number, state = asked, -1, None

            def batches(asked: int | None = asked) -> Iterator[Batch]:
                return task.evaluation(split, size, batch_size, seed=seed, length=asked)

            in_turn = not any(batch.continues for batch in itertools.islice(batches(), 2))
            for number, batch in enumerate(batches()):
                length = length or batch.inputs.shape[1]
                if not in_turn or number % place.count == place.rank:
                    found, state = _scored(model, task, batch, place, state if batch.continues else None)
                    if number % place.count == place.rank:
                        parts.append((number, found, len(batch.inputs)))
            if (
                in_turn and 0 < (number + 1) % place.count <= place.rank
            ):  # as many calls everywhere: they may be collective
                _scored(model, task, batch, place, None)
            assert length is not None
            scores[length] = _mean(sorted(itertools.chain(*place.gathered(parts)), key=lambda part: part[0]))
    return scores


def _scored(model: nn.Module, task: Task, batch: Batch, place: Place, state: Any) -> tuple[Scores, Any]:
    batch = place.moved(batch)
    with place.autocast():
        outputs, states = model(batch.inputs, state, lengths=batch.lengths)
    return {"loss": task.loss(outputs, batch.targets).item(), **task.scores(outputs, batch.targets)}, states


def score_of(scores: dict[int, Scores], task: Task, config: TrainConfig) -> tuple[float, bool]:
    """The score that weights are chosen by, and whether more of it is better."""
    first = next(iter(scores.values()))
    name = config.select_by or task.metric
    score = first.get(name)
    if not isinstance(score, float):
        single = [known for known, value in first.items() if isinstance(value, float)]
        kind = type(task).__name__
        raise InputError(f"TrainConfig(select_by={name!r}): {kind} has no such score.{nearest(name, single)}")
    return score, name not in task.lower_is_better


def _mean(parts: list[tuple[int, Scores, int]]) -> Scores:
    """The mean of the batches' scores, each batch counted by its sequences."""
    counts = torch.tensor([count for _, _, count in parts], dtype=torch.float64)
    means: Scores = {}
    for name in parts[0][1]:
        values = torch.tensor([scores[name] for _, scores, _ in parts], dtype=torch.float64)
        means[name] = torch.einsum("b...,b->...", values, counts / counts.sum()).tolist()
    return means
