"""A run's folder: settings, environment, metrics, checkpoints, snapshots, and the result when it is done."""

import dataclasses
import json
import time
import warnings
from pathlib import Path
from typing import Any, Literal

import torch

from adptnet._io.files import write_whole
from adptnet.errors import CheckpointError
from adptnet.spec import check_nonnegative, check_size

from ..tasks import Batch
from .failure import Diagnosis
from .keepers import Keeper
from .lock import FolderInUse, Hold
from .metrics import Kept, Metrics, plain, read_metrics
from .places import Place
from .records import differences, list_changes, read_json, start_record, write_json
from .state import TrainingState, with_spec
from .store import CheckpointWarning, Store, explain_damage, write_folder
from .trackers import Trackers

__all__ = ["Keeping", "RunFolder", "Tracker", "check_settings"]

Tracker = Literal["tensorboard", "wandb"]

_RUN = "run.json"  # of a checkpoint: the settings, and where the metrics were
# What the last digits depend on. The number of processes is not among them: random numbers depend on it.
_COMPARED = {"adptnet", "torch", "numpy", "python", "system", "machine", "instructions", "device", "threads"}
_COMPARED |= {"matmul precision", "dtype", "backend"}


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
    """Keeps a run in a folder. The first process writes; all of them call.

    Args:
        path: The folder.
        place: The processes.
        keeping: How often to save.
        settings: All that decides the numbers of the run, as JSON. A checkpoint of other settings is not resumed.
        hold: The lock on the folder, to be checked before anything is written.
    """

    def __init__(self, path: Path, place: Place, keeping: Keeping, settings: dict[str, Any], hold: Hold | None = None):
        self.path = path
        self.place = place
        self.keeping = keeping
        self.store = Store(path / "checkpoints", keeping.checkpoints)
        self.how_to_go_on = f". Go on with: adptnet train --output {path} --resume"
        self._settings = settings
        self._hold = hold
        self._saved = time.monotonic()
        self._metrics: Metrics | None = None
        self._trackers = Trackers((), path, {})

    def resume(self, state: TrainingState) -> list[float]:
        found = self.store.newest(put_aside=True) if self.place.first else None
        found = self.place.gathered(found)[0]
        kept = Kept()
        if found is not None:
            checkpoint = self.store.path(found[0])
            check_settings(checkpoint, found[1], self._settings)
            with explain_damage(checkpoint):
                kept = Kept(**_read_run(found[1]).get("metrics", {}))
                kept = kept._replace(waiting=tuple(map(str, kept.waiting)))
                state.from_files(found[1])
        step = state.progress.step
        if not self.place.first:
            return []
        past = self.path / "environment.json"
        starts = _read_starts(past)
        now = {"step": step, "processes": self.place.count, **start_record(self.place.device)}
        _warn_of_changes([start for start in starts if start["step"] < step], now)
        try:
            write_json(past, [*starts, now])
            self._metrics = Metrics(self.path / "metrics.jsonl", step, kept=kept)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written to ({error.strerror}){self.how_to_go_on}") from None
        self._trackers = Trackers(self.keeping.track, self.path, self._settings)
        return self._past_losses(step)

    def _past_losses(self, step: int) -> list[float]:
        """Return the losses up to `step`; warn of steps that the metrics lack."""
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

    def _check_hold(self) -> None:
        """Stop before anything is written into a folder that may be another run's by now."""
        if self._hold is not None:
            try:
                self._hold.check()
            except FolderInUse:
                if self._metrics is not None:
                    self._metrics.close()
                    self._metrics = None
                raise

    def log(self, step: int, numbers: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.add(step=step, **numbers)
            if self._metrics.due:
                self._check_hold()
                self._metrics.flush()
            self._trackers.log(step, plain(numbers))

    def wants_save(self, step: int) -> bool:
        if not self.place.first:
            return False
        in_time = time.monotonic() - self._saved >= 60 * self.keeping.minutes
        return in_time or (self.keeping.steps is not None and step % self.keeping.steps == 0)

    def save(self, state: TrainingState) -> None:
        """Write a checkpoint. On a full disk the ones before stay, and a warning says so."""
        files = state.to_files()
        if self._metrics is None:
            return
        self._check_hold()
        self._metrics.flush()
        self._saved = time.monotonic()
        run = {"settings": self._settings, "metrics": self._metrics.to_keep()._asdict()}
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

    def snapshot(self, name: str, state: TrainingState) -> None:
        weights = state.weights()
        if self.place.first:
            self.write(f"snapshots/{name}.safetensors", with_spec(state.model, weights))

    def fail(self, state: TrainingState, batch: Batch, diagnosis: Diagnosis) -> str:
        from safetensors.torch import save

        files = state.to_files()
        if self._metrics is None:
            return ""
        self._check_hold()
        self._metrics.flush()
        tensors = {name: part.contiguous() for name, part in batch._asdict().items() if isinstance(part, torch.Tensor)}
        files |= {"batch.safetensors": save(tensors), "diagnosis.json": json.dumps(plain(diagnosis._asdict())).encode()}
        try:
            write_folder(self.path / "failure", files)
        except OSError as error:
            return f" Batch and weights could not be written to {self.path / 'failure'} ({error.strerror})."
        return f" Batch, weights and random numbers are in {self.path / 'failure'}: adptnet replay {self.path}."

    def write(self, name: str, content: bytes) -> None:
        """Write one file, all of it or nothing."""
        target = self.path / name
        self._check_hold()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, content)
        except OSError as error:
            raise CheckpointError(f"{target} could not be written ({error.strerror}){self.how_to_go_on}") from None

    def write_metrics(self) -> None:
        """Write the metrics that are left; raise if that fails: a run that has ended has all of them."""
        if self._metrics is not None:
            self._check_hold()
            if not self._metrics.flush():
                raise CheckpointError(f"{self._metrics.path} could not be written{self.how_to_go_on}")

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.flush()
            self._metrics.close()
        self._trackers.close()


