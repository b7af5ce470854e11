"""Base classes of tasks: batches, a loss and scores."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from adptnet.errors import IncompatibleError, InputError
from adptnet.nn import BlockSpec, ModelSpec, SpikingModelSpec, SwiGLUBlockSpec
from adptnet.spec import ModuleSpec, Spec

__all__ = ["IGNORED", "Batch", "FiniteTask", "Scores", "Split", "Task", "make_generator"]

IGNORED = -100  # target value that loss and scores ignore

Scores = dict[str, float | list[float]]
Split = Literal["train", "validation", "test"]


class Batch(NamedTuple):
    """Inputs and targets of one batch."""

    inputs: Tensor  # (batch, time) int64 tokens, or (batch, time, input_size) floating point
    targets: Tensor  # (batch, time) int64, IGNORED outside the loss window; (batch,) labels; or floating point
    lengths: Tensor | None = None  # true lengths of right-padded sequences
    continues: bool = False  # whether each row continues that of the previous batch, so that the state may be carried


def make_generator(*numbers: int) -> torch.Generator:
    """Return a generator seeded by all of `numbers`, so that nearby seeds and steps share no draws.

    Args:
        *numbers: Integers >= 0, such as a seed and a step.
    """
    seed = int(np.random.SeedSequence([*numbers]).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(seed)


class Task(Spec, abc.ABC):
    """Base class of tasks: a source of sequences with its own loss, metric and chance level.

    `vocabulary` or `input_size`, `output_size` and `head` describe the interface of a model for the task, as
    `ModelSpec` takes them.
    """

    metric: ClassVar[str] = "accuracy"  # the score that the paper reports and that selects the weights to keep
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"loss"})  # for all other scores, higher is better
    head: ClassVar[Literal["token", "last", "mean"]] = "token"

    @property
    def vocabulary(self) -> int | None:
        """Number of input tokens; None if the inputs are floating point."""
        return None

    @property
    def input_size(self) -> int | None:
        """Input features per step; None if the inputs are tokens."""
        return None

    @property
    def output_size(self) -> int:
        """Output features per step, or per sequence."""
        assert self.vocabulary is not None, "a task without a vocabulary must define output_size"
        return self.vocabulary

    @property
    def step_seconds(self) -> float | None:
        """Seconds per step; None if steps have no physical duration."""
        return None

    @property
    @abc.abstractmethod
    def chance(self) -> float:
        """Score of random guessing."""

    @property
    def training_size(self) -> int | None:
        """Number of training sequences; None if every batch is drawn afresh."""
        return None

    def model(self, block: BlockSpec | SwiGLUBlockSpec, depth: int = 1) -> ModuleSpec:
        """Return the spec of a model for this task: encoder, `depth` copies of `block`, head.

        Args:
            block: Residual block; its width is that of the model.
            depth: Number of blocks.
        """
        return ModelSpec(block, depth, self.vocabulary, self.input_size, self.output_size, self.head)

    def spiking_model(self, network: SpikingModelSpec) -> SpikingModelSpec:
        """Return `network` with the input channels and classes of this task.

        Args:
            network: The spec of a spiking network.

        Raises:
            IncompatibleError: The inputs are tokens, or the task asks for an output at every step.
        """
        if self.input_size is None or self.head == "token":
            raise IncompatibleError(
                f"{type(self).__name__}: a spiking network takes floating-point inputs and returns one output per "
                "sequence. Pass a layer for its blocks instead, e.g. --model.layer lif."
            )
        return dataclasses.replace(network, input_size=self.input_size, output_size=self.output_size)

    @abc.abstractmethod
    def batch(self, size: int, generator: torch.Generator, *, length: int | None = None) -> Batch:
        """Draw a batch of training sequences.

        Args:
            size: Number of sequences.
            generator: Source of randomness.
            length: Steps per sequence; the task's own length by default.
        """

    def training_batch(self, step: int, size: int, seed: int) -> Batch:
        """Return the batch of one training step. It depends on the arguments alone, so a run can resume at any step.

        Args:
            step: Index of the training step; 0 is the first.
            size: Number of sequences.
            seed: Seed of the run.
        """
        return self.batch(size, make_generator(seed, step))

    def evaluation(
        self, split: Split, size: int, batch_size: int, *, seed: int = 1, length: int | None = None
    ) -> Iterator[Batch]:
        """Yield `size` sequences for evaluation, in batches.

        Args:
            split: "train", "validation" or "test".
            size: Number of sequences.
            batch_size: Sequences per batch; the last batch may be smaller.
            seed: Seed of the sequences; the same seed draws the same ones.
            length: Steps per sequence; the task's own length by default.
        """
        if size < 1 or batch_size < 1:
            raise InputError(f"an evaluation on {size} sequences in batches of {batch_size}: both must be at least 1.")
        for number, start in enumerate(range(0, size, batch_size)):
            generator = make_generator(seed, ("train", "validation", "test").index(split) + 1, number)
            yield self.batch(min(batch_size, size - start), generator, length=length)

    @abc.abstractmethod
    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        """Return the scores of a model's outputs on one batch; `metric` is among them.

        Args:
            outputs: What the model returned, (batch, time, output_size) or (batch, output_size).
            targets: Targets of the batch.
        """

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy over the targets that are not `IGNORED`.

        Args:
            outputs: What the model returned, (batch, time, output_size) or (batch, output_size).
            targets: Targets of the batch.
        """
        return functional.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED)


