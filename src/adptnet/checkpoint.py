"""Saving and loading of models: weights as safetensors, with the spec in the same file. Nothing is ever unpickled.

Files are untrusted: `load` copies a file into memory, checks the SHA-256 of the copy, and compares the tensors with
those of the spec on the meta device before it builds anything.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ._io.files import write_atomic
from ._io.untrusted import parse_json
from ._layout import lay_out
from ._typing import Device
from .errors import AdptnetError, CheckpointError
from .spec import ModuleSpec, Spec

__all__ = ["FILE_NAME", "find_tied", "load", "save", "serialize"]

FILE_NAME = "model.safetensors"  # in a folder or a repository
_KEY = "adptnet"
_CALLS_PER_TENSOR = 500  # allowed calls of torch functions to build a module, for each of its tensors

Tied = Sequence[Sequence[str]]  # groups of names that share one tensor


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the weights and the spec of `model` to one file, atomically.

    Parameters that are tied (`model.decoder.weight = model.encoder.weight`) are tied again by `load`.

    Args:
        model: A module with a spec: `ADPTNet`, `Recurrent`, `Bidirectional`, `Stack`, `ResidualBlock`, `SequenceModel`.
        path: The file, by convention `something.safetensors`.

    Raises:
        CheckpointError: `load` could not rebuild this model, e.g. because it is pruned or parametrized, or the path
            is not a file in an existing folder.
    """
    spec = getattr(model, "spec", None)
    packages = {type(part).__module__.partition(".")[0] for part in (model, spec)}
    if (
        not isinstance(spec, ModuleSpec) or len(packages) > 1
    ):  # a subclass of another package: its spec builds the base class
        raise CheckpointError(
            f"load could not build a {type(model).__name__} again. Save one of adptnet's own modules that has a spec; "
            "for a compiled model, save model._orig_mod."
        )
    _check_unchanged(model, spec)
    target = Path(path)
    if not target.parent.is_dir():
        raise CheckpointError(f"The folder {target.parent} does not exist. Make it first: mkdir -p {target.parent}")
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder. Pass a file in it, e.g. {target / 'model.safetensors'}")
    write_atomic(target, serialize(spec, model.state_dict(), find_tied(model)))


def serialize(spec: ModuleSpec | None, weights: dict[str, Tensor], tied: Tied = ()) -> bytes:
    """Return the content of a safetensors file with these weights.

    Args:
        spec: The spec of the model; with it, `load` can read the file and checks every byte of it.
        weights: A complete state dict: tied tensors are listed under each of their names.
        tied: Groups of tied names, from `find_tied`.
    """
    from safetensors.torch import save as to_bytes

    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    if spec is None:
        return bytes(to_bytes(tensors))
    document = json.loads(spec.to_json())
    if tied:
        document["tied"] = [list(names) for names in tied]
    # In the same metadata entry as the spec: safetensors writes several entries in random order, so files would differ.
    document["sha256"] = _sha256(document, tensors)
    return bytes(to_bytes(tensors, metadata={_KEY: json.dumps(document)}))


def load(path: str | os.PathLike[str], *, device: Device = None) -> nn.Module:
    """Return the model that `save` wrote, in training mode and with the dtypes it had.

    The model owns its memory: the file may be changed or removed afterwards.

    Args:
        path: A file written by `save`, a folder with such a file named model.safetensors, or a repository of the
            Hugging Face Hub, "user/name", which is downloaded if there is no folder `user` (extra `hf`).
        device: Device of the model; the CPU by default.

    Raises:
        CheckpointError: The file does not exist, is not a checkpoint, is damaged, or its weights do not match its spec.
            It is raised before more memory is used than the size of the file.
        SpecError: The spec cannot be read; the message names the file.
    """
    path = _locate(path)
    spec, tensors, tied = _read(path)
    with _naming(path):
        _compare(_lay_out(spec, tensors), tensors)
        try:
            with torch.random.fork_rng(devices=[]):  # the weights are replaced: keep the random state
                model: nn.Module = spec.build()
            model.load_state_dict(tensors, assign=True)  # keeps the dtypes of the file
        except (RuntimeError, TypeError, ArithmeticError) as error:
            raise CheckpointError(f"weights and spec do not belong together. {error}") from None
        for module in model.modules():
            check: Any = getattr(module, "check_buffers", None)  # for buffers that hold indices into other tensors
            if check is not None:
                check()
        _tie(model, tied)
    return model if device is None else model.to(device)


