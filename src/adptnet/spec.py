"""Specs: descriptions of models without tensors.

A spec is a frozen dataclass marked with `@spec`. It can be printed, compared, written as JSON and read back; its method
`build` returns the `nn.Module`. Checkpoints and result rows store the spec. There is no other configuration system.
"""

import abc
import dataclasses
import difflib
import functools
import importlib.metadata
import json
import math
import numbers
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, TypeVar, Union, cast, dataclass_transform, get_args, get_origin

import torch
from torch import nn

from ._choices import choose
from ._io.untrusted import parse_json
from ._typing import Device, DType
from .errors import AdptnetError, IncompatibleError, SpecError

__all__ = [
    "MAX_DEPTH",
    "SPEC_VERSION",
    "ModuleSpec",
    "Spec",
    "check_fraction",
    "check_kind",
    "check_nonnegative",
    "check_positive",
    "check_scale",
    "check_seed",
    "check_size",
    "known_specs",
    "reject_unknown",
    "rename_fields",
    "reset_from_spec",
    "spec",
    "suggest_name",
]

SPEC_VERSION = 1
MAX_DEPTH = 32  # nesting of specs and tuples; the deepest model of the package has 8

_registry: dict[str, type["Spec"]] = {}


class Spec:
    """Base class of specs. Mark a concrete spec with `@spec`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    renamed_fields: ClassVar[Mapping[str, str]] = {}
    """Earlier names of fields and their present names. JSON with the earlier ones can still be read."""

    def to_json(self) -> str:
        """Return this spec as JSON text, with the version of the format."""
        return json.dumps({"adptnet_spec": SPEC_VERSION, "spec": _encode(self, type(self).__name__)}, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> "Spec":
        """Return the spec that `to_json` wrote.

        Args:
            text: The JSON text.

        Raises:
            SpecError: The text is not JSON, has unknown types or fields, values that do not fit, or a newer version.
        """
        try:
            document = parse_json(text)
        except (ValueError, TypeError) as error:
            raise SpecError(f"A spec is JSON as written by spec.to_json(); this text is not JSON: {error}.") from None
        if not isinstance(document, dict) or "adptnet_spec" not in document or "spec" not in document:
            raise SpecError(
                f'A spec document has the keys "adptnet_spec" and "spec"; got {_repr(document)}. '
                "Write one with spec.to_json()."
            )
        version = document["adptnet_spec"]
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise SpecError(f'"adptnet_spec" is the format\'s version, an integer >= 1; got {_repr(version)}.')
        if version > SPEC_VERSION:
            raise SpecError(
                f"This spec has version {_repr(version)}; this adptnet reads versions up to {SPEC_VERSION}. "
                "It was written by a newer adptnet: pip install --upgrade adptnet."
            )
        unknown = sorted(set(document) - {"adptnet_spec", "spec"})
        if unknown:
            raise SpecError(f"A spec document has no key {_repr(unknown[0])}; it has adptnet_spec and spec.")
        decoded = _decode(document["spec"], "spec")
        if not isinstance(decoded, Spec):
            raise SpecError(f'"spec" must be an object with a "type"; got {_repr(document["spec"])}.')
        return decoded


class ModuleSpec(Spec, abc.ABC):
    """Base class of specs that describe a whole module. `save` and `load` need such a spec."""

    @abc.abstractmethod
    def build(self, *, device: Device = None, dtype: DType = None) -> Any:
        """Build the module.

        Args:
            device: Device of the parameters.
            dtype: Dtype of the parameters.
        """


def reset_from_spec(module: nn.Module, spec: ModuleSpec) -> None:
    """Reinitialize parameters and buffers of `module` in place, as building it from `spec` does.

    Args:
        module: The module.
        spec: Its spec.

    Raises:
        IncompatibleError: The module has other parameters than its spec builds.
    """
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    fresh: nn.Module = spec.build(device=like.device, dtype=like.dtype)
    try:
        module.load_state_dict(fresh.state_dict())
    except RuntimeError as error:
        raise IncompatibleError(
            f"reset_parameters: this {type(module).__name__} has other parameters than its spec builds. Remove "
            f"parametrizations, pruning and adapters first, or build it anew: module.spec.build(). {error}"
        ) from None
    for part in module.modules():
        if getattr(part, "spec", spec) is None:  # a layer around a cell that no spec describes
            cast(Any, part).reset_parameters()


def reject_unknown(owner: str, given: Iterable[str], known: Iterable[str], **renamed: str) -> None:
    """Raise `SpecError` for the first argument in `given`, if any, and suggest the right name.

    Args:
        owner: The name of the function, for the message.
        given: Names of unknown arguments.
        known: Names of all arguments.
        renamed: The right name of arguments that are called differently in similar functions.
    """
    for name in given:
        instead = f" Pass {renamed[name]}=." if name in renamed else suggest_name(name, known)
        raise SpecError(f"{owner} has no argument {name!r}.{instead}")


_S = TypeVar("_S", bound=type[Spec])


@dataclass_transform(frozen_default=True)
def spec(cls: _S) -> _S:
    """Make `cls` a frozen dataclass and register it by name for `Spec.from_json`.

    Args:
        cls: The class, with annotated fields.

    Raises:
        SpecError: Another spec has the same name.
    """
    checks: Callable[[Any], None] | None = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is bool and not isinstance(value, bool):
                raise SpecError(f"{cls.__name__}({field.name}={_repr(value)}): must be True or False.")
            object.__setattr__(self, field.name, _choose_spec(cls.__name__, field, _normalize(value)))
        if checks is not None:
            try:
                checks(self)
            except AdptnetError:
                raise
            except Exception:  # a check failed on a value of the wrong type: report the type instead
                _check_types(self)
                raise
        _check_types(self)

    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
    made = cast(_S, dataclasses.dataclass(frozen=True)(cls))
    known = _registry.get(made.__name__)
    if known is not None and (known.__module__, known.__qualname__) != (made.__module__, made.__qualname__):
        raise SpecError(
            f"Two specs are called {made.__name__}: {known.__module__}.{known.__qualname__} and "
            f"{made.__module__}.{made.__qualname__}. Rename one; JSON finds a spec by its name."
        )
    _registry[made.__name__] = made
    return made


def known_specs() -> dict[str, type[Spec]]:
    """Return every imported spec class by its name in JSON."""
    return dict(_registry)


def _normalize(value: Any) -> Any:
    """Convert numbers of other libraries to Python numbers, and lists to tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(_normalize(item) for item in value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, (bool, float, int)) else value


