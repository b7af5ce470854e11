"""A small training loop: seeded, with a record of every number."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..errors import AdptnetError, InputError
from ..nn.model import evaluating
from ..tasks import Task
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
        model: Called as `logits, state = model(tokens)`.
        task: Where the batches come from.
        config: The settings.
        on_step: Called with the number of steps done and the loss, after each.
    """
    generator = torch.Generator().manual_seed(config.seed)
    groups = param_groups(model, config.learning_rate, config.weight_decay)
    optimiser = torch.optim.AdamW(groups, betas=config.betas, eps=config.epsilon)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, config.rate)
    losses = []
    begun = time.monotonic()
    model.train()
    with torch.random.fork_rng(devices=[]):  # dropout draws from the global generator
        torch.manual_seed(config.seed)
        for step in range(config.steps):
            batch = task.batch(config.batch_size, generator)
            logits, _ = model(batch.inputs)
            loss = task.loss(logits, batch.targets)
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
    model: nn.Module, task: Task, lengths: Sequence[int], *, size: int = 4096, batch_size: int = 512, seed: int = 1
) -> dict[int, dict[str, float | list[float]]]:
    """Scores of `model` on `size` fresh sequences of each length. The same seed draws the same sequences."""
    if size < 1 or batch_size < 1:
        raise InputError(f"evaluate(size={size}, batch_size={batch_size}): both must be at least 1.")
    scores = {}
    with evaluating(model):
        for length in lengths:
            generator = torch.Generator().manual_seed(seed)
            predictions, targets = [], []
            for start in range(0, size, batch_size):
                batch = task.batch(min(batch_size, size - start), generator, length=length)
                predictions.append(model(batch.inputs)[0].argmax(-1))
                targets.append(batch.targets)
            scores[length] = task.scores(torch.cat(predictions), torch.cat(targets))
    return scores
