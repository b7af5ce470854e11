"""A small training loop: seeded, with a record of every number."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..errors import AdptnetError
from ..nn.model import evaluating
from ..tasks import Scores, Task
from ..tasks.base import Split
from .config import TrainConfig
from .optim import param_groups

__all__ = ["Record", "TrainingDiverged", "evaluate", "train"]


class TrainingDiverged(AdptnetError, RuntimeError):
    """The loss was not finite."""


class Record(NamedTuple):
    """The losses of a run, one a step, and how long it took."""

    losses: list[float]
    seconds: float


def train(
    model: nn.Module, task: Task, config: TrainConfig, *, on_step: Callable[[int, float], None] | None = None
) -> Record:
    """Trains `model` in place. The same seed gives the same numbers, whatever ran before.

    Args:
        model: Called as `outputs, state = model(inputs, lengths=lengths)`.
        task: Where the batches come from.
        config: The settings.
        on_step: Called with the number of steps done and the loss, after each.
    """
    groups = param_groups(model, config.learning_rate, config.weight_decay)
    optimiser = torch.optim.AdamW(groups, betas=config.betas, eps=config.epsilon)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, config.rate)
    losses = []
    begun = time.monotonic()
    model.train()
    with torch.random.fork_rng(devices=[]):  # dropout draws from the global generator
        torch.manual_seed(config.seed)
        for step in range(config.steps):
            batch = task.training_batch(step, config.batch_size, config.seed)
            outputs, _ = model(batch.inputs, lengths=batch.lengths)
            loss = task.loss(outputs, batch.targets)
            losses.append(loss.item())
            if not torch.isfinite(loss):
                raise TrainingDiverged(
                    f"the loss was {losses[-1]} at step {step + 1} of {config.steps}. Lower learning_rate "
                    f"(now {config.learning_rate}) or clip (now {config.clip})."
                )
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            if config.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimiser.step()
            schedule.step()
            if on_step is not None:
                on_step(step + 1, losses[-1])
    return Record(losses, time.monotonic() - begun)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    lengths: Sequence[int],
    *,
    split: Split = "test",
    size: int = 4096,
    batch_size: int = 512,
    seed: int = 1,
) -> dict[int, Scores]:
    """Scores of `model` on `size` sequences of each length. The same seed draws the same sequences."""
    scores = {}
    with evaluating(model):
        for length in lengths:
            parts: list[Scores] = []
            counts: list[int] = []
            for batch in task.evaluation(split, size, batch_size, seed=seed, length=length):
                parts.append(task.scores(model(batch.inputs, lengths=batch.lengths)[0], batch.targets))
                counts.append(len(batch.inputs))
            scores[length] = _mean(parts, counts)
    return scores


def _mean(parts: list[Scores], counts: list[int]) -> Scores:
    """The mean of the batches' scores, each batch counted by its sequences."""
    means: Scores = {}
    for name in parts[0]:
        values = torch.tensor([part[name] for part in parts], dtype=torch.float64)
        means[name] = torch.einsum(
            "b...,b->...", values, torch.tensor(counts, dtype=torch.float64) / sum(counts)
        ).tolist()
    return means
