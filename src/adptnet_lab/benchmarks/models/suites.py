"""The suites: tasks, lengths and budgets, the same for every model."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

from ... import tasks, training

__all__ = ["BUDGETS", "FACTORS", "SUITES", "Budget", "BudgetName", "Suite", "SuiteName", "task_length"]

SuiteName = Literal["state-tracking", "mad", "mqar"]
BudgetName = Literal["small", "standard"]
FACTORS = (1, 2, 4, 8, 16)  # lengths of the test, in units of the training length


@dataclasses.dataclass(frozen=True)
class Budget:
    """Sizes of the runs of a table, the same for every model.

    Attributes:
        steps: Optimizer steps.
        batch_size: Sequences per step.
        rates: Learning rates, of which validation data choose one.
        seeds: Seeds of weights and training data.
        evaluation_size: Test sequences at the training length. At `factor` times the length there are 1/`factor` as
            many, but at least `SMALLEST_TEST`.
    """

    steps: int
    batch_size: int
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    evaluation_size: int

    def test_size(self, factor: int) -> int:
        """Return the number of test sequences.

        Args:
            factor: Length in units of the training length.
        """
        return min(self.evaluation_size, max(SMALLEST_TEST, self.evaluation_size // factor))

    def settings(self, rate: float, seed: int) -> training.TrainConfig:
        """Return the settings of a run: AdamW with warm-up and a cosine schedule, weights of the best validation score.

        Args:
            rate: Learning rate.
            seed: Seed.
        """
        return training.TrainConfig(
            steps=self.steps,
            batch_size=self.batch_size,
            learning_rate=rate,
            seed=seed,
            optimizer=training.AdamW(betas=(0.9, 0.99)),
            weight_decay=0.01,
            decay_directions=False,
            schedule=training.Cosine(warmup=0.05),
            clip=1.0,
            evaluate_every=max(1, self.steps // 5),
            evaluation_size=min(256, self.evaluation_size),
            evaluation_batch=64,
        )


SMALLEST_TEST = 64
BUDGETS: Mapping[BudgetName, Budget] = {
    "small": Budget(steps=500, batch_size=64, rates=(3e-3,), seeds=(0, 1, 2), evaluation_size=512),
    "standard": Budget(steps=5000, batch_size=256, rates=(1e-3, 3e-3), seeds=(0, 1, 2), evaluation_size=4096),
}


class Suite(NamedTuple):
    """A set of tasks from token ids to logits.

    Attributes:
        about: One line on what the suite measures.
        tasks: The tasks by name.
        parameters: Parameter count of the known models.
        depth: Blocks of the known models.
        preset: Name of the preset of `adptnet.presets` for these tasks.
    """

    about: str
    tasks: Mapping[str, tasks.Task]
    parameters: int
    depth: int
    preset: str


SUITES: Mapping[SuiteName, Suite] = {
    "state-tracking": Suite(
        "Running products of random elements of finite groups: mean accuracy of the last ten products.",
        {
            "Z2 (parity)": tasks.WordProblem("Z2", 8),
            "S3": tasks.WordProblem("S3", 8),
            "Z60": tasks.WordProblem("Z60", 8),
            "A5": tasks.WordProblem("A5", 8),
        },
        25_000,
        1,
        "tracking",
    ),
    "mad": Suite(
        "Five tasks of MAD at shorter lengths. Its sixth, compression, needs an auto-encoder and is left out.",
        {
            "memorisation": tasks.MadMemorisation(),
            "selective copying": tasks.MadSelectiveCopying(length=64, tokens_to_copy=8),
            "in-context recall": tasks.MadInContextRecall(length=64),
            "noisy recall": tasks.MadNoisyRecall(length=64),
            "fuzzy recall": tasks.MadFuzzyRecall(length=64),
        },
        60_000,
        2,
        "recall",
    ),
    "mqar": Suite(
        "Multi-query associative recall: accuracy at the repeated keys.",
        {
            "4 pairs": tasks.MultiQueryRecall(pairs=4, length=32),
            "8 pairs": tasks.MultiQueryRecall(pairs=8, length=64),
        },
        60_000,
        2,
        "recall",
    ),
}


def task_length(task: tasks.Task) -> int:
    """Return the training length of a task of a suite.

    Args:
        task: The task.
    """
    length: int = task.length  # type: ignore[attr-defined]
    return length
