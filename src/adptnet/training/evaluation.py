"""Scores of a model on sequences that are set aside."""

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from ..errors import InputError
from ..nn.model import evaluating
from ..spec import nearest
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

    Processes take batches in turn. None as a length is the task's own.
    """
    place = place or Alone(next(model.parameters()).device)
    scores: dict[int, Scores] = {}
    with evaluating(model):
        for asked in lengths:
            parts: list[tuple[int, Scores, int]] = []
            length, number = asked, -1
            for number, batch in enumerate(task.evaluation(split, size, batch_size, seed=seed, length=asked)):
                length = length or batch.inputs.shape[1]
                if number % place.count == place.rank:
                    parts.append((number, _scored(model, task, batch, place), len(batch.inputs)))
            if 0 < (number + 1) % place.count <= place.rank:  # as many calls everywhere: they may be collective
                _scored(model, task, batch, place)
            assert length is not None
            scores[length] = _mean(sorted(itertools.chain(*place.gathered(parts)), key=lambda part: part[0]))
    return scores


def _scored(model: nn.Module, task: Task, batch: Batch, place: Place) -> Scores:
    batch = place.moved(batch)
    with place.autocast():
        outputs = model(batch.inputs, lengths=batch.lengths)[0]
    return {"loss": task.loss(outputs, batch.targets).item(), **task.scores(outputs, batch.targets)}


def score_of(scores: dict[int, Scores], task: Task, config: TrainConfig) -> tuple[float, bool]:
    """The score that weights are chosen by, and whether more of it is better."""
    first = next(iter(scores.values()))
    name = config.select_by or task.metric
    score = first.get(name)
    if not isinstance(score, float):
        single = [known for known, value in first.items() if isinstance(value, float)]
        kind = type(task).__name__
        raise InputError(f"TrainConfig(select_by={name!r}): {kind} has no such score.{nearest(name, single)}")
    return score, task.higher_is_better if name != "loss" else False


def _mean(parts: list[tuple[int, Scores, int]]) -> Scores:
    """The mean of the batches' scores, each batch counted by its sequences."""
    counts = torch.tensor([count for _, _, count in parts], dtype=torch.float64)
    means: Scores = {}
    for name in parts[0][1]:
        values = torch.tensor([scores[name] for _, scores, _ in parts], dtype=torch.float64)
        means[name] = torch.einsum("b...,b->...", values, counts / counts.sum()).tolist()
    return means
