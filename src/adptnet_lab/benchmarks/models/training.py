"""Train a model on one task of a suite, test it at several lengths, and describe the run as a row."""

import math
import time
from typing import Any

import torch

import adptnet

from ... import training
from .factory import LogitsModel, ModelSource, call_factory, check_causal, make_fingerprint
from .suites import FACTORS, SUITES, Budget, SuiteName, task_length

__all__ = ["build", "train_and_test"]

_BATCH = 64  # sequences of a test batch at the training length


def build(source: ModelSource, suite: SuiteName, task_name: str, seed: int) -> tuple[LogitsModel, str]:
    """Return a new model for a task, whose weights the seed determines, and its fingerprint.

    Args:
        source: Makes the model.
        suite: Name of the suite.
        task_name: Name of the task.
        seed: Seed of torch's generator while the model is made.

    Raises:
        InputError: The model is not causal, or does not return logits.
    """
    task = SUITES[suite].tasks[task_name]
    vocabulary = task.vocabulary
    assert vocabulary is not None
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        model = call_factory(
            source,
            vocabulary=vocabulary,
            output_size=task.output_size,
            length=task_length(task) * max(FACTORS),
            parameters=SUITES[suite].parameters,
        )
        check_causal(model, vocabulary, task_length(task))
    return model, make_fingerprint(source, model)


def train_and_test(
    source: ModelSource, suite: SuiteName, task_name: str, budget: Budget, rate: float, seed: int
) -> dict[str, Any]:
    """Train a new model and return its row, without the budget.

    Args:
        source: Makes the model.
        suite: Name of the suite.
        task_name: Name of the task.
        budget: Steps and sizes.
        rate: Learning rate.
        seed: Seed of weights, training data and dropout.
    """
    task = SUITES[suite].tasks[task_name]
    model, fingerprint = build(source, suite, task_name, seed)
    row: dict[str, Any] = {
        "suite": suite,
        "task": task_name,
        "model": source.name,
        "fingerprint": fingerprint,
        "rate": rate,
        "seed": seed,
        "parameters": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "metric": task.metric,
        "chance": float(task.chance),
        "versions": {"adptnet": adptnet.__version__, "torch": torch.__version__},
    }
    settings, start = budget.settings(rate, seed), time.process_time()
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    strategy = training.SingleProcess(device)
    scores: dict[str, float] = {}
    validation = None
    try:
        if model.has_parameters:
            training.train(model, task, settings, strategy=strategy)
        sizes = {"size": settings.evaluation_size, "batch_size": settings.evaluation_batch, "strategy": strategy}
        found = training.evaluate(model, task, [None], split="validation", **sizes)  # type: ignore[arg-type]
        validation = _finite(next(iter(found.values()))[task.metric])
        for factor in FACTORS:
            found = training.evaluate(
                model,
                task,
                [task_length(task) * factor],
                size=budget.test_size(factor),
                batch_size=max(1, _BATCH // factor),
                strategy=strategy,
            )
            scores[str(factor)] = float(next(iter(found.values()))[task.metric])  # type: ignore[arg-type]
    except training.TrainingDiverged as error:
        row["diverged"] = str(error)[:200]
    return {**row, "validation": validation, "test": scores, "seconds": round(time.process_time() - start, 2)}


def _finite(score: Any) -> float | None:
    return float(score) if math.isfinite(score) else None
