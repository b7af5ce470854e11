"""The training loop: seeded, with every number recorded, the same for one process and for many."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from adptnet import solvers
from adptnet.nn.layer import RecurrentLayer
from adptnet.optim import param_groups

from .._runtime import Interrupted, StopRequest
from ..tasks import Batch, Scores, Task
from .config import SolverName, TrainConfig
from .divergence import TrainingDiverged, diagnose
from .evaluation import evaluate, selection_score
from .microbatches import CarriedStates, split_batch
from .progress_display import NoDisplay, ProgressDisplay
from .recorder import NullRecorder, Recorder
from .strategy import SingleProcess, Strategy
from .telemetry import collect_telemetry
from .training_state import TrainingState, get_random_states, set_random_states

__all__ = ["Record", "train"]

SOLVERS: dict[SolverName, Callable[[], solvers.Solver]] = {
    "sequential": solvers.Sequential,
    "auto": solvers.Auto,
    "deer": solvers.DEER,
    "quasi-deer": solvers.QuasiDEER,
    "forward-deer": solvers.ForwardDEER,
    "conv-deer": solvers.ConvDEER,
    "koopman-deer": solvers.KoopmanDEER,
}


class Record(NamedTuple):
    """Result of a training run."""

    losses: list[float]  # one per step
    seconds: float  # that the steps took
    step: int  # the step whose weights were selected


def train(
    model: nn.Module,
    task: Task,
    config: TrainConfig,
    *,
    on_step: Callable[[int, float], None] | None = None,
    strategy: Strategy | None = None,
    recorder: Recorder | None = None,
    display: ProgressDisplay | None = None,
    stop_request: StopRequest | None = None,
) -> Record:
    """Train `model` in place. The same seed gives the same numbers, whatever ran before in this process.

    Args:
        model: Called as `outputs, state = model(inputs, lengths=lengths)`.
        task: The source of the batches, the loss and the scores.
        config: The settings.
        on_step: Called after each step with the number of steps done and the loss.
        strategy: The processes; this one alone by default.
        recorder: Receives numbers and checkpoints; they are discarded by default.
        display: Shows the progress; nothing is shown by default.
        stop_request: Checked after each step; the run then saves and stops.

    Returns:
        The losses, the time, and the step whose weights `model` has at the end.

    Raises:
        TrainingDiverged: The loss or the gradient norm is not finite.
        Interrupted: The run was asked to stop.
    """
    strategy = strategy or SingleProcess(next(model.parameters()).device, config.precision)
    with torch.random.fork_rng(devices=[strategy.device] if strategy.device.type == "cuda" else []):
        torch.manual_seed(_derive_seed(config.seed, strategy.rank))  # dropout draws from the global generator
        loop = _Loop(
            model,
            task,
            config,
            strategy,
            recorder or NullRecorder(),
            display or NoDisplay(),
            stop_request or StopRequest(),
        )
        return loop.run(on_step)


class _Loop:
    """The objects that take part in a run."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        config: TrainConfig,
        strategy: Strategy,
        recorder: Recorder,
        display: ProgressDisplay,
        stop_request: StopRequest,
    ):
        self.model, self.task, self.config, self.strategy = model, task, config, strategy
        self.recorder, self.display, self.stop_request = recorder, display, stop_request
        self.snapshots = config.plan_snapshots(task)
        for module in model.modules():
            if isinstance(module, RecurrentLayer) and config.solver != "sequential":
                module.solver = SOLVERS[config.solver]()
        self.wrapped = strategy.wrap(model.to(strategy.device))
        self.optimizer = config.optimizer.build(
            param_groups(model, config.learning_rate, config.weight_decay, decay_directions=config.decay_directions)
        )
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        continues = task.training_batch(1, config.batch_size, config.seed).continues
        self.state = TrainingState(model, self.optimizer, strategy, CarriedStates(model, continues))

    def run(self, on_step: Callable[[int, float], None] | None) -> Record:
        if self.config.evaluate_every:  # an impossible evaluation raises before the first step
            selection_score(self._evaluate_validation(size=1), self.task, self.config)
        losses = self.recorder.resume(self.state)
        start = time.monotonic() - self.state.progress.seconds
        while self.state.progress.step < self.config.steps and not self.state.progress.stopped:
            progress = self.state.progress
            losses.append(self._step())
            progress.step += 1
            progress.seconds = time.monotonic() - start
            if self.config.evaluate_every and progress.step % self.config.evaluate_every == 0:
                self._evaluate()
            for name in self.snapshots.get(progress.step, []):
                self.recorder.save_snapshot(name, self.state)
            if on_step is not None:
                on_step(progress.step, losses[-1])
            self._save_if_due()
        progress = self.state.progress
        if self.state.best_weights is None:
            return Record(losses, progress.seconds, progress.step)
        self.state.load_weights(self.state.best_weights)
        return Record(losses, progress.seconds, progress.best_step or 0)

    def _step(self) -> float:
        """Take one optimizer step and return the loss over the batch of all processes."""
        config, strategy, progress = self.config, self.strategy, self.state.progress
        rate = config.schedule.rate(progress.step, config.steps, progress.plateaus)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * rate
        self.model.train()
        before = get_random_states(strategy.device)
        batch = self.task.training_batch(progress.step, config.batch_size, config.seed)
        self.optimizer.zero_grad(set_to_none=True)
        own = 0.0
        parts = list(split_batch(batch, strategy, config.accumulation))
        for number, (part, weight) in enumerate(parts, 1):
            part = strategy.move_to_device(part)
            initial = self.state.carried.initial_states(number, part)
            with strategy.autocast():
                outputs, states = self.wrapped(part.inputs, part.lengths, initial)
                loss = self.task.loss(outputs, part.targets)
            self.state.carried.keep(number, states)
            own += weight * loss.item()
            # gradients are averaged over the processes, not summed
            strategy.backward(weight * strategy.world_size * loss, self.wrapped, last=number == len(parts))
        total = strategy.sum([own])[0]
        if not math.isfinite(total):
            self._fail(batch, f"the loss was {total}", before)
        norm = strategy.clip_and_step(self.optimizer, self.parameters, config.clip)
        if not math.isfinite(norm):
            self._fail(batch, f"the norm of the gradient was {norm}", before)
        self.recorder.log(progress.step + 1, {"loss": total, "rate": config.learning_rate * rate, "norm": norm})
        self.display.show_step(progress.step + 1, total, batch.inputs.shape[0] * batch.inputs.shape[1])
        return total

    def _evaluate(self) -> None:
        config, progress = self.config, self.state.progress
        scores = self._evaluate_validation(config.evaluation_size)
        score, higher_is_better = selection_score(scores, self.task, config)
        if progress.record_score(score, higher_is_better, config) and config.select == "best":
            self.state.best_weights = self.state.copy_weights()
        self.display.show_score(config.select_by or self.task.metric, score)
        numbers: dict[str, Any] = {"validation": _select_scalars(scores)}
        if self.strategy.has_full_weights:
            exponents = config.exponents_every is not None and progress.evaluations % config.exponents_every == 0
            is_main = self.strategy.is_main
            numbers["layers"] = collect_telemetry(self.model, self.task, exponents=exponents) if is_main else {}
        self.recorder.log(progress.step, numbers)

    def _evaluate_validation(self, size: int) -> dict[int, Scores]:
        """Return the scores on `size` sequences of validation data."""
        return evaluate(
            self.model,
            self.task,
            self.config.lengths or (None,),
            split="validation",
            size=size,
            batch_size=self.config.evaluation_batch,
            strategy=self.strategy,
        )

    def _save_if_due(self) -> None:
        """Save if a checkpoint is due in any process or any was asked to stop: all must save at the same step."""
        progress = self.state.progress
        ended = progress.stopped or progress.step == self.config.steps
        wishes = [float(self.recorder.is_save_due(progress.step)), float(self.stop_request.signum or 0)]
        due, stop = self.strategy.sum(wishes)
        if due or stop or ended:
            self.recorder.save(self.state)
        if stop and not ended:
            signum = max(self.strategy.gather(self.stop_request.signum or 0))
            done = f"stopped after step {progress.step} of {self.config.steps}"
            raise Interrupted(f"{done}{self.recorder.resume_hint}", signum)

    def _fail(self, batch: Batch, cause: str, before: dict[str, Tensor]) -> NoReturn:
        """Diagnose a step that failed, save what is needed to repeat it, and raise."""
        set_random_states(before)
        step, config = self.state.progress.step + 1, self.config
        diagnosis = diagnose(self.model, self.task, self.strategy.move_to_device(batch))
        set_random_states(before)
        where = self.recorder.save_failure(self.state, batch, diagnosis)
        raise TrainingDiverged(
            f"{cause} at step {step} of {config.steps}: {diagnosis}.{where} Lower learning_rate (now "
            f"{config.learning_rate}) or clip (now {config.clip})."
        )


def _select_scalars(scores: dict[int, Scores]) -> dict[int, Scores]:
    """Return the scores that are single numbers."""
    return {length: {n: v for n, v in each.items() if isinstance(v, float)} for length, each in scores.items()}


def _derive_seed(seed: int, rank: int) -> int:
    """Return the seed of a process. The first one draws what a single process would."""
    return seed if rank == 0 else int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0]) >> 1