def _choose_spec(owner: str, field: dataclasses.Field[Any], value: Any) -> Any:
    """Return the spec that text names, in a field that holds a spec and no text; every other value as it is."""
    if not isinstance(value, str) or _fits(value, field.type):
        return value
    kinds = tuple(kind for kind in (field.type, *get_args(field.type)) if isinstance(kind, type) and kind is not Spec)
    kinds = tuple(kind for kind in kinds if issubclass(kind, Spec))
    choices = {name: kind for name, kind in _registry.items() if issubclass(kind, kinds)}
    return choose(value, choices, field.name, owner) if choices else value


def _check_types(made: Any) -> None:
    """Raise `SpecError` for the first field whose value does not fit its annotation."""
    for field in dataclasses.fields(made):
        value = getattr(made, field.name)
        if not _fits(value, field.type):
            expected = field.type.__name__ if isinstance(field.type, type) else str(field.type).replace("typing.", "")
            raise SpecError(f"{type(made).__name__}({field.name}={_repr(value)}): must be {expected}.")


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value fits an annotation: integers in 64 bits, floats finite; unknown annotations always fit."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in arguments)
    if origin is tuple and isinstance(value, tuple):
        if arguments[-1:] == (...,):
            arguments = arguments[:1] * len(value)
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    if kind is float:
        return _is_number(value)
    expected = origin or kind
    if expected in (bool, str, tuple, types.NoneType) or (isinstance(expected, type) and issubclass(expected, Spec)):
        return isinstance(value, expected)
    return True


def _check_depth(depth: int, where: str) -> None:
    if depth > MAX_DEPTH:
        raise SpecError(f"{_repr(where)}: specs are nested more than {MAX_DEPTH} deep. Remove some levels.")


