"""Running an experiment in a folder, from the beginning or from where it was cut off."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adptnet._io.files import read_regular, write_whole
from adptnet.checkpoint import load, serialised
from adptnet.errors import CheckpointError, IncompatibleError, InputError, SpecError
from adptnet.spec import Spec

from ..tasks import Scores
from .evaluation import evaluate
from .experiment import Experiment
from .failure import Diagnosis, diagnose
from .folder import Keeping, RunFolder, batch_from, check_settings
from .lock import hold_folder
from .metrics import plain, read_lines, restored
from .places import Place, launched
from .progress import Silent, screen
from .records import differences, list_changes, read_json
from .signals import STOPPING, stoppable
from .state import progress_from, set_random_states
from .store import Store, copies, explain_damage, read_whole_copy
from .trainer import train

__all__ = ["finished", "read_experiment", "replay", "run", "trained"]

WEIGHTS, RESULT = "model.safetensors", "result.json"
LARGEST_CONFIG = 2**20  # bytes


def run(
    experiment: Experiment,
    folder: Path,
    *,
    resume: bool = False,
    place: Place | None = None,
    keeping: Keeping = Keeping(),
    signals: Sequence[int] = STOPPING,
) -> dict[str, Any]:
    """Trains, keeps everything in `folder`, scores the chosen weights on test data; returns what result.json holds.

    Args:
        experiment: What to run.
        folder: For this run alone.
        resume: Go on from the newest checkpoint, if the folder holds one; the numbers are those of a run without a cut.
        place: The processes; found from the environment if not given.
        keeping: How often to save.
        signals: Those that save and stop, with `Interrupted`: SIGTERM and SIGINT if not given.
    """
    place = place or launched(experiment.training.precision)
    with ExitStack() as stack:
        hold = None
        if place.first:
            hold = stack.enter_context(hold_folder(folder))
            _claim(folder, experiment, resume)
        done = place.gathered(finished(folder) if place.first else None)[0]
        if done is not None:
            return dict(done)
        for length in experiment.training.lengths or (None,):  # what the run will be scored on: better missed now
            next(iter(experiment.task.evaluation("test", 1, 1, length=length)))
        keeper = RunFolder(folder, place, keeping, json.loads(experiment.to_json())["spec"], hold)
        stack.callback(keeper.close)
        request = stack.enter_context(stoppable(signals))
        model = built(experiment)
        shown = stack.enter_context(screen(experiment.training.steps)) if place.first else Silent()
        record = train(
            model, experiment.task, experiment.training, place=place, keeper=keeper, screen=shown, request=request
        )
        scores = scored(model, experiment, place)
        result = {
            "metric": experiment.task.metric,
            "score": next(iter(scores.values()))[experiment.task.metric],
            "chance": experiment.task.chance,
            "test": {str(length): each for length, each in scores.items()},
            "step": record.step,
            "seconds": record.seconds,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        weights = {name: place.whole(tensor) for name, tensor in model.state_dict().items()}
        if place.first:
            keeper.write(WEIGHTS, serialised(experiment.model, weights))
            keeper.write_metrics()
            keeper.write(RESULT, json.dumps(plain(result), indent=1, allow_nan=False).encode())
        return result


def built(experiment: Experiment) -> nn.Module:
    """The model before training. The seed decides its weights, whatever ran before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.training.seed)
        model: nn.Module = experiment.model.build()
        return model


def scored(model: nn.Module, experiment: Experiment, place: Place | None = None) -> dict[int, Scores]:
    """Scores on test data at the lengths of the experiment."""
    settings = experiment.training
    return evaluate(
        model,
        experiment.task,
        settings.lengths or (None,),
        size=settings.evaluation_size,
        batch_size=settings.evaluation_batch,
        place=place,
    )


def finished(folder: Path) -> dict[str, Any] | None:
    """Return the result of the run in `folder`; None if it has not ended."""
    path = folder / RESULT
    if not path.exists():
        return None
    result = restored(read_json(path))
    numbers = ("score", "seconds", "step", "parameters")
    if (
        not isinstance(result, dict)
        or not isinstance(result.get("test"), dict)
        or not all(isinstance(result.get(name), int | float) for name in numbers)
    ):
        raise CheckpointError(f"{path} is not as it was written. Delete it and resume with --resume.")
    return result


