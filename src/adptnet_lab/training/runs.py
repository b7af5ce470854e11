"""Runs: train an experiment in a folder, resume it, and read what it wrote."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adptnet._io.files import read_regular, write_atomic
from adptnet._io.json_values import from_json_value, to_json_value
from adptnet.checkpoint import load, serialize
from adptnet.errors import CheckpointError, IncompatibleError, InputError, SpecError
from adptnet.spec import Spec

from .._json_files import read_json
from .._runtime import STOP_SIGNALS, catch_stop_signals
from ..tasks import Scores
from .checkpoint_store import CheckpointStore, explain_damage, list_copies, read_intact_copy
from .divergence import Diagnosis, diagnose
from .evaluation import evaluate
from .experiment import Experiment
from .progress_display import NoDisplay, show_progress
from .run_environment import find_differences, format_differences
from .run_folder import RunFolder, SaveOptions, check_settings, parse_batch
from .run_lock import lock_folder
from .run_metrics import read_lines
from .strategy import Strategy, detect_strategy
from .trainer import train
from .training_state import parse_progress, set_random_states

__all__ = ["build_model", "load_model", "read_experiment", "read_result", "replay", "run"]

WEIGHTS, RESULT = "model.safetensors", "result.json"
LARGEST_CONFIG = 2**20  # bytes


def run(
    experiment: Experiment,
    folder: Path,
    *,
    resume: bool = False,
    strategy: Strategy | None = None,
    save_options: SaveOptions = SaveOptions(),
    signals: Sequence[int] = STOP_SIGNALS,
) -> dict[str, Any]:
    """Train a model in a folder, score the selected weights on test data, and return the content of result.json.

    A run that has finished is not repeated; its result is returned.

    Args:
        experiment: The task, the model and the settings.
        folder: The folder of this run alone.
        resume: Resume from the newest checkpoint if the folder holds one. The numbers are those of an uninterrupted
            run.
        strategy: The processes; by default those that torchrun started, or this one.
        save_options: How often to save.
        signals: The signals at which the run saves a checkpoint and stops.

    Raises:
        InputError: The folder holds another experiment, or this one and `resume` is False.
        FolderInUse: Another process trains in the folder.
        Interrupted: A signal has stopped the run.
        TrainingDiverged: The loss or the gradient norm is not finite.
    """
    strategy = strategy or detect_strategy(experiment.training.precision)
    with ExitStack() as stack:
        lock = None
        if strategy.is_main:
            lock = stack.enter_context(lock_folder(folder))
            _claim(folder, experiment, resume)
        done = strategy.gather(read_result(folder) if strategy.is_main else None)[0]
        if done is not None:
            return dict(done)
        for length in experiment.training.lengths or (None,):  # missing test data raise now, not after the training
            next(iter(experiment.task.evaluation("test", 1, 1, length=length)))
        settings = json.loads(experiment.to_json())["spec"]
        recorder = RunFolder(folder, strategy, save_options, settings, lock)
        stack.callback(recorder.close)
        stop_request = stack.enter_context(catch_stop_signals(signals))
        model = build_model(experiment)
        steps = experiment.training.steps
        record = train(
            model,
            experiment.task,
            experiment.training,
            strategy=strategy,
            recorder=recorder,
            display=stack.enter_context(show_progress(steps)) if strategy.is_main else NoDisplay(),
            stop_request=stop_request,
        )
        scores = _score(model, experiment, strategy)
        result = {
            "metric": experiment.task.metric,
            "score": next(iter(scores.values()))[experiment.task.metric],
            "chance": experiment.task.chance,
            "test": {str(length): each for length, each in scores.items()},
            "step": record.step,
            "seconds": record.seconds,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        weights = {name: strategy.gather_tensor(tensor) for name, tensor in model.state_dict().items()}
        if strategy.is_main:
            recorder.write(WEIGHTS, serialize(experiment.model, weights))
            recorder.write_metrics()
            recorder.write(RESULT, json.dumps(to_json_value(result), indent=1, allow_nan=False).encode())
        return result


def build_model(experiment: Experiment) -> nn.Module:
    """Return the untrained model. The seed of the experiment alone determines its weights.

    Args:
        experiment: Provides the model and the seed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.training.seed)
        model: nn.Module = experiment.model.build()
        return model