def check_settings(checkpoint: Path, files: dict[str, bytes], settings: dict[str, Any]) -> None:
    """Raise a `CheckpointError` that lists the differences if `checkpoint` is of a run with other settings."""
    with explain_damage(checkpoint):
        changed = list(differences(_read_run(files).get("settings", settings), settings))
    if changed:
        raise CheckpointError(f"{checkpoint} is of another experiment: {list_changes(changed)}. Pass another --output.")


def _read_run(files: dict[str, bytes]) -> dict[str, Any]:
    """Return the settings and what is kept of the metrics; neither was kept by adptnet 0.1.0."""
    run = json.loads(files.get(_RUN, b"{}"))
    return dict(run)


def _read_starts(path: Path) -> list[dict[str, Any]]:
    """Return the starts of a run that environment.json holds."""
    starts = read_json(path) if path.exists() else []
    if not isinstance(starts, list) or not all(
        isinstance(start, dict) and isinstance(start.get("step"), int) for start in starts
    ):
        raise CheckpointError(f"{path} is not as it was written. Delete it and resume with --resume.")
    return starts


def _warn_of_changes(starts: list[dict[str, Any]], now: dict[str, Any]) -> None:
    """Warn of what differs between the last of the `starts` that led here and this one."""
    before = {name: value for name, value in (starts[-1] if starts else {}).items() if name in _COMPARED}
    changed = "".join(f"\n  {name}: {old} → {new}" for name, old, new in differences(before, now))
    if changed:
        warnings.warn(
            f"the run is resumed from step {now['step']} in another environment than before, so its numbers may "
            f"differ in the last digits from those of an uninterrupted run:{changed}",
            CheckpointWarning,
            stacklevel=2,
        )


def batch_from(content: bytes) -> Batch:
    """The batch that `RunFolder.fail` kept."""
    from safetensors.torch import load

    tensors: dict[str, torch.Tensor] = load(content)
    return Batch(tensors["inputs"], tensors["targets"], tensors.get("lengths"))