def read_experiment(path: Path) -> Experiment:
    """The experiment in a file, or in the folder of a run."""
    hint = "Pass a config.json, or the folder of a run."
    try:
        path = path / "config.json" if path.is_dir() else path
        found = Spec.from_json(read_regular(path, LARGEST_CONFIG).decode())
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}). {hint}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is no text. {hint}") from None
    except (SpecError, IncompatibleError, InputError) as error:
        raise type(error)(f"{path}: {error}") from None
    if not isinstance(found, Experiment):
        raise SpecError(f"{path} holds a {type(found).__name__}, not an Experiment: the config.json of a run.")
    return found


def trained(folder: Path) -> nn.Module:
    """The model of a run: as chosen at its end, or the best so far of one that has not ended."""
    from safetensors.torch import load as parsed

    if folder.is_file():
        raise InputError(f"{folder} is a file. Pass the folder of the run: {folder.parent}")
    experiment = read_experiment(folder)
    if (folder / WEIGHTS).exists():
        try:
            return load(folder / WEIGHTS)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} A run writes it once more if {folder / RESULT} is deleted: "
                f"adptnet train --output {folder} --resume"
            ) from None
    newest = Store(folder / "checkpoints").newest()
    if newest is None:
        raise CheckpointError(f"{folder} holds no weights yet. Go on with: adptnet train --output {folder} --resume")
    step, files = newest
    model = built(experiment)
    with explain_damage(Store(folder / "checkpoints").path(step)):
        model.load_state_dict(parsed(files["best.safetensors" if "best.safetensors" in files else WEIGHTS]))
    return model


def replay(folder: Path) -> tuple[int, Diagnosis]:
    """Runs the step at which the run in `folder` failed once more; returns its number and what was found."""
    from safetensors.torch import load

    if not any(copy.is_dir() for copy in copies(folder / "failure")):
        raise InputError(f"{folder} holds no failure to replay.")
    files = read_whole_copy(folder / "failure")[1]
    experiment = read_experiment(folder)
    model = built(experiment).train()
    with explain_damage(folder / "failure"), torch.random.fork_rng(devices=[]):
        model.load_state_dict(load(files["model.safetensors"]))
        set_random_states({"cpu": load(files["random.safetensors"])["0/cpu"]})
        batch, step = batch_from(files["batch.safetensors"]), progress_from(files["progress.json"]).step
        after = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(after)
        return step + 1, diagnose(model, experiment.task, batch)


def _claim(folder: Path, experiment: Experiment, resume: bool) -> None:
    """Make the folder this experiment's own, or say why it cannot be."""
    path = folder / "config.json"
    settings = json.loads(experiment.to_json())
    try:
        if _begun(folder):
            if path.exists():
                before = read_experiment(path)
                if before != experiment:
                    changed = differences(json.loads(before.to_json())["spec"], settings["spec"])
                    raise InputError(
                        f"{folder} holds another experiment: {list_changes(changed)}. Pass another --output."
                    )
            else:
                _check_newest(Store(folder / "checkpoints"), settings["spec"])
            if not resume:
                raise InputError(f"{folder} already holds this run. Pass --resume to go on, or another --output.")
        if not path.exists() or read_experiment(path) != experiment:
            write_whole(path, (json.dumps(settings, indent=1) + "\n").encode())
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}). Pass another --output.") from None


def _check_newest(store: Store, settings: dict[str, Any]) -> None:
    """Raise a `CheckpointError` if the newest checkpoint is of other settings."""
    found = store.newest()
    if found is not None:
        check_settings(store.path(found[0]), found[1], settings)


def _begun(folder: Path) -> bool:
    """Whether a run has left anything in `folder` but its settings: one that was refused has not."""
    kept = ("checkpoints", "snapshots", "failure", WEIGHTS, RESULT)
    return any((folder / name).exists() for name in kept) or bool(read_lines(folder / "metrics.jsonl"))