def _locate(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the file that `path` means, after downloading it if it is a repository of the Hub."""
    if os.path.isdir(path):
        return Path(path, FILE_NAME)
    name = os.fspath(path)
    if (
        os.path.exists(path)
        or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name)
        or os.path.exists(name.split("/")[0])
    ):
        return path
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError(
            f"There is no file {name}. To download it from the Hugging Face Hub: pip install 'adptnet[hf]'."
        ) from None
    try:
        found: str = huggingface_hub.hf_hub_download(name, FILE_NAME)
    except Exception as error:  # of the network, the server or the cache folder
        raise CheckpointError(
            f"There is no file {name}, and {FILE_NAME} of the repository {name} could not be downloaded "
            f"({_shorten(error)})."
        ) from None
    return found


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Context manager that prefixes errors with the name of the file."""
    try:
        yield
    except AdptnetError as error:
        raise type(error)(f"{os.fspath(path)}: {error}") from None


def _read(path: str | os.PathLike[str]) -> tuple[ModuleSpec, dict[str, Tensor], Tied]:
    """Return spec, tensors and tied names of a file, after checking its SHA-256."""
    metadata, tensors = _parse(path)
    if _KEY not in metadata:
        raise CheckpointError(
            f"{os.fspath(path)} holds weights but no adptnet spec. Build the model yourself and use load_state_dict, "
            "or write the file with adptnet.save(model, path). For a model of transformers: import "
            "adptnet.integrations.hugging_face, then AutoModelForCausalLM.from_pretrained(...)."
        )
    text = metadata[_KEY]
    document = _parse_document(text)
    # Early files have no SHA-256.
    if "sha256" in document and document.pop("sha256") != _sha256(document, tensors):
        raise CheckpointError(
            f"{os.fspath(path)} was changed after it was written: weights and spec do not have the recorded SHA-256. "
            "Copy it again, or write it again with adptnet.save(model, path)."
        )
    with _naming(path):
        tied = _check_tied(document.pop("tied", []), tensors)
        spec = Spec.from_json(json.dumps(document) if document else text)
        if not isinstance(spec, ModuleSpec):
            raise CheckpointError(f"{type(spec).__name__} does not describe a complete module.")
    return spec, tensors, tied


def _parse(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the metadata and the tensors of a safetensors file, which is copied, never memory-mapped."""
    from safetensors.torch import load as deserialise

    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a folder, or a device without end
            raise ValueError("not a regular file")
        content = Path(path).read_bytes()
        tensors = deserialise(content)
        header = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return dict(header.get("__metadata__") or {}), tensors
    except FileNotFoundError:
        raise CheckpointError(f"There is no file {os.fspath(path)}.") from None
    except OSError as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read ({error.strerror or error}).") from None
    except Exception as error:  # the parser raises its own, KeyError for a dtype it does not know, MemoryError, ...
        raise CheckpointError(
            f"{os.fspath(path)} is not a complete safetensors file ({_shorten(error)}). "
            "Write it again with adptnet.save(model, path)."
        ) from None


def _parse_document(text: str) -> dict[str, Any]:
    """Return the document, or an empty one if the text is not one; `Spec.from_json` then raises the error."""
    try:
        document = parse_json(text)
    except (ValueError, TypeError):
        return {}
    return document if isinstance(document, dict) else {}


def _sha256(document: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of a spec and its weights, independent of their order."""
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    return tensor.flatten().view(torch.uint8).numpy()


def _lay_out(spec: ModuleSpec, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the module on the meta device.

    Raises:
        CheckpointError: The module has far more tensors than the file.
    """
    if _repetitions(json.loads(spec.to_json())) > max(1, sum(t.numel() > 0 for t in tensors.values())):
        raise _too_large(tensors)  # each repetition has a tensor of its own
    try:
        return lay_out(lambda: spec.build(device="meta"), 1000 + _CALLS_PER_TENSOR * len(tensors))
    except AdptnetError:
        raise
    except Exception:  # too many calls, or sizes beyond the range of torch
        raise _too_large(tensors) from None


def _too_large(tensors: dict[str, Tensor]) -> CheckpointError:
    stored = sum(tensor.numel() for tensor in tensors.values())
    return CheckpointError(
        f"weights and spec do not belong together. The spec describes a larger model than the {stored:,} numbers in "
        f"{len(tensors):,} tensors of the file."
    )


def _repetitions(node: Any) -> int:
    """Return how many times the innermost part of a spec is repeated."""
    if not isinstance(node, dict):
        return 1
    own = 1
    for name, without_tensors in (("depth", 1), ("num_layers", 1), ("heads", 64), ("steps", 64)):
        value = node.get(name)  # planes and heads of an identity map have no tensors
        own *= value if isinstance(value, int) and value > without_tensors else 1
    return own * max((_repetitions(value) for value in node.values()), default=1)


def _compare(layout: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Raise `CheckpointError` unless `tensors` match `layout` in names, shapes and dtypes (any floating dtype)."""
    if sum(t.numel() for t in layout.values()) > sum(t.numel() for t in tensors.values()):
        raise _too_large(tensors)
    faults = []
    for name in sorted(layout.keys() | tensors.keys()):
        own, found = layout.get(name), tensors.get(name)
        if own is None or found is None:
            faults.append(f"{name} is {'missing' if found is None else 'not part of the model'}")
        elif own.shape != found.shape:
            faults.append(f"{name} has shape {tuple(found.shape)}, where {tuple(own.shape)} is needed")
        elif found.dtype != own.dtype and not (found.is_floating_point() and own.is_floating_point()):
            faults.append(f"{name} is {found.dtype}, where {own.dtype} is needed")
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CheckpointError(f"weights and spec do not belong together: {'; '.join(faults[:3])}{more}.")


def _check_unchanged(model: nn.Module, spec: ModuleSpec) -> None:
    """Raise `CheckpointError` if the model does not have the tensors of its spec: `load` would reject its file."""
    weights: dict[str, Any] = model.state_dict()
    if any(isinstance(value, Tensor) and value.is_meta for value in weights.values()):
        raise CheckpointError("the model is on the meta device and has no weights. Build it with device='cpu'.")
    try:
        layout = lay_out(lambda: spec.build(device="meta"))
    except Exception as error:  # from a component of another package
        raise CheckpointError(
            f"{type(model).__name__} cannot be built on the meta device ({_shorten(error)}), where load compares it "
            "with its file. Build its parts without reading the values of tensors."
        ) from None
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    try:
        _compare(layout, tensors)
        if len(tensors) == len(weights):
            return
        fault = "it holds values that are not tensors"
    except CheckpointError as error:
        fault = str(error).rstrip(".")
    raise CheckpointError(
        f"{type(model).__name__} was changed after it was built, and load could not rebuild it: {fault}. "
        + _how_to_undo(model, layout)
    )


def _how_to_undo(model: nn.Module, layout: Iterable[str]) -> str:
    """Return the advice that restores the tensors of the spec."""
    known = set(layout)
    for where, module in model.named_modules():
        place = f"model.get_submodule({where!r})" if where else "model"
        prefix = f"{where}." if where else ""
        for name in [name.removesuffix("_orig") for name, _ in module.named_parameters(recurse=False)]:
            if hasattr(module, f"{name}_mask"):
                return f"Make the pruning permanent first: torch.nn.utils.prune.remove({place}, {name!r})."
            if name.endswith("_g") and hasattr(module, f"{name[:-2]}_v"):
                return f"Remove the weight norm first: torch.nn.utils.remove_weight_norm({place}, {name[:-2]!r})."
        if parametrize.is_parametrized(module):
            for name in module.parametrizations:
                if f"{prefix}parametrizations.{name}.original" not in known or len(module.parametrizations[name]) > 1:
                    return (
                        "Remove the parametrization first: "
                        f"torch.nn.utils.parametrize.remove_parametrizations({place}, {name!r})."
                    )
    return "Save its weights with safetensors.torch.save_model, or restore the parts that its spec describes."


def find_tied(model: nn.Module) -> list[list[str]]:
    """Return groups of names of parameters and buffers that share one tensor in memory.

    Args:
        model: Any module.

    Raises:
        CheckpointError: Two tensors overlap without being the same, which a file cannot express.
    """
    groups: dict[Any, list[str]] = {}
    storages: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or not tensor.numel():
            continue
        view: Any = id(tensor)
        if type(tensor) in (Tensor, nn.Parameter):  # others, such as DTensor, have no storage of their own
            where = tensor.untyped_storage().data_ptr()
            view = (where, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            if view not in groups:
                storages.setdefault(where, []).append((name, tensor))
        groups.setdefault(view, []).append(name)
    for sharing in storages.values():
        _check_disjoint(sharing)
    return [names for names in groups.values() if len(names) > 1]


def _check_disjoint(sharing: list[tuple[str, Tensor]]) -> None:
    """Raise `CheckpointError` if two views of one storage overlap."""
    if len(sharing) < 2:
        return
    owners = torch.full(
        (sharing[0][1].untyped_storage().nbytes(),), -1, dtype=torch.int32
    )  # index of the view that owns each byte
    for number, (name, tensor) in enumerate(sharing):
        width = tensor.element_size()
        shape = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        strides = [stride * width for stride in tensor.stride()]
        own = owners.as_strided((*shape, width), (*strides, 1), tensor.storage_offset() * width)
        if own.max() >= 0:
            raise CheckpointError(
                f"{sharing[int(own.max())][0]} and {name} overlap in memory without being the same tensor, which a "
                "file cannot express. Tie them whole, or separate them: nn.Parameter(tensor.detach().clone())."
            )
        own.fill_(number)


def _check_tied(tied: Any, tensors: dict[str, Tensor]) -> Tied:
    """Return the groups of tied names; raise `CheckpointError` if their tensors are missing or not equal."""
    groups: list[list[str]] = []
    for names in tied if isinstance(tied, list) else [None]:
        known = [name for group in groups for name in group]
        if not isinstance(names, list) or len(names) < 2 or not all(isinstance(name, str) for name in names):
            raise CheckpointError('its "tied" is not a list of groups of names.')
        if not tensors.keys() >= set(names) or len({*known, *names}) < len(known) + len(names):
            raise CheckpointError('its "tied" names tensors that are missing, or one of them twice.')
        groups.append(names)
    for first, *others in groups:
        for other in others:
            one, two = tensors[first], tensors[other]
            same = one.dtype == two.dtype and one.shape == two.shape
            if not same or not torch.equal(torch.from_numpy(_bytes(one)), torch.from_numpy(_bytes(two))):
                raise CheckpointError(f"{first} and {other} are tied but differ.")
    return groups


def _tie(model: nn.Module, tied: Tied) -> None:
    """Make each group of names share one tensor again."""
    for names in tied:
        owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
        shared = getattr(*owners[0])
        for module, name in owners[1:]:
            if isinstance(getattr(module, name), nn.Parameter) == isinstance(shared, nn.Parameter):
                setattr(module, name, shared)
            else:  # a buffer that shares memory with a parameter
                getattr(module, name).data = shared.data


def _shorten(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
