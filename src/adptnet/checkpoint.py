"""Saving and loading: weights as safetensors, with the spec in the same file. Nothing is ever unpickled."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import CheckpointError
from .files import write_whole
from .spec import ModuleSpec, Spec
from .typing import Device

__all__ = ["load", "save", "serialised"]

_KEY = "adptnet"


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes the weights of `model` and its spec to one file, all of it or nothing.

    Args:
        model: A module with a spec: `ADPTNet`, `Recurrent`, `Bidirectional`, `Stack`, `ResidualBlock`, `SequenceModel`.
        path: The file, by custom `something.safetensors`.
    """
    spec = getattr(model, "spec", None)
    if not isinstance(spec, ModuleSpec) or not type(model).__module__.startswith("adptnet."):
        raise CheckpointError(
            f"load could not build a {type(model).__name__} again. Save one of adptnet's own modules that has a spec; "
            "of a compiled model, save model._orig_mod."
        )
    target = Path(path)
    if not target.parent.is_dir():
        raise CheckpointError(f"The folder {target.parent} does not exist. Make it first: mkdir -p {target.parent}")
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder. Pass a file in it, e.g. {target / 'model.safetensors'}")
    write_whole(target, serialised(spec, model.state_dict()))


def serialised(spec: ModuleSpec | None, weights: dict[str, Tensor]) -> bytes:
    """The content of a file of `weights`; with the spec, one that `load` reads and whose every byte it checks."""
    from safetensors.torch import save as serialise

    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    if spec is None:
        return bytes(serialise(tensors))
    document = json.loads(spec.to_json())
    # Beside the spec in one entry: safetensors writes several in any order, and files would differ from run to run.
    document["sha256"] = _sha256(document, tensors)
    return bytes(serialise(tensors, metadata={_KEY: json.dumps(document)}))


def load(path: str | os.PathLike[str], *, device: Device = None) -> nn.Module:
    """The model that `save` wrote, in training mode and with the dtypes it had. A changed byte is refused.

    Args:
        path: A file written by `save`.
        device: Where to put it; the CPU if not given.
    """
    spec, tensors = _read(path)
    _check_size(path, spec, tensors)
    with torch.random.fork_rng(devices=[]):  # the weights are replaced: leave the caller's random numbers alone
        model: nn.Module = spec.build()
    for name, own in model.state_dict().items():
        found = tensors.get(name)
        if found is not None and (found.is_floating_point(), found.is_complex()) != (own.is_floating_point(), False):
            raise CheckpointError(f"{os.fspath(path)}: {name} is {found.dtype}, where {own.dtype} is needed.")
    try:
        model.load_state_dict(tensors, assign=True)  # keeps the dtypes of the file
    except RuntimeError as error:
        raise CheckpointError(f"{os.fspath(path)}: weights and spec do not belong together. {error}") from None
    return model if device is None else model.to(device)


def _read(path: str | os.PathLike[str]) -> tuple[ModuleSpec, dict[str, Tensor]]:
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
    text = metadata[_KEY]
    document = _parsed(text)
    if "sha256" in document:  # files from before it was written have none
        if document.pop("sha256") != _sha256(document, tensors):
            raise CheckpointError(
                f"{os.fspath(path)} is not as it was written: weights and spec have another SHA-256 than it says. "
                "Copy it again, or write it again with adptnet.save(model, path)."
            )
        text = json.dumps(document)
    spec = Spec.from_json(text)
    if not isinstance(spec, ModuleSpec):
        raise CheckpointError(f"{os.fspath(path)}: {type(spec).__name__} describes no whole module.")
    return spec, tensors


def _parsed(text: str) -> dict[str, Any]:
    """The document, or nothing if there is none; `Spec.from_json` then says why."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _sha256(document: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """The sum of a spec and the weights that go with it, whatever order they are in."""
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _check_size(path: str | os.PathLike[str], spec: ModuleSpec, tensors: dict[str, Tensor]) -> None:
    """Refuses, unbuilt, a spec that asks for more memory than its file fills."""
    stored = sum(tensor.numel() for tensor in tensors.values())
    layers = [value for name, value in _counts(json.loads(spec.to_json())) if value > max(1, len(tensors))]
    needed = 0 if layers else sum(t.numel() for t in spec.build(device="meta").state_dict().values())
    if layers or needed > stored:
        raise CheckpointError(
            f"{os.fspath(path)}: weights and spec do not belong together. The spec describes a larger model than the "
            f"{stored:,} numbers in the file."
        )


def _counts(node: Any) -> list[tuple[str, int]]:
    """How often a spec repeats its parts: each repetition has tensors of its own."""
    if not isinstance(node, dict):
        return []
    named = ("depth", "num_layers", "heads", "steps")
    found = [(name, value) for name, value in node.items() if name in named and isinstance(value, int)]
    return found + [count for value in node.values() for count in _counts(value)]
