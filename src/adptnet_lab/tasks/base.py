"""What a task is: batches, a loss and a score."""

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

__all__ = ["IGNORED", "Batch", "FiniteTask", "Scores", "Split", "Task", "generator_for"]

IGNORED = -100  # a target that neither loss nor score counts

Scores = dict[str, float | list[float]]
Split = Literal["train", "validation", "test"]


class Batch(NamedTuple):
    """What goes in and what should come out."""

    inputs: Tensor  # (batch, time) int64 tokens, or (batch, time, input_size) numbers
    targets: (
        Tensor  # (batch, time) int64, IGNORED outside the loss window; (batch,) for one label a sequence; or numbers
    )
    lengths: Tensor | None = None  # true lengths of right-padded sequences
    continues: bool = False  # whether each row goes on where that of the batch before ended: the state may be passed on


def generator_for(*numbers: int) -> torch.Generator:
    """A generator that depends on all of `numbers`, so that nearby seeds and steps share no draws."""
    seed = int(np.random.SeedSequence([*numbers]).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(seed)


class Task(Spec, abc.ABC):
    """A source of sequences, with its own loss window, metric and chance level.

    What a model for it looks like: `vocabulary` or `input_size`, `output_size` and `head`, as `ModelSpec` takes them.
    """

    metric: ClassVar[str] = "accuracy"  # the score that the paper reports, and by which weights are chosen
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"loss"})  # of all other scores more is better
    head: ClassVar[Literal["token", "last", "mean"]] = "token"

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens in; None if the input is numbers."""
        return None

    @property
    def input_size(self) -> int | None:
        """Numbers in at each step; None if the input is tokens."""
        return None

    @property
    def output_size(self) -> int:
        """Numbers out at each position, or for each sequence."""
        assert self.vocabulary is not None, "a task whose input is numbers says its output_size"
        return self.vocabulary

    @property
    def step_seconds(self) -> float | None:
        """Seconds from one step to the next; None if steps are not in time."""
        return None

    @property
    @abc.abstractmethod
    def chance(self) -> float:
        """The score of a blind guess."""

    @property
    def training_size(self) -> int | None:
        """Number of sequences to train on; None if every one is fresh."""
        return None

    def model(self, block: BlockSpec | SwiGLUBlockSpec, depth: int = 1) -> ModuleSpec:
        """A model for this task: `block`, `depth` times, between the encoder and the head that fit."""
        return ModelSpec(block, depth, self.vocabulary, self.input_size, self.output_size, self.head)

    def spiking_model(self, network: SpikingModelSpec) -> SpikingModelSpec:
        """`network` with the channels and classes of this task."""
        if self.input_size is None or self.head == "token":
            raise IncompatibleError(
                f"{type(self).__name__}: a spiking network takes numbers and gives one answer for each sequence. "
                "Pass a layer for its blocks instead, e.g. --model.layer lif."
            )
        return dataclasses.replace(network, input_size=self.input_size, output_size=self.output_size)

    @abc.abstractmethod
    def batch(self, size: int, generator: torch.Generator, *, length: int | None = None) -> Batch:
        """`size` sequences of `length` steps, drawn for training; of the task's own length if not given."""

    def training_batch(self, step: int, size: int, seed: int) -> Batch:
        """The batch of step `step`, counted from 0. It depends on nothing else, so a run can go on from any step."""
        return self.batch(size, generator_for(seed, step))

    def evaluation(
        self, split: Split, size: int, batch_size: int, *, seed: int = 1, length: int | None = None
    ) -> Iterator[Batch]:
        """`size` sequences to be scored on, in batches. The same seed draws the same ones."""
        if size < 1 or batch_size < 1:
            raise InputError(f"an evaluation on {size} sequences in batches of {batch_size}: both must be at least 1.")
        for number, start in enumerate(range(0, size, batch_size)):
            generator = generator_for(seed, ("train", "validation", "test").index(split) + 1, number)
            yield self.batch(min(batch_size, size - start), generator, length=length)

    @abc.abstractmethod
    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        """Scores of a model's outputs on one batch, with `metric` among them."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over the loss window."""
        return functional.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED)


class FiniteTask(Task):
    """A task whose sequences are a given set: epochs in an order of their own, each sequence once an epoch."""

    @abc.abstractmethod
    def size(self, split: Split) -> int:
        """Number of sequences in `split`."""

    @abc.abstractmethod
    def examples(self, split: Split, indices: Tensor, *, length: int | None = None) -> Batch:
        """The sequences at `indices`, (batch,) int64 from 0 to `size(split)` - 1."""

    @property
    def training_size(self) -> int:
        return self.size("train")

    def batch(self, size: int, generator: torch.Generator, *, length: int | None = None) -> Batch:
        indices = torch.randint(self.training_size, (size,), generator=generator)
        return self.examples("train", indices, length=length)

    def training_batch(self, step: int, size: int, seed: int) -> Batch:
        return self.examples("train", self.training_indices(step, size, seed))

    def training_indices(self, step: int, size: int, seed: int) -> Tensor:
        """The next `size` sequences of the shuffled epochs laid end to end."""
        total = self.training_size
        if size > total:
            raise InputError(f"a batch of {size} is larger than the {total} training sequences. Lower batch_size.")
        first, last = step * size, (step + 1) * size - 1
        orders = [
            torch.randperm(total, generator=generator_for(seed, e)) for e in range(first // total, last // total + 1)
        ]
        start = first - first // total * total
        return torch.cat(orders)[start : start + size]

    def evaluation(
        self, split: Split, size: int, batch_size: int, *, seed: int = 1, length: int | None = None
    ) -> Iterator[Batch]:
        """The first `size` sequences of `split`, or as many as there are."""
        if size < 1 or batch_size < 1:
            raise InputError(f"an evaluation on {size} sequences in batches of {batch_size}: both must be at least 1.")
        if self.size(split) < 1:
            raise InputError(f"{self}: there is nothing to evaluate on, its {split} part is empty. Give it a share.")
        for indices in torch.arange(min(size, self.size(split))).split(batch_size):
            yield self.examples(split, indices, length=length)
