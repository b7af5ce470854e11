"""Saving and loading: weights as safetensors, with the spec in the same file. Nothing is ever unpickled."""

import os
import tempfile
from pathlib import Path

import torch
from torch import nn

from .errors import CheckpointError, SpecError
from .spec import Spec

__all__ = ["load", "save"]

_KEY = "adptnet"


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes the weights of `model` and its spec to one file, all of it or nothing.

    Args:
        model: A module with a spec: `ADPTNet`, `Recurrent`, `Bidirectional`, `Stack`, `ResidualBlock`, `SequenceModel`.
        path: The file, by custom `something.safetensors`.
    """
    from safetensors.torch import save as serialise

    spec = getattr(model, "spec", None)
    if not isinstance(spec, Spec) or not hasattr(spec, "build"):
        raise CheckpointError(
            f"{type(model).__name__} has no spec, so load could not build it again. Save a model made of adptnet "
            "modules, or its parts one by one."
        )
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    content = serialise(tensors, metadata={_KEY: spec.to_json()})
    target = Path(path)
    if not target.parent.is_dir():
        raise CheckpointError(f"The folder {target.parent} does not exist. Make it first: mkdir -p {target.parent}")
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> nn.Module:
    """The model that `save` wrote, in training mode and with the dtypes it had.

    Args:
        path: A file written by `save`.
        device: Where to put it; the CPU if not given.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise CheckpointError(f"There is no file {os.fspath(path)}.") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{os.fspath(path)} is not a complete safetensors file ({error}). "
            "Write it again with adptnet.save(model, path)."
        ) from None
    if _KEY not in metadata:
        raise CheckpointError(
            f"{os.fspath(path)} holds weights but no adptnet spec. Build the model yourself and use load_state_dict, "
            "or write the file with adptnet.save(model, path)."
        )
    spec = Spec.from_json(metadata[_KEY])
    if not hasattr(spec, "build"):
        raise SpecError(f"{type(spec).__name__} describes no module. Save a whole layer or model.")
    with torch.random.fork_rng(devices=[]):  # the weights are replaced: leave the caller's random numbers alone
        model: nn.Module = spec.build()
    try:
        model.load_state_dict(tensors, assign=True)  # keeps the dtypes of the file
    except RuntimeError as error:
        raise CheckpointError(f"{os.fspath(path)}: weights and spec do not belong together. {error}") from None
    return model if device is None else model.to(device)
