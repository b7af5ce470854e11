"""The training loop: seeded, with a record of every number, and the same on one process and on many."""

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

from ..tasks import Batch, Scores, Task
from .carry import Carried
from .config import SolverName, TrainConfig
from .evaluation import evaluate, score_of
from .failure import TrainingDiverged, diagnose
from .keepers import Keeper, Nowhere
from .parts import parts_of
from .places import Alone, Place
from .progress import Screen, Silent
from .signals import Interrupted, Request
from .state import TrainingState, random_states, set_random_states
from .telemetry import telemetry

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
    """The losses of a run, one a step, how long it took, and the step whose weights were kept."""

    losses: list[float]
    seconds: float
    step: int


def train(
    model: nn.Module,
    task: Task,
    config: TrainConfig,
    *,
    on_step: Callable[[int, float], None] | None = None,
    place: Place | None = None,
    keeper: Keeper | None = None,
    screen: Screen | None = None,
    request: Request | None = None,
) -> Record:
    """Trains `model` in place. The same seed gives the same numbers, whatever ran before.

    Args:
        model: Called as `outputs, state = model(inputs, lengths=lengths)`.
        task: Where the batches come from.
        config: The settings.
        on_step: Called with the number of steps done and the loss, after each.
        place: The processes; this one alone if not given.
        keeper: What keeps numbers and checkpoints; nothing does if not given.
        screen: What shows how it goes.
        request: Whether to stop early.
    """
    place = place or Alone(next(model.parameters()).device)
    with torch.random.fork_rng(devices=[place.device] if place.device.type == "cuda" else []):
        torch.manual_seed(_seed(config.seed, place.rank))  # dropout draws from the global generator
        loop = _Loop(model, task, config, place, keeper or Nowhere(), screen or Silent(), request or Request())
        return loop.run(on_step)


