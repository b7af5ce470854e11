"""Evaluation of a model on validation and test data."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from adptnet.errors import InputError
from adptnet.nn.model import evaluation_mode
from adptnet.spec import suggest_name

from ..tasks import Batch, Scores, Task
from ..tasks.base import Split
from .config import TrainConfig
from .strategy import SingleProcess, Strategy

__all__ = ["evaluate", "selection_score"]


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
    strategy: Strategy | None = None,
) -> dict[int, Scores]:
    """Return the scores and the loss of `model` at each length.

    Processes take batches in turn, unless batches continue one another: then each process runs all of them.

    Args:
        model: The model; its mode is restored.
        task: The source of the sequences.
        lengths: Lengths to evaluate at; None for the task's own.
        split: The part of the data.
        size: Sequences of each length.
        batch_size: Sequences that are run together.
        seed: Seed of the sequences; the same seed draws the same ones.
        strategy: The processes; this one alone by default.

    Returns:
        The loss and the scores of the task, averaged over the sequences, by length.
    """
    strategy = strategy or SingleProcess(next(model.parameters()).device)
    scores: dict[int, Scores] = {}
    with evaluation_mode(model):
        for requested in lengths:
            parts: list[tuple[int, Scores, int]] = []
            length, number, state = requested, -1, None

            def batches(requested: int | None = requested) -> Iterator[Batch]:
                return task.evaluation(split, size, batch_size, seed=seed, length=requested)

            in_turn = not any(batch.continues for batch in itertools.islice(batches(), 2))
            for number, batch in enumerate(batches()):
                length = length or batch.inputs.shape[1]
                is_own = number % strategy.world_size == strategy.rank
                if not in_turn or is_own:
                    found, state = _score_batch(model, task, batch, strategy, state if batch.continues else None)
                    if is_own:
                        parts.append((number, found, len(batch.inputs)))
            # Sharded models communicate in every call, so each process makes the same number of calls.
            if in_turn and 0 < (number + 1) % strategy.world_size <= strategy.rank:
                _score_batch(model, task, batch, strategy, None)
            assert length is not None
            scores[length] = _average(sorted(itertools.chain(*strategy.gather(parts)), key=lambda part: part[0]))
    return scores


def _score_batch(model: nn.Module, task: Task, batch: Batch, strategy: Strategy, state: Any) -> tuple[Scores, Any]:
    batch = strategy.move_to_device(batch)
    with strategy.autocast():
        outputs, states = model(batch.inputs, state, lengths=batch.lengths)
    return {"loss": task.loss(outputs, batch.targets).item(), **task.scores(outputs, batch.targets)}, states


def selection_score(scores: dict[int, Scores], task: Task, config: TrainConfig) -> tuple[float, bool]:
    """Return the score that selects the weights, and whether a higher one is better.

    Args:
        scores: Scores by length, as `evaluate` returns them.
        task: Defines the scores.
        config: Its `select_by` names the score, and `select_at` the lengths that count.

    Raises:
        InputError: There is no such score.
    """
    first = next(iter(scores.values()))
    name = config.select_by or task.metric
    score = first.get(name)
    if not isinstance(score, float):
        single = [known for known, value in first.items() if isinstance(value, float)]
        kind = type(task).__name__
        raise InputError(f"TrainConfig(select_by={name!r}): {kind} has no such score.{suggest_name(name, single)}")
    if config.select_at == "mean":
        score = sum(each[name] for each in scores.values()) / len(scores)  # type: ignore[misc]
    return score, name not in task.lower_is_better


def _average(parts: list[tuple[int, Scores, int]]) -> Scores:
    """Return the mean of the batches' scores, weighted by their numbers of sequences."""
    counts = torch.tensor([count for _, _, count in parts], dtype=torch.float64)
    means: Scores = {}
    for name in parts[0][1]:
        values = torch.tensor([scores[name] for _, scores, _ in parts], dtype=torch.float64)
        means[name] = torch.einsum("b...,b->...", values, counts / counts.sum()).tolist()
    return means