def _encode(value: Any, where: str, depth: int = 1) -> Any:
    _check_depth(depth, where)
    if isinstance(value, Spec):
        fields = {
            f.name: _encode(getattr(value, f.name), f"{where}.{f.name}", depth + 1) for f in dataclasses.fields(value)
        }
        return {"type": type(value).__name__, **fields}
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if _is_number(value):
        return float(value)
    if isinstance(value, tuple):
        return [_encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise SpecError(
        f"{where} = {_repr(value)} cannot be stored in a spec; it holds specs, finite numbers, text, None and tuples."
    )


@functools.cache
def _import_specs() -> None:
    """Import the modules that installed packages list under the entry point `adptnet.specs`, once."""
    for entry in importlib.metadata.entry_points(group="adptnet.specs"):
        entry.load()


def rename_fields(value: Any) -> Any:
    """Return a JSON value in which renamed fields of specs have their present names.

    Args:
        value: Specs as `Spec.to_json` writes them, at any place in lists and dictionaries.
    """
    if isinstance(value, list):
        return [rename_fields(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = _registry.get(str(value.get("type")), Spec)
    return {kind.renamed_fields.get(name, name): rename_fields(item) for name, item in value.items()}


def _decode(value: Any, where: str, depth: int = 1) -> Any:
    _check_depth(depth, where)
    if isinstance(value, list):
        return tuple(_decode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value))
    if not isinstance(value, dict):
        return value
    name = value.get("type")
    if isinstance(name, str) and name not in _registry:
        _import_specs()
    if not isinstance(name, str) or name not in _registry:
        raise SpecError(
            f"{where} has the type {_repr(name)}, which is unknown here.{suggest_name(str(name), _registry)} If it is "
            "your own, import its module first; on the command line: adptnet --import MODULE COMMAND ..."
        )
    kind = _registry[name]
    renamed = {kind.renamed_fields.get(field, field): item for field, item in value.items()}
    if len(renamed) < len(value):
        twice = next(new for old, new in kind.renamed_fields.items() if old in value)
        raise SpecError(f"{where}: {name} has the field {_repr(twice)} twice, under its earlier name as well.")
    value = renamed
    known = [f.name for f in dataclasses.fields(kind)]
    for field in value:
        if field != "type" and field not in known:
            raise SpecError(f"{where}: {name} has no field {_repr(field)}.{suggest_name(field, known)}")
    fields = {key: _decode(item, f"{where}.{key}", depth + 1) for key, item in value.items() if key != "type"}
    try:
        return kind(**fields)
    except AdptnetError:
        raise
    except Exception as error:  # the text is untrusted: any failure is an error in the text
        raise SpecError(f"{where}: {name} cannot be made from {_repr(fields)}: {error}.") from None


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return a closing sentence for an error message: the name in `known` closest to `name`, or all names.

    Args:
        name: The unknown name.
        known: All valid names.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f" Perhaps you meant {close[0]!r}." if close else f" Known: {', '.join(names)}."


def _repr(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or infinite recursion
        text = f"a {type(value).__name__} too long to print"
    return text if len(text) <= 120 else text[:117] + "..."


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def check_positive(owner: object, **values: float) -> None:
    """Raise `SpecError` unless every value is a finite number above zero.

    Args:
        owner: The spec, for the message.
        values: Values by field name.
    """
    for name, value in values.items():
        if not _is_number(value) or value <= 0:
            raise SpecError(f"{type(owner).__name__}({name}={_repr(value)}): {name} must be a positive number.")


def check_nonnegative(owner: object, **values: float) -> None:
    """Raise `SpecError` unless every value is a finite number >= 0.

    Args:
        owner: The spec, for the message.
        values: Values by field name.
    """
    for name, value in values.items():
        if not _is_number(value) or value < 0:
            raise SpecError(f"{type(owner).__name__}({name}={_repr(value)}): {name} must be a finite number >= 0.")


def check_scale(owner: object, **values: float) -> None:
    """Raise `SpecError` unless every value is in [1e-15, 1e15], so that products do not overflow in float32.

    Args:
        owner: The spec, for the message.
        values: Values by field name.
    """
    check_positive(owner, **values)
    for name, value in values.items():
        if not 1e-15 <= value <= 1e15:
            raise SpecError(f"{type(owner).__name__}({name}={_repr(value)}): {name} must be between 1e-15 and 1e15.")


def check_seed(owner: object, **values: Any) -> None:
    """Raise `SpecError` unless every value is a valid seed: an integer in [0, 2**63).

    Args:
        owner: The spec, for the message.
        values: Values by field name.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise SpecError(f"{type(owner).__name__}({name}={_repr(value)}): {name} must be an integer >= 0.")


def check_fraction(owner: object, *, below: str, **values: float) -> None:
    """Raise `SpecError` unless every value is in [0, 1).

    Args:
        owner: The spec, for the message.
        below: Why 1 is excluded, for the message.
        values: Values by field name.
    """
    for name, value in values.items():
        if not _is_number(value) or not 0 <= value < 1:
            raise SpecError(f"{type(owner).__name__}({name}={_repr(value)}): {name} must be in [0, 1); {below}.")


def check_size(owner: object, **values: Any) -> None:
    """Raise `SpecError` unless every value is an integer in [1, 2**31).

    Args:
        owner: The spec, for the message.
        values: Values by field name.
    """
    for name, value in values.items():
        if not _is_number(value) or not isinstance(value, numbers.Integral) or not 1 <= int(value) < 2**31:
            raise SpecError(f"{type(owner).__name__}({name}={_repr(value)}): {name} must be an integer >= 1.")


def check_kind(owner: object, kind: type, example: str, **values: object) -> None:
    """Raise `SpecError` unless every value is an instance of `kind`.

    Args:
        owner: The spec, for the message.
        kind: The required class.
        example: What to pass, for the message.
        values: Values by field name.
    """
    for name, value in values.items():
        if not isinstance(value, kind):
            hint = f"{value.__name__}()" if isinstance(value, type) and issubclass(value, kind) else example
            raise SpecError(
                f"{type(owner).__name__}({name}={_repr(value)}): {name} must be a {kind.__name__}. Pass {name}={hint}."
            )
