"""The folder of a run: settings, environment, metrics, checkpoints, snapshots and, at the end, the result."""

import dataclasses
import json
import time
import warnings
from pathlib import Path
from typing import Any, Literal

import torch

from adptnet._io.files import write_atomic
from adptnet._io.json_values import to_json_value
from adptnet.errors import CheckpointError
from adptnet.spec import check_nonnegative, check_size, rename_fields

from .._json_files import read_json, write_json
from ..tasks import Batch
from .checkpoint_store import CheckpointStore, CheckpointWarning, explain_damage, write_folder
from .divergence import Diagnosis
from .recorder import Recorder
from .run_environment import describe_start, find_differences, format_differences
from .run_lock import FolderInUse, FolderLock
from .run_metrics import MetricsFile, MetricsState, read_metrics
from .strategy import Strategy
from .trackers import Trackers
from .training_state import TrainingState, serialize_weights

__all__ = ["RunFolder", "SaveOptions", "Tracker", "check_settings", "parse_batch"]

Tracker = Literal["tensorboard", "wandb"]

_RUN = "run.json"  # in a checkpoint: the settings and the state of the metrics file
# Fields that affect rounding errors. The number of processes is not among them: it must be the same to resume at all.
_COMPARED = {"adptnet", "torch", "numpy", "python", "system", "machine", "instructions", "device", "threads"}
_COMPARED |= {"matmul precision", "dtype", "backend"}


@dataclasses.dataclass(frozen=True)
class SaveOptions:
    """Options for saving a run and for tracking its metrics. None of them affects the numbers of the run."""

    minutes: float = 5.0
    """Minutes between checkpoints."""
    steps: int | None = None
    """Steps between checkpoints, in addition to those by time."""
    checkpoints: int = 2
    """Number of checkpoints to keep, the newest ones."""
    track: tuple[Tracker, ...] = ()
    """Trackers that receive the metrics besides metrics.jsonl; they need accelerate and the tracker itself."""

    def __post_init__(self) -> None:
        check_nonnegative(self, minutes=self.minutes)
        check_size(self, checkpoints=self.checkpoints)
        if self.steps is not None:
            check_size(self, steps=self.steps)


class RunFolder(Recorder):
    """Records a run in a folder. Every process calls the methods; the first one writes.

    Args:
        path: The folder.
        strategy: The processes.
        save_options: How often to save.
        settings: Everything that determines the numbers of the run, as JSON. A checkpoint of other settings is not
            resumed.
        lock: The lock on the folder, which is checked before anything is written.
    """

    def __init__(
        self,
        path: Path,
        strategy: Strategy,
        save_options: SaveOptions,
        settings: dict[str, Any],
        lock: FolderLock | None = None,
    ):
        self.path = path
        self.strategy = strategy
        self.save_options = save_options
        self.store = CheckpointStore(path / "checkpoints", save_options.checkpoints)
        self.resume_hint = f". Resume with: adptnet train --output {path} --resume"
        self._settings = settings
        self._lock = lock
        self._last_save = time.monotonic()
        self._metrics: MetricsFile | None = None
        self._trackers = Trackers((), path, {})

    def resume(self, state: TrainingState) -> list[float]:
        found = self.store.read_newest(repair=True) if self.strategy.is_main else None
        found = self.strategy.gather(found)[0]
        metrics_state = MetricsState()
        if found is not None:
            checkpoint = self.store.path(found[0])
            check_settings(checkpoint, found[1], self._settings)
            with explain_damage(checkpoint):
                metrics_state = MetricsState(**_read_run(found[1]).get("metrics", {}))
                metrics_state = metrics_state._replace(waiting=tuple(map(str, metrics_state.waiting)))
                state.load_files(found[1])
        step = state.progress.step
        if not self.strategy.is_main:
            return []
        past = self.path / "environment.json"
        starts = _read_starts(past)
        now = {"step": step, "processes": self.strategy.world_size, **describe_start(self.strategy.device)}
        _warn_of_changes([start for start in starts if start["step"] < step], now)
        try:
            write_json(past, [*starts, now])
            self._metrics = MetricsFile(self.path / "metrics.jsonl", step, state=metrics_state)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written to ({error.strerror}){self.resume_hint}") from None
        self._trackers = Trackers(self.save_options.track, self.path, self._settings)
        return self._past_losses(step)

    def _past_losses(self, step: int) -> list[float]:
        """Return the losses up to `step` and warn of steps that are missing in the metrics."""
        path = self.path / "metrics.jsonl"
        losses = {line["step"]: line["loss"] for line in read_metrics(path) if isinstance(line.get("loss"), float)}
        missing = [number for number in range(1, step + 1) if number not in losses]
        if missing:
            shown = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
            warnings.warn(
                f"{path} has no loss of {len(missing)} of the {step} steps before this start ({shown}). The weights "
                "are not affected.",
                CheckpointWarning,
                stacklevel=2,
            )
        return list(losses.values())

    def _check_lock(self) -> None:
        """Raise before anything is written to a folder that may belong to another run by now."""
        if self._lock is not None:
            try:
                self._lock.check()
            except FolderInUse:
                if self._metrics is not None:
                    self._metrics.close()
                    self._metrics = None
                raise

    def log(self, step: int, numbers: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.add(step=step, **numbers)
            if self._metrics.is_due:
                self._check_lock()
                self._metrics.flush()
            self._trackers.log(step, to_json_value(numbers))

    def is_save_due(self, step: int) -> bool:
        if not self.strategy.is_main:
            return False
        options = self.save_options
        by_time = time.monotonic() - self._last_save >= 60 * options.minutes
        return by_time or (options.steps is not None and step % options.steps == 0)

    def save(self, state: TrainingState) -> None:
        """Save a checkpoint. If the disk is full, keep the older ones and warn.

        Args:
            state: The state of the run. Every process must pass its own.
        """
        files = state.to_files()
        if self._metrics is None:
            return
        self._check_lock()
        self._metrics.flush()
        self._last_save = time.monotonic()
        run = {"settings": self._settings, "metrics": self._metrics.get_state()._asdict()}
        files[_RUN] = json.dumps(run, indent=1).encode()
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

    def save_snapshot(self, name: str, state: TrainingState) -> None:
        weights = state.copy_weights()
        if self.strategy.is_main:
            self.write(f"snapshots/{name}.safetensors", serialize_weights(state.model, weights))

    def save_failure(self, state: TrainingState, batch: Batch, diagnosis: Diagnosis) -> str:
        from safetensors.torch import save

        files = state.to_files()
        if self._metrics is None:
            return ""
        self._check_lock()
        self._metrics.flush()
        tensors = {name: part.contiguous() for name, part in batch._asdict().items() if isinstance(part, torch.Tensor)}
        files |= {
            "batch.safetensors": save(tensors),
            "diagnosis.json": json.dumps(to_json_value(diagnosis._asdict())).encode(),
        }
        try:
            write_folder(self.path / "failure", files)
        except OSError as error:
            return f" Batch and weights could not be written to {self.path / 'failure'} ({error.strerror})."
        return f" Batch, weights and random numbers are in {self.path / 'failure'}: adptnet replay {self.path}."

    def write(self, name: str, content: bytes) -> None:
        """Write one file of the folder atomically.

        Args:
            name: Its path in the folder.
            content: Its content.

        Raises:
            CheckpointError: It could not be written.
        """
        target = self.path / name
        self._check_lock()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, content)
        except OSError as error:
            raise CheckpointError(f"{target} could not be written ({error.strerror}){self.resume_hint}") from None

    def write_metrics(self) -> None:
        """Write pending metrics; raise `CheckpointError` if that fails, since a finished run must have all of them."""
        if self._metrics is not None:
            self._check_lock()
            if not self._metrics.flush():
                raise CheckpointError(f"{self._metrics.path} could not be written{self.resume_hint}")
            try:
                self._metrics.write_sum()
            except OSError as error:
                raise CheckpointError(
                    f"the SHA-256 of {self._metrics.path} could not be written ({error.strerror}){self.resume_hint}"
                ) from None

    def close(self) -> None:
        """Write pending metrics, and close the metrics file and the trackers."""
        if self._metrics is not None:
            self._metrics.flush()
            self._metrics.close()
        self._trackers.close()


