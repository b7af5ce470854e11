"""`adptnet card RUN FOLDER`: make a folder to publish from a finished run, with a model card."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tyro.conf import Positional

from adptnet._io.files import write_atomic
from adptnet.checkpoint import FILE_NAME
from adptnet.errors import InputError

from .._json_files import read_json, write_json
from ..tasks import Text
from ..training import Experiment, load_model, read_experiment, read_result
from .command_line import make_command
from .spec_flags import describe_experiment

__all__ = ["Card", "run"]

HEAD = "---\nlibrary_name: adptnet\n"  # of every card
LONGEST = 64  # steps of an example that is written out


@dataclass(frozen=True)
class Card:
    """Make a folder to publish from a finished run: weights and spec, model card, settings and scores.

    `adptnet.load(FOLDER)` loads the model, and `hf upload user/name FOLDER` publishes it.
    """

    run: Positional[Path]
    """Folder of the run."""
    folder: Positional[Path]
    """Folder to write: model.safetensors, README.md (the card), config.json and result.json."""
    repository: str | None = None
    """Repository of the Hugging Face Hub, user/name, whose name the card uses to load the model."""
    license: str | None = None
    """Licence of the model as the Hub writes it, e.g. apache-2.0. The card names none if it is not given."""


def run(options: Card) -> None:
    """Write the folder.

    Args:
        options: The options.

    Raises:
        InputError: The run has not finished, or the folder holds something else.
    """
    experiment = read_experiment(options.run)
    result = read_result(options.run) if options.run.is_dir() else None
    if result is None:
        raise InputError(
            f"{options.run} is not the folder of a finished run: it has no result.json. "
            f"Finish it: adptnet train --output {options.run} --resume"
        )
    _check_folder(options)
    model = load_model(options.run)  # checks the SHA-256 of the file
    config = json.loads(experiment.to_json())
    texts = list(_find_absolute_paths(config))
    card = _write_card(options, experiment, result, sum(parameter.numel() for parameter in model.parameters()))
    options.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(options.folder / FILE_NAME, (options.run / FILE_NAME).read_bytes())
    write_json(options.folder / "config.json", _drop_folders(config))
    write_json(options.folder / "result.json", read_json(options.run / "result.json"))
    for text in texts:
        card = card.replace(text, Path(text).name)
    write_atomic(options.folder / "README.md", card.encode())
    print(f"wrote {options.folder} ({sum(file.stat().st_size for file in options.folder.iterdir()) / 1e6:.2f} MB)")


def _check_folder(options: Card) -> None:
    """Raise `InputError` if a file that is not a card, or the run itself, would be overwritten."""
    folder = options.folder
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file. Pass the folder to write.")
    if folder.resolve() == options.run.resolve():
        raise InputError(f"{folder} is the folder of the run. Pass another folder to write.")
    card = folder / "README.md"
    if card.exists() and not card.read_bytes().startswith(HEAD.encode()):
        raise InputError(f"{card} exists and is not a card of adptnet. Pass another folder to write.")


def _find_absolute_paths(value: Any) -> Iterator[str]:
    """Yield the absolute paths in a JSON document."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _find_absolute_paths(item)
    elif isinstance(value, str) and Path(value).is_absolute() and Path(value).name:
        yield value


