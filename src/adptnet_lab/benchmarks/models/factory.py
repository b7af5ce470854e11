"""A user's model: find the function that makes it, call it, and read logits from whatever it returns."""

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adptnet.errors import InputError
from adptnet.nn.model import evaluation_mode
from adptnet.spec import suggest_name
from adptnet_lab._own_objects import import_module

__all__ = ["LogitsModel", "ModelSource", "call_factory", "check_causal", "find_factory", "make_fingerprint"]

_ALIASES = {
    "vocab_size": "vocabulary",
    "num_tokens": "vocabulary",
    "num_classes": "output_size",
    "max_length": "length",
}
_FACTORS_OF_ROUNDING = 1e3  # a causal model differs by rounding only where a later token changes


class ModelSource(NamedTuple):
    """A function that makes a model, and where it was found.

    Attributes:
        name: Name of the model in rows and tables.
        make: The function.
        file: The file with its code; None if there is none.
    """

    name: str
    make: Callable[..., Any]
    file: Path | None


def find_factory(text: str) -> ModelSource:
    """Return the function called `text`: "module:make_model", or "path/to/file.py:make_model".

    Modules are looked for in the current folder first.

    Args:
        text: The module and the name of a function or class in it.

    Raises:
        InputError: There is no such module or function.
    """
    module_name, colon, name = text.rpartition(":")
    if not colon or not module_name or not name:
        raise InputError(
            f"{text!r} names no function that makes a model. Write module:make_model or file.py:make_model."
        )
    module = _import_module(module_name)
    make: Any = module
    for part in name.split("."):
        if not hasattr(make, part):
            raise InputError(
                f"{module_name} has no {name!r}.{suggest_name(part, [n for n in dir(make) if n[0] != '_'])}"
            )
        make = getattr(make, part)
    if not callable(make):
        raise InputError(
            f"{text} is a {type(make).__name__}. Pass a function that takes a vocabulary and returns a model."
        )
    if isinstance(make, nn.Module):
        raise InputError(
            f"{text} is a model. Pass a function that returns a new one: lambda vocabulary: Model(vocabulary)."
        )
    return ModelSource(text, make, Path(module.__file__) if module.__file__ else None)


def _import_module(name: str) -> ModuleType:
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise InputError(f"{name}: there is no such file.")
        module = ModuleType(path.stem)
        module.__file__ = str(path)
        sys.modules.setdefault(path.stem, module)  # so that its dataclasses find their module
        # Without cached bytecode, which is outdated if the file changed within a second.
        exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
        return module
    module = import_module(name)
    assert isinstance(module, ModuleType)
    return module


def call_factory(source: ModelSource, **sizes: int) -> "LogitsModel":
    """Return a model that `source` makes.

    The function receives those of `sizes` that it has parameters for, by their names (`vocab_size`, `num_tokens`,
    `num_classes` and `max_length` are understood too). If its first parameter has another name, that is the vocabulary.

    Args:
        source: The function.
        **sizes: `vocabulary`, `output_size`, `length` (the longest sequence of the test) and `parameters` (the count
            of the known models).

    Raises:
        InputError: The function requires something else, or does not return a callable.
    """
    try:
        parameters = inspect.signature(source.make).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        parameters = inspect.signature(lambda vocabulary: None).parameters
    positional: list[int] = []
    named: dict[str, int] = {}
    for index, (name, parameter) in enumerate(parameters.items()):
        meaning = _ALIASES.get(name, name)
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            named = {**{key: value for key, value in sizes.items() if key not in parameters}, **named}
        elif meaning in sizes and parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(sizes[meaning])
        elif meaning in sizes:
            named[name] = sizes[meaning]
        elif index == 0 and parameter.default is parameter.empty and parameter.kind is not parameter.KEYWORD_ONLY:
            positional.append(sizes["vocabulary"])
        elif parameter.default is parameter.empty:
            raise InputError(
                f"{source.name} requires {name!r}. It can have the parameters {', '.join(sizes)}; "
                f"give {name!r} a default."
            )
    model = source.make(*positional, **named)
    if not callable(model):
        raise InputError(f"{source.name} returned a {type(model).__name__}. Return a module from token ids to logits.")
    return LogitsModel(model, source.name, sizes["output_size"])


class LogitsModel(nn.Module):
    """A callable from ids (batch, time) to logits (batch, time, outputs), in the form that the training loop calls.

    Args:
        model: A module, or any other callable; its parameters are trained if it has a method `parameters`. It may
            return logits, a tuple or list that begins with them, or an object or mapping with `logits`.
        name: Name of the model, for errors.
        output_size: Number of outputs.
    """

    def __init__(self, model: Callable[[Tensor], Any], name: str, output_size: int):
        super().__init__()
        self.name, self.output_size = name, output_size
        if isinstance(model, nn.Module):
            self.model = model
        else:
            self.call = model  # torch registers modules only
            own = getattr(model, "parameters", None)
            self.own = nn.ParameterList(own() if callable(own) else [])

    @property
    def has_parameters(self) -> bool:
        """Whether there is anything to train."""
        return any(parameter.requires_grad for parameter in self.parameters())

    def forward(self, inputs: Tensor, state: Any = None, *, lengths: Tensor | None = None) -> tuple[Tensor, tuple[()]]:
        """Return the logits, and an empty state. `state` and `lengths` are ignored: models are causal.

        Args:
            inputs: Token ids, (batch, time).
            state: Not used.
            lengths: Not used.

        Raises:
            InputError: The result holds no logits of the expected shape.
        """
        result = self.model(inputs) if hasattr(self, "model") else self.call(inputs)
        logits = _find_logits(result)
        expected = (*inputs.shape, self.output_size)
        if logits is None or tuple(logits.shape) != expected:
            got = tuple(logits.shape) if logits is not None else type(result).__name__
            raise InputError(f"{self.name}: ids {tuple(inputs.shape)} need logits of shape {expected}; got {got}.")
        return logits, ()


def _find_logits(result: Any) -> Tensor | None:
    if isinstance(result, Mapping):
        result = result.get("logits")
    elif not isinstance(result, Tensor):
        result = getattr(result, "logits", result)
    if isinstance(result, (tuple, list)) and result:
        result = result[0]
    return result if isinstance(result, Tensor) and result.is_floating_point() else None


@torch.no_grad()
def check_causal(model: LogitsModel, vocabulary: int, length: int) -> None:
    """Raise `InputError` if the logits of a step depend on later tokens, some of which are targets in these suites.

    Args:
        model: The model.
        vocabulary: Number of tokens.
        length: Steps of the sequences that are tried.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (2, length), generator=generator)
    half = length // 2
    changed = ids.clone()
    changed[:, half:] = (ids[:, half:] + 1) % vocabulary
    with evaluation_mode(model):
        before, after = (model(each.to(device))[0][:, :half].double() for each in (ids, changed))
    scale = before.abs().max().clamp_min(1e-6)
    if ((before - after).abs().max() / scale).item() > _FACTORS_OF_ROUNDING * torch.finfo(torch.float32).eps:
        raise InputError(
            f"{model.name} is not causal: logits of the first {half} steps change when later tokens do. These suites "
            "have later tokens as targets. Mask the attention, or make the convolution causal."
        )


def make_fingerprint(source: ModelSource, model: nn.Module) -> str:
    """Return a text that differs if the code of the factory's file or the shapes of the parameters do.

    Args:
        source: The function that made the model.
        model: The model.
    """
    shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    code = source.file.read_bytes() if source.file and source.file.is_file() else b""
    return hashlib.sha256(repr(shapes).encode() + code).hexdigest()[:16]
