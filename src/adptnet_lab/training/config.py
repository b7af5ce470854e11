"""`TrainConfig`: every setting of a training run that affects its numbers."""

from collections.abc import Mapping
from typing import ClassVar, Literal, get_args

from adptnet.errors import SpecError
from adptnet.spec import Spec, check_kind, check_nonnegative, check_positive, check_seed, check_size, spec, suggest_name

from ..tasks import Task
from .optimizers import AdamW, OptimizerSpec
from .schedules import Linear, ReduceOnPlateau, Schedule

__all__ = ["Precision", "SolverName", "TrainConfig"]

Precision = Literal["float32", "bf16", "bf16-all", "fp16"]
SolverName = Literal["sequential", "auto", "deer", "quasi-deer", "forward-deer", "conv-deer", "koopman-deer"]


@spec
class TrainConfig(Spec):
    """Settings of a training run, of its evaluations, and of the choice of the weights to keep.

    The defaults of optimizer, learning rate, weight decay, clipping and schedule are the paper's settings for word
    problems (appendix:s5_training_config), on which its reproduction relies. The defaults of `steps` and `batch_size`
    are smaller than the paper's, so that a run takes minutes on a CPU.

    Attributes:
        steps: Optimizer steps.
        batch_size: Sequences per step, over all processes.
        learning_rate: Peak of the schedule.
        weight_decay: Weight decay of all parameters that are not exempt from it.
        decay_directions: Whether weight decay applies to K and V, of which only the direction counts; see
            `adptnet.optim.param_groups`.
        optimizer: Adam, AdamW or RMSprop, with their settings.
        schedule: Constant, Linear, Cosine or ReduceOnPlateau, with their warm-up.
        clip: Gradients with a larger norm are scaled down to this norm; None for no clipping.
        accumulation: Micro-batches into which each process splits its share of a batch, to save memory.
        precision: "bf16" or "fp16" for autocast around float32 weights. The recurrence stays in float32. "bf16-all" is
            bf16 with the products of the recurrence, too (K, V, B and read-out), for CPUs with bfloat16 instructions:
            see `adptnet.ops.products`.
        solver: Solver of the recurrent layers.
        seed: Seed of weights, data and dropout.
        evaluate_every: Steps between evaluations on validation data; None to evaluate only at the end.
        lengths: Sequence lengths to evaluate at. The length of the task if none are given.
        evaluation_size: Number of sequences per evaluation and length.
        evaluation_batch: Batch size of an evaluation.
        select: "best" to keep the weights of the best evaluation, "last" for those after the last step.
        select_by: Score by which weights are selected: "loss" or a score of the task; the task's own metric if not
            given.
        select_at: "first" to select by the score at the first of `lengths`, "mean" by its mean over all of them.
        stop_at: Stop as soon as the score of `select_by` is this good; None for never.
        patience: Stop after this many evaluations without improvement; None for never.
        exponents_every: Evaluations between records of Lyapunov exponents; None for none.
        snapshot_steps: Steps after which the weights are saved permanently.
        snapshot_epochs: Passes through the training data after which the weights are saved permanently.
    """

    renamed_fields: ClassVar[Mapping[str, str]] = {"optimiser": "optimizer"}

    steps: int = 1500
    batch_size: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 0.0
    optimizer: OptimizerSpec = AdamW()
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
    select_at: Literal["first", "mean"] = "first"
    stop_at: float | None = None
    patience: int | None = None
    exponents_every: int | None = None
    snapshot_steps: tuple[int, ...] = ()
    snapshot_epochs: tuple[int, ...] = ()
    decay_directions: bool = True

    def __post_init__(self) -> None:
        check_size(self, steps=self.steps, batch_size=self.batch_size, accumulation=self.accumulation)
        check_size(self, evaluation_size=self.evaluation_size, evaluation_batch=self.evaluation_batch)
        check_positive(self, learning_rate=self.learning_rate)
        check_nonnegative(self, weight_decay=self.weight_decay)
        check_seed(self, seed=self.seed)
        check_kind(self, OptimizerSpec, "training.AdamW()", optimizer=self.optimizer)
        check_kind(self, Schedule, "training.Linear()", schedule=self.schedule)
        if self.clip is not None:
            check_positive(self, clip=self.clip)
        for name in ("evaluate_every", "patience", "exponents_every"):
            if getattr(self, name) is not None:
                check_size(self, **{name: getattr(self, name)})
        for name in ("lengths", "snapshot_steps", "snapshot_epochs"):
            for value in getattr(self, name):
                check_size(self, **{name: value})
        choices = {
            "precision": Precision,
            "solver": SolverName,
            "select": Literal["best", "last"],
            "select_at": Literal["first", "mean"],
        }
        for name, kind in choices.items():
            if getattr(self, name) not in get_args(kind):
                raise SpecError(
                    f"TrainConfig({name}={getattr(self, name)!r}) is unknown."
                    f"{suggest_name(str(getattr(self, name)), get_args(kind))}"
                )
        waiting = [name for name in ("stop_at", "patience", "exponents_every") if getattr(self, name) is not None]
        if isinstance(self.schedule, ReduceOnPlateau):
            waiting.append("schedule")
        if waiting and self.evaluate_every is None:
            given = getattr(self, waiting[0])
            raise SpecError(
                f"TrainConfig({waiting[0]}={given!r}) waits for evaluations. Pass evaluate_every=100 with it."
            )

    def plan_snapshots(self, task: Task) -> dict[int, list[str]]:
        """Return the names of the snapshots to save, by the step after which they are saved.

        Args:
            task: Determines the number of steps per epoch.

        Raises:
            SpecError: The task has no epochs, or a snapshot comes after the last step.
        """
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