class _Loop:
    """The parts of a run while it goes on."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        config: TrainConfig,
        place: Place,
        keeper: Keeper,
        screen: Screen,
        request: Request,
    ):
        self.model, self.task, self.config, self.place = model, task, config, place
        self.keeper, self.screen, self.request = keeper, screen, request
        self.snapshots = config.snapshots(task)
        for module in model.modules():
            if isinstance(module, RecurrentLayer) and config.solver != "sequential":
                module.solver = SOLVERS[config.solver]()
        self.wrapped = place.wrapped(model.to(place.device))
        self.optimiser = config.optimiser.build(param_groups(model, config.learning_rate, config.weight_decay))
        self.parameters = [p for group in self.optimiser.param_groups for p in group["params"]]
        self.peaks = [group["lr"] for group in self.optimiser.param_groups]
        carries = task.training_batch(1, config.batch_size, config.seed).continues
        self.state = TrainingState(model, self.optimiser, place, Carried(model, carries))

    def run(self, on_step: Callable[[int, float], None] | None) -> Record:
        if self.config.evaluate_every:
            score_of(self._validated(size=1), self.task, self.config)  # what cannot be scored is refused now, not later
        losses = self.keeper.resume(self.state)
        begun = time.monotonic() - self.state.progress.seconds
        while self.state.progress.step < self.config.steps and not self.state.progress.stopped:
            progress = self.state.progress
            losses.append(self._step())
            progress.step += 1
            progress.seconds = time.monotonic() - begun
            if self.config.evaluate_every and progress.step % self.config.evaluate_every == 0:
                self._evaluate()
            for name in self.snapshots.get(progress.step, []):
                self.keeper.snapshot(name, self.state)
            if on_step is not None:
                on_step(progress.step, losses[-1])
            self._save_if_due()
        if self.state.best is not None:
            self.state.set_weights(self.state.best)
        progress = self.state.progress
        return Record(losses, progress.seconds, progress.step if self.state.best is None else progress.best_step or 0)

    def _step(self) -> float:
        """One optimiser step; returns the loss over the batch of all processes."""
        config, place, progress = self.config, self.place, self.state.progress
        rate = config.schedule.rate(progress.step, config.steps, progress.plateaus)
        for group, peak in zip(self.optimiser.param_groups, self.peaks, strict=True):
            group["lr"] = peak * rate
        self.model.train()
        before = random_states(place.device)
        batch = self.task.training_batch(progress.step, config.batch_size, config.seed)
        self.optimiser.zero_grad(set_to_none=True)
        own = 0.0
        parts = list(parts_of(batch, place, config.accumulation))
        for number, (part, share) in enumerate(parts, 1):
            moved = place.moved(part)
            entering = self.state.carried.entering(number, moved)
            with place.autocast():
                outputs, states = self.wrapped(moved.inputs, moved.lengths, entering)
                loss = self.task.loss(outputs, moved.targets)
            self.state.carried.leave(number, states)
            own += share * loss.item()
            # gradients of the processes are averaged, not summed
            place.backward(share * place.count * loss, self.wrapped, last=number == len(parts))
        total = place.summed([own])[0]
        if not math.isfinite(total):
            self._fail(batch, f"the loss was {total}", before)
        norm = place.stepped(self.optimiser, self.parameters, config.clip)
        if not math.isfinite(norm):
            self._fail(batch, f"the norm of the gradient was {norm}", before)
        self.keeper.log(progress.step + 1, {"loss": total, "rate": config.learning_rate * rate, "norm": norm})
        self.screen.step(progress.step + 1, total, batch.inputs.shape[0] * batch.inputs.shape[1])
        return total

    def _evaluate(self) -> None:
        config, progress = self.config, self.state.progress
        scores = self._validated(config.evaluation_size)
        score, higher = score_of(scores, self.task, config)
        if progress.judge(score, higher, config) and config.select == "best":
            self.state.best = self.state.weights()
        self.screen.score(config.select_by or self.task.metric, score)
        numbers: dict[str, Any] = {"validation": _single(scores)}
        if self.place.complete:
            exponents = config.exponents_every is not None and progress.evaluations % config.exponents_every == 0
            numbers["layers"] = telemetry(self.model, self.task, exponents=exponents) if self.place.first else {}
        self.keeper.log(progress.step, numbers)

    def _validated(self, size: int) -> dict[int, Scores]:
        """Scores on `size` sequences of validation data."""
        return evaluate(
            self.model,
            self.task,
            self.config.lengths or (None,),
            split="validation",
            size=size,
            batch_size=self.config.evaluation_batch,
            place=self.place,
        )

    def _save_if_due(self) -> None:
        """Saves where a process wants to, or was asked to stop: all of them do the same at the same step."""
        progress = self.state.progress
        ended = progress.stopped or progress.step == self.config.steps
        wishes = [float(self.keeper.wants_save(progress.step)), float(self.request.signum or 0)]
        wanted, asked = self.place.summed(wishes)
        if wanted or asked or ended:
            self.keeper.save(self.state)
        if asked and not ended:
            signum = max(self.place.gathered(self.request.signum or 0))
            done = f"stopped after step {progress.step} of {self.config.steps}"
            raise Interrupted(f"{done}{self.keeper.how_to_go_on}", signum)

    def _fail(self, batch: Batch, what: str, before: dict[str, Tensor]) -> NoReturn:
        set_random_states(before)
        step, config = self.state.progress.step + 1, self.config
        diagnosis = diagnose(self.model, self.task, self.place.moved(batch))
        set_random_states(before)
        where = self.keeper.fail(self.state, batch, diagnosis)
        raise TrainingDiverged(
            f"{what} at step {step} of {config.steps}: {diagnosis}.{where} Lower learning_rate (now "
            f"{config.learning_rate}) or clip (now {config.clip})."
        )


def _single(scores: dict[int, Scores]) -> dict[int, Scores]:
    """The scores that are one number."""
    return {length: {n: v for n, v in each.items() if isinstance(v, float)} for length, each in scores.items()}


def _seed(seed: int, rank: int) -> int:
    """The first process draws what a single one would."""
    return seed if rank == 0 else int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0]) >> 1