def check_settings(checkpoint: Path, files: dict[str, bytes], settings: dict[str, Any]) -> None:
    """Raise `CheckpointError` with the differences if a checkpoint is of a run with other settings.

    Args:
        checkpoint: Its folder, for the message.
        files: Its files, by name.
        settings: The settings of this run, as JSON.
    """
    with explain_damage(checkpoint):
        before = rename_fields(_read_run(files).get("settings", settings))
        changed = list(find_differences(before, settings))
    if changed:
        raise CheckpointError(
            f"{checkpoint} is of another experiment: {format_differences(changed)}. Pass another --output."
        )


def _read_run(files: dict[str, bytes]) -> dict[str, Any]:
    """Return the content of run.json; empty if there is none, as in the first checkpoints of adptnet 0.1.0."""
    run = json.loads(files.get(_RUN, b"{}"))
    return dict(run)


def _read_starts(path: Path) -> list[dict[str, Any]]:
    """Return the content of environment.json: one record for each start of the run."""
    starts = read_json(path) if path.exists() else []
    if not isinstance(starts, list) or not all(
        isinstance(start, dict) and isinstance(start.get("step"), int) for start in starts
    ):
        raise CheckpointError(f"{path} is not as it was written. Delete it and resume with --resume.")
    return starts


def _warn_of_changes(starts: list[dict[str, Any]], now: dict[str, Any]) -> None:
    """Warn of the differences between this start and the last one that led to this step."""
    before = {name: value for name, value in (starts[-1] if starts else {}).items() if name in _COMPARED}
    changed = "".join(f"\n  {name}: {old} → {new}" for name, old, new in find_differences(before, now))
    if changed:
        warnings.warn(
            f"the run is resumed from step {now['step']} in another environment than before, so its numbers may "
            f"differ in the last digits from those of an uninterrupted run:{changed}",
            CheckpointWarning,
            stacklevel=2,
        )


def parse_batch(content: bytes) -> Batch:
    """Return the batch in a file that `RunFolder.save_failure` wrote.

    Args:
        content: The content of batch.safetensors.
    """
    from safetensors.torch import load

    tensors: dict[str, torch.Tensor] = load(content)
    return Batch(tensors["inputs"], tensors["targets"], tensors.get("lengths"))