class FiniteTask(Task):
    """Base class of tasks with a finite set of sequences. Each epoch visits every sequence once, in a new order."""

    @abc.abstractmethod
    def size(self, split: Split) -> int:
        """Return the number of sequences in `split`.

        Args:
            split: "train", "validation" or "test".
        """

    @abc.abstractmethod
    def examples(self, split: Split, indices: Tensor, *, length: int | None = None) -> Batch:
        """Return the sequences of `split` at `indices`.

        Args:
            split: "train", "validation" or "test".
            indices: (batch,) int64, from 0 to `size(split)` - 1.
            length: Steps per sequence; the task's own length by default.
        """

    @property
    def training_size(self) -> int:
        return self.size("train")

    def batch(self, size: int, generator: torch.Generator, *, length: int | None = None) -> Batch:
        indices = torch.randint(self.training_size, (size,), generator=generator)
        return self.examples("train", indices, length=length)

    def training_batch(self, step: int, size: int, seed: int) -> Batch:
        return self.examples("train", self.training_indices(step, size, seed))

    def training_indices(self, step: int, size: int, seed: int) -> Tensor:
        """Return the indices of the sequences of one training step: the shuffled epochs, laid end to end.

        Args:
            step: Index of the training step; 0 is the first.
            size: Number of sequences.
            seed: Seed of the run.
        """
        total = self.training_size
        if size > total:
            raise InputError(f"a batch of {size} is larger than the {total} training sequences. Lower batch_size.")
        first, last = step * size, (step + 1) * size - 1
        orders = [
            torch.randperm(total, generator=make_generator(seed, e)) for e in range(first // total, last // total + 1)
        ]
        start = first - first // total * total
        return torch.cat(orders)[start : start + size]

    def evaluation(
        self, split: Split, size: int, batch_size: int, *, seed: int = 1, length: int | None = None
    ) -> Iterator[Batch]:
        """Yield the first `size` sequences of `split`, or all of them if there are fewer."""
        if size < 1 or batch_size < 1:
            raise InputError(f"an evaluation on {size} sequences in batches of {batch_size}: both must be at least 1.")
        if self.size(split) < 1:
            raise InputError(f"{self}: the {split} split is empty. Give it a share of the data.")
        for indices in torch.arange(min(size, self.size(split))).split(batch_size):
            yield self.examples(split, indices, length=length)
