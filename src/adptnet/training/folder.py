"""A run's folder: settings, environment, metrics, checkpoints, snapshots, and the result when it is done."""

import dataclasses
import json
import time
import warnings
from pathlib import Path
from typing import Any, Literal

import torch

from ..errors import CheckpointError
from ..files import write_whole
from ..spec import check_nonnegative, check_size
from ..tasks import Batch
from .failure import Diagnosis
from .keepers import Keeper
from .metrics import Metrics, plain, read_metrics
from .places import Place
from .records import environment, read_json, write_json
from .state import TrainingState, with_spec
from .store import CheckpointWarning, Store, write_folder
from .trackers import Trackers

__all__ = ["Keeping", "RunFolder", "Tracker"]

Tracker = Literal["tensorboard", "wandb"]


@dataclasses.dataclass(frozen=True)
class Keeping:
    """How often a run is saved, and who else is told. None of it changes a number."""

    minutes: float = 5.0
    """Between checkpoints."""
    steps: int | None = None
    """Between checkpoints, if that comes sooner."""
    checkpoints: int = 2
    """How many to keep, the newest."""
    track: tuple[Tracker, ...] = ()
    """Where metrics go besides metrics.jsonl; needs accelerate and the tracker."""

    def __post_init__(self) -> None:
        check_nonnegative(self, minutes=self.minutes)
        check_size(self, checkpoints=self.checkpoints)
        if self.steps is not None:
            check_size(self, steps=self.steps)


class RunFolder(Keeper):
    """Keeps a run in a folder. The first process writes; all of them call."""

    def __init__(self, path: Path, place: Place, keeping: Keeping, settings: dict[str, Any]):
        self.path = path
        self.place = place
        self.keeping = keeping
        self.store = Store(path / "checkpoints", keeping.checkpoints)
        self.how_to_go_on = f". Go on with: adptnet train --output {path} --resume"
        self._settings = settings
        self._saved = time.monotonic()
        self._metrics: Metrics | None = None
        self._trackers = Trackers((), path, {})

    def resume(self, state: TrainingState) -> list[float]:
        found = self.store.newest(put_aside=True) if self.place.first else None
        found = self.place.gathered(found)[0]
        if found is not None:
            state.from_files(found[1])
        step = state.progress.step
        if not self.place.first:
            return []
        past = self.path / "environment.json"
        starts = read_json(past) if past.exists() else []
        now = {"step": step, "processes": self.place.count, "threads": torch.get_num_threads(), **environment()}
        _warn_of_changes([start for start in starts if start["step"] < step], now)
        try:
            write_json(past, [*starts, now])
            self._metrics = Metrics(self.path / "metrics.jsonl", step)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written to ({error.strerror}){self.how_to_go_on}") from None
        self._trackers = Trackers(self.keeping.track, self.path, self._settings)
        return [line["loss"] for line in read_metrics(self.path / "metrics.jsonl") if "loss" in line]

    def log(self, step: int, numbers: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.add(step=step, **numbers)
            self._trackers.log(step, plain(numbers))

    def wants_save(self, step: int) -> bool:
        if not self.place.first:
            return False
        in_time = time.monotonic() - self._saved >= 60 * self.keeping.minutes
        return in_time or (self.keeping.steps is not None and step % self.keeping.steps == 0)

    def save(self, state: TrainingState) -> None:
        """Writes a checkpoint. On a full disk the ones before stay, and a warning says so."""
        files = state.to_files()
        if self._metrics is None:
            return
        self._metrics.flush()
        self._saved = time.monotonic()
        try:
            self.store.save(state.progress.step, files)
        except OSError as error:
            steps = self.store.steps()
            left = f"the last good one is of step {steps[0]}" if steps else "there is none before it"
            warnings.warn(
                f"the checkpoint of step {state.progress.step} could not be written to {self.store.folder} "
                f"({error.strerror}); {left}.",
                CheckpointWarning,
                stacklevel=2,
            )

    def snapshot(self, name: str, state: TrainingState) -> None:
        weights = state.weights()
        if self.place.first:
            self.write(f"snapshots/{name}.safetensors", with_spec(state.model, weights))

    def fail(self, state: TrainingState, batch: Batch, diagnosis: Diagnosis) -> str:
        from safetensors.torch import save

        files = state.to_files()
        if self._metrics is None:
            return ""
        self._metrics.flush()
        tensors = {name: part.contiguous() for name, part in batch._asdict().items() if isinstance(part, torch.Tensor)}
        files |= {"batch.safetensors": save(tensors), "diagnosis.json": json.dumps(plain(diagnosis._asdict())).encode()}
        try:
            write_folder(self.path / "failure", files)
        except OSError as error:
            return f" Batch and weights could not be written to {self.path / 'failure'} ({error.strerror})."
        return f" Batch, weights and random numbers are in {self.path / 'failure'}: adptnet replay {self.path}."

    def write(self, name: str, content: bytes) -> None:
        """Writes one file, all of it or nothing."""
        target = self.path / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, content)
        except OSError as error:
            raise CheckpointError(f"{target} could not be written ({error.strerror}){self.how_to_go_on}") from None

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.flush()
        self._trackers.close()


def _warn_of_changes(starts: list[dict[str, Any]], now: dict[str, Any]) -> None:
    """Says so if the last of the `starts` that led here had another adptnet or torch, or another number of threads."""
    before = starts[-1] if starts else now
    changed = [name for name in ("adptnet", "torch", "threads") if before.get(name, now[name]) != now[name]]
    if changed:
        then, here = (" and ".join(f"{name} {of[name]}" for name in changed) for of in (before, now))
        warnings.warn(
            f"the run was made with {then} up to step {now['step']} and goes on with {here}: its numbers may differ in "
            "the last digits from those of a run without that change.",
            CheckpointWarning,
            stacklevel=2,
        )


def batch_from(content: bytes) -> Batch:
    """The batch that `RunFolder.fail` kept."""
    from safetensors.torch import load

    tensors: dict[str, torch.Tensor] = load(content)
    return Batch(tensors["inputs"], tensors["targets"], tensors.get("lengths"))
