"""Running an experiment in a folder, from the beginning or from where it was cut off."""

import dataclasses
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import load, serialised
from ..errors import CheckpointError, IncompatibleError, InputError, SpecError
from ..files import write_whole
from ..spec import Spec
from ..tasks import Scores
from .evaluation import evaluate
from .experiment import Experiment
from .failure import Diagnosis, diagnose
from .folder import Keeping, RunFolder, batch_from
from .lock import held
from .metrics import plain, read_metrics, restored
from .places import Place, launched
from .progress import Silent, screen
from .records import read_json
from .signals import STOPPING, stoppable
from .state import Progress, set_random_states
from .store import Store, copies, read_whole_copy
from .trainer import train

__all__ = ["finished", "read_experiment", "replay", "run", "trained"]

WEIGHTS, RESULT = "model.safetensors", "result.json"


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
        if place.first:
            stack.enter_context(held(folder))
            _claim(folder, experiment, resume)
        done = place.gathered(finished(folder) if place.first else None)[0]
        if done is not None:
            return dict(done)
        for length in experiment.training.lengths or (None,):  # what the run will be scored on: better missed now
            next(iter(experiment.task.evaluation("test", 1, 1, length=length)))
        keeper = RunFolder(folder, place, keeping, json.loads(experiment.to_json())["spec"])
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
    """The result of the run in `folder`; None if it has not ended."""
    path = folder / RESULT
    return restored(read_json(path)) if path.exists() else None


def read_experiment(path: Path) -> Experiment:
    """The experiment in a file, or in the folder of a run."""
    path = path / "config.json" if path.is_dir() else path
    hint = "Pass a config.json, or the folder of a run."
    try:
        found = Spec.from_json(path.read_text())
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
    model = built(experiment)
    model.load_state_dict(parsed(newest[1].get("best.safetensors", newest[1][WEIGHTS])))
    return model


def replay(folder: Path) -> tuple[int, Diagnosis]:
    """Runs the step at which the run in `folder` failed once more; returns its number and what was found."""
    from safetensors.torch import load

    if not any(copy.is_dir() for copy in copies(folder / "failure")):
        raise InputError(f"{folder} holds no failure to replay.")
    files = read_whole_copy(folder / "failure")[1]
    experiment = read_experiment(folder)
    model = built(experiment).train()
    model.load_state_dict(load(files["model.safetensors"]))
    with torch.random.fork_rng(devices=[]):
        set_random_states({"cpu": load(files["random.safetensors"])["0/cpu"]})
        diagnosis = diagnose(model, experiment.task, batch_from(files["batch.safetensors"]))
    return Progress(**json.loads(files["progress.json"])).step + 1, diagnosis


def _claim(folder: Path, experiment: Experiment, resume: bool) -> None:
    """Makes the folder this experiment's own, or says why it cannot be."""
    path = folder / "config.json"
    try:
        if path.exists():
            before = read_experiment(path)
            if before != experiment and _begun(folder):
                raise InputError(
                    f"{folder} holds another experiment: {_difference(before, experiment)}. Pass another --output."
                )
            if not resume and _begun(folder):
                raise InputError(f"{folder} already holds this run. Pass --resume to go on, or another --output.")
            if before == experiment:
                return
        write_whole(path, (json.dumps(json.loads(experiment.to_json()), indent=1) + "\n").encode())
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}). Pass another --output.") from None


def _begun(folder: Path) -> bool:
    """Whether a run has left anything in `folder` but its settings: one that was refused has not."""
    kept = ("checkpoints", "snapshots", "failure", WEIGHTS, RESULT)
    return any((folder / name).exists() for name in kept) or bool(read_metrics(folder / "metrics.jsonl"))


def _difference(before: Any, after: Any, where: str = "") -> str:
    """The first field in which two specs differ."""
    if type(before) is type(after) and isinstance(before, Spec):
        for field in dataclasses.fields(before):
            old, new = getattr(before, field.name), getattr(after, field.name)
            if old != new:
                return _difference(old, new, f"{where}.{field.name}".lstrip("."))
    return f"{where} was {before!r} and is {after!r}"
