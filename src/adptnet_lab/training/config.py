"""The settings of a training run: all that changes its numbers."""

from typing import Literal, get_args

from adptnet.errors import SpecError
from adptnet.spec import Spec, check_kind, check_nonnegative, check_positive, check_seed, check_size, nearest, spec

from ..tasks import Task
from .optim import AdamW, OptimiserSpec
from .schedules import Linear, ReduceOnPlateau, Schedule

__all__ = ["Precision", "SolverName", "TrainConfig"]

Precision = Literal["float32", "bf16", "fp16"]
SolverName = Literal["sequential", "auto", "deer", "quasi-deer", "forward-deer", "conv-deer", "koopman-deer"]


@spec
class TrainConfig(Spec):
    """How to train and how to choose among the weights met on the way; defaults for a laptop.

    Attributes:
        steps: Optimiser steps.
        batch_size: Sequences a step, over all processes.
        learning_rate: The peak of the schedule.
        weight_decay: For all but the parameters marked otherwise.
        optimiser: Adam, AdamW or RMSprop, with their settings.
        schedule: Constant, Linear, Cosine or ReduceOnPlateau, with their warm-up.
        clip: Largest gradient norm; None for no clipping.
        accumulation: Parts into which each process cuts its share of a batch, one after the other, to save memory.
        precision: "bf16" or "fp16" for autocast around float32 weights. The recurrence stays in float32.
        solver: How layers find their states.
        seed: Of weights, data and dropout.
        evaluate_every: Steps from one evaluation on validation data to the next; None for none before the end.
        lengths: Lengths to evaluate at, the one to choose by first; the task's own if none are given.
        evaluation_size: Sequences of an evaluation at each length.
        evaluation_batch: Sequences of an evaluation at a time.
        select: Whether the weights of the best evaluation are kept, or the last ones.
        select_by: "loss", or a score of the task; the task's own metric if not given.
        stop_at: End as soon as the score chosen by is this good; None for never.
        patience: End after so many evaluations without a better one; None for never.
        exponents_every: Evaluations from one record of Lyapunov exponents to the next; None for none.
        snapshot_steps: Steps after which the weights are kept for good.
        snapshot_epochs: Likewise, in passes through the training data.
    """

    steps: int = 1500
    batch_size: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 0.0
    optimiser: OptimiserSpec = AdamW()
    schedule: Schedule = Linear()
    clip: float | None = 0.25
    accumulation: int = 1
    precision: Precision = "float32"
    solver: SolverName = "sequential"
    seed: int = 0
    evaluate_every: int | None = None
    lengths: tuple[int, ...] = ()
    evaluation_size: int = 1024
    evaluation_batch: int = 512
    select: Literal["best", "last"] = "best"
    select_by: str | None = None
    stop_at: float | None = None
    patience: int | None = None
    exponents_every: int | None = None
    snapshot_steps: tuple[int, ...] = ()
    snapshot_epochs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_size(self, steps=self.steps, batch_size=self.batch_size, accumulation=self.accumulation)
        check_size(self, evaluation_size=self.evaluation_size, evaluation_batch=self.evaluation_batch)
        check_positive(self, learning_rate=self.learning_rate)
        check_nonnegative(self, weight_decay=self.weight_decay)
        check_seed(self, seed=self.seed)
        check_kind(self, OptimiserSpec, "training.AdamW()", optimiser=self.optimiser)
        check_kind(self, Schedule, "training.Linear()", schedule=self.schedule)
        if self.clip is not None:
            check_positive(self, clip=self.clip)
        for name in ("evaluate_every", "patience", "exponents_every"):
            if getattr(self, name) is not None:
                check_size(self, **{name: getattr(self, name)})
        for name in ("lengths", "snapshot_steps", "snapshot_epochs"):
            for value in getattr(self, name):
                check_size(self, **{name: value})
        choices = {"precision": Precision, "solver": SolverName, "select": Literal["best", "last"]}
        for name, kind in choices.items():
            if getattr(self, name) not in get_args(kind):
                raise SpecError(
                    f"TrainConfig({name}={getattr(self, name)!r}) is unknown."
                    f"{nearest(str(getattr(self, name)), get_args(kind))}"
                )
        waiting = [name for name in ("stop_at", "patience", "exponents_every") if getattr(self, name) is not None]
        if isinstance(self.schedule, ReduceOnPlateau):
            waiting.append("schedule")
        if waiting and self.evaluate_every is None:
            given = getattr(self, waiting[0])
            raise SpecError(
                f"TrainConfig({waiting[0]}={given!r}) waits for evaluations. Pass evaluate_every=100 with it."
            )

    def snapshots(self, task: Task) -> dict[int, list[str]]:
        """The steps after which weights are kept, with the names they are kept under."""
        names = {step: [f"step-{step}"] for step in self.snapshot_steps}
        size = task.training_size
        if self.snapshot_epochs and size is None:
            raise SpecError(
                f"TrainConfig(snapshot_epochs={self.snapshot_epochs}): {type(task).__name__} draws every sequence "
                "afresh and has no epochs. Pass snapshot_steps=."
            )
        for epoch in self.snapshot_epochs:
            assert size is not None
            names.setdefault(-(-epoch * size // self.batch_size), []).append(f"epoch-{epoch}")
        late = max(names, default=0)
        if late > self.steps:
            raise SpecError(
                f"TrainConfig(steps={self.steps}): the snapshot {names[late][0]} is of step {late}. "
                f"Pass steps={late}, or drop it."
            )
        return names