def _score(model: nn.Module, experiment: Experiment, strategy: Strategy) -> dict[int, Scores]:
    """Return the scores on test data at the lengths of the experiment."""
    settings = experiment.training
    return evaluate(
        model,
        experiment.task,
        settings.lengths or (None,),
        size=settings.evaluation_size,
        batch_size=settings.evaluation_batch,
        strategy=strategy,
    )


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return the content of result.json; None if the run has not finished.

    Args:
        folder: The folder of a run.

    Raises:
        CheckpointError: The file is damaged.
    """
    path = folder / RESULT
    if not path.exists():
        return None
    result = from_json_value(read_json(path))
    numbers = ("score", "seconds", "step", "parameters")
    if (
        not isinstance(result, dict)
        or not isinstance(result.get("test"), dict)
        or not all(isinstance(result.get(name), int | float) for name in numbers)
    ):
        raise CheckpointError(f"{path} is not as it was written. Delete it and resume with --resume.")
    return result


def read_experiment(path: Path) -> Experiment:
    """Return the experiment in a config.json.

    Args:
        path: The file, or the folder of a run.

    Raises:
        InputError: The file cannot be read.
        SpecError: It does not hold an experiment that this version of adptnet can read.
    """
    hint = "Pass a config.json, or the folder of a run."
    try:
        path = path / "config.json" if path.is_dir() else path
        found = Spec.from_json(read_regular(path, LARGEST_CONFIG).decode())
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}). {hint}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not text. {hint}") from None
    except (SpecError, IncompatibleError, InputError) as error:
        raise type(error)(f"{path}: {error}") from None
    if not isinstance(found, Experiment):
        raise SpecError(f"{path} holds a {type(found).__name__}, not an Experiment: the config.json of a run.")
    return found


def load_model(folder: Path) -> nn.Module:
    """Return the model of a run with the weights selected at its end, or the best so far if it has not finished.

    Args:
        folder: The folder of a run.

    Raises:
        CheckpointError: There are no weights yet, or they are damaged.
    """
    from safetensors.torch import load as load_tensors

    if folder.is_file():
        raise InputError(f"{folder} is a file. Pass the folder of the run: {folder.parent}")
    experiment = read_experiment(folder)
    if (folder / WEIGHTS).exists():
        try:
            return load(folder / WEIGHTS)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} To write it again, delete {folder / RESULT} and type: "
                f"adptnet train --output {folder} --resume"
            ) from None
    store = CheckpointStore(folder / "checkpoints")
    newest = store.read_newest()
    if newest is None:
        raise CheckpointError(f"{folder} holds no weights yet. Resume with: adptnet train --output {folder} --resume")
    step, files = newest
    model = build_model(experiment)
    with explain_damage(store.path(step)):
        model.load_state_dict(load_tensors(files["best.safetensors" if "best.safetensors" in files else WEIGHTS]))
    return model


def replay(folder: Path) -> tuple[int, Diagnosis]:
    """Repeat the step at which a run failed.

    Args:
        folder: The folder of the run.

    Returns:
        The number of the step, and the diagnosis.

    Raises:
        InputError: The run has not failed.
    """
    from safetensors.torch import load as load_tensors

    if not any(copy.is_dir() for copy in list_copies(folder / "failure")):
        raise InputError(f"{folder} holds no failure to replay.")
    files = read_intact_copy(folder / "failure")[1]
    experiment = read_experiment(folder)
    model = build_model(experiment).train()
    with explain_damage(folder / "failure"), torch.random.fork_rng(devices=[]):
        model.load_state_dict(load_tensors(files[WEIGHTS]))
        set_random_states({"cpu": load_tensors(files["random.safetensors"])["0/cpu"]})
        batch, step = parse_batch(files["batch.safetensors"]), parse_progress(files["progress.json"]).step
        after = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(after)
        return step + 1, diagnose(model, experiment.task, batch)


def _claim(folder: Path, experiment: Experiment, resume: bool) -> None:
    """Write the settings of the experiment to its folder; raise if the folder is in use for another one."""
    path = folder / "config.json"
    settings = json.loads(experiment.to_json())
    try:
        if _has_started(folder):
            if path.exists():
                before = read_experiment(path)
                if before != experiment:
                    changed = find_differences(json.loads(before.to_json())["spec"], settings["spec"])
                    raise InputError(
                        f"{folder} holds another experiment: {format_differences(changed)}. Pass another --output."
                    )
            else:
                _check_newest(CheckpointStore(folder / "checkpoints"), settings["spec"])
            if not resume:
                raise InputError(f"{folder} already holds this run. Pass --resume to resume it, or another --output.")
        if not path.exists() or read_experiment(path) != experiment:
            write_atomic(path, (json.dumps(settings, indent=1) + "\n").encode())
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}). Pass another --output.") from None


def _check_newest(store: CheckpointStore, settings: dict[str, Any]) -> None:
    """Raise `CheckpointError` if the newest checkpoint is of other settings."""
    found = store.read_newest()
    if found is not None:
        check_settings(store.path(found[0]), found[1], settings)


def _has_started(folder: Path) -> bool:
    """Return whether a run has written more than its settings to `folder`: one that failed its checks has not."""
    kept = ("checkpoints", "snapshots", "failure", WEIGHTS, RESULT)
    return any((folder / name).exists() for name in kept) or bool(read_lines(folder / "metrics.jsonl"))