def _drop_folders(value: Any) -> Any:
    """Return a JSON document in which an absolute path is the name of the file, since it belongs to one machine."""
    if isinstance(value, dict):
        return {name: _drop_folders(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_drop_folders(item) for item in value]
    return Path(value).name if next(_find_absolute_paths(value), None) else value


def _write_card(options: Card, experiment: Experiment, result: dict[str, Any], parameters: int) -> str:
    task, seed = experiment.task, experiment.training.seed
    source = options.repository or (options.folder.name if options.folder.is_absolute() else options.folder.as_posix())
    name = source.rpartition("/")[2]
    command = make_command(experiment)
    reproduce = ["adptnet", "train", "--config", "config.json"] if command is None else command
    versions = _read_versions(options.run)
    purpose = " ".join((type(task).__doc__ or "").split("\n\n")[0].split())
    return f"""{_write_metadata(options, experiment, result, name)}
# {name}

A recurrent network of adptnet with {parameters:,} parameters. Task: {purpose}

## Load and run

```python
{_write_example(experiment, source)}
```

## Scores

On test data, at step {result["step"]} of the training; chance is {task.metric} {task.chance:.4g}.

{_write_table(result)}

## Settings

```
{describe_experiment(experiment)}
```

The spec of the model:

```
{experiment.model}
```

## Reproduce

Trained with {versions}and seed {seed} by

```
{shlex.join(reproduce)}
```

The same versions, instruction set and number of threads give the same weights on a CPU, bit for bit.
"""


def _read_versions(folder: Path) -> str:
    """Return the versions that a run was trained with, as text; empty if it did not record them."""
    path = folder / "environment.json"
    last = read_json(path)[-1] if path.exists() else {}
    return "".join(f"{name} {last[name]}, " for name in ("adptnet", "torch") if name in last)


def _write_metadata(options: Card, experiment: Experiment, result: dict[str, Any], name: str) -> str:
    """Return the metadata of the card as YAML, in which text is quoted as in JSON."""
    task = json.dumps(type(experiment.task).__name__)
    lines = [f"{HEAD}tags: [adptnet, recurrent, {task}]"]
    if options.license is not None:
        lines.append(f"license: {json.dumps(options.license)}")
    lines += ["model-index:", f"- name: {json.dumps(name)}", "  results:"]
    for length, scores in result["test"].items():
        data = json.dumps(f"{type(experiment.task).__name__}, {length} steps")
        lines += [f"  - task: {{type: {task}}}", f"    dataset: {{name: {data}, type: {task}}}", "    metrics:"]
        lines += [f"    - {{type: {json.dumps(kind)}, value: {value:.6f}}}" for kind, value in _list_scores(scores)]
    return "\n".join([*lines, "---"])


def _list_scores(scores: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the scores that are single numbers."""
    return [(name, float(value)) for name, value in scores.items() if isinstance(value, int | float)]


def _write_table(result: dict[str, Any]) -> str:
    names = [name for name, _ in _list_scores(next(iter(result["test"].values())))]
    rows = [["steps", *names], ["---:"] * (len(names) + 1)]
    rows += [[length, *(f"{scores[name]:.4f}" for name in names)] for length, scores in result["test"].items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _write_example(experiment: Experiment, source: str) -> str:
    """Return Python code that loads the model and runs it on an input of its task."""
    task = experiment.task
    length = next(iter(experiment.training.lengths), None)
    batch = next(iter(task.evaluation("test", 1, 1, length=length)))
    lines = ["import torch", "import adptnet", "", f"model = adptnet.load({json.dumps(source)}).eval()"]
    if isinstance(task, Text):
        prompt = task.decode(batch.inputs[0, :16])
        if task.symbols == "bytes":
            lines.append(f"prompt = torch.tensor([list({prompt!r}.encode())])  # bytes")
            shown = 'bytes(text[0].tolist()).decode(errors="replace")'
        else:
            lines.append(f"symbols = {task.decode(torch.arange(task.vocabulary))!r}")
            lines.append(f"prompt = torch.tensor([[symbols.index(character) for character in {prompt!r}]])")
            shown = '"".join(symbols[token] for token in text[0].tolist())'
        return "\n".join([*lines, "text = model.generate(prompt, 200)", f"print({shown})"])
    steps = batch.inputs.shape[1]
    if task.vocabulary is None:
        lines.append(f"x = torch.rand(1, {steps}, {task.input_size})  # in place of data: (batch, time, features)")
    elif steps <= LONGEST:
        lines.append(f"x = torch.tensor({batch.inputs.tolist()})  # (batch, time) tokens, from the test data")
    else:
        lines.append(f"x = torch.randint({task.vocabulary}, (1, {steps}))  # in place of data: (batch, time) tokens")
    shape = "(batch, time, outputs)" if task.head == "token" else "(batch, outputs)"
    lines.append(f"y, state = model(x)  # {shape}")
    return "\n".join([*lines, "print(y)" if batch.targets.is_floating_point() else "print(y.argmax(-1))"])
